"""The main path: autograd saves x -> `_pack` -> a `View`; in backward, `unpack` -> x again.

    x -> ours to touch? -> seen before?       storage.py
      -> what does the saving op need?        consumers.py, formulas.py, sites.py
      -> policy -> perform                    serving.py, plan/
      -> slot -> View                         slot.py

`saving.py` opens these hooks for a forward, and ends it.

Everything is decided from metadata; no value of a saved tensor is read. A tensor that must not be
changed is kept, with the version check that hooks switch off, and the ledger records the reason.
State belongs to the views that autograd holds, never to "the step": unpack may be called twice, in
any order, on another thread, or never.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Container, Iterable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from elbowroom.plan import Need, Policy, Rebuildable, Site, SiteName
from elbowroom.plan.plan import Plan
from elbowroom.plan.site import AGAIN, FINE, RECOMPUTE, RECURRENT, Formula, LevelsSuffice
from elbowroom.runtime import modules, opened
from elbowroom.runtime.changed_parameters import written
from elbowroom.runtime.changing import ParametersAsRead
from elbowroom.runtime.checkpoints import checkpoint_call
from elbowroom.runtime.consumers import (
    Call,
    Consumers,
    FormulaPart,
    Reading,
    is_buffer,
    reading_of,
)
from elbowroom.runtime.context import PROCESS, Context
from elbowroom.runtime.direct import REPLACED, direct_of, is_overridden
from elbowroom.runtime.direct.attention import as_node, attention_reading
from elbowroom.runtime.direct.choice import NodeChoice
from elbowroom.runtime.handles import KeepHandle
from elbowroom.runtime.handles.rebuild import DEEPEST_READY, Ready
from elbowroom.runtime.kept import CountedTensor, Deferred, Held, SmallTensors, last_node
from elbowroom.runtime.ledger import Ledger
from elbowroom.runtime.logits import FOLLOWS, TOO_SHARP, attention_below
from elbowroom.runtime.module_calls import ModuleCalls
from elbowroom.runtime.nested import tensors_in
from elbowroom.runtime.observer import NOBODY, Listener, Observer, Recorder, Use, Watch
from elbowroom.runtime.overwritten import copy_sources, keep_parameters, lend
from elbowroom.runtime.producers import (
    RECORDED,
    RECORDED_IN_EXACT,
    RECORDED_WITH_PRODUCTS,
    note_copy,
    note_origin,
)
from elbowroom.runtime.readers import Reader, readers_of, reading_by
from elbowroom.runtime.redrawn import Redrawn
from elbowroom.runtime.replay.tracer import Tracer
from elbowroom.runtime.saturated import WHY, part_of
from elbowroom.runtime.serving import Serving
from elbowroom.runtime.sites import STEADY, Request, classify, left_alone, site_of
from elbowroom.runtime.slot import CountedSlot, Geometry, Slot, View
from elbowroom.runtime.sources import Sources
from elbowroom.runtime.storage import (
    dense_base,
    is_parameter,
    is_touchable,
    storage_nbytes,
    untouchable,
    version_of,
)
from elbowroom.runtime.transforms import untransformed
from elbowroom.runtime.waiting import SUMS_OF_ROWS


def _can_be_probed(request: Request) -> bool:
    """Returns whether the reader of a tensor that may carry an error can be probed.

    In a recomputed module, no op of the graph reads it; a probe exchanges a whole tensor; and what
    is divided by has an error that is a share of each element.
    """
    call, reading = request.call, request.reading
    if call is None or call.name in AGAIN or call.in_parts:
        return False
    return reading.need is Need.LOSSY and reading.formula is not Formula.RELATIVE


class Packer(NodeChoice, ModuleCalls):
    """Packs the tensors that autograd saves in one forward, which `Saving` opens and ends.

    policy      site facts -> action
    min_nbytes  storages smaller than this stay as they are
    context     source of seeds, and memory of what was learned
    ledger      the count of bytes, filled as forward runs
    observer    may measure the errors of codes
    recorder    profiles what is saved when, and when it is restored
    recompute   names of modules whose forward runs again in backward
    idle        there is nothing to do: open no hooks at all
    after       context of the forward before in the same step, whose ledger and watch continue
    tracer      records the script for the next forwards
    shares      a tensor that is rebuilt for one reader is held for the next: less time, a higher
                peak
    """

    _serving: Serving  # of this forward, as is `_redrawn`
    _redrawn: Redrawn

    def __init__(
        self,
        policy: Policy,
        *,
        min_nbytes: int = 32768,
        context: Context = PROCESS,
        observer: Observer | None = None,
        recorder: Recorder | None = None,
        recompute: Container[str] = (),
        idle: bool = False,
        after: "Packer | None" = None,
        tracer: Tracer | None = None,
        shares: bool = False,
    ) -> None:
        self.policy = policy
        self._shares = shares
        self._made_again = context.made_again if shares else context.planned
        self.tracer = tracer
        self.recorder = recorder
        self._looking = nullcontext if recorder is None else recorder.looking
        self.recompute = recompute
        self.idle = idle
        self.observer = observer
        self.min_nbytes = min_nbytes
        self.context = context
        self._least = min_nbytes, context.taken  # as `left_alone` asks for them
        self.ledger: Ledger = Ledger() if after is None else after.ledger
        self.ran_again = Counter[str]() if after is None else after.ran_again
        self._after = after
        self._calls: modules.Calls = weakref.WeakKeyDictionary()
        self._many = SmallTensors()
        by_hand = shares and bool(getattr(policy, "rebuild", False))
        self._sources = Sources(
            self.ledger if getattr(policy, "rebuild", True) else None,
            is_exact=by_hand and self.is_exact(),
            products_again=not shares and context.products_again,
        )
        planned = RECORDED_WITH_PRODUCTS if context.products_again else RECORDED
        self._recorded = RECORDED_IN_EXACT if self._sources.is_exact else planned
        # Held, the rows would be made again, in fresh memory, where they are read in parts instead.
        self.rows_wait = by_hand and recorder is None
        self.has_read_rows = False  # in parts: they were not made
        self._consumers: Consumers | None = None
        self._open: ExitStack | None = None
        self._listener: Listener = NOBODY
        self._watch: Watch | None = None
        self._counts: dict[tuple[str, str], int] = {}
        self._region = ""  # whose inputs are being saved
        self._reading: list[ParametersAsRead] = []  # of modules that run again
        self._hook: Callable[[Tensor], Any] | None = None  # replaced by a node of ours
        # Copies what a replayed part of this forward reads of tensors that are about to change.
        self._keep_followed: Callable[[Iterable[Tensor]], None] | None = None

    def _finished(self, call: Call, out: Any) -> None:
        with self._looking(), torch._C.DisableTorchFunction():
            self._listener.ends()
            results = self._decide_on_deferred(call, out) if call.deferred else ()
            if self._serving.pieces.waiting:
                self._serving.pieces.made(call, out)
            if self._serving.undecided:
                self._serving.undecided.ended(call, out, self.recorder)
            if self._serving.waiting:
                self._serving.waiting.ended(call, out, self._sources)
            for finish in call.at_end:
                finish(call, out)
            made = None
            if call.name in self._recorded or (isinstance(out, Tensor) and not out.requires_grad):
                made = note_origin(call, out, self._sources)
            if made is not None:
                self._listener.makes(made)
            if call.may_have_changed_first:
                self._sources.changed(call.first, made)
            for decide in results:
                decide()
            if self._watch is not None:
                self._watch.ended(call, out)
            if self.recorder is not None:
                self.recorder.ended(call, out, self._sources.slots_of(call.tensors))
            self._listener.ended(call, out)

    def _run_as(self, call: Call) -> Callable[..., Any]:
        """Returns the function to run for a call.

        Where possible, its backward reads codes or bits.

        A step that is profiled runs unchanged, and notes what could be replaced.
        """
        with self._looking():
            listener, pieces = self._listener, self._serving.pieces
            if self.ledger.backward_began:  # a context may stay open for a whole training
                listener.refuse("a backward has run inside")
            listener.begins(call)
            changes = call.changes_first
            if changes or "out" in call.kwargs:
                self._changes(call)
            if call.name in opened.NAMES and self._consumers is not None and not is_overridden():
                body = opened.opened(call.func, self._consumers)
                if body is not None:
                    listener.runs(call, body, None)
                    return body
            if self._serving.waiting:
                self._serving.waiting.end_known()
            if pieces.waiting:
                if self._is_innermost():
                    pieces.end()
                elif pieces.calls(call):
                    listener.compares()
            if call.name in SUMS_OF_ROWS:
                self.has_read_rows = True
                self.context.waited_in.add(self._module)
            direct = direct_of(call) if call.func in REPLACED else None
            run = call.func if direct is None else self._run_of(call, direct)
            listener.runs(call, run, direct)
            return run

    def _changes(self, call: Call) -> None:
        """Copies what backward reads of the tensors that a call is about to change."""
        changed = [*written(call.args[:1], call.kwargs)]
        with untransformed():  # what is made again now was saved outside of torch.func
            if not call.lends:
                keep_parameters(changed, self._reading, self._sources)
            if (lend if call.lends else copy_sources)(changed, self._sources):
                self._listener.refuse("a source of recipes is changed in place")
            if self._keep_followed is not None:
                with torch.no_grad(), torch._C.DisableTorchFunction():
                    self._keep_followed(changed)

    @property
    def _may_round(self) -> bool:
        """True if codes add errors, in this forward or in those for which it is profiled."""
        return self.recorder is not None or not self.is_exact()

    def _needs_no_slot(self, x: Tensor) -> bool:
        """Returns whether x needs no slot: neither for a plan, nor for planning."""
        is_small = storage_nbytes(x) < self.min_nbytes
        return is_small and hasattr(self.policy, "rebuild") and self.recorder is None

    @property
    def _codes_checkpoints(self) -> bool:
        """True if inputs of the user's checkpoints may be codes: the step is not being profiled.

        The possible codes are known when their piece of forward has run.
        """
        again = getattr(self.policy, "again", False) and not self.is_exact()
        return again and self.recorder is None

    def _codes_input(self, name: SiteName) -> bool:
        """Returns whether a module is to be recomputed from a code of this input."""
        codes_input = getattr(self.policy, "codes_input", None)
        return codes_input is not None and bool(codes_input(name))

    def _is_innermost(self) -> bool:
        """Returns whether this context gets what is saved now: its hooks are the innermost."""
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
        return hooks is not None and hooks[0] == (self._hook or self._pack)

    def _makes_again(self, x: Tensor) -> bool:
        return self._serving.makes_again(x)

    def _pack(self, x: Tensor) -> Held:
        with self._looking(), torch._C.DisableTorchFunction():
            held = self._taken(x)
            self._listener.saved(x, held)
            return held

    def _taken(self, x: Tensor) -> Held:
        consumers = self._consumers
        call = None if consumers is None else consumers.call
        if call is None:
            call = checkpoint_call(x) if self._codes_checkpoints else None
            self._listener.saves_between(of_checkpoint=call is not None)
        kept = self._left_alone(x, call)
        if kept is not None:
            return kept
        pieces = self._serving.pieces
        is_input = call is not None and call.name in AGAIN
        if pieces.waiting and (pieces.has_begun or not is_input):
            pieces.end()
        if is_input or call is None:
            self._listener.saves()
        if call is None or call.reading_is_known:
            return self._packed(x, call, reading_of(x, call))
        deferred = Deferred(x)
        call.deferred.append((deferred, x))
        return deferred

    def _decide_on_deferred(self, call: Call, out: Any) -> list[Callable[[], None]]:
        """Decides on deferred tensors of a call that has ended, by how its nodes read them.

        The function that is returned decides on its results, once their recipes are known.
        """
        saved, call.deferred = call.deferred, []
        least = self.min_nbytes if self.context.taken is None else self.min_nbytes // STEADY
        wanted = [one for one, x in saved if storage_nbytes(x) >= least]
        readers = readers_of(call, out, wanted) if wanted else {}
        made = {x.untyped_storage()._cdata for x in tensors_in(out) if is_touchable(x)}
        results: list[Callable[[], None]] = []
        measures = not self.is_exact()
        for one, x in saved:
            reader = readers.get(id(one), Reader())
            reading = reading_by(reader, x, call)
            if reading.formula is Formula.RELATIVE and not self._serving.takes_half(x.dtype):
                reading = reading._replace(need=Need.EXACT, formula=Formula.SINGULAR)
            if reading.formula is Formula.LOG_PROBABILITY and x is call.first and measures:
                reading = Reading(Need.EXACT, Formula.DIFFERENCE, "logits, which are normalized")
            is_powered = reading.formula is Formula.RELATIVE
            if reading.need is Need.LOSSY and not is_powered and self._may_round:
                part = part_of(reader.node, x, out)
                if part is FormulaPart.GAUSSIAN:
                    reading = Reading(Need.EXACT, Formula.DIFFERENCE, WHY[part])
                elif part is not FormulaPart.NONE:
                    reading = reading._replace(part=part, number=reader.number)
            if reading.need is Need.LOSSY and reader.of is not None and measures:
                of_call = (other for other, _ in saved)
                self._redrawn.reads(reader.of, reader.number, of_call, reading.formula)
            decide = partial(self._decide_on, one, x, call, reading)
            if x.untyped_storage()._cdata in made:
                results.append(decide)
            else:
                decide()
        return results

    def _decide_on(self, one: Deferred, x: Tensor, call: Call, reading: Reading) -> None:
        if isinstance(one.held, KeepHandle) and not one.held.was_changed:
            one.held = self._packed(x, call, reading, one.node)

    def _left_alone(self, x: Tensor, call: Call | None) -> Held | None:
        """Returns what is held of a tensor that is kept unchanged; None for all others."""
        if type(x) is nn.Parameter:
            return KeepHandle(x, "a parameter or buffer", is_owned=True)
        why = untouchable(x)
        if why:
            entry = self.ledger.open(self._module, self._consumer, str(x.dtype), storage_nbytes(x))
            if self.recorder is not None:
                self.recorder.alone(entry.before_nbytes)
            return CountedTensor(KeepHandle(x, why), entry)
        if is_parameter(x) or is_buffer(x, call):
            return KeepHandle(x, "a parameter or buffer", is_owned=True)
        if call is not None and call.name in RECURRENT and self._needs_no_slot(x):
            return self._many.keep(x, self.ledger, self._module, self._consumer)
        return None

    def _packed(
        self, x: Tensor, call: Call | None, reading: Reading, node: int | None = None
    ) -> View:
        """Returns a view of the slot of x, which then holds what this reading needs.

        node: autograd's number of the one that saves x; None: the last
        """
        if call is not None and call.in_parts and call.saves_part(x):
            name = self._name_of_parts(call)
        else:
            name = self._name(call)
        geometry = Geometry.of(x)
        known, key = self._sources.stored(x), (version_of(x), x.dtype)
        ref = known.slots.get(key)
        slot = None if ref is None else ref()
        if slot is None:
            slot = self._new_slot(x, name, geometry)
            slot.is_unseen, slot.is_lent = call is None, known.is_lent
            known.slots[key] = weakref.ref(slot)
        if call is not None and x is not call.first:
            copied = note_copy(x, call, self._sources)
            if copied is not None:
                self._listener.makes(copied)
        origin = None if known.is_lent else known.origins.get(key)
        if name.consumer == RECOMPUTE and not self._codes_input(name):
            reading = Reading(Need.EXACT, Formula.UNKNOWN, "a module runs again from it")
        if call is not None and call.would_rerun:
            looks = self.recorder is not None or not self.is_exact()
            half = self._serving.takes_half(x.dtype)
            finer = self.context.finer_levels
            reading = attention_reading(
                x, call, slot, reading, looks=looks, takes_half=half, finer=finer
            )
        if self._sources.products_again and origin is not None and origin.recipe is not None:
            slot.of_product |= origin.recipe.of_product
        half = reading.by_size and self._serving.takes_half(x.dtype)
        request = classify(slot, x, geometry, call, reading, name, origin, takes_half=half)
        noted = None if self.recorder is None else self._noted(request)
        if request.reading.formula is Formula.RELATIVE:
            request = self._serving.as_decided(request)
        need = request.reading.need
        if call is not None and request.reading.formula in FINE:
            self._note_fine(None if origin is None else origin.root(), call)
        why = None if self.recorder is None else left_alone(request, *self._least)
        self._serving.serve(request, why)
        slot.promise(need, name.consumer)
        view = View(slot, geometry, need)
        if self.recorder is not None and noted is not None and why is not None:
            site, sources = noted
            number = last_node() if node is None else node
            view = self.recorder.saved(view, x, site, why, number, sources)
        if call is not None:
            if call.name == "apply_rows" or (call.name == "scale_rows" and x is call.first):
                slot.is_gathered = slot.is_source = True
            call.note_saved(slot, x)
            if self._watch is not None and _can_be_probed(request):
                self._watch.saved(Use(call, view, name.module), x)
        return view

    def _noted(self, request: Request) -> tuple[Site, Sequence[Slot]]:
        """Returns the profile's record of a save before any action: its site and sources."""
        origin, call = request.origin, request.call
        ready = None if origin is None else origin.ready()
        if ready is not None:
            depth = ready.max_depth
            if depth > DEEPEST_READY:
                ready = None
            else:
                request.slot.max_depth = depth
        if ready is not None:
            self._note_logits(ready)
        site = site_of(request, ready)
        if (
            ready is not None
            and ready.may_be_coded
            and not (ready.works_lossy and site.formula is not Formula.LOG_PROBABILITY)
        ):
            site = replace(site, rebuildable=Rebuildable.FROM_EXACT)
        if ready is not None and ready.is_of_logits:
            site = replace(site, of_logits=True)
        if call is not None and call.would_rerun:
            site = as_node(site, request.x, call)
        return site, () if ready is None else ready.slots

    def _note_logits(self, ready: Ready) -> None:
        """Notes how fine codes of q and k must be for a recipe that takes the softmax of logits."""
        found = attention_below(ready)
        if found is None or self.recorder is None:
            return
        why = TOO_SHARP if found.levels is None else LevelsSuffice(FOLLOWS, found.levels)
        for slot in found.slots:
            slot.has_logits = True
            self.recorder.decided(slot, why)

    def _note_fine(self, source: Slot | None, call: Call) -> None:
        """Notes that the call reads a result of `source` with a fine formula."""
        if source is None:
            return
        call.fine.append(source)
        if source.sites:  # in case it is encoded later
            source.sites[-1] = replace(source.sites[-1], curved=True)
        for one in (self.recorder, self._watch):
            if one is not None:
                one.curved(source)

    def _new_slot(self, x: Tensor, name: SiteName, geometry: Geometry) -> Slot:
        base = dense_base(x)
        dtype = str(x.dtype).removeprefix("torch.")
        entry = self.ledger.open(name.module, name.consumer, dtype, storage_nbytes(x))
        whole, known = (x, geometry) if base is None or base is x else (base, None)
        slot = CountedSlot(whole, entry, is_window=base is None, geometry=known)
        slot.shared = self._made_again if self._may_wait(name) else None
        return slot

    def _may_wait(self, name: SiteName) -> bool:
        """Returns whether this tensor, once it is restored, waits for its next reader."""
        return self._shares or (isinstance(self.policy, Plan) and self.policy.is_shared(name))

    def _copied(self, slot: Slot, y: Tensor) -> None:
        """Notes that a slot has a copy of a constant among the arguments of an ended call."""
        self._listener.copies(slot, y, None if self._consumers is None else self._consumers.call)

    def _name_of_parts(self, call: Call) -> SiteName:
        """Returns the name of a tensor that is saved in parts, which count as one."""
        if call.of_parts is None:
            call.of_parts = self._name(call)
        return call.of_parts

    def _name(self, call: Call | None) -> SiteName:
        """Returns the owner of this save, and how many this op of this module has made before."""
        key = self._module, "" if call is None else call.name
        nth = self._counts.get(key, 0)
        self._counts[key] = nth + 1
        return SiteName(*key, nth)

    @property
    def _module(self) -> str:
        return self._region or modules.current()

    @property
    def _consumer(self) -> str:
        call = None if self._consumers is None else self._consumers.call
        return "" if call is None else call.name
