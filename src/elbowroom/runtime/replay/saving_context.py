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
from collections import OrderedDict
from collections.abc import Hashable, Iterable
from contextlib import ExitStack
from typing import Any, Self

import torch
from torch import nn

from elbowroom.errors import PlanError
from elbowroom.plan import Exact, KeepAll, Policy
from elbowroom.runtime.compiler import compilations
from elbowroom.runtime.context import PROCESS, Context
from elbowroom.runtime.in_graph import ActsInGraph, compiled_by
from elbowroom.runtime.ledger import Account, Ledger, Ledgers
from elbowroom.runtime.replay.following import Following, Make
from elbowroom.runtime.replay.script import Script, state_of_torch
from elbowroom.runtime.replay.scripts import UNKNOWN, Forward, Scripts
from elbowroom.runtime.replay.tracer import Tracer
from elbowroom.runtime.saving import Saving
from elbowroom.units import show_nbytes

_MAX_SETTINGS = 16  # settings whose scripts are cached at a time
_MAX_SCRIPTS = 8  # of one setting: for other models, shapes, branches
_MAX_UNWRITTEN = 8  # steps of one setting that no script could be written of, or that left theirs
_MAX_PARTS = 3  # of a step that opens the same context several times


class StepScripts(Scripts):
    """Scripts of the steps of one setting; the one that was followed last comes first."""

    def __init__(self) -> None:
        super().__init__(most=_MAX_SCRIPTS, most_unwritten=_MAX_UNWRITTEN)
        self._learned = 0
        self._calls_compiled = False
        self._none_called_of: frozenset[int] | None = None  # what had been compiled by then

    def begin(self, forward: Forward = UNKNOWN) -> tuple[Script, ...]:
        """Begins a step; returns the scripts that it may replay."""
        if self._learned != PROCESS.learned:  # which scripts from before do not know
            self._learned = PROCESS.learned
            self.forget_all()
        return super().begin(forward)

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

    def add_step(self, tracer: Tracer, modules: Iterable[nn.Module]) -> None:
        """Adds a step that was recorded, or could not be. modules: those that it has called."""
        script = tracer.script
        owners = None if script is None else _owners_of(script.parameters, modules)
        if script is not None and owners is not None:
            self.add(script, owners=owners)
        elif not tracer.once:
            self.has_none()


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


_known: OrderedDict[Hashable, StepScripts] = OrderedDict()
_lock = threading.Lock()


def scripts_of(*setting: Hashable) -> StepScripts:
    """Returns the scripts of steps with these settings in this process."""
    with _lock:
        scripts = _known.pop(setting, None) or StepScripts()
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
        graphs: ActsInGraph | None = None,
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

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
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
            scripts.add_step(tracer, part.called)
        acts = part.has_read_rows or _acts(self._in_graphs)
        if kind is None and self._warns and not acts:
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
