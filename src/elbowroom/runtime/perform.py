"""An action becomes a handle: the only place that matches on actions.

A script has shorter ways for small codes and for recipes (`replay/compiled.py`), to the same end.
"""

from collections.abc import Callable

from torch import Tensor

from elbowroom.codecs.base import Seed
from elbowroom.errors import PlanError
from elbowroom.kernels.fakes import has_values, would_wait
from elbowroom.plan import Action, Encode, Keep, Need, Offload, Rebuild, SiteName
from elbowroom.runtime.context import Context
from elbowroom.runtime.handles import (
    EncodeHandle,
    Handle,
    KeepHandle,
    OffloadHandle,
    RebuildHandle,
)
from elbowroom.runtime.handles.rebuild import Ready
from elbowroom.runtime.normal import Normalized, Statistics, of_rows
from elbowroom.runtime.statistics import layout_of
from elbowroom.runtime.tiers import tier_for

_NOWHERE = SiteName("", "")


def perform(
    action: Action,
    base: Tensor,
    need: Need,
    ready: Ready | None,
    seed: Seed,
    on_outlived: Callable[[], None] | None = None,
    statistics: Statistics | None = None,
    name: SiteName = _NOWHERE,
    context: Context | None = None,
) -> Handle:
    """Performs an action on `base`, a tensor that covers its storage; returns the handle.

    ready       its recipe, if it has one
    statistics  of the norm that it is the input of
    name        of the site
    context     what it has learned: coders of such tensors, how much memory a code gets whose size
                only the device knows, in which order offloaded tensors are brought back
    """
    match action:
        case Keep(why):
            return KeepHandle(base, why)
        case Encode(codec, facts):
            x = base if action.least is None else _from(action.least, base)
            normal = normalized(action, x, statistics)
            affine = None if normal is None else normal.normalize()
            coder = None if context is None else context.coders.of(codec, x, facts)
            if coder is not None and not isinstance(seed, Tensor):
                encoded = coder.encode(x, seed, affine)
            elif context is None or not would_wait(base):
                encoded = codec.encode(x, seed, facts, affine)
            else:
                room = context.capacities.room((name, codec, base.numel()))
                encoded = codec.encode(x, seed, facts, affine, room)
            return EncodeHandle(encoded, base, on_outlived, None if encoded.raw else normal)
        case Rebuild():
            assert ready is not None
            return RebuildHandle.of(ready, base, need)
        case Offload():
            tier = tier_for(action, base)
            if isinstance(tier, str):
                return KeepHandle(base, tier)
            prefetcher = None if context is None else context.prefetcher
            return OffloadHandle(tier, base, prefetcher, name, on_outlived)
        case _:
            raise PlanError(
                f"a policy returns Keep, Encode, Rebuild or Offload; got {action!r}. "
                "Import them from elbowroom.plan, and return one for every site."
            )


def _from(least: float, x: Tensor) -> Tensor:
    """Returns x where it is at least this, and this elsewhere: x itself, where nothing is below."""
    x = x.detach()  # else these ops, too, would save it
    if not would_wait(x) and has_values(x) and bool(x.amin() >= least):
        return x
    return x.clamp_min(least)


def normalized(action: Encode, base: Tensor, statistics: Statistics | None) -> Normalized | None:
    """Return what is encoded in place of base: normalized by its rows, or as its norm does."""
    if not is_normalized(action):
        return None
    rows, keep_zeros = action.rows, action.facts.has_zeros
    if rows is None:
        return None if statistics is None else Normalized(statistics, keep_zeros)
    x = base.detach().as_strided(rows.shape, rows.stride, base.storage_offset())
    mean, rstd = of_rows(x, keep_zeros=keep_zeros)
    layout = layout_of(x, mean.shape)
    assert layout is not None
    order, inner, shares = layout
    of_each = Statistics(mean.permute(order), rstd.permute(order), inner, shares)
    return Normalized(of_each, keep_zeros, rows)


def is_normalized(action: Action) -> bool:
    """Returns whether a norm's input is to be encoded as what the norm makes of it.

    See `normal.py`.
    """
    if not isinstance(action, Encode) or action.codec.lossless:
        return False
    return action.facts.error_bound is None
