"""Every row of the table of derivative formulas, against PyTorch's own formulas and by derivatives.

The rows are run on PyTorch's own samples of its ops, in float64. One saved tensor at a time is
exchanged behind autograd's back, and what the gradients do then is compared with what the row says.
"""

import contextlib
import os
import warnings
from functools import cache, partial
from math import isnan, log2
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

import elbowroom as er
from elbowroom.plan.site import Formula
from elbowroom.runtime.formulas import FORMULAS, formula_of

SAMPLES = 8  # of an op
LARGEST = 20_000  # elements of a sample's tensors
# Rows that no op of PyTorch's samples reaches on a CPU. Each is the formula of another row, under
# the name of another library or form.
ELSEWHERE = {
    **dict.fromkeys(
        (
            *("ConvolutionOverrideableBackward0", "CudnnConvolutionBackward0"),
            *("CudnnConvolutionTransposeBackward0", "MkldnnConvolutionBackward0"),
            *("MiopenConvolutionBackward0", "SlowConv2DBackward0", "SlowConv3DBackward0"),
            *("ConvDepthwise2DBackward0", "ConvDepthwise3DBackward0", "ConvTbcBackward0"),
            *("SlowConvDilated2DBackward0", "SlowConvDilated3DBackward0"),
            *("SlowConvTranspose2DBackward0", "SlowConvTranspose3DBackward0"),
        ),
        "ConvolutionBackward0",
    ),
    **dict.fromkeys(("LinearBackward0", "MkldnnLinearBackward0"), "ConvolutionBackward0"),
    **dict.fromkeys(
        ("CudnnBatchNormBackward0", "MiopenBatchNormBackward0"), "NativeBatchNormBackward0"
    ),
    "NativeBatchNormLegitBackward1": "NativeBatchNormBackward0",
    **dict.fromkeys(("MaskedSoftmaxBackward0", "SparseSoftmaxBackward0"), "SoftmaxBackward0"),
    "FusedRmsNormBackward0": "NativeLayerNormBackward0",
    "GroupedMmBackward0": "MmBackward0",
    "NormBackward0": "NormBackward1",
    "NllLoss2DBackward0": "NllLossBackward0",
    "NativeDropoutBackward0": "WhereBackward0",
}


class Saved:
    """What autograd holds; `instead` is given to backward if it is set."""

    def __init__(self, x: Tensor) -> None:
        self.x, self.instead = x.detach(), None

    def restore(self) -> Tensor:
        return self.x if self.instead is None else self.instead


class Run:
    """One sample of an op: its gradients, with one saved tensor exchanged or none."""

    def __init__(self, run) -> None:
        with torch.autograd.graph.saved_tensors_hooks(Saved, Saved.restore):
            out = run()
        tensors = (x for x in tree_leaves(out) if isinstance(x, Tensor))
        self.outputs = [x for x in tensors if x.requires_grad and x.grad_fn is not None]
        nodes = list(self.nodes())
        self.inputs = list(
            {id(n.variable): n.variable for n in nodes if hasattr(n, "variable")}.values()
        )
        self.cotangents = [torch.randn_like(x) for x in self.outputs]

    def grads(self) -> list[Tensor]:
        made = torch.autograd.grad(
            self.outputs, self.inputs, self.cotangents, retain_graph=True, allow_unused=True
        )
        return [grad for grad in made if grad is not None]

    def with_(self, saved: Saved, instead: Tensor) -> list[Tensor]:
        saved.instead = instead
        try:
            return self.grads()
        finally:
            saved.instead = None

    def nodes(self):
        waiting, seen = [x.grad_fn for x in self.outputs], {}
        while waiting and len(seen) < 64:
            node = waiting.pop(0)
            if node is not None and id(node) not in seen:
                seen[id(node)] = node
                waiting += [below for below, _ in node.next_functions]
        return seen.values()

    def saved(self):
        """(node, its name, field, what it has saved there) of all nodes."""
        for node in self.nodes():
            for attribute in dir(node):
                if not attribute.startswith("_raw_saved_"):
                    continue
                raw = getattr(node, attribute)
                for one in raw if isinstance(raw, tuple | list) else (raw,):
                    held = getattr(one, "data", None)
                    if isinstance(held, Saved):
                        yield node, node.name(), attribute.removeprefix("_raw_saved_"), held


def _given(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def _scattered(reduction: str) -> Tensor:
    index = torch.tensor([0, 2, 0, 1])
    return _given(3).scatter_reduce(0, index, _given(4), reduction, include_self=False)


def _in_segments(reduction: str) -> Tensor:
    return torch.segment_reduce(_given(4), reduction, lengths=torch.tensor([1, 3]))


OURS = [  # forms of ops that PyTorch's samples leave out
    lambda: F.pad(_given(1, 2, 4, 4, 4), (1,) * 6, mode="reflect"),
    lambda: F.pad(_given(1, 2, 4, 4, 4), (1,) * 6, mode="replicate"),
    lambda: _given(5).scatter(0, torch.tensor([1, 3]), 2.0),
    lambda: _given(5).clamp_max(0.2),
    lambda: torch._weight_norm_interface(_given(4, 3), _given(4, 1)),
    lambda: torch.std_mean(_given(5)),
    lambda: torch.clamp(_given(5), torch.full((5,), -0.5).double(), torch.full((5,), 0.5).double()),
    lambda: F.celu(_given(5) * 1, inplace=True),
    lambda: F.elu(_given(5) * 1, inplace=True),
    lambda: F.elu(_given(5) * 1, alpha=0.5, inplace=True),
    lambda: F.leaky_relu(_given(5) * 1, inplace=True),
    lambda: F.rrelu(_given(5) * 1, training=True, inplace=True),
    lambda: F.threshold(_given(5) * 1, 0.1, 0.0, inplace=True),
    *(partial(_scattered, name) for name in ("sum", "mean", "amax", "amin", "prod")),
    *(partial(_in_segments, name) for name in ("sum", "mean", "max", "min", "prod")),
]


def samples_of(ops):
    for op in ops:
        if not op.supports_autograd or torch.float64 not in op.dtypes:
            continue
        taken = 0
        for sample in op.sample_inputs("cpu", torch.float64, requires_grad=True):
            tensors = tree_leaves((sample.input, sample.args, sample.kwargs))
            if sum(x.numel() for x in tensors if isinstance(x, Tensor)) > LARGEST:
                continue
            taken += 1
            if taken > SAMPLES:
                break
            yield op.name, partial(op.op, sample.input, *sample.args, **sample.kwargs)


def samples():
    # Here, so that only a process that runs these tests pays for the import.
    from torch.testing._internal import common_utils

    # References of signal processing, which nothing here calls, and the copies that each sampler
    # makes of all its settings take nine tenths of the import.
    with mock.patch.object(common_utils, "TEST_SCIPY", False):
        from torch.testing._internal.opinfo import core

        with mock.patch.object(core, "asdict", vars):
            from torch.testing._internal.common_methods_invocations import op_db

    torch.manual_seed(0)
    # Else each op looks for the name of the running test in the sources of all the stack, and each
    # seed notes the stack for devices that may be used later: nine tenths of the time.
    with (
        mock.patch.object(common_utils, "extract_test_fn", return_value=None),
        mock.patch.object(core, "extract_test_fn", return_value=None),
        mock.patch("traceback.format_stack", return_value=[]),
    ):
        yield from samples_of(op_db)
    for run in OURS:
        yield "ours", run


@cache
def runs():
    """{(node, field): [(run, saved, formula)]}, and {node: names of ops}."""
    found, ops = {}, {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for op, forward in samples():
            try:
                run = Run(forward)
            except (RuntimeError, TypeError, ValueError):  # samples that are there to fail
                continue
            for node, name, field, saved in run.saved():
                ops.setdefault(name, set()).add(op)
                formula = formula_of(node, name, field)
                key = name, field
                if len(found.setdefault(key, [])) < 12:
                    found[key].append((run, saved, formula))
    return found, ops


@pytest.fixture(scope="module", autouse=True)
def nothing_is_left_behind():
    yield
    runs.cache_clear()


def largest(grads: list[Tensor]) -> float:
    return max((float(g.abs().max()) for g in grads if g.numel()), default=0.0)


def differences(one: list[Tensor], other: list[Tensor]) -> float:
    return largest([a - b for a, b in zip(one, other, strict=True)])


def checkable():
    found, _ = runs()
    for (node, field), cases in sorted(found.items()):
        if node not in FORMULAS:
            continue
        for run, saved, formula in cases:
            given = {x.dtype for x in (saved.x, *run.inputs) if x.is_floating_point()}
            in_double = given == {torch.float64}
            if saved.x.numel() and run.inputs and run.outputs and in_double:
                yield node, field, run, saved, formula


def test_every_row_is_run_or_is_that_of_another_and_enough_ops_are_known():
    """In one test: each process that runs PyTorch's samples takes some seconds for them."""
    found, ops = runs()
    rows = {(node, field) for node, row in FORMULAS.items() for field in row}
    missing = {node for node, field in rows - found.keys() if node not in ELSEWHERE}
    never_saved = {  # in PyTorch's samples: the weight of a loss, a bound that is a tensor, ...
        node for node in missing if any((node, field) in found for field in FORMULAS[node])
    }
    assert missing - never_saved == set()
    known = {name for node, names in ops.items() if node in FORMULAS for name in names}
    assert len(known) >= 200


@pytest.mark.parametrize("node", ELSEWHERE)
def test_what_runs_elsewhere_reads_its_data_like_its_twin(node):
    """In the order of derivatives.yaml: data first, then weights and statistics."""
    ours, twin = list(FORMULAS[node].values()), list(FORMULAS[ELSEWHERE[node]].values())
    assert ours[0] is twin[0] or Formula.INDEX in (ours[0], twin[0])


def test_rows_name_what_pytorch_saves():
    """By derivatives.yaml itself, which torch ships."""
    import torchgen
    from torchgen.packaged.autograd.load_derivatives import load_derivatives

    packaged = Path(torchgen.__file__).parent / "packaged"
    infos, _ = load_derivatives(
        os.fspath(packaged / "autograd" / "derivatives.yaml"),
        os.fspath(packaged / "ATen" / "native" / "native_functions.yaml"),
        os.fspath(packaged / "ATen" / "native" / "tags.yaml"),
    )
    saved: dict[str, set[str]] = {}
    for each in infos.values():
        for info in each.values():
            if info.op is None:
                continue
            names = (one.nctype.name for one in (*info.all_saved_inputs, *info.all_saved_outputs))
            saved.setdefault(info.op, set()).update(str(getattr(n, "name", n)) for n in names)
    unknown = {node: row for node, row in FORMULAS.items() if node not in saved}
    assert unknown == {}
    for node, row in FORMULAS.items():
        assert set(row) <= saved[node], node


def test_shapes_are_read_without_a_value():
    checked = set()
    for node, field, run, saved, formula in checkable():
        if formula is not Formula.SHAPE or not saved.x.is_floating_point():
            continue
        blank = torch.zeros((), dtype=saved.x.dtype).expand(saved.x.shape)
        other = torch.full_like(saved.x, -3.0)
        for instead in (blank, other):
            for one, two in zip(run.grads(), run.with_(saved, instead), strict=True):
                assert torch.equal(one.nan_to_num(), two.nan_to_num()), (node, field)
        checked.add(node)
    assert len(checked) >= 20


# A norm's backward is a square in its input, in means over many elements.
NORMS = ("NativeBatchNorm", "NativeGroupNorm", "NativeLayerNorm", "BatchNormWithUpdate")


def test_sums_and_products_are_linear_in_what_is_saved():
    """B(x + e) + B(x + f) - B(x) = B(x + e + f)."""
    checked = set()
    for node, field, run, saved, formula in checkable():
        x = saved.x
        if formula not in (Formula.SUMMED, Formula.PRODUCT) or node.startswith(NORMS):
            continue
        if not x.is_floating_point():
            continue
        size = 1e-3 * (x.abs().mean() + 1e-3)
        e, f = size * torch.randn_like(x), size * torch.randn_like(x)
        at_x, at_e = run.grads(), run.with_(saved, x + e)
        at_f, at_both = run.with_(saved, x + f), run.with_(saved, x + e + f)
        bent = largest(
            [a + b - c - d for a, b, c, d in zip(at_e, at_f, at_x, at_both, strict=True)]
        )
        moved = differences(at_e, at_x)
        assert bent <= 1e-6 * moved + 1e-12 * (1 + largest(at_x)), (node, field)
        if moved:
            checked.add(node)
    assert len(checked) >= 30


def test_relative_formulas_are_powers_of_what_is_saved():
    """B(c x) = c^k B(x) with a small k: an error that is a share of x is one of the gradient."""
    checked, c = set(), 1 + 2**-9
    for node, field, run, saved, formula in checkable():
        alone = sum("AccumulateGrad" not in one.name() for one in run.nodes()) == 1
        if formula is not Formula.RELATIVE or not alone:  # gradients of several nodes are added up
            continue
        for one, two in zip(run.with_(saved, c * saved.x), run.grads(), strict=True):
            there = two.isfinite() & (two != 0) & one.isfinite()
            powers = (one[there] / two[there]).abs().log2() / log2(c)
            assert float(powers.abs().max() if powers.numel() else 0) <= 9.01, (node, field)
            if powers.numel():
                assert float(powers.max() - powers.min()) <= 1e-6, (node, field)
                checked.add((node, field) if float(powers.abs().max()) > 0.1 else ())
    assert len(checked - {()}) >= 8


def test_curved_formulas_are_smooth_and_bounded():
    """Half the error has half the effect, and no error of a tenth has one beyond all bounds."""
    curved = (Formula.CURVED, Formula.PROBABILITY, Formula.LOG_PROBABILITY)
    checked = set()
    for node, field, run, saved, formula in checkable():
        if formula not in curved:
            continue
        x = saved.x
        e = 1e-6 * torch.randn_like(x)
        at_x = run.grads()
        whole = [a - b for a, b in zip(run.with_(saved, x + e), at_x, strict=True)]
        half = [a - b for a, b in zip(run.with_(saved, x + e / 2), at_x, strict=True)]
        bent = differences([2 * h for h in half], whole)
        assert bent <= 0.02 * largest(whole) + 1e-12 * (1 + largest(at_x)), (node, field)
        rough = run.with_(saved, x + 0.1 * torch.randn_like(x))
        assert differences(rough, at_x) <= 50 * (largest(run.cotangents) + largest(at_x)), node
        if largest(whole):
            checked.add(node)
    assert len(checked) >= 18


def test_what_selects_is_an_integer():
    for node, field, _, saved, formula in checkable():
        if formula is Formula.INDEX:
            assert not saved.x.is_floating_point(), (node, field)


def test_what_is_compared_jumps_or_stays():
    """No small error changes a gradient by a little: it changes nothing, or too much.

    Those of `both` have a part of either kind.
    """
    both = ("PreluKernel", "RreluWithNoise", "Fmod", "Remainder", "GridSampler", "MultiMargin")
    checked = set()
    for node, field, run, saved, formula in checkable():
        if (
            formula is not Formula.COMPARED
            or node.startswith(both)
            or not saved.x.dtype.is_floating_point
        ):
            continue
        x, at_x = saved.x, run.grads()
        e = 1e-7 * torch.randn_like(x)
        moved = differences(run.with_(saved, x + e), at_x)
        halved = differences(run.with_(saved, x + e / 2), at_x)
        assert not moved or isnan(moved) or halved > 0.75 * moved, (node, field)
        checked.add(node)
    assert len(checked) >= 15


def test_a_wrong_row_would_be_found():
    """The negative control: of a division neither side is linear where both are read."""
    found, _ = runs()
    bent = []
    for run, saved, _ in found["DivBackward0", "other"]:
        if not saved.x.is_floating_point() or not saved.x.numel():
            continue
        x = saved.x
        e = 1e-3 * torch.randn_like(x)
        steps = [run.with_(saved, x + e), run.with_(saved, x - e), run.grads()]
        middle = [(a + b) / 2 - c for a, b, c in zip(*steps, strict=True)]
        bent.append(largest(middle) / max(differences(steps[0], steps[2]), 1e-30))
    assert max(bent) > 1e-5


@pytest.mark.parametrize(
    ("exponent", "formula"),
    [
        (2, Formula.PRODUCT),
        (2.0, Formula.PRODUCT),
        (1, Formula.PRODUCT),
        (3, Formula.CURVED),
        (10, Formula.CURVED),
        (0.5, Formula.RELATIVE),
        (-1, Formula.RELATIVE),
        (0, Formula.RELATIVE),
        (1.5, Formula.RELATIVE),
        (9.5, Formula.SINGULAR),  # a small error of the value is a large one of its power
        (-7.5, Formula.SINGULAR),
        (float("inf"), Formula.SINGULAR),
        (float("nan"), Formula.SINGULAR),
    ],
)
def test_a_power_is_read_by_its_exponent(exponent, formula):
    node = (torch.ones(2, requires_grad=True) ** exponent).grad_fn
    if node.name() == "PowBackward0":
        assert formula_of(node, node.name(), "self") is formula


@pytest.mark.parametrize(
    ("reduction", "formula"),
    [
        ("sum", Formula.SHAPE),
        ("mean", Formula.SHAPE),
        ("amax", Formula.COMPARED),
        ("amin", Formula.COMPARED),
        ("prod", Formula.SINGULAR),
    ],
)
def test_what_is_scattered_is_read_by_its_reduction(reduction, formula):
    node = _scattered(reduction).grad_fn
    assert formula_of(node, node.name(), "src") is formula
    assert formula_of(node, node.name(), "index") is Formula.INDEX


def test_a_sine_of_many_turns_has_the_gradient_that_it_has():
    """The layers of a coordinate network, sin(30 x): 16 levels over its range are turns apart."""
    torch.manual_seed(0)
    first, last = nn.Linear(2, 96), nn.Linear(96, 1)
    x = torch.rand(4096, 2)

    def gradients(context):
        with context:
            loss = last(torch.sin(30 * first(x)) + torch.cos(30 * first(x))).square().mean()
        return torch.autograd.grad(loss, [*first.parameters()])

    plain = gradients(contextlib.nullcontext())
    coded = gradients(er.saving("dither", levels=16))
    off = sum((a - b).square().sum() for a, b in zip(coded, plain, strict=True))
    assert off <= 0.01 * sum(a.square().sum() for a in plain)
