"""A profile as a page: where the memory of one step went, and which actions could reduce it.

With a plan, the page shows the step twice: as it was profiled, and under the plan.
"""

import platform
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.table import Table
from rich.text import Text

from elbowroom.plan.build_problem import build_problem
from elbowroom.plan.menu import EXACT_MENU, action_name, option, preset_named
from elbowroom.plan.plan import Plan
from elbowroom.plan.profile import Profile, Storage, is_planned
from elbowroom.report.chart import step_chart
from elbowroom.report.step import Step, is_plain, module_label, plain, planned, profiled
from elbowroom.units import show_nbytes, show_seconds

_LOSSY = preset_named("dither, 16 levels")


@dataclass(frozen=True)
class Way:
    """One way to hold a storage. held: bytes that it would take."""

    action: str
    held: int
    exact: bool


@dataclass(frozen=True)
class Prospect:
    """A storage that autograd saves, and what could be done with it.

    ways  those that hold less: exact, lossy with 16 levels, the innermost module to run again
    why   the reason if there are none
    """

    storage: Storage
    ways: tuple[Way, ...]
    why: str

    @property
    def module(self) -> str:
        """The module of the first op that saves the storage."""
        return self.storage.saves[0].site.module


def prospects(profile: Profile) -> tuple[Prospect, ...]:
    """Returns the prospects of all storages, the largest first."""
    again = _run_again(profile)
    found = [
        _prospect(profile, storage, again.get(index, ""))
        for index, storage in enumerate(profile.storages)
    ]
    return tuple(sorted(found, key=lambda one: -one.storage.nbytes))


def _prospect(profile: Profile, storage: Storage, again: str) -> Prospect:
    left = storage.saves[0].left
    ways: list[Way] = []
    if is_planned(storage):
        for preset in (*EXACT_MENU, _LOSSY):
            made = option(profile, storage, preset)
            if made.nbytes < min([way.held for way in ways], default=storage.nbytes):
                ways.append(Way(action_name(preset, storage), made.nbytes, made.exact))
        if again:
            ways.append(Way(f"recompute {again}", 0, exact=True))
    asked = next((save.site.why for save in storage.saves if save.site.why), "")
    return Prospect(storage, tuple(ways), "" if ways else left or asked or "its bits are needed")


def _run_again(profile: Profile) -> dict[int, str]:
    """Returns, for each storage, the innermost module whose second forward would make it again."""
    built = build_problem(profile, exact=True)
    found: dict[int, str] = {}
    for region in sorted(built.problem.regions, key=lambda region: region.name.count(".")):
        for item in region.inside:
            found[built.storages[item]] = region.name
    return found


MAX_TENSORS = 25  # of a page
_ROWS = 10  # of the table in the terminal
_SMALL = 1000  # a tensor below this part of all that is saved is not listed
_CHART_NOTE = (
    "The line shows all memory in use; each column of the picture shows its highest moment. The "
    "bytes of weights and optimizer states are counted. Gradients are the tensors that backward "
    "creates and that stay until its end. Transients are everything else: outputs, workspaces, "
    "gradients of activations. Times include the cost of measuring."
)
_PLAN_NOTE = (
    " The plan is drawn on the time axis of the profiled step. The time that it adds is in the "
    "table, but not in the picture."
)
_NOTES = (
    "Size: the bytes of the whole storage that autograd holds between forward and backward, "
    "without parameters. If several ops save one storage, it is listed once, with the first op.",
    "Line: the line of Python that called the op, outside of torch. At the peak: the bytes of the "
    "tensor at the moment of the highest memory use.",
    "Held before the step: weights, buffers, kept gradients and optimizer states. On a CPU, data "
    "of the script itself is not counted.",
    "The memory between the last use of saved tensors and the next forward may include other work "
    "of the script, such as evaluation.",
)
_WAYS_NOTE = (
    '"Possible actions" are estimated for each tensor by itself, without a budget. "elbowroom '
    'plan" chooses among them for a budget. Exact means that no bit of any gradient changes.'
)


@dataclass(frozen=True)
class Fact:
    """One figure of the step. values: plain, and with the plan if there is one."""

    name: str
    values: tuple[str, ...]
    note: str = ""
    kind: str = "measured"


@dataclass(frozen=True)
class TensorRow:
    """A saved tensor. at_peak: its bytes at the peak, in each step; ways: possible actions."""

    module: str
    line: str
    op: str
    shape: str
    dtype: str
    size: str
    at_peak: tuple[str, ...]
    ways: tuple[str, ...]


@dataclass(frozen=True)
class StepPage:
    """Everything that the page of a step shows."""

    title: str
    lead: str
    heads: Sequence[str]
    facts: Sequence[Fact]
    charts: Sequence[dict[str, Any]]
    tensors_title: str
    peak_heads: Sequence[str]
    ways_title: str
    tensors: Sequence[TensorRow]
    tensors_note: str
    chart_note: str = _CHART_NOTE
    notes: Sequence[str] = _NOTES
    versions: dict[str, str] = field(default_factory=dict)
    heading: str = "Memory over one training step"
    columns: Sequence[str] = ("module", "line", "op", "shape", "dtype", "size")


def step_page(profile: Profile, model: str, remark: str = "", plan: Plan | None = None) -> StepPage:
    """Returns the page of one step of `model`, beside the same step under a plan if one is given.

    Raises DataError for a plan of another step.
    """
    found = prospects(profile)
    steps = [profiled(profile)] if plan is None else [plain(profile), planned(profile, plan)]
    places = {id(storage): index for index, storage in enumerate(profile.storages)}
    order = sorted(found, key=lambda one: _order(places, steps, one), reverse=True)
    large = [one for one in order if one.storage.nbytes * _SMALL >= profile.saved_nbytes]
    shown = large[:MAX_TENSORS]
    rest = profile.saved_nbytes - sum(one.storage.nbytes for one in shown)
    is_measured = profile.measured and (plan is None or is_plain(profile))
    first = "plain" if plan is not None or is_plain(profile) else "with exact actions"
    names = [(first, "measured" if is_measured else "estimated"), ("with the plan", "estimated")]
    device, name = profile.device
    return StepPage(
        title=f"{model}: where the memory of one step went",
        lead=f"One training step on {name or f'the {device.upper()}'}, from one forward to "
        f"the next. {remark}" + ("" if plan is None else f" Compared with a {plan}."),
        heads=("one step", "size", "kind")
        if plan is None
        else ("one step", "plain", "with the plan", "kind"),
        facts=_facts(profile, found) if plan is None else _compared(profile, plan, steps),
        charts=[step_chart(step, *named) for step, named in zip(steps, names, strict=False)],
        tensors_title="The tensors at the peak",
        peak_heads=("at the peak",)
        if plan is None
        else ("at the peak", "held with the plan", "at its peak"),
        ways_title="possible actions" if plan is None else "action of the plan",
        tensors=[_row(profile, one, steps, plan) for one in shown],
        tensors_note=f"{len(order) - len(shown)} more tensors take {show_nbytes(rest)}."
        if rest
        else "",
        chart_note=_CHART_NOTE + ("" if plan is None else _PLAN_NOTE),
        notes=_NOTES if plan is not None else (*_NOTES, _WAYS_NOTE),
        versions={
            "torch": str(torch.__version__),
            "Python": platform.python_version(),
            "machine": f"{platform.machine()}, threads: {torch.get_num_threads()}",
            "system": platform.platform(terse=True),
        },
    )


def profile_table(profile: Profile) -> Table:
    """Returns a table of the largest saved tensors, for the terminal."""
    table = Table("module", "op", "shape")
    table.add_column("size", justify="right")
    table.add_column("possible actions", overflow="fold")
    for one in prospects(profile)[:_ROWS]:
        row = _row(profile, one, [], None)
        cells = (row.module, row.op, row.shape, row.size, "; ".join(row.ways))
        table.add_row(*(Text(cell) for cell in cells))
    return table


def _order(places: dict[int, int], steps: Sequence[Step], one: Prospect) -> tuple[int, int]:
    """Returns a sort key: bytes at the plain peak, then bytes of the storage."""
    index = places[id(one.storage)]
    return steps[0].nbytes_at(index, steps[0].peak_moment), one.storage.nbytes


def _index(profile: Profile, storage: Storage) -> int:
    return next(i for i, one in enumerate(profile.storages) if one is storage)


def _row(profile: Profile, one: Prospect, steps: Sequence[Step], plan: Plan | None) -> TensorRow:
    storage, save = one.storage, one.storage.saves[0]
    index = _index(profile, storage)
    at_peak = [show_nbytes(step.nbytes_at(index, step.peak_moment)) for step in steps]
    ways = tuple(_shown(way) for way in one.ways) or (f"nothing: {one.why}",)
    if plan is not None:
        at_peak.insert(1, show_nbytes(_held_before_backward(steps[1], index)))
        ways = (_done(plan, storage),)
    return TensorRow(
        module=module_label(profile, save.site.module) or "(outermost)",
        line=save.line,
        op=save.site.consumer,
        shape=" x ".join(map(str, save.site.shape)) or "scalar",
        dtype=str(save.site.dtype).removeprefix("torch."),
        size=show_nbytes(storage.nbytes),
        at_peak=tuple(at_peak),
        ways=ways,
    )


def _held_before_backward(step: Step, index: int) -> int:
    """Returns the bytes of a storage that are held when backward begins."""
    return step.nbytes_at(index, max(step.profile.backward - 1, 0))


def _done(plan: Plan, storage: Storage) -> str:
    """Returns what a plan does with a storage, in words."""
    modules = [name for name in storage.saves[0].modules if name in plan.recompute]
    if modules:
        return f"recompute {modules[0]}"
    known = plan.sites.get(storage.saves[0].site.name)
    return action_name(preset_named(known.preset), storage) if known is not None else "keep"


def _shown(way: Way) -> str:
    kind = "exact" if way.exact else "lossy"
    return f"{way.action}: {show_nbytes(way.held)} ({kind})"


def _facts(profile: Profile, found: Sequence[Prospect]) -> list[Fact]:
    exact = sum(
        min([way.held for way in one.ways if way.exact and not way.action.startswith("recompute")]
            or [one.storage.nbytes])
        for one in found
    )  # fmt: skip
    peaks = [
        Fact("peak", (show_nbytes(profile.peak),), "the highest memory use, everything counted")
    ]
    if not is_plain(profile):
        peaks.append(
            Fact(
                "peak, plain",
                (show_nbytes(plain(profile).peak),),
                "with all tensors kept",
                "estimated",
            )
        )
    return [
        *peaks,
        Fact(
            "held before the step",
            (show_nbytes(profile.static),),
            "weights, optimizer states, accumulated gradients",
        ),
        Fact(
            "saved for backward",
            (show_nbytes(profile.saved_nbytes),),
            f"{len(profile.storages)} tensors, in plain autograd",
        ),
        Fact(
            "the same with exact actions", (show_nbytes(exact),), "without recompute", "estimated"
        ),
        Fact("time", (show_seconds(profile.seconds),), "with the cost of measuring"),
    ]


def _compared(profile: Profile, plan: Plan, steps: Sequence[Step]) -> list[Fact]:
    peaks = (show_nbytes(steps[0].peak), show_nbytes(plan.peak))
    saved = (show_nbytes(profile.saved_nbytes), show_nbytes(plan.held_nbytes))
    seconds = (show_seconds(plan.plain_seconds), show_seconds(plan.seconds))
    gradients = "as in plain training, bit for bit" if plan.exact else "with the noise of codes"
    return [
        Fact("peak", peaks, "the highest memory use, everything counted", _both(profile)),
        Fact("budget", ("", show_nbytes(plan.budget)), "", "given"),
        Fact("held for backward", saved, "all tensors that autograd saves", _both(profile)),
        Fact("time", seconds, f"{100 * plan.slowdown:+.1f} %", "estimated"),
        Fact("gradients", ("", gradients), "", "by construction" if plan.exact else "estimated"),
    ]


def _both(profile: Profile) -> str:
    is_measured = profile.measured and is_plain(profile)
    return "plain measured, plan estimated" if is_measured else "estimated"
