"""The error of a training's lossy codes as a table: predicted and measured, side by side."""

import io
from dataclasses import dataclass

from elbowroom.measure.noise import NoiseTable
from elbowroom.plan.site import NO_MODULE
from elbowroom.units import show_percent


@dataclass(frozen=True)
class ErrorRow:
    """One op that reads lossy tensors. Variances are sums over the entries of all gradients.

    codecs     of the tensors that it reads, with their bits an element
    predicted  for the last watched step; None: no op of this kind was probed yet
    checked    (predicted, measured) at the step in which this op was probed last, if it was
    """

    module: str
    op: str
    codecs: tuple[tuple[str, float], ...]
    predicted: float | None
    checked: tuple[float | None, float] | None

    @property
    def agreement(self) -> float | None:
        """Ratio of measured to predicted variance, in the same step."""
        if self.checked is None or not self.checked[0]:
            return None
        return self.checked[1] / self.checked[0]


@dataclass(frozen=True)
class ErrorReport:
    """The gradient variance that the codes add.

    added     predicted, all ops; None: some op was not probed yet
    sampling  mini-batch variance, measured over steps; None: not known yet
    steps     that were watched
    """

    rows: tuple[ErrorRow, ...]
    added: float | None
    sampling: float | None
    steps: int

    @classmethod
    def of(cls, table: NoiseTable) -> "ErrorReport":
        rows = []
        for name, op in table.ops.items():
            held = [table.held[source] for source in op.sources if source in table.held]
            codecs = tuple((h.codec.id, 8 * h.nbytes / h.numel) for h in held)
            if op.sources:
                rows.append(ErrorRow(name.module, name.consumer, codecs, op.variance, op.checked))
        return cls(tuple(rows), table.added, table.sampling, table.steps)

    @property
    def ratio(self) -> float | None:
        """Ratio of added to sampling variance, which `noise` bounds."""
        return self.added / self.sampling if self.added is not None and self.sampling else None

    def __str__(self) -> str:
        if not self.rows:
            return (
                "errors: nothing to report yet. A step is watched from its forward to the end of "
                "its backward, and only tensors with lossy codes count.\n"
            )
        from rich.console import Console  # most trainings draw no table
        from rich.table import Table
        from rich.text import Text

        table = Table(title=self._title())
        for name in ("module", "read by", "codec", "bits"):
            table.add_column(name, justify="right" if name == "bits" else "left")
        for name in ("predicted", "at the last probe", "measured there", "measured / predicted"):
            table.add_column(name, justify="right")
        for row in sorted(self.rows, key=lambda row: -(row.predicted or 0.0)):
            codecs = ", ".join(dict.fromkeys(codec for codec, _ in row.codecs))
            bits = ", ".join(dict.fromkeys(f"{bits:.2f}" for _, bits in row.codecs))
            then, measured = row.checked or (None, None)
            shown = (self._show(value) for value in (row.predicted, then, measured))
            agreement = "" if row.agreement is None else f"{row.agreement:.2f}"
            cells = (row.module or NO_MODULE, row.op, codecs, bits, *shown, agreement)
            table.add_row(*(Text(cell) for cell in cells))  # "[mask]" is a name, and no markup
        console = Console(width=140, record=True, file=io.StringIO())
        console.print(table)
        return console.export_text()

    def _title(self) -> str:
        if self.ratio is not None:
            share = f"codes add {show_percent(self.ratio)} of what mini-batches vary by (predicted)"
            return f"errors: {share}; rows in % of it"
        if self.sampling:
            return "errors in % of mini-batch variance; some ops were not probed yet"
        why = "is drowned by them" if self.sampling == 0 else "not known yet"
        return f"errors: variances of the gradient, absolute (mini-batch variance {why})"

    def _show(self, variance: float | None) -> str:
        if variance is None:
            return ""
        return show_percent(variance / self.sampling) if self.sampling else f"{variance:.3g}"
