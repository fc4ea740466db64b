"""Every line that `fit` logs, by the logger "elbowroom", and every refusal of a budget."""

import logging
from typing import TYPE_CHECKING

from elbowroom.errors import BudgetTooSmall
from elbowroom.fitting.options import FitOptions, MemoryState
from elbowroom.plan.make import LOSSY_HELPS, too_small
from elbowroom.plan.plan import Plan
from elbowroom.plan.presets import LOSSY_PRESETS, Preset, held_nbytes
from elbowroom.units import show_nbytes, show_seconds

if TYPE_CHECKING:
    from elbowroom.fitting.forward import FittedSaving
    from elbowroom.fitting.model_state import ModelState
    from elbowroom.fitting.timings import Timing

_log = logging.getLogger("elbowroom")
_UNNOTICED = 0.1  # of mini-batch variance
MEASURED = "that the best plan of this step takes (measured)"
OFFLOAD_HELPS = "let tensors leave with offload='file'"
_GENEROUS = 12  # so many largest tensors cover the transients of a step that is refused unmeasured
_ROOM = 128  # a refusal's hint is so large a part above what was measured or estimated


def say_measured(options: FitOptions, plan: Plan, peak_nbytes: int) -> None:
    """Logs prediction and measurement; a warning where the step was above the budget."""
    _log.log(
        logging.WARNING if peak_nbytes > options.budget_nbytes else logging.INFO,
        "budget %s: peak predicted %s, measured %s",
        *map(show_nbytes, (options.budget_nbytes, plan.peak, peak_nbytes)),
    )


def warn_larger_step(options: FitOptions, *, learns: bool) -> None:
    """Warns that a step holds more than those that were learned from."""
    _log.warning(
        "budget %s: this step saves more than those before it, and may need more than the budget; "
        "%s",
        show_nbytes(options.budget_nbytes),
        "it is measured, and a new plan is made" if learns else "so may others from now on",
    )


def warn_outside(options: FitOptions, peak_nbytes: int, seen_nbytes: int) -> None:
    """Warns that steps stay above the budget, and save little where `fit` can see it."""
    _log.warning(
        "budget %s: steps take %s, and no plan brings them below: of what they save, %s was saved "
        "before forward returned, which is all that fit can change. A model that returns a "
        "generator, or layers that run outside of model(...), are covered by er.saving(...) around "
        "the loss, too",
        *map(show_nbytes, (options.budget_nbytes, peak_nbytes, seen_nbytes)),
    )


def warn_above(options: FitOptions, peak_nbytes: int, why: str) -> None:
    """Warns that steps stay above the budget. why: what they do, in words."""
    _log.warning(
        "budget %s: steps take %s, and later ones will, too: they %s. Give budget=%d, or halve the "
        "batch",
        *map(show_nbytes, (options.budget_nbytes, peak_nbytes)),
        why,
        peak_nbytes,
    )


def warn_smallest(options: FitOptions, least_nbytes: int) -> None:
    """Warns that no plan keeps to the budget after corrections.

    least_nbytes: the least peak of one.
    """
    _log.warning(
        "budget %s: no plan has kept to it yet (%s was the least measured), so the smallest are "
        "tried, a step each, which may be above it, too",
        *map(show_nbytes, (options.budget_nbytes, least_nbytes)),
    )


def warn_runs_again(options: FitOptions) -> None:
    """Warns that recurrent layers run again, since no plan fits what they save: bits change."""
    _log.warning(
        "budget %s: no plan fits what the recurrent layers save, so they run forward again in "
        "backward, a stretch of time after the other; gradients differ from plain by rounding "
        "alone. exact=True refuses the budget instead",
        show_nbytes(options.budget_nbytes),
    )


def warn_uncorrected(options: FitOptions, least_nbytes: int, preset: str) -> None:
    """Warns that no plan keeps to the budget, however often it is made again.

    least_nbytes: the peak of the best of them.
    """
    _log.warning(
        "budget %s: no plan kept to it (%s was the least measured), so all tensors are at setting "
        "'%s' now; of all that was tried, what took the least is kept",
        *map(show_nbytes, (options.budget_nbytes, least_nbytes)),
        preset,
    )


def warn_given(options: FitOptions, plan: Plan) -> None:
    """Warns that a plan that was given is of no use."""
    unknown = sum(plan.strangers.values())
    _log.warning(
        "budget %s: the plan that was given %s; another one is made",
        show_nbytes(options.budget_nbytes),
        f"does not know {unknown} of the tensors of this step" if unknown else "does not fit",
    )


def warn_unexpected(options: FitOptions, plan: Plan | None) -> None:
    """Warns of a forward that was not planned for: this step may need more than the budget."""
    needs = "more than the budget" if plan is None else show_nbytes(plan.peak)
    _log.warning(
        "budget %s: this step runs its model, or its loss, once more before backward, which was "
        "not planned for, and may need %s; from the next one on all of its forwards are planned "
        "as one",
        show_nbytes(options.budget_nbytes),
        needs,
    )


def say_unknown(options: FitOptions, why: str) -> None:
    """Logs that it is not known what codes add: at WARNING where a limit was asked for."""
    _log.log(
        logging.INFO if options.noise is None else logging.WARNING,
        "budget %s: what codes add to the gradient is not measured, because %s; a larger budget, "
        "or a smaller batch, would show it",
        show_nbytes(options.budget_nbytes),
        why,
    )


def say_noise(options: FitOptions, plan: Plan) -> None:
    """Logs what codes add: at WARNING where that is more than training would not notice."""
    _log.log(
        logging.INFO if plan.noise <= _UNNOTICED else logging.WARNING,
        "budget %s: codes add %.3g %% of what mini-batches vary by anyway (estimated, after %d "
        "watched steps)",
        show_nbytes(options.budget_nbytes),
        100 * plan.noise,
        plan.watched,
    )


def say_faster(options: FitOptions, before: "Timing", best: "Timing") -> None:
    """Logs that another plan is faster than the one that was predicted to be."""
    _log.info(
        "budget %s: settled steps took %s, and by another plan, which stays, %s (both measured)",
        show_nbytes(options.budget_nbytes),
        show_seconds(before.seconds),
        show_seconds(best.seconds),
    )


def warn_optimistic(options: FitOptions) -> None:
    """Say that only an optimistic estimate fits: the first step may be above the budget."""
    _log.warning(
        "budget %s: by a careful estimate the first step of this size does not fit, so it follows "
        "an optimistic one, and may be above the budget; it is measured, and later steps follow "
        "that",
        show_nbytes(options.budget_nbytes),
    )


def warn_blind(options: FitOptions) -> None:
    """Warns that a step cannot be measured."""
    _log.warning(
        "budget %s: this step cannot be measured (a profiler runs, or this is not the main "
        "thread), so its peak is estimated, and may be above the budget; run the first "
        "steps without, and er.fit learns from them",
        show_nbytes(options.budget_nbytes),
    )


def say_exhausted(options: FitOptions, less: FitOptions, *, again: bool) -> None:
    """Logs that memory ran out, and which smaller budget holds: at WARNING the first time."""
    _log.log(
        logging.INFO if again else logging.WARNING,
        "there was no memory left within the budget %s; from now on steps keep to %s",
        show_nbytes(options.budget_nbytes),
        show_nbytes(less.budget_nbytes),
    )


def say_setting(options: FitOptions, chosen: Preset, *, rounds: bool, was_lossy: bool) -> None:
    """Logs the setting that forwards run at.

    At WARNING, which Python shows by default, when it becomes lossy. rounds: though no code is
    lossy, bits differ.
    """
    lossy = "lossy" if options.exact is False else "lossy, because exact actions do not fit"
    kind = "exact" if chosen.exact else "exact but for rounding" if rounds else lossy
    _log.log(
        logging.INFO if chosen.exact or rounds or was_lossy else logging.WARNING,
        "budget %s: saved tensors at setting '%s' (%s)",
        show_nbytes(options.budget_nbytes),
        chosen.name,
        kind,
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
    """Logs the format that optimizer states are held in from now on.

    converted: parameters whose states were; warns: at WARNING, for they were exact before
    """
    _log.log(
        logging.WARNING if warns else logging.INFO,
        "budget %s: optimizer states in '%s' from now on, %s in place of %s (%s)%s",
        show_nbytes(options.budget_nbytes),
        state,
        show_nbytes(nbytes),
        show_nbytes(before_nbytes),
        why,
        f"; those of {converted} parameters were converted" if converted else "",
    )


def say_unscripted(why: str) -> None:
    """Logs why a forward has no script, and so the next one is looked at, too."""
    _log.debug("every forward is looked at: %s", why or "it held too much")


def refusal(
    saving: "FittedSaving",
    options: FitOptions,
    owned: "ModelState",
    memory: MemoryState,
    transient_nbytes: int | None,
) -> BudgetTooSmall:
    """Returns the error for a step that no preset brings inside its budget.

    It says what takes the room.

    transient_nbytes: as measured; None: not yet
    """
    step = saving.storages
    least_preset = min(options.presets, key=lambda preset: held_nbytes(preset, step))
    saved = held_nbytes(least_preset, step)
    lossy_helps = _lossy_helps(saving, saved)
    if saving.impossible:  # so much was held, whatever of it is alive now
        saved = max(saved, saving.ledger.most_nbytes)
    other, kind = transient_nbytes, "measured"
    if other is None:  # a guess must be named generously
        other, kind = memory.unallocated_nbytes + _GENEROUS * saving.largest_nbytes, "estimated"
    least = memory.static_nbytes + saved + other
    if least <= options.budget_nbytes:  # at some moment more was held than at the end, or than by
        saved = saving.ledger.most_nbytes  # this preset from the start: a plan was followed before
        least = max(memory.static_nbytes + saved + other, options.budget_nbytes + 1)
    weight_nbytes = owned.weight_nbytes
    parts = (
        ("weights", weight_nbytes),
        ("gradients and optimizer states", memory.static_nbytes - weight_nbytes),
        ("saved for backward", saved),
        ("transients and what the first step will create", other),
    )
    what = ", ".join(f"{name} {show_nbytes(size)}" for name, size in parts if size)
    helps = LOSSY_HELPS if lossy_helps else ""
    helps = (options.exact and owned.states.lossy_helps()) or helps
    more = f"{helps[0].upper()}{helps[1:]}, or h" if helps else "H"
    return BudgetTooSmall(
        f"budget {show_nbytes(options.budget_nbytes)} is below the {show_nbytes(least)} that this "
        f"step needs at setting '{least_preset.name}' ({kind}): {what}. "
        f"{more}alve the batch, or give budget={least}.",
        least_nbytes=least,
        parts=dict(parts),
    )


def measured_refusal(
    options: FitOptions, owned: "ModelState", memory: MemoryState, plan: Plan, least_nbytes: int
) -> BudgetTooSmall:
    """Returns the error for a budget that no plan has kept to.

    least_nbytes: the peak of a step under `plan`, the best.
    """
    weight_nbytes, saved = owned.weight_nbytes, plan.held_nbytes
    standing = memory.static_nbytes - weight_nbytes
    parts = {
        "weights": weight_nbytes,
        "gradients and optimizer states": standing,
        "saved for backward": saved,
        "transients and gradients of the step": least_nbytes - weight_nbytes - standing - saved,
    }
    ways = [owned.states.lossy_helps() or LOSSY_HELPS] if options.exact else []
    if options.offload is None:
        ways.append(OFFLOAD_HELPS)
    return too_small(options.budget_nbytes, least_nbytes, parts, MEASURED, *ways, "halve the batch")


def add_room(error: BudgetTooSmall, others_nbytes: int = 0) -> None:
    """Increases the budget that a refusal names, so that it holds when it is given.

    A step takes a little more or less than the one before: by what a script keeps of each (metrics,
    say), by its data, by what is rounded where.

    others_nbytes: by so much the graphs of other models may be larger within a larger budget
    """
    room = error.least_nbytes // _ROOM
    least = error.least_nbytes + room + others_nbytes
    hint, roomy = f"give budget={error.least_nbytes}", f"give budget={least}"
    error.args = (str(error).replace(hint, roomy),)
    error.least_nbytes = least
    if error.parts:
        error.parts["what steps vary by"] = room
        if others_nbytes:
            error.parts["what other models may hold more of"] = others_nbytes


def _lossy_helps(saving: "FittedSaving", saved_nbytes: int) -> bool:
    return held_nbytes(LOSSY_PRESETS[-1], saving.storages) < saved_nbytes
