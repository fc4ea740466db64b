"""What follows from settled steps that were timed, and from plans that may be faster."""

from dataclasses import replace

from elbowroom.fitting.commands import Line, MakeFaster, MakePlan, TakePlan, say
from elbowroom.fitting.headroom import Headroom
from elbowroom.fitting.observations import FasterMade, OptionsChanged, PlanTaken, StepsTimed
from elbowroom.fitting.options import FitOptions, MemoryState
from elbowroom.fitting.timings import Timing
from fit_table.values import (
    BEGIN,
    FORGET,
    OTHER,
    PLAN,
    SETTLED,
    STOCK,
    P,
    Row,
    following,
    said,
    step,
)

SEEN = Headroom(510, None, 540)  # as it was measured
FIRST = Timing(PLAN, 0.5, SEEN)
TIMED = replace(SETTLED, timings=(FIRST,))
TRIAL = following(OTHER, has_fit=True, timings=(FIRST,), is_trial=True)
BACK = {"phase": P.SETTLED, "is_trial": False, "is_timed": True}


def tried(seconds):
    """Return the state in which another plan was timed, too."""
    timings = (FIRST, Timing(OTHER, seconds, Headroom(500)))
    return following(OTHER, P.SETTLED, has_fit=True, timings=timings)


ROWS = {
    "settled steps were timed": Row(
        replace(SETTLED, headroom=SEEN), StepsTimed(0.5), {"timings": (FIRST,)}, (MakeFaster(),)
    ),
    "settled steps are too short for anything to be won": Row(
        SETTLED, StepsTimed(0.049), {"is_timed": True}
    ),
    "another plan may be faster": Row(
        TIMED,
        FasterMade(OTHER, MemoryState(90)),
        replace(TRIAL, memory=MemoryState(90)),
        (BEGIN,),
    ),
    "no other plan may be faster": Row(TIMED, FasterMade(None, STOCK), {"is_timed": True}),
    "the other plan was faster": Row(
        tried(0.4),
        FasterMade(None, STOCK),
        {"is_timed": True},
        (say(Line.FASTER, before=FIRST, best=tried(0.4).timings[1]),),
    ),
    "the other plan was slower": Row(
        tried(0.6), FasterMade(None, STOCK), {"is_timed": True}, (TakePlan(PLAN),)
    ),
    "the other plan was hardly faster": Row(
        tried(0.49), FasterMade(None, STOCK), {"is_timed": True}, (TakePlan(PLAN),)
    ),
    "what is followed again holds what it held": Row(
        replace(tried(0.6), is_timed=True),
        PlanTaken(PLAN, STOCK),
        {"plan": PLAN.plan, "chosen": PLAN, "headroom": SEEN},
        (BEGIN,),
    ),
    "a plan that is tried fits": Row(
        TRIAL,
        step(1000),
        {"phase": P.SETTLED, "is_trial": False, "headroom": Headroom(600)},
        (said(OTHER, 1000),),
    ),
    "a plan that is tried does not fit": Row(
        TRIAL, step(1001), BACK, (said(OTHER, 1001), TakePlan(PLAN))
    ),
    "a plan that is tried lets its forwards climb": Row(
        TRIAL, step(900, climbed=True), BACK, (said(OTHER, 900), TakePlan(PLAN))
    ),
    "a plan that is tried does not know the step": Row(
        TRIAL, step(900, strangers=True), BACK, (said(OTHER, 900), TakePlan(PLAN))
    ),
    "nobody could measure a plan that is tried": Row(TRIAL, step(None), BACK, (TakePlan(PLAN),)),
    "another budget while a plan is tried": Row(
        TRIAL,
        OptionsChanged(FitOptions(900)),
        {"options": FitOptions(900), "has_fit": False, "timings": (), "is_trial": False},
        (FORGET, MakePlan(again=True)),
    ),
    "another budget once plans were timed": Row(
        replace(tried(0.4), is_timed=True),
        OptionsChanged(FitOptions(900)),
        {
            "phase": P.VERIFYING,
            "options": FitOptions(900),
            "has_fit": False,
            "timings": (),
            "is_timed": False,
        },
        (FORGET, MakePlan(again=True)),
    ),
}
