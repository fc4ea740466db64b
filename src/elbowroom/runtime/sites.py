"""Requests of ops that save a tensor, made without reading values.

Request      what the op needs from the tensor's slot
classify     makes a request; changes nothing
is_served    whether what the slot holds suffices for a request; changes nothing
left_alone   why a storage is kept whatever the policy says
site_of      the facts that a policy decides by:
facts_of     what the saving op tells: the range of indices, a mask's one value
sequence_of  along which dimension neighbors are alike
rows_of      which rows a code should keep apart
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from math import gcd, prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from elbowroom.codecs import Facts
from elbowroom.codecs.base import memory_order
from elbowroom.codecs.facts import NOTHING
from elbowroom.kernels.windows import Window
from elbowroom.plan import Need, Rebuildable, Site, SiteName
from elbowroom.plan.precision_floor import (
    ATTENTION,
    MAX_LEVELS,
    MIN_LOG_PROBABILITY,
    keeps_rows_apart,
    suffices,
    summed_over,
)
from elbowroom.plan.site import MIN_WIDTH, NORMS, SMALL, Formula, Reads, Rows
from elbowroom.runtime.consumers import Call, Reading, is_argument, is_running_copy
from elbowroom.runtime.handles import EncodeHandle
from elbowroom.runtime.handles.rebuild import Ready
from elbowroom.runtime.masks import masks_differ
from elbowroom.runtime.normal import layout_of
from elbowroom.runtime.slot import Geometry, Slot
from elbowroom.runtime.storage import Origin, is_made_of_parameters, is_parameter

MADE_OF_PARAMETERS = "made of parameters only"
_HARD_MIN_NBYTES = 16  # scalars gain nothing
STEADY = 4  # times smaller than `min_nbytes`, a storage may be examined as larger ones before it


class Request(NamedTuple):
    """Request of the op `call`, which saves x in the storage of `slot`, and reads it like this.

    seen  the geometry of x
    call  None: it is not saved by a function called from Python
    name  module, op, and how many the op of this module has saved before
    origin  the op that made x, if one was seen
    """

    slot: Slot
    x: Tensor
    seen: Geometry
    call: Call | None
    reading: Reading
    name: SiteName
    origin: Origin | None = None

    @property
    def first(self) -> Any:
        """The first argument of the call."""
        return None if self.call is None else self.call.first


def classify(
    slot: Slot,
    x: Tensor,
    seen: Geometry,
    call: Call | None,
    reading: Reading,
    name: SiteName,
    origin: Origin | None,
    *,
    takes_half: bool,
) -> Request:
    """Returns what the op needs: more than `reading` if what the slot holds does not suffice.

    takes_half: a code of half of x's bits would do where the size of an error matters
    """
    if reading.need is Need.MASK and masks_differ(name.consumer, slot.bits_of):
        why = f"'{slot.bits_of}' holds another mask of it"
        reading = Reading(Need.EXACT, Formula.COMPARED, why)
    if slot.sites and reading.need is Need.LOSSY and _is_below(slot, reading):
        why = f"of log-probabilities a code has those from {MIN_LOG_PROBABILITY:.0f} up"
        reading = Reading(Need.EXACT, Formula.DIFFERENCE, why)
    by_size = reading.by_size and name.consumer not in NORMS
    if by_size and not rows_of(seen, slot.base, reading.width, reading.dims):
        why = "its backward divides by the size of rows that lie in no order that is known"
        reading = Reading(Need.EXACT, Formula.SINGULAR, why)
        if takes_half:
            reading = Reading(Need.LOSSY, Formula.RELATIVE)
    return Request(slot, x, seen, call, reading, name, origin)


def _is_below(slot: Slot, reading: Reading) -> bool:
    """Returns whether a code of log-probabilities would not suffice for this reader's result."""
    formulas = slot.sites[0].formula, reading.formula
    return formulas[0] is Formula.LOG_PROBABILITY and formulas[1] is not formulas[0]


def is_served(request: Request) -> bool:
    """Returns whether what the slot holds is all that the op needs."""
    return request.slot.serves(request.reading.need) and not _is_too_coarse(request)


def _is_too_coarse(request: Request) -> bool:
    """Returns whether the held code was chosen for a milder formula than this reader's."""
    slot, _, seen, call, reading, name, _ = request
    if reading.need is not Need.LOSSY or slot.exact or not slot.sites:
        return False
    levels = 0 if call is None else call.levels or MAX_LEVELS
    site = replace(
        slot.sites[-1],
        consumer=name.consumer,
        formula=reading.formula,
        least_levels=levels,
        rows=rows_of(seen, slot.base, reading.width, reading.dims),
        by_size=reading.by_size,
        summed=_summed(seen.shape, slot.base.shape, name.consumer),
    )
    below = getattr(slot.value, "ready", None)
    return any(is_too_coarse_for(one, site) for one in ([slot] if below is None else below.slots))


def is_too_coarse_for(slot: Slot, site: Site) -> bool:
    """Returns whether a slot holds a code of fewer levels than this site needs.

    The same for a code that does not separate rows whose size this site needs.
    """
    held = slot.value
    if slot.exact or not isinstance(held, EncodeHandle):
        return False
    normalized = site.rows is not None and held.normalizes(site.rows)
    apart = keeps_rows_apart(held.codec, site, normalized=normalized)
    return not apart or not suffices(held.codec, site)


def site_of(request: Request, ready: Ready | None) -> Site:
    """The site of the save. ready: how x could be rebuilt now."""
    slot, x, seen, call, reading, name, origin = request
    has_zeros = origin is not None and origin.has_zeros and x.is_floating_point()
    facts = _with(facts_of(x, call), has_zeros, sequence_of(x, slot.base, name.consumer))
    rebuildable = (
        Rebuildable.NO if ready is None else Rebuildable.EXACT if ready.exact else Rebuildable.LOSSY
    )
    return Site(
        module=name.module,
        consumer=name.consumer,
        producer="" if origin is None else origin.op,
        shape=slot.base.shape,
        dtype=x.dtype,
        nbytes=slot.entry.before_nbytes,
        need=reading.need,
        rebuildable=rebuildable,
        facts=facts,
        why=reading.why,
        nth=name.nth,
        reads=_reads(x, call, reading.need),
        formula=reading.formula,
        least_levels=16 if call is None else call.levels or MAX_LEVELS,
        rows=rows_of(seen, slot.base, reading.width, reading.dims),
        by_size=reading.by_size,
        samples=0 if call is None else call.samples,
        summed=_summed(seen.shape, slot.base.shape, name.consumer),
    )


@lru_cache(4096)
def _summed(shape: tuple[int, ...], whole: tuple[int, ...], consumer: str) -> int | None:
    """Returns how many elements the op sums over if x is the storage in another shape, or None.

    What reads a part of it tells nothing: other ops may add the other parts to the same gradient
    (a recurrence that reads one step of a sequence at a time).
    """
    is_other = shape != whole and prod(shape) == prod(whole)
    return summed_over(shape, consumer) if is_other else None


def _reads(x: Tensor, call: Call | None, need: Need) -> Reads:
    """Returns how backward reads x; of two factors only the larger one has the product's size."""
    if need is Need.SHAPE and x.is_contiguous():
        return Reads.SIZES  # other layouts take memory (`View.restore`)
    if call is None:
        return Reads.RESTORED
    if call.reads is not Reads.PLACE:
        return call.reads
    sizes = (y.numel() for y in (*call.args, *call.kwargs.values()) if isinstance(y, Tensor))
    return Reads.PLACE if x.numel() >= max(sizes, default=0) else Reads.RESTORED


@lru_cache(4096)
def rows_of(seen: Geometry, base: Geometry, width: int, dims: tuple[int, ...] = ()) -> Rows | None:
    """The rows of a tensor as they lie in its storage; None: there are none, or in no order.

    Of a slice of longer rows: shorter rows, of which those of the tensor have several whole ones.

    seen: the geometry of the tensor; base: that of what covers its storage
    width, dims: the elements of its rows, and their dimensions; (): the last ones
    """
    numel = prod(base.shape)
    found = _with_rows_last(seen, dims) if dims else seen
    if not width or not numel or found is None:
        return None
    shape, stride, offset = found
    inside, left = 1, len(shape)
    while left and inside < width and stride[left - 1] == inside:
        left -= 1
        inside *= shape[left]
    if inside == width:
        outer = (step for n, step in zip(shape[:left], stride, strict=False) if n > 1)
        width = gcd(width, numel, offset - base.offset, *outer)
        return Rows((numel // width, width), (width, 1)) if width >= MIN_WIDTH else None
    if prod(shape) == numel and width == shape[-1] and layout_of(shape, stride, (*shape[:-1], 1)):
        return Rows(shape, stride)
    return None


def _with_rows_last(seen: Geometry, dims: tuple[int, ...]) -> Geometry | None:
    """Rows of these dimensions as the last one; None if these do not follow each other."""
    shape, stride, offset = seen
    others = [d for d in range(len(shape)) if d not in dims]
    *before, last = sorted(dims, key=stride.__getitem__, reverse=True)
    step = stride[last] * shape[last]
    for d in reversed(before):
        if shape[d] > 1 and stride[d] != step:
            return None
        step *= shape[d]
    rows = tuple(shape[d] for d in others), tuple(stride[d] for d in others)
    return Geometry((*rows[0], prod(shape[d] for d in dims)), (*rows[1], stride[last]), offset)


def left_alone(request: Request, min_nbytes: int, taken: set[SiteName] | None = None) -> str:
    """Returns why this storage is kept whatever the policy says, or "".

    taken: the sites that had a storage of about `min_nbytes`. A smaller one is not left alone
    there, down to a fourth: experts get other numbers of tokens in each step, and if some of these
    were left alone, no step would follow the script of another one.
    """
    slot, x, call, need = request.slot, request.x, request.call, request.reading.need
    if (nbytes := slot.entry.before_nbytes) < max(min_nbytes, _HARD_MIN_NBYTES):
        if taken is None or request.name not in taken or nbytes < min_nbytes // STEADY:
            return SMALL
    elif taken is not None and nbytes < STEADY * min_nbytes:
        taken.add(request.name)
    if slot.is_window:
        return "a window onto a larger storage"
    if is_running_copy(x, call):
        return "a copy of running statistics, which its op changes"
    if is_made_of_parameters(x):
        return MADE_OF_PARAMETERS
    if x.grad_fn is not None or x.dtype is torch.bool:
        return ""
    if call is not None and call.in_parts and call.saves_part(x):
        return ""
    if request.origin is None and (need is Need.LOSSY or is_argument(x, call)):
        return "an input: its owner holds it"
    if need is Need.LOSSY and not _ends_in_parameters(x, call):
        return "data that the gradient of an activation is multiplied with"
    return ""


def _ends_in_parameters(x: Tensor, call: Call | None) -> bool:
    """Returns whether the call reads x for gradients of parameters alone.

    A weight that requires no gradient is data, too: its error would propagate to all layers below.
    So does that of attention's k and v, but their codes are fine enough for it.
    """
    if call is None:
        return False
    if call.name == ATTENTION:
        return True
    others = [one for one in call.tensors if one.requires_grad]
    return all(is_parameter(one) or is_made_of_parameters(one) for one in others)


def facts_of(x: Tensor, call: Call | None) -> Facts:
    """Returns facts about x from the saving op: the range of indices, or a mask's single value."""
    if call is None or (find := _FACTS.get(call.name)) is None:
        return NOTHING
    return find(x, call)


@lru_cache(256)
def _with(facts: Facts, has_zeros: bool, sequence: int | None) -> Facts:
    return replace(facts, has_zeros=facts.has_zeros or has_zeros, sequence=sequence)


def sequence_of(x: Tensor, base: Geometry, op: str) -> int | None:
    """The dimension of `base`, which covers the storage of x, along which neighbors are alike.

    op  saves x; if it does not show it, the node that computed x does. None: neither does.
    """
    if not x.is_floating_point():
        return None
    first, last = op in _CHANNELS_FIRST, op in _CHANNELS_LAST
    if not (first or last):
        made = _node_of(x)
        first, last = made.startswith(_MADE_CHANNELS_FIRST), made.startswith(_MADE_CHANNELS_LAST)
    return _sequence_in(x.stride(), base, first=first) if first or last else None


@lru_cache(4096)
def _sequence_in(stride: tuple[int, ...], base: Geometry, *, first: bool) -> int | None:
    """Returns the dimension of `base` with the stride of the sequence in a tensor, or None.

    first: channels come before the sequence, and not after it
    """
    if len(stride) < 2 or (first and len(stride) != 3):
        return None  # maps, or samples that do not follow each other
    step = stride[-1 if first else -2]
    for d, other in enumerate(base.stride):
        if other == step and base.shape[d] > 1:
            return d - len(base.shape)
    return None


def _node_of(x: Tensor) -> str:
    """The name of the node that made the values of x, before it was reshaped; or ""."""
    node = x.grad_fn
    for _ in range(_MAX_RESHAPES):
        if node is None:
            return ""
        if not node.name().startswith(_RESHAPES):
            return node.name()
        node = node.next_functions[0][0] if node.next_functions else None
    return ""


def _weight_facts(x: Tensor, call: Call) -> Facts:
    """Returns whether many of a softmax's results are exactly 0, as a causal mask makes them.

    A sample is counted. On a GPU the host waits for it, in a step that is examined alone.
    """
    if x.is_meta or type(x) is not Tensor or not x.numel():
        return NOTHING
    flat, _ = memory_order(x.detach())
    some = flat[:: x.numel() // _SAMPLE | 1]
    return _ZEROS if int(some.count_nonzero()) < _FULL * len(some) else NOTHING


def _dropout_facts(x: Tensor, call: Call) -> Facts:
    """Dropout saves its factors: 0, and one other value."""
    if x.grad_fn is not None or not x.is_floating_point():
        return NOTHING
    return Facts(value=_dropout_scale(float(call.arg(1, "p", 0.5)), x.dtype))


@lru_cache
def _dropout_scale(p: float, dtype: torch.dtype) -> float:
    """1 / (1 - p), computed by the same op as in dropout, so that it has the same bits."""
    keep = 1.0 - p
    return float(torch.tensor(1.0, dtype=dtype).div_(keep)) if keep else 0.0


def _pool_facts(call: Call) -> Facts:
    """Max-pooling saves flat indices into one map, each inside its window."""
    x = call.first
    dims = next((n for n in (1, 2, 3) if f"max_pool{n}d" in call.name), 2)
    size = 1
    for length in x.shape[-dims:]:
        size *= length
    return Facts(smallest=0, largest=size - 1, window=_window(call, x, dims))


def _window(call: Call, x: Tensor, dims: int) -> Window | None:
    """Returns the window of pooling over columns, or rows and columns, with a batch; else None."""
    if dims > 2 or x.dim() != dims + 2 or call.name.startswith("adaptive"):
        return None
    kernel = call.arg(1, "kernel_size")
    stride = call.arg(2, "stride")
    padding, dilation = call.arg(3, "padding", 0), call.arg(4, "dilation", 1)
    chosen = (kernel, 1), (stride or kernel, 1), (padding, 0), (dilation, 1)
    settings = (_rows_columns(one, dims, flat) for one, flat in chosen)
    return Window(x.shape[-1], *(number for pair in settings for number in pair))


def _rows_columns(value: Any, dims: int, flat: int) -> tuple[int, int]:
    """A setting of pooling as one for rows and columns; flat: that of the row of a 1-D pooling."""
    given = list(value) if isinstance(value, Sequence) else [value]
    return (int(given[0]) if dims == 2 else flat), int(given[-1])


def _embedding_facts(call: Call) -> Facts:
    weight = call.arg(1, "weight")
    return Facts(smallest=0, largest=weight.shape[0] - 1)


def _row_facts(call: Call) -> Facts:
    """Places along one side of a tensor, from its start."""
    return Facts(smallest=0, largest=max(call.first.shape, default=1) - 1)


def _place_facts(call: Call) -> Facts:
    """Places in a tensor, which may count from its end."""
    longest = max(call.first.shape, default=1)
    return Facts(smallest=-longest, largest=longest - 1)


def _label_facts(call: Call) -> Facts:
    """Class numbers, and ignore_index, which may be negative."""
    classes = call.first.shape
    ignore = int(call.arg(4, "ignore_index", -100))
    return Facts(
        smallest=min(0, ignore), largest=max(classes[1 if len(classes) > 1 else 0] - 1, ignore)
    )


# Where the sequence lies in what an op reads or makes: before its channels, or after them.
_CHANNELS_LAST = frozenset(
    ("linear", "addmm", "mm", "matmul", "layer_norm", "rms_norm", "scaled_dot_product_attention")
)
_CHANNELS_FIRST = frozenset(
    ("conv1d", "conv_transpose1d", "batch_norm", "group_norm", "instance_norm")
)
_MADE_CHANNELS_LAST = ("Addmm", "Mm", "Bmm", "Linear", "NativeLayerNorm", "FusedRmsNorm")
_MADE_CHANNELS_FIRST = ("Convolution", "NativeBatchNorm", "CudnnBatchNorm", "NativeGroupNorm")
_ZEROS = Facts(has_zeros=True)
_SAMPLE, _FULL = 4096, 0.75  # elements; a share of them: above, the bitmap takes what zeros save
_RESHAPES = ("View", "UnsafeView", "ReshapeAlias", "Clone")
_MAX_RESHAPES = 3
_INDEX_FACTS: dict[str, Callable[[Call], Facts]] = {
    **{f"max_pool{n}d": _pool_facts for n in (1, 2, 3)},
    **{f"max_pool{n}d_with_indices": _pool_facts for n in (1, 2, 3)},
    **{f"adaptive_max_pool{n}d": _pool_facts for n in (1, 2, 3)},
    "embedding": _embedding_facts,
    **dict.fromkeys(("gather", "index_select", "scatter_add", "scatter_add_"), _row_facts),
    **dict.fromkeys(("scatter", "scatter_", "index_add", "index_add_"), _row_facts),
    **dict.fromkeys(
        (
            "scale_rows",
            "sum_rows",
            "sum_rows_",
            "apply_rows",
            "extremes_of_rows",
            "extremes_of_rows_",
        ),
        _row_facts,
    ),
    **dict.fromkeys(("scatter_reduce", "scatter_reduce_", "sort", "topk", "kthvalue"), _row_facts),
    **dict.fromkeys(("max", "min", "median", "cummax", "cummin"), _row_facts),
    "take_along_dim": _place_facts,
    "__getitem__": _place_facts,
    "cross_entropy": _label_facts,
    "nll_loss": _label_facts,
}


def _if_indices(find: Callable[[Call], Facts]) -> Callable[[Tensor, Call], Facts]:
    return lambda x, call: find(call) if x.dtype is torch.int64 else NOTHING


_FACTS: dict[str, Callable[[Tensor, Call], Facts]] = {
    "dropout": _dropout_facts,
    **dict.fromkeys(("softmax", "_safe_softmax"), _weight_facts),
    **{name: _if_indices(find) for name, find in _INDEX_FACTS.items()},
}
