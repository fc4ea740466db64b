"""The phases of one plan, from the first forward of its kind to a step that is known to fit.

    GUESSING ──── measured ────> WRITING ─ written down ─┐      a uniform rung, looked at
       │ │                          │                    │
       │ └─ a plan was given ─> GIVEN ── fits ───────────┼──> SETTLED
       │                          │ a little too large   │
       │                          v                      v
       │                      CORRECTING ─ written ──> VERIFYING <┐  measured; made again with what
       └──── held too much: rehearsed ───────────────>   │   │  └─┘  it was wrong by, up to 3 times
                                                         │   │
               fits, and is lossy: room to look is made  │   │  no plan is left by what plans
                                        ┌────────────────┘   │  were wrong by
                                        v                    v
                                    WATCHING             SMALLEST <┐  the least predicted peaks,
                                        │ noise known        │   └─┘  one after another
                                        v                    v
                               VERIFYING again, or      LAST_RESORT   none is left: a uniform rung
                               what was watched                │      is measured
                                                               v
    SETTLED   what fits: a plan, or a rung          SETTLED, or refused by what was measured
    IDLE      a profile shows that nothing need be done for a call like it: larger ones are measured

From every phase: a larger call, another budget or more that stands beside the model leads back to
VERIFYING, by the same profile; where there is none to plan by, to WRITING or GUESSING. A step that
holds more than those before it, or runs its model more often, leads to GUESSING. A rehearsal leads
to VERIFYING.

In a settled step each forward is looked at (*learning*: a script of it is written), follows its
script (*replaying*), or runs without hooks where that does nothing (*off*): see `session.py`.
"""

from enum import Enum


class Phase(Enum):
    """What the next step is for."""

    GUESSING = "a uniform rung; what a step takes beside what it holds is guessed"
    WRITING = "a uniform rung; that is measured, and the next step is written down"
    IDLE = "a uniform rung; a step was written down, and nothing need be done for one like it"
    GIVEN = "a plan that was given is followed, and its step measured"
    CORRECTING = "the plan that was given is a little too large; its step is written down"
    VERIFYING = "a plan is followed, and its step measured"
    SMALLEST = "a plan of the least predicted peak is followed, and its step measured"
    WATCHING = "a plan that leaves room to look is followed, and what its codes add is measured"
    LAST_RESORT = "no plan has fit; a uniform rung is measured"
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
            *(Phase.IDLE, Phase.GUESSING),
        }
    ),
    Phase.SMALLEST: frozenset(
        {
            *(Phase.WATCHING, Phase.LAST_RESORT, Phase.SETTLED),
            *(Phase.VERIFYING, Phase.IDLE, Phase.GUESSING),
        }
    ),
    Phase.WATCHING: frozenset({Phase.VERIFYING, Phase.SMALLEST, Phase.GUESSING}),
    Phase.LAST_RESORT: frozenset({Phase.SETTLED, Phase.VERIFYING, Phase.GUESSING}),
    Phase.SETTLED: frozenset({Phase.VERIFYING, Phase.GIVEN, Phase.WRITING, Phase.GUESSING}),
}
