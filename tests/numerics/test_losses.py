"""The noise of codes under losses: small against the gradient, however well the model fits.

A loss reads what is left after a subtraction, or the tail of an exponential. As a training
succeeds that becomes small, and an error of what was saved does not.
"""

import contextlib
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import elbowroom as er
from elbowroom.plan.site import Formula, Need, Rebuildable
from programs import looking

pytestmark = pytest.mark.usefixtures("one_thread")

ROWS, WIDTH = 256, 64
DRAWS = 4
Loss = Callable[[Tensor], Tensor]


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 128), nn.GELU(), nn.Linear(128, WIDTH))


def inputs() -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))


def noise_of(model: nn.Module, loss: Loss, x: Tensor) -> float:
    """E |g~ - g|^2 / |g|^2 with codes of 16 levels; the same draws for all that is random."""

    def gradients(around: contextlib.AbstractContextManager) -> list[Tensor]:
        model.zero_grad()
        torch.manual_seed(3)
        with around:
            made = loss(model(x))
        made.backward()
        return [p.grad.clone() for p in model.parameters()]

    true = gradients(contextlib.nullcontext())
    added = 0.0
    for _ in range(DRAWS):
        noisy = gradients(er.saving("dither", levels=16, min_nbytes=0))
        added += sum(float((a - b).square().sum()) for a, b in zip(noisy, true, strict=True))
    return added / DRAWS / sum(float(b.square().sum()) for b in true)


REGRESSIONS = {
    "mse": F.mse_loss,
    "smooth_l1": F.smooth_l1_loss,
    "huber": F.huber_loss,
    "by hand": lambda y, target: (y - target).square().mean(),
}


@pytest.mark.parametrize("residual", [1, 0.1, 0.001])
@pytest.mark.parametrize("name", REGRESSIONS)
def test_a_regression_that_fits(name: str, residual: float) -> None:
    """It was 0.9 for residuals of a tenth of the values, and 9,000 for a thousandth."""
    model, x = net(), inputs()
    noise = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(2))
    target = model(x).detach() + 0.2 * residual * noise
    assert noise_of(model, lambda y: REGRESSIONS[name](y, target), x) <= 0.03


CLASSIFICATIONS = {
    "cross_entropy": lambda z: F.cross_entropy(z, z.argmax(-1)),
    "log_softmax": lambda z: -z.log_softmax(-1).gather(1, z.argmax(-1, keepdim=True)).mean(),
    "logsumexp": lambda z: (z.logsumexp(-1) - z.amax(-1)).mean(),
    "binary": lambda z: F.binary_cross_entropy_with_logits(z, (z > 0).float()),
    "logsigmoid": lambda z: -F.logsigmoid(z * z.sign().detach()).mean(),
    "soft_margin": lambda z: F.soft_margin_loss(z, z.sign().detach()),
}


@pytest.mark.parametrize("scale", [3, 30, 60])
@pytest.mark.parametrize("name", CLASSIFICATIONS)
def test_a_classification_that_fits(name: str, scale: float) -> None:
    """Binary cross entropy of logits had 1.4 at the largest scale."""
    loss = CLASSIFICATIONS[name]
    assert noise_of(net(), lambda z: loss(z * scale), inputs()) <= 0.03


@pytest.mark.parametrize("scale", [1, 100, 1000])
@pytest.mark.parametrize(
    "how", [{}, {"label_smoothing": 0.1}, {"reduction": "none"}, {"ignore_index": 5}], ids=str
)
def test_a_cross_entropy_of_logits_of_any_size(how: dict, scale: float) -> None:
    """It was 0.06 for logits of 60, and 5,800 for 600."""
    labels = torch.randint(0, WIDTH, (ROWS,), generator=torch.Generator().manual_seed(4))
    loss = lambda z: F.cross_entropy(z * scale, labels, **how).mean()  # noqa: E731
    assert noise_of(net(), loss, inputs()) <= 0.03


CERTAIN = {
    "cross_entropy": F.cross_entropy,
    "nll": lambda z, y: F.nll_loss(F.log_softmax(z, -1), y),
    "pixels": lambda z, y: F.cross_entropy(z.T[None], y[None]),
    "smooth": lambda z, y: F.cross_entropy(z, y, label_smoothing=1e-5),
    "by hand": lambda z, y: -z.log_softmax(-1)[torch.arange(len(y)), y].mean(),
}


@pytest.mark.parametrize("fits", [0, 4, 8, 12])
@pytest.mark.parametrize("std", [0.05, 1, 4])
@pytest.mark.parametrize("name", CERTAIN)
def test_labels_that_are_all_certain(name: str, std: float, fits: float) -> None:
    """1 - p of a label was hidden by the error of p: 19, and 3,800 with 37 classes.

    The context is that of steps before, in which no label was certain: a script is replayed.
    """
    g = torch.Generator().manual_seed(1)
    x, w = torch.randn(512, 64, generator=g), torch.randn(64, 80, generator=g) / 8 * std
    y = torch.randint(0, 80, (512,), generator=g)
    context = er.saving("dither", levels=16, min_nbytes=0)

    def gradient(around: contextlib.AbstractContextManager, certain: float) -> Tensor:
        weight = w.clone().requires_grad_()
        with around:
            loss = CERTAIN[name](x @ weight + certain * F.one_hot(y, 80), y)
        return torch.autograd.grad(loss, weight)[0].double()

    for _ in range(3):
        gradient(context, 0.0)
    true = gradient(contextlib.nullcontext(), fits)
    for _ in range(2):
        noise = gradient(context, fits) - true
        assert float(noise.square().sum() / true.square().sum()) <= 0.03


ROWS_OF_LOGITS = {
    "cross_entropy": F.cross_entropy,
    "transposed": lambda z, y: F.cross_entropy(z.T.contiguous().T, y),
    "nll": lambda z, y: F.nll_loss(F.log_softmax(z, -1), y),
    "first": lambda z, y: F.nll_loss(F.log_softmax(z.T, 0).T, y),
    "pixels": lambda z, y: F.cross_entropy(z.T[None], y[None]),
    "smooth": lambda z, y: F.cross_entropy(z, y, label_smoothing=0.1),
    "soft": lambda z, y: F.cross_entropy(z, F.one_hot(y, z.shape[1]).float()),
    "kl_div": lambda z, y: F.kl_div(
        z.log_softmax(1), F.one_hot(y, z.shape[1]).float(), reduction="batchmean"
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ROWS_OF_LOGITS)
def test_a_gradient_of_logits_adds_up_to_nothing_in_each_row(name: str, dtype: torch.dtype) -> None:
    """What all classes have in common gets no gradient: a contrastive loss had 300 by that."""
    g = torch.Generator().manual_seed(1)
    z = (14 * torch.randn(256, 128, generator=g)).to(dtype)
    y = torch.where(torch.rand(256, generator=g) < 0.9, z.argmax(1), z.argmin(1))
    found = []
    context = er.saving("dither", levels=16, min_nbytes=0)
    for around in (contextlib.nullcontext(), context, context, context):
        leaf = z.clone().requires_grad_()
        with around:
            loss = ROWS_OF_LOGITS[name](leaf * 1, y)
        found.append(torch.autograd.grad(loss, leaf)[0].double())
    true, *coded = found
    rounding = 4 * torch.finfo(dtype).eps * float(true.abs().max())
    for one in coded:
        assert float(one.sum(1).abs().max()) <= rounding
        assert float((one - true).square().sum() / true.square().sum()) <= 0.01


@pytest.mark.parametrize(("std", "bits"), [(0.1, 4.6), (1, 6.6), (40, 8.6)])
def test_log_probabilities_have_as_many_levels_as_their_range_needs(
    std: float, bits: float
) -> None:
    z = std * torch.randn(512, 1024, generator=torch.Generator().manual_seed(1))
    labels = torch.arange(512)
    with er.saving("dither", levels=16) as saved:
        F.cross_entropy(z.requires_grad_() * 1, labels)
    held = sum(row.after_nbytes for row in saved.ledger.rows if row.action == "dither")
    assert 8 * held / z.numel() <= bits
    with er.saving("dither", levels=256) as saved:
        F.cross_entropy(z * 1, labels)
    held = sum(row.after_nbytes for row in saved.ledger.rows if row.action == "dither")
    assert 8 * held / z.numel() > 8  # what was asked for


def squashed(z: Tensor) -> Tensor:
    """The log-density of a squashed normal distribution, as reinforcement learning writes it."""
    normal = torch.distributions.Normal(z[:, ::2] * 9, z[:, 1::2].clamp(-2, 1).exp())
    drawn = normal.rsample()
    squashed = torch.tanh(drawn)
    return (normal.log_prob(drawn) - torch.log(1 - squashed.pow(2) + 1e-6)).sum(-1).mean()


LABELS = torch.arange(ROWS) % WIDTH
DIVIDED = {
    "gan": lambda z: -(torch.log(z.mul(30).sigmoid() + 1e-8) + torch.log(1 - z.sigmoid())).mean(),
    "softmax": lambda z: -(F.softmax(z * 20, -1) + 1e-9).log()[torch.arange(ROWS), LABELS].mean(),
    "gathered": lambda z: -(z.mul(20).softmax(-1).gather(1, LABELS[:, None]) + 1e-9).log().mean(),
    "entropy": lambda z: (lambda p: (p * (p + 1e-8).log()).sum(-1).mean())((z * 20).softmax(-1)),
    "focal": lambda z: (lambda p: -((1 - p) ** 2 * (p + 1e-8).log()).mean())((z * 20).softmax(-1)),
    "quotient": lambda z: (1 / (1.0001 - (z * 20).tanh())).log().mean(),
    "clamped": lambda z: (z * 20).softmax(-1).clamp(min=1e-9).log().mean(),
    "squashed": squashed,
}


@pytest.mark.parametrize("name", DIVIDED)
def test_what_is_divided_by_what_is_left_of_a_saturated_result(name: str) -> None:
    """The GAN's had 1e10, the squashed one 4e7."""
    assert noise_of(net(), DIVIDED[name], inputs()) <= 0.05


def pairs(temperature: float) -> Loss:
    """InfoNCE: a row of the first half belongs to the same row of the second."""

    def loss(z: Tensor) -> Tensor:
        first, second = F.normalize(z, dim=-1).chunk(2)
        alike = torch.exp(first @ second.t() / temperature)
        return -torch.log(alike.diag() / alike.sum(1)).mean()

    return loss


def supervised(z: Tensor) -> Tensor:
    """A supervised contrastive loss."""
    rows = F.normalize(z, dim=-1)
    logits = rows @ rows.t() / 0.07
    logits = logits - logits.amax(1, keepdim=True).detach()
    others = 1 - torch.eye(ROWS)
    density = logits - (logits.exp() * others).sum(1, keepdim=True).log()
    same = (LABELS[:, None] == LABELS) * others
    return -((same * density).sum(1) / same.sum(1)).mean()


TARGETS = torch.randn(ROWS, WIDTH // 2, generator=torch.Generator().manual_seed(5))
EXPONENTIALS = {
    "pairs, 0.1": pairs(0.1),
    "pairs, 0.07": pairs(0.07),
    "supervised": supervised,
    "normal": lambda z: F.gaussian_nll_loss(z[:, ::2], TARGETS, (z[:, 1::2] * 5).exp()),
    "normal by hand": lambda z: (
        lambda mean, variance: ((TARGETS - mean).square() / variance + variance.log()).mean()
    )(z[:, ::2], (z[:, 1::2] * 5).exp() + 1e-6),
    "logsumexp by hand": lambda z: (z * 20).exp().sum(-1).log().mean(),
    "quotient": lambda z: (z[:, ::2] / ((z[:, 1::2] * 10).exp() + 1e-3)).square().mean(),
    "sigmoid by hand": lambda z: -torch.log(1 / (1 + torch.exp(-z * 20)) + 1e-8).mean(),
}


@pytest.mark.parametrize("name", EXPONENTIALS)
def test_exponentials_that_something_divides_by(name: str) -> None:
    """With codes of them the first had 66, the second 44,000, the normal distribution 9."""
    assert noise_of(net(), EXPONENTIALS[name], inputs()) <= 0.03


SCALED = {
    "normal": lambda z: (
        lambda mean, scale: ((TARGETS - mean).div(scale).square() / 2 + scale.log()).mean()
    )(z[:, ::2], F.softplus(z[:, 1::2] * 20) + 1e-6),
    "normal of torch": lambda z: (
        -torch.distributions.Normal(z[:, ::2], F.softplus(z[:, 1::2] * 40) + 1e-3)
        .log_prob(TARGETS)
        .mean()
    ),
    "binary": lambda z: (F.softplus(z * 30) - z * 30 * (z > 0)).mean(),
    "binary of large logits": lambda z: (F.softplus(z * 60) - z * 60 * (z > 0)).mean(),
}


@pytest.mark.parametrize("name", SCALED)
def test_tails_of_a_softplus(name: str) -> None:
    """With 16 levels they had 0.1 to 1.5."""
    assert noise_of(net(), SCALED[name], inputs()) <= 0.03


def log_probabilities(z: Tensor) -> Tensor:
    """Down to about -200: far below what a code of them has."""
    return (z * 200).log_softmax(-1)


OF_LOG_PROBABILITIES = {
    "sigmoid": lambda z: torch.sigmoid(log_probabilities(z) / 50 + 1).square().mean(),
    "silu": lambda z: F.silu(log_probabilities(z) / 50 + 1).square().mean(),
    "gelu": lambda z: F.gelu(-log_probabilities(z) / 30).square().mean(),
    "of some": lambda z: F.silu(log_probabilities(z)[:, ::2] / 50 + 1).square().mean(),
}


@pytest.mark.parametrize("name", OF_LOG_PROBABILITIES)
def test_nothing_is_made_of_log_probabilities_that_a_code_has_cut_off(name: str) -> None:
    """What was rebuilt from those from -24 up had a gErr2 of 0.8 to 300, whatever the levels."""
    assert noise_of(net(), OF_LOG_PROBABILITIES[name], inputs()) <= 0.03


def test_no_plan_makes_anything_of_cut_log_probabilities() -> None:
    """A plan may count on what is made of the exact ones alone.

    Two labels are as likely as each other: none is certain, where bf16 holds them all.
    """
    model, x = net(), inputs()

    def step() -> None:
        OF_LOG_PROBABILITIES["silu"](torch.cat([model(x)] * 2, -1)).backward()

    profile = er.measure(step, model=model, min_nbytes=0)
    found = {s.site.consumer: s.site.rebuildable for one in profile.storages for s in one.saves}
    assert found["silu"] is Rebuildable.FROM_EXACT


def saved_as(loss: Loss, **how: object) -> dict[str, set[str]]:
    with er.saving("dither", levels=16, min_nbytes=0, **how) as saved:
        made = loss(net()(inputs()))
    assert made.requires_grad  # a graph that nobody holds is held by nothing
    held: dict[str, set[str]] = {}
    for row in saved.ledger.rows:
        held.setdefault(row.consumer, set()).add(row.action)
    return held


def test_a_gate_that_nothing_divides_by_has_a_code() -> None:
    def gated(z: Tensor) -> Tensor:
        return z * torch.tanh(z) + z.softmax(-1) * torch.sigmoid(z) * torch.exp(z)

    held, names = saved_as(gated), {"tanh", "softmax", "sigmoid", "exp"}
    assert names <= held.keys()
    assert all("keep" not in held[name] for name in names)


def test_a_fit_plans_with_what_must_be_exact() -> None:
    """The profile of a step says so: no plan counts on a code of it, or of exp on a coarse one."""
    model, x = net(), inputs()

    def step() -> None:
        z = model(x)
        (z.exp().sum(-1).log() - torch.log(z.sigmoid() + 1e-8).sum(-1)).mean().backward()

    profile = er.measure(step, model=model, min_nbytes=0)
    sites = {s.site.consumer: s.site for one in profile.storages for s in one.saves}
    assert sites["sigmoid"].need is Need.EXACT
    assert (sites["exp"].need, sites["exp"].formula) == (Need.LOSSY, Formula.RELATIVE)


def test_it_is_said_where_a_code_was_made_too_early(caplog: pytest.LogCaptureFixture) -> None:
    def product(z: Tensor) -> Tensor:
        return (torch.sigmoid(z) * torch.sigmoid(z + 1) + 1e-8).log().mean()

    noise_of(net(), product, inputs())
    assert "'sigmoid'" in caplog.text


def test_few_results_wait_at_a_time() -> None:
    """Those of a recurrence are held by a list, and each call would look at all that wait."""
    layer, held, states = nn.Linear(WIDTH, WIDTH), inputs(), []
    with looking("dither", levels=16, min_nbytes=0) as saving:
        for _ in range(20):
            held = torch.tanh(layer(held))
            states.append(held)
            assert len(saving._serving.waiting) <= 8
    encoded = [row for row in saving.ledger.rows if row.consumer == "tanh"]
    assert {row.action for row in encoded} == {"dither"}
