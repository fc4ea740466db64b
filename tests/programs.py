"""Random programs: views, changes in place, silent writes, chains of every op that has a recipe."""

import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from elbowroom.adaptive.policies import policy_of
from elbowroom.runtime.context import PROCESS, Context
from elbowroom.runtime.saving import Saving


def looking(
    policy: Any = None,
    *,
    min_nbytes: int = 32768,
    rebuild: bool = True,
    seed: int | None = None,
    **fields: Any,
) -> Saving:
    """What `er.saving` opens for a step that it does not know."""
    context = PROCESS if seed is None else Context(seed, learns=False)
    chosen = policy_of(policy, rebuild, fields)
    return Saving(chosen, min_nbytes=min_nbytes, context=context, shares=True)


N = 8  # every value is [N, N]


def fixed(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.4


W3, WC = fixed(9, N, N).requires_grad_(), fixed(8, 4, 4, 3, 3).requires_grad_()


def norm(x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:])


def batch_norm(x: Tensor) -> Tensor:
    return F.batch_norm(x, None, None, training=True)


def nhwc(x: Tensor) -> Tensor:
    return x.reshape(2, 4, 4, 2).contiguous(memory_format=torch.channels_last)


def into_a_buffer(x: Tensor) -> Tensor:
    buffer = torch.zeros(N, N)
    buffer[:, :4] = x[:, :4]
    buffer[:, 4:] = F.relu(x[:, 4:])
    return F.gelu(buffer)


def silently_scaled(x: Tensor) -> Tensor:
    with torch.no_grad():
        x.mul_(1.1)
    return x * 1


def part_in_place(
    part: Callable[[Tensor], Tensor], op: Callable[..., Tensor]
) -> Callable[[Tensor], Tensor]:
    def run(x: Tensor) -> Tensor:
        op(part(x))
        return x

    return run


def relu_(x: Tensor) -> Tensor:
    return F.relu(x, inplace=True)


def leaky_(x: Tensor) -> Tensor:
    return F.leaky_relu(x, inplace=True)


def relu6_(x: Tensor) -> Tensor:
    return F.hardtanh(x, 0.0, 6.0, inplace=True)


def dropout_(x: Tensor) -> Tensor:
    return F.dropout(x, 0.3, inplace=True)


def masked_attention(x: Tensor) -> Tensor:
    """By a mask that the model changes afterwards, in products of few columns."""
    mask = torch.zeros(1, N).masked_fill_(torch.arange(N) > 5, -1e4)
    halves = x.reshape(2, N // 2, N)
    logits = halves @ halves.transpose(1, 2) * 0.3
    logits = logits.reshape(N // 2, N) + mask
    mask.add_(1)
    weights = torch.softmax(logits, dim=-1, dtype=torch.float32).to(x.dtype)
    return (weights.t() @ weights + mask).softmax(0) @ x


def spread_out(x: Tensor) -> Tensor:
    """Rows that are gathered many times, of a tensor that no op saves and that changes then."""
    few = x[0] + x[1]
    many = few[None].index_select(0, torch.zeros(N, dtype=torch.int64))
    few.add_(1)
    return many.exp() * many


def added_up(x: Tensor) -> Tensor:
    """A bias of a row and a column, neither of which any op saves, in another order."""
    row, column = x[0] + 1, x[:, 1] - 1
    both = row[None, :] + column[:, None]
    row.mul_(2)
    return both.t().contiguous().sigmoid() * both.roll(1, 0)


class Gated(torch.autograd.Function):
    """x * sigmoid(x): it saves its input, what it makes inside, and its output."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        gate = torch.sigmoid(x)
        out = x * gate
        ctx.save_for_backward(x, gate, out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        x, gate, out = ctx.saved_tensors
        return grads[0] * (gate + out * (1 - gate) + 0 * x)


class Times(torch.autograd.Function):
    """a * b: it saves its inputs, which may be views of one."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return a * b

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        a, b = ctx.saved_tensors
        return grads[0] * b, grads[0] * a


INDEX = torch.tensor([3, 0, 7, 7, 1, 2, 5, 3])
FROM_END = torch.tensor([-1, 0, -8, 3, 3, -2, 7, 1])
UNARY: list[Callable[[Tensor], Tensor]] = [
    *(F.relu, F.gelu, F.silu, F.leaky_relu, torch.tanh, norm, batch_norm, torch.clone),
    *(relu_, dropout_, lambda x: F.silu(x, inplace=True), lambda x: F.leaky_relu(x, inplace=True)),
    *(
        lambda x: x.mul_(0.9),
        lambda x: x.add_(0.1),
        lambda x: x.sigmoid_(),
        lambda x: F.hardtanh(x, inplace=True),
    ),
    *(lambda x: F.dropout(x, 0.3), lambda x: F.dropout(x, 0.0), lambda x: F.group_norm(x, 2)),
    lambda x: relu_(batch_norm(x)),
    lambda x: F.relu(F.batch_norm(x, torch.zeros(N), torch.ones(N))),
    lambda x: F.instance_norm(x.reshape(2, 4, 8)).reshape(N, N),
    lambda x: leaky_(F.instance_norm(x.reshape(2, 4, 8))).reshape(N, N),
    lambda x: F.leaky_relu(F.instance_norm(x.reshape(2, 4, 8)).transpose(1, 2)).reshape(N, N),
    lambda x: F.leaky_relu(batch_norm(x), -0.5),
    lambda x: F.leaky_relu(batch_norm(x).t(), 0.0, inplace=True).t(),
    lambda x: leaky_(nhwc(x)).reshape(N, N),
    lambda x: F.relu6(batch_norm(x) * 4),
    lambda x: relu6_(batch_norm(x)),
    lambda x: F.relu(relu6_(norm(x * 8))),
    lambda x: relu6_(relu_(norm(x) * 4)),
    lambda x: F.relu6(nhwc(x)).reshape(N, N),
    lambda x: F.relu(leaky_(norm(x))),
    lambda x: leaky_(relu_(norm(x))),
    lambda x: torch.cat([F.leaky_relu(batch_norm(x)[:4]), F.gelu(batch_norm(x)[4:])]),
    lambda x: F.rms_norm(x, (N,)),
    *(
        lambda x: x.t(),
        lambda x: x.flip(0),
        lambda x: x[:4].repeat(2, 1),
        lambda x: x[:, ::2].repeat(1, 2),
    ),
    *(lambda x: x[:1].expand(N, N), lambda x: x.as_strided((N, N), (1, N)), lambda x: x * 0.7),
    lambda x: x.reshape(4, 2, 8).transpose(0, 1).reshape(N, N),
    lambda x: torch.tanh(norm(x).reshape(4, 2, 8).transpose(0, 1).reshape(N, N)),
    lambda x: torch.exp(norm(x).roll((1, 2), (0, 1))) * norm(x).t().contiguous(),
    lambda x: F.pad(F.silu(x)[:, :6], (1, 1)).sin(),
    spread_out,
    added_up,
    lambda x: torch.cat(x.chunk(2, -1)[::-1], -1),
    lambda x: torch.cat([F.gelu(part) for part in x.chunk(2, -1)], -1),
    lambda x: torch.cat([F.relu(part) for part in x.chunk(2, 0)], 0),
    lambda x: torch.stack([F.silu(row) for row in x.unbind(0)]),
    *(lambda x: F.gelu(x.t()).t(), lambda x: F.relu(x.t()).t(), lambda x: F.dropout(x.t(), 0.4)),
    lambda x: F.layer_norm(x.reshape(4, 16), (16,)).view(N, N),
    lambda x: F.gelu(x.reshape(2, 4, 8)).reshape(N, N),
    lambda x: F.linear(x.reshape(2, 4, 8), W3).reshape(N, N),
    lambda x: F.conv2d(x.reshape(1, 4, 4, 4), WC, padding=1).reshape(N, N),
    lambda x: relu_(F.conv2d(nhwc(x), WC, padding=1)).reshape(N, N),
    lambda x: F.relu(batch_norm(nhwc(x))).reshape(N, N),
    lambda x: F.silu(F.group_norm(x.reshape(2, 4, 2, 4), 2)).reshape(N, N),
    lambda x: F.max_pool2d(x.reshape(1, 1, N, N), 2).repeat(1, 1, 2, 2).view(N, N),
    lambda x: F.avg_pool2d(x.reshape(1, 4, 4, 4), 2).repeat(1, 1, 2, 2).reshape(N, N),
    lambda x: F.adaptive_max_pool2d(x.reshape(1, 4, 4, 4), 2).repeat(1, 1, 2, 2).reshape(N, N),
    lambda x: F.scaled_dot_product_attention(*(x.reshape(1, N, N) for _ in range(3))).view(N, N),
    *(lambda x: torch.exp(x.clamp(max=2)), lambda x: x.pow(2), lambda x: x.detach() + x),
    *(lambda x: torch.where(x > 0, x, x * 0.1), lambda x: x.masked_fill(x > 1, 0.5)),
    *(torch.sigmoid, torch.sin, F.softplus, F.hardswish, F.elu, F.mish, torch.square, torch.neg),
    *(lambda x: 1 - x, lambda x: x / 3, lambda x: 2 / (x.abs() + 1), lambda x: x**3, lambda x: -x),
    *(
        lambda x: F.hardswish(x, inplace=True),
        lambda x: x.tanh_(),
        lambda x: F.elu(x, inplace=True),
    ),
    *(
        lambda x: x.div_(2),
        lambda x: x.sub_(0.1),
        lambda x: x.softmax(-1),
        lambda x: x.log_softmax(0),
    ),
    lambda x: 0.5 * x * (1 + torch.tanh(0.8 * (x + 0.04 * torch.pow(x, 3)))),
    lambda x: x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-5),
    lambda x: torch.sub(x, torch.sigmoid(x), alpha=2),
    lambda x: torch.add(torch.tanh(x), torch.sin(x), alpha=0.3),
    lambda x: F.silu(norm(x)) * torch.sigmoid(norm(x)),
    lambda x: F.relu(F.relu(x) - 0.1),
    lambda x: F.dropout(F.gelu(norm(x)), 0.2),
    lambda x: torch.cat([F.relu(batch_norm(x)[:4]), F.gelu(batch_norm(x)[4:])]),
    lambda x: checkpoint(lambda t: F.gelu(norm(t)) * t, x, use_reentrant=False),
    *(into_a_buffer, silently_scaled, masked_attention),
    *(lambda x: norm(x)[FROM_END], lambda x: F.gelu(x)[None, FROM_END][0]),
    *(lambda x: norm(x)[INDEX], lambda x: F.gelu(x).index_select(1, INDEX)),
    lambda x: torch.softmax(torch.tanh(x @ x.t() / 4) * 2 + INDEX * 0.1, -1),
    *(part_in_place(lambda x: x[:4], op) for op in (relu_, leaky_, dropout_)),
    *(part_in_place(lambda x: x[:, 4:], op) for op in (relu_, leaky_, dropout_)),
    *(part_in_place(lambda x: x[::2], op) for op in (relu_, leaky_, relu6_, dropout_)),
    *(Gated.apply, lambda x: Gated.apply(F.gelu(x)), lambda x: Gated.apply(norm(x).t()) + x),
]
BINARY: list[Callable[[Tensor, Tensor], Tensor]] = [
    *(torch.add, torch.mul, torch.matmul, F.linear),
    lambda a, b: (torch.bmm(a.reshape(1, N, N), b.reshape(1, N, N)) * 0.2).softmax(-1).view(N, N),
    lambda a, b: (a @ b.t() * 0.2).softmax(-1) @ norm(b)[INDEX],
    *(lambda a, b: a @ b.t(), lambda a, b: torch.addmm(a, a, b), lambda a, b: a.add_(b)),
    *(
        torch.sub,
        lambda a, b: a / (b.abs() + 1),
        lambda a, b: torch.tanh(a) * b,
        lambda a, b: a - b.t(),
    ),
    *(lambda a, b: F.silu(a) * b, lambda a, b: a * b[:1], lambda a, b: a + b[:, :1], torch.mm),
    *(lambda a, b: a.mul_(b), lambda a, b: a.sub_(b), lambda a, b: torch.add(b, a, alpha=0.5)),
    *(lambda a, b: torch.cat([a[:4], b[4:]]), lambda a, b: (a[:3].copy_(b[:3]), a)[1]),
    *(Times.apply, lambda a, b: Times.apply(torch.tanh(a), 1 - b)),
]


class Model:
    """What a program computes with, and its input: its steps share the one, not the other."""

    def __init__(self) -> None:
        self.weights = [fixed(i, N, N).requires_grad_() for i in range(3)]
        self.norms = [nn.BatchNorm1d(N), nn.LayerNorm(N)]


def gradients(
    seed: int,
    context: Any,
    midway: Callable[[], None] | None = None,
    model: Model | None = None,
    step: int = 0,
    twist: random.Random | None = None,
) -> list[Tensor | None]:
    """The gradients of program number `seed` for all its weights.

    step: of several, whose inputs differ. twist: some ops, or what they read, are others than usual
    """
    draw = random.Random(seed)
    torch.manual_seed(seed + step)
    model = model or Model()
    weights, norms = model.weights, model.norms
    x, length = torch.randn(N, N), draw.randint(4, 14)
    with context, torch.autocast("cpu", torch.bfloat16, enabled=seed % 4 == 3):
        pool = [F.linear(x, weights[0]), weights[1] * 1]
        for i in range(length):
            a, b = draw.choice(pool[-3:]), draw.choice(pool)
            a = (
                a.clone() if 0 in a.stride() else a
            )  # changes in place of an expanded tensor are refused by torch
            kind = draw.random()
            if twist is not None and twist.random() < 0.2:  # another operand, or another op
                a, b = twist.choice([(a, b), (b, a), (twist.choice(pool).clone(), b)])
                a = a.clone() if 0 in a.stride() else a
                kind, draw = twist.choice([(kind, draw), (twist.random(), twist)])
            if kind < 0.6:
                pool.append(draw.choice(UNARY)(a))
            elif kind < 0.7:
                pool.append(F.linear(a, weights[2]))
            elif kind < 0.78:
                pool.append(draw.choice(norms)(a))
            else:
                pool.append(draw.choice(BINARY)(a, b))
            if midway is not None and i == length // 2:
                midway()
        coefficients = torch.linspace(-1, 1, N * N).view(N, N)
        loss = sum((value.float() * coefficients).sum() for value in pool[-3:])
    wanted = [*weights, W3, WC, *(p for each in norms for p in each.parameters())]
    return list(torch.autograd.grad(loss, wanted, allow_unused=True))


def same(one: list[Tensor | None], other: list[Tensor | None]) -> bool:
    return all(
        a is b
        if a is None or b is None
        else torch.equal(a.nan_to_num(nan=-7.0), b.nan_to_num(nan=-7.0))
        for a, b in zip(one, other, strict=True)
    )
