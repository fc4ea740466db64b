"""The context in which tensors are saved: it opens the hooks, ends a forward, and changes policies.

    with Saving(policy):        hooks, modules and ops are observed (`hooks.py`)
        loss = model(x)
    loss.backward()             also inside of the context

A context covers one forward. What continues it, `after` it, has its ledger and counts.
"""

import weakref
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial, reduce
from typing import Any, Self

import torch
from torch import Tensor, nn

from elbowroom.errors import PlanError
from elbowroom.plan import Encode, Need, Policy
from elbowroom.plan.precision_floor import at_precision_floor
from elbowroom.runtime import modules
from elbowroom.runtime.calls import intercepted
from elbowroom.runtime.compiler import eagerly
from elbowroom.runtime.consumers import Consumers, sees_another_mode
from elbowroom.runtime.handles import KeepHandle
from elbowroom.runtime.hooks import Packer
from elbowroom.runtime.kept import SmallTensors
from elbowroom.runtime.masks import mask_bits
from elbowroom.runtime.observer import NOBODY
from elbowroom.runtime.own_hooks import OwnHooks
from elbowroom.runtime.redrawn import Redrawn
from elbowroom.runtime.serving import Serving, perform
from elbowroom.runtime.slot import Slot, unpack
from elbowroom.runtime.waiting import end_waiting


class Saving(Packer):
    """Context manager: tensors that autograd saves inside go through `policy`.

    Backward may run inside or after it. The arguments are those of `Packer`.
    """

    def __enter__(self) -> Self:
        if torch.compiler.is_compiling():
            return self  # part of a compiled region of the user: not covered
        if self._open is not None:
            raise PlanError(
                "this saving context is open already; make another one for a nested or second use, "
                "as in 'with er.saving(...)'"
            )
        if self.idle:
            self._open = ExitStack()
            return self
        with ExitStack() as opening:  # undone if a later part fails: inside torch.func, for example
            opening.enter_context(eagerly())
            modules.watch()
            opening.callback(modules.unwatch)
            opening.enter_context(modules.counting(self._begin_calls()))
            opening.enter_context(OwnHooks(self._pack, unpack))
            self._begin()
            assert self._consumers is not None
            opening.enter_context(self._consumers)
            if self.recorder is not None or self.recompute:
                opening.enter_context(intercepted(self.calls))
            self._open = opening.pop_all()
        return self

    def _begin(self) -> None:
        """Begins a forward, or the rest of one."""
        self._counts.clear()
        if self.observer is not None:
            after = self._after
            self._watch = self.observer.begin() if after is None else after._watch
        self._listener = self.tracer or NOBODY
        known = self.policy, self.context, self.min_nbytes, self._sources
        is_exact = partial(type(self).is_exact, weakref.proxy(self))  # no reference cycle
        notified = self._listener, self._watch, is_exact
        observer: object = self.observer
        adapts = observer is self.policy
        self._serving = Serving(*known, *notified, lets_wait=self.recorder is None, adapts=adapts)
        self._sources.codes_logits = self._may_round
        self._redrawn = Redrawn(self.context)
        self._consumers = Consumers(self._finished, self._run_as, self._listener.failed)
        self._listener.starts(self.ledger, self.context.count)
        if sees_another_mode():
            self._listener.refuse("another function mode sees what is called")
        if self.tracer is not None:
            self._sources.on_constant = self._copied

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._open is None:
            return
        if kind is None:
            end_waiting()
        self._open.close()
        self._open = self._consumers = self._hook = self._keep_followed = None
        if not self.idle:
            self._finish(raised=kind is not None)
        if self.recorder is not None:
            self.recorder.forward_ended()

    def _finish(self, *, raised: bool) -> None:
        """Ends the forward: decides on the tensors that wait for its end."""
        self._listener.leaves()
        if not raised:
            self._serving.waiting.end_sources()  # of constants, some of which are freed now
        self._sources.clear()
        if raised:  # waiting tensors stay as they are: nothing may fail or allocate now
            self._listener.refuse("the forward has raised")
        else:
            self._serving.end()
        self._serving.clear()
        self._reading = []
        self._listener.finish(self.ledger, self.context.count, self._calls)
        self._listener = NOBODY
        self._many = SmallTensors()

    @property
    def called(self) -> list[nn.Module]:
        """The outermost modules that have been called."""
        return list(self._calls)

    def join(
        self,
        hook: Callable[[Tensor], Any],
        outside: int,
        keep: Callable[[Iterable[Tensor]], None],
    ) -> None:
        """Begins in the middle of a forward, whose hooks and mode another object has opened.

        That object passes tensors to `take`, and calls to `see`. hook: the one that packs; outside:
        how many modules had been called around the model. keep: copies what it reads in backward of
        tensors that an op is about to change. It is unknown how often each op of a
        module has saved before: in a plan such an op may have another number, or none, and its
        tensors are then held exactly.
        """
        with ExitStack() as opening:
            modules.watch()
            opening.callback(modules.unwatch)
            opening.enter_context(modules.counting(self._begin_calls()))
            modules.join(self._calls, outside)
            self._begin()
            self._hook, self._keep_followed = hook, keep
            self._open = opening.pop_all()

    def take(self, x: Tensor) -> Any:
        """Returns the object that is held for x, which autograd saves."""
        return self._pack(x)

    def see(self, func: Callable[..., Any], types: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        """Runs a torch function, and observes it."""
        assert self._consumers is not None
        return self._consumers.__torch_function__(func, types, args, kwargs)

    def _begin_calls(self) -> modules.Calls:
        earlier = () if self._after is None else self._after._calls
        self._calls = weakref.WeakKeyDictionary(earlier)
        return self._calls

    def goes_on_from(self, calls: modules.Counts) -> None:
        """Counts calls of outermost modules from here on: a forward before was not observed."""
        for ref, count in calls:
            if (module := ref()) is not None:
                self._calls[module] = count

    def tighten(self, policy: Policy, slots: Iterable[Slot] | None = None) -> None:
        """Uses `policy` from now on.

        Tensors that were kept so far and may carry an error are encoded where the policy says so.
        slots: theirs, if the forward has ended
        """
        self._listener.refuse("its setting has changed")
        for slot in self._sources.slots() if slots is None else slots:
            self._tighten(slot, policy)

    def _tighten(self, slot: Slot, policy: Policy) -> None:
        """Encodes a tensor that was kept so far and may carry an error, by another policy."""
        kept = slot.value
        if not isinstance(kept, KeepHandle) or not slot.sites or slot.pinned or kept.was_changed:
            return
        # An op that was served by a kept tensor left no site: assume the most that any may need.
        action = policy(replace(slot.sites[-1], need=Need.LOSSY))
        if not isinstance(action, Encode):
            return
        action = replace(action, codec=reduce(at_precision_floor, slot.sites, action.codec))
        base = kept.restore()
        bits = mask_bits(base, slot.mask_of) if slot.mask_of else None
        if bits is not None:
            slot.hold_bits(bits)
        elif slot.mask_of:
            return
        seed, known = self._serving.next_seed(), slot.statistics
        handle = perform(
            *(action, base, Need.LOSSY, None, seed), statistics=known, is_examined=True
        )
        slot.hold(handle)

    def error_report(self) -> Any:
        """Returns what lossy codes add to the gradient's variance, predicted beside measured.

        To be called after backward. Raises PlanError if the context does not watch its codes.
        """
        if self.observer is None:
            raise PlanError(
                "this context does not watch what its codes do; open it with "
                "er.saving(..., watch=True), or with noise=0.1"
            )
        return self.observer.error_report()

    def drop_everything(self) -> None:
        """Drops all decided tensors. The graph is useless then; only the counting continues."""
        self._listener.refuse("nothing is held")
        for slot in self._sources.slots():
            if slot.sites:
                slot.drop()
