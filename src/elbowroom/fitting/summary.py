"""Summary of a fitted model in a few figures: at any time, or after training."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from elbowroom.compiled import Decision
from elbowroom.fitting.model_state import ModelState
from elbowroom.fitting.options import FitOptions
from elbowroom.fitting.session import Fitting
from elbowroom.fitting.steps import HOOKS
from elbowroom.plan.make import plain_peak
from elbowroom.plan.plan import ExplainedLine
from elbowroom.plan.site import NO_MODULE
from elbowroom.runtime.compiler import ran_eagerly
from elbowroom.units import show_nbytes, show_percent

SummaryRow = tuple[str, str, str, str]  # name, measured, estimated, remark


@dataclass(frozen=True)
class Summary:
    """Figures of one fitted model; `print` shows them as a table.

    plain_nbytes      the peak of plain autograd: estimated; None where nothing is known of it
    plain_is_rough    by its forward alone: no step was profiled
    plain_is_low      torch composes an attention of smaller ops, as with dropout on a CPU, and
                      these save more than the profiled step did
    predicted_nbytes  the peak under the plan: estimated; None without one
    last_nbytes       the peak of the last step that was measured; None where none was
    last_setting      the setting of that step: "plan", or a preset of the ladder
    highest_nbytes    the highest peak of all measured steps
    setting           the current setting of steps; "hooks": the program's own saved-tensor hooks
                      hold what it saves, and elbowroom does nothing
    slowdown          of the plan over plain autograd, estimated
    noise             variance that its codes add to the gradient, as a share of that of
                      mini-batches; 0 if it is exact; None where that was not measured, and no limit
                      is given; inside torch.compile it is estimated from sizes
    predicts_noise    that was not measured: it is predicted
    substitution      which codes take the place of those that codecs= names; "" if none does
    exact             no bit of any gradient has changed
    exact_now         the current setting changes none, even if codes of earlier steps did
    rows_wait         large gathered rows, as messages of graph networks, are computed as they are
                      read; then nothing is known of plain autograd
    may_round         inside torch.compile, sums may run in another order than in its plain code
    steps             forwards that recorded gradients
    lines             what the plan does, where it does something
    trained           False where "elbowroom run" saw forwards alone: no backward, and no update
    """

    model: str
    device: str
    budget_nbytes: int
    plain_nbytes: int | None
    predicted_nbytes: int | None
    last_nbytes: int | None
    last_setting: str
    highest_nbytes: int | None
    setting: str
    slowdown: float | None
    noise: float | None
    exact: bool
    steps: int
    lines: tuple[ExplainedLine, ...]
    trained: bool = True
    predicts_noise: bool = False
    substitution: str = ""
    exact_now: bool = False
    rows_wait: bool = False
    plain_is_rough: bool = False
    plain_is_low: bool = False
    may_round: bool = False

    def __str__(self) -> str:
        """Returns a table, one row a figure."""
        title = f"{self.model} inside {show_nbytes(self.budget_nbytes)}"
        rows = [("one step", "measured", "estimated", ""), *self.rows()]
        wide = [max(len(row[i]) for row in rows) for i in range(3)]
        lines = (
            f"{name:<{wide[0]}}  {measured:>{wide[1]}}  {estimated:>{wide[2]}}  {remark}".rstrip()
            for name, measured, estimated, remark in rows
        )
        return "\n".join((title, *lines))

    def rows(self) -> list[SummaryRow]:
        """Returns the known figures, each in the column "measured" or "estimated"."""
        why = "gathered rows are computed as they are read" if self.rows_wait else ""
        low = "at least: PyTorch's own attention saves more" * self.plain_is_low
        rough = "by its forward alone" * self.plain_is_rough
        remark = "; ".join(filter(None, (low, rough)))
        remark = remark if self.plain_nbytes else f"not known: {why or 'no step was profiled'}"
        keeps = self.setting == self.last_setting == "keep"
        # A step that keeps all tensors may take less: PyTorch's own ops may need more memory.
        is_plain = bool(keeps and self.plain_nbytes and self.last_nbytes == self.plain_nbytes)
        size = _size(self.plain_nbytes)
        rows = [
            ("peak, plain", size if is_plain else "", "" if is_plain else size, remark),
            ("peak, planned", "", _size(self.predicted_nbytes), _setting(self)),
            ("peak", _size(self.last_nbytes), "", _verdict(self)),
        ]
        if not self.plain_nbytes and self.setting == "keep" and not self.rows_wait:
            del rows[0]
        if self.highest_nbytes != self.last_nbytes:
            over = _over(self.highest_nbytes, self.budget_nbytes)
            rows.append(
                ("highest peak", _size(self.highest_nbytes), "", f"of all measured steps; {over}")
            )
        if self.slowdown is not None:
            rows.append(("time", "", f"{100 * self.slowdown:+.1f} %", "over plain autograd"))
        gradients = "no bit of a gradient changed" if self.exact else "codes add noise to gradients"
        if self.exact_now and not self.exact:
            gradients = "codes added noise to gradients of earlier steps; steps are exact by now"
        if self.exact and self.setting == "compiled":
            gradients += " against plain torch.compile"
        if self.exact and self.may_round:
            gradients = "gradients may differ from plain torch.compile by a rounding"
        if self.exact and ran_eagerly():  # compiled kernels round differently
            gradients += " against eager PyTorch; compiled code ran eagerly, and gives other bits"
        rows.append(("exact" if self.exact else "lossy", "", "", gradients))
        if self.noise:
            remark = "of what mini-batches vary by"
            remark += "; predicted, not measured" if self.predicts_noise else ""
            rows.append(("noise", "", show_percent(self.noise), remark))
        if self.substitution:
            rows.append(("codes", "", "", self.substitution))
        by_action: dict[str, list[ExplainedLine]] = {}
        for line in self.lines:
            by_action.setdefault(line.action, []).append(line)
        for action, lines in by_action.items():
            before, after = sum(line.nbytes for line in lines), sum(line.held for line in lines)
            what = f"{show_nbytes(before)} -> {show_nbytes(after)}"
            rows.append((f"  {action}", "", what, _places(lines)))
        return rows

    def as_dict(self) -> dict[str, Any]:
        """Returns the figures as a dict, for JSON."""
        return asdict(self)


def summary(fitting: Fitting, model: str, *, of_last: bool = False) -> Summary:
    """Returns the summary of a model of this name, before or after its fitting was closed.

    Its plan is that of the largest forwards: the last batch of an epoch may have few samples. Of a
    model that ran in the steps of another one alone, it is the summary of these steps.

    of_last: the plan is that of the last forward
    """
    host = fitting.host if fitting.is_guest else None
    steps = fitting if host is None else host
    planner = steps.planner if of_last else steps.planner_of_largest()
    plan, profile = planner.plan, planner.profile
    # The backward of a rehearsed profile is an estimate, which supports no claim about time.
    rough = planner.state.from_rehearsal
    rows_wait = steps.context.rows_wait and bool(steps.context.waited_in)
    known = profile is not None and not (rough or rows_wait)
    plain = None if profile is None or rows_wait else plain_peak(profile)
    if plan is not None and planner.state.follows_given:  # it was made from a step of another run
        plain, known, rough = plan.plain_peak, True, False
    watched = planner.state.watched
    predicts = plan is not None and plan.is_lossy and (watched.predicts or watched.added)
    tells_noise = plan is not None and (plan.watched > 0 or predicts or not plan.is_lossy)
    noise = plan.noise if plan is not None and tells_noise else None
    return Summary(
        model=model,
        device=steps.model_state.device.type,
        budget_nbytes=steps.options.budget_nbytes,
        plain_nbytes=plain,
        predicted_nbytes=None if plan is None else plan.peak,
        last_nbytes=steps.peak_nbytes,
        last_setting=steps.peak_setting,
        highest_nbytes=steps.highest_nbytes,
        setting=HOOKS if steps.setting == HOOKS else planner.setting,
        slowdown=plan.slowdown if plan is not None and known else None,
        noise=noise if watched.added is None else watched.added.share,
        exact=steps.was_exact,
        steps=steps.context.step,
        lines=() if plan is None else tuple(one for one in plan.lines if one.action != "keep"),
        predicts_noise=bool(predicts),
        substitution="" if plan is None else plan.substitution,
        exact_now=steps.is_exact,
        rows_wait=rows_wait,
        plain_is_rough=rough and plain is not None,
        plain_is_low=any(one is not None and one.composes_attention for one in (plan, profile)),
    )


def _size(nbytes: int | None) -> str:
    return "" if nbytes is None else show_nbytes(nbytes)


def _setting(figures: Summary) -> str:
    if figures.setting == "plan":
        return _is_pessimistic(figures) * "the estimate is too high: the step was measured"
    if figures.setting == HOOKS:
        return "the script's own saved-tensor hooks hold what it saves"
    if figures.setting == "compiled":
        cached = figures.predicted_nbytes is None
        return "compiled; planned at an earlier start" if cached else "planned inside torch.compile"
    if figures.setting == "keep":
        return "nothing more needs to be done" if figures.rows_wait else "nothing needs to be done"
    return f"no plan: '{figures.setting}'"


def _is_pessimistic(figures: Summary) -> bool:
    """Returns whether the plan is above the budget by its estimate alone."""
    predicted, last, budget = figures.predicted_nbytes, figures.last_nbytes, figures.budget_nbytes
    followed = figures.last_setting == "plan"
    return followed and predicted is not None and last is not None and last <= budget < predicted


def _verdict(figures: Summary) -> str:
    if figures.setting == "compiled":
        return "not measured: estimated from its graphs"
    if figures.last_nbytes is None:
        return f"not measured: {figures.steps} step{'s' * (figures.steps != 1)}"
    before = (
        ""
        if figures.last_setting == figures.setting
        else f", under the earlier setting '{figures.last_setting}'"
    )
    return _over(figures.last_nbytes, figures.budget_nbytes) + before


def _over(nbytes: int | None, budget_nbytes: int) -> str:
    over = (nbytes or 0) - budget_nbytes
    return f"{show_nbytes(over)} over the budget" if over > 0 else "within the budget"


def _places(lines: list[ExplainedLine], most: int = 3, columns: int = 64) -> str:
    """Names the modules of the largest tensors: one, and more of them in so many columns."""
    largest = sorted(lines, key=lambda line: -line.nbytes)
    names = list(dict.fromkeys(line.module or NO_MODULE for line in largest))
    shown = names[:most]
    while len(shown) > 1 and len(", ".join(shown)) > columns:
        shown.pop()
    more = f" and {len(names) - len(shown)} more" if len(names) > len(shown) else ""
    return ", ".join(shown) + more


def summary_of_regions(
    model: str,
    model_state: ModelState,
    options: FitOptions,
    resident_nbytes: int,
    regions: Sequence[Decision],
    steps: int,
) -> Summary:
    """Returns the summary of a compiled model, from the decisions for its regions."""
    plain = max((one.plain_nbytes for one in regions), default=None)
    peak = max((one.peak_nbytes for one in regions), default=None)
    return Summary(
        model=model,
        device=model_state.device.type,
        budget_nbytes=options.budget_nbytes,
        plain_nbytes=None if plain is None else resident_nbytes + plain,
        predicted_nbytes=None if peak is None else resident_nbytes + peak,
        last_nbytes=None,
        last_setting="compiled",
        highest_nbytes=None,
        setting="compiled",
        slowdown=None,
        noise=_noise(regions),
        exact=not any(one.is_lossy for one in regions),
        may_round=any(one.is_uncertain for one in regions),
        steps=steps,
        lines=(),
    )


def _noise(regions: Sequence[Decision]) -> float | None:
    """Returns the variance that codes of all regions add, weighted by the bytes each would hold."""
    whole = sum(one.plain_saved_nbytes for one in regions)
    if not whole:
        return None
    return sum(one.noise * one.plain_saved_nbytes for one in regions) / whole
