"""The phases of one plan, from the first forward of its kind to a step that is known to fit.

    GUESSING ───> WRITING ────────┐          ┌──> SETTLED <──────────┐
      │  │                        v          │       ^               │
      │  └──── rehearsed ────> VERIFYING ────┤       │               │
      v                           ^          ├──> WATCHING ──> VERIFYING
    GIVEN ────> CORRECTING ───────┘          │
      │                                      └──> SMALLEST ──> LAST_RESORT ──> SETTLED
      └──> SETTLED

    in           it is seen that                             and next comes
    GUESSING     a step at a preset was measured               WRITING
                 a plan was given                            GIVEN
                 a forward held too much, and was rehearsed  VERIFYING
    WRITING      the step was written down                   VERIFYING
                 no plan fits while another model learns     WRITING
    GIVEN        it fits                                     SETTLED
                 it is a little too large                    CORRECTING
                 it does not fit, or knows another step      GUESSING
    CORRECTING   the step was written down                   VERIFYING
    VERIFYING    nothing need be done                        SETTLED; for a smaller call IDLE
                 the plan fits                               SETTLED
                 it is lossy, and there is room to look      WATCHING
                 it is wrong, up to three times              VERIFYING, by another plan
                 no plan is left by what it was wrong by     SMALLEST
    SMALLEST     it fits                                     SETTLED, or WATCHING
                 it does not                                 SMALLEST, by another plan
                 none is left                                LAST_RESORT
    WATCHING     what codes add is known                     VERIFYING, or SMALLEST again
    LAST_RESORT  the preset was measured                       SETTLED, or the step is refused
    IDLE         a larger call was written down              VERIFYING

From every phase a larger call, another budget or more that stands beside the model leads back to
VERIFYING, by the same profile; where there is none to plan by, to GIVEN, WRITING or GUESSING. After
a step that held more than those before it, or ran its model more often, where gradients stand that
did not before (micro-batches), and where more is allowed to plans, comes GUESSING. Five steps that
tell nothing lead to SETTLED.

In a settled step each forward is looked at (*learning*: a script of it is written), follows its
script (*replaying*), or runs without hooks where that does nothing (*off*): see `session.py`.
"""

from enum import Enum


class Phase(Enum):
    """Purpose of the next step."""

    GUESSING = "a uniform preset; what a step takes beside what it holds is guessed"
    WRITING = "a uniform preset; that is measured, and the next step is written down"
    IDLE = "a uniform preset; a step was written down, and nothing need be done for one like it"
    GIVEN = "a plan that was given is followed, and its step measured"
    CORRECTING = "the plan that was given is a little too large; its step is written down"
    VERIFYING = "a plan is followed, and its step measured"
    SMALLEST = "a plan of the least predicted peak is followed, and its step measured"
    WATCHING = "a plan that leaves room to look is followed, and what its codes add is measured"
    LAST_RESORT = "no plan has fit; a uniform preset is measured"
    SETTLED = "nothing more is to be learned"


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
    Phase.WATCHING: frozenset({Phase.VERIFYING, Phase.SMALLEST, Phase.GUESSING}),
    Phase.LAST_RESORT: frozenset({Phase.SETTLED, Phase.VERIFYING, Phase.GUESSING}),
    Phase.SETTLED: frozenset({Phase.VERIFYING, Phase.GIVEN, Phase.WRITING, Phase.GUESSING}),
}
