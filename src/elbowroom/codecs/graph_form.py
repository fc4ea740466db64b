"""The form of a codec inside of a compiled graph (`Codec.graph_form`).

A graph cannot store a tensor raw, as an eager codec does: the number and sizes of its buffers are
those of `_layout`, whatever the values are. So a form never reads values. A tensor that the codec
would store raw (with a NaN, an Inf or a value beyond its range) decodes to NaN or Inf, as on a GPU.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, dtype

Buffers = tuple[Tensor, ...]
Seed = int | Tensor  # 64 bits; a tensor (int64 [1]) lies on the device of what is encoded
Written = tuple[
    Callable[[Tensor, Tensor], Buffers], Callable[[Buffers, Tensor, int, dtype], Tensor]
]


@dataclass(frozen=True)
class GraphForm:
    """A codec on flat tensors, as a graph runs it.

    quantize    (flat, seed) -> buffers, by kernels. seed: a number, or int64 [1] on the device
    dequantize  (buffers, seed, out): writes out [N]
    written     the same written out in aten ops, which Inductor fuses with neighboring ops:
                (flat, seed) -> buffers, and (buffers, seed, N, dtype) -> flat. None: kernels are
                used on every device
    any_size    whether sizes may be symbolic
    """

    quantize: Callable[[Tensor, Seed], Buffers]
    dequantize: Callable[[Buffers, Seed, Tensor], None]
    written: Written | None = None
    any_size: bool = True


def converted(to: dtype) -> GraphForm:
    """The form of a codec that only converts elements."""
    return GraphForm(
        lambda x, seed: (x.to(to, copy=True),),
        lambda buffers, seed, out: _copy(out, buffers[0]),
        (lambda x, seed: (x.to(to),), lambda buffers, seed, n, dtype: buffers[0].to(dtype)),
    )


def _copy(out: Tensor, x: Tensor) -> None:
    out.copy_(x)
