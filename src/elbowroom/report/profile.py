"""A profile as a page: where the memory of one step went, and what could be done about it."""

import platform
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from rich.table import Table
from rich.text import Text

from elbowroom.plan.profile import Profile
from elbowroom.plan.savings_report import Prospect, Way, prospects
from elbowroom.report.bands import Band, bands
from elbowroom.units import show_nbytes, show_seconds

MOST_TENSORS = 25
_CHART_NOTE = (
    "Each colour is what one module has saved for backward, from forward to its last use. The line "
    "is the allocator's level; times carry the cost of measuring."
)
_NOTES = (
    "Size: bytes of the whole storage that autograd holds between forward and backward. Parameters "
    "are not counted there; one storage that several ops save is listed once, with the first of "
    "them.",
    '"What could be done" is estimated, tensor by tensor, without a budget: "elbowroom plan" '
    "weighs them against each other. Exact means that no bit of any gradient changes.",
    "Held before the step: weights, buffers, gradients that are kept, optimizer states. Data that "
    "the script holds itself is not counted on a CPU.",
    "The level between the last use of what was saved and the next forward may contain whatever "
    "else the script does then, evaluation for one.",
)


@dataclass(frozen=True)
class Fact:
    """One figure of the step."""

    name: str
    value: str
    note: str = ""
    kind: str = "measured"


@dataclass(frozen=True)
class Key:
    """A band in the legend."""

    name: str
    colour: int
    most: str


@dataclass(frozen=True)
class TensorRow:
    """A saved tensor. ways: what could be done, a line each."""

    module: str
    op: str
    shape: str
    dtype: str
    size: str
    ways: tuple[str, ...]


@dataclass(frozen=True)
class StepPage:
    """Everything that the page of a profile shows, but for the chart."""

    title: str
    lead: str
    facts: Sequence[Fact]
    bands: Sequence[Key]
    tensors: Sequence[TensorRow]
    tensors_note: str
    versions: dict[str, str]
    chart_note: str = _CHART_NOTE
    notes: Sequence[str] = _NOTES


def step_page(profile: Profile, model: str, remark: str = "") -> StepPage:
    """The page of one step of `model`."""
    found = prospects(profile)
    shown = found[:MOST_TENSORS]
    rest = sum(one.storage.nbytes for one in found[MOST_TENSORS:])
    device, name = profile.device
    return StepPage(
        title=f"{model}: where the memory of one step went",
        lead=f"One plain training step on {name or f'the {device.upper()}'}, from one forward to "
        f"the next. {remark}",
        facts=_facts(profile, found),
        bands=[_key(band) for band in bands(profile) if band.most_nbytes],
        tensors=[tensor_row(one) for one in shown],
        tensors_note=f"{len(found) - len(shown)} more hold {show_nbytes(rest)}." if rest else "",
        versions={
            "torch": str(torch.__version__),
            "Python": platform.python_version(),
            "machine": f"{platform.machine()}, {torch.get_num_threads()} threads",
            "system": platform.platform(terse=True),
        },
    )


def profile_table(profile: Profile, most: int = 10) -> Table:
    """The largest saved tensors, for the terminal."""
    table = Table("module", "op", "shape")
    table.add_column("size", justify="right")
    table.add_column("what could be done", overflow="fold")
    for one in prospects(profile)[:most]:
        row = tensor_row(one)
        cells = (row.module, row.op, row.shape, row.size, "; ".join(row.ways))
        table.add_row(*(Text(cell) for cell in cells))
    return table


def tensor_row(one: Prospect) -> TensorRow:
    """A line of the table."""
    site = one.storage.saves[0].site
    return TensorRow(
        module=site.module or "(outermost)",
        op=site.consumer,
        shape=" x ".join(map(str, site.shape)) or "scalar",
        dtype=str(site.dtype).removeprefix("torch."),
        size=show_nbytes(one.storage.nbytes),
        ways=tuple(_told(way) for way in one.ways) or (f"nothing: {one.why}",),
    )


def _told(way: Way) -> str:
    kind = "exact" if way.exact else "lossy"
    return f"{way.action}: {show_nbytes(way.held)} ({kind})"


def _facts(profile: Profile, found: Sequence[Prospect]) -> list[Fact]:
    exact = sum(
        min([way.held for way in one.ways if way.exact and not way.action.startswith("recompute")]
            or [one.storage.nbytes])
        for one in found
    )  # fmt: skip
    return [
        Fact("peak", show_nbytes(profile.peak), "the highest level, all counted"),
        Fact("held before the step", show_nbytes(profile.static), "weights, optimizer states"),
        Fact(
            "saved for backward",
            show_nbytes(profile.saved_nbytes),
            f"{len(profile.storages)} tensors, in plain autograd",
        ),
        Fact(
            "... held exactly instead",
            show_nbytes(exact),
            "every exact way but recompute taken",
            "estimated",
        ),
        Fact("seconds", show_seconds(profile.seconds), "with the cost of measuring"),
    ]


def _key(band: Band) -> Key:
    return Key(band.name, band.colour, show_nbytes(band.most_nbytes))
