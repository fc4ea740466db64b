"""The phases of one plan, from the first forward of its kind to a step that is known to fit.

    GUESSING ───> WRITING ────────┐          ┌──> SETTLED <──────────┐
      │  │                        v          │       ^               │
      │  └──── rehearsed ────> VERIFYING ────┤       │               │
      v                           ^          ├──> WATCHING ──> VERIFYING
    GIVEN ────> CORRECTING ───────┘          │
      │                                      └──> SMALLEST ──> LAST_RESORT ──> SETTLED
      └──> SETTLED

    in           observation                                 next phase
    GUESSING     a step with a preset was measured           WRITING
                 a plan was given                            GIVEN
                 a forward held too much, and was rehearsed  VERIFYING
    WRITING      the step was profiled                       VERIFYING
                 no plan fits while another model learns     WRITING
    GIVEN        it fits                                     SETTLED
                 it is a little too large                    CORRECTING
                 it does not fit, or is for another step     GUESSING
    CORRECTING   the step was profiled                       VERIFYING
    VERIFYING    a plain step was measured, and fits         SETTLED; for a smaller call IDLE
                 the plan fits                               SETTLED
                 it is lossy, and its noise can be measured  WATCHING
                 it exceeds the budget, up to three times    VERIFYING, with another plan
                 no corrected plan fits                      SMALLEST
    SMALLEST     it fits                                     SETTLED, or WATCHING
                 it does not                                 SMALLEST, with another plan
                 none is left                                LAST_RESORT
    WATCHING     the noise of codes is known                 VERIFYING, or SMALLEST again
                 it is predicted, and has no limit           SETTLED
    LAST_RESORT  the preset was measured                     SETTLED, or the step is refused
    IDLE         a larger call was profiled                  VERIFYING

From every phase, a larger call, another budget or more resident bytes beside the model lead back to
VERIFYING, with the same profile; without a profile, they lead to GIVEN, WRITING or GUESSING. To
GUESSING leads a forward, too, that holds too much for a plan that was never measured. The phase
after a step is GUESSING if the step held more than those before it, ran its model more often,
or began with more gradients (micro-batches), or if a restriction on plans was relaxed. Five
inconclusive measurements, or five steps in a row that cannot be measured, lead to SETTLED; from the
latter a step that is measured leads back to VERIFYING.

A settled forward that holds much more than the measured one, or runs other modules again, leads
back to VERIFYING, or GIVEN; without a plan to WRITING. If codes are withdrawn because they made
gradients wrong, a settled plan is measured again: SETTLED leads to VERIFYING, or to GIVEN.

In a settled step each forward is examined (*learning*: its script is recorded), replays its script
(*replaying*), or runs without hooks if the script does nothing (*off*): see `session.py`.
"""

from enum import Enum


class Phase(Enum):
    """Purpose of the next step."""

    GUESSING = "a uniform preset; the transient bytes of a step are guessed"
    WRITING = "a uniform preset was measured; the next step is profiled"
    IDLE = "a uniform preset; by a profile, such steps need no action"
    GIVEN = "a given plan is followed, and its step measured"
    CORRECTING = "the given plan exceeds the budget a little; its step is profiled"
    VERIFYING = "a plan is followed, and its step measured"
    SMALLEST = "a plan of the least predicted peak is followed, and its step measured"
    WATCHING = "a plan that leaves memory for it is followed, and the noise of codes is measured"
    LAST_RESORT = "no plan has fit; a uniform preset is measured"
    SETTLED = "learning has ended"


FOLLOWS: dict[Phase, frozenset[Phase]] = {
    Phase.GUESSING: frozenset({Phase.GIVEN, Phase.WRITING, Phase.VERIFYING, Phase.SETTLED}),
    Phase.WRITING: frozenset({Phase.GUESSING, Phase.VERIFYING, Phase.SETTLED}),
    Phase.IDLE: frozenset({Phase.GUESSING, Phase.VERIFYING, Phase.SETTLED}),
    Phase.GIVEN: frozenset({Phase.CORRECTING, Phase.VERIFYING, Phase.GUESSING, Phase.SETTLED}),
    Phase.CORRECTING: frozenset({Phase.VERIFYING, Phase.GUESSING, Phase.SETTLED}),
    Phase.VERIFYING: frozenset(
        {
            *(Phase.WATCHING, Phase.SMALLEST, Phase.LAST_RESORT, Phase.SETTLED),
            *(Phase.IDLE, Phase.GUESSING, Phase.WRITING),
        }
    ),
    Phase.SMALLEST: frozenset(
        {
            *(Phase.WATCHING, Phase.LAST_RESORT, Phase.SETTLED),
            *(Phase.VERIFYING, Phase.IDLE, Phase.GUESSING, Phase.WRITING),
        }
    ),
    Phase.WATCHING: frozenset({Phase.VERIFYING, Phase.SMALLEST, Phase.SETTLED, Phase.GUESSING}),
    Phase.LAST_RESORT: frozenset({Phase.SETTLED, Phase.VERIFYING, Phase.GUESSING}),
    Phase.SETTLED: frozenset({Phase.VERIFYING, Phase.GIVEN, Phase.WRITING, Phase.GUESSING}),
}
