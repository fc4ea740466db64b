"""Every refusal of a budget by `fit`: what takes the memory, the least budget, and what helps."""

from collections.abc import Collection
from typing import TYPE_CHECKING

import torch
from torch.optim import Optimizer

from elbowroom.errors import BudgetTooSmall
from elbowroom.fitting.options import FitOptions, MemoryState
from elbowroom.measure.resident_bytes import knows_states_of
from elbowroom.plan.make import MORE_NOISE, too_small
from elbowroom.plan.plan import Plan
from elbowroom.plan.presets import LOSSY_PRESETS, held_nbytes
from elbowroom.units import budget_argument, show_nbytes

if TYPE_CHECKING:
    from elbowroom.fitting.forward import FittedSaving
    from elbowroom.fitting.model_state import ModelState

OFFLOAD_HELPS = "move tensors to a file with offload='file'"
LAYERS_HELP = "let recurrent layers run again in parts, which rounds otherwise, with exact=None"
# Transients of a step that is refused before it is measured, in multiples of its largest tensor.
_GENEROUS = 12
_CARE = 1.25  # times the gradients that the graph tells of
_RESTORED = 2  # of its largest tensors beside these: restored ones, workspaces, the loss
_LITTLE = 0.01  # of a peak: what is saved for backward is not worth moving
_NO_STATES = (
    " No optimizer is known yet, whose states take more from the second step on: give it to fit."
)
_OTHERS = " Other fitted models are not counted, although they may run in the same step."
_ROOM = 128  # a refusal names a budget that is larger than the measured or estimated peak by 1/128


def refusal(
    saving: "FittedSaving",
    options: FitOptions,
    model_state: "ModelState",
    memory: MemoryState,
    transient_nbytes: int | None,
    gradient_nbytes: int = 0,
    *,
    estimated: bool = False,
    exactly: bool = False,
) -> BudgetTooSmall:
    """Returns the error for a step that fits its budget at no preset, with what takes the memory.

    transient_nbytes  bytes of transients, measured or as planned; None: not known yet
    estimated  they were planned by a forward alone
    exactly    what exact actions take is named, since nothing tells what codes gain
    gradient_nbytes   of gradients that steps like this one have begun with, and this one has not:
                      of micro-batches that are added up it is the first, and transients were
                      measured in a later one, which made none
    """
    step = saving.storages
    presets = [one for one in options.presets if one.exact or not exactly]
    least_preset = min(presets, key=lambda preset: held_nbytes(preset, step))
    saved = held_nbytes(least_preset, step)
    lossy_helps = _lossy_helps(saving, saved)
    if saving.impossible:  # bytes that were held, whether or not they are alive now
        saved = max(saved, saving.ledger.max_nbytes)
    other, kind = transient_nbytes, "estimated" if estimated else "measured"
    if other is None:  # an estimate, and rather too large than too small
        transients = _GENEROUS * saving.largest_nbytes
        if saving.gradients_nbytes:
            known = int(_CARE * saving.gradients_nbytes) + _RESTORED * saving.largest_nbytes
            transients = min(transients, known)
        other, kind = memory.unallocated_nbytes + transients, "estimated"
    resident = memory.static_nbytes + gradient_nbytes
    least = resident + saved + other
    # More was held at some moment than at the end, or than at this preset from the start, because a
    # plan was followed before.
    if least <= options.budget_nbytes:
        saved = saving.ledger.max_nbytes
        least = max(resident + saved + other, options.budget_nbytes + 1)
    weight_nbytes = model_state.weight_nbytes
    parts = (
        ("weights", weight_nbytes),
        ("gradients and optimizer states", resident - weight_nbytes),
        ("saved for backward", saved),
        ("transients and what the first step will create", other),
    )
    what = ", ".join(f"{name} {show_nbytes(size)}" for name, size in parts if size)
    helps = options.lossy_helps if lossy_helps else ""
    helps = (options.exact and model_state.states.lossy_helps()) or helps
    more = f"{helps[0].upper()}{helps[1:]}, or h" if helps else "H"
    return BudgetTooSmall(
        f"budget {show_nbytes(options.budget_nbytes)} is below the {show_nbytes(least)} that this "
        f"step needs at setting '{least_preset.name}' ({kind}): {what}. "
        f"{more}alve the batch, or give {budget_argument(least)}.",
        least_nbytes=least,
        parts=dict(parts),
    )


def measured_refusal(
    options: FitOptions,
    model_state: "ModelState",
    memory: MemoryState,
    plan: Plan,
    least_nbytes: int,
    lossy_helps: str,
) -> BudgetTooSmall:
    """Returns the error for a budget that no plan has kept to.

    least_nbytes: the measured peak under `plan`, which took the least memory
    lossy_helps: what to allow in place of exact=True; "" if that does not help

    Where models share a step, the plan holds the tensors of one forward when those of another have
    gone, and gradients go between two updates: no part is more than the peak leaves for it.
    """
    weight_nbytes = model_state.weight_nbytes
    resident = min(memory.static_nbytes, least_nbytes) - weight_nbytes
    saved = min(plan.held_nbytes, least_nbytes - weight_nbytes - resident)
    parts = {
        "weights": weight_nbytes,
        "gradients and optimizer states": resident,
        "saved for backward": saved,
        "transients and gradients of the step": least_nbytes - weight_nbytes - resident - saved,
    }
    ways = [lossy_helps] if lossy_helps else []
    if options.offload is None and saved > _LITTLE * least_nbytes:
        ways.append(OFFLOAD_HELPS)
    within = ""
    if not plan.exact and options.noise is not None:
        within = f" with noise={options.noise:g}"
        ways.insert(0, MORE_NOISE)
    least_is = f"that the best plan of this step takes{within} (measured)"
    return too_small(options.budget_nbytes, least_nbytes, parts, least_is, *ways, "halve the batch")


def without_frames(error: BudgetTooSmall) -> BudgetTooSmall:
    """Returns a refusal that is held for later, without the frames that it came through.

    They refer to what holds it, and to the tensors of the step: a cycle, which would keep these
    until the next run of the garbage collector, as memory of the steps that are measured meanwhile.
    """
    return error.with_traceback(None)


def add_room(
    error: BudgetTooSmall,
    others_nbytes: int = 0,
    other_kinds_nbytes: int = 0,
    taken_nbytes: int = 0,
) -> None:
    """Increases the budget that a refusal names, so that steps keep to it when it is given.

    Peaks vary a little from step to step: a training script may keep metrics, and data differ.

    others_nbytes: additional bytes that graphs of other models may take within a larger budget
    other_kinds_nbytes: the least that steps of other shapes were measured to take
    taken_nbytes: the least that a step of this shape was measured to take
    """
    own_nbytes = error.least_nbytes
    more = max(other_kinds_nbytes - own_nbytes, taken_nbytes - own_nbytes, 0)
    room = (own_nbytes + more) // _ROOM
    least = own_nbytes + more + room + others_nbytes
    hint, roomy = map(budget_argument, (error.least_nbytes, least))
    said = str(error).replace(hint, roomy)
    is_of_others = other_kinds_nbytes >= taken_nbytes
    if more and is_of_others:
        said += f" Steps of other shapes need {show_nbytes(other_kinds_nbytes)}."
    elif more:
        said += f" The least that was measured is {show_nbytes(taken_nbytes)}."
    error.args = (said,)
    error.least_nbytes = least
    if error.parts:
        error.parts["variation between steps"] = room
        if more:
            whose = "steps of other shapes" if is_of_others else "what a step was measured to take"
            error.parts[f"more for {whose}"] = more
        if others_nbytes:
            error.parts["more memory of other models"] = others_nbytes


def add_co_resident(error: BudgetTooSmall, co_resident_nbytes: int) -> None:
    """Says in a refusal how much of the least budget stands beside the model that is refused."""
    if co_resident_nbytes > error.least_nbytes // _ROOM:
        taken = show_nbytes(co_resident_nbytes)
        error.args = (
            f"{error} {taken} of it are graphs that wait for their backward, and other fitted "
            "models; call er.release(model) for one that is not trained any more.",
        )


def say_unknown(
    error: BudgetTooSmall, optimizers: Collection[Optimizer], *, may_share: bool
) -> None:
    """Says in the refusal of a first step what it cannot know of later ones.

    may_share: other fitted models may run in it
    """
    said = "" if optimizers else _NO_STATES
    for one in optimizers:
        name = type(one).__name__
        if isinstance(one, torch.optim.LBFGS):
            pairs = one.param_groups[0]["history_size"]
            said += f" The history of {name} counts as full ({pairs} pairs)."
        elif not (one.state or knows_states_of(one)):
            said += f" States of {name}, which do not exist yet, count as two of each parameter."
    if may_share:
        said += _OTHERS
    if said:
        error.args = (f"{error}{said}",)


def _lossy_helps(saving: "FittedSaving", saved_nbytes: int) -> bool:
    return held_nbytes(LOSSY_PRESETS[-1], saving.storages) < saved_nbytes
