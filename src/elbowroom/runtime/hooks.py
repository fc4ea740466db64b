"""The main path: autograd saves x -> `_pack` -> a `View`; backward asks -> `unpack` -> x again.

    x -> ours to touch? -> seen before?       identity.py
      -> what does the saving op need?        consumers.py, formulas.py
      -> policy                               plan/
      -> perform                              perform.py
      -> slot -> View                         slot.py

Everything is decided from metadata; no value of a saved tensor is read. What cannot be touched is
kept, with the version check that hooks switch off, and the ledger says why. State belongs to the
views that autograd holds, never to "the step": unpack may come twice, in any order, on another
thread, or never.
"""

import logging
import weakref
from collections.abc import Callable, Container, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from elbowroom.errors import CodecError, ElbowroomError, PlanError, RestoreError
from elbowroom.plan import (
    Action,
    Encode,
    Keep,
    Need,
    Offload,
    Policy,
    Rebuild,
    Rebuildable,
    Site,
    SiteName,
)
from elbowroom.plan.gentle import ATTENTION, MOST_LEVELS, gentle, keeps_rows_apart, suffices
from elbowroom.plan.site import CHECKPOINT, NORMS, RECOMPUTE, RECURRENT, Formula
from elbowroom.runtime import modules, opened
from elbowroom.runtime.arguments import Arguments
from elbowroom.runtime.calls import intercepted
from elbowroom.runtime.checkpoints import Pieces, checkpoint_call
from elbowroom.runtime.compiler import eagerly
from elbowroom.runtime.consumers import (
    Call,
    Consumers,
    Reading,
    is_buffer,
    reading_by,
    reading_of,
)
from elbowroom.runtime.context import PROCESS, Context
from elbowroom.runtime.direct import Direct, direct_of, is_overridden, may_run
from elbowroom.runtime.direct.attention import as_node, attention_reading
from elbowroom.runtime.handles import CastHandle, DropHandle, EncodeHandle, KeepHandle
from elbowroom.runtime.handles.keep import storage_nbytes
from elbowroom.runtime.identity import (
    Identity,
    covering,
    dense_base,
    is_parameter,
    is_touchable,
    untouchable,
)
from elbowroom.runtime.inert import Inertness
from elbowroom.runtime.ledger import Ledger
from elbowroom.runtime.masks import differ, mask_bits
from elbowroom.runtime.normal import Statistics
from elbowroom.runtime.observer import Observer, Recorder, Use, Watch
from elbowroom.runtime.passing import Passing
from elbowroom.runtime.perform import is_normalized, perform
from elbowroom.runtime.producers import note_copy, note_origin
from elbowroom.runtime.readers import Reader, readers_of
from elbowroom.runtime.recipes import Ready
from elbowroom.runtime.recompute import recomputed
from elbowroom.runtime.repeats import why_not_again, will_be_tried
from elbowroom.runtime.replay.scribe import Scribe
from elbowroom.runtime.replay.script import NOWHERE, Deed
from elbowroom.runtime.sites import MADE_OF_PARAMETERS, left_alone, rows_of, site_of
from elbowroom.runtime.slot import Beside, Deferred, Lone, Slot, View, last_node
from elbowroom.runtime.statistics import statistics_of
from elbowroom.runtime.waiting import Waiting, WaitingLine, root_of

_log = logging.getLogger("elbowroom")
_kept_out: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()  # of which that has been said


class Saving:
    """Context manager: what autograd saves inside goes through `policy`.

    Backward may run inside or after it.

    policy      site facts -> action
    min_nbytes  storages smaller than this stay as they are
    context     where seeds come from and what is learned goes to
    ledger      the count of bytes, filled as forward runs
    observer    who may watch what errors the codes make
    recorder    who writes down what is saved, when, and when it is asked for
    recompute   names of modules whose forward runs again in backward
    idle        nothing is to be done: open no hooks at all
    inertness   knows, or learns, which ops need not be looked at
    after       of the forward before in the same step: its ledger and watch go on
    scribe      writes down what is done, for the forwards that follow
    """

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
        inertness: Inertness | None = None,
        after: "Saving | None" = None,
        scribe: Scribe | None = None,
    ) -> None:
        self.policy = policy
        self.scribe = scribe
        self._inertness = inertness
        self.recorder = recorder
        self.recompute = recompute
        self.idle = idle
        self.observer = observer
        self.min_nbytes = min_nbytes
        self.context = context
        self.ledger: Ledger = Ledger() if after is None else after.ledger
        self._after = after
        self._calls: modules.Calls = weakref.WeakKeyDictionary()
        self._passing = Passing(None, self.ledger, min_nbytes)
        self._identity = Identity(self.ledger if getattr(policy, "rebuild", True) else None)
        self._consumers: Consumers | None = None
        self._open: ExitStack | None = None
        self._waiting = WaitingLine()
        self._pieces = Pieces()
        self._watch: Watch | None = None
        self._counts: dict[tuple[str, str], int] = {}
        self._region = ""  # whose inputs are being saved
        self._hook: Callable[[Tensor], Any] | None = None  # that autograd was given for ours

    def __enter__(self) -> Self:
        if torch.compiler.is_compiling():
            return self  # part of somebody's compiled region: not covered
        if self._open is not None:
            raise PlanError(
                "this saving context is open already; make another one for a nested or second use, "
                "as in 'with er.saving(...)'"
            )
        if self.idle:
            self._open = ExitStack()
            return self
        with ExitStack() as opening:  # undone if a later part fails: inside torch.func, for one
            opening.enter_context(eagerly())
            modules.watch()
            opening.callback(modules.unwatch)
            opening.enter_context(modules.counting(self._begin_calls()))
            hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, unpack)
            opening.enter_context(hooks)
            self._passing = Passing(self._inertness, self.ledger, self.min_nbytes)
            passes = self._passes if self._passing.ops else None
            failed = None if self.scribe is None else self.scribe.failed
            consumers = Consumers(self._finished, passes, self._run_as, failed)
            self._consumers = opening.enter_context(consumers)
            if self.scribe is not None:
                self.scribe.seeds_before = self.context.count
                self._identity.told = partial(self._copied, self.scribe)
            if self.recorder is not None or self.recompute:
                opening.enter_context(intercepted(self._called))
            self._counts.clear()
            self._watch = self._watching()
            self._open = opening.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._open is None:
            return
        self._open.close()
        self._open = self._consumers = self._hook = None
        if self.scribe is not None and kind is not None:
            self.scribe.refuse("the forward has raised")
        slots = [] if self._passing.parts is None else self._identity.slots()
        self._identity.clear()
        if kind is None:  # else what waits stays as it is: nothing may fail now, nor take memory
            self._waiting.end_all()
            self._pieces.end()
        self._waiting.clear()
        self._pieces.clear()
        if self.scribe is not None:
            self.scribe.finish(self.ledger, self.context.count)
        if kind is None:
            self._passing.learn(slots)
        self._passing = Passing(None, self.ledger, self.min_nbytes)
        if self.recorder is not None:
            self.recorder.forward_ended()

    @property
    def called(self) -> list[nn.Module]:
        """The outermost modules that have been called."""
        return list(self._calls)

    def join(self, hook: Callable[[Tensor], Any], outside: int) -> None:
        """Begin in the middle of a forward, for which somebody else has opened hooks and mode.

        They hand on what they are asked to `take` and to `see`. hook: the one that packs; outside:
        how many modules had been called around the model. How often each op of a module has saved
        before is not known: a plan may know such an op by another number, or not, and then holds
        what it saves exactly.
        """
        with ExitStack() as opening:
            modules.watch()
            opening.callback(modules.unwatch)
            opening.enter_context(modules.counting(self._begin_calls()))
            modules.join(self._calls, outside)
            failed = None if self.scribe is None else self.scribe.failed
            self._consumers = Consumers(self._finished, None, self._run_as, failed)
            if self.scribe is not None:  # from the first op on, or the script would be a part only
                self.scribe.seeds_before = self.context.count
                self._identity.told = partial(self._copied, self.scribe)
            self._hook = hook
            self._watch = self._watching()
            self._open = opening.pop_all()

    def calls(
        self,
        module: nn.Module,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Call a module, as it is called in this context."""
        return self._called(module, call, args, kwargs)

    def take(self, x: Tensor) -> Any:
        """Return what is held of x, which autograd saves."""
        return self._pack(x)

    def see(self, func: Callable[..., Any], types: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        """Run a torch function, and look at it."""
        assert self._consumers is not None
        return self._consumers.__torch_function__(func, types, args, kwargs)

    def _begin_calls(self) -> modules.Calls:
        earlier = () if self._after is None else self._after._calls
        self._calls = weakref.WeakKeyDictionary(earlier)
        return self._calls

    def _watching(self) -> Watch | None:
        if self.observer is None:
            return None
        return self.observer.begin() if self._after is None else self._after._watch

    def tighten(self, policy: Policy) -> None:
        """From now on use `policy`.

        What was kept so far and may carry an error is encoded, where the policy says so.
        """
        if self.scribe is not None:
            self.scribe.refuse("its setting has changed")
        for slot in self._identity.slots():
            kept = slot.value
            if (
                not isinstance(kept, KeepHandle)
                or not slot.sites
                or slot.pinned
                or kept.was_changed
            ):
                continue
            # An op served by what was kept already left no site: ask for the most that any of them
            # may need.
            action = policy(replace(slot.sites[-1], need=Need.LOSSY))
            if isinstance(action, Encode):
                base = kept.restore()
                bits = mask_bits(base, slot.mask_of) if slot.mask_of else None
                if bits is not None:
                    slot.hold_bits(bits)
                elif slot.mask_of:
                    continue
                seed, known = self.context.next_seed(), slot.statistics
                slot.hold(perform(action, base, Need.LOSSY, None, seed, statistics=known))

    def error_report(self) -> Any:
        """What the lossy codes add to the gradient's variance, predicted beside measured.

        Call it after backward. Raises PlanError where nobody watches.
        """
        if self.observer is None:
            raise PlanError(
                "this context does not watch what its codes do; open it with "
                "er.saving(..., watch=True), or with noise=0.1"
            )
        return self.observer.error_report()

    def drop_everything(self) -> None:
        """Let go of all that was decided on. The graph is useless then; only the count goes on."""
        if self.scribe is not None:
            self.scribe.refuse("nothing is held")
        for slot in self._identity.slots():
            if slot.sites:
                slot.hold(DropHandle())

    def _finished(self, call: Call, out: Any) -> None:
        with torch._C.DisableTorchFunction():
            if self.scribe is not None:
                self.scribe.ends()
            results = self._decide_on_deferred(call, out)
            self._waiting.ended(call, out, self._identity)
            for finish in call.at_end:
                finish(call, out)
            note_origin(call, out, self._identity)
            if self.scribe is not None and is_touchable(out):
                self.scribe.makes(self._identity.origin(out))
            if self._passing.parts is not None:
                op = self._module, call.name
                self._passing.parts.ended(op, call, out, self._identity)
            for decide in results:
                decide()
            if self._watch is not None:
                self._watch.ended(call, out)
            if self.recorder is not None:
                self.recorder.ended(call, out, self._identity.slots_of(call.args, call.kwargs))
            if self.scribe is not None:
                self.scribe.ended(call, out)

    def _called(
        self,
        module: torch.nn.Module,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """A module is called: what it saves may be recomputed, or the call written down."""
        name, consumers = modules.name_of(module), self._consumers
        if name not in self.recompute or consumers is None or not torch.is_grad_enabled():
            if self.recorder is not None:
                return self.recorder.module(module, call, args, kwargs, self._source_of)
            return call(*args, **kwargs)
        if not self._is_asked():  # inside a checkpoint of the user's, or of ours
            return call(*args, **kwargs)
        arguments = Arguments(args, kwargs)
        sharded = modules.is_sharded(module)
        if self.scribe is not None and will_be_tried(module):
            self.scribe.refuse("modules are tried in it", once=True)
        why = modules.SHARDED if sharded else why_not_again(module, call, arguments)
        if why:
            self._keep_out(module, name, why)
            return call(*args, **kwargs)
        if self.scribe is not None:
            self.scribe.begins_region(module)
        self._waiting.end_all()
        with torch._C.DisableTorchFunction():  # what we ask is no op of the model's
            outer, region = consumers.call, Call(recomputed, args, kwargs, name=RECOMPUTE)

        def begin() -> None:
            if self.scribe is not None and self._region:
                self.scribe.region_saved()
            consumers.call, self._region = outer, ""

        consumers.call, self._region = region, name
        if self.scribe is not None:
            self.scribe.saves_region()
        try:
            return recomputed(module, call, args, kwargs, arguments, begin)
        finally:
            begin()

    def _keep_out(self, module: nn.Module, name: str, why: str) -> None:
        """This module cannot be run a second time: what it saves is held."""
        if module not in _kept_out:
            _kept_out.add(module)
            _log.warning(
                "module '%s' is not recomputed: %s. What it saves is held, or made smaller in "
                "other ways, and takes more of the budget",
                name,
                why,
            )
        self.context.learn_unrepeatable(name)

    def _run_as(self, call: Call) -> Callable[..., Any]:
        """The function to run for a call: where it can be, one with a backward on what is held.

        A step that is written down runs as it is, and says what it could.
        """
        scribe = self.scribe
        if scribe is not None:
            if self.ledger.was_asked:
                scribe.refuse("a backward has run inside")
            scribe.begins(call)
        if call.name in opened.NAMES and self._consumers is not None and not is_overridden():
            body = opened.opened(call.func, self._consumers)
            if body is not None:
                if scribe is not None:
                    scribe.runs(call, body, None)
                return body
        self._waiting.end_known()
        if self._pieces:
            if self._is_asked():
                self._pieces.end()
            else:
                self._pieces.calls(call)
        direct = direct_of(call)
        if direct is None:
            if scribe is not None:
                scribe.runs(call, call.func, None)
            return call.func
        run = self._direct_run(call, direct)
        if scribe is not None:
            scribe.runs(call, run, direct)
        return run

    def _direct_run(self, call: Call, direct: Direct) -> Callable[..., Any]:
        """The function to run for a call that a node of ours could stand for."""
        call.reads = direct.reads
        call.would_rerun = call.name == ATTENTION
        if not self._may_stand(direct, call) or not may_run(call, direct) or not self._is_asked():
            return call.func
        call.reruns = call.would_rerun
        call.rounds = direct.always or not direct.exact
        return direct.run

    def _may_stand(self, direct: Direct, call: Call) -> bool:
        """Whether this node may stand in the graph of this context."""
        if direct.always:
            return True
        allowed = direct.exact or not self._is_exact
        if direct.again and self.context.runs_again:
            return True
        if (direct.again or direct.swaps) and not getattr(self.policy, "again", False):
            return False
        if call.would_rerun:  # else q and k could have no code
            return allowed and getattr(self.policy, "reruns_attention", True)
        return allowed and self.recorder is None

    @property
    def _is_exact(self) -> bool:
        """Whether no code of the policy adds errors; one that does not say may round nothing."""
        return bool(getattr(self.policy, "exact", True))

    @property
    def _skims(self) -> bool:
        """Whether nobody asks what slots there are: not a plan, nor one that is to be made."""
        return hasattr(self.policy, "rebuild") and self.recorder is None

    @property
    def _codes_checkpoints(self) -> bool:
        """Whether inputs of the user's checkpoints may be codes: where nobody writes down a step.

        What they may be is known when their piece of forward has run.
        """
        again = getattr(self.policy, "again", False) and not self._is_exact
        return again and self.recorder is None

    def _is_asked(self) -> bool:
        """Whether what is saved now comes to this context: nobody else's hooks lie over its own."""
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
        return hooks is not None and hooks[0] == (self._hook or self._pack)

    def _pack(self, x: Tensor) -> View | Deferred | Lone | Beside | KeepHandle:
        with torch._C.DisableTorchFunction():
            held = self._taken(x)
            if self.scribe is not None:
                self.scribe.saved(x, held)
            return held

    def _taken(self, x: Tensor) -> View | Deferred | Lone | Beside | KeepHandle:
        consumers = self._consumers
        if consumers is not None and consumers.passing and not untouchable(x):
            kept = self._passing.keep(x, (self._module, consumers.passing))
            if kept is not None:
                return kept
            self._passing.stop()
        call = None if consumers is None else consumers.call
        kept = self._left_alone(x, call)
        if kept is not None:
            return kept
        if call is None and self._codes_checkpoints:
            call = checkpoint_call(x)
        if self._pieces and (self._pieces.has_begun or call is None or call.name != CHECKPOINT):
            self._pieces.end()
        if call is None or call.is_told_at_once:
            return self._packed(x, call, reading_of(x, call))
        deferred = Deferred(x)
        call.deferred.append((deferred, x))
        return deferred

    def _decide_on_deferred(self, call: Call, out: Any) -> list[Callable[[], None]]:
        """A call has ended, and so its nodes tell how they read what they have saved.

        What comes back decides on its results, once it is known how these could be made again.
        """
        saved, call.deferred = call.deferred, []
        if not saved:
            return []
        wanted = [one for one, x in saved if storage_nbytes(x) >= self.min_nbytes]
        readers = readers_of(call, out, wanted) if wanted else {}
        made = {x.untyped_storage()._cdata for x in tree_leaves(out) if is_touchable(x)}
        results: list[Callable[[], None]] = []
        for one, x in saved:
            reader = readers.get(id(one), Reader())
            reading = reading_by(reader.formula, x, call, reader.node)
            decide = partial(self._decide_on, one, x, call, reading)
            if x.untyped_storage()._cdata in made:
                results.append(decide)
            else:
                decide()
        return results

    def _decide_on(self, one: Deferred, x: Tensor, call: Call, reading: Reading) -> None:
        if isinstance(one.held, KeepHandle) and not one.held.was_changed:
            one.held = self._packed(x, call, reading, one.node)

    def _passes(self, op: str) -> bool:
        """Whether the op that begins is inert. What waits for one more op must see that."""
        known = (modules.current(), op) in self._passing.ops and op not in opened.NAMES
        return known and not self._waiting and not self._pieces

    def _left_alone(self, x: Tensor, call: Call | None) -> Lone | Beside | KeepHandle | None:
        """What is held of a tensor that is not ours to touch, or not worth it; None: it is."""
        if type(x) is nn.Parameter:
            return KeepHandle(x, "a parameter or buffer", is_owned=True)
        why = untouchable(x)
        if why:
            entry = self.ledger.open(self._module, self._consumer, str(x.dtype), storage_nbytes(x))
            return Lone(KeepHandle(x, why), entry)
        if is_parameter(x) or is_buffer(x, call):
            return KeepHandle(x, "a parameter or buffer", is_owned=True)
        many = call is not None and call.name in RECURRENT and self._skims
        if many and storage_nbytes(x) < self.min_nbytes:
            return self._passing.keep_small(x, (self._module, self._consumer))
        return None

    def _packed(
        self, x: Tensor, call: Call | None, reading: Reading, node: int | None = None
    ) -> View:
        """A view of the slot of x, which then holds what this reading needs.

        node: autograd's number of the one that saves x; None: the last
        """
        name = self._name(call)
        slot = self._identity.slot(x) or self._new_slot(x, name)
        if call is not None:
            note_copy(x, call, self._identity)
            if self.scribe is not None:
                self.scribe.makes(self._identity.origin(x))
        if call is not None and call.would_rerun:
            looks = self.recorder is not None or not self._is_exact
            reading = attention_reading(x, call, slot, reading, looks=looks)
        if reading.need is Need.MASK and differ(name.consumer, slot.bits_of):
            why = f"'{slot.bits_of}' holds another mask of it"
            reading = Reading(Need.EXACT, Formula.COMPARED, why)
        if reading.by_size and name.consumer not in NORMS and not rows_of(slot, x, reading.width):
            why = "its backward divides by the size of rows that lie in no order that is known"
            reading = Reading(Need.EXACT, Formula.SINGULAR, why)
        need = reading.need
        noted: Site | None = None
        sources: Sequence[Slot] = ()
        if self.recorder is not None:
            origin, ready = self._identity.origin(x), self._ready(x)
            sources = () if ready is None else ready.slots
            noted = site_of(slot, x, call, reading, ready, name, origin)
            if call is not None and call.would_rerun:
                noted = as_node(noted, x, call)
        if reading.formula.is_fine and call is not None:
            self._note_fine(root_of(self._identity.origin(x)), call)
        if not slot.serves(need) or is_too_coarse(slot, x, reading, name, call):
            made = self._identity.origin(x)
            why_kept = left_alone(slot, x, call, need, self.min_nbytes, made)
            if why_kept:
                cast = self._cast(slot, x, call) if why_kept is MADE_OF_PARAMETERS else None
                slot.hold(cast or KeepHandle(slot.base.on(x), why_kept))
                self._tell(slot, Keep(why_kept) if cast is None else None, name)
            else:
                self._serve(slot, x, call, reading, name)
        slot.promise(need, name.consumer)
        if self._passing.parts is not None:
            op, held = (name.module, name.consumer), self.ledger.held_nbytes
            self._passing.parts.saved(op, slot, x, self._identity, held)
        view = View(slot, x, need)
        if self.recorder is not None and noted is not None:
            made = self._identity.origin(x)
            why_kept = left_alone(slot, x, call, need, self.min_nbytes, made)
            number = last_node() if node is None else node
            view = self.recorder.saved(view, x, noted, why_kept, number, sources)
        if call is not None:
            call.note_saved(slot, x)
            readable = call.name != CHECKPOINT  # no op of the graph reads it, to be probed
            if self._watch is not None and need is Need.LOSSY and readable:
                self._watch.saved(Use(call, view, name.module), x)
        return view

    def _cast(self, slot: Slot, x: Tensor, call: Call | None) -> CastHandle | None:
        """What makes x's storage again, if that is a cast of a parameter."""
        if call is None or not getattr(self.policy, "rebuild", False):
            return None
        return CastHandle.of(x, slot.base.on(x), call.began)

    def _note_fine(self, source: Slot | None, call: Call) -> None:
        """The call reads what is made of `source` with a formula that is fine."""
        if source is None:
            return
        call.fine.append(source)
        if source.sites:  # should it be encoded later than now
            source.sites[-1] = replace(source.sites[-1], curved=True)
        for one in (self.recorder, self._watch):
            if one is not None:
                one.curved(source)

    def _new_slot(self, x: Tensor, name: SiteName) -> Slot:
        base = dense_base(x)
        dtype = str(x.dtype).removeprefix("torch.")
        entry = self.ledger.open(name.module, name.consumer, dtype, storage_nbytes(x))
        slot = Slot(x if base is None else base, entry, is_window=base is None)
        self._identity.remember(x, slot)
        return slot

    def _ready(self, x: Tensor) -> Ready | None:
        origin = self._identity.origin(x)
        return None if origin is None or origin.recipe is None else origin.recipe.ready()

    def _source_of(self, x: Tensor) -> Slot | None:
        if storage_nbytes(x) < self.min_nbytes:
            return None  # kept, whatever it could be made from
        ready = self._ready(x)
        return None if ready is None or not ready.exact else ready.sole_source

    def _serve(
        self, slot: Slot, x: Tensor, call: Call | None, reading: Reading, name: SiteName
    ) -> None:
        """Make the slot hold what this op needs."""
        ready, need = self._ready(x), reading.need
        site = site_of(slot, x, call, reading, ready, name, self._identity.origin(x))
        too_coarse = ready is not None and any(
            map(partial(is_too_coarse_for, site=site), ready.slots)
        )
        if too_coarse or (ready is not None and self._would_pin(ready, need)):
            ready, site = None, replace(site, rebuildable=Rebuildable.NO)
        key = (site.module, site.consumer, site.shape, site.dtype)
        whole = slot.base.on(x)
        if self.context.keeps(key):
            action: Action = Keep("somebody else held it until backward")
        else:
            slot.sites.append(site)
            action = self._decide(site, ready)
        if isinstance(action, Encode) and site.rows is not None and site.consumer not in NORMS:
            codec, rows = site.rows.coded(action.codec, by_size=site.by_size)
            action = replace(action, codec=codec, rows=rows)
        if isinstance(action, Offload) and covering(x) is None:
            action = Keep("a part of a storage whose other parts may change")
        slot.entry.why = action.why if isinstance(action, Keep) else ""
        seed = self.context.next_seed() if isinstance(action, Encode) else 0
        drawn = self.context.count
        covers = x.numel() == whole.numel()

        def hold(slot: Slot, whole: Tensor, action: Action) -> None:
            if slot.pinned and isinstance(action, Encode):
                slot.entry.why = "an op that needs every bit reads it, or what is made of it"
                self._tell(slot, Keep(slot.entry.why), site.name)
                return
            known = slot.statistics
            try:
                prefetcher = self.context.prefetcher
                slot.hold(
                    perform(
                        action, whole, need, ready, seed, outlived, known, prefetcher, site.name
                    )
                )
            except CodecError as error:
                dtype = str(site.dtype).removeprefix("torch.")
                where = f"saving {dtype} {site.shape} for '{site.consumer}' in '{site.module}'"
                raise CodecError(f"{error} ({where})") from error
            self._tell(slot, action, site.name, need, ready=ready, norm=known, drawn=drawn)
            slot.drop_needless_bits()
            if self._watch is not None and not isinstance(action, Keep | Offload):
                encoded = action if isinstance(action, Encode) else None
                codec = None if encoded is None else encoded.codec
                self._watch.held(slot, whole, slot.sites[-1], codec)

        def hold_normalized(norm: Call, out: Any) -> None:
            slot.statistics = statistics_of(norm, whole)
            if slot.statistics is None and is_normalized(action):
                slot.hold(KeepHandle(whole, "the input of a norm, in no order that is known"))
                self._tell(slot, Keep(""), site.name)
            elif isinstance(action, Encode) and action.may_change:
                self._waiting.append(Waiting(slot, action, hold, out))
            elif not isinstance(action, Keep):
                hold(slot, whole, action)

        def hold_for_checkpoint(why: str) -> None:
            if why:
                slot.hold(KeepHandle(whole, why))
            else:
                hold(slot, whole, action)

        def outlived() -> None:
            self.context.learn_keep(key)

        if need is Need.SHAPE and isinstance(action, Rebuild):
            slot.hold_shape()
            self._tell(slot, None, site.name, need)
        elif need is Need.MASK and isinstance(action, Encode):
            bits = mask_bits(whole, site.consumer, only_output=covers)
            if bits is None:
                slot.hold(KeepHandle(whole, "a NaN, of which a bit cannot tell"))
            else:
                slot.hold_bits(bits)
            self._tell(slot, None, site.name, need, bits=site.consumer, covers=covers)
        elif call is not None and call.name == CHECKPOINT and is_lossy(action, need):
            if self.scribe is not None:
                self.scribe.refuse("an input of a checkpoint waits")
            slot.hold(KeepHandle(whole, slot.entry.why))
            self._pieces.wait(hold_for_checkpoint)
        elif call is not None and call.name in NORMS and covers and is_lossy(action, need):
            # Its statistics, which the code is better with, are known when it has ended.
            slot.hold(KeepHandle(whole, slot.entry.why))
            self._tell(slot, Keep(slot.entry.why), site.name)
            call.at_end.append(hold_normalized)
        else:
            hold(slot, whole, action)

    def _tell(
        self,
        slot: Slot,
        action: Action | None,
        name: SiteName,
        need: Need = Need.EXACT,
        *,
        ready: Ready | None = None,
        norm: Statistics | None = None,
        bits: str = "",
        covers: bool = False,
        drawn: int = 0,
    ) -> None:
        """Write down what was done with a slot."""
        if self.scribe is not None:
            draw = drawn - self.scribe.seeds_before
            deed = Deed(NOWHERE, name, need, action, bits=bits, covers=covers, draw=draw)
            remade = ready if isinstance(action, Rebuild) else None
            self.scribe.does(slot, deed, remade, norm)

    def _copied(self, scribe: Scribe, slot: Slot, y: Tensor) -> None:
        """A constant is among the arguments of the call that has ended, and a slot has a copy."""
        scribe.copies(slot, y, None if self._consumers is None else self._consumers.call)

    def _would_pin(self, ready: Ready, need: Need) -> bool:
        """Whether a tensor that may have a code would keep another from having one.

        A recipe that can only run on an exact source keeps that as it is.
        """
        if need is not Need.LOSSY or self._is_exact or ready.works_lossy:
            return False
        return any(slot.sites and not slot.pinned for slot in ready.slots)

    def _decide(self, site: Site, ready: Ready | None) -> Action:
        if site.consumer == ATTENTION and site.need is Need.LOSSY and not self._is_exact:
            # What it would be made of may be a code that is too rough, or become one.
            action = self.policy(replace(site, rebuildable=Rebuildable.NO))
            if isinstance(action, Encode):  # whatever the policy: by the logits of this step
                return replace(action, codec=gentle(action.codec, site))
            return action
        action = self.policy(site)
        if isinstance(action, Rebuild) and ready is None and site.need is not Need.SHAPE:
            return Keep("the policy asked to rebuild what cannot be rebuilt")
        return action

    def _name(self, call: Call | None) -> SiteName:
        """Whose save this is, and how many this op of this module has made before."""
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


def is_too_coarse(
    slot: Slot, x: Tensor, reading: Reading, name: SiteName, call: Call | None
) -> bool:
    """Whether a code that is held was chosen for a reader with a milder formula than this one."""
    if reading.need is not Need.LOSSY or slot.exact or not slot.sites:
        return False
    levels = 0 if call is None else call.levels or MOST_LEVELS
    site = replace(
        slot.sites[-1],
        consumer=name.consumer,
        formula=reading.formula,
        least_levels=levels,
        rows=rows_of(slot, x, reading.width),
        by_size=reading.by_size,
    )
    below = getattr(slot.value, "ready", None)
    return any(is_too_coarse_for(one, site) for one in ([slot] if below is None else below.slots))


def is_too_coarse_for(slot: Slot, site: Site) -> bool:
    """Whether what a slot holds is a code of fewer levels than this site asks for.

    Or one that does not keep apart the rows of which this site asks for the size.
    """
    held = slot.value
    if slot.exact or not isinstance(held, EncodeHandle):
        return False
    normalized = site.rows is not None and held.normalizes(site.rows)
    apart = keeps_rows_apart(held.codec, site, normalized=normalized)
    return not apart or not suffices(held.codec, site)


def is_lossy(action: Action, need: Need) -> bool:
    """Whether the tensor may be, or may become, a lossy code."""
    at_once = isinstance(action, Offload) or (isinstance(action, Encode) and action.codec.lossless)
    return need is Need.LOSSY and not at_once


def unpack(held: Any) -> Tensor:
    """Return the saved tensor that autograd asks for: the hook of backward."""
    try:
        x: Tensor = held.restore()
        return x
    except ElbowroomError:
        raise
    except Exception as error:
        raise RestoreError(
            f"a saved tensor could not be given back to backward: {error}"
        ) from error
