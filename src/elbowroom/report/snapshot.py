"""A memory snapshot of PyTorch as a page: what the device held, and the lines that allocated it."""

import platform

import torch

from elbowroom.measure.snapshot import BACKWARD, BEFORE, ELSE, OPTIMIZER, SAVED, Block, Snapshot
from elbowroom.report.bands import Band
from elbowroom.report.chart import stacked_chart
from elbowroom.report.profile import Fact, StepPage, TensorRow
from elbowroom.units import show_nbytes

_COLORS = {BEFORE: 0, OPTIMIZER: 5, SAVED: 1, BACKWARD: 3, ELSE: 8}
_MAX = 25
_NOTES = (
    "A snapshot has blocks and stacks of Python, but no modules or tensors. A block counts as held "
    "for backward if it was allocated outside of backward, and freed in it.",
    "Line: the innermost line outside of torch. Blocks of one line and kind are counted together. "
    "Blocks from before the beginning of the record have no line.",
    'To find out how to reduce the memory, profile a step: "elbowroom profile train.py".',
)


def snapshot_page(snapshot: Snapshot, name: str) -> StepPage:
    """Returns the page of a snapshot that was read from a file of this name."""
    bands = [Band(kind, nbytes, _COLORS[kind]) for kind, nbytes in snapshot.bands()]
    end_s = snapshot.starts_s[-1]
    unit = "s" if snapshot.is_timed else "event"
    rows = _rows(snapshot.at_peak())
    rest = sum(nbytes for _, _, nbytes, _ in rows[_MAX:])
    parts = snapshot.parts().items()
    return StepPage(
        title=f"{name}: what the GPU held",
        lead=f"{len(snapshot.blocks)} blocks of memory on GPU {snapshot.device}, as the "
        "allocator has written them down.",
        heads=("at the peak", "size", "kind"),
        facts=[
            Fact("peak", (show_nbytes(snapshot.peak),), "all that is allocated"),
            *(
                Fact(f"... {kind}", (show_nbytes(nbytes),), kind="from stacks")
                for kind, nbytes in parts
            ),
        ],
        charts=[stacked_chart(snapshot.starts_s, end_s, snapshot.level, {"kind": bands}, unit)],
        tensors_title="The blocks at the peak, by line",
        peak_heads=("at the peak",),
        ways_title="kind",
        tensors=[
            TensorRow(
                function, line, "", f"{n} blocks" if n > 1 else "1 block", "", "", size, kind_shown
            )
            for (line, function, kind), n, nbytes, _ in rows[:_MAX]
            for size, kind_shown in [((show_nbytes(nbytes),), (kind,))]
        ],
        tensors_note=f"{len(rows) - _MAX} more lines hold {show_nbytes(rest)}." if rest else "",
        chart_note="The line is the level of all that is allocated.",
        notes=_NOTES,
        versions={"torch": str(torch.__version__), "Python": platform.python_version()},
        heading="Memory over the record",
        columns=("function", "line", "", "blocks", "", ""),
    )


def _rows(blocks: list[Block]) -> list[tuple[tuple[str, str, str], int, int, int]]:
    """Lines, functions and kinds, each with its blocks and bytes; the largest first."""
    found: dict[tuple[str, str, str], list[int]] = {}
    for block in blocks:
        key = block.line or "(not known)", block.function, block.kind
        found.setdefault(key, []).append(block.nbytes)
    rows = [(key, len(sizes), sum(sizes), max(sizes)) for key, sizes in found.items()]
    return sorted(rows, key=lambda row: -row[2])
