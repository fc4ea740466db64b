"""Smaller integers (specification: `reference/narrow.py`), in one pass, without temporaries."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from elbowroom.kernels import outputs
from elbowroom.kernels.layout import tiles
from elbowroom.kernels.triton.device import TILE, program_tiles
from elbowroom.kernels.triton.launch import launch


def narrow(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    out = outputs.narrow(x, dtype)
    lost = torch.empty(tiles(x.numel()), dtype=torch.int32, device=x.device)
    launch(_narrow, tiles(x.numel()), x, out, lost, x.numel())
    return out, lost.sum()


@triton.jit
def _narrow(p_x, p_out, p_lost, N, R: tl.constexpr):
    i_t, n = program_tiles(N, R)
    o_e = tl.arange(0, TILE)[None, :]
    m_e = o_e < n[:, None]  # [R, TILE]
    o_x = (i_t * TILE)[:, None] + o_e
    b_x = tl.load(p_x + o_x, mask=m_e, other=0)
    b_y = b_x.to(p_out.dtype.element_ty)
    tl.store(p_out + o_x, b_y, mask=m_e)
    b_lost = tl.sum((b_y.to(b_x.dtype) != b_x).to(tl.int32), axis=1)
    tl.store(p_lost + i_t, b_lost, mask=n > 0)
