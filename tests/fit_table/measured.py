"""What follows from a step that was measured."""

from dataclasses import replace

from elbowroom.fitting.attempts import Attempts, Taken
from elbowroom.fitting.commands import (
    BlameNoClasses,
    Line,
    MakeSmallest,
    RefuseRungs,
    say,
)
from elbowroom.fitting.headroom import Headroom
from elbowroom.fitting.options import MemoryState
from fit_table.values import (
    AGAIN,
    CLIMBED,
    CORRECTING,
    DROPPED,
    FORGET,
    FRESH,
    GIVENS,
    GUESSED,
    IDLE,
    KNOWN,
    LOSSY,
    MAKE,
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
    WRITING,
    Call,
    P,
    Profile,
    Row,
    following,
    said,
    said_given,
    step,
    written,
)

ROWS = {
    # A step at a rung is measured.
    "a rung fits": Row(
        FRESH,
        step(900, rung_within=lambda nbytes: 0 if nbytes == 400 else None),
        {"phase": P.WRITING, "rung": 0, "has_fit": True, "headroom": Headroom(500)},
    ),
    "a rung that fits though others should not": Row(
        FRESH, step(900), {"phase": P.WRITING, "has_fit": True, "headroom": Headroom(500)}
    ),
    "a lossy rung is not taken: a plan may do with exact ones": Row(
        FRESH, step(1100, rung_within=lambda _: 4), {"phase": P.WRITING, "headroom": Headroom(700)}
    ),
    "no rung fits": Row(
        FRESH, step(1100), {"phase": P.WRITING, "outgrown": True, "headroom": Headroom(700)}
    ),
    "no rung fits, and nothing can be measured": Row(
        FRESH,
        step(1100, may_measure=False, saving="saving"),
        {"phase": P.WRITING, "headroom": Headroom(700)},
        (RefuseRungs("saving"),),
    ),
    "a rung that makes the optimizer's states": Row(
        FRESH,
        replace(written(makes_states=True), stock=MemoryState(150), peak=900),
        {"phase": P.WRITING, "stock": MemoryState(150), "headroom": Headroom(300)},
    ),
    "a larger call than nothing need be done for": Row(
        replace(IDLE, now=TWO, largest=TWO),
        step(900, rung_within=lambda _: 0),
        {"has_fit": True, "headroom": Headroom(500)},
    ),
    "a step that nobody could measure": Row(FRESH, step(None), {}),
    "a step that was written down in part": Row(
        WRITING, step(900, writes=True, makes_states=True), {}
    ),
    # A step is written down.
    "a step at a rung is written down": Row(
        WRITING,
        written(beside_nbytes=7),
        {
            "phase": P.VERIFYING,
            "tries": 1,
            "profile": Profile(),
            "profiled": ONE,
            "beside_nbytes": 7,
            "headroom": Headroom(800),
            "attempts": Attempts().knowing(Profile()),
        },
        (MAKE,),
    ),
    "the first step is written down": Row(
        FRESH,
        written(),
        {
            "phase": P.VERIFYING,
            "tries": 1,
            "profile": Profile(),
            "profiled": ONE,
            "headroom": Headroom(800),
            "attempts": Attempts().knowing(Profile()),
        },
        (MAKE,),
    ),
    "a larger call is written down": Row(
        replace(IDLE, now=TWO, largest=TWO),
        written(),
        {
            "phase": P.VERIFYING,
            "tries": 1,
            "profiled": TWO,
            "headroom": Headroom(800),
            "attempts": Attempts().knowing(Profile()).knowing(Profile()),
        },
        (MAKE,),
    ),
    "a step under an estimate is written down": Row(
        replace(GUESSED, once_nbytes=50),
        written(),
        {
            "tries": 1,
            "rehearsed": False,
            "once_nbytes": 0,
            "headroom": Headroom(800),
            "attempts": Attempts(taken=(Taken(1200, PLAN),)).knowing(Profile()),
        },
        (MAKE,),
    ),
    "a step under one of the smallest is written down": Row(
        replace(SMALLEST, rehearsed=True),
        written(),
        {
            "phase": P.VERIFYING,
            "tries": 1,
            "rehearsed": False,
            "headroom": Headroom(800),
            "attempts": TRIED.after(OTHER, 1200).knowing(Profile()),
        },
        (MAKE,),
    ),
    "a step under the given plan is written down": Row(
        CORRECTING,
        written(),
        {
            "phase": P.VERIFYING,
            "tries": 1,
            "rehearsed": False,
            "profile": Profile(),
            "profiled": ONE,
            "headroom": Headroom(800),
            "attempts": Attempts().knowing(Profile()),
        },
        (MAKE,),
    ),
    "a step that could not be written down": Row(WRITING, step(900, writes=True), {"tries": 1}),
    "five steps that could not be written down": Row(
        replace(WRITING, tries=4), step(900, writes=True), {"phase": P.SETTLED, "tries": 5}
    ),
    "five steps above the budget whose backward nobody saw": Row(
        replace(CORRECTING, tries=4),
        step(1100, writes=True),
        {"phase": P.SETTLED, "tries": 5},
        (say(Line.OUTSIDE, peak_nbytes=1100, seen_nbytes=800),),
    ),
    "five steps above the budget that climbed": Row(
        replace(FRESH, tries=4),
        written(climbed=True),
        {"phase": P.SETTLED, "tries": 5},
        (say(Line.ABOVE, peak_nbytes=1200, **CLIMBED),),
    ),
    "a larger call that could not be written down": Row(
        replace(IDLE, tries=4), step(900, writes=True), {"phase": P.SETTLED, "tries": 5}
    ),
    # A step under a plan is measured.
    "a plan fits": Row(
        VERIFYING,
        step(900),
        {
            "phase": P.SETTLED,
            "tries": 1,
            "has_fit": True,
            "headroom": Headroom(500, None, 550),
            "attempts": KNOWN.attempts.after(PLAN, 900),
        },
        (said(PLAN, 900),),
    ),
    "a plan for a larger call fits": Row(
        replace(VERIFYING, largest=Call(9), profiled=Call(9)),
        step(900),
        {
            "phase": P.SETTLED,
            "tries": 1,
            "has_fit": True,
            # Of what a step needs beside what stands, a ninth more.
            "headroom": Headroom(675),
            "attempts": KNOWN.attempts.after(PLAN, 1000),
        },
        (said(PLAN, 1000),),
    ),
    "an estimate that leaves much free is made again with half of it": Row(
        GUESSED,
        step(800),
        {
            "tries": 1,
            "rounds": 1,
            "has_fit": True,
            "headroom": Headroom(400, None, 650),
            "once_nbytes": 0,
            "attempts": Attempts(taken=(Taken(800, PLAN),)),
        },
        (said(PLAN, 800), MAKE),
    ),
    "an estimate that leaves little free": Row(
        GUESSED,
        step(950),
        {
            "phase": P.SETTLED,
            "tries": 1,
            "has_fit": True,
            "headroom": Headroom(550, None, 500),
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
            "once_nbytes": 200,
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
            "again_nbytes": 200,
            "headroom": Headroom(700),
            "attempts": KNOWN.attempts.after(AGAIN, 1100),
        },
        (said(AGAIN, 1100), MAKE),
    ),
    "three plans did not fit": Row(
        replace(VERIFYING, rounds=3, once_nbytes=60),
        step(1100),
        {
            "tries": 1,
            "once_nbytes": 0,
            "headroom": Headroom(700),
            "attempts": KNOWN.attempts.after(PLAN, 1100),
        },
        (said(PLAN, 1100), MakeSmallest()),
    ),
    "three plans by a smaller call did not fit": Row(
        replace(VERIFYING, rounds=3, largest=TWO, strays=2),
        step(1100),
        replace(FRESH, largest=TWO, strays=2, only_largest=True),
        (said(PLAN, 2100), FORGET),
    ),
    "one of the smallest fits": Row(
        SMALLEST,
        step(1000),
        {
            "phase": P.SETTLED,
            "tries": 1,
            "has_fit": True,
            "headroom": Headroom(600, None, 450),
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
        step(1050, spare=MORE),
        FRESH,
        (said(OTHER, 1050), FORGET, BlameNoClasses()),
    ),
    "a step that has left its plan tells nothing": Row(
        VERIFYING, step(1100, climbed=True), {"tries": 1}, (said(PLAN, 1100),)
    ),
    "nor one that makes the optimizer's states": Row(
        VERIFYING,
        replace(step(900, makes_states=True), stock=MemoryState(180)),
        {"tries": 1, "stock": MemoryState(180)},
        (said(PLAN, 900),),
    ),
    "five steps that tell nothing": Row(
        replace(VERIFYING, tries=4),
        step(1100, climbed=True),
        {"phase": P.SETTLED, "tries": 5},
        (said(PLAN, 1100), say(Line.ABOVE, peak_nbytes=1100, **CLIMBED)),
    ),
    "a step once all is settled": Row(SETTLED, step(2000), {}),
    # The plan that was given.
    "the given plan fits": Row(
        GIVENS, step(900), {"phase": P.SETTLED, "tries": 1, "has_fit": True}, (said_given(900),)
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
        {"phase": P.CORRECTING, "tries": 1, "given": None, "rehearsed": True},
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
    "the given plan does not know the step": Row(
        GIVENS, step(900, strangers=True), FRESH, (said_given(900), DROPPED, FORGET)
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
