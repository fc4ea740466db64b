"""torch.compile(model, backend="elbowroom", options={"budget": "6 GiB"}): Inductor, with a budget.

Dynamo calls a backend once for each region of a program without a graph break; each becomes a
forward and a backward graph through `partition.py`, and all else is Inductor's.

Several regions of one step hold their saved tensors at the same time, and each is compiled before
the next is known. So a region that ends in a graph break, or is a bucket of DDP, may hold half of
the remaining room, or the bytes of all its values if these are less, and the last region may use
all that remains:

    room of region k     R_k = R_1 - s_1 - ... - s_(k-1)
    share of region k    s_k = min(bytes of its values, R_k / 2), or what it has to hold at least

One graph may run several times in a forward: for blocks that are compiled one by one, as they are
with FSDP2. The caller passes the number of runs (`runs`); half of the room is for all that they
hold.

Settings are read from the options of each call, and only the shares of a step are kept.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from elbowroom.compiled.attempts import fitting
from elbowroom.compiled.collect import known_size
from elbowroom.compiled.decision import OTHERS, Decision, Loaded, stored_peak, too_small
from elbowroom.compiled.deferred import DeferredKernels
from elbowroom.compiled.later_starts import LaterStarts
from elbowroom.compiled.options import Settings, device_of_inputs, read_options
from elbowroom.compiled.tails import Tails
from elbowroom.compiled.written import Check, Early, watching
from elbowroom.errors import BudgetTooSmall, ElbowroomError
from elbowroom.units import show_nbytes, show_percent

if TYPE_CHECKING:
    from elbowroom.compiled.partition import Partitioner

_log = logging.getLogger("elbowroom")
# Share of the squared gradient that codes are estimated to add, above which a warning says it: of
# three blocks of attention 0.08 was measured where 0.03 was estimated, and 0.05 is to be said.
_UNNOTICED = 0.02


@dataclass(frozen=True)
class Bounds:
    """Bounds of the share of a region.

    values_nbytes  bytes of all that it computes, which it cannot exceed
    least_nbytes   what it holds at least, where that is more than half of its room
    """

    values_nbytes: int
    least_nbytes: int = 0

    def share_of(self, room_nbytes: int) -> int:
        """Returns the bytes that the region may hold in this room."""
        return max(min(self.values_nbytes, room_nbytes // 2), self.least_nbytes)

    def room_for(self, rest_nbytes: int) -> int:
        """Returns the least room that leaves this many bytes beside its share."""
        half = min(rest_nbytes + self.values_nbytes, max(2 * rest_nbytes - 1, 0))
        return max(half, rest_nbytes + self.least_nbytes)


@dataclass
class Regions:
    """The regions of one compiled program: what each may hold for the regions after it."""

    settings: Settings
    shares: dict[object, int] = field(default_factory=dict)  # by Dynamo's frame, and DDP's bucket
    bounds: dict[object, "Bounds"] = field(default_factory=dict)  # of the shares, by the same keys
    places: dict[object, str] = field(default_factory=dict)  # where they end, by the same keys
    decisions: list[Decision] = field(default_factory=list)
    runs: int = 1  # number of regions in a forward, where it is known and larger than seen
    elsewhere_nbytes: int = 0  # bytes that other regions may hold while the last one runs
    reserved_nbytes: int = 0  # what runs between forward and backward of the last one needs
    above_nbytes: int = 0  # the most by which the code of a region is above its room; it was said
    _open: object = None  # regions whose share may still grow
    _last: tuple[object, bool] = (None, False)  # key of the region that is compiled
    _bucketed: object = None  # the compilation that DDP cuts
    _buckets: int = 0

    def room_of(self, gm: fx.GraphModule) -> tuple[int | None, int | None]:
        """Returns the bytes that forward and backward of a region may take, and hold between them.

        The second is None for the last region of a step, which may hold all that is left, unless
        bytes are reserved.
        """
        room = self.settings.room_nbytes
        if room is None:
            return None, None
        if self.runs > 1:
            held = room // (2 * self.runs)
            self.elsewhere_nbytes = held * (self.runs - 1)
            return room - self.elsewhere_nbytes, held
        key, is_bucket = self._last = self._key()
        self.elsewhere_nbytes = sum(share for other, share in self.shares.items() if other != key)
        room = max(room - self.elsewhere_nbytes, 0)
        reason = getattr(gm, "compile_subgraph_reason", None)
        self._open = None
        if not is_bucket and not getattr(reason, "graph_break", False):
            return room, max(room - self.reserved_nbytes, 0) if self.reserved_nbytes else None
        self._open = key
        self.bounds[key] = Bounds(_values_nbytes(gm))
        self.shares[key] = self.bounds[key].share_of(room)
        if stack := getattr(reason, "user_stack", None):
            self.places[key] = f" (to {Path(stack[-1].filename).name}:{stack[-1].lineno})"
        return room, self.shares[key]

    def held_by_others(self, least_nbytes: int) -> dict[str, int]:
        """Returns what other regions may hold in the least room that leaves `least_nbytes`.

        That is the least room of the whole step, less `least_nbytes`. The regions before may hold
        more in a larger room, so it is not what they hold in the room of this step.
        """
        if self.runs > 1:  # room - (runs - 1) * (room // (2 * runs)) >= least
            room = -(-least_nbytes * 2 * self.runs // (self.runs + 1))
            return {OTHERS: room - least_nbytes}
        own, _ = self._last
        found = {OTHERS: 0}
        for at, key in reversed(list(enumerate(self.shares, 1))):
            if key != own:
                room = self.bounds[key].room_for(least_nbytes)
                found[f"region {at}{self.places.get(key, '')}"] = room - least_nbytes
                least_nbytes = room
        return dict(reversed(found.items()))

    def _key(self) -> tuple[object, bool]:
        """Returns a key of the region that is compiled, and whether it is a bucket of DDP's.

        DDP cuts one frame into as many regions as it has buckets, so that its communication can
        begin before backward has ended.
        """
        compiled = torch._guards.CompileContext.current_compile_id()
        frame = frame_of(None)
        if not _is_in_ddp():
            return frame, False
        if compiled != self._bucketed:  # the frame is compiled again: its buckets begin anew
            self._bucketed, self._buckets = compiled, 0
            for key in list(self.shares):
                if isinstance(key, tuple) and key[0] == frame:
                    del self.shares[key], self.bounds[key]
        self._buckets += 1
        return (frame, self._buckets), True

    def restrict(
        self,
        room_nbytes: int,
        *,
        counts_inputs: bool = False,
        offloads: bool = False,
        standing_nbytes: int = 0,
    ) -> None:
        """Sets the bytes that regions may take from now on, and whether values may be moved."""
        self.settings = replace(
            self.settings,
            room_nbytes=room_nbytes,
            counts_inputs=counts_inputs,
            offloads=offloads,
            standing_nbytes=standing_nbytes,
        )

    def decided(self, decision: "Decision") -> None:
        """Records the decision for a region; the logger "elbowroom" writes it in one line."""
        self.decisions.append(decision)
        if self._open is not None and decision.saved_nbytes > self.shares[self._open]:
            self.shares[self._open] = decision.saved_nbytes  # it could not hold as little
            bounds = self.bounds[self._open]
            self.bounds[self._open] = replace(bounds, least_nbytes=decision.saved_nbytes)
        if self.settings.room_nbytes is not None:
            _log.info(
                "compiled region %d: estimated peak %s (plain torch.compile: %s), %s held, "
                "%d ops run again%s",
                len(self.decisions),
                show_nbytes(decision.peak_nbytes),
                show_nbytes(decision.plain_nbytes),
                show_nbytes(decision.saved_nbytes),
                decision.recomputed,
                f", {show_nbytes(decision.away_nbytes)} moved" if decision.away_nbytes else "",
            )
            if decision.is_uncertain and self.settings.exact:
                _log.warning(
                    "compiled region %d: it sums up groups of channels whose number is no multiple "
                    "of 16, as GroupNorm does, or results of Fourier transforms, possibly in "
                    "another order than plain torch.compile. Gradients may differ by a rounding, "
                    "though exact=True. Take a multiple of 16 channels, or fit the model "
                    "without torch.compile",
                    len(self.decisions),
                )
            if decision.is_lossy:
                _log.log(
                    logging.INFO if decision.noise <= _UNNOTICED else logging.WARNING,
                    "compiled region %d: codes add noise to the gradient: about %s of its square "
                    "(gErr2), and as much of what mini-batches vary by anyway. This is estimated "
                    "from sizes, and may be wrong by a factor of 3. noise=0.1 keeps it below a "
                    "tenth, or says which budget that needs; exact=True forbids codes",
                    len(self.decisions),
                    show_percent(decision.noise),
                )


def compile_region(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    regions: Regions,
    options: Mapping[str, Any],
    raises: bool = False,
) -> Callable[..., Any]:
    """Compile a region with Inductor inside its room.

    options: Inductor's own. The error for a budget that is too small is raised by the first call of
    the region, with its own type, because Dynamo would wrap errors of a backend. raises:
    immediately, for a caller that catches it.
    """
    from elbowroom.compiled.partition import check_torch

    check_torch()
    device = device_of_inputs(example_inputs)
    if device.type == "cuda":
        from elbowroom.compiled.ops import draws

        draws.prepare(device)  # before a CUDA graph is captured
    room, held = regions.room_of(gm)
    settings = regions.settings
    try:
        compiled = _corrected(gm, example_inputs, regions, room, held, options)
    except BudgetTooSmall as error:
        if (regions.elsewhere_nbytes or held is not None) and settings.room_nbytes is not None:
            others = regions.held_by_others(error.least_nbytes)
            error = in_whole(error, settings.room_nbytes, others, settings.limit)
        if raises:
            raise error from None
        return refusal(error)
    return compiled


def _corrected(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    regions: Regions,
    room: int | None,
    held: int | None,
    options: Mapping[str, Any],
) -> Callable[..., Any]:
    """Compiles a region by the first plan whose code fits; see `attempts.py`."""
    settings = regions.settings

    tails: Tails | None = None

    def compile_plan(tight: int | None, check: Check, *, fills: bool) -> Callable[..., Any]:
        nonlocal tails
        given = gm, example_inputs, settings, tight, held, options, check
        try:
            return _compiled(*given, fills=fills, tails=tails)
        except Exception:  # of any class: Inductor wraps what is raised
            if tails is not None or not check.wants_tails:
                raise
        tails = _tails(gm, example_inputs, settings, options)
        check.made.clear()
        return _compiled(*given, fills=fills, tails=tails)

    planned = _partitioner(example_inputs, settings, room, held, fills=False)
    starts = LaterStarts(gm, example_inputs, planned.uuid(), options)
    compiled, check = fitting(compile_plan, settings, room, starts)
    _accept(check, room, regions)
    return compiled


def _accept(check: Check, room: int | None, regions: Regions) -> None:
    """Records what was decided for a region, with the peak of its code."""
    if room is not None and (over := check.above_nbytes()):
        regions.above_nbytes = max(regions.above_nbytes, over)
        _log.warning(
            "a compiled region takes %s more than its budget of %s; no plan takes less",
            show_nbytes(over),
            show_nbytes(room),
        )
    for decision in check.made:
        regions.decided(replace(decision, peak_nbytes=check.known_nbytes(decision.peak_nbytes)))


def _tails(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    settings: Settings,
    options: Mapping[str, Any],
) -> Tails:
    """Returns how plain torch.compile ends rows; where that cannot be found out, nothing of it."""
    try:
        return _plain_tails(gm, example_inputs, settings, options)
    except Exception as error:  # of any class: Inductor wraps what is raised
        _log.warning(
            "the code of plain torch.compile, which a compiled region is to equal, could not be "
            "written (%s: %s). The region is compiled without it: gradients may differ by a "
            "rounding, though exact=True",
            type(error).__name__,
            next(iter(str(error).strip().splitlines()), ""),
        )
        return Tails()


def _plain_tails(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    settings: Settings,
    options: Mapping[str, Any],
) -> Tails:
    """Writes the code of plain torch.compile, and returns how its rows end; see `tails.py`."""
    from torch._functorch import config

    tails, check = Tails(), Check(0, False, raises=True, waits=True)  # ends once both are written
    written = {**options, "fx_graph_cache": False}
    try:
        with config.patch(enable_autograd_cache=False), tails.recording():
            _compiled(gm, example_inputs, settings, None, None, written, check, fills=False)
    except Exception:  # of any class: Inductor wraps what `check` raises
        if not check.over_nbytes:
            raise
    return tails


def _compiled(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    settings: Settings,
    room: int | None,
    held: int | None,
    options: Mapping[str, Any],
    check: Check,
    *,
    fills: bool,
    tails: Tails | None = None,
) -> Callable[..., Any]:
    """Compiles a region by a plan for this room. tails: how rows end, where a plan needs that."""
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    from elbowroom.compiled.layouts import laid_out_as_plain
    from elbowroom.compiled.partition import listening
    from elbowroom.compiled.scheduling import in_order

    planned = _partitioner(example_inputs, settings, room, held, fills=fills)
    partitioner = planned if tails is None else replace(planned, apart=tails.apart)
    early = Early()

    def compile_graph(*args: Any, **kwargs: Any) -> Any:
        decision = check.made[-1] if check.made else None
        if decision is None:
            return compile_fx_inner(*args, **kwargs)

        check.wants_tails = decision.is_tailed
        if check.wants_tails and tails is None:
            raise RuntimeError("the code of plain torch.compile has to be known first")
        is_backward = bool(kwargs.get("is_backward"))

        def run() -> Any:
            order = in_order(fuses_alike=decision.fuses_alike)
            ends = tails.following() if decision.is_tailed and tails else nullcontext()
            before = stored_peak(is_backward=is_backward)
            with (
                nullcontext() if decision.is_plain else order,
                ends,
                laid_out_as_plain(),
                watching(check),
            ):
                compiled = compile_fx_inner(*args, **kwargs)
            now = stored_peak(is_backward=is_backward)
            check.found(now - before, is_backward=is_backward)
            return compiled

        return early.compile(run) if is_backward else run()

    patches = {**options, "custom_partitioner_fn": partitioner}
    if room is not None and device_of_inputs(example_inputs).type == "cpu":
        # mode="reduce-overhead" asks for CUDA graphs. Without a GPU there are none, but the code
        # would be cut into pieces for them, each of which holds its inputs until it ends.
        patches["triton.cudagraphs"] = False
    deferred = DeferredKernels()
    with (
        listening(check.made.append),
        early.wanted(check),
        Loaded() as loaded,
        deferred.collecting(),
    ):
        compiled: Any = compile_fx(
            gm, list(example_inputs), inner_compile=compile_graph, config_patches=patches
        )
    deferred.compile()
    check.load(loaded)
    check.raises = False  # what is compiled later must not end a training
    return compiled  # type: ignore[no-any-return]


def _partitioner(
    example_inputs: Sequence[Any],
    settings: Settings,
    room: int | None,
    held: int | None,
    *,
    fills: bool,
) -> "Partitioner":
    """Returns the partitioner that plans a region for this room."""
    from elbowroom.compiled.partition import Partitioner

    return Partitioner(
        room,
        settings.counts_inputs,
        settings.exact,
        settings.codes,
        settings.min_nbytes,
        held,
        settings.noise,
        settings.offloads,
        settings.menu,
        fills,
        settings.standing_nbytes,
        () if room is None else _hints_of(example_inputs),
    )


def _hints_of(example_inputs: Sequence[Any]) -> tuple[int, ...]:
    """Returns the sizes that are symbols, as they are in the call that is compiled."""
    sizes = (x.shape if isinstance(x, torch.Tensor) else (x,) for x in example_inputs)
    return tuple(known_size(n) for shape in sizes for n in shape if isinstance(n, torch.SymInt))


def in_whole(
    error: BudgetTooSmall, budget_nbytes: int, more: Mapping[str, int], noise: float | None = None
) -> BudgetTooSmall:
    """Returns a region's error for the whole budget, which holds more than the region's room."""
    least = error.least_nbytes + sum(more.values())
    return too_small(budget_nbytes, least, {**more, **error.parts}, noise)


def refusal(error: Exception) -> Callable[..., Any]:
    """Returns a region that raises this error, with its own type, when it is called."""

    def refuse(*args: Any) -> Any:
        raise error.with_traceback(None)

    return refuse


def frame_of(gm: fx.GraphModule | None) -> object:
    """Returns Dynamo's number of the code that a region comes from; another shape has the same."""
    compiled = torch._guards.CompileContext.current_compile_id()
    return getattr(compiled, "frame_id", None) if compiled is not None else id(gm)


def _is_in_ddp() -> bool:
    """Returns whether DDP's forward runs, and Dynamo cuts graphs at the ends of its buckets."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return False
    ddp: Any = torch.nn.parallel.DistributedDataParallel
    module = ddp._get_active_ddp_module()
    return module is not None and torch._dynamo.utils.get_optimize_ddp_mode() == "ddp_optimizer"


def _values_nbytes(gm: fx.GraphModule) -> int:
    """Returns the bytes of all tensors that the region computes, which it cannot exceed."""
    total = 0
    for node in gm.graph.nodes:
        value = node.meta.get("example_value")
        if node.op in ("call_function", "call_method", "call_module") and isinstance(
            value, torch.Tensor
        ):
            total += known_size(value.numel()) * value.dtype.itemsize
    return total


Watch = Callable[[Callable[..., Any]], Callable[..., Any]]
# By the identity of what torch.compile was given: that, its regions, and what sees their calls.
_programs: dict[int, tuple[Any, Regions, Watch]] = {}


def elbowroom(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
    watching: Callable[[Settings], Watch] | None = None,
) -> Callable[..., Any]:
    """The backend of torch.compile(..., backend="elbowroom"), without its measurements.

    options  "budget": bytes, "6 GiB", or a share of the memory of the model's device as "80%", for
             parameters, gradients, saved tensors and workspaces of the compiled code; None: no
             limit. "exact": True: no bit of any gradient changes; None: exact actions first, then
             codes, if the budget needs them; False: whatever is fastest. "noise": the most that
             codes may add to the variance of the gradient, as a share of what mini-batches vary by
             (0.1: a tenth), estimated from sizes (`noise.py`); None: as much as the budget needs.
             "offload": "file" on a CPU, "host" on a GPU: saved values may be moved there if the
             budget needs it, before any code; None: they stay. All other names are Inductor's
    mode     as in torch.compile
    watching gives what takes each region of a program as it is compiled, and returns what Dynamo
             calls; None: the region itself
    """
    given = {} if options is None else options
    try:
        settings, inductor = read_options(given, device_of_inputs(example_inputs))
    except (ElbowroomError, ValueError) as error:
        return refusal(error)
    if mode not in (None, "default"):
        from torch._inductor import list_mode_options

        inductor = {**list_mode_options(mode), **inductor}
    known = _programs.get(id(options)) if options is not None else None
    if known is None or known[0] is not options:
        known = options, Regions(settings), (watching or _unwatched)(settings)
        if options is not None:
            _programs[id(options)] = known
    _, regions, watch = known
    return watch(compile_region(gm, example_inputs, regions, inductor))


def _unwatched(_: Settings) -> Watch:
    return lambda region: region
