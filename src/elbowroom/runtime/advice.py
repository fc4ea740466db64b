"""A context that changed nothing says so, with the reasons that took most bytes."""

import warnings

from elbowroom.plan import Exact, KeepAll, Policy
from elbowroom.runtime.ledger import Ledger
from elbowroom.units import show_nbytes

_WORTH_A_WORD = 1 << 20  # below, there was nothing to gain
_MOST_REASONS = 3


def warn_if_useless(ledger: Ledger, policy: Policy, stacklevel: int) -> None:
    """Warn if 1 MiB or more was saved, all of it was kept, and the policy wanted otherwise."""
    before = ledger.before_nbytes
    if (
        before < _WORTH_A_WORD
        or isinstance(policy, KeepAll)
        or set(ledger.totals("action")) - {""} != {"keep"}
    ):
        return
    reasons = sorted(ledger.totals("why").items(), key=lambda item: -item[1][0])
    told = "; ".join(f"{show_nbytes(size)}: {why}" for why, (size, _) in reasons[:_MOST_REASONS])
    remedy = (
        "A lossy codec may help: er.saving('dither', bits=8)."
        if isinstance(policy, Exact)
        else "saved.ledger lists each."
    )
    warnings.warn(
        f"this saving context changed nothing of the {show_nbytes(before)} that autograd saved "
        f"in it ({told}). {remedy}",
        stacklevel=stacklevel,
    )
