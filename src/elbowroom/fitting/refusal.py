"""The error for a step that no rung of the ladder brings inside its budget: what takes the room."""

from elbowroom.errors import BudgetTooSmall
from elbowroom.fitting.forward import FittedSaving
from elbowroom.fitting.model_state import ModelState
from elbowroom.fitting.options import FitOptions, MemoryState
from elbowroom.plan.ladder import LOSSY_RUNGS, held_nbytes
from elbowroom.plan.make import LOSSY_HELPS, too_small
from elbowroom.plan.plan import Plan
from elbowroom.units import show_nbytes

MEASURED = "that the best plan of this step takes (measured)"
OFFLOAD_HELPS = "let tensors leave with offload='file'"
_GENEROUS = 12  # so many largest tensors cover the transients of a step that is refused unmeasured


def refusal(
    saving: FittedSaving,
    terms: FitOptions,
    owned: ModelState,
    stock: MemoryState,
    transient_nbytes: int | None,
) -> BudgetTooSmall:
    """transient_nbytes: as measured; None: not yet."""
    step = saving.storages
    least_rung = min(terms.rungs, key=lambda rung: held_nbytes(rung, step))
    saved = held_nbytes(least_rung, step)
    other, kind = transient_nbytes, "measured"
    if other is None:  # a guess must be named generously
        other, kind = stock.unborn_nbytes + _GENEROUS * saving.largest_nbytes, "estimated"
    least = stock.static_nbytes + saved + other
    weight_nbytes = owned.weight_nbytes
    parts = (
        ("weights", weight_nbytes),
        ("gradients and optimizer states", stock.static_nbytes - weight_nbytes),
        ("saved for backward", saved),
        ("transients and what the first step will create", other),
    )
    what = ", ".join(f"{name} {show_nbytes(size)}" for name, size in parts if size)
    helps = LOSSY_HELPS if _lossy_helps(saving, saved) else ""
    helps = (terms.exact and owned.states.lossy_helps()) or helps
    more = f"{helps[0].upper()}{helps[1:]}, or h" if helps else "H"
    return BudgetTooSmall(
        f"budget {show_nbytes(terms.budget_nbytes)} is below the {show_nbytes(least)} that this "
        f"step needs at rung '{least_rung.name}' ({kind}): {what}. "
        f"{more}alve the batch, or give budget={least}.",
        least_nbytes=least,
        parts=dict(parts),
    )


def measured_refusal(
    terms: FitOptions, owned: ModelState, stock: MemoryState, plan: Plan, least_nbytes: int
) -> BudgetTooSmall:
    """No plan has kept to the budget. least_nbytes: what a step under `plan`, the best, took."""
    weight_nbytes, saved = owned.weight_nbytes, plan.held_nbytes
    standing = stock.static_nbytes - weight_nbytes
    parts = {
        "weights": weight_nbytes,
        "gradients and optimizer states": standing,
        "saved for backward": saved,
        "transients and gradients of the step": least_nbytes - weight_nbytes - standing - saved,
    }
    ways = [owned.states.lossy_helps() or LOSSY_HELPS] if terms.exact else []
    if terms.offload is None:
        ways.append(OFFLOAD_HELPS)
    return too_small(terms.budget_nbytes, least_nbytes, parts, MEASURED, *ways, "halve the batch")


def _lossy_helps(saving: FittedSaving, saved_nbytes: int) -> bool:
    return held_nbytes(LOSSY_RUNGS[-1], saving.storages) < saved_nbytes
