"""Cross entropy by a node of ours: torch's bits, torch's errors, and less memory in backward."""

import contextlib
import sys
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import elbowroom as er
from elbowroom.errors import RestoreError
from elbowroom.measure import memory_curve
from elbowroom.plan import Action, Encode, Keep, Need, Site

ROWS, CLASSES = 300, 200
OURS = "_NegativeLogLikelihoodBackward"


def test_wrong_shapes_are_torchs_own_errors() -> None:
    x = torch.randn(512, 300, requires_grad=True)
    for y, weight in ((torch.arange(5), None), (torch.arange(512) % 300, torch.ones(5))):
        with pytest.raises((ValueError, RuntimeError)) as torchs:
            F.cross_entropy(x, y, weight)
        with er.saving(), pytest.raises(torchs.type) as ours:
            F.cross_entropy(x, y, weight)
        assert str(ours.value) == str(torchs.value)


def data(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, 16, generator=generator, dtype=dtype)
    weight = torch.randn(CLASSES, 16, generator=generator, dtype=dtype, requires_grad=True)
    labels = torch.randint(0, CLASSES, (ROWS,), generator=generator)
    labels[::3] = -100
    return x, weight, labels


def trained(how: dict, *, inside: bool, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Loss, gradient, a second backward's added to it, and a gradient of the gradient."""
    x, weight, labels = data(dtype)
    labels[labels < 0] = how.get("ignore_index", -100)

    def loss_of() -> Tensor:
        if not inside:
            return F.cross_entropy(F.linear(x, weight), labels, **how)
        with er.saving(min_nbytes=0):
            return F.cross_entropy(F.linear(x, weight), labels, **how)

    loss = loss_of()
    loss.sum().backward(retain_graph=True)
    once = weight.grad.clone()
    loss.sum().backward()
    (first,) = torch.autograd.grad(loss_of().sum(), weight, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), weight)
    return [loss.detach(), once, weight.grad, first.detach(), second]


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"reduction": "sum"},
        {"weight": torch.linspace(0, 1, CLASSES)},
        {"ignore_index": 7},
        {"reduction": "none"},
        {"label_smoothing": 0.1},
    ],
    ids=str,
)
def test_it_has_the_bits_of_torch(how: dict) -> None:
    plain, ours = trained(how, inside=False), trained(how, inside=True)
    assert all(map(torch.equal, plain, ours))


def test_half_precision_and_double_have_the_bits_of_torch() -> None:
    for dtype in (torch.bfloat16, torch.float64):
        plain, ours = (trained({}, inside=inside, dtype=dtype) for inside in (False, True))
        assert all(map(torch.equal, plain, ours))


def test_it_runs_for_class_numbers_only() -> None:
    x, weight, labels = data()
    with er.saving():
        logits = F.linear(x, weight)
        assert F.cross_entropy(logits, labels).grad_fn.name() == OURS
        assert F.cross_entropy(logits, labels, label_smoothing=0.1).grad_fn.name() != OURS
        assert F.cross_entropy(logits, logits.softmax(1)).grad_fn.name() != OURS
    with pytest.raises(IndexError, match="out of bounds"), er.saving():
        F.cross_entropy(F.linear(x, weight), labels.fill_(CLASSES))


def test_a_second_backward_raises_what_autograd_raises() -> None:
    x, weight, labels = data()
    with er.saving():
        loss = F.cross_entropy(F.linear(x, weight), labels)
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def logits_of(rows: int, classes: int) -> tuple[Tensor, Tensor, Tensor]:
    """Factors of logits, and labels."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, 8, generator=generator)
    weight = torch.randn(classes, 8, generator=generator).requires_grad_()
    return x, weight, torch.randint(0, classes, (rows,), generator=generator)


@pytest.mark.filterwarnings("ignore:this saving context changed nothing")
def test_forward_and_backward_take_no_more_than_the_logits() -> None:
    x, weight, labels = logits_of(1024, 4096)
    nbytes, small = 1024 * 4096 * 4, 4 << 20

    def peaks(inside: bool) -> list[int]:
        """Of forward with the logits, and of backward beside them."""

        def forward() -> Tensor:
            return F.cross_entropy(F.linear(x, weight), labels)

        losses: list[Tensor] = []
        context = er.saving() if inside else contextlib.nullcontext()
        with context:
            of_forward = memory_curve(lambda: losses.append(forward())).peak_nbytes
        found = [of_forward, memory_curve(losses[0].backward).peak_nbytes]
        weight.grad = None
        return found

    peaks(inside=True)  # learns
    plain, ours = peaks(inside=False), peaks(inside=True)
    assert plain[0] >= 2 * nbytes
    assert plain[1] >= 2 * nbytes
    assert ours[0] < nbytes + small
    assert ours[1] < 0.1 * nbytes + small


def test_logits_that_somebody_holds_stay_as_they_are() -> None:
    x, weight, labels = logits_of(300, 200)
    with er.saving(min_nbytes=0):
        logits = F.linear(x, weight)
        loss = F.cross_entropy(logits, labels)
    before, part = logits.detach().clone(), logits.detach()[7]
    loss.backward()
    assert torch.equal(logits.detach(), before)
    del logits, loss
    with er.saving(min_nbytes=0):
        logits = F.linear(x, weight)
        loss = F.cross_entropy(logits, labels)
        part = logits.detach()[7]
        del logits
    loss.backward()
    assert torch.equal(part, before[7])


def halve(x: Tensor) -> None:
    with torch.no_grad():
        x.div_(2)


def through_numpy(x: Tensor) -> None:
    x.detach().numpy()[5:] = 0


CHANGES: dict[str, Callable[[Tensor], object]] = {
    "no_grad": halve,
    "tracked": lambda x: x.div_(2),
    "an op in place": F.relu_,
    "data": lambda x: x.data.zero_(),
    "some rows of data": lambda x: x.data[200:].zero_(),
    "numpy": through_numpy,
    "detached": lambda x: x.detach().zero_(),
}


@pytest.mark.parametrize("inside", [True, False], ids=["inside", "outside"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_logits_may_be_changed_after_the_loss(
    change: Callable[[Tensor], object], bias: bool, inside: bool
) -> None:
    """torch saves their log-probabilities, so it allows this."""
    torch.manual_seed(0)
    head, labels = nn.Linear(16, CLASSES, bias=bias), torch.randint(0, CLASSES, (ROWS,))
    x = torch.randn(3, ROWS // 3, 16)

    def run(context: contextlib.AbstractContextManager[object]) -> list[Tensor]:
        head.zero_grad()
        given = x.clone().requires_grad_()
        with context:
            logits = head(given * 1)
            loss = F.cross_entropy(logits.flatten(0, 1), labels)
            if inside:
                change(logits)
        if not inside:
            change(logits)
        loss.backward()
        return [given.grad, *(p.grad for p in head.parameters())]

    plain = run(contextlib.nullcontext())
    for _ in range(3):
        assert all(map(torch.equal, plain, run(er.saving(min_nbytes=0))))


@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("policy", [{}, {"policy": "dither", "levels": 256}], ids=str)
def test_several_gradients_at_once(policy: dict, reduction: str) -> None:
    x, weight, labels = data()

    def run(context: contextlib.AbstractContextManager[object]) -> Tensor:
        with context:
            loss = F.cross_entropy(F.linear(x, weight), labels, reduction=reduction)
        some = torch.linspace(1, 2, 3 * loss.numel()).view(3, *loss.shape)
        (found,) = torch.autograd.grad(loss, weight, some, is_grads_batched=True)
        return found

    truth, ours = run(contextlib.nullcontext()), run(er.saving(**policy, min_nbytes=0))
    error = (ours - truth).square().sum() / truth.square().sum()
    assert error < 0.01 if policy else torch.equal(truth, ours)


def test_changed_logits_have_no_gradient_of_the_gradient() -> None:
    x, weight, labels = data()
    with er.saving(min_nbytes=0):
        logits = F.linear(x, weight)
        loss = F.cross_entropy(logits, labels)
    logits.data.zero_()
    with pytest.raises(RestoreError, match="were changed after its loss"):
        torch.autograd.grad(loss, weight, create_graph=True)


def test_changed_logits_that_cannot_be_made_again_are_an_error() -> None:
    _, _, labels = data()
    for change in (halve, CHANGES["data"]):
        with er.saving(min_nbytes=0):
            logits = (torch.randn(ROWS, CLASSES) * 1).requires_grad_() * 2
            loss = F.cross_entropy(logits, labels)
        change(logits)
        with pytest.raises(RestoreError, match="were changed after its loss"):
            loss.backward()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_it_has_the_bits_of_torch_under_autocast(dtype: torch.dtype) -> None:
    def run(inside: bool) -> tuple[Tensor, Tensor]:
        x, weight, labels = data(dtype)
        logits = F.linear(x, weight).detach().requires_grad_()
        context = er.saving(min_nbytes=0) if inside else contextlib.nullcontext()
        with context, torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(logits * 1, labels)
        assert (loss.grad_fn.name() == OURS) == inside
        loss.backward()
        return loss.detach(), logits.grad

    assert all(map(torch.equal, run(inside=False), run(inside=True)))


def test_codes_under_autocast_give_gradients_of_the_logits_dtype() -> None:
    x, weight, labels = data(torch.bfloat16)
    logits = F.linear(x, weight).detach().requires_grad_()
    with er.saving("dither", levels=16, min_nbytes=0), torch.autocast("cpu", torch.bfloat16):
        F.cross_entropy(logits * 1, labels).backward()
    truth = torch.autograd.grad(F.cross_entropy(logits.float(), labels), logits)[0]
    assert logits.grad.dtype is torch.bfloat16
    assert (logits.grad - truth).square().sum() < 0.01 * truth.square().sum()


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("ignored", [-100, 0, 7, 10**6])
def test_ignored_labels_are_those_of_torch(ignored: int, reduction: str) -> None:
    def run(inside: bool) -> list[Tensor]:
        x, weight, labels = data()
        labels[labels < 0] = ignored
        context = er.saving(min_nbytes=0) if inside else contextlib.nullcontext()
        how = {"ignore_index": ignored, "reduction": reduction}
        with context:
            loss = F.cross_entropy(F.linear(x, weight), labels, **how)
        loss.backward(torch.linspace(1, 2, loss.numel()).view(loss.shape))
        return [loss.detach(), weight.grad]

    assert all(map(torch.equal, run(inside=False), run(inside=True)))


def test_kernels_of_another_device_are_tried_before_they_are_trusted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = sys.modules["elbowroom.runtime.direct.cross_entropy"]
    tried = module._has_bits_of_torch.__wrapped__
    cpu = torch.device("cpu")
    assert tried(cpu, torch.float32, 5003, False)
    assert tried(cpu, torch.bfloat16, 1, False)
    softmax = torch.log_softmax
    monkeypatch.setattr(torch, "log_softmax", lambda x, dim: softmax(x, dim) + 1e-3 * (len(x) > 1))
    assert not tried(cpu, torch.float32, 5003, False)


def test_kernels_of_another_device_are_tried_with_maps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of this device, one place alone has other bits: it has no vector to itself."""
    module = sys.modules["elbowroom.runtime.direct.cross_entropy"]
    tried = module._has_bits_of_torch.__wrapped__
    softmax = torch.log_softmax
    monkeypatch.setattr(
        torch, "log_softmax", lambda x, dim: softmax(x.movedim(1, -1), -1).movedim(-1, 1)
    )
    assert tried(torch.device("cpu"), torch.float32, 7, True)
    monkeypatch.setattr(torch, "log_softmax", lambda x, dim: softmax(x, dim) + 1e-3 * x.shape[-1])
    assert not tried(torch.device("cpu"), torch.float32, 7, True)


def test_a_code_of_the_log_probabilities_is_held() -> None:
    x, weight, labels = data()
    F.cross_entropy(F.linear(x, weight), labels).backward()
    truth, weight.grad = weight.grad, None
    with er.saving("dither", levels=16) as saved:
        loss = F.cross_entropy(F.linear(x, weight), labels)
    loss.backward()
    assert saved.ledger.after_nbytes < 0.4 * saved.ledger.before_nbytes
    assert 0 < (weight.grad - truth).square().sum() < 0.001 * truth.square().sum()


@pytest.mark.parametrize("rows", [1024, 1021])
def test_a_code_is_made_part_by_part(rows: int) -> None:
    """Logits and all of their log-probabilities never stand side by side."""
    x, weight, labels = logits_of(rows, 4096)
    nbytes, parts = rows * 4096 * 4, 5 * rows * 4096 * 4 // 16

    def forward() -> Tensor:
        return F.cross_entropy(F.linear(x, weight), labels)

    def peaks() -> list[int]:
        losses: list[Tensor] = []
        with er.saving("dither", levels=16):
            of_forward = memory_curve(lambda: losses.append(forward())).peak_nbytes
        found = [of_forward, memory_curve(losses[0].backward).peak_nbytes]
        weight.grad = None
        return found

    peaks()  # learns
    in_forward, in_backward = peaks()
    assert in_forward < 1.26 * nbytes + parts
    assert in_backward < nbytes + parts


@pytest.mark.filterwarnings("ignore:this saving context changed nothing")
@pytest.mark.parametrize("rows", [1, 7, 300, 1024])
@pytest.mark.parametrize("weighted", [False, True])
def test_a_code_in_parts_has_gradients_of_all_orders(rows: int, weighted: bool) -> None:
    x, weight, labels = logits_of(rows, 2048)
    classes = torch.linspace(0.5, 1, 2048) if weighted else None

    def made(context: contextlib.AbstractContextManager) -> list[Tensor]:
        with context:
            loss = F.cross_entropy(F.linear(x, weight), labels, classes)
        (once,) = torch.autograd.grad(loss, weight, retain_graph=True)
        (again,) = torch.autograd.grad(loss, weight, retain_graph=True)
        (first,) = torch.autograd.grad(loss, weight, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), weight)
        assert torch.equal(once, again)
        return [loss.detach(), once, first.detach(), second]

    plain = made(contextlib.nullcontext())
    for context in (
        er.saving("dither", levels=16, min_nbytes=0),
        er.saving("dither", levels=16, min_nbytes=1 << 40),
    ):
        coded = made(context)
        assert torch.equal(coded[0], plain[0])
        # A code has the levels that a gradient needs; one of a gradient takes its error twice.
        for one, other, most in zip(coded[1:], plain[1:], (0.01, 0.01, 0.02), strict=True):
            assert (one - other).square().sum() < most * other.square().sum()


@pytest.mark.parametrize(("rows", "classes"), [(256, 256), (255, 300), (3, 20000)])
def test_no_part_is_too_small_for_a_code(rows: int, classes: int) -> None:
    x, weight, labels = logits_of(rows, classes)
    with er.saving("dither", levels=16) as saved:
        loss = F.cross_entropy(F.linear(x, weight), labels)
    loss.backward()
    coded = sum(row.before_nbytes for row in saved.ledger.rows if row.action == "dither")
    assert coded >= 0.8 * rows * classes * 4


def test_parts_of_a_code_are_freed_by_backward() -> None:
    x, weight, labels = logits_of(1024, 2048)
    with er.saving("dither", levels=16, min_nbytes=0) as saved:
        loss = F.cross_entropy(F.linear(x, weight), labels)
    held = [row for row in saved.ledger.rows if row.action == "dither"]
    assert sum(row.count for row in held) == 16
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
    assert saved.ledger.held_nbytes == 0


def test_a_policy_that_counts_as_exact_does_not_encode_logits() -> None:
    """It has no attribute `exact`; the node saves logits, which have to be the same in backward."""

    def policy(site: Site) -> Action:
        return Encode(er.codec("dither", levels=256)) if site.need is Need.LOSSY else Keep("")

    x, weight, labels = data()

    def gradient(around: contextlib.AbstractContextManager) -> Tensor:
        with around:
            loss = F.cross_entropy(F.linear(x, weight) * 1.0, labels)
        return torch.autograd.grad(loss, weight)[0]

    context = er.saving(policy, min_nbytes=0)
    assert torch.equal(gradient(context), gradient(contextlib.nullcontext()))
    whys = [row.why for row in context.ledger.rows if row.consumer == "cross_entropy"]
    assert any("`exact = False`" in why for why in whys)

    policy.exact = False
    context = er.saving(policy, min_nbytes=0)
    gradient(context)
    rows = [row for row in context.ledger.rows if row.consumer == "cross_entropy"]
    assert "dither" in {row.action for row in rows}


# ------------------------------------------------------------------------------ maps of logits

SIZES = [(777,), (37, 43), (9, 11, 13)]
HOWS = [
    {},
    {"reduction": "sum"},
    {"reduction": "none"},
    {"ignore_index": 0},
    {"weight": torch.linspace(0, 1, 19)},
    {"weight": torch.linspace(0, 1, 19), "reduction": "none", "ignore_index": 3},
]


def maps_of(
    size: tuple[int, ...], samples: int = 3, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Logits of 19 classes, and labels, a third of which are -100."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(samples, 19, *size, generator=generator, dtype=dtype) * 4
    labels = torch.randint(0, 19, (samples, *size), generator=generator)
    labels[torch.rand(labels.shape, generator=generator) < 0.3] = -100
    return x, labels


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("how", HOWS, ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_maps_have_the_bits_of_torch(size: tuple[int, ...], how: dict, dtype: torch.dtype) -> None:
    x, labels = maps_of(size, dtype=dtype)
    labels[labels < 0] = how.get("ignore_index", -100)
    how = {k: v.to(dtype) if isinstance(v, Tensor) else v for k, v in how.items()}

    def run(context: contextlib.AbstractContextManager[object]) -> list[Tensor]:
        given = x.clone().requires_grad_()
        with context:
            loss = F.cross_entropy(given * 1, labels, **how)
        assert isinstance(context, contextlib.nullcontext) or loss.grad_fn.name() == OURS
        weights = torch.linspace(0.5, 2, loss.numel(), dtype=dtype).view(loss.shape)
        (once,) = torch.autograd.grad((loss * weights).sum(), given, retain_graph=True)
        (first,) = torch.autograd.grad(loss.sum(), given, create_graph=True)
        found = [loss.detach(), once, first.detach()]
        if dtype is not torch.bfloat16:
            found.append(torch.autograd.grad(first.square().sum(), given)[0])
        return found

    plain = run(contextlib.nullcontext())
    for _ in range(3):
        ours = run(er.saving(min_nbytes=0))
        assert all(map(torch.equal, plain, ours))
        assert [one.stride() for one in ours] == [one.stride() for one in plain]


@pytest.mark.parametrize("how", HOWS, ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_codes_of_maps_are_made_part_by_part(size: tuple[int, ...], how: dict) -> None:
    x, labels = maps_of(size)
    labels[labels < 0] = how.get("ignore_index", -100)

    def run(context: contextlib.AbstractContextManager[object]) -> tuple[Tensor, Tensor]:
        given = x.clone().requires_grad_()
        with context:
            loss = F.cross_entropy(given * 1, labels, **how)
        return loss.detach(), torch.autograd.grad(loss.sum(), given)[0]

    loss, gradient = run(contextlib.nullcontext())
    for _ in range(3):
        saved = er.saving("dither", levels=64, min_nbytes=0)
        ours = run(saved)
        assert torch.equal(ours[0], loss)
        assert (ours[1] - gradient).square().sum() < 0.01 * gradient.square().sum()
        rows = [row for row in saved.ledger.rows if row.action == "dither"]
        assert sum(row.before_nbytes for row in rows) == x.nbytes
        assert sum(row.after_nbytes for row in rows) < 0.25 * x.nbytes


@pytest.mark.filterwarnings("ignore:this saving context changed nothing")
@pytest.mark.parametrize("policy", [{}, {"policy": "dither", "levels": 16}], ids=str)
def test_maps_take_no_more_than_their_logits(policy: dict) -> None:
    """Of torch's own ops, backward has log-probabilities and two gradients of their size."""
    x, labels = maps_of((160, 160), 4)

    def peak(context: contextlib.AbstractContextManager[object]) -> int:
        given = x.clone().requires_grad_()

        def step() -> None:
            with context:
                loss = F.cross_entropy(given * 1, labels)
            loss.backward()

        return memory_curve(step).peak_nbytes

    peak(er.saving(**policy))
    plain, ours = peak(contextlib.nullcontext()), peak(er.saving(**policy))
    assert plain > 2.9 * x.nbytes
    # The gradient of `given * 1` is in the place of the logits, and given's own beside it.
    assert ours < 2.4 * x.nbytes


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_maps_that_a_convolution_has_made_may_be_changed(
    change: Callable[[Tensor], object], bias: bool
) -> None:
    torch.manual_seed(0)
    head = nn.Conv2d(8, 19, 1, bias=bias)
    features, (_, labels) = torch.randn(3, 8, 37, 43), maps_of((37, 43))

    def run(context: contextlib.AbstractContextManager[object]) -> list[Tensor]:
        head.zero_grad()
        given = features.clone().requires_grad_()
        with context:
            logits = head(given * 1)
            loss = F.cross_entropy(logits, labels)
        change(logits)
        loss.backward()
        return [given.grad, *(p.grad for p in head.parameters())]

    plain = run(contextlib.nullcontext())
    for _ in range(3):
        assert all(map(torch.equal, plain, run(er.saving(min_nbytes=0))))


def test_maps_in_another_order_are_torchs_own() -> None:
    """Its kernel takes a copy in order, with the bits of that."""
    x, labels = maps_of((37, 43))
    given = x.to(memory_format=torch.channels_last).requires_grad_()
    with er.saving(min_nbytes=0):
        assert F.cross_entropy(given * 1, labels).grad_fn.name() != OURS


# --------------------------------------------------------------- logits that other ops read, too


def two_labels(x: Tensor) -> Tensor:
    """As of mixed samples (mixup)."""
    return F.cross_entropy(x, torch.arange(len(x)) * 5 % x.shape[1])


OTHERS: dict[str, Callable[[Tensor], Tensor]] = {
    "square": lambda x: x.square().mean(),
    "product": lambda x: (x * x).mean(),
    "logsumexp": lambda x: torch.logsumexp(x, 1).square().mean(),
    "two labels": two_labels,
    "softmax": lambda x: torch.softmax(x, 1).square().sum(),
    "overlap": lambda x: (torch.softmax(x, 1) * F.one_hot(torch.arange(len(x)), x.shape[1])).sum(),
    "activation": lambda x: F.gelu(x).square().mean(),
    "mse_loss": lambda x: F.mse_loss(x, torch.zeros_like(x)),
    # These read signs or bounds alone, of the tensor where no bits are held.
    "leaky_relu": lambda x: F.leaky_relu(x).mean(),
    "relu6": lambda x: F.relu6(x).mean(),
}


@pytest.mark.parametrize("maps", [False, True], ids=["rows", "maps"])
@pytest.mark.parametrize("is_first", [False, True], ids=["after", "before"])
@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS.keys())
def test_logits_that_another_op_reads_are_not_overwritten(
    other: Callable[[Tensor], Tensor], is_first: bool, maps: bool
) -> None:
    """Nobody but the graph has the logits: the loss is all that a model returns."""
    x, weight, _ = logits_of(300, 320)
    labels = torch.arange(300) % 320
    if maps:
        labels = labels[:, None].expand(300, 4).contiguous() % 80

    def loss_of() -> Tensor:
        logits = F.linear(x, weight)
        of_loss = logits.view(300, 80, 4) if maps else logits
        before = other(logits) if is_first else 0
        loss = F.cross_entropy(of_loss, labels) + before
        return loss if is_first else loss + other(logits)

    (truth,) = torch.autograd.grad(loss_of(), weight)
    for _ in range(4):
        with er.saving(min_nbytes=0):
            loss = loss_of()
        (found,) = torch.autograd.grad(loss, weight)
        assert torch.equal(found, truth)
