"""Serving of saves: the policy chooses an action for a slot, and the action is performed.

    Serving      asks the policy, and has its action performed
    perform      an action becomes a handle: the only place that matches on actions
    WaitingLine  tensors that are kept until more is known

Usually this is immediate. In some cases more must be known first, and the tensor is kept until
then: the statistics of the norm that saves it (as the call ends); the op that reads the norm's
result (`deferred.py`), or a result that saturates (`saturated.py`); a source to rebuild it from, in
exact contexts (`LaterSource`); and the piece of forward that a checkpoint of the user runs, or that
a plan recomputes (`checkpoints.py`).
"""

import weakref
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from elbowroom.codecs.base import Seed
from elbowroom.errors import CodecError, PlanError
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
from elbowroom.plan.precision_floor import (
    ATTENTION,
    MAX_LEVELS,
    MIN_BIAS,
    MIN_LOG_PROBABILITY,
    at_precision_floor,
    coded_rows,
    fewest_levels,
    suffices,
)
from elbowroom.plan.site import (
    AGAIN,
    NORMS,
    RECOMPUTE,
    Formula,
    HalfSuffices,
    LevelsSuffice,
    key_of,
    limited,
)
from elbowroom.runtime.checkpoints import Pieces
from elbowroom.runtime.consumers import Call, FormulaPart
from elbowroom.runtime.context import Context, mixed
from elbowroom.runtime.deferred import MAX_SAVES, Waiting
from elbowroom.runtime.handles import (
    CastHandle,
    EncodeHandle,
    Handle,
    KeepHandle,
    OffloadHandle,
    RebuildHandle,
)
from elbowroom.runtime.handles.encode import encoded, is_normalized, prefetcher_of
from elbowroom.runtime.handles.rebuild import Ready, Recipe
from elbowroom.runtime.logits import Logits, are_logits, may_be_logits
from elbowroom.runtime.masks import mask_bits
from elbowroom.runtime.modules import outermost
from elbowroom.runtime.normal import Statistics
from elbowroom.runtime.observer import Listener, Watch
from elbowroom.runtime.saturated import Saturated
from elbowroom.runtime.sites import (
    MADE_OF_PARAMETERS,
    Request,
    is_served,
    is_too_coarse_for,
    left_alone,
    site_of,
)
from elbowroom.runtime.slot import Slot
from elbowroom.runtime.sources import Sources
from elbowroom.runtime.statistics import statistics_of
from elbowroom.runtime.storage import covering
from elbowroom.runtime.tiers import tier_for
from elbowroom.runtime.undecided import Undecided

_MAX_WAITING = 8  # of a kind
_NOWHERE = SiteName("", "")
COUNTS_AS_EXACT = (
    "logits, of which log-probabilities are computed again: the policy counts as exact. With an "
    "attribute `exact = False`, log-probabilities are saved in place of them, and have a code"
)


def _is_same(whole: Tensor, ready: Ready) -> bool:
    """Returns whether a recipe gives the bits of a tensor, by running it: not for hot paths."""
    made = RebuildHandle(ready, whole).restore()
    one, other = (x.detach().contiguous().view(torch.uint8) for x in (whole, made))
    return torch.equal(one, other)


def is_lossy(action: Action, need: Need) -> bool:
    """Returns whether the tensor may be, or may become, a lossy code."""
    at_once = isinstance(action, Offload) or (isinstance(action, Encode) and action.codec.lossless)
    return need is Need.LOSSY and not at_once


class Serving:
    """Serves the requests of one forward.

    waiting, pieces  tensors that are decided on later
    undecided        tensors that a later op may turn out to need exactly
    """

    def __init__(
        self,
        policy: Policy,
        context: Context,
        min_nbytes: int,
        sources: Sources,
        listener: Listener,
        watch: Watch | None,
        is_exact: Callable[[], bool],
        *,
        lets_wait: bool,
        adapts: bool = False,
    ) -> None:
        """min_nbytes: storages smaller than this are kept. watch: is given the originals of codes.

        is_exact: returns whether no code adds errors
        lets_wait: results that saturate may wait; not in a step that is profiled
        adapts: the policy chooses its settings by what is watched
        """
        self._policy, self._context, self._min_nbytes = policy, context, min_nbytes
        self._sources, self._listener, self._watch = sources, listener, watch
        self._is_exact, self._lets_wait, self._adapts = is_exact, lets_wait, adapts
        self._rebuilds = getattr(policy, "rebuild", True)
        self._first_seed = context.first_seed()
        self.waiting = WaitingLine()
        self.pieces = Pieces()
        self.undecided = Undecided(context, listener, self._half_serves)

    def end(self) -> None:
        """Ends the forward: nothing waits any more."""
        self.waiting.end_all()
        self.pieces.end()

    def clear(self) -> None:
        """Leaves waiting tensors as they are."""
        self.waiting.clear()
        self.pieces.clear()
        self.undecided.clear()

    def serve(self, request: Request, why: str | None = None) -> None:
        """Makes the slot hold what the op needs, if it does not yet.

        why: what `left_alone` says of it, if it was asked already
        """
        slot, x, _, call, _, name, _ = request
        if (slot.sites or slot.value is not None) and is_served(request):
            if slot.sites and request.reading.formula is Formula.RELATIVE:
                slot.sites.append(self._site(request)[0])  # for a tighter policy
            if slot.sites and request.reading.part is not FormulaPart.NONE:
                self.undecided.note(request, slot.sites[-1])
            if slot.waits and request.reading.need is Need.LOSSY:
                self.waiting.reads(slot, self._site(request)[0])
            return
        why = left_alone(request, self._min_nbytes, self._context.taken) if why is None else why
        if not why:
            self._act(request)
            return
        cast = self._cast(slot, x, call) if why is MADE_OF_PARAMETERS else None
        slot.hold(cast or KeepHandle(slot.base.on(x), why))
        self._listener.does(slot, name, Need.EXACT, Keep(why) if cast is None else None)

    def takes_half(self, dtype: torch.dtype) -> bool:
        """Returns whether a code of half of its bits may stand for what is divided by.

        In a step that is profiled it may, in others: `as_decided` says what holds for this one. Not
        where settings are chosen by what was watched, as these know no such code.
        """
        if dtype is not torch.float32 or self._adapts:
            return False
        return not self._lets_wait or not self._is_exact()

    def as_decided(self, request: Request) -> Request:
        """Returns the request, as one for the tensor itself if the policy has no code for it.

        For what is divided by: it is then an exact source, too, or is made of exact ones.
        """
        action = self._policy(replace(site_of(request, None), rebuildable=Rebuildable.NO))
        if isinstance(action, Encode):
            return request
        exact = request.reading._replace(need=Need.EXACT, formula=Formula.SINGULAR)
        return request._replace(reading=exact)

    def _half_serves(self, slot: Slot, site: Site) -> bool:
        """Returns whether the slot has such a code, or will have it once it need not wait."""
        half = replace(site, formula=Formula.RELATIVE, rebuildable=Rebuildable.NO)
        if not self.takes_half(slot.dtype):
            return False
        if slot.waits:
            self.waiting.reads(slot, half)
        held = slot.value
        return slot.waits or (isinstance(held, EncodeHandle) and suffices(held.codec, half))

    def _cast(self, slot: Slot, x: Tensor, call: Call | None) -> CastHandle | None:
        """Returns a handle that rebuilds x's storage if it is a cast of a parameter, or None."""
        if call is None or not getattr(self._policy, "rebuild", False):
            return None
        return CastHandle.of(x, slot.base.on(x), call.began)

    def _act(self, request: Request) -> None:
        """Asks the policy, and performs its action; or lets the tensor wait."""
        slot, x, _, call, reading, name, _ = request
        need, (site, ready) = reading.need, self._site(request)
        whole = slot.base.on(x)
        action = self._chosen(request, site, ready)
        slot.entry.why = action.why if isinstance(action, Keep) else ""
        seed = self.next_seed() if isinstance(action, Encode) else 0
        hold = partial(self._hold, name, site, ready, seed, self._context.count)
        if reading.part is not FormulaPart.NONE:
            self.undecided.note(request, site)
        covers = x.numel() == whole.numel()
        if need is Need.SHAPE and isinstance(action, Rebuild):
            slot.hold_shape()
            self._listener.does(slot, name, need, None)
        elif need is Need.MASK and isinstance(action, Encode):
            self._hold_mask(slot, whole, name, covers=covers)
        elif call is not None and call.name in AGAIN and is_lossy(action, need):
            self._keep(slot, whole, name)
            self.pieces.wait(partial(self._hold_input, slot, whole, action, hold))
        elif reading.part is not FormulaPart.NONE and self._waits(request, action):
            self._keep(slot, whole, name)
            self.waiting.wait(self._waiting_for(request, action, hold))
        elif call is not None and call.name in NORMS and covers and is_lossy(action, need):
            self._keep(slot, whole, name)
            call.at_end.append(partial(self._hold_normalized, slot, whole, name, action, hold))
        else:
            hold(slot, whole, action)
            if isinstance(action, Keep) and ready is None:
                self._wait_for_sources(request, site)

    def _waiting_for(self, request: Request, action: Action, hold: "partial[None]") -> Saturated:
        """Returns a slot that waits: for a softmax, if it is q, k, or a cap of their product."""
        slot, origin, part = request.slot, request.origin, request.reading.part
        recipe = None if origin is None or not self._rebuilds else origin.recipe
        again = None
        if recipe is not None and are_logits(recipe):
            again = partial(self._hold_again, recipe, request.name, slot.sites[-1])
        elif part is not FormulaPart.FACTOR:
            return Saturated(slot, action, hold, part)
        return Logits(slot, action, hold, part, self._listener.needs_levels, again)

    def _hold_again(
        self, recipe: Recipe, name: SiteName, site: Site, slot: Slot, whole: Tensor
    ) -> bool:
        """Holds a cap of logits as their recipe if q and k have codes for it, or returns False."""
        ready = recipe.ready()
        if ready is None or not (ready.is_of_logits and ready.works_lossy):
            return False
        self._hold(name, site, ready, 0, self._context.count, slot, whole, Rebuild())
        return True

    def _waits(self, request: Request, action: Action) -> bool:
        """Returns whether a part waits for what follows; a recipe is as exact as its source."""
        reading, call = request.reading, request.call
        if not self._lets_wait or not is_lossy(action, reading.need):
            return False
        if reading.part is FormulaPart.FACTOR:
            return isinstance(action, Encode) and call is not None and may_be_logits(call)
        if reading.part is FormulaPart.DIFFERENCE:
            return not isinstance(action, Rebuild)
        return reading.part in (FormulaPart.SATURATED, FormulaPart.EXPONENTIAL)

    def _wait_for_sources(self, request: Request, site: Site) -> None:
        """Lets a kept tensor wait until an op saves a source of it, in exact contexts.

        A tensor that only a linear layer could recompute waits, too, and is decided on last.
        """
        slot, origin = request.slot, request.origin
        if not (self._sources.is_exact and self._lets_wait) or slot.is_unseen:
            return
        if origin is None or origin.recipe is None or site.need is Need.SHAPE:
            return
        known = replace(site, rebuildable=Rebuildable.EXACT)
        if isinstance(self._policy(known), Rebuild):
            hold = partial(self._hold_later, request.name, known)
            self.waiting.wait(LaterSource(slot, origin.recipe, hold))

    def _hold_later(
        self, name: SiteName, site: Site, slot: Slot, whole: Tensor, ready: Ready
    ) -> None:
        """Holds a recipe in place of a kept tensor, if that pays and gives the same bits."""
        sources, products = self._sources, ready.products
        if not sources.affords(products) or any(one.is_unseen for one in ready.slots):
            return
        if ready.is_unsure and not _is_same(whole, ready):
            return
        sources.again += products
        self._hold(name, site, ready, 0, self._context.count, slot, whole, Rebuild())

    def next_seed(self) -> int:
        """Returns a fresh 64-bit seed."""
        return mixed(self._first_seed + self._context.reserve(1) + 1)

    def makes_again(self, x: Tensor) -> bool:
        """Returns whether exact tensors that are held make this one again."""
        origin = self._sources.origin(x) if self._rebuilds else None
        ready = None if origin is None else origin.ready()
        return ready is not None and ready.exact

    def _site(self, request: Request) -> tuple[Site, Ready | None]:
        """Returns the site of the save, and how x could be rebuilt for it."""
        origin = request.origin
        ready = None if origin is None or not self._rebuilds else origin.ready()
        site = site_of(request, ready)
        if ready is not None and not self._may_rebuild(request, site, ready):
            return replace(site, rebuildable=Rebuildable.NO), None
        return site, ready

    def _may_rebuild(self, request: Request, site: Site, ready: Ready) -> bool:
        """Returns whether x may be rebuilt by this recipe."""
        if self._sources.is_exact:  # no source has a code; `LaterSource` decides on what is dear
            return not self._is_dear(ready)
        if site.consumer == RECOMPUTE and site.need is Need.LOSSY:
            return False  # the plan expects a code
        if request.reading.part is FormulaPart.DIFFERENCE and not ready.exact:
            return False  # an exponential may follow, for which it must be exact
        too_coarse = any(
            is_too_coarse_for(slot, site) or (slot.waits and self.waiting.is_too_coarse(slot, site))
            for slot in ready.slots
            if not (slot.has_logits and ready.is_of_logits)
        )
        return not too_coarse and not self._would_pin(ready, site.need)

    def _is_dear(self, ready: Ready) -> bool:
        """Returns whether a recipe is used only as a last choice, or has to be tested first."""
        if ready.products or ready.is_unsure or any(slot.is_unseen for slot in ready.slots):
            return True
        return ready.is_extra and not self._sources.affords(0)

    def _would_pin(self, ready: Ready, need: Need) -> bool:
        """Returns whether rebuilding a tensor that may have a code would prevent another's code.

        A recipe that can only run on an exact source keeps its source exact.
        """
        if need is not Need.LOSSY or ready.works_lossy or self._is_exact():
            return False
        return any(slot.sites and not slot.pinned for slot in ready.slots)

    def _chosen(self, request: Request, site: Site, ready: Ready | None) -> Action:
        """Returns the policy's action, as far as this tensor allows it."""
        known = self._context.kept.get(key_of(site))
        if known is None and self._context.exact:
            known = self._context.why_limited(outermost(), key_of(site))
        if known is not None:
            site = limited(site, known)
            is_half = isinstance(known, HalfSuffices)
            if site.need is Need.EXACT or (is_half and not self.takes_half(site.dtype)):
                return Keep(known)
        request.slot.sites.append(site)
        action = self._decide(site, ready)
        if isinstance(known, LevelsSuffice) and isinstance(action, Encode):  # a plan of before, too
            action = replace(action, codec=at_precision_floor(action.codec, site))
        if isinstance(action, Encode) and site.rows is not None and site.consumer not in NORMS:
            codec, rows = coded_rows(site.rows, action.codec, by_size=site.by_size)
            action = replace(action, codec=codec, rows=rows)
        if isinstance(action, Encode) and site.formula is Formula.LOG_PROBABILITY:
            return self._of_log_probabilities(request, site, action)
        if isinstance(action, Offload) and covering(request.x) is None:
            return Keep("a part of a storage whose other parts may change")
        return action

    def _of_log_probabilities(self, request: Request, site: Site, action: Encode) -> Action:
        """Returns the action for log-probabilities, or for a bias of attention."""
        if action.codec.lossless:
            return action
        if self._is_exact() and request.x is request.first:
            return Keep(COUNTS_AS_EXACT)
        if site.consumer == ATTENTION:
            return replace(action, least=MIN_BIAS, fewest=MAX_LEVELS)
        if not request.reading.dims or request.seen != request.slot.base:
            return Keep("log-probabilities whose rows lie in no order that is known")
        fewest = fewest_levels(getattr(self._policy, "codec", None))
        (along,) = request.reading.dims
        return replace(action, least=MIN_LOG_PROBABILITY, fewest=fewest, adds_up=along)

    def _decide(self, site: Site, ready: Ready | None) -> Action:
        if site.consumer == ATTENTION and site.need is Need.LOSSY and not self._is_exact():
            # Its source may be a code that is too coarse, or become one.
            action = self._policy(replace(site, rebuildable=Rebuildable.NO))
            if isinstance(action, Encode):  # whatever the policy: by the logits of this step
                return replace(action, codec=at_precision_floor(action.codec, site))
            return action
        if site.formula is Formula.RELATIVE and site.need is Need.LOSSY:
            # What it is rebuilt from must never have another code.
            stays = ready is not None and all(one.pinned or not one.sites for one in ready.slots)
            if not stays:
                site, ready = replace(site, rebuildable=Rebuildable.NO), None
            action = self._policy(site)
            if isinstance(action, Encode):  # whatever the policy: many have no such code
                return replace(action, codec=at_precision_floor(action.codec, site), curved=None)
            return action
        action = self._policy(site)
        if isinstance(action, Rebuild) and ready is None and site.need is not Need.SHAPE:
            return Keep("the policy asked to rebuild what cannot be rebuilt")
        return action

    def _hold(
        self,
        name: SiteName,
        site: Site,
        ready: Ready | None,
        seed: int,
        drawn: int,
        slot: Slot,
        whole: Tensor,
        action: Action,
    ) -> None:
        """Performs the action. drawn: the count of seeds as this one was drawn."""
        if slot.pinned and isinstance(action, Encode):
            slot.entry.why = "an op that needs every bit reads it, or what is made of it"
            self._listener.does(slot, name, Need.EXACT, Keep(slot.entry.why))
            return
        need, norm = site.need, slot.statistics
        on_survived = partial(self._context.note_survivor, name, key_of(site))
        try:
            what = need, ready, seed, on_survived, norm, name, self._context
            handle = perform(action, whole, *what, is_examined=True)
        except CodecError as error:
            dtype = str(site.dtype).removeprefix("torch.")
            where = f"saving {dtype} {site.shape} for '{site.consumer}' in '{site.module}'"
            raise CodecError(f"{error} ({where})") from error
        slot.hold(handle)
        if isinstance(handle, KeepHandle):
            action = Keep(handle.why) if isinstance(action, Encode) else action
            slot.drop_needless_bits()
        recipe = handle.ready if isinstance(handle, RebuildHandle) else None
        self._listener.does(slot, name, need, action, ready=recipe, norm=norm, drawn=drawn)
        if self._watch is not None and not isinstance(action, Keep | Offload):
            codec = action.codec if isinstance(action, Encode) else None
            self._watch.held(slot, whole, slot.sites[-1], codec)

    def _hold_mask(self, slot: Slot, whole: Tensor, name: SiteName, *, covers: bool) -> None:
        bits = mask_bits(whole, name.consumer, only_output=covers)
        if bits is None:
            slot.hold(KeepHandle(whole, "a NaN, of which a bit cannot tell"))
        else:
            slot.hold_bits(bits)
        self._listener.does(slot, name, Need.MASK, None, bits=name.consumer, covers=covers)

    def _keep(self, slot: Slot, whole: Tensor, name: SiteName) -> None:
        """Holds the tensor itself until more is known."""
        slot.hold(KeepHandle(whole, slot.entry.why))
        self._listener.does(slot, name, Need.EXACT, Keep(slot.entry.why))

    def _hold_input(
        self, slot: Slot, whole: Tensor, action: Action, hold: "partial[None]", why: str
    ) -> None:
        """Holds an input of a recomputed piece after its first run.

        why: the reason that it may not have a code, or "".
        """
        if why:
            slot.hold(KeepHandle(whole, why))
        else:
            hold(slot, whole, action)

    def _hold_normalized(
        self,
        slot: Slot,
        whole: Tensor,
        name: SiteName,
        action: Action,
        hold: "partial[None]",
        norm: Call,
        out: Any,
    ) -> None:
        """Holds a norm's input once the norm has run: its statistics make the code better."""
        slot.statistics = statistics_of(norm, whole)
        if slot.statistics is None and is_normalized(action):
            slot.hold(KeepHandle(whole, "the input of a norm, in no order that is known"))
            self._listener.does(slot, name, Need.EXACT, Keep(""))
        elif isinstance(action, Encode) and action.may_change:
            self.waiting.append(Waiting(slot, action, hold, out))
        elif not isinstance(action, Keep):
            hold(slot, whole, action)


def perform(
    action: Action,
    base: Tensor,
    need: Need,
    ready: Ready | None,
    seed: Seed,
    on_survived: Callable[[], None] | None = None,
    statistics: Statistics | None = None,
    name: SiteName = _NOWHERE,
    context: Context | None = None,
    *,
    is_examined: bool = False,
) -> Handle:
    """Performs an action on `base`, a tensor that covers its storage; returns the handle.

    A script has faster functions for small codes and for recipes (`replay/compiled.py`), with the
    same results.

    ready       its recipe, if it has one
    statistics  of the norm that it is the input of
    name        of the site
    context     what it has learned: coders of such tensors, capacities of codes whose size only the
                device knows, the order in which offloaded tensors are fetched
    is_examined the forward is not replayed: codes of codecs of other packages are decoded at once
    """
    match action:
        case Keep(why):
            return KeepHandle(base, why)
        case Encode(codec):
            known = statistics, name, context
            handle = encoded(action, base, seed, on_survived, *known, is_examined=is_examined)
            return handle or KeepHandle(base, f"codec '{codec.id}' has failed")
        case Rebuild():
            assert ready is not None
            return RebuildHandle.of(ready, base, need)
        case Offload():
            tier = tier_for(action, base)
            if isinstance(tier, str):
                return KeepHandle(base, tier)
            return OffloadHandle(tier, base, prefetcher_of(context), name, on_survived)
        case _:
            raise PlanError(
                f"a policy returns Keep, Encode, Rebuild or Offload; got {action!r}. "
                "Import them from elbowroom.plan, and return one for every site."
            )


class LaterSource:
    """Slot that is kept for some calls, until an op saves a source from which it can be rebuilt.

    For example x * sigmoid(a * x): sigmoid saves its result before the product saves x. This
    includes tensors that a linear layer could recompute, which is the last choice.
    """

    is_known = False

    def __init__(
        self, slot: Slot, recipe: Recipe, hold: Callable[[Slot, Tensor, Ready], None]
    ) -> None:
        self.slot = weakref.ref(slot)
        self._recipe, self._hold = recipe, hold
        self._saves_left = MAX_SAVES

    def ended(self, call: Call, out: Any, sources: Sources) -> bool:
        """Notes that a call has ended; returns whether the decision can be made."""
        slot = self.slot()
        if slot is None or not isinstance(slot.value, KeepHandle):
            return True
        if not call.saved:
            return False
        self._saves_left -= 1
        ready = self._recipe.ready()
        is_cheap = ready is not None and ready.exact and not ready.products
        return is_cheap or not self._saves_left

    def end(self) -> None:
        """Makes the slot hold its recipe, if that is ready, and the tensor has not changed."""
        slot = self.slot()
        kept = None if slot is None else slot.value
        if slot is None or not isinstance(kept, KeepHandle) or kept.was_changed:
            return
        ready = self._recipe.ready()
        if ready is not None and ready.exact:
            self._hold(slot, kept.restore(), ready)


class WaitingLine(list[Waiting | Saturated | LaterSource]):
    """Slots that wait in one context."""

    def reads(self, slot: Slot, site: Site) -> None:
        """Notes that another op reads a slot that waits."""
        for one in self:
            if isinstance(one, Saturated | Waiting) and one.slot() is slot:
                one.also(site)

    def is_too_coarse(self, slot: Slot, site: Site) -> bool:
        """Returns whether the code of a norm's input that waits will be, for this site."""
        waiting = (one for one in self if isinstance(one, Waiting) and one.slot() is slot)
        return site.need is Need.LOSSY and not all(one.would_suffice(site) for one in waiting)

    def wait(self, one: Saturated | LaterSource) -> None:
        """Lets a tensor wait; ends the wait of the oldest of its kind if there are many.

        A program may hold the states of all steps of a recurrence in a list.
        """
        waiting = [other for other in self if type(other) is type(one)]
        if len(waiting) >= _MAX_WAITING:
            self.remove(waiting[0])
            waiting[0].end()
        self.append(one)

    def ended(self, call: Call, out: Any, sources: Sources) -> None:
        """Encodes, after a call, the tensors that need not wait any longer.

        Tensors for which the call is a ReLU wait until the next call begins.
        """
        waiting = self._taken()
        for one in waiting:
            if not one.ended(call, out, sources) or one.is_known:
                self.append(one)
            else:
                one.end()

    def end_known(self) -> None:
        """Encodes, as a call begins, the inputs of norms whose ReLU has been found."""
        if any(one.is_known for one in self):
            waiting = self._taken()
            self.extend(one for one in waiting if not one.is_known)
            _end(one for one in waiting if one.is_known)

    def end_sources(self) -> None:
        """Ends all waiting for sources."""
        waiting = self._taken()
        self.extend(one for one in waiting if not isinstance(one, LaterSource))
        _end(one for one in waiting if isinstance(one, LaterSource))

    def end_all(self) -> None:
        """Encodes all waiting tensors."""
        _end(self._taken())

    def _taken(self) -> list[Waiting | Saturated | LaterSource]:
        """Empties the line and returns the waiting tensors: encoding may make others wait."""
        waiting = list(self)
        self.clear()
        return waiting


def _end(waiting: Iterable[Waiting | Saturated | LaterSource]) -> None:
    with torch._C.DisableTorchFunction():
        for one in waiting:
            one.end()
