"""A plan and the format of optimizer states that it was made for: what a choice is, as data."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from elbowroom.plan.plan import Plan
    from elbowroom.plan.profile import Profile


@dataclass(frozen=True)
class Candidate:
    """One format for all auto states: the step as it would be. state: "" where none is chosen."""

    state: str
    profile: "Profile"
    noise: float = 0.0


@dataclass(frozen=True)
class Chosen:
    """A plan, and the format that it was made for."""

    candidate: Candidate
    plan: "Plan"
