"""`elbowroom run`: trains a script that does not know of elbowroom inside a budget."""

import gc
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
import typer
from torch import nn
from torch.multiprocessing.spawn import ProcessExitedException
from torch.optim import Optimizer

import elbowroom as er
from elbowroom.cli.mistakes import check_writable, mistake, on_the_command_line, says_mistakes
from elbowroom.cli.outcome import NOT_FOUND, REFUSALS, TOO_SMALL, UNSEEN, tell_outcome
from elbowroom.cli.places import Offload
from elbowroom.cli.script import (
    Arguments,
    IsModule,
    NoScript,
    Script,
    check_script,
    run_script,
    show_traceback,
)
from elbowroom.cli.spawned import Ended, Processes, Tell, before_exit, following
from elbowroom.cli.warm import start_warm
from elbowroom.errors import BudgetTooSmall, PlanError, UnknownField
from elbowroom.fitting import FitOptions, Fitting, Summary, summary
from elbowroom.fitting.compiled import CompiledFitting
from elbowroom.fitting.loss import cover, may_be_loss
from elbowroom.fitting.program import CompiledProgram
from elbowroom.measure.memory import budget_nbytes
from elbowroom.plan.plan import Plan, check_plan
from elbowroom.runtime.attach import attached, opener_of
from elbowroom.runtime.compiler import is_compiled
from elbowroom.runtime.exhaustion import is_out_of_memory
from elbowroom.runtime.undo import gradient_of
from elbowroom.tools import Discovery, Unseen, say_exhaustion, set_aside
from elbowroom.units import Share, parse_budget

_MAX_MODELS = 8
_FITS_ITSELF = (
    "the script itself calls er.fit, or another function of elbowroom's, so --budget has no "
    "effect; run it by python, or take that call out of the script"
)

Budget = Annotated[
    str | None,
    typer.Option(
        help='The allowed peak, as "6GiB" or "500 MiB"; 6GB is 6 * 10**9; "80%" or 0.8 is a '
        "share of the memory of the model's device.",
        show_default="that of --plan",
    ),
]
IsExact = Annotated[
    bool, typer.Option("--exact", help="Exact actions only: no bit of any gradient changes.")
]
Begin = Annotated[
    Path | None,
    typer.Option(
        "--plan",
        metavar="PLAN.json",
        help='Begin with this plan, which "elbowroom plan --out" wrote.',
    ),
]
IsWarm = Annotated[
    bool,
    typer.Option(
        "--warm", help="Keep freed memory in the process: large tensors cost less time (glibc)."
    ),
]
Report = Annotated[
    Path | None, typer.Option(help="Write the figures at the end to this file, as JSON.")
]


@says_mistakes
def run(
    script: Script,
    budget: Budget = None,
    arguments: Arguments = None,
    module: IsModule = False,
    exact: IsExact = False,
    offload: Offload = None,
    plan: Begin = None,
    warm: IsWarm = False,
    report: Report = None,
) -> None:
    """Train an unchanged script inside a memory budget.

    The model that the script trains is found at its first call, and fitted to the budget as by
    er.fit. The states of its optimizers are counted. If the script trains several models (a
    generator and a discriminator), they keep to the budget together, and steps that they share
    have one plan. A loss outside of the model is covered if it is a module.

    What the script compiles with torch.compile stays compiled: the plan of a model, a loss or a
    whole step is then made inside its graphs, and the figures are estimates.

    With --plan, --budget may be left out. It is then the budget of the plan.

    With --warm, the process starts again with the malloc settings that "elbowroom doctor" names. On
    a CPU, a step with tensors of 32 MiB or more may then take two thirds of the time. The process
    keeps freed memory, so it looks larger than it is.

    Write options of elbowroom before the script; everything after it belongs to the script. With
    -m, the script is a module, as in "elbowroom run --budget 6GiB -m package.train". At the end, a
    table is printed on stderr.

    Exit code: the script's own; 3 if no plan with the allowed actions fits the budget; 4 if the
    script ended without an error, but its last measured step was above the budget, or none of
    several steps could be measured; 2 for a mistake that one line explains, or if the model cannot
    be found, before its first update; 130 if stopped.
    """
    given = None if plan is None else Plan.load(plan)
    asked: int | str
    if budget is not None:
        asked = budget
    elif given is not None:
        asked = given.budget
    else:
        raise UnknownField(_no_budget(script, arguments or []))
    allowed = parse_budget(asked)
    if not isinstance(allowed, Share):  # of which memory, the model's device will tell
        check_plan(given, allowed, exact or None, offload=offload)
    check_script(script, is_module=module)
    if report is not None:
        check_writable(report, "--report", None if module else script, plan)
    if warm:
        start_warm()
    running = _ScriptRun(asked, exact, offload, given)
    in_a_process = partial(_in_a_process, asked, exact, offload, given)
    with following(in_a_process, running.in_a_copy) as processes:

        def leave(code: int) -> int:
            running.finish()
            processes.end()
            return running.outcome(processes, code, report)

        with before_exit(leave):
            code = running.of(script, arguments or [], is_module=module)
    raise typer.Exit(running.outcome(processes, code, report))


def _no_budget(script: Path, arguments: list[str]) -> str:
    """Returns the message for a missing budget, which may stand among the script's arguments."""
    if any(one.partition("=")[0] in ("--budget", "--plan") for one in arguments):
        return (
            "options of elbowroom stand before the script, as in elbowroom run --budget 6GiB "
            f"{script}; what follows it belongs to the script"
        )
    return 'run needs --budget, as in --budget "6GiB", or --plan PLAN.json'


class _Refused(Unseen):
    """Raised if the model that the script trains does not allow what was asked."""


class _FoundModel(NamedTuple):
    """A model that the script trains. first: its engine, before the script compiled the model."""

    name: str
    first: Fitting | CompiledFitting
    module: "weakref.ref[nn.Module]"

    @property
    def fitting(self) -> Fitting | CompiledFitting:
        """The engine that runs the model's forwards."""
        successor = self.first.successor if isinstance(self.first, Fitting) else None
        return successor if isinstance(successor, CompiledFitting) else self.first


class _ScriptRun:
    """One run of a script: the models that were found in it, and their figures."""

    def __init__(
        self, budget: int | str, exact: bool, offload: str | None, plan: Plan | None
    ) -> None:
        self.discovery = Discovery(self._fit, self._count, self._refuse_unseen, self._cover)
        self._budget, self._plan = budget, plan
        self._exact, self._offload = exact or None, offload
        self._models: list[_FoundModel] = []
        self._losses: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._program: CompiledProgram | None = None

    def of(self, script: Path, arguments: list[str], *, is_module: bool = False) -> int:
        """Runs the script and returns its exit code.

        Raises BudgetTooSmall, or PlanError for what `fit` refuses.
        """
        room = set_aside()
        with self.discovery, self._compiling():
            try:
                return run_script(script, arguments, is_module=is_module)
            except KeyboardInterrupt as error:
                show_traceback(error)
                return 130
            except (BudgetTooSmall, Unseen, NoScript):
                raise
            except ProcessExitedException as error:
                if error.exit_code in REFUSALS:  # the process has said why
                    return error.exit_code
                show_traceback(error)
                return 1
            except Exception as error:
                if room is not None:
                    room.close()  # showing a traceback takes some, too
                show_traceback(error)
                if is_out_of_memory(error):
                    say_exhaustion(error)
                return 1
            finally:
                self.finish()

    def finish(self, since: int = 0) -> None:
        """Ends the training of the models, without those that were found before this one."""
        for one in self._models[since:]:
            one.fitting.finish()

    def in_a_process(self, function: Callable[[], object], tell: Tell) -> int:
        """Runs a function of the script in a process of its own, and tells how it ended.

        Returns the exit code of a refusal, or 0.
        """
        with self.discovery, self._compiling():
            self.discovery.find_made()
            return self.in_a_copy(function, tell)

    def in_a_copy(self, function: Callable[[], object], tell: Tell) -> int:
        """Runs a function of the script in a copy of a process that is watched already.

        Models that the copied process trained before are not reported again. Returns as
        `in_a_process`.
        """
        models, before = len(self._models), self.summaries()

        def leave(code: int) -> int:
            self.finish(models)
            tell(Ended([one for one in self.summaries() if one not in before]))
            return code

        try:
            with before_exit(leave):
                function()
        except BudgetTooSmall as error:
            return self._refused(models, on_the_command_line(error), TOO_SMALL, tell)
        except Unseen as error:
            return self._refused(models, str(error), UNSEEN, tell)
        except SystemExit:
            leave(0)
            raise
        except Exception as error:
            self.finish(models)
            if is_out_of_memory(error):
                say_exhaustion(error)
            raise
        return leave(0)

    def _refused(self, models: int, message: str, code: int, tell: Tell) -> int:
        mistake(message)
        self.finish(models)
        tell(Ended([], code))
        return code

    def outcome(self, processes: Processes, code: int, report: Path | None) -> int:
        """Shows what became of the budget; returns the exit code. code: the script's own."""
        own, refusal = self.summaries(), self.refusal()
        made_optimizers = self.discovery.made_optimizers
        return tell_outcome(own, processes, code, refusal, made_optimizers, report)

    def summaries(self) -> list[Summary]:
        """Returns the figures of each model; empty if no model was found."""
        found = [
            one.fitting.summary(one.name)
            if isinstance(one.fitting, CompiledFitting)
            else summary(one.fitting, " with ".join((one.name, *self._guests_of(one.fitting))))
            for one in self._models
            if isinstance(one.fitting, CompiledFitting) or not one.fitting.is_guest
        ]
        program = self._program
        if not found and program is not None and program.compiled:
            found = [program.summary()]
        return [replace(one, trained=False) for one in found] if self._only_ran_forward() else found

    def refusal(self) -> BudgetTooSmall | None:
        """Returns why the last forward of a model was refused, if the script went on after it."""
        fittings = (one.fitting for one in self._models)
        refusals = (one.refusal for one in fittings if isinstance(one, Fitting))
        return next((one for one in refusals if one is not None), None)

    def _only_ran_forward(self) -> bool:
        """Returns whether no backward and no update was seen in the whole script.

        What is compiled may have had both inside of its graphs.
        """
        fittings = [one.fitting for one in self._models]
        eager = [one for one in fittings if isinstance(one, Fitting)]
        if self.discovery.updated or len(eager) < len(fittings) or not fittings:
            return False
        if any(one.ran_backward for one in eager):
            return False
        # An update inside of backward, or of a script that ended before its optimizer's first step.
        gradients = (gradient_of(p) for model in self._fitted() for p in model.parameters())
        states = any(optimizer.state for optimizer in self.discovery.optimizers())
        return not states and all(gradient is None for gradient in gradients)

    def _guests_of(self, host: Fitting) -> list[str]:
        """Returns the names of the models that ran in the steps of another one alone."""
        fittings = ((one.name, one.fitting) for one in self._models)
        return [
            name
            for name, one in fittings
            if isinstance(one, Fitting) and one.is_guest and one.host is host
        ]

    def _compiling(self) -> AbstractContextManager[object]:
        """Keeps code that the script compiles outside of the model inside the budget, too.

        Plans of the eager engine and offload do not work in graphs, so with these it runs eagerly.
        """
        if self._plan is not None or self._offload is not None:
            return nullcontext()
        budget = parse_budget(self._budget)
        if isinstance(budget, Share):  # of the memory of which device, only a model tells
            budget = budget_nbytes(
                self._budget, torch.device("cuda" if torch.cuda.is_available() else "cpu")
            )
        options = FitOptions(budget, self._exact)
        self._program = CompiledProgram(options, self.discovery.optimizers, self._held_nbytes)
        return self._program

    def _held_nbytes(self) -> int:
        """Returns the most bytes that the compiled model stores when the loss runs."""
        fitting = self._models[0].fitting if self._models else None
        regions = fitting.regions if isinstance(fitting, CompiledFitting) else ()
        return max((one.saved_nbytes for one in regions), default=0)

    def _fit(self, model: nn.Module) -> None:
        name = type(model).__name__
        called = model if self.discovery.called is None else self.discovery.called
        self._let_go()
        self._check_others(name, called)
        optimizers = self.discovery.optimizers_of(model)
        try:
            er.fit(
                called,
                budget=self._budget,
                exact=self._exact,
                offload=self._offload,
                plan=self._plan,
            )
        except PlanError as error:
            raise _Refused(str(error)) from error
        fitting = opener_of(called)
        assert isinstance(fitting, Fitting | CompiledFitting)
        for optimizer in optimizers:
            fitting.model_state.add(optimizer)
        if isinstance(fitting, Fitting):
            fitting.expects_others = self.discovery.trains_more([*self._fitted(), model])
        self._models.append(_FoundModel(name, fitting, weakref.ref(model)))
        for loss in list(self._losses):
            self._cover(loss)

    def _alive(self) -> list[_FoundModel]:
        """Returns the models that have been fitted, and still exist."""
        return [one for one in self._models if one.module() is not None]

    def _fitted(self) -> list[nn.Module]:
        return [model for one in self._alive() if (model := one.module()) is not None]

    def _let_go(self) -> None:
        """Ends the training of models that the script has freed, as after a fold or a trial.

        Their engines stay for the summary, and would hold their weights until the script's end.
        """
        for one in self._models:
            if one.module() is None:
                one.fitting.finish()

    def _why_apart(self, called: nn.Module) -> str | None:
        """Returns why this model and the present ones cannot share the budget, or None."""
        others = self._alive()
        if not others:
            return None
        if self._plan is not None:
            return "and a plan is for one; leave out --plan, "
        if is_compiled(called) or isinstance(others[-1].fitting, CompiledFitting):
            return "and a compiled one keeps to the budget alone; leave them uncompiled, "
        if len(others) == _MAX_MODELS:
            return f"more than the {_MAX_MODELS} that share a budget; "
        return None

    def _cover(self, loss: nn.Module) -> bool:
        """Adds a loss outside of the models to their steps; returns whether it was added."""
        fittings = [one.fitting for one in self._models if isinstance(one.fitting, Fitting)]
        if self._plan is not None or not fittings or not may_be_loss(loss):
            return False
        self._losses.add(loss)
        for fitting in fittings:
            cover(loss, fitting)
        return True

    def _check_others(self, name: str, called: nn.Module) -> None:
        """Raises PlanError if another model cannot be fitted beside the present ones."""
        why = self._why_apart(called)
        if why is not None:
            gc.collect()  # trainers and compiled models are cycles, which Python frees late
            why = self._why_apart(called)
        if why is None:
            return
        names = f"{', '.join(one.name for one in self._alive())} and {name}"
        raise _Refused(
            f"the script trains several models, {names}, {why}call all of them in the forward of "
            "one nn.Module, or put er.saving() around their forwards"
        )

    def _count(self, optimizer: Optimizer) -> None:
        """Adds an optimizer that is created after the first forward, as by some trainers."""
        for one in self._models:
            model = one.module()
            if model is not None and optimizer in self.discovery.optimizers_of(model):
                one.fitting.model_state.add(optimizer)

    def _refuse_unseen(self) -> None:
        """Raises an error if an optimizer takes its first step and no model was found."""
        if not self.summaries():
            fits = any(self.discovery.optimizers_of(model) for model, _ in attached())
            own = _FITS_ITSELF if fits else self.discovery.differentiated
            raise _Refused(own or NOT_FOUND)


def _in_a_process(
    budget: int | str,
    exact: bool,
    offload: str | None,
    plan: Plan | None,
    function: Callable[[], object],
    tell: Tell,
) -> int:
    """Runs a function of the script in a process that the script has started."""
    return _ScriptRun(budget, exact, offload, plan).in_a_process(function, tell)
