"""Every line that `fit` logs, by the logger "elbowroom"."""

import logging
from typing import TYPE_CHECKING

from elbowroom.fitting.options import FitOptions
from elbowroom.plan.plan import Plan
from elbowroom.plan.presets import Preset
from elbowroom.plan.shares import AddedVariance
from elbowroom.units import budget_argument, show_nbytes, show_percent

if TYPE_CHECKING:
    pass

_log = logging.getLogger("elbowroom")
_UNNOTICED = 0.1  # of mini-batch variance


def say_measured(options: FitOptions, plan: Plan | None, peak_nbytes: int) -> None:
    """Logs the predicted and the measured peak, as a warning if it is above the budget.

    plan: None for a step without one, which has no prediction
    """
    is_over = peak_nbytes > options.budget_nbytes
    _log.log(
        logging.WARNING if is_over else logging.INFO,
        "budget %s: peak %smeasured %s%s",
        show_nbytes(options.budget_nbytes),
        "" if plan is None else f"predicted {show_nbytes(plan.peak)}, ",
        show_nbytes(peak_nbytes),
        is_over * ", above the budget",
    )


def warn_larger_step(options: FitOptions, *, held_nbytes: int, learns: bool) -> None:
    """Warns that a step holds more than was planned: it saves more, or estimates were too low.

    held_nbytes: the most that it has held for backward so far
    """
    _log.warning(
        "budget %s: this step holds %s for backward, more than was planned, and may exceed the "
        "budget; %s",
        *map(show_nbytes, (options.budget_nbytes, held_nbytes)),
        "it is measured, and a new plan is made" if learns else "later steps may exceed it, too",
    )


def warn_not_called(options: FitOptions, steps: int, kind: str, children: list[str]) -> None:
    """Warns that a model is trained of which only submodules have been called.

    steps: so far; kind: the class of the model; children: names of those of its submodules that may
    be fitted
    """
    named = [f"er.fit(model.{name}, ...)" for name in children[:3]] or ["er.fit(submodule, ...)"]
    _log.warning(
        "budget %s: nothing was planned in the first %d steps, and they may exceed the budget. "
        "This %s is trained without a call of the model itself that fit could see: the program "
        "calls its submodules, or a method that does, or calls the model in a function that was "
        "compiled with another backend than inductor. Call model(...), or fit what is called: %s, "
        "each with this budget and optimizer; they share one plan",
        show_nbytes(options.budget_nbytes),
        steps,
        kind,
        ", ".join(named),
    )


def warn_outside(options: FitOptions, peak_nbytes: int, seen_nbytes: int) -> None:
    """Warns that steps stay above the budget, and save most tensors where `fit` sees none."""
    _log.warning(
        "budget %s: steps take %s, and no plan brings them below: fit can only change what is "
        "saved before forward returns, and that is %s. If the model returns a generator, or if "
        "layers run outside of model(...), put er.saving(...) around the loss, too",
        *map(show_nbytes, (options.budget_nbytes, peak_nbytes, seen_nbytes)),
    )


def warn_above(options: FitOptions, peak_nbytes: int, why: str) -> None:
    """Warns that steps stay above the budget; `why` completes "they ..."."""
    _log.warning(
        "budget %s: steps take %s, and later ones will, too: they %s. Give %s, or halve the batch",
        *map(show_nbytes, (options.budget_nbytes, peak_nbytes)),
        why,
        budget_argument(peak_nbytes),
    )


def warn_smallest(options: FitOptions, least_nbytes: int) -> None:
    """Warns that no corrected plan has kept to the budget.

    least_nbytes: the lowest peak that was measured.
    """
    _log.warning(
        "budget %s: no plan has kept to it yet (the lowest measured peak is %s), so fit tries the "
        "smallest plans, one step each; these steps may exceed the budget, too%s",
        *map(show_nbytes, (options.budget_nbytes, least_nbytes)),
        _noisier(options),
    )


def warn_near(options: FitOptions, plan: Plan) -> None:
    """Warns that the smallest plan is measured, which is predicted a little above the budget."""
    _log.warning(
        "budget %s: even the smallest plan needs %s by its estimate, so the smallest plans are "
        "measured, one step each; these steps may exceed the budget%s",
        *map(show_nbytes, (options.budget_nbytes, plan.peak)),
        _noisier(options),
    )


def _noisier(options: FitOptions) -> str:
    """Returns what else a warning about the smallest plans says where nothing limits codes."""
    is_limited = options.exact or options.noise is not None
    return "" if is_limited else ", and their codes may add more noise than those of later steps"


def warn_runs_again(options: FitOptions, *, rounds: bool) -> None:
    """Says that recurrent layers are recomputed, since no plan fits their tensors.

    It warns where that changes bits: where it rounds.
    """
    budget = show_nbytes(options.budget_nbytes)
    if not rounds:
        _log.info(
            "budget %s: no plan fits what the recurrent layers save, so they run forward again in "
            "backward, one layer after the other; no bit changes",
            budget,
        )
        return
    _log.warning(
        "budget %s: no plan fits what the recurrent layers save, so they run forward again in "
        "backward, a few time steps after the other; gradients differ from those of plain training "
        "by rounding alone; exact=True (--exact) forbids this",
        budget,
    )


def say_opens(options: FitOptions) -> None:
    """Says that the program's own checkpoints are opened, since no plan fits beside them."""
    _log.info(
        "budget %s: no plan fits beside what the model's own checkpoints put back in backward, so "
        "plans decide on what is inside of these, too; no bit changes by that alone",
        show_nbytes(options.budget_nbytes),
    )


def warn_uncorrected(options: FitOptions, least_nbytes: int, preset: str, *, refuses: bool) -> None:
    """Warns that no plan has kept to the budget, and that no more plans are made.

    least_nbytes: the lowest peak that was measured.
    refuses: the budget is refused if the preset does not keep to it either
    """
    _log.warning(
        "budget %s: no plan kept to it (the lowest measured peak is %s), so all tensors use the "
        "setting '%s' for one step, which is measured; if it takes more than the budget, too, %s",
        *map(show_nbytes, (options.budget_nbytes, least_nbytes)),
        preset,
        "fit refuses the budget" if refuses else "fit keeps whichever took the least memory",
    )


def warn_given(options: FitOptions, plan: Plan) -> None:
    """Warns that a plan that was given cannot be used."""
    unknown = sum(plan.unknown_sites.values())
    _log.warning(
        "budget %s: the plan that was given %s; another one is made",
        show_nbytes(options.budget_nbytes),
        f"does not know {unknown} of the tensors of this step"
        if unknown
        else f"does not fit (it predicts {show_nbytes(plan.peak)}; the measured step took more)",
    )


def warn_unexpected(options: FitOptions, plan: Plan | None) -> None:
    """Warns of a forward that was not planned: this step may exceed the budget."""
    needs = "more than the budget" if plan is None else show_nbytes(plan.peak)
    _log.warning(
        "budget %s: another forward came before backward (of this model, another fitted one, or a "
        "loss); it was not planned, and this step may need %s. Later steps plan them together",
        show_nbytes(options.budget_nbytes),
        needs,
    )


def warn_unmeasured(options: FitOptions, setting: str) -> None:
    """Warns that later forwards of a step cannot be planned, since no step can be measured here."""
    _log.warning(
        "budget %s: steps run their model, or their loss, more than once before backward, and "
        "cannot be measured (a profiler runs, or this is not the main thread). What later forwards "
        "of a step save gets the setting '%s', and steps may exceed the budget; run the first ones "
        "on the main thread, without a profiler",
        show_nbytes(options.budget_nbytes),
        setting,
    )


def warn_unplanned(options: FitOptions, error: BaseException) -> None:
    """Warns that a step has no plan, because planning raised an error that the step does not."""
    _log.warning(
        "budget %s: this step could not be planned (%s: %s), and follows one setting for all "
        "tensors. The model runs without this error, so it may be a fault of elbowroom: please "
        "report it with the traceback, which the log shows at level DEBUG",
        show_nbytes(options.budget_nbytes),
        type(error).__name__,
        error,
    )
    _log.debug("why the step could not be planned", exc_info=error)


def say_unknown(options: FitOptions, why: str, noise: float | None = None) -> None:
    """Logs that the noise of codes is not known, and how much it may be by the sizes of tensors.

    That is at WARNING above a tenth of that of mini-batches, or if a limit was given.
    """
    is_small = noise is None or noise <= _UNNOTICED
    by_sizes = (
        ""
        if noise is None
        else f". A rough estimate, by the sizes of tensors alone, is {show_percent(noise)} of the "
        "variance that mini-batches add anyway; noise=0.1 keeps it below a tenth of that, or says "
        "which budget that needs"
    )
    _log.log(
        logging.INFO if options.noise is None and is_small else logging.WARNING,
        "budget %s: what codes add to the gradient is not measured, because %s; with a larger "
        "budget or a smaller batch it can be%s",
        show_nbytes(options.budget_nbytes),
        why,
        by_sizes,
    )


def say_noise(options: FitOptions, plan: Plan) -> None:
    """Logs the noise of codes, at WARNING above a tenth of that of mini-batches, or unmeasured."""
    _log.log(
        logging.INFO if plan.watched and plan.noise <= _UNNOTICED else logging.WARNING,
        "budget %s: codes add noise to the gradient, %s of the variance that mini-batches add "
        "anyway (%s)",
        show_nbytes(options.budget_nbytes),
        show_percent(plan.noise),
        f"estimated from {plan.watched} measured steps"
        if plan.watched
        else "predicted, and not measured: the budget leaves no room for that, or the measured "
        "steps did not tell; of the gradient's square, if all batches were the same",
    )


def say_added(options: FitOptions, added: AddedVariance | None) -> None:
    """Logs what the codes of a plan are predicted to add, at WARNING above a tenth."""
    if added is None or not added.of_gradient:
        say_unknown(options, "no gradient was seen to have an error")
        return
    of_batches = added.of_batches
    _log.log(
        logging.INFO if added.share <= _UNNOTICED else logging.WARNING,
        "budget %s: codes add noise to the gradient, predicted from %d step%s: %s of its "
        "square%s. noise=0.1 keeps it below a tenth of what mini-batches add, or says which "
        "budget that needs; exact=True forbids codes",
        show_nbytes(options.budget_nbytes),
        added.steps,
        "s" * (added.steps != 1),
        show_percent(added.of_gradient),
        ""
        if of_batches is None
        else f", {show_percent(of_batches)} of the variance that mini-batches add anyway",
    )


def warn_checked_hooks(options: FitOptions, name: str) -> None:
    """Warns that a step runs without elbowroom, since hooks of the program's may change values."""
    _log.warning(
        "budget %s: the program sets saved-tensor hooks around the model (%s). Whether they change "
        "values is not known yet, so this step runs without elbowroom, and may exceed the budget. "
        "If they give back what they got, elbowroom replaces them from the next step on",
        show_nbytes(options.budget_nbytes),
        name,
    )


def warn_kept_hooks(options: FitOptions, name: str) -> None:
    """Warns that hooks of the program's change values, so that no budget is kept."""
    _log.warning(
        "budget %s: the saved-tensor hooks that the program sets around the model (%s) change "
        "values, so elbowroom leaves to them what the model saves. Gradients are those of plain "
        "training, and elbowroom does nothing to keep to the budget; without these hooks it would",
        show_nbytes(options.budget_nbytes),
        name,
    )


def say_replaced_hooks(options: FitOptions, name: str) -> None:
    """Warns that hooks of the program's, which change no values, get nothing from now on."""
    _log.warning(
        "budget %s: the saved-tensor hooks that the program sets around the model (%s) have given "
        "back what they got, so elbowroom replaces them: no value changes, and they get nothing of "
        "what the model saves",
        show_nbytes(options.budget_nbytes),
        name,
    )


def warn_optimistic(options: FitOptions) -> None:
    """Warns that only an optimistic estimate fits: the first step may exceed the budget."""
    _log.warning(
        "budget %s: the first step of this size fits by an optimistic estimate only, and may "
        "exceed the budget; it is measured, and later steps follow the measurement",
        show_nbytes(options.budget_nbytes),
    )


def warn_blind(options: FitOptions) -> None:
    """Warns that a step cannot be measured."""
    _log.warning(
        "budget %s: this step cannot be measured (a profiler runs, or this is not the main "
        "thread), so its peak is estimated, and may exceed the budget; run the first steps on the "
        "main thread, without a profiler",
        show_nbytes(options.budget_nbytes),
    )


def warn_inside(options: FitOptions, peak_nbytes: int) -> None:
    """Warns that a forward without gradients, within a step, has taken more than the budget."""
    _log.warning(
        "budget %s: a forward without gradients ran between the forward and the backward of a "
        "step, and took %s together with what the step holds; no measured step had one. Evaluate "
        "before forward or after backward, or give at least %s",
        *map(show_nbytes, (options.budget_nbytes, peak_nbytes)),
        budget_argument(peak_nbytes),
    )


def warn_later(options: FitOptions, later_nbytes: int) -> None:
    """Warns that what the program does after the optimizer's step has taken more than the budget.

    That is no part of the step, so no plan is measured against it.
    """
    _log.warning(
        "budget %s: after the optimizer's step, the program took %s together with the model and "
        "its optimizer (an average of weights, metrics, another model); plans make room for the "
        "step alone. Free that before it goes on, or give a budget of at least %s to all of it",
        *map(show_nbytes, (options.budget_nbytes, later_nbytes)),
        budget_argument(later_nbytes),
    )


def say_exhausted(options: FitOptions, less: FitOptions, *, again: bool) -> None:
    """Logs that memory ran out, and the smaller budget of later steps; the first time at WARNING.

    again: it is not the first time.
    """
    _log.log(
        logging.INFO if again else logging.WARNING,
        "there was no memory left within the budget %s; later steps keep to %s",
        show_nbytes(options.budget_nbytes),
        show_nbytes(less.budget_nbytes),
    )


def say_setting(
    options: FitOptions,
    chosen: Preset,
    *,
    rounds: bool,
    was_lossy: bool,
    estimated: bool,
    given: bool = False,
) -> None:
    """Logs the setting of forwards, at WARNING when it becomes lossy for the first time.

    rounds     no code is lossy, but results differ by rounding
    was_lossy  an earlier setting was lossy, too
    estimated  no step was measured yet
    given      the setting is a plan of the user's
    """
    budget = show_nbytes(options.budget_nbytes)
    if chosen.exact or rounds or was_lossy or options.exact is False:
        kind = "exact" if chosen.exact else "exact but for rounding" if rounds else "lossy"
        _log.info("budget %s: saved tensors use the setting '%s' (%s)", budget, chosen.name, kind)
        return
    reason = "exact actions alone do not fit, so"
    reason = "by the plan that was given," if given else "by an estimate, " * estimated + reason
    _log.warning(
        "budget %s: %s some saved tensors are stored in lossy codes, which add noise to gradients "
        "(setting '%s'; how much is logged once steps have shown it); exact=True (--exact) "
        "forbids this",
        budget,
        reason,
        chosen.name,
    )


def say_settings_vary(options: FitOptions) -> None:
    """Logs that the setting of forwards has changed too often to be logged any more."""
    _log.info(
        "budget %s: the setting of saved tensors has changed again; that is not logged any more "
        "(er.summary(model) shows the setting of the last step)",
        show_nbytes(options.budget_nbytes),
    )


def say_states(
    options: FitOptions,
    state: str,
    why: str,
    *,
    nbytes: int,
    before_nbytes: int,
    converted: int,
    warns: bool,
) -> None:
    """Logs the new format of optimizer states.

    converted: the number of parameters whose states were converted; warns: logs at WARNING, because
    the states were exact before.
    """
    _log.log(
        logging.WARNING if warns else logging.INFO,
        "budget %s: optimizer states are stored as '%s' now, in %s instead of %s (%s)%s",
        show_nbytes(options.budget_nbytes),
        state,
        show_nbytes(nbytes),
        show_nbytes(before_nbytes),
        why,
        f"; those of {converted} parameters were converted" if converted else "",
    )


def say_unscripted(why: str) -> None:
    """Logs why a forward has no script, so that the next one is examined in full, too."""
    _log.debug("every forward is examined in full: %s", why or "it held too much")
