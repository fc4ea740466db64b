"""The context of `er.saving` and `er.following`: it examines the first step, and then replays it.

A context lasts for one step, so scripts are cached in the process, by the context's settings. It is
unknown beforehand what the step will run. So the step begins with the script that was replayed
last; as long as no action was performed, another script with the same beginning may take its place,
and if the first function that is called matches no script, the step is examined and recorded.

A script refers to the parameters that ops were given. It is forgotten with the modules they are of.
"""

import sys
import threading
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Hashable, Iterable
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn

from elbowroom.errors import PlanError
from elbowroom.plan import Exact, KeepAll, Policy
from elbowroom.runtime.compiler import compilations
from elbowroom.runtime.context import PROCESS, Context
from elbowroom.runtime.hooks import Saving
from elbowroom.runtime.in_graph import GraphForm, compiled_by
from elbowroom.runtime.ledger import Account, Ledger, Ledgers
from elbowroom.runtime.replay.following import Following, Make
from elbowroom.runtime.replay.generalize import generalized
from elbowroom.runtime.replay.script import Script, state_of_torch
from elbowroom.runtime.replay.tracer import Tracer
from elbowroom.units import show_nbytes

_MAX_SETTINGS = 16  # settings whose scripts are cached at a time
_MAX_SCRIPTS = 8  # of one setting: for other models, shapes, branches
_MAX_UNWRITTEN = 8  # steps of one setting that no script could be written of, or that left theirs
_PAYS = 8  # steps that scripts were replayed in: that the next one leaves its own is not counted
_MANY = 4  # scripts, each of which may be of another length
_MAX_LEFT = 4  # scripts that a step has left, and that the next one may share
_MAX_GENERAL = 16  # times that two scripts become one
_MAX_PARTS = 3  # of a step that opens the same context several times
_LOOKS_AGAIN = 256  # replayed steps after which one is examined again


class Scripts:
    """Scripts of the steps of one setting; the one that was followed last comes first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._scripts: list[Script] = []
        self._owners: dict[int, list[weakref.ref[nn.Module]]] = {}  # by the id of a script
        self._left: list[Script] = []  # as a step was another one: in numbers of rows alone, maybe
        self._general = _MAX_GENERAL
        self._unwritten = _MAX_UNWRITTEN
        self._steps = self._by_script = self._learned = 0
        self._calls_compiled = False
        self._none_called_of: frozenset[int] | None = None  # what had been compiled by then

    def begin(self) -> tuple[Script, ...]:
        """Begins a step; returns the scripts that it may replay.

        If there are none, the step is examined.
        """
        with self._lock:
            if self._learned != PROCESS.learned:  # which scripts from before do not know
                self._learned = PROCESS.learned
                self._forget_all()
            self._steps += 1
            if self._steps % _LOOKS_AGAIN == 0:  # unguarded differences would persist
                self._unwritten = _MAX_UNWRITTEN
                self._general = _MAX_GENERAL
                self._forget_all()
            self._by_script += bool(self._scripts)
            return tuple(self._scripts)

    def _forget_all(self) -> None:
        self._scripts.clear()
        self._left.clear()
        self._owners.clear()

    @property
    def calls_nothing_compiled(self) -> bool:
        """True if no module that is called is compiled, as far as is known.

        Intercepting each call of a module takes a tenth of a step of 60 ms: Python invalidates its
        attribute caches of all modules' classes.
        """
        known = self._none_called_of
        return not self._calls_compiled and known is not None and known == compilations()

    def has_seen_calls(self, *, compiled: bool) -> None:
        """Notes that a step's calls were intercepted. compiled: one was of a compiled module."""
        self._calls_compiled |= compiled
        self._none_called_of = compilations()

    @property
    def wanted(self) -> bool:
        """True if an examined step should be recorded as a script."""
        return self._unwritten > 0

    def was_followed(self, script: Script) -> None:
        """Notes that a step has replayed a script to its end."""
        with self._lock:
            if any(one is script for one in self._scripts[1:]):
                self._scripts[:] = [script, *(one for one in self._scripts if one is not script)]

    def forget(self, script: Script) -> None:
        """Forgets a script from which a step differed after an action."""
        with self._lock:
            self._unwritten -= self._by_script < _PAYS
            self._scripts[:] = [one for one in self._scripts if one is not script]
            self._left.append(script)
            while len(self._left) > _MAX_LEFT:
                self._remove(self._left[0])

    def add(self, tracer: Tracer, modules: Iterable[nn.Module]) -> None:
        """Adds a step that was recorded, or could not be. modules: those that it has called."""
        script = tracer.script
        owners = None if script is None else _owners_of(script.parameters, modules)
        with self._lock:
            if script is None or owners is None:
                self._unwritten -= not tracer.once
                return
            script = self._general_of(script)
            while len(self._scripts) >= _MAX_SCRIPTS:
                self._remove(self._scripts[-1])
            self._scripts.insert(0, script)
            self._by_script = 0
            gone = weakref.WeakMethod(self._owner_is_gone)

            def forget(owner: weakref.ref[nn.Module]) -> None:
                if (forgets := gone()) is not None:
                    forgets(owner)

            self._owners[id(script)] = [weakref.ref(module, forget) for module in owners]

    def _general_of(self, script: Script) -> Script:
        """Returns a script of this forward, and of one before that had other numbers of rows.

        Those that may come again are left as they are, which is faster, until they are many.
        """
        known_too = self._scripts if len(self._scripts) >= _MANY else []
        for known in (*reversed(self._left), *known_too) if self._general else ():
            both = generalized(known, script)
            if both is not None:
                self._remove(known)
                self._general -= 1
                self._unwritten = min(self._unwritten + 1, _MAX_UNWRITTEN)
                return both
        return script

    def _owner_is_gone(self, owner: weakref.ref[nn.Module]) -> None:
        # Without the lock: the collector may run this inside any line that holds it. Each of these
        # steps is one operation of a list or of a dict.
        for script in (*self._scripts, *self._left):
            if any(one is owner for one in self._owners.get(id(script), ())):
                self._remove(script)

    def _remove(self, script: Script) -> None:
        self._owners.pop(id(script), None)
        for known in (self._scripts, self._left):
            known[:] = [one for one in known if one is not script]


def _owners_of(
    parameters: tuple[nn.Parameter, ...], modules: Iterable[nn.Module]
) -> list[nn.Module] | None:
    """Returns modules that hold all of these; None: one belongs to no module that was called."""
    wanted, owners = {id(p) for p in parameters}, []
    for module in modules:
        own = {id(p) for p in module.parameters()} & wanted
        if own:
            owners.append(module)
            wanted -= own
    return None if wanted else owners


class Identical:
    """Setting that is equal to itself only."""

    __slots__ = ("_it",)

    def __init__(self, it: object) -> None:
        self._it = it

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Identical) and other._it is self._it

    def __hash__(self) -> int:
        return id(self._it)


def forget_all() -> None:
    """Forgets the scripts of all settings."""
    with _lock:
        _known.clear()


_known: OrderedDict[Hashable, Scripts] = OrderedDict()
_lock = threading.Lock()


def scripts_of(*setting: Hashable) -> Scripts:
    """Returns the scripts of steps with these settings in this process."""
    with _lock:
        scripts = _known.pop(setting, None) or Scripts()
        _known[setting] = scripts  # as the last one
        while len(_known) > _MAX_SETTINGS:
            _known.popitem(last=False)
        return scripts


class SavingContext:
    """Context manager: what autograd saves inside is held in fewer bytes.

    It may be entered again, once it is closed: for the loss of a model's output, or for the next
    step.
    """

    def __init__(
        self,
        make: Make,
        context: Context,
        setting: tuple[Hashable, ...] | None,
        *,
        warns: bool = False,
        graphs: GraphForm | None = None,
    ) -> None:
        """make: returns the context that examines a step.

        warns: whether to say so if nothing could be changed. graphs: the policy inside of compiled
        modules; None: these run eagerly
        """
        self._make, self.context, self._setting, self._warns = make, context, setting, warns
        self._graphs = graphs
        self._in_graphs = Ledger()  # what compiled modules hold
        self._opened = ExitStack()
        self._parts: list[Saving | Following] = []  # whose graphs are there
        self._is_open = False
        self._compiled: list[str] | None = None  # that were called; None: not intercepted

    @property
    def policy(self) -> Policy:
        """Policy that decides about each tensor of an examined step."""
        return self._make(None).policy

    @property
    def ledger(self) -> Account:
        """The count of bytes since it was entered when nothing was held."""
        ledgers: list[Account] = [part.ledger for part in self._parts]
        if self._in_graphs.before_nbytes:
            ledgers.append(self._in_graphs)
        return ledgers[0] if len(ledgers) == 1 else Ledgers(ledgers)

    def __enter__(self) -> Self:
        if torch.compiler.is_compiling():
            return self  # part of a compiled region of the user: not covered
        if self._is_open:
            raise PlanError(
                "this saving context is open already; make another one for a nested or second use, "
                "as in 'with er.saving(...)'"
            )
        self._parts = [part for part in self._parts if part.ledger.held_nbytes > 0]
        if not self._in_graphs.held_nbytes:
            self._in_graphs = Ledger()
        part = self._part()
        part.__enter__()
        self._compiled = None
        if self._sees_calls(part):
            assert self._graphs is not None
            watches = isinstance(part, Saving)
            seen = compiled_by(self._graphs, self._in_graphs, watches=watches)
            self._compiled = self._opened.enter_context(seen)
        self._parts.append(part)
        self._is_open = True
        return self

    def _sees_calls(self, part: "Saving | Following") -> bool:
        """Returns whether a called module may be one that torch.compile compiles."""
        if self._graphs is None or "torch._dynamo" not in sys.modules:
            return False
        return isinstance(part, Saving) or not part.scripts.calls_nothing_compiled

    def _part(self) -> "Saving | Following":
        if self._setting is None:
            return self._make(None)
        scripts = scripts_of(*self._setting, min(len(self._parts), _MAX_PARTS))
        state = state_of_torch()
        known = tuple(script for script in scripts.begin() if script.state == state)
        if known:
            return Following(known, scripts, self._make, self.context)
        return self._make(Tracer(selects=True) if scripts.wanted else None)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._is_open:
            return
        self._is_open = False
        self._opened.close()
        part = self._parts[-1]
        part.__exit__(kind, error, trace)
        scripts = None
        if self._setting is not None:
            scripts = scripts_of(*self._setting, min(len(self._parts) - 1, _MAX_PARTS))
            if self._compiled is not None:
                scripts.has_seen_calls(compiled=bool(self._compiled))
        if not isinstance(part, Saving):
            return
        tracer, part.tracer = part.tracer, None
        if tracer is not None and scripts is not None:
            scripts.add(tracer, part.called)
        if kind is None and self._warns and not _acts(self._in_graphs):
            warn_if_useless(part.ledger, part.policy, stacklevel=3)

    def error_report(self) -> Any:
        """Returns what lossy codes add to the gradient's variance, predicted beside measured.

        To be called after backward. Raises PlanError if the context does not watch its codes.
        """
        return self._make(None).error_report()


_WORTH_A_WORD = 1 << 20  # below, there was nothing to gain
_MAX_REASONS = 3


def _acts(ledger: Ledger) -> bool:
    """Returns whether anything but keeping was done."""
    return bool(set(ledger.totals("action")) - {"", "keep"})


def warn_if_useless(ledger: Ledger, policy: Policy, stacklevel: int) -> None:
    """Warn if 1 MiB or more was saved, all of it was kept, and the policy wanted otherwise."""
    before = ledger.before_nbytes
    if before < _WORTH_A_WORD or isinstance(policy, KeepAll) or _acts(ledger):
        return
    reasons = sorted(ledger.totals("why").items(), key=lambda item: -item[1][0])
    listed = "; ".join(f"{show_nbytes(size)}: {why}" for why, (size, _) in reasons[:_MAX_REASONS])
    remedy = (
        "A lossy codec may help: er.saving('dither', bits=8)."
        if isinstance(policy, Exact)
        else "saved.ledger lists each."
    )
    warnings.warn(
        f"this saving context changed nothing of the {show_nbytes(before)} that autograd saved "
        f"in it ({listed}). {remedy}",
        stacklevel=stacklevel,
    )
