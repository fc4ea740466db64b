"""`elbowroom run` says at its end whether the budget was kept: tables, reports, the exit code."""

import json
from pathlib import Path

from rich.table import Table
from rich.text import Text

from elbowroom.cli.mistakes import errors_console, mistake, on_the_command_line, typed_budget
from elbowroom.cli.spawned import Processes
from elbowroom.errors import BudgetTooSmall
from elbowroom.files import write_text
from elbowroom.fitting import Summary
from elbowroom.units import show_nbytes

UNSEEN, TOO_SMALL, NOT_KEPT = 2, 3, 4  # exit codes
REFUSALS = (UNSEEN, TOO_SMALL)
NOT_FOUND = (
    "the script made an optimizer, but no module that holds its parameters was called in training "
    "mode with gradients on, on the main thread, so the budget is not kept; call the model "
    "itself, model(x), rather than functions of its weights"
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


def tell_outcome(
    own: list[Summary],
    processes: Processes,
    code: int,
    refusal: BudgetTooSmall | None,
    made_optimizers: bool,
    report: Path | None,
) -> int:
    """Shows what became of the budget once the script has ended; returns the exit code.

    own              models that the script's own process has trained
    code             the script's own exit code
    refusal          of a budget, which the script itself has handled
    made_optimizers  whether it made an optimizer
    report           the file for the figures, if any
    """
    summaries = own + processes.summaries
    if processes.refusal:
        return processes.refusal
    if not summaries:
        return _say_not_found(code, made_optimizers, processes)
    for one in own:
        if one.trained:
            errors_console().print(_table(one))
    spawned = [one for one in processes.summaries if one.trained]
    if spawned:
        worst = max(spawned, key=lambda one: one.last_nbytes or 0)
        of = f" (in one of {len(processes.ended)} processes)"
        errors_console().print(_table(worst, of if len(processes.ended) > 1 else ""))
    worst = max(summaries, key=lambda one: (one.trained, one.last_nbytes or 0))
    code = code or _say_refused(refusal)
    code = say_not_kept(code, worst) or say_not_measured(summaries)
    if report is not None:
        figures = worst.as_dict() | {"exit_code": code}
        if len(summaries) > 1:
            figures |= {"models": [one.as_dict() for one in summaries]}
        write_text(json.dumps(figures, indent=2) + "\n", report)
    return code


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
    mistake(NOT_FOUND)
    return UNSEEN


def _say_refused(refusal: BudgetTooSmall | None) -> int:
    """Repeats a refusal that the script itself has handled; returns the exit code."""
    if refusal is None:
        return 0
    mistake(on_the_command_line(refusal))
    return TOO_SMALL


def say_not_kept(code: int, summary: Summary) -> int:
    """Reports a last measured step above the budget; returns the exit code.

    This is for a script that ended without an error.
    """
    if code or not summary.trained or (summary.last_nbytes or 0) <= summary.budget_nbytes:
        return code
    took, budget = summary.last_nbytes or 0, show_nbytes(summary.budget_nbytes)
    mistake(
        f"the budget {budget} was not kept: the last measured step took "
        f"{show_nbytes(took)}. Give --budget {typed_budget(took)}, or halve the batch"
    )
    return NOT_KEPT


def say_not_measured(summaries: list[Summary]) -> int:
    """Reports models of which several steps ran and none was measured, unless they are compiled.

    Returns the exit code, because it is not known whether these kept to the budget. A model of
    which only forwards were seen is reported too, but it is no error.
    """
    for one in summaries:
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
        for one in summaries
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


def _table(summary: Summary, where: str = "") -> Table:
    """Returns a table of the figures, each measured or estimated."""
    table = Table(
        title=Text(
            f"{summary.model} inside {show_nbytes(summary.budget_nbytes)}{where}", style="bold"
        ),
        title_justify="left",
    )
    for name in ("one step", "measured", "estimated"):
        table.add_column(name, justify="left" if name == "one step" else "right")
    table.add_column("", overflow="fold")
    for row in summary.rows():
        table.add_row(*(Text(cell) for cell in row))
    return table
