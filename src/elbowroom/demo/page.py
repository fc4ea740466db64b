"""A comparison as a report page: four figures, both memory curves, and the scale of the network."""

import platform
from collections.abc import Mapping

import torch

from elbowroom.demo.compare import Comparison, Glance
from elbowroom.demo.tasks import FULL_WIDTHS
from elbowroom.measure import MemoryCurve
from elbowroom.report import Curve, Page, ReportRow
from elbowroom.units import show_nbytes, show_seconds

_CHANCE = 1.0  # points; those of eight seeds of the default run scatter by 0.7 (docs/log.md)
NOTES = (
    "All figures were measured on this machine in this run; none is estimated.",
    "Saved bytes: the storages that autograd holds between forward and backward, each once, "
    "without parameters, loss and outputs, but with codes, scales, bitmaps and masks.",
    "Peak bytes: the highest memory use of torch's allocator during one whole step (forward, "
    "backward, optimizer), above that before the step. Parameters and optimizer states are not "
    "included.",
    "Seconds per step: medians of interleaved pairs of steps. The change is the median of the "
    "ratios, with its quartiles.",
)

_CURVES_NOTE = (
    "Measured by torch's profiler, which sees every allocation of the step. Time is shown as a "
    "share of the step, because the profiler slows it down. Dashed lines show where backward and "
    "the optimizer begin."
)


def page(comparison: Comparison, settings: Mapping[str, str]) -> Page:
    """The report of a finished comparison; `settings` are shown as they are."""
    plain, ours = comparison.plain, comparison.ours
    return Page(
        title=f"{comparison.task.name}: one training, plain and through elbowroom",
        lead=f"Trained twice from seed {comparison.seed} for {_steps(comparison.steps)} on "
        f"{comparison.task.origin}. {scaled(comparison)} With one seed, a difference of a point of "
        "accuracy is chance.",
        rows=rows(comparison),
        curves=_curves(plain.curve, ours.curve),
        curves_note=_CURVES_NOTE,
        details={"Stored bytes by action": comparison.ledger},
        settings=settings,
        versions=versions(),
        notes=NOTES,
    )


def first_page(glance: Glance, settings: Mapping[str, str]) -> Page:
    """The report of one step before the training; that of the whole comparison replaces it."""
    plain, ours = glance.plain.peak_nbytes, glance.ours.peak_nbytes
    return Page(
        title=f"{glance.task.name}: one step, plain and through elbowroom",
        lead=f"One step of the untrained network, on {glance.task.origin}. The page of the whole "
        "comparison, with step times and accuracies, replaces this one when both trainings end.",
        rows=_bytes_rows(glance.before_nbytes, glance.after_nbytes, plain, ours),
        curves=_curves(glance.plain, glance.ours),
        curves_note=_CURVES_NOTE,
        details={"Stored bytes by action": glance.ledger},
        settings=settings,
        versions=versions(),
        notes=NOTES[:3],
    )


def first_line(glance: Glance) -> str:
    """Returns a sentence that says what the first page shows."""
    plain, ours = show_nbytes(glance.plain.peak_nbytes), show_nbytes(glance.ours.peak_nbytes)
    return f"One step takes {ours} through elbowroom, and {plain} without."


def _curves(plain: MemoryCurve, ours: MemoryCurve) -> tuple[Curve, Curve]:
    return (
        Curve("plain", plain.times_s, plain.nbytes, plain.marks),
        Curve("elbowroom", ours.times_s, ours.nbytes, ours.marks),
    )


def _bytes_rows(before: int, after: int, plain_peak: int, our_peak: int) -> list[ReportRow]:
    return [
        _bytes_row("saved bytes", before, after, "held before backward"),
        _bytes_row("peak bytes", plain_peak, our_peak, "the highest memory use of the allocator"),
    ]


def rows(comparison: Comparison) -> list[ReportRow]:
    """Saved bytes, peak bytes, seconds and score, plain against ours."""
    plain, ours, timing = comparison.plain, comparison.ours, comparison.timing
    low, high = timing.ratio_iqr
    points = 100 * (ours.score - plain.score)
    return [
        *_bytes_rows(plain.saved_nbytes, ours.saved_nbytes, plain.peak_nbytes, ours.peak_nbytes),
        ReportRow(
            "seconds per step",
            show_seconds(timing.median_a_s),
            show_seconds(timing.median_b_s),
            f"{timing.ratio:.2f}x ({low:.2f} to {high:.2f})",
            good=True if timing.ratio <= 1.05 else None,
            note=f"median of {timing.n} interleaved pairs; quartiles of the ratio",
        ),
        ReportRow(
            comparison.task.score_name,
            f"{plain.score:.1%}",
            f"{ours.score:.1%}",
            f"{points:+.1f} points".replace("-0.0", "+0.0"),
            good=True if points >= -0.5 else None if points >= -_CHANCE else False,
            note="on the whole test set, after training",
        ),
    ]


def _steps(n: int) -> str:
    return "1 step" if n == 1 else f"{n} steps"


def _bytes_row(name: str, plain_nbytes: int, our_nbytes: int, note: str) -> ReportRow:
    less = our_nbytes < plain_nbytes
    ratio = plain_nbytes / our_nbytes if our_nbytes else float("inf")
    verdict = f"{ratio:.1f}x less" if less else f"{1 / ratio:.2f}x" if ratio else ""
    return ReportRow(
        name, show_nbytes(plain_nbytes), show_nbytes(our_nbytes), verdict, good=less, note=note
    )


def scaled(comparison: Comparison) -> str:
    """Returns a sentence that says what is smaller here than in the full model."""
    full = FULL_WIDTHS[comparison.task.name]
    if comparison.task.width >= full:
        return "The network has its full width."
    return (
        f"The network is scaled to width {comparison.task.width} (full: {full}) so that the demo "
        f"fits a few minutes on two cores; --width {full} trains the full one."
    )


def versions() -> dict[str, str]:
    """Versions of everything that can change a figure on this page."""
    return {
        "torch": str(torch.__version__),
        "Python": platform.python_version(),
        "machine": f"{platform.machine()}, threads: {torch.get_num_threads()}",
        "system": platform.platform(terse=True),
    }
