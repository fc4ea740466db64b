"""A policy maps site facts to an action.

These are uniform: one rule for all sites, no budget.

    KeepAll     measures, changes nothing
    Exact       masks, indices and rebuilding only: no bit of any gradient changes
    Lossy       Exact first; then one codec wherever the consumer tolerates an error
    Lean        Lossy with the fewest bits: one code for norm, ReLU and the next convolution
    Coat        Exact first; then 8-bit floats of mixed granularity, as in COAT
    OffloadRest Exact first; then what is large enough is moved to host memory or a file

A policy may assume nothing beyond the site, so that it can be saved, compared and tested without a
model.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod
from typing import ClassVar, Literal, get_args

import torch

from elbowroom.codecs import BitMask, Cast, Codec, Dither, Facts, Narrow, Sided
from elbowroom.errors import UnknownField
from elbowroom.kernels.layout import FOLDS, GROUP_SIZES
from elbowroom.plan.action import Action, Encode, Keep, Offload, Rebuild
from elbowroom.plan.precision_floor import ATTENTION, at_precision_floor, if_curved
from elbowroom.plan.site import Need, Rebuildable, Site

Policy = Callable[[Site], Action]

_MASK = Encode(BitMask(), Facts(value=1.0))
_SHARED = 4  # levels of a code that several values share
_EACH = 128  # elements of a channel for each value that shares a code: an error of 0.3 % at most


@dataclass(frozen=True)
class KeepAll:
    """Policy that changes nothing; the ledger shows what plain autograd stores."""

    def __call__(self, site: Site) -> Action:
        return Keep("the policy keeps everything")


@dataclass(frozen=True)
class Exact:
    """Policy of exact actions only."""

    rebuild: bool = True

    def __call__(self, site: Site) -> Action:
        if site.need is Need.SHAPE:
            return Rebuild()
        if site.need is Need.MASK:
            return _MASK
        if site.dtype is torch.bool:
            return Encode(BitMask(), Facts(value=1.0))
        if site.facts.value is not None and site.dtype in BitMask.dtypes:
            return Encode(BitMask(), site.facts)
        if site.facts.largest is not None and site.dtype in Narrow.dtypes:
            return Encode(Narrow(), site.facts)
        if self.rebuild and site.rebuildable is Rebuildable.EXACT:
            return Rebuild()
        return Keep(site.why or "no exact action applies")


@dataclass(frozen=True)
class Lossy:
    """Policy that uses exact actions where they apply, and `codec` wherever an error is tolerated.

    Attention, GELU and SiLU get a more precise setting of the codec (`precision_floor.py`).

    rebuild  outputs may be rebuilt from encoded tensors
    again    ops may run forward again, instead of saving intermediate results
    """

    codec: Codec
    rebuild: bool = True
    again: ClassVar[bool] = True

    @property
    def exact(self) -> bool:
        """True if no bit of any gradient changes."""
        return self.codec.lossless

    def __call__(self, site: Site) -> Action:
        exact = Exact(self.rebuild)(site)
        if not isinstance(exact, Keep) or site.need is not Need.LOSSY:
            return exact
        if self.rebuild and site.rebuildable is not Rebuildable.NO:
            return Rebuild()
        if site.dtype not in self.codec.dtypes:
            return Keep(
                f"codec '{self.codec.id}' does not take {str(site.dtype).removeprefix('torch.')}"
            )
        curved = if_curved(self.codec, site) if self.rebuild else None
        return Encode(at_precision_floor(self.codec, site), site.facts, curved=curved)


@dataclass(frozen=True)
class Lean:
    """Policy that uses exact actions where they apply, and dither elsewhere.

    The number of levels depends on what reads the values.

    upper       levels of values that the ReLU passes on, which the next convolution reads
    lower       levels of values that the ReLU sets to zero, which only the norm's backward reads
    fold        the number of such values that share one code of 4 levels, where all of the norm's
                gradient comes through the ReLU, and channels have 128 elements for each; 1: none
    plain       levels for inputs of norms that no ReLU follows, and for tensors without exact zeros
    group_size  the number of elements that share a step
    rebuild     outputs may be rebuilt from encoded tensors; otherwise no code serves two readers,
                and `lower` is not used
    """

    upper: int = 4
    lower: int = 2
    plain: int = 4
    group_size: int = 64
    fold: int = 8
    rebuild: bool = True
    exact: ClassVar[bool] = False
    again: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for name in ("upper", "lower", "plain"):
            levels = getattr(self, name)
            if type(levels) is not int or not 2 <= levels <= 256:
                raise UnknownField(
                    f"policy 'lean': {name}={levels!r} is not possible; "
                    f"{name} is an int from 2 to 256, how many levels a code has"
                )
        for name, possible in (("group_size", GROUP_SIZES), ("fold", FOLDS)):
            size = getattr(self, name)
            if type(size) is not int or size not in possible:
                raise UnknownField(
                    f"policy 'lean': {name}={size!r} is not possible; "
                    f"{name} is one of {', '.join(map(str, possible))}"
                )

    def __call__(self, site: Site) -> Action:
        exact = Exact(self.rebuild)(site)
        if not isinstance(exact, Keep) or site.need is not Need.LOSSY:
            return exact
        levels = Dither(levels=self.plain, group_size=self.group_size)
        if self.rebuild and site.rebuildable is not Rebuildable.NO:
            return Rebuild()
        if site.dtype not in Dither.dtypes:
            return Keep(f"dither does not take {str(site.dtype).removeprefix('torch.')}")
        if site.facts.has_zeros:
            zeros = Dither(levels=self.upper, group_size=self.group_size)
            return Encode(at_precision_floor(zeros, site), site.facts)
        plain, curved = (
            at_precision_floor(levels, site),
            if_curved(levels, site) if self.rebuild else None,
        )
        if not self.rebuild or site.consumer != "batch_norm" or site.curved:
            return Encode(plain, site.facts, curved=curved)
        with_mask = Sided(self.upper, self.lower, self.group_size)
        fold = self._fold(site)
        if fold == 1:
            return Encode(plain, site.facts, with_mask, curved=curved)
        gated = replace(with_mask, lower=_SHARED, fold=fold)
        behind_sum = replace(gated, upper=self.plain)
        return Encode(plain, site.facts, with_mask, gated, behind_sum, curved)

    def _fold(self, site: Site) -> int:
        """Returns the largest fold that a channel's elements bear: it adds fold / elements."""
        each = prod(site.shape) // site.shape[1]
        possible = (fold for fold in FOLDS if fold <= min(self.fold, each // _EACH))
        return max(possible, default=1)


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

        attention's q, k, v, output, statistics   kept
        norms, activations, products              E4M3, a scale for each `group_size` elements
        linear layers, matmuls, convolutions      E4M3, a scale for each `wide` elements
        what can be rebuilt from any of these     not held

    What is held of a Llama block is then attention's part and the codes of its two residual inputs,
    of gate and of up; normed inputs, silu(gate) and the product are rebuilt. The error of an 8-bit
    float is relative, at most 2^-4 of any value down to 2^-14 of its group's largest, and that is
    why products may carry it.

    COAT has one scale for the whole input of a linear layer, and one for 16 elements elsewhere; it
    also holds what we make again. A group of 256 is never worse than the tensor, costs 0.06 bits an
    element, and needs no pass that finds the maximum first. Groups of 16 would cost 1 bit an
    element where 32 cost half of one. (Facts: arXiv 2410.19313.)

    The same places may hold dithered integers (`format` int8, int4) instead: unbiased, and at 8
    bits a gradient error over ten times smaller on even channels, but larger where a few channels
    are orders of magnitude above the others, which is what floats are for (measured: docs/log.md).

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


Tier = Literal["host", "file"]


@dataclass(frozen=True)
class OffloadRest:
    """Policy that uses exact actions where they apply, and moves all other tensors elsewhere.

    With a codec, what tolerates its error is encoded first: fewer bytes travel. A code of 4 bits
    takes an eighth of the link, and of the place at its end; without one no bit changes.

    Below a MiB a transfer costs more than the room is worth.

    Codes of values are moved, too; masks stay.

    tier         "host", "file", or None: host memory for tensors on a GPU, otherwise a file
    directory    the folder of the file; None: the default of `tempfile`
    from_nbytes  storages smaller than this number of bytes are kept
    rebuild      outputs may be rebuilt from the tensors that their op saves
    codec        what encodes a tensor before it is moved, where its op tolerates the error; None:
                 all are moved as they are
    """

    tier: Tier | None = None
    directory: str | None = None
    from_nbytes: int = 1 << 20
    rebuild: bool = True
    codec: Codec | None = None

    def __post_init__(self) -> None:
        if self.tier not in ("host", "file", None):
            raise UnknownField(
                f"policy 'offload': tier={self.tier!r} is not possible; tier is 'host', 'file', or "
                "None for host memory on a GPU and a file elsewhere"
            )
        if self.directory is not None and not isinstance(self.directory, str):
            raise UnknownField(
                f"policy 'offload': directory={self.directory!r} is not possible; "
                "directory is the path of one, as a str, or None"
            )
        if self.codec is not None and not isinstance(self.codec, Codec):
            raise UnknownField(
                f"policy 'offload': codec={self.codec!r} is not possible; "
                "codec is a codec, the name of a setting as 'dither, 16 levels', or None"
            )
        nbytes = self.from_nbytes
        if not isinstance(nbytes, int) or isinstance(nbytes, bool) or nbytes < 0:
            raise UnknownField(
                f"policy 'offload': from_nbytes={nbytes!r} is not possible; "
                "from_nbytes is an int of bytes, 0 or more"
            )

    @property
    def exact(self) -> bool:
        """True if no bit of any gradient changes."""
        return self.codec is None or self.codec.lossless

    @property
    def again(self) -> bool:
        """True if ops may run forward again, instead of saving intermediate results."""
        return not self.exact

    def __call__(self, site: Site) -> Action:
        held = Exact(self.rebuild)(site)
        if self.codec is not None:
            held = Lossy(self.codec, self.rebuild)(site)
        is_small = site.nbytes < self.from_nbytes
        if isinstance(held, Encode) and site.need is not Need.MASK and not is_small:
            return replace(held, moved=Offload(self.tier, self.directory))
        if not isinstance(held, Keep):
            return held
        if is_small:
            return Keep("too small to be worth a transfer")
        return Offload(self.tier, self.directory)
