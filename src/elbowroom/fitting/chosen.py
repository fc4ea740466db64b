"""A plan together with the format of optimizer states that it was made for, as data."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from elbowroom.plan.plan import Plan
    from elbowroom.plan.profile import Profile


@dataclass(frozen=True)
class Candidate:
    """Profile of the step if all auto states had one format.

    state: the format, "" if none is chosen.
    """

    state: str
    profile: "Profile"
    noise: float = 0.0


@dataclass(frozen=True)
class Chosen:
    """Plan, and the candidate that it was made for."""

    candidate: Candidate
    plan: "Plan"
