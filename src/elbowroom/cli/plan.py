"""`elbowroom plan`: whether a budget can be met, at what cost, and by which actions."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

import elbowroom as er
from elbowroom.cli.mistakes import check_writable, says_mistakes, tell_path
from elbowroom.cli.places import Offload
from elbowroom.errors import BudgetTooSmall, DataError, UnknownField
from elbowroom.files import write_text
from elbowroom.plan.make import plain_peak
from elbowroom.plan.plan import Plan
from elbowroom.plan.profile import Profile
from elbowroom.report import render_profile, step_page
from elbowroom.units import parse_budget, show_nbytes
from elbowroom.waiting import waiting

_STEPS = 10  # of a sweep, from the plain peak to nothing

From = Annotated[
    Path, typer.Argument(metavar="PROFILE.json", help='A profile that "elbowroom profile" wrote.')
]
Budget = Annotated[
    str | None,
    typer.Option(
        help='The allowed peak, as "6GiB" or "500 MiB"; 6GB is 6 * 10**9; "80%" or 0.8 is a '
        "share of the memory of this machine, or of its GPU if the step ran on one."
    ),
]
IsExact = Annotated[
    bool, typer.Option("--exact", help="Exact actions only: no bit of any gradient changes.")
]
Solver = Annotated[
    str,
    typer.Option(
        help="auto, milp, rounding, greedy, or a baseline: uniform, delta, dtr, capuchin."
    ),
]
Out = Annotated[Path | None, typer.Option(help="Write the plan to this file, as JSON.")]
Html = Annotated[
    Path | None, typer.Option(help="Write a page that shows the step, plain and with the plan.")
]
Explains = Annotated[bool, typer.Option("--explain", help="Print a line for each tensor.")]
Sweeps = Annotated[
    bool,
    typer.Option("--sweep", help="Print a line for each of several budgets, down to the smallest."),
]


@says_mistakes
def plan(
    profile: From,
    budget: Budget = None,
    exact: IsExact = False,
    offload: Offload = None,
    solver: Solver = "auto",
    out: Out = None,
    html: Html = None,
    explain: Explains = False,
    sweep: Sweeps = False,
) -> None:
    """Estimate from a profile whether a budget can be met, and at what cost.

    All figures are estimates. Exit code: 0 if the budget can be met; 3 if not, with the smallest
    budget that can, and what takes the memory; 2 for a mistake that one line explains.
    """
    if budget is None and not sweep:
        raise UnknownField('a plan needs --budget, as in --budget "6GiB", or --sweep')
    if budget is None and (out is not None or html is not None or explain):
        raise UnknownField("--out, --html and --explain apply to one plan; give its --budget")
    if budget is not None:
        parse_budget(budget)
    if out is not None:
        check_writable(out, "--out", profile)
    if html is not None:
        check_writable(html, "--html", profile, out)
    if profile.is_file() and profile.suffix == ".py":
        raise UnknownField(
            f"{profile} is a script, and plan reads a profile of one step of it: "
            f'"elbowroom profile {profile}" writes profile.json, and '
            f'"elbowroom plan profile.json --budget ..." reads that'
        )
    if not profile.is_file():
        raise DataError(f'there is no profile {profile}; "elbowroom profile train.py" writes one')
    known = Profile.load(profile)
    if sweep:
        Console().print(
            _sweep(
                known, partial(er.plan, known, exact=exact or None, offload=offload, solver=solver)
            )
        )
    if budget is None:
        return
    with waiting("the plan"):
        made = er.plan(known, budget=budget, exact=exact or None, offload=offload, solver=solver)
    if explain:
        Console().print(Text(made.explain()), soft_wrap=True)
    else:
        Console().print(Text(str(made), style="bold"), soft_wrap=True)
        Console().print(_table(made))
    if out is not None:
        made.save(out)
        tell_path("The plan:", out)
    if html is not None:
        write_text(render_profile(step_page(known, profile.name, plan=made)), html)
        tell_path("Page:", html)


def _table(made: Plan) -> Table:
    """Returns a table of the actions."""
    table = Table("action")
    for name in ("tensors", "plain", "held"):
        table.add_column(name, justify="right")
    for action, (before, after) in sorted(made.totals().items(), key=lambda one: -one[1][0]):
        tensors = sum(1 for line in made.lines if line.action == action)
        table.add_row(action, str(tensors), show_nbytes(before), show_nbytes(after))
    return table


def _sweep(known: Profile, make: Callable[..., Plan]) -> Table:
    """Returns a table of budgets, from the plain peak in steps of a tenth to the smallest."""
    plain = plain_peak(known)
    table = Table(
        title=f"plain peak {show_nbytes(plain)}; all estimated",
        title_justify="left",
        title_style="bold",
    )
    for name in ("budget", "of plain", "peak", "time", "held"):
        table.add_column(name, justify="right")
    table.add_column("gradients")
    with waiting("plans") as tell:
        for nbytes in (plain * step // _STEPS for step in range(_STEPS, 0, -1)):
            tell(show_nbytes(nbytes))
            try:
                _add(table, make(budget=nbytes), plain)
            except BudgetTooSmall as error:
                least = error.least_nbytes
                made = make(budget=least)
                _add(table, made, plain, note="the least")
                break
    return table


def _add(table: Table, made: Plan, plain_nbytes: int, note: str = "") -> None:
    gradients = "exact" if made.exact else "lossy"
    table.add_row(
        show_nbytes(made.budget),
        f"{made.budget / plain_nbytes:.0%}",
        show_nbytes(made.peak),
        f"{100 * made.slowdown:+.1f} %",
        show_nbytes(made.held_nbytes),
        f"{gradients}, {note}" if note else gradients,
    )
