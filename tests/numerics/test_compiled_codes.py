"""Codes inside a compiled graph: what may have them, what they add, and that they repeat."""

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table

from elbowroom.codecs import BitMask, Cast, Dither, Division, Facts, Group, registry
from elbowroom.compiled import Regions, Settings, ops
from elbowroom.compiled.codable import fine, ladder
from elbowroom.compiled.joint import Joint, Step
from elbowroom.compiled.lossy import _fewer, _quiet
from elbowroom.compiled.partition import Decision, Partitioner, listening
from elbowroom.compiled.readers import Extent, reading_of
from elbowroom.compiled.rewrite import CodedValue
from elbowroom.kernels import reference
from elbowroom.units import show_percent
from uncompiled import without_codegen


def convolutions(p: float = 0.0) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for i in range(6):
        layers += [nn.Conv2d(8 if i else 3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()]
        layers += [nn.Dropout(p)] if p else []
    return nn.Sequential(*layers), torch.randn(16, 3, 16, 16)


def run(
    room: int | None,
    exact: bool | None,
    p: float = 0.0,
    steps: int = 1,
    make=convolutions,
    sizes: tuple[int, ...] = (),
    dynamic: bool | None = None,
    **settings,
):
    """Gradients of a few steps, and what was decided.

    sizes: of batch and maps of more steps, after those
    """

    def as_written(gm, inputs):
        return torch._functorch.aot_autograd.make_boxed_func(gm.forward)

    torch._dynamo.reset()
    model, x = make(p)
    backend = aot_autograd(
        fw_compiler=as_written,
        bw_compiler=as_written,
        partition_fn=Partitioner(room, False, exact, **settings),
        decompositions=select_decomp_table(),
    )
    compiled = torch.compile(model, backend=backend, dynamic=dynamic)
    found: list[Decision] = []
    gradients = []
    with listening(found.append):
        for given in [x] * steps + [x[:n, :, :n, :n].contiguous() for n in sizes]:
            model.zero_grad()
            torch.manual_seed(1)
            compiled(given).square().mean().backward()
            gradients.append(torch.cat([g.grad.flatten() for g in model.parameters()]))
    return gradients, found[0]


def error(got: Tensor, exact: Tensor) -> float:
    return float((got - exact).square().sum() / exact.square().sum())


@pytest.fixture(scope="module")
def plain():
    (gradient,), decision = run(None, True)
    return gradient, decision


def lossy(plain, **given):
    _, decision = plain
    return run(int(0.5 * decision.peak_nbytes), None, **given)


def test_codes_reach_a_budget_that_exact_actions_cannot(plain) -> None:
    gradient, decision = plain
    room = int(0.5 * decision.peak_nbytes)
    with pytest.raises(Exception, match="this compiled region needs at least"):
        run(room, True)
    (got,), coded = run(room, None)
    assert coded.peak_nbytes <= room
    assert coded.saved_nbytes < decision.saved_nbytes / 3
    assert 0 < error(got, gradient) < 1e-2


def test_the_noise_is_another_one_each_step_and_averages_out(plain) -> None:
    gradient, _ = plain
    got, _ = lossy(plain, steps=16)
    assert not torch.equal(got[0], got[1])
    each = sum(error(one, gradient) for one in got) / len(got)
    assert error(torch.stack(got).mean(dim=0), gradient) < each / 8  # 1/16 for no bias at all


def test_the_same_draws_give_the_same_bits_and_leave_the_users_generator_alone(plain) -> None:
    ops.draws.restart(5)
    (first,), _ = lossy(plain)
    ops.draws.restart(5)
    (again,), _ = lossy(plain)
    assert torch.equal(first, again)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    torch.ops.elbowroom_graph.draw(torch.device("cpu"))
    assert torch.equal(torch.get_rng_state(), before)


def test_each_process_draws_noise_of_its_own(monkeypatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    seen = []
    for rank in range(4):
        monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
        with ops.draws.started_at(5):
            seen += [ops.draws.next() for _ in range(3)]
    assert len(set(seen)) == len(seen)
    monkeypatch.undo()
    with ops.draws.started_at(5):
        assert [ops.draws.next() for _ in range(3)] == seen[:3]


def test_a_device_that_counts_by_itself_draws_what_the_host_would() -> None:
    device, drawn = torch.device("cpu"), ops._Draws()
    for base in (0, 5, 2**63 - 1, -7):
        drawn.restart(base)
        expected = [drawn.next() for _ in range(3)]
        drawn.restart(base)
        assert [int(drawn.next_on(device)) for _ in range(3)] == expected
        with drawn.started_at(11):
            inside = [int(drawn.next_on(device)) for _ in range(2)]
        with drawn.started_at(11):
            assert [drawn.next() for _ in range(2)] == inside
        assert int(drawn.next_on(device)) not in expected  # the fourth


def test_a_graph_that_is_launched_again_draws_again_without_the_host() -> None:
    """Counts what a CUDA graph would launch: ops of PyTorch's, whose numbers never change."""
    drawn, device = ops._Draws(), torch.device("cpu")
    drawn.prepare(device)
    launches = []
    for _ in range(2):
        with Launches() as seen:
            drawn.next_on(device)
        launches.append(seen.ops)
    assert launches[0] == launches[1]


class Launches(torch.utils._python_dispatch.TorchDispatchMode):
    """Writes down each op with its arguments that are no tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[tuple] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops.append((func, [a for a in args if not isinstance(a, Tensor)], kwargs))
        return func(*args, **(kwargs or {}))


def test_of_each_width_the_registered_codec_of_least_error_is_weighed(monkeypatch) -> None:
    assert ladder() == (Dither(levels=256), Dither(levels=16), Dither(levels=4))
    assert fine(Dither(levels=4)) == Dither(levels=256)
    assert fine(Group(bits=2)) == Group(bits=8)
    assert fine(Group(bits=8, group_size=32)) == Group(bits=8, group_size=32)
    assert fine(Cast("fp8_e5m2")) == Cast("bf16")
    only = {"group": Group, "division": Division, "cast": Cast}
    monkeypatch.setattr(registry, "_registered", only)
    assert [one.id for one in ladder()] == ["division", "division", "division"]
    assert all(one.rounding == "dither" for one in ladder())


def test_a_plan_takes_the_codecs_that_it_is_given(plain) -> None:
    gradient, _ = plain
    for menu in (("group, bits=4", "group, bits=8"), ("cast, to=fp8_e4m3",), ("division, bits=4",)):
        (got,), decision = lossy(plain, menu=menu)
        assert decision.is_lossy
        assert 0 < error(got, gradient) < 2 * decision.noise


def test_masks_of_dropout_are_bits_and_add_nothing() -> None:
    (expected,), decision = run(None, True, p=0.3)
    (got,), tight = run(int(0.72 * decision.peak_nbytes), True, p=0.3)
    assert tight.saved_nbytes < decision.saved_nbytes
    # A mask comes back in the layout that Inductor will choose, and oneDNN sums in another order.
    assert error(got, expected) < 1e-12


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_ops_of_graphs_have_true_fakes_and_are_those_of_the_kernels(layout) -> None:
    x = torch.randn(2, 8, 5, 7).contiguous(memory_format=layout)
    order = [0, 2, 3, 1]
    seed, coding = torch.tensor([3]), ops.coding_name(Dither(levels=16))
    torch.library.opcheck(ops.ENCODE, (x, order, coding, seed, 2))
    codes = ops.ENCODE(x, order, coding, seed, 2)
    flat, own = x.permute(order).reshape(-1), ops.seed_of(3, 2)
    expected = reference.dither_quantize(flat, own, 16, 64)
    assert all(torch.equal(a, b) for a, b in zip(codes, expected, strict=True))
    given = (codes, coding, seed, 2, list(x.shape), order, x.dtype)
    torch.library.opcheck(ops.DECODE, given)
    out = ops.DECODE(*given)
    restored = torch.empty_like(flat)
    reference.dither_dequantize(*expected, own, 16, 64, restored)
    assert out.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(out.permute(order).reshape(-1), restored)
    mask, bits_of = x > 0, (ops.coding_name(BitMask(), Facts(value=1.0)), None, 0)
    torch.library.opcheck(ops.ENCODE, (mask, order, *bits_of))
    (bits,) = ops.ENCODE(mask, order, *bits_of)
    as_bytes = mask.to(torch.uint8)
    assert torch.equal(ops.ENCODE(as_bytes, order, *bits_of)[0], bits)
    for kept in (mask, as_bytes):
        given = ([bits], *bits_of, list(x.shape), order, kept.dtype)
        torch.library.opcheck(ops.DECODE, given)
        assert torch.equal(ops.DECODE(*given), kept)


def reading(f, x: Tensor):
    """What the graph of f(x, g) does with x, where g stands for a gradient."""
    g = torch.randn_like(f(x, torch.ones(())).detach())
    gm = fx.experimental.proxy_tensor.make_fx(f)(x, g)
    given, gradient = gm.graph.find_nodes(op="placeholder")
    after = set(gm.graph.nodes)
    gradients = {gradient}
    for node in gm.graph.nodes:
        if gradients & set(node.all_input_nodes):
            gradients.add(node)
    return reading_of(given, after, gradients)


def test_what_backward_does_with_a_value_decides_whether_it_tolerates_an_error() -> None:
    x = torch.rand(8, 8) + 1
    assert reading(lambda x, g: x * g, x).use is Extent.LINEAR
    assert reading(lambda x, g: torch.exp(x) * g, x).use is Extent.CURVED
    assert reading(lambda x, g: g / x, x).use is Extent.EXACT
    assert reading(lambda x, g: torch.log(x) * g, x).use is Extent.EXACT
    assert reading(lambda x, g: g.cumsum(0) * x.sort(0).values, x).use is Extent.EXACT
    masked = reading(lambda x, g: torch.where(x <= 1.5, 0, g), x)
    assert masked.use is Extent.LINEAR
    assert len(masked.compared) == 1


def test_a_value_that_is_multiplied_with_itself_has_fine_codes() -> None:
    x = torch.randn(4, 4)
    assert reading(lambda x, g: (x * x) * g, x).use is Extent.CURVED
    assert reading(lambda x, g: ((g * x) + 1) * x, x).use is Extent.CURVED
    assert reading(lambda x, g: (g.expand(4, 4) @ x.t()) @ x, x).use is Extent.CURVED
    assert reading(lambda x, g: x @ x.t() @ g.expand(4, 4), x).use is Extent.CURVED
    # Of what is summed between, one term in many has the error of the same element.
    assert reading(lambda x, g: (g * x).sum(-1, keepdim=True) * x, x).use is Extent.LINEAR
    assert reading(lambda x, g: x.t() @ (g * x), x).use is Extent.LINEAR
    assert reading(lambda x, g: g * x + x, x).use is Extent.LINEAR


def test_the_gradient_of_a_cube_is_right_on_average() -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(64, 64), torch.randn(256, 64)

    def loss(x: Tensor) -> Tensor:
        y = layer(x)
        return (y * y * y).mean()

    expected = torch.autograd.grad(loss(x), layer.weight)[0]
    partitioner = Partitioner(None, codes="dither, 4 levels", min_nbytes=1024)
    torch._dynamo.reset()
    compiled = torch.compile(loss, backend=without_codegen(partitioner))
    each = torch.stack([torch.autograd.grad(compiled(x), layer.weight)[0] for _ in range(40)])
    # Along the gradient, where errors that are independent leave next to nothing.
    assert abs((each.mean(0) * expected).sum() / expected.square().sum() - 1) < 0.02


def test_zeros_of_relu_in_a_product_of_batches_stay_exact() -> None:
    """Attention without a softmax divides by such a product."""
    x = torch.randn(2, 8, 8)
    assert reading(lambda x, g: x.bmm(g.expand(2, 8, 8)), x).use is Extent.LINEAR
    assert reading(lambda x, g: x.relu().mT.clone().bmm(g.expand(2, 8, 8)), x).use is Extent.EXACT
    assert reading(lambda x, g: (x.relu() * 2.0).bmm(g.expand(2, 8, 8)), x).use is Extent.EXACT
    assert (
        reading(lambda x, g: (torch.full((), 2.0) * x.relu()).bmm(g.expand(2, 8, 8)), x).use
        is Extent.EXACT
    )
    assert reading(lambda x, g: (x.relu() + 1.0).bmm(g.expand(2, 8, 8)), x).use is Extent.LINEAR
    assert reading(lambda x, g: x[0].relu().mm(g.expand(8, 8)), x).use is Extent.LINEAR


@pytest.mark.parametrize(("has_zeros", "use"), [(True, Extent.EXACT), (False, Extent.LINEAR)])
def test_a_product_that_is_multiplied_with_zeros_of_relu_stays_exact(
    has_zeros: bool, use: Extent
) -> None:
    """Attention without a softmax divides one part of that by another: no error of it cancels."""

    def attend(x: Tensor, g: Tensor) -> Tensor:
        scores = x.bmm(x)
        query = x.relu() if has_zeros else x + 1
        return scores.mT.clone().bmm(query) + scores.bmm(g)

    gm = fx.experimental.proxy_tensor.make_fx(attend)(torch.randn(2, 8, 8), torch.randn(2, 8, 8))
    scores = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.bmm.default)[0]
    _, gradient = gm.graph.find_nodes(op="placeholder")
    after = [node for node in gm.graph.nodes if gradient in node.all_input_nodes]
    assert reading_of(scores, after, after).use is use


def test_attentions_output_may_be_coded_finely_and_its_query_may_not() -> None:
    name = "_scaled_dot_product_flash_attention_for_cpu"
    attend = getattr(torch.ops.aten, name)
    backward = getattr(torch.ops.aten, name + "_backward")
    q = torch.randn(1, 2, 8, 4)
    other = torch.randn(1, 2, 8, 4)
    out, logsumexp = attend(other, other, other)

    def as_output(x: Tensor, g: Tensor) -> Tensor:
        return backward(g.expand(out.shape), other, other, other, x, logsumexp, 0.0, False)[0]

    def as_both(x: Tensor, g: Tensor) -> Tensor:
        return backward(g.expand(out.shape), x, other, other, x, logsumexp, 0.0, False)[0]

    assert reading(as_output, out).use is Extent.CURVED
    assert reading(as_both, q).use is Extent.EXACT


def test_views_of_inputs_have_no_code() -> None:
    """A code added memory to that of the input, which is the caller's, and noise."""

    def layer(_: float) -> tuple[nn.Module, Tensor]:
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(0, 1), nn.Linear(64, 8)), torch.randn(8, 64, 64)

    (exact,), plain = run(None, True, make=layer)
    (got,), coded = run(None, True, make=layer, codes="dither, 16 levels", min_nbytes=0)
    assert not coded.is_lossy
    assert coded.saved_nbytes == plain.saved_nbytes
    assert torch.equal(got, exact)


def test_codes_that_the_room_does_not_need_are_left_out_and_masks_are_not(plain) -> None:
    _, decision = plain
    seen = []

    def look(
        joint: Joint, base: Step, coded: list[CodedValue], room_nbytes: int, held_nbytes: float
    ) -> list[CodedValue]:
        kept = _fewer(joint, base, coded, room_nbytes, held_nbytes)
        with_room = _fewer(joint, base, coded, 2**40)
        seen.append((coded, kept, with_room))
        return kept

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("elbowroom.compiled.lossy._fewer", look)
        run(int(0.46 * decision.peak_nbytes), None)
    ((coded, kept, with_room),) = seen
    masks = {one for one in coded if one.codec.lossless}
    assert masks
    assert masks < set(kept) <= set(coded)
    assert masks < set(with_room)
    assert len(with_room) == len(masks) + 1


def test_what_backward_does_with_a_value_is_looked_up_once(plain) -> None:
    """All codecs are tried on the same choices of saved values."""
    _, decision = plain
    looked: dict[Any, int] = {}

    def count(value: Any, after: Any, gradients: Any) -> Any:
        key = value, frozenset(after)
        looked[key] = looked.get(key, 0) + 1
        return reading_of(value, after, gradients)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("elbowroom.compiled.codable.reading_of", count)
        run(int(0.46 * decision.peak_nbytes), None)
    assert looked
    assert sum(looked.values()) < 1.3 * len(looked)  # two choices may have the same backward


class Loud(nn.Module):
    """Adds what a step cannot foresee, as labels do: gradients are mostly noise of the batch."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.register_buffer("labels", torch.randn(*shape))

    def forward(self, x: Tensor) -> Tensor:
        return 0.1 * x + self.labels


def attentions(p: float = 0.0) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    layers = [nn.TransformerEncoderLayer(32, 4, 64, p, "gelu", True) for _ in range(2)]
    return nn.Sequential(*layers, Loud(8, 32, 32)), torch.randn(8, 32, 32)


@pytest.mark.parametrize("make", [convolutions, attentions])
def test_the_error_that_codes_add_is_below_what_is_predicted_and_of_its_size(plain, make) -> None:
    exact = plain[0] if make is convolutions else run(None, True, make=make)[0][0]
    got, decision = run(None, None, make=make, steps=4, codes="dither, 4 levels", min_nbytes=4096)
    measured = sum(error(one, exact) for one in got) / len(got)
    assert 0.3 * decision.noise < measured < decision.noise


class GatedLayer(nn.Module):
    """Three values of four times the width, of which one is multiplied for a weight's gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.down = nn.LayerNorm(64), nn.Linear(256, 64)
        self.gate, self.up = nn.Linear(64, 256), nn.Linear(64, 256)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + self.down(nn.functional.silu(self.gate(h)) * self.up(h))


def gated(p: float = 0.0) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    layers = [GatedLayer() for _ in range(4)]
    return nn.Sequential(*layers, Loud(1024, 64)), torch.randn(1024, 64)


def test_codes_of_what_weights_are_multiplied_with_count_for_these() -> None:
    """Of gated layers a small plan keeps the wide products alone, in the coarsest codes."""
    (exact,), _ = run(None, True, make=gated)
    with pytest.raises(Exception, match="needs at least") as caught:
        run(1000, False, make=gated)
    room = caught.value.inner_exception.least_nbytes
    got, decision = run(room, False, make=gated, steps=4)
    assert decision.is_lossy
    measured = sum(error(one, exact) for one in got) / len(got)
    assert 0.02 < measured < 2 * decision.noise


@pytest.mark.parametrize(("noise", "level"), [(0.019, "INFO"), (0.16, "WARNING")])
def test_noise_is_said_as_a_share_of_the_squared_gradient(noise, level, caplog) -> None:
    caplog.set_level("INFO", logger="elbowroom")
    decision = Decision(8, 8, 16, 4, 0, is_lossy=True, noise=noise)
    Regions(Settings(100)).decided(decision)
    (said,) = [one for one in caplog.records if "codes add noise" in one.getMessage()]
    assert said.levelname == level
    assert f"about {show_percent(noise)} of its square (gErr2)" in said.getMessage()


def test_no_plan_adds_more_than_the_noise_that_is_allowed(plain) -> None:
    gradient, decision = plain
    room = int(0.465 * decision.peak_nbytes)  # 4 levels would do, and add 0.2
    got, quiet = run(room, None, steps=4, noise=0.1)
    assert quiet.peak_nbytes <= room
    assert 0 < quiet.noise <= 0.1
    # Sizes stand in for the values: the tensors that keep 4 levels have more than their share.
    assert sum(error(one, gradient) for one in got) / len(got) < 1.5 * quiet.noise
    with pytest.raises(Exception, match=r"with noise=1e-09.*allow more noise"):
        run(room, None, noise=1e-9)


class BySize:
    """Stands in for `Reach`: the node of a code is its share."""

    def variance(self, base: object, coded: list[CodedValue]) -> float:
        return sum(one.node * one.error for one in coded)


def test_levels_are_raised_for_as_few_of_the_largest_as_the_noise_needs() -> None:
    variants = ladder()
    coded = [
        one for n in range(1, 9) for one in (CodedValue.mask(n), CodedValue(n, Dither(levels=4)))
    ]
    whole = BySize().variance(None, coded)
    assert _quiet(BySize(), None, coded, None, variants) == coded
    assert _quiet(BySize(), None, coded, whole, variants) == coded
    before = 0
    for parts in range(2, 5000, 101):
        found = _quiet(BySize(), None, coded, whole / parts, variants)
        assert found is not None
        assert BySize().variance(None, found) <= whole / parts
        assert [one.node for one in found] == [one.node for one in coded]
        assert all(one.codec.lossless for one in found[::2])
        levels = [one.codec.levels for one in found[1::2]]
        assert levels == sorted(levels)
        assert sum(levels) >= before
        before = sum(levels)
    assert _quiet(BySize(), None, coded, whole / 10**4, variants) is None


def test_codes_of_a_graph_with_symbols_are_those_of_one_without_and_serve_other_sizes() -> None:
    coded = {"codes": "dither, 16 levels", "min_nbytes": 4096}
    with ops.draws.started_at(5):
        (expected,), fixed = run(None, None, dynamic=False, **coded)
    with ops.draws.started_at(5):
        (got, other), symbolic = run(None, None, sizes=(12,), dynamic=True, **coded)
    assert symbolic.is_lossy
    assert symbolic.saved_nbytes == fixed.saved_nbytes
    assert torch.equal(got, expected)
    model, x = convolutions()
    model(x)  # as the step before, for the statistics
    model(x[:12, :, :12, :12].contiguous()).square().mean().backward()
    exact = torch.cat([g.grad.flatten() for g in model.parameters()])
    assert 1e-4 < error(other, exact) < 2 * symbolic.noise


class GeluLayer(nn.Module):
    """A residual layer of a ViT (GELU by erf) or of GPT-2 (by tanh)."""

    def __init__(self, approximate: str) -> None:
        super().__init__()
        self.norm, self.act = nn.LayerNorm(64), nn.GELU(approximate)
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.act(self.up(self.norm(x))))


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_what_the_argument_of_a_gelu_is_computed_again_from_has_a_fine_code(
    approximate, dynamic
) -> None:
    """It had none, so that a quarter of the peak took coarse codes of the wide values: 0.0023."""

    def layers(p: float) -> tuple[nn.Module, Tensor]:
        torch.manual_seed(0)
        return nn.Sequential(*(GeluLayer(approximate) for _ in range(6))), torch.randn(8, 128, 64)

    (exact,), plain = run(None, True, make=layers, dynamic=dynamic)
    (got,), coded = run(plain.peak_nbytes // 4, False, make=layers, dynamic=dynamic)
    assert coded.is_lossy
    assert coded.noise < 1e-3
    assert error(got, exact) < 1e-4
