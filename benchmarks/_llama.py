"""A small Llama on bytes, and the ways to train it whole that `end_to_end.py` compares.

bytes -> embedding -> blocks (RMSNorm, RoPE, causal SDPA, SwiGLU) -> RMSNorm -> head -> 256

autocast  fp32 weights, forward in bf16: 4 weights + 4 gradients + 8 states = 16 bytes a parameter
masters   bf16 weights beside fp32 masters: 2 + 2 + 4 + 8 = 16
residual  bf16 weights and er.optim's 8-bit rest of them: 2 + 2 + 1 + states
sr        bf16 weights, rounded stochastically: 2 + 2 + states
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import elbowroom as er
from elbowroom.demo.llama import LlamaBlock
from elbowroom.demo.tasks import Batch, NextByte

RECIPE: dict[str, Any] = {"lr": 2e-3, "weight_decay": 0.01, "betas": (0.9, 0.95)}


class Hidden(NamedTuple):
    """What the head reads, and its weight: the loss decides whether there are logits."""

    x: Tensor
    head: Tensor


class Llama(nn.Module):
    """recompute: every block inside torch.utils.checkpoint."""

    def __init__(self, hidden: int, depth: int, heads: int, *, recompute: bool = False) -> None:
        super().__init__()
        self.token = nn.Embedding(256, hidden)
        self.blocks = nn.ModuleList(LlamaBlock(hidden, heads) for _ in range(depth))
        self.norm = nn.RMSNorm(hidden, eps=1e-6)
        self.head = nn.Linear(hidden, 256, bias=False)
        self.recompute = recompute

    def forward(self, tokens: Tensor) -> Hidden:
        x = self.token(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return Hidden(self.norm(x), self.head.weight)


class MasterAdamW(torch.optim.AdamW):
    """Over fp32 masters of bf16 parameters, one after the other: one fp32 gradient at a time."""

    def __init__(self, params: Any, **settings: Any) -> None:
        self.narrow = list(params)
        super().__init__([p.detach().float() for p in self.narrow], fused=True, **settings)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for p, master in zip(self.narrow, self.param_groups[0]["params"], strict=True):
            assert p.grad is not None
            master.grad, p.grad = p.grad.float(), None
            super().step()  # passes over masters without a gradient
            master.grad = None
            p.copy_(master)


@dataclass(frozen=True)
class Arm:
    """A way to train.

    state   of er.optim; None: torch.optim.AdamW(fused=True)
    saving  a policy of er.saving and its settings; None: plain autograd
    twin    the arm whose bits it should have, so that its losses need not be found again
    """

    told: str
    weights: Literal["autocast", "masters", "residual", "sr"] = "autocast"
    state: str | None = None
    saving: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    recompute: bool = False
    released: bool = False
    twin: str | None = None
    other_order: bool = False

    def precision(self) -> AbstractContextManager[object]:
        """What it computes in, also when nothing is trained."""
        if self.weights == "autocast":
            return torch.autocast("cpu", dtype=torch.bfloat16)
        return nullcontext()

    def context(self) -> AbstractContextManager[object]:
        """Around forward and loss."""
        stack = ExitStack()
        stack.enter_context(self.precision())
        if self.saving is not None:
            stack.enter_context(er.saving(self.saving, **self.settings))
        return stack


@dataclass(frozen=True)
class Training:
    """A task of the demo, as one arm trains it."""

    task: NextByte
    arm: Arm
    depth: int
    heads: int

    def model(self) -> nn.Module:
        made = Llama(self.task.width, self.depth, self.heads, recompute=self.arm.recompute)
        return made if self.arm.weights == "autocast" else made.bfloat16()

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        params, arm = list(model.parameters()), self.arm
        if arm.weights == "masters":
            return MasterAdamW(params, **RECIPE)
        if arm.state is None:
            return torch.optim.AdamW(params, fused=True, **RECIPE)
        rounding = "nearest" if arm.weights == "autocast" else arm.weights
        made = er.optim.AdamW(params, state=arm.state, weights=rounding, **RECIPE)
        if arm.released:
            made.release_gradients()
        return made

    def batches(self, seed: int) -> Iterator[Batch]:
        return self.task.batches(seed + 1000 * self.arm.other_order)

    def loss(self, hidden: Hidden, targets: Tensor) -> Tensor:
        """Chunked wherever er.optim is; 256 classes are too few for it to matter here."""
        if self.arm.state is not None:
            return er.nn.linear_cross_entropy(hidden.x, hidden.head, targets)
        logits = F.linear(hidden.x, hidden.head)
        return F.cross_entropy(logits.flatten(0, -2).float(), targets.flatten())

    def test_batches(self) -> Iterator[Batch]:
        return self.task.test_batches()
