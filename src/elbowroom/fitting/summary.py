"""What became of a budget, in a few figures: for the end of a training."""

from dataclasses import asdict, dataclass
from typing import Any

from elbowroom.fitting.session import Fitting
from elbowroom.plan.make import plain_peak
from elbowroom.plan.plan import Line


@dataclass(frozen=True)
class Summary:
    """Of one fitted model.

    plain_nbytes      the peak of plain autograd: estimated; None where no step was written down
    predicted_nbytes  the peak under the plan: estimated; None without one
    last_nbytes       the peak of the last step that was measured; None where none was
    last_setting      what that step ran at: "plan", or a rung of the ladder
    highest_nbytes    of all measured steps
    setting           what steps run at now
    slowdown          of the plan over plain autograd, estimated
    noise             variance that its codes add to the gradient, as a share of that of
                      mini-batches; 0 if it is exact; None where that was not measured
    exact             no bit of any gradient has changed
    steps             forwards that recorded gradients
    lines             what the plan does, where it does something
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
    lines: tuple[Line, ...]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def summary(fitting: Fitting, model: str) -> Summary:
    """Of a model by this name; before or after its fitting was closed."""
    planning = fitting.planning
    plan, profile = planning.plan, planning.profile
    # A rehearsed profile has an invented backward: no ground for a claim about plain autograd.
    known = profile is not None and not planning.state.rehearsed
    plain = plain_peak(profile) if profile is not None and known else None
    if plan is not None and planning.state.follows_given:  # it was made from a step elsewhere
        plain, known = plan.plain_peak, True
    return Summary(
        model=model,
        device=fitting.owned.device.type,
        budget_nbytes=fitting.terms.budget_nbytes,
        plain_nbytes=plain,
        predicted_nbytes=None if plan is None else plan.peak,
        last_nbytes=fitting.peak_nbytes,
        last_setting=fitting.peak_setting,
        highest_nbytes=fitting.highest_nbytes,
        setting=planning.setting,
        slowdown=plan.slowdown if plan is not None and known else None,
        noise=plan.noise if plan is not None and (plan.watched or not plan.is_lossy) else None,
        exact=fitting.was_exact,
        steps=fitting.context.step,
        lines=() if plan is None else tuple(one for one in plan.lines if one.action != "keep"),
    )
