"""What follows from a step under a plan that was measured."""

from dataclasses import replace

from elbowroom.fitting.attempts import Attempts, Taken
from elbowroom.fitting.commands import (
    BLAME_NO_CLASSES,
    Line,
    MakePlan,
    MakeSmallest,
    say,
)
from elbowroom.fitting.headroom import Headroom
from elbowroom.fitting.options import MemoryState
from elbowroom.fitting.parts import Margins, UnexpectedSteps
from fit_table.values import (
    AGAIN,
    CLIMBED,
    CORRECTING,
    DROPPED,
    FORGET,
    FRESH,
    GIVENS,
    GRADIENTS,
    GUESSED,
    HIGH,
    KNOWN,
    LOSSY,
    MAKE,
    MEMORY,
    MORE,
    ONE,
    OTHER,
    PLAN,
    SETTLED,
    SMALLEST,
    TRIED,
    TWO,
    VERIFYING,
    WATCHED,
    WATCHING,
    WHOLE,
    Call,
    P,
    Row,
    following,
    said,
    said_given,
    step,
    written,
)

ROWS = {
    "a plan takes too much while another model learns that ran inside": Row(
        VERIFYING,
        step(1100, others_learn=True),
        {
            "tries": 1,
            "others_learn": True,
            "headroom": Headroom(700),
            "attempts": KNOWN.attempts.after(PLAN, 1100),
        },
        (said(PLAN, 1100),),
    ),
    # A step under a plan is measured.
    "a plan fits": Row(
        VERIFYING,
        step(900),
        {
            "phase": P.SETTLED,
            "tries": 1,
            "has_fit": True,
            "headroom": Headroom(500, None, 550, 450),
            "attempts": KNOWN.attempts.after(PLAN, 900),
        },
        (said(PLAN, 900),),
    ),
    "a plan takes the whole budget": Row(
        VERIFYING,
        step(1000),
        {
            "phase": P.SETTLED,
            "tries": 1,
            "has_fit": True,
            "headroom": Headroom(600, None, 450, 450),
            "attempts": KNOWN.attempts.after(PLAN, 1000),
        },
        (said(PLAN, 1000),),
    ),
    "a plan fits beside gradients": Row(
        replace(VERIFYING, memory=GRADIENTS, skipped_steps=3),
        step(900),
        {
            "memory": MEMORY,
            "phase": P.SETTLED,
            "tries": 1,
            "has_fit": True,
            "headroom": Headroom(500, None, 550, 450),
            "attempts": KNOWN.attempts.after(PLAN, 900),
            "gradient_nbytes": 150,
            "skipped_steps": 0,
        },
        (said(PLAN, 900),),
    ),
    "a plan fits, and steps that begin with gradients do not come any more": Row(
        replace(VERIFYING, gradient_nbytes=150, skipped_steps=9),
        step(900),
        {
            "phase": P.SETTLED,
            "tries": 1,
            "has_fit": True,
            "headroom": Headroom(500, None, 550, 450),
            "attempts": KNOWN.attempts.after(PLAN, 900),
        },
        (said(PLAN, 900),),
    ),
    "what is watched without gradients tells nothing of a step that begins with them": Row(
        replace(WATCHING, gradient_nbytes=150), step(900), {}
    ),
    "a plan for a larger call fits": Row(
        replace(VERIFYING, largest=Call(9), profiled=Call(9)),
        step(900),
        {
            "phase": P.SETTLED,
            "tries": 1,
            "has_fit": True,
            # Of what a step needs beside what stands, a ninth more.
            "headroom": Headroom(562),
            "proven": (ONE,),
            "attempts": KNOWN.attempts.after(PLAN, 1000),
        },
        (said(PLAN, 1000),),
    ),
    "a larger call than all that it was measured to fit for fits, too": Row(
        replace(VERIFYING, proven=(ONE,), now=TWO, largest=TWO),
        step(990),
        {
            "phase": P.SETTLED,
            "tries": 1,
            "has_fit": True,
            "proven": (),
            "headroom": Headroom(590, None, 460, 450),
            "attempts": KNOWN.attempts.after(PLAN, 990),
        },
        (said(PLAN, 990),),
    ),
    "it does not: smaller ones tell nothing of it": Row(
        replace(VERIFYING, proven=(ONE,), now=TWO, largest=TWO),
        step(1100),
        replace(FRESH, largest=TWO, now=TWO, only_largest=True, exceeded=TWO.numel),
        (said(PLAN, 1100), FORGET),
    ),
    "an estimate that leaves much free is rebuilt with half of it": Row(
        GUESSED,
        step(800),
        {
            "tries": 1,
            "rounds": 1,
            "has_fit": True,
            "headroom": Headroom(400, None, 650, 450),
            "margins": Margins(plain_nbytes=0),
            "attempts": Attempts(taken=(Taken(800, PLAN),)),
        },
        (said(PLAN, 800), MakePlan(fits=True)),
    ),
    "an estimate that leaves a little more free than would be left": Row(
        GUESSED,
        step(895),
        {
            "tries": 1,
            "rounds": 1,
            "has_fit": True,
            "headroom": Headroom(495, None, 555, 450),
            "margins": Margins(plain_nbytes=47),
            "attempts": Attempts(taken=(Taken(895, PLAN),)),
        },
        (said(PLAN, 895), MakePlan(fits=True)),
    ),
    "an estimate that leaves a tenth free of what is not static": Row(
        GUESSED,
        step(910),
        {
            "phase": P.SETTLED,
            "tries": 1,
            "has_fit": True,
            "headroom": Headroom(510, None, 540, 450),
            "attempts": Attempts(taken=(Taken(910, PLAN),)),
        },
        (said(PLAN, 910),),
    ),
    "an estimate that leaves much free is rebuilt three times at most": Row(
        replace(GUESSED, rounds=3),
        step(800),
        {
            "phase": P.SETTLED,
            "tries": 1,
            "has_fit": True,
            "headroom": Headroom(400, None, 650, 450),
            "attempts": Attempts(taken=(Taken(800, PLAN),)),
        },
        (said(PLAN, 800),),
    ),
    "an estimate that leaves little free": Row(
        GUESSED,
        step(950),
        {
            "phase": P.SETTLED,
            "tries": 1,
            "has_fit": True,
            "headroom": Headroom(550, None, 500, 450),
            "attempts": Attempts(taken=(Taken(950, PLAN),)),
        },
        (said(PLAN, 950),),
    ),
    "a plan does not fit": Row(
        VERIFYING,
        step(1100),
        {
            "tries": 1,
            "rounds": 1,
            "margins": Margins(plain_nbytes=200),
            "headroom": Headroom(700),
            "attempts": KNOWN.attempts.after(PLAN, 1100),
        },
        (said(PLAN, 1100), MAKE),
    ),
    "a plan does not fit, as codes of it were withdrawn": Row(
        replace(VERIFYING, withdrawn=True, margins=Margins(plain_nbytes=20)),
        step(1100),
        {
            "tries": 1,
            "rounds": 1,
            "headroom": Headroom(700),
            "attempts": KNOWN.attempts.after(PLAN, 1100),
        },
        (said(PLAN, 1100), MAKE),
    ),
    "a plan in which modules run again does not fit": Row(
        following(AGAIN),
        step(1100),
        {
            "tries": 1,
            "rounds": 1,
            "margins": Margins(recompute_nbytes=200),
            "headroom": Headroom(700),
            "attempts": KNOWN.attempts.after(AGAIN, 1100),
        },
        (said(AGAIN, 1100), MAKE),
    ),
    "three plans did not fit": Row(
        replace(VERIFYING, rounds=3, margins=Margins(plain_nbytes=60)),
        step(1100),
        {
            "tries": 1,
            "margins": Margins(plain_nbytes=0),
            "headroom": Headroom(700),
            "attempts": KNOWN.attempts.after(PLAN, 1100),
        },
        (said(PLAN, 1100), MakeSmallest()),
    ),
    "three plans by a smaller call did not fit": Row(
        replace(VERIFYING, rounds=3, largest=TWO, unexpected=UnexpectedSteps(count=2)),
        step(1100),
        replace(FRESH, largest=TWO, unexpected=UnexpectedSteps(count=2), only_largest=True),
        (said(PLAN, 2100), FORGET),
    ),
    "one of the smallest fits": Row(
        SMALLEST,
        step(1000),
        {
            "phase": P.SETTLED,
            "tries": 1,
            "has_fit": True,
            "headroom": Headroom(600, None, 450, 450),
            "attempts": TRIED.after(OTHER, 1000),
        },
        (said(OTHER, 1000),),
    ),
    "one of the smallest does not fit": Row(
        SMALLEST,
        step(1050),
        {"tries": 1, "headroom": Headroom(650), "attempts": TRIED.after(OTHER, 1050)},
        (said(OTHER, 1050), MakeSmallest()),
    ),
    "one of the smallest may climb": Row(
        SMALLEST,
        step(1050, climbed=True),
        {"tries": 1, "headroom": Headroom(650), "attempts": TRIED.after(OTHER, 1050)},
        (said(OTHER, 1050), MakeSmallest()),
    ),
    "one of the smallest does not fit, and more may be allowed": Row(
        SMALLEST,
        step(1050, fallbacks=MORE),
        FRESH,
        (said(OTHER, 1050), FORGET, BLAME_NO_CLASSES),
    ),
    "a step that has left its plan tells nothing": Row(
        VERIFYING, step(1100, climbed=True), {"tries": 1}, (said(PLAN, 1100),)
    ),
    "nor one above the budget in which modules were tested": Row(
        VERIFYING, step(1100, ran_trials=True), {"tries": 1}, (said(PLAN, 1100),)
    ),
    "one in which modules were tested does where it takes no more than was predicted": Row(
        following(HIGH),
        step(1100, ran_trials=True),
        {
            "tries": 1,
            "rounds": 1,
            "margins": Margins(plain_nbytes=-50),
            "headroom": Headroom(700),
            "attempts": KNOWN.attempts.after(HIGH, 1100),
        },
        (said(HIGH, 1100), MAKE),
    ),
    "nor one that makes the optimizer's states": Row(
        VERIFYING,
        replace(step(900, makes_states=True), memory=MemoryState(180)),
        {"tries": 1, "memory": MemoryState(180)},
    ),
    "nor one that makes them within the whole budget": Row(
        VERIFYING, step(1000, makes_states=True), {"tries": 1}
    ),
    "steps that leave their plan again and again are planned with less": Row(
        replace(VERIFYING, tries=1),
        step(1010, climbed=True),
        {
            "tries": 2,
            "rounds": 1,
            "margins": Margins(plain_nbytes=max(1010 - PLAN.plan.peak, 1000 // 32)),
        },
        (said(PLAN, 1010), MAKE),
    ),
    "five steps that tell nothing, within the whole budget": Row(
        replace(VERIFYING, tries=4, rounds=3),
        step(1000, climbed=True),
        {"phase": P.SETTLED, "tries": 5},
        (said(PLAN, 1000),),
    ),
    "five steps that tell nothing": Row(
        replace(VERIFYING, tries=4, rounds=3),
        step(1100, climbed=True),
        {"phase": P.SETTLED, "tries": 5},
        (said(PLAN, 1100), say(Line.ABOVE, peak_nbytes=1100, **CLIMBED)),
    ),
    "a step once all is settled": Row(SETTLED, step(2000), {}, (said(PLAN, 2000),)),
    # It was followed for good, without a word, where no step could be measured until then.
    "the first step that can be measured, long after all is settled, is above the budget": Row(
        replace(SETTLED, has_fit=False, unmeasured=5),
        step(1100),
        {
            "unmeasured": 0,
            "phase": P.VERIFYING,
            "tries": 1,
            "rounds": 1,
            "margins": Margins(plain_nbytes=200),
            "headroom": Headroom(700),
            "attempts": KNOWN.attempts.after(PLAN, 1100),
        },
        (said(PLAN, 1100), MAKE),
    ),
    "a step under a plan cannot be measured": Row(VERIFYING, step(None), {"unmeasured": 1}),
    "a step cannot be measured, after four others were": Row(
        replace(SMALLEST, tries=4), step(None), {"unmeasured": 1}
    ),
    "a step can be measured again": Row(
        replace(VERIFYING, unmeasured=4),
        step(900),
        {
            "phase": P.SETTLED,
            "unmeasured": 0,
            "tries": 1,
            "has_fit": True,
            "headroom": Headroom(500, None, 550, 450),
            "attempts": KNOWN.attempts.after(PLAN, 900),
        },
        (said(PLAN, 900),),
    ),
    "five steps under a plan could not be measured": Row(
        replace(VERIFYING, unmeasured=4),
        step(None),
        {"phase": P.SETTLED, "unmeasured": 5},
        (say(Line.BLIND),),
    ),
    "a model inside has ended the measurement": Row(
        replace(VERIFYING, tries=4), step(None, others_learn=True), {"others_learn": True}
    ),
    # The plan that was given.
    "the given plan fits": Row(
        GIVENS, step(900), {"phase": P.SETTLED, "tries": 1, "has_fit": True}, (said_given(900),)
    ),
    "the given plan takes the whole budget": Row(
        GIVENS, step(1000), {"phase": P.SETTLED, "tries": 1, "has_fit": True}, (said_given(1000),)
    ),
    "the given plan has measured its noise": Row(
        replace(GIVENS, plan=WATCHED, given=WATCHED),
        step(900),
        {"phase": P.SETTLED, "tries": 1, "has_fit": True},
        (
            say(Line.MEASURED, plan=WATCHED, peak_nbytes=900),
            say(Line.NOISE, plan=WATCHED),
        ),
    ),
    "the given plan has codes whose noise nobody measured": Row(
        replace(GIVENS, plan=LOSSY.plan, given=LOSSY.plan),
        step(900),
        {"phase": P.SETTLED, "tries": 1, "has_fit": True},
        (said(LOSSY, 900), say(Line.UNKNOWN, why="the plan was made without")),
    ),
    "the given plan is a little too large": Row(
        GIVENS,
        step(1050),
        {"phase": P.CORRECTING, "tries": 1, "given": None, "from_rehearsal": True},
        (said_given(1050),),
    ),
    "the given plan is much too large": Row(
        GIVENS, step(1051), FRESH, (said_given(1051), DROPPED, FORGET)
    ),
    "the given plan is a little too large, and cannot be written down": Row(
        replace(GIVENS, plan=LOSSY.plan, given=LOSSY.plan),
        step(1050),
        FRESH,
        (said(LOSSY, 1050), say(Line.GIVEN, plan=LOSSY.plan), FORGET),
    ),
    "the given plan is a little too large, and runs modules again": Row(
        replace(GIVENS, plan=AGAIN.plan, given=AGAIN.plan),
        step(1050),
        FRESH,
        (said(AGAIN, 1050), say(Line.GIVEN, plan=AGAIN.plan), FORGET),
    ),
    "the given plan is a little too large, and a profiled step would be much larger": Row(
        replace(GIVENS, plan=WHOLE.plan, given=WHOLE.plan),
        step(1050),
        FRESH,
        (said(WHOLE, 1050), say(Line.GIVEN, plan=WHOLE.plan), FORGET),
    ),
    "the given plan does not know the step": Row(
        GIVENS, step(900, unknown_sites=True), FRESH, (said_given(900), DROPPED, FORGET)
    ),
    "the step leaves the given plan": Row(
        GIVENS, step(900, climbed=True), FRESH, (DROPPED, FORGET)
    ),
    "the given plan is too large in a step that makes states": Row(
        CORRECTING,
        replace(written(makes_states=True), peak=1100),
        FRESH,
        (said_given(1200), DROPPED, FORGET),
    ),
}
