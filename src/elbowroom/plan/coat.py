"""COAT's mixed granularity: 8-bit floats for what a transformer's block saves.

    attention's q, k, v, output, statistics   kept
    norms, activations, products              E4M3, a scale for each `group_size` elements
    linear layers, matmuls, convolutions      E4M3, a scale for each `wide` elements
    what can be rebuilt from any of these     not held

What is held of a Llama block is then attention's part and the codes of its two residual inputs, of
gate and of up; normed inputs, silu(gate) and the product are rebuilt. The error of an 8-bit
float is relative, at most 2^-4 of any value down to 2^-14 of its group's largest, and that is why
products may carry it.

COAT has one scale for the whole input of a linear layer, and one for 16 elements elsewhere; it
also holds what we make again. A group of 256 is never worse than the tensor, costs 0.06 bits an
element, and needs no pass that finds the maximum first. Groups of 16 would cost 1 bit an element
where 32 cost half of one. (Facts: arXiv 2410.19313.)

The same places may hold dithered integers (`format` int8, int4) instead: unbiased, and at 8 bits a
gradient error over ten times smaller on even channels, but larger where a few channels are orders
of magnitude above the others, which is what floats are for (measured: docs/log.md).
"""

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from elbowroom.codecs import Cast, Codec, Dither
from elbowroom.errors import UnknownField
from elbowroom.kernels.layout import GROUP_SIZES
from elbowroom.plan.action import Action, Encode, Keep, Rebuild
from elbowroom.plan.policy import Exact
from elbowroom.plan.precision_floor import ATTENTION
from elbowroom.plan.site import Need, Rebuildable, Site

Format = Literal["fp8", "int8", "int4"]

_LINEAR = frozenset(
    (
        *("linear", "matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "addmm", "baddbmm"),
        *(f"conv{kind}{n}d" for kind in ("", "_transpose") for n in (1, 2, 3)),
    )
)


@dataclass(frozen=True)
class Coat:
    """Policy that uses exact actions where they apply, and 8-bit floats elsewhere.

    group_size  the number of elements that share a scale, for inputs of norms, activations and
                products
    wide        the same, for inputs of linear layers, matmuls and convolutions
    format      "fp8": E4M3, as in COAT; "int8", "int4": dithered integers of this number of bits
    rebuild     outputs may be rebuilt from encoded tensors
    """

    group_size: int = 32
    wide: int = 256
    format: Format = "fp8"
    rebuild: bool = True
    exact: ClassVar[bool] = False
    reruns_attention: ClassVar[bool] = False  # which keeps all that a second run would need
    again: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for name in ("group_size", "wide"):
            size = getattr(self, name)
            if size not in GROUP_SIZES or not isinstance(size, int):
                raise UnknownField(
                    f"policy 'coat': {name}={size!r} is not possible; "
                    f"{name} is one of {', '.join(map(str, GROUP_SIZES))}"
                )
        if self.format not in get_args(Format):
            raise UnknownField(
                f"policy 'coat': format={self.format!r} is not possible; "
                f"format is one of {', '.join(get_args(Format))}"
            )

    def __call__(self, site: Site) -> Action:
        exact = Exact(self.rebuild)(site)
        if not isinstance(exact, Keep) or site.need is not Need.LOSSY:
            return exact
        if site.consumer == ATTENTION:
            return Keep("attention keeps q, k, v and its output")
        if self.rebuild and site.rebuildable is not Rebuildable.NO:
            return Rebuild()
        if site.shape and site.shape[-1] == 1:
            return Keep("one value a row: a statistic, or a gate")
        codec = self._codec(self.wide if site.consumer in _LINEAR else self.group_size)
        if site.dtype not in codec.dtypes:
            return Keep(f"{codec.id} does not take {str(site.dtype).removeprefix('torch.')}")
        return Encode(codec, site.facts)

    def _codec(self, group_size: int) -> Codec:
        if self.format == "fp8":
            return Cast("fp8_e4m3", group_size)
        return Dither(bits=8 if self.format == "int8" else 4, group_size=group_size)
