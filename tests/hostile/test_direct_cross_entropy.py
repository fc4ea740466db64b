"""Cross entropy by a node of ours: torch's bits, torch's errors, and less memory in backward."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import elbowroom as er
from elbowroom.measure import memory_curve

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
        assert F.cross_entropy(logits, labels, reduction="none").grad_fn.name() != OURS
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


@pytest.mark.filterwarnings("ignore:this saving context changed nothing")
def test_the_gradient_takes_the_place_of_what_was_saved() -> None:
    x, labels = torch.randn(1024, 1024).requires_grad_(), torch.randint(0, 1024, (1024,))

    def backward(inside: bool) -> int:
        if inside:
            with er.saving():
                loss = F.cross_entropy(x, labels)
        else:
            loss = F.cross_entropy(x, labels)
        nbytes = memory_curve(loss.backward).peak_nbytes  # what backward allocates
        x.grad = None
        return nbytes

    assert backward(inside=False) >= 2 * x.nbytes
    assert backward(inside=True) < 0.6 * x.nbytes + 2 * (1 << 20)


def test_a_code_of_the_log_probabilities_is_held() -> None:
    x, weight, labels = data()
    F.cross_entropy(F.linear(x, weight), labels).backward()
    truth, weight.grad = weight.grad, None
    with er.saving("dither", levels=16) as saved:
        loss = F.cross_entropy(F.linear(x, weight), labels)
    loss.backward()
    assert saved.ledger.after_nbytes < 0.4 * saved.ledger.before_nbytes
    assert 0 < (weight.grad - truth).square().sum() < 0.001 * truth.square().sum()
