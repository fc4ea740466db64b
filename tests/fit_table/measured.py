"""What follows from a step at a preset that was measured, or from one that was written down."""

from collections import Counter
from dataclasses import replace

from elbowroom.fitting.attempts import Attempts, Taken
from elbowroom.fitting.commands import (
    Line,
    RefusePresets,
    say,
)
from elbowroom.fitting.headroom import Headroom
from elbowroom.fitting.options import MemoryState
from elbowroom.fitting.parts import HigherSteps, Margins, UnexpectedSteps
from fit_table.values import (
    CLIMBED,
    CORRECTING,
    FORGET,
    FRESH,
    GRADIENTS,
    GUESSED,
    IDLE,
    KEEPS,
    KNOWN,
    MAKE,
    MEMORY,
    ONE,
    OTHER,
    PLAN,
    SMALLEST,
    TRIED,
    TWO,
    VERIFYING,
    WRITING,
    P,
    Profile,
    Row,
    above,
    following,
    said,
    said_given,
    step,
    written,
)

ROWS = {
    # A step at a preset is measured.
    "a preset fits": Row(
        FRESH,
        step(900, preset_within=lambda nbytes: 0 if nbytes == 400 else None),
        {"phase": P.WRITING, "preset": 0, "has_fit": True, "headroom": Headroom(500)},
    ),
    "a preset that fits though others should not": Row(
        FRESH,
        step(900),
        {"phase": P.WRITING, "has_fit": True, "headroom": Headroom(500, None, 550, 450)},
    ),
    "a lossy preset is taken where a forward would climb to it": Row(
        FRESH,
        step(1100, preset_within=lambda _: 4),
        {"phase": P.WRITING, "headroom": Headroom(700), "preset": 4},
        (above(1100),),
    ),
    "a lossy preset is not taken where a forward may hold anything": Row(
        replace(FRESH, takes_anything=True),
        step(1100, preset_within=lambda _: 4),
        {"phase": P.WRITING, "headroom": Headroom(700)},
        (above(1100),),
    ),
    "a lossy preset is not taken where the step ran at a stricter one": Row(
        replace(FRESH, preset=5),
        step(1100, preset=5, preset_within=lambda _: 4),
        {"phase": P.WRITING, "headroom": Headroom(700)},
        (above(1100),),
    ),
    "a preset takes the whole budget": Row(
        FRESH,
        step(1000),
        {"phase": P.WRITING, "has_fit": True, "headroom": Headroom(600, None, 450, 450)},
    ),
    "a preset that does not fit with the states that it has made": Row(
        FRESH,
        replace(step(1000), memory=MemoryState(150)),
        {"phase": P.WRITING, "memory": MemoryState(150), "headroom": Headroom(600)},
    ),
    "no preset fits, with or without the states that it has made": Row(
        FRESH,
        replace(step(1100), memory=MemoryState(150)),
        {
            "phase": P.WRITING,
            "memory": MemoryState(150),
            "headroom": Headroom(700),
            "infeasible": True,
        },
        (above(1100),),
    ),
    "no preset fits if the gradients that it has made stay, which zero_grad() may free": Row(
        FRESH,
        replace(step(900), memory=MemoryState(300, gradient_nbytes=200)),
        {
            "phase": P.WRITING,
            "memory": MemoryState(300, gradient_nbytes=200),
            "headroom": Headroom(500),
            "takes_anything": True,
        },
    ),
    "no preset fits": Row(
        FRESH,
        step(1100),
        {"phase": P.WRITING, "infeasible": True, "headroom": Headroom(700)},
        (above(1100),),
    ),
    "no preset fits, and nothing can be measured": Row(
        FRESH,
        step(1100, may_measure=False, saving="saving"),
        {"phase": P.WRITING, "headroom": Headroom(700)},
        (RefusePresets("saving"),),
    ),
    "a preset that makes the optimizer's states": Row(
        FRESH,
        replace(written(makes_states=True), memory=MemoryState(150), peak=900),
        {"phase": P.WRITING, "memory": MemoryState(150), "headroom": Headroom(300)},
    ),
    "a preset that does not fit with the states that are still to come": Row(
        FRESH,
        replace(written(Profile(peak=950), makes_states=True), memory=MemoryState(100, 0, 60)),
        {"phase": P.WRITING, "memory": MemoryState(100, 0, 60), "headroom": Headroom(300)},
    ),
    "a preset that does not fit with the gradients that it began with, and let go of": Row(
        replace(FRESH, memory=GRADIENTS),
        replace(written(Profile(peak=950), makes_states=True), static_nbytes=150),
        {
            "phase": P.WRITING,
            "memory": MEMORY,
            "gradient_nbytes": 150,
            "headroom": Headroom(250),
        },
    ),
    "a larger call than nothing need be done for": Row(
        replace(IDLE, now=TWO, largest=TWO),
        step(900, preset_within=lambda _: 0),
        {"has_fit": True, "headroom": Headroom(500)},
    ),
    "a step that nobody could measure": Row(FRESH, step(None), {}),
    "a step that was written down in part": Row(
        WRITING, step(900, writes=True, makes_states=True), {}
    ),
    # A step saved less than the one that made learning begin anew.
    "a smaller step is not learned from": Row(
        replace(VERIFYING, unexpected=UnexpectedSteps(nbytes=900), tries=1),
        step(700),
        {"unexpected": UnexpectedSteps(nbytes=900, smaller=1)},
    ),
    "a smaller step whose plan was made by its own forward": Row(
        replace(GUESSED, unexpected=UnexpectedSteps(nbytes=900)),
        step(700),
        replace(
            FRESH,
            unexpected=UnexpectedSteps(nbytes=900, smaller=1),
        ),
        (FORGET,),
    ),
    "a smaller step after eight others": Row(
        replace(
            WRITING,
            unexpected=UnexpectedSteps(nbytes=900, smaller=8),
        ),
        step(None),
        {},
    ),
    "a step that saved as much": Row(
        replace(
            FRESH,
            unexpected=UnexpectedSteps(nbytes=880, smaller=7),
        ),
        step(None),
        {"unexpected": UnexpectedSteps(nbytes=880)},
    ),
    # A settled step has held more than this one, which held 450 with what was resident.
    "a step that holds less than the one that waits to be measured": Row(
        replace(VERIFYING, higher=HigherSteps(count=1, held_nbytes=800, lower=2)),
        step(700),
        {"higher": HigherSteps(count=1, held_nbytes=800, lower=3)},
    ),
    "a step in which those modules save less": Row(
        replace(VERIFYING, higher=HigherSteps(held_nbytes=400, others=Counter(b=4))),
        step(700, ran_again=Counter(a=9, b=3)),
        {"higher": HigherSteps(held_nbytes=400, others=Counter(b=4), lower=1)},
    ),
    "a step in which they save as much": Row(
        replace(WRITING, higher=HigherSteps(held_nbytes=400, others=Counter(b=4))),
        step(None, ran_again=Counter(b=4)),
        {"higher": HigherSteps()},
    ),
    "the ninth of those that do": Row(
        replace(WRITING, higher=HigherSteps(count=1, held_nbytes=800, lower=8)),
        step(None),
        {"higher": HigherSteps(count=1)},
    ),
    "a step that holds about as much": Row(
        replace(WRITING, higher=HigherSteps(count=1, held_nbytes=455, lower=2)),
        step(None),
        {"higher": HigherSteps(count=1)},
    ),
    # A step is written down.
    "a step at a preset is written down, and is within the budget": Row(
        WRITING,
        written(Profile(peak=950)),
        {
            "phase": P.VERIFYING,
            "tries": 1,
            "profile": Profile(peak=950),
            "profiled": ONE,
            "profiled_at": 1,
            "has_fit": True,
            "headroom": Headroom(550, None, 500, 450),
            "attempts": Attempts().knowing(Profile(peak=950)),
        },
        (MAKE,),
    ),
    "a step at a preset is written down": Row(
        WRITING,
        written(co_resident_nbytes=7),
        {
            "phase": P.VERIFYING,
            "tries": 1,
            "profile": Profile(),
            "profiled": ONE,
            "profiled_at": 1,
            "co_resident_nbytes": 7,
            "headroom": Headroom(800),
            "attempts": Attempts().knowing(Profile()),
        },
        (above(1200), MAKE),
    ),
    "the first step is written down": Row(
        FRESH,
        written(),
        {
            "phase": P.VERIFYING,
            "tries": 1,
            "profile": Profile(),
            "profiled": ONE,
            "profiled_at": 1,
            "headroom": Headroom(800),
            "attempts": Attempts().knowing(Profile()),
        },
        (above(1200), MAKE),
    ),
    "a larger call is written down": Row(
        replace(IDLE, now=TWO, largest=TWO),
        written(),
        {
            "phase": P.VERIFYING,
            "tries": 1,
            "profiled": TWO,
            "profiled_at": 0,
            "headroom": Headroom(800),
            "attempts": Attempts().knowing(Profile()).knowing(Profile()),
        },
        (above(1200), MAKE),
    ),
    "plain training is written down, under a plan that changes nothing": Row(
        following(KEEPS, from_rehearsal=True),
        written(Profile(peak=1000)),
        {
            "tries": 1,
            "from_rehearsal": False,
            "has_fit": True,
            "profile": Profile(peak=1000),
            "profiled_at": 0,
            "headroom": Headroom(600, None, 450, 450),
            "attempts": KNOWN.attempts.after(KEEPS, 1000, was_profiled=True).knowing(
                Profile(peak=1000)
            ),
        },
        (MAKE,),
    ),
    "a step under an estimate is written down": Row(
        replace(GUESSED, margins=Margins(plain_nbytes=50)),
        written(),
        {
            "tries": 1,
            "from_rehearsal": False,
            "margins": Margins(plain_nbytes=0),
            "headroom": Headroom(800),
            "attempts": Attempts(taken=(Taken(1200, PLAN, was_profiled=True),)).knowing(Profile()),
        },
        (said(PLAN, 1200), MAKE),
    ),
    "a step under one of the smallest is written down": Row(
        replace(SMALLEST, from_rehearsal=True),
        written(),
        {
            "phase": P.VERIFYING,
            "tries": 1,
            "from_rehearsal": False,
            "headroom": Headroom(800),
            "attempts": TRIED.after(OTHER, 1200, was_profiled=True).knowing(Profile()),
        },
        (said(OTHER, 1200), MAKE),
    ),
    "a step under the given plan is written down": Row(
        CORRECTING,
        written(),
        {
            "phase": P.VERIFYING,
            "tries": 1,
            "from_rehearsal": False,
            "profile": Profile(),
            "profiled": ONE,
            "headroom": Headroom(800),
            "attempts": Attempts().knowing(Profile()),
        },
        (said_given(1200), MAKE),
    ),
    "a step that could not be written down": Row(WRITING, step(900, writes=True), {"tries": 1}),
    "five steps that could not be written down": Row(
        replace(WRITING, tries=4), step(900, writes=True), {"phase": P.SETTLED, "tries": 5}
    ),
    "five steps that could not be written down, nor measured": Row(
        replace(WRITING, tries=4, unmeasured=4),
        step(None, writes=True),
        {"phase": P.SETTLED, "tries": 5, "unmeasured": 5},
        (say(Line.BLIND),),
    ),
    "five steps above the budget whose backward nobody saw": Row(
        replace(CORRECTING, tries=4),
        step(1100, writes=True),
        {"phase": P.SETTLED, "tries": 5},
        (say(Line.OUTSIDE, peak_nbytes=1100, seen_nbytes=800),),
    ),
    "a step that climbed from an estimated plan: the next one begins where it has ended": Row(
        GUESSED,
        written(climbed=True, preset=3),
        {"plan": None, "preset": 3, "tries": 1, "headroom": Headroom()},
        (said(PLAN, 1200),),
    ),
    "a step that climbed from a plan that is no estimate": Row(
        VERIFYING, written(climbed=True, preset=3), {"tries": 1}, (said(PLAN, 1200),)
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
}
