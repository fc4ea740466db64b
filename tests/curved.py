"""Small functions that are far from linear, for tests of what codes do to their gradients."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROWS, KERNELS, CLASSES = 2048, 8, 32
LABELS = torch.arange(ROWS) % CLASSES


class Net(nn.Module):
    """Two layers, and Gaussians around learned middles; `made` gives the loss."""

    def __init__(self, made: Callable[["Net", Tensor], Tensor], width: float = 0.1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.made = made
        self.scale = nn.Parameter(torch.ones(1))
        self.middles = nn.Parameter(torch.rand(KERNELS, 3))
        self.widths = nn.Parameter(torch.full((KERNELS,), float(width)))
        self.weights = nn.Parameter(torch.randn(KERNELS))
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.made(self, x)

    def features(self, z: Tensor) -> Tensor:
        return self.second(F.relu(self.first(z)))

    def points(self, z: Tensor) -> Tensor:
        """In the unit cube, as the middles are."""
        return z[:, :3].sigmoid() * self.scale

    @property
    def rate(self) -> Tensor:
        return 1 / (2 * self.widths**2)


def gradient(net: Net, call: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    net.zero_grad()
    torch.manual_seed(3)
    call(x).backward()
    return torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None])


def inputs() -> Tensor:
    return torch.randn(ROWS, 16, generator=torch.Generator().manual_seed(1))


def noise(got: Tensor, true: Tensor) -> float:
    return float((got - true).square().sum() / true.square().sum())


def sizes(net: Net, x: Tensor) -> Tensor:
    return x.pow(2).sum(-1, keepdim=True) + net.middles.pow(2).sum(-1)


def of_batches(net: Net, x: Tensor) -> Tensor:
    x = x.view(4, -1, 3)
    middles = net.middles.expand(4, KERNELS, 3)
    added = x.pow(2).sum(-1, keepdim=True) + middles.pow(2).sum(-1)[:, None]
    return torch.baddbmm(added, x, middles.mT, alpha=-2).reshape(-1, KERNELS)


DISTANCES: dict[str, Callable[[Net, Tensor], Tensor]] = {
    "multiplied out": lambda net, x: sizes(net, x) - 2 * x @ net.middles.t(),
    "addmm": lambda net, x: torch.addmm(sizes(net, x), x, net.middles.t(), alpha=-2),
    "baddbmm": of_batches,
    "cdist": lambda net, x: torch.cdist(x, net.middles).square(),
    "broadcast": lambda net, x: (x[:, None] - net.middles).square().sum(-1),
    "einsum": lambda net, x: sizes(net, x) - 2 * torch.einsum("nd,kd->nk", x, net.middles),
}


def near(distance: str) -> Callable[[Net, Tensor], Tensor]:
    """The loss of a sum of Gaussians of these distances."""

    def loss(net: Net, z: Tensor) -> Tensor:
        kernels = torch.exp(-DISTANCES[distance](net, net.points(z)) * net.rate)
        return F.mse_loss(kernels @ net.weights, z[:, 0])

    return loss


def attention(net: Net, z: Tensor) -> Tensor:
    q = net.features(z).view(16, 128, 32)
    return ((q @ q.mT / 5).softmax(-1) @ q).square().mean()


def pairs(net: Net, z: Tensor) -> Tensor:
    first, second = F.normalize(net.features(z[:512]), dim=-1).chunk(2)
    return F.cross_entropy(first @ second.t() / 0.05, torch.arange(256))


def mixture(net: Net, z: Tensor) -> Tensor:
    near = -DISTANCES["multiplied out"](net, net.points(z)) / (2 * 0.03**2)
    return -torch.logsumexp(near + net.weights.log_softmax(0), -1).mean()


def layer_norm(net: Net, z: Tensor) -> Tensor:
    far = net.features(z) - net.features(z).mean(-1, keepdim=True)
    return (far * torch.rsqrt(far.square().mean(-1, keepdim=True) + 1e-5)).pow(3).mean()


CURVED: dict[str, Callable[[Net, Tensor], Tensor]] = {
    "softplus below": lambda n, z: (1 / (F.softplus(n.features(z)) + 0.01)).mean(),
    "square below": lambda n, z: (1 / (n.features(z).square() + 1e-3)).mean(),
    "sign": lambda n, z: (n.features(z) / (n.features(z).abs() + 0.01)).square().mean(),
    "unit": lambda n, z: (F.normalize(n.features(z), dim=-1) * n.widths[0]).pow(4).mean(),
    "power 8": lambda n, z: n.features(z).pow(8).mean(),
    "power 20": lambda n, z: n.features(z).abs().add(0.5).pow(20).mean().log(),
    "power -2": lambda n, z: n.features(z).abs().add(0.1).pow(-2).mean(),
    "power 0.5": lambda n, z: n.features(z).abs().add(1e-6).pow(0.5).mean(),
    "root": lambda n, z: (n.features(z).square() + 1e-6).sqrt().mean(),
    "root of a relu": lambda n, z: (n.features(z).relu() + 1e-6).sqrt().mean(),
    "cube": lambda n, z: (n.features(z) * n.features(z) * n.features(z)).mean(),
    "generalized mean": lambda n, z: n.features(z).clamp(1e-6).pow(3).mean(-1).pow(1 / 3).mean(),
    "logarithm": lambda n, z: (n.features(z).relu() + 1e-3).log().mean(),
    "log-sum-exp": lambda n, z: n.features(z).mul(5).exp().sum(-1).log().mean(),
    "log of a sigmoid": lambda n, z: -(n.features(z).mul(5).sigmoid() + 1e-8).log().mean(),
    "log of 1 - tanh^2": lambda n, z: (1 - n.features(z).mul(5).tanh().pow(2) + 1e-6).log().mean(),
    "log of a softmax": lambda n, z: -(n.features(z).softmax(-1) + 1e-8).log()[:, 0].mean(),
    "log of a sum": lambda n, z: n.features(z).sigmoid().sum(-1).log().mean(),
    "artanh": lambda n, z: n.features(z).tanh().mul(0.999).atanh().square().mean(),
    "arccos": lambda n, z: n.features(z).tanh().mul(0.999).acos().mean(),
    "logit": lambda n, z: n.features(z).mul(5).sigmoid().logit(1e-6).square().mean(),
    "sine": lambda n, z: n.features(z).mul(10).sin().square().mean(),
    "exp": lambda n, z: n.features(z).mul(5).exp().mean(),
    "exp of a softplus": lambda n, z: F.softplus(n.features(z)).mul(-30).exp().sum(),
    "sinh": lambda n, z: n.features(z).mul(5).sinh().mean(),
    "square below 0": lambda n, z: n.features(z).square().mul(-500).exp().mean(),
    "likelihood": lambda n, z: F.gaussian_nll_loss(
        n.features(z)[:, :16], z, n.features(z)[:, 16:].mul(3).exp()
    ),
    "fits": lambda n, z: F.mse_loss(n.features(z), n.features(z).detach() + 0.1 * z.repeat(1, 2)),
    "cross entropy": lambda n, z: F.cross_entropy(n.features(z) * 100, LABELS),
    "cross entropy that fits": lambda n, z: F.cross_entropy(
        n.features(z) * 100, n.features(z).detach().argmax(-1)
    ),
    "binary": lambda n, z: F.binary_cross_entropy_with_logits(
        n.features(z) * 30, (n.features(z).detach() > 0).float()
    ),
    "binary of 200": lambda n, z: F.binary_cross_entropy_with_logits(
        n.features(z) * 1000, (n.features(z).detach() > 0).float()
    ),
    "sigmoid of 200": lambda n, z: (n.features(z) * 1000).sigmoid().square().mean(),
    "tanh of 200": lambda n, z: (n.features(z) * 1000).tanh().square().mean(),
    "z-loss": lambda n, z: (
        F.cross_entropy(n.features(z) * 50, LABELS)
        + 1e-3 * (n.features(z) * 50).logsumexp(-1).square().mean()
    ),
    "sharp softmax": lambda n, z: n.features(z).mul(100).softmax(-1).square().mean(),
    "attention": attention,
    "contrastive": pairs,
    "mixture": mixture,
    "layer norm": layer_norm,
    "gelu": lambda n, z: F.gelu(n.features(z)).square().mean(),
    "silu": lambda n, z: F.silu(n.features(z)).square().mean(),
}
