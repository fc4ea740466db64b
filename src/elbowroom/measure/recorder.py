"""Records one step: which tensors are saved, by which op, when they are read, requested and freed.

The recorder is an observer of the hooks (`runtime/observer.py`). It holds no tensor, only weak
references to storages and slots. A record is a list of moments and, for each storage and each call
of a module, the indices of its moments. A clock (`measure/clocks.py`) gets each moment as it
begins, and returns afterwards the seconds or bytes of each.
"""

import weakref
from collections import Counter, deque
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import fields, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from elbowroom.measure.clocks import Stopwatch
from elbowroom.measure.hidden import HiddenNodes
from elbowroom.measure.recorder_notes import (
    MAX_SPANS,
    NOBODY,
    Clock,
    Made,
    ModuleNotes,
    Span,
    StorageNotes,
    Timer,
    UserStorage,
    calling_line,
)
from elbowroom.plan import Need, Site
from elbowroom.plan.profile import ModuleCall, Save, Storage, limited_saves
from elbowroom.plan.site import RECURRENT, Formula, Reads
from elbowroom.runtime import modules
from elbowroom.runtime.arena import ARENA
from elbowroom.runtime.arguments import Arguments
from elbowroom.runtime.checkpoints import is_smooth, loses_gradient, may_carry_error
from elbowroom.runtime.consumers import Call
from elbowroom.runtime.direct.attention import is_unfused, plain_nbytes
from elbowroom.runtime.handles import KeepHandle
from elbowroom.runtime.kept import last_node
from elbowroom.runtime.nested import tensors_in
from elbowroom.runtime.recompute import LARGEST_BUFFER, state_nbytes
from elbowroom.runtime.slot import Slot, View
from elbowroom.runtime.storage import (
    WeakStorage,
    is_parameter,
    storage_nbytes,
    untouchable,
    version_of,
)
from elbowroom.runtime.unread import unread

_LOOKS = 32  # storages in a moment


class StepRecorder:
    """One step's record. It is complete when the step, backward included, is over."""

    def __init__(self, clock: Clock, timer: Timer | None) -> None:
        """timer: tells how long ops and modules take."""
        # Weakly: whoever owns both would be a cycle, and hold what it measures until a collection.
        self._clock, self._timer = weakref.ref(clock), timer or Stopwatch()
        self._storages: list[StorageNotes] = []
        self._modules: list[ModuleNotes] = []
        self._running: list[ModuleNotes] = []  # those of them that have not ended, outermost first
        self._index: weakref.WeakKeyDictionary[Slot, int] = weakref.WeakKeyDictionary()
        self._at: dict[tuple[int, int], int] = {}  # storage address and version -> index
        self._made: dict[tuple[int, int], Made] = {}  # by address and version: the op that made it
        self._known: dict[int, WeakStorage] = {}  # by address: of all those above
        self._alive: deque[UserStorage] = deque()
        self._owned: dict[nn.Module, dict[int, Tensor]] = {}  # until forward has ended
        self._calls = 0  # so many ops have ended
        self._results: dict[int, StorageNotes] = {}  # of attention, by the op: torch's saves them
        self._read: dict[int, int] = {}  # the last op that was given a tensor, by id
        self._task = -1  # the backward that runs, or ran last
        self._asking = -1  # the op whose backward asks
        self._resumed = False  # after a backward, the step goes on with another forward
        self._hidden = HiddenNodes()
        self._nodes = torch._C._autograd._get_sequence_nr()
        self._last = self._timer.read()  # as the op before this one ended
        # Returns a context for what is no work of the step's: its time is not counted.
        self.looking: Callable[[], AbstractContextManager[None]] = self._timer.paused
        self.moments = 0
        self.backward: int | None = None
        self.unlisted_nbytes = 0
        self._begin()

    # what the hooks tell

    def saved(
        self, view: View, x: Tensor, site: Site, why: str, node: int, sources: Sequence[Slot]
    ) -> View:
        """Records that a node saves x, which could be rebuilt from these sources."""
        index = self._index.get(view.slot)
        if index is None:
            index = self._new(view.slot, x, site, is_planned=not why)
        known = [self._index.get(source) for source in sources]
        self._storages[index].made_of.update(at for at in known if at is not None)
        saves = self._storages[index].saves
        saves.append(Save(site, why, modules.stack(), self._now, line=calling_line()))
        self._storages[index].nodes.append(node)
        return RecordedView(view, self, index, len(saves) - 1, self._calls)

    def curved(self, slot: Slot) -> None:
        """Records that a GELU or SiLU reads what is made of this slot."""
        index = self._index.get(slot)
        if index is not None:
            saves = self._storages[index].saves
            saves[:] = [replace(save, site=replace(save.site, curved=True)) for save in saves]

    def alone(self, nbytes: int) -> None:
        """Records that a tensor is kept that no plan decides on; only its bytes are known."""
        self.unlisted_nbytes += nbytes

    def decided(self, slot: Slot, why: str) -> None:
        """Records that for a later op a code of this slot may not have few levels."""
        index = self._index.get(slot)
        if index is not None:
            saves = self._storages[index].saves
            saves[:] = limited_saves(saves, [why] * len(saves))

    def ended(self, call: Call, out: Any, slots: list[Slot]) -> None:
        """Records that an op that had read these slots has made `out`."""
        self._note_rough(call, out)
        self._calls += 1
        if self._running:
            for x in call.tensors:
                self._read[id(x)] = self._calls
        if call.name.endswith("__get__"):  # x.shape, x.dtype: no op
            return
        began, self._last = self._last, self._timer.read()
        if call.reruns:
            self._note_plain(call, out)
        if call.rounds and call.name in RECURRENT:
            self._note_why_not("a recurrent layer of it runs again by itself")
        self._note_nodes()
        self._note_alive()
        for slot in slots:
            index = self._index.get(slot)
            if index is not None:
                self._storages[index].used = self._now
        made: Made | None = None
        for x in tensors_in(out):
            if not untouchable(x):
                made = self._made_by(call, (began, self._last)) if made is None else made
                self._note_made(x, made)

    def _made_by(self, call: Call, span: Span) -> Made:
        """Returns the record of an op that has ended, and of ops between it and what is saved.

        What it computed can be rebuilt from what is saved, but not through a module that is
        recomputed itself. All ops on the way run then, such as those of attention in plain Python.
        """
        found, spans = dict.fromkeys(modules.stack()), {span: None}
        for x in call.tensors:
            if untouchable(x) or is_parameter(x):
                continue
            at = x.untyped_storage()._cdata, version_of(x)
            made, index = self._made.get(at), self._at.get(at)
            if made is not None and (index is None or self._storages[index].is_lost):
                found |= dict.fromkeys(made.modules)
                spans |= dict.fromkeys(made.spans)
        return Made(tuple(spans)[:MAX_SPANS], tuple(found))

    def _note_plain(self, call: Call, out: Tensor) -> None:
        """Records what torch's own attention saves, and the node that ran in its place does not.

        A fused one saves its result, in each step in which none of its tensors has a code. One of
        smaller ops runs in a module's second run alone, which holds as much more.
        """
        if is_unfused(call):
            for note in self._running:
                note.made_nbytes += plain_nbytes(call)
            return
        site = Site(
            modules.current(),
            call.name,
            producer=call.name,
            shape=out.shape,
            dtype=out.dtype,
            nbytes=out.nbytes,
            need=Need.LOSSY,
            nth=-1 - len(self._results),  # no save of the step has it
            reads=Reads.SIZES,
            formula=Formula.SUMMED,
            least_levels=2,
        )
        notes = StorageNotes(site.nbytes, self._now, self._now, kept=False, nodes=[last_node()])
        notes.saves.append(Save(site, "", modules.stack(), self._now, line=calling_line()))
        self._results[self._calls - 1] = notes
        self._storages.append(notes)

    def _note_rough(self, call: Call, out: Any) -> None:
        """Keeps the modules that run now from starting from a code, if this op tolerates none."""
        running = [note for note in self._running if not note.rough]
        if running and not is_smooth(call):
            carries = may_carry_error(call)
            for note in running:
                if carries or note.loses:
                    note.rough = call.name or "a function of no name"
        if running and loses_gradient(call, out):
            for note in running:
                note.loses = True

    def _note_why_not(self, why: str) -> None:
        """Records that the modules that run now are not to run again as a whole."""
        for note in self._running:
            note.why_not = why

    def module(
        self,
        module: nn.Module,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        source_of: Callable[[Tensor], Slot | None],
    ) -> Any:
        """Runs a call of a module, and records it."""
        name = modules.name_of(module)
        if not name or not torch.is_grad_enabled():
            return call(*args, **kwargs)
        # What is read here, the step does not read.
        with self.looking(), torch._C.DisableTorchFunction():
            note = ModuleNotes(name, type(module).__name__, self._begin())
            note.extra_nbytes = state_nbytes(module)
            self._modules.append(note)
            self._running.append(note)
            arguments = Arguments(args, kwargs)
            inputs, note.why_not = arguments.tensors, arguments.why_not
            before = self._calls
            changing = [*inputs, *self._owned_by(module).values()]
            versions = [version_of(x) for x in changing]
            note.began = self._timer.read()
        out = call(*args, **kwargs)
        with self.looking(), torch._C.DisableTorchFunction():
            note.ended = self._timer.read()
            if versions != [version_of(x) for x in changing]:
                note.why_not = "it changes an input, a parameter or a large buffer in place"
            if not any(x.requires_grad for x in tensors_in(out)):
                note.why_not = "nothing that it gives needs a gradient"
            if modules.is_sharded(module):
                note.why_not = modules.SHARDED
            left = unread(arguments, lambda x: self._read.get(id(x), 0) > before, out)
            read = [x for i, x in enumerate(inputs) if i not in left]
            self._note_inputs(note, read, source_of)
        note.last = self._now
        self._running = [one for one in self._running if one is not note]
        self._begin()
        return out

    def _owned_by(self, module: nn.Module) -> dict[int, Tensor]:
        """Returns the parameters and the large buffers of a module and of those inside it."""
        found = self._owned.get(module)
        if found is None:
            own = (*module._parameters.values(), *filter(_is_large, module._buffers.values()))
            found = self._owned[module] = {id(x): x for x in own if x is not None}
            for one in module.children():
                found |= self._owned_by(one)
        return found

    def forward_ended(self) -> None:
        """Closes the record of forward, as the context closes."""
        self._owned.clear()
        self._note_held()
        if self._is_forward:
            self._look_at(len(self._alive))
            self._begin()

    # what the views tell

    def asked(self, index: int, save: int, call: int) -> None:
        """Records that backward asks for a storage.

        save, call: the save and the number of the op that made it.
        """
        task = torch._C._current_graph_task_id()
        if task == -1:
            self._storages[index].used = self._now
            return
        if task != self._task:
            self._task = task
            self._note_held()
        if self._asking != call:
            self._asking = call
            self._begin()
        self._resumed = False
        if self.backward is None:
            self.backward = self._now
        self._storages[index].ask(save, self._now)
        result = self._results.get(call)
        if result is not None:
            result.ask(0, self._now)
            result.freed = self._now

    # what it comes to

    def storages(self) -> tuple[Storage, ...]:
        """Returns all that was saved, in order."""
        last = self.moments - 1
        made = [s.made or NOBODY for s in self._storages]
        taken_s = self._between_all([one.spans for one in made])
        return tuple(
            Storage(
                nbytes=s.nbytes,
                held=s.held,
                kept=s.kept,
                born=s.born,
                used=s.used,
                needs=tuple(s.needs),
                freed=last if s.freed is None else s.freed,
                producer_s=producer_s,
                made_in=one.modules,
                made_of=tuple(sorted(s.made_of)),
                saves=tuple(
                    save.asked_at(s.asked.get(nth, -1)) for nth, save in enumerate(s.saves)
                ),
            )
            for s, one, producer_s in zip(self._storages, made, taken_s, strict=True)
        )

    def asks(self) -> tuple[tuple[int, ...], ...]:
        """Returns, for each storage, autograd's number of the node that has made each save."""
        return tuple(tuple(s.nodes) for s in self._storages)

    def on(self, addresses: Container[int]) -> frozenset[int]:
        """Returns the storages, by index, that are at these addresses."""
        return frozenset(i for (address, _), i in self._at.items() if address in addresses)

    def hidden(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """Returns, for each pair of the user's hooks, the nodes whose tensors they hold.

        As ranges of autograd's numbers. Inside of a checkpoint another one may begin and end.
        """
        return self._hidden.ranges()

    def modules(self) -> tuple[ModuleCall, ...]:
        """All calls of modules, in order of their beginning."""
        calls = Counter(note.name for note in self._modules)
        for note in self._modules:
            if calls[note.name] > 1:
                note.why_not = "it is called more than once in a step"
        taken_s = self._between([(note.began, note.ended) for note in self._modules])
        names = [f.name for f in fields(ModuleNotes) if f.name not in ("began", "ended", "loses")]
        return tuple(
            ModuleCall(seconds=seconds, **{name: getattr(note, name) for name in names})
            for note, seconds in zip(self._modules, taken_s, strict=True)
        )

    def _between(self, readings: Sequence[Span]) -> list[float]:
        """Returns the seconds between both readings of each pair."""
        began_s = self._timer.seconds_at([began for began, _ in readings])
        ended_s = self._timer.seconds_at([ended for _, ended in readings])
        return [end - begin for begin, end in zip(began_s, ended_s, strict=True)]

    def _between_all(self, spans: Sequence[tuple[Span, ...]]) -> list[float]:
        """Returns the sums of seconds of several spans each."""
        taken_s = iter(self._between([span for one in spans for span in one]))
        return [sum(islice(taken_s, len(one))) for one in spans]

    # how it is kept

    def _note_nodes(self) -> None:
        """Records under whose hooks an op has made the nodes since the last one."""
        first, self._nodes = self._nodes, torch._C._autograd._get_sequence_nr()
        self._hidden.note(first, self._nodes)

    def _note_held(self) -> None:
        """Notes that what is held now is held until it is asked for."""
        for slot, index in self._index.items():
            storage = self._storages[index]
            storage.held = slot.entry.after_nbytes
            storage.kept = isinstance(slot.value, KeepHandle)

    @property
    def _now(self) -> int:
        return self.moments - 1

    def _note_alive(self) -> None:
        """Notes that what the step holds still was there while an op ran in this moment.

        The value that an assignment replaces dies after the op that makes the new one, so moments
        alone would not tell. What the step has let go of, it cannot take up again. A network of
        dense blocks holds a hundred of them for long: a few are examined in each moment, in turn,
        and what is gone is taken to have gone just now.
        """
        if self._is_forward:
            self._look_at(_LOOKS)

    @property
    def _is_forward(self) -> bool:
        return self._resumed or (self.backward is None and self._task == -1)

    def _look_at(self, most: int) -> None:
        """Looks whether those that were not examined for longest are there still."""
        alive, now = self._alive, self.moments - 1
        for _ in range(min(most, len(alive))):
            one = alive.popleft()
            weak, slot, record = one
            held = slot()
            if held is not None and weak.is_held_by_more(type(held.value) is KeepHandle):
                record.used = now
                alive.append(one)
            elif record.used < now - 1:
                record.used = now - 1

    def _begin(self, *, frees: bool = False) -> int:
        self._note_alive()
        clock = self._clock()
        if clock is not None:
            clock.begin(self.moments, frees=frees)
        self.moments += 1
        return self._now

    def _new(self, slot: Slot, x: Tensor, site: Site, *, is_planned: bool) -> int:
        if self.backward is not None and torch._C._current_graph_task_id() == -1:
            if not self._resumed:  # what was saved before may be gone: backward has had it
                self._alive.clear()
            self._resumed = True
        index = len(self._storages)
        moment = self._begin()
        address = self._address(x)
        made = self._made.get((address, version_of(x)))
        self._storages.append(StorageNotes(site.nbytes, moment, moment, made=made))
        self._index[slot] = index
        if is_planned:  # else nobody asks who holds it: of buffers their model always does
            self._alive.append(
                UserStorage(WeakStorage(x), weakref.ref(slot), self._storages[index])
            )
        self._at[address, version_of(x)] = index
        weakref.finalize(slot, self._freed, index).atexit = False
        return index

    def _address(self, x: Tensor) -> int:
        """Returns the address of x's storage, which nobody else gets once x has died."""
        address: int = x.untyped_storage()._cdata
        if address not in self._known:
            self._known[address] = WeakStorage(x)
        return address

    def _freed(self, index: int) -> None:
        with self.looking():
            self._storages[index].freed = self._now
            self._begin(frees=True)
            self._asking = -1

    def _note_made(self, x: Tensor, made: Made) -> None:
        at = self._address(x), version_of(x)
        made = self._made.setdefault(at, made)  # a view, or dropout of nothing, makes nothing
        index = self._at.get(at)
        if index is not None and self._storages[index].made is None:
            self._storages[index].made = made

    def _note_inputs(
        self, note: ModuleNotes, inputs: list[Tensor], source_of: Callable[[Tensor], Slot | None]
    ) -> None:
        """Notes inputs in the order in which recomputing saves them; -1: no op saves it."""
        found, sources = [], []
        for x in inputs:
            if untouchable(x) or is_parameter(x):
                continue
            index = self._at.get((x.untyped_storage()._cdata, version_of(x)), -1)
            found.append(index)
            if index != -1:
                self._storages[index].used = self._now  # the caller's arguments live until now
            elif x.grad_fn is not None:
                source = source_of(x)
                if source is None or source not in self._index:
                    note.extra_nbytes += storage_nbytes(x)
                else:
                    note.made_nbytes += storage_nbytes(x)
                    sources.append(self._index[source])
        note.inputs, note.sources = tuple(found), tuple(sources)


def _is_large(buffer: Tensor | None) -> bool:
    return buffer is not None and buffer.nbytes > LARGEST_BUFFER


class RecordedView(View):
    """A view that tells when it is asked for."""

    __slots__ = ("_recorder", "_which")

    def __init__(
        self, view: View, recorder: StepRecorder, index: int, save: int, call: int
    ) -> None:
        self.slot, self.geometry, self.need = view.slot, view.geometry, view.need
        self._recorder, self._which = recorder, (index, save, call)

    def restore(self) -> Tensor:
        with self._asked():
            return super().restore()

    def restore_alone(self) -> Tensor:
        with self._asked():
            return super().restore_alone()

    @contextmanager
    def _asked(self) -> Iterator[None]:
        """Records that backward asks for the tensor, which is restored inside."""
        with self._recorder.looking():
            self._recorder.asked(*self._which)
            with ARENA.unused():
                yield
