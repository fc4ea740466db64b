"""One block of a Llama, written as Hugging Face writes it: what COAT's table of bytes is about.

    x -> RMSNorm -> q, k, v -> RoPE -> attention -> o -> + x -> RMSNorm -> SwiGLU -> + x

Unit of its bytes: U = batch x sequence x hidden x 2. Plain autograd saves 22.66 U of a bf16 block:
fp32 copies in the norms (2 + 1 each), 4 for attention, 1 each for two linear inputs, 8/3 each for
gate, silu(gate), up and their product.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class EagerRMSNorm(nn.Module):
    """RMSNorm of separate ops, in fp32 inside."""

    def __init__(self, hidden: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """x [..., hidden] -> the same shape and dtype."""
        wide = x.to(torch.float32)
        variance = wide.pow(2).mean(-1, keepdim=True)
        wide = wide * torch.rsqrt(variance + self.eps)
        return self.weight * wide.to(x.dtype)


class LlamaBlock(nn.Module):
    """x [batch, sequence, hidden] -> the same. fused: torch's RMSNorm in place of separate ops."""

    def __init__(self, hidden: int, heads: int, *, fused: bool = False) -> None:
        super().__init__()
        inner = 8 * hidden // 3
        norm = nn.RMSNorm if fused else EagerRMSNorm
        self.heads = heads
        self.norm1, self.norm2 = norm(hidden, eps=1e-6), norm(hidden, eps=1e-6)
        self.q, self.k, self.v, self.o = (nn.Linear(hidden, hidden, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(hidden, inner, bias=False) for _ in range(2))
        self.act = nn.SiLU()
        self.down = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """One block."""
        x = x + self.o(self._attention(self.norm1(x)))
        h = self.norm2(x)
        out: Tensor = x + self.down(self.act(self.gate(h)) * self.up(h))
        return out

    def _attention(self, h: Tensor) -> Tensor:
        B, T, D = h.shape
        q, k, v = (
            part(h).view(B, T, self.heads, -1).transpose(1, 2) for part in (self.q, self.k, self.v)
        )
        cos, sin = rope(T, D // self.heads, h)
        q, k = (part * cos + _rotated(part) * sin for part in (q, k))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return y.transpose(1, 2).reshape(B, T, D)


def rope(T: int, K: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin of the rotary angles, [T, K] each."""
    frequency = 10000.0 ** (-torch.arange(0, K, 2, device=like.device) / K)
    angle = torch.arange(T, device=like.device)[:, None] * frequency
    angle = torch.cat((angle, angle), -1)
    return angle.cos().to(like.dtype), angle.sin().to(like.dtype)


def _rotated(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)
