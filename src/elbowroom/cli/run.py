"""`elbowroom run`: trains a script that does not know of elbowroom inside a budget."""

import json
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
import typer
from rich.table import Table
from rich.text import Text
from torch import nn
from torch.multiprocessing.spawn import ProcessExitedException
from torch.optim import Optimizer

import elbowroom as er
from elbowroom.cli.mistakes import (
    check_writable,
    errors_console,
    mistake,
    on_the_command_line,
    says_mistakes,
    typed_budget,
)
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
from elbowroom.files import write_text
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
from elbowroom.units import Share, parse_budget, show_nbytes

UNSEEN, TOO_SMALL, NOT_KEPT = 2, 3, 4  # exit codes
REFUSALS = (UNSEEN, TOO_SMALL)
_MOST_MODELS = 8
_NOT_FOUND = (
    "the script made an optimizer, but no module that holds its parameters was called in training "
    "mode with gradients on, on the main thread, so the budget is not kept; call the model "
    "itself, model(x), rather than functions of its weights"
)
_FITS_ITSELF = (
    "the script itself calls er.fit, or another function of elbowroom's, so --budget has no "
    "effect; run it by python, or take that call out of the script"
)
_IN_A_POOL = (
    "the script trained nothing in its own process, and nothing is seen of the processes of a "
    "pool; if they train, start them by multiprocessing.Process, torch.multiprocessing.spawn or "
    "torchrun, or call er.fit in them"
)
_STILL_RUNNING = (
    "processes that the script started still run after its last line, so elbowroom does not "
    "know how they end; let the script wait for them, by process.join()"
)

_SILENT = (
    "processes that the script started ended before they could tell what they had trained, by an "
    "error or because they were killed, so elbowroom does not know whether they kept to the budget"
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
    have one plan.
    A loss outside of the model is covered if it is a module.

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
    several steps could be measured; 2 for a mistake
    that one line explains, or if the model cannot be found, before its first update; 130 if
    stopped.
    """
    given = None if plan is None else Plan.load(plan)
    asked: int | str
    if budget is not None:
        asked = budget
    elif given is not None:
        asked = given.budget
    else:
        raise UnknownField('run needs --budget, as in --budget "6GiB", or --plan PLAN.json')
    allowed = parse_budget(asked)
    if not isinstance(allowed, Share):  # of which memory, the model's device will tell
        check_plan(given, allowed, exact or None, offload=offload)
    check_script(script, is_module=module)
    if report is not None:
        check_writable(report, "--report", None if module else script, plan)
    if warm:
        start_warm()
    running = _Run(asked, exact, offload, given)
    in_a_process = partial(_in_a_process, asked, exact, offload, given)
    with following(in_a_process, running.in_a_copy) as processes:

        def leave(code: int) -> int:
            running.finish()
            processes.end()
            return _tell(running, processes, code, report)

        with before_exit(leave):
            code = running.of(script, arguments or [], is_module=module)
    raise typer.Exit(_tell(running, processes, code, report))


def _tell(running: "_Run", processes: Processes, code: int, report: Path | None) -> int:
    """Shows what became of the budget once the script has ended; returns the exit code.

    code: the script's own
    """
    own, spawned = running.told(), processes.told
    told = own + spawned
    if processes.refusal:
        code = processes.refusal
    elif not told:
        made_optimizers = running.discovery.made_optimizers
        code = _say_not_found(code, made_optimizers, processes)
    else:
        for one in own:
            if one.trained:
                errors_console().print(_table(one))
        spawned = [one for one in spawned if one.trained]
        if spawned:
            worst = max(spawned, key=lambda one: one.last_nbytes or 0)
            of = f" (in one of {len(processes.ended)} processes)"
            errors_console().print(_table(worst, of if len(processes.ended) > 1 else ""))
        worst = max(told, key=lambda one: (one.trained, one.last_nbytes or 0))
        code = code or _say_refused(running.refusal())
        code = _say_not_kept(code, worst) or _say_not_measured(told)
        if report is not None:
            figures = worst.as_dict() | {"exit_code": code}
            if len(told) > 1:
                figures |= {"models": [one.as_dict() for one in told]}
            write_text(json.dumps(figures, indent=2) + "\n", report)
    return code


class _Refused(Unseen):
    """Raised if the model that the script trains does not allow what was asked."""


class _Model(NamedTuple):
    """A model that the script trains."""

    name: str
    fitting: Fitting | CompiledFitting
    module: "weakref.ref[nn.Module]"


class _Run:
    """One run of a script: the models that were found in it, and their figures."""

    def __init__(
        self, budget: int | str, exact: bool, offload: str | None, plan: Plan | None
    ) -> None:
        self.discovery = Discovery(self._fit, self._count, self._refuse_unseen, self._cover)
        self._budget, self._plan = budget, plan
        self._exact, self._offload = exact or None, offload
        self._models: list[_Model] = []
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
            return self.in_a_copy(function, tell)

    def in_a_copy(self, function: Callable[[], object], tell: Tell) -> int:
        """Runs a function of the script in a copy of a process that is watched already.

        Models that the copied process trained before are not reported again. Returns as
        `in_a_process`.
        """
        models, before = len(self._models), self.told()

        def leave(code: int) -> int:
            self.finish(models)
            tell(Ended([one for one in self.told() if one not in before]))
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

    def told(self) -> list[Summary]:
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
        """Also keeps what the script compiles outside of the model inside the budget.

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
            fitting.owned.add(optimizer)
        if isinstance(fitting, Fitting):
            fitting.expects_others = self.discovery.trains_more([*self._fitted(), model])
        self._models.append(_Model(name, fitting, weakref.ref(model)))
        for loss in list(self._losses):
            self._cover(loss)

    def _fitted(self) -> list[nn.Module]:
        """Returns the models that have been fitted, and still exist."""
        return [model for one in self._models if (model := one.module()) is not None]

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
        if not self._models:
            return
        names = f"{', '.join(one.name for one in self._models)} and {name}"
        if self._plan is not None:
            why = "and a plan is for one; leave out --plan, "
        elif is_compiled(called) or isinstance(self._models[-1].fitting, CompiledFitting):
            why = "and a compiled one keeps to the budget alone; leave them uncompiled, "
        elif len(self._models) == _MOST_MODELS:
            why = f"more than the {_MOST_MODELS} that share a budget; "
        else:
            return
        raise _Refused(
            f"the script trains several models, {names}, {why}call all of them in the forward of "
            "one nn.Module, or put er.saving() around their forwards"
        )

    def _count(self, optimizer: Optimizer) -> None:
        """Adds an optimizer that is created after the first forward, as by some trainers."""
        for one in self._models:
            model = one.module()
            if model is not None and optimizer in self.discovery.optimizers_of(model):
                one.fitting.owned.add(optimizer)

    def _refuse_unseen(self) -> None:
        """Raises an error if an optimizer takes its first step and no model was found."""
        if not self.told():
            fits = any(self.discovery.optimizers_of(model) for model, _ in attached())
            own = _FITS_ITSELF if fits else self.discovery.differentiated
            raise _Refused(own or _NOT_FOUND)


def _in_a_process(
    budget: int | str,
    exact: bool,
    offload: str | None,
    plan: Plan | None,
    function: Callable[[], object],
    tell: Tell,
) -> int:
    """Runs a function of the script in a process that the script has started."""
    return _Run(budget, exact, offload, plan).in_a_process(function, tell)


def _say_not_found(code: int, made_optimizers: bool, processes: Processes) -> int:
    """Reports that no model was fitted; returns the exit code.

    If the script trained nothing, this is no error.
    """
    if code:
        return code
    if not made_optimizers and (processes.running or processes.unseen):
        mistake(_STILL_RUNNING if processes.running else _IN_A_POOL)
        return UNSEEN
    if not made_optimizers and processes.silent:
        errors_console().print(f"[dim]elbowroom: {_SILENT}[/]")
        return code
    if not made_optimizers:
        errors_console().print("[dim]elbowroom: the script trained nothing, so nothing was done[/]")
        return code
    mistake(_NOT_FOUND)
    return UNSEEN


def _say_refused(refusal: BudgetTooSmall | None) -> int:
    """Repeats a refusal that the script itself has handled; returns the exit code."""
    if refusal is None:
        return 0
    mistake(on_the_command_line(refusal))
    return TOO_SMALL


def _say_not_kept(code: int, told: Summary) -> int:
    """Reports a last measured step above the budget; returns the exit code.

    This is for a script that ended without an error.
    """
    if code or not told.trained or (told.last_nbytes or 0) <= told.budget_nbytes:
        return code
    took = told.last_nbytes or 0
    mistake(
        f"the budget {show_nbytes(told.budget_nbytes)} was not kept: the last measured step took "
        f"{show_nbytes(took)}. Give --budget {typed_budget(took)}, or halve the batch"
    )
    return NOT_KEPT


def _say_not_measured(told: list[Summary]) -> int:
    """Reports models of which several steps ran and none was measured, unless they are compiled.

    Also those of which forwards alone were seen: if that was meant, it is no error. Returns the
    exit code: nobody knows whether the others have kept to the budget.
    """
    for one in told:
        if not one.trained:
            ran = f"{one.steps} forward{'s' * (one.steps != 1)} of {one.model}"
            errors_console().print(
                Text(
                    f"elbowroom: no training step was seen: no backward and no update followed the "
                    f"{ran}, so there was no budget to keep",
                    style="dim",
                )
            )
    names = dict.fromkeys(
        one.model
        for one in told
        if one.last_nbytes is None and one.steps > 2 and one.setting != "compiled" and one.trained
    )
    if not names:
        return 0
    errors_console().print(
        Text(
            f"elbowroom: no step of {', '.join(names)} was measured, so whether the budget was "
            "kept is not known"
        )
    )
    return NOT_KEPT


def _table(told: Summary, where: str = "") -> Table:
    """Returns a table of the figures, each measured or estimated."""
    table = Table(
        title=Text(f"{told.model} inside {show_nbytes(told.budget_nbytes)}{where}", style="bold"),
        title_justify="left",
    )
    for name in ("one step", "measured", "estimated"):
        table.add_column(name, justify="left" if name == "one step" else "right")
    table.add_column("", overflow="fold")
    for row in told.rows():
        table.add_row(*(Text(cell) for cell in row))
    return table
