"""What follows from the answer of a planner."""

from dataclasses import replace

from elbowroom.fitting.attempts import Attempts, Candidate, Chosen, Smallest, Taken
from elbowroom.fitting.commands import (
    BLAME_NO_CLASSES,
    CheckPlan,
    Line,
    MakePlan,
    MakeRoomToWatch,
    MakeSmallest,
    Raise,
    ReadMeter,
    Refuse,
    StartMeter,
    TakePlan,
    Then,
    say,
)
from elbowroom.fitting.headroom import Headroom
from elbowroom.fitting.observations import (
    Fallbacks,
    NoiseMeasured,
    NoiseUsed,
    NoPlan,
    OptionsChanged,
    PlanMade,
    PlanTaken,
    RoomToWatch,
    SmallestMade,
    StepBegan,
)
from elbowroom.fitting.options import MemoryState
from elbowroom.fitting.parts import Margins, UnexpectedSteps, Watched
from fit_table.values import (
    ABOVE,
    AGAIN,
    BEGIN,
    ERROR,
    FORGET,
    FRESH,
    GRADIENTS,
    GUESSED,
    KEEPS,
    KNOWN,
    LAST,
    LEFT,
    LIMITED,
    LOSSY,
    MAKE,
    MEMORY,
    MORE,
    MUCH,
    NEARLY,
    ONE,
    OTHER,
    PLAN,
    SETTLED,
    SMALLEST,
    TRIED,
    TWO,
    VERIFYING,
    WATCHING,
    Call,
    P,
    Plan,
    Profile,
    Row,
    above,
    chosen,
    following,
    said,
    step,
)

KEPT = chosen(KEEPS.plan, Profile(peak=900))
PLAINLY = replace(
    KNOWN, phase=P.VERIFYING, profile=KEPT.candidate.profile, profiled_at=0
)  # a plain step was profiled
SAME, SETTLES = chosen(Plan("same")), {"phase": P.SETTLED}


def hasty(seconds):
    """Return a plan of the same profile that does other things, and takes so long."""
    plan = Plan("hasty", recompute=frozenset({"block"}), seconds=seconds)
    return Chosen(PLAN.candidate, plan)


ELSEWHERE = replace(hasty(1.2), candidate=Candidate("fp32", Profile(peak=901)))

ROWS = {
    # What planners answer.
    "a plan is made": Row(
        replace(KNOWN, phase=P.VERIFYING, margins=Margins(plain_nbytes=20), withdrawn=True),
        PlanMade(PLAN, MemoryState(90)),
        {
            "withdrawn": False,
            "plan": PLAN.plan,
            "chosen": PLAN,
            "memory": MemoryState(90),
            "headroom": Headroom(520),
        },
        (BEGIN,),
    ),
    "a plan is made that is known to take the whole budget": Row(
        replace(KNOWN, phase=P.VERIFYING, margins=Margins(plain_nbytes=100)),
        PlanMade(PLAN, MEMORY),
        {"plan": PLAN.plan, "chosen": PLAN, "headroom": Headroom(600)},
        (BEGIN,),
    ),
    "a plan is made that is known to take too much": Row(
        replace(KNOWN, phase=P.VERIFYING, margins=Margins(recompute_nbytes=101)),
        PlanMade(AGAIN, MEMORY),
        {"plan": AGAIN.plan, "chosen": AGAIN, "headroom": Headroom(0)},
        (BEGIN,),
    ),
    "nothing need be done": Row(
        PLAINLY,
        PlanMade(KEPT, MEMORY),
        {"phase": P.SETTLED, "chosen": KEPT, "preset": 0, "headroom": Headroom(500)},
        (BEGIN,),
    ),
    # Plain training was settled on by an estimate, and took 1.37 of a budget.
    "nothing need be done by a step that was no plain one: it is measured": Row(
        replace(PLAINLY, profiled_at=1),
        PlanMade(KEPT, MEMORY),
        {"plan": KEPT.plan, "chosen": KEPT, "headroom": Headroom(500)},
        (BEGIN,),
    ),
    "nothing need be done by a rehearsal: it is measured": Row(
        GUESSED, PlanMade(KEEPS, MEMORY), {"plan": KEEPS.plan, "chosen": KEEPS}, (BEGIN,)
    ),
    "nothing need be done once states take less than in a plain step: it is measured": Row(
        replace(PLAINLY, profile=Profile(peak=1001)),
        PlanMade(KEPT, MEMORY),
        {
            "plan": KEPT.plan,
            "chosen": KEPT,
            "profile": KEPT.candidate.profile,
            "profiled_at": None,
            "headroom": Headroom(500),
        },
        (BEGIN,),
    ),
    "nothing need be done, as a measured step shows": Row(
        following(KEEPS, profiled_at=1),
        step(1000),
        {
            "phase": P.SETTLED,
            "plan": None,
            "preset": 0,
            "tries": 1,
            "has_fit": True,
            "headroom": Headroom(600, None, 450, 450),
            "attempts": KNOWN.attempts.after(KEEPS, 1000),
        },
        (said(KEEPS, 1000),),
    ),
    "something need be done, as a measured step shows": Row(
        following(KEEPS, profiled_at=1),
        step(1001),
        {
            "tries": 1,
            "rounds": 1,
            "margins": Margins(plain_nbytes=101),
            "headroom": Headroom(601),
            "attempts": KNOWN.attempts.after(KEEPS, 1001),
        },
        (said(KEEPS, 1001), MAKE),
    ),
    "nothing need be done for a smaller call": Row(
        replace(PLAINLY, largest=TWO),
        PlanMade(KEPT, MEMORY),
        {"phase": P.IDLE, "chosen": KEPT, "preset": 0, "headroom": Headroom(500)},
        (BEGIN,),
    ),
    "nothing need be done once noise is known": Row(
        replace(SMALLEST, largest=TWO),
        PlanMade(KEEPS, MEMORY),
        {"chosen": KEEPS, "plan": KEEPS.plan},
        (BEGIN,),
    ),
    "nothing need be done for a smaller call than the largest, as one of the smallest shows": Row(
        following(KEEPS, P.SMALLEST, largest=Call(9), rounds=3),
        step(800),
        {
            "phase": P.IDLE,
            "plan": None,
            "preset": 0,
            "tries": 1,
            "has_fit": True,
            "headroom": Headroom(450),
            "proven": (ONE,),
            "attempts": KNOWN.attempts.after(KEEPS, 887),
        },
        (said(KEEPS, 887),),
    ),
    "the same plan is rebuilt, and fits": Row(
        GUESSED, PlanMade(SAME, MemoryState(90), fits=True), {**SETTLES, "memory": MemoryState(90)}
    ),
    "a plan that fits is hardly worse than the next": Row(
        GUESSED, PlanMade(hasty(1.196), MEMORY, fits=True), SETTLES
    ),
    "a plan that fits gives way to one that takes less time": Row(
        GUESSED,
        PlanMade(hasty(1.19), MEMORY, fits=True),
        {"plan": hasty(1.19).plan, "chosen": hasty(1.19)},
        (BEGIN,),
    ),
    "a plan that fits gives way to one of another profile": Row(
        GUESSED,
        PlanMade(ELSEWHERE, MEMORY, fits=True),
        {"plan": ELSEWHERE.plan, "chosen": ELSEWHERE, "profile": ELSEWHERE.candidate.profile},
        (BEGIN,),
    ),
    "a plan that was too large gives way to one that takes more time": Row(
        GUESSED,
        PlanMade(hasty(1.3), MEMORY),
        {"plan": hasty(1.3).plan, "chosen": hasty(1.3)},
        (BEGIN,),
    ),
    "a plan is taken again": Row(
        replace(SETTLED, plan=OTHER.plan),
        PlanTaken(PLAN, MEMORY),
        {"plan": PLAN.plan, "chosen": PLAN},
        (BEGIN,),
    ),
    "no plan fits what a smaller call tells": Row(
        replace(KNOWN, phase=P.VERIFYING, largest=TWO),
        NoPlan(ERROR, MORE),
        replace(FRESH, largest=TWO, only_largest=True),
        (FORGET,),
    ),
    "no plan fits a smaller call than the one that was written down": Row(
        replace(KNOWN, phase=P.VERIFYING, largest=TWO, profiled=TWO),
        NoPlan(ERROR, MORE),
        replace(FRESH, largest=TWO, only_largest=True),
        (FORGET,),
    ),
    "no plan fits a larger call than the one that was written down": Row(
        replace(KNOWN, phase=P.VERIFYING, largest=TWO, now=TWO),
        NoPlan(ERROR, MORE),
        replace(FRESH, largest=TWO, now=TWO, only_largest=True),
        (FORGET,),
    ),
    # It named 5.33 MiB of a step without gradients, and refused that for those with them.
    "no plan fits, and the step that begins has gradients that none before had": Row(
        replace(KNOWN, phase=P.VERIFYING, memory=GRADIENTS),
        NoPlan(ERROR, MORE),
        replace(FRESH, memory=GRADIENTS),
        (FORGET,),
    ),
    "no plan fits while another model learns that ran inside": Row(
        replace(KNOWN, phase=P.VERIFYING, others_learn=True, tries=7),
        NoPlan(ERROR, MORE),
        {"phase": P.WRITING, "plan": None, "headroom": Headroom(0)},
    ),
    "no plan fits once noise is known, while another model learns that ran inside": Row(
        replace(SMALLEST, others_learn=True, tries=1),
        NoPlan(ERROR, MORE),
        {"phase": P.WRITING, "plan": None, "headroom": Headroom(0)},
    ),
    "no plan fits though another model has had its time to learn": Row(
        replace(KNOWN, phase=P.VERIFYING, others_learn=True, tries=8),
        NoPlan(ERROR, Fallbacks()),
        {"phase": P.IDLE},
        (Raise(ERROR),),
    ),
    "no plan fits, and more may be allowed": Row(
        replace(KNOWN, phase=P.VERIFYING), NoPlan(ERROR, MORE), FRESH, (FORGET, BLAME_NO_CLASSES)
    ),
    "no plan fits": Row(
        replace(KNOWN, phase=P.VERIFYING),
        NoPlan(ERROR, Fallbacks()),
        {"phase": P.IDLE},
        (Raise(ERROR),),
    ),
    "no plan fits, and the least comes near: it is measured": Row(
        replace(KNOWN, phase=P.VERIFYING),
        NoPlan(NEARLY, Fallbacks()),
        {"was_rehearsed": True},
        (MakeSmallest(),),
    ),
    "no plan fits a step that runs backward inside of forward: the least is measured": Row(
        replace(KNOWN, phase=P.VERIFYING, takes_anything=True),
        NoPlan(ERROR, Fallbacks()),
        {"was_rehearsed": True},
        (MakeSmallest(),),
    ),
    "no plan of the limit on noise fits, and the least comes near": Row(
        replace(KNOWN, phase=P.VERIFYING, profile=Profile(noise=())),
        NoPlan(NEARLY, Fallbacks()),
        {"phase": P.IDLE},
        (Raise(NEARLY),),
    ),
    "the first of the smallest, where none was measured": Row(
        replace(KNOWN, phase=P.VERIFYING),
        SmallestMade(Attempts(), Smallest(OTHER, from_rehearsal=False)),
        {"phase": P.SMALLEST, "attempts": Attempts()},
        (say(Line.NEAR, plan=OTHER.plan), TakePlan(OTHER)),
    ),
    # It was said again after a smallest plan was profiled.
    "the smallest plans of a new profile": Row(
        replace(VERIFYING, attempts=LEFT),
        SmallestMade(LEFT, Smallest(PLAN, from_rehearsal=False)),
        {"phase": P.SMALLEST},
        (TakePlan(PLAN),),
    ),
    "no smallest is found, where none was measured": Row(
        replace(KNOWN, phase=P.VERIFYING),
        SmallestMade(Attempts(), None),
        {"attempts": Attempts()},
        (CheckPlan(),),
    ),
    "no plan fits, but the preset has been seen to": Row(
        replace(KNOWN, phase=P.VERIFYING, profile=Profile(peak=1000), profiled_at=1),
        NoPlan(ERROR, Fallbacks()),
        {"phase": P.SETTLED},
    ),
    # It settled on a preset that no step had run at.
    "no plan fits, and the step that was within the budget ran at another preset": Row(
        replace(KNOWN, phase=P.VERIFYING, profile=Profile(peak=1000), profiled_at=0),
        NoPlan(ERROR, Fallbacks()),
        {"phase": P.IDLE},
        (Raise(ERROR),),
    ),
    "no plan fits, but one that was measured": Row(
        replace(VERIFYING, attempts=Attempts(taken=(Taken(1000, PLAN),))),
        NoPlan(ERROR, MORE),
        {"phase": P.SETTLED},
        (TakePlan(PLAN),),
    ),
    # It settled there, and took more than the budget: profiled steps may take less than others.
    "no plan fits, but the one that the profiled step followed": Row(
        replace(VERIFYING, attempts=Attempts(taken=(Taken(1000, PLAN, was_profiled=True),))),
        NoPlan(ERROR, MORE),
        {},
        (TakePlan(PLAN),),
    ),
    "no plan fits, and the one that the profiled step followed took more in the next": Row(
        replace(
            VERIFYING,
            rounds=1,
            attempts=Attempts(taken=(Taken(1000, PLAN, was_profiled=True), Taken(1100, PLAN))),
        ),
        NoPlan(ERROR, Fallbacks()),
        {"margins": Margins(plain_nbytes=0)},
        (MakeSmallest(),),
    ),
    # It was an AssertionError: forwards that climb tell no peak of their plan.
    "no plan is left after forwards that held more than was planned for": Row(
        replace(VERIFYING, rounds=1, attempts=Attempts(), margins=Margins(plain_nbytes=100)),
        NoPlan(ERROR, Fallbacks()),
        {"margins": Margins(plain_nbytes=0)},
        (MakeSmallest(),),
    ),
    # It was an AssertionError: no plan was followed that a smaller one could take the place of.
    "no plan fits a larger call than nothing need be done for, by a plan that was rebuilt": Row(
        replace(KNOWN, phase=P.VERIFYING, rounds=1),
        NoPlan(ERROR, Fallbacks()),
        {"phase": P.IDLE},
        (Raise(ERROR),),
    ),
    "no plan fits another budget": Row(
        replace(KNOWN, phase=P.VERIFYING),
        NoPlan(ERROR, Fallbacks(), replans=True),
        FRESH,
        (FORGET,),
    ),
    "no plan fits once noise is known": Row(
        replace(SMALLEST),
        NoPlan(ERROR, Fallbacks()),
        {"phase": P.IDLE, "plan": None},
        (Raise(ERROR),),
    ),
    "no plan is left by what one was wrong by, and one has fit": Row(
        replace(VERIFYING, rounds=1, attempts=Attempts(taken=(MUCH, Taken(1000, OTHER)))),
        NoPlan(ERROR, MORE),
        {"phase": P.SETTLED},
        (TakePlan(OTHER),),
    ),
    "no plan is left by what one was wrong by, and more may be allowed": Row(
        replace(VERIFYING, rounds=1, attempts=TRIED),
        NoPlan(ERROR, MORE),
        FRESH,
        (FORGET, BLAME_NO_CLASSES),
    ),
    "no plan is left of an estimate: its smallest is profiled, not the one that has exceeded": Row(
        replace(GUESSED, attempts=TRIED, margins=Margins(plain_nbytes=70)),
        NoPlan(ERROR, Fallbacks()),
        {"margins": Margins(plain_nbytes=0)},
        (MakeSmallest(),),
    ),
    "no plan is left by what one was wrong by": Row(
        replace(
            VERIFYING,
            rounds=1,
            attempts=TRIED,
            margins=Margins(plain_nbytes=100, recompute_nbytes=20),
        ),
        NoPlan(ERROR, Fallbacks()),
        {
            "margins": Margins(plain_nbytes=0, recompute_nbytes=0),
        },
        (MakeSmallest(),),
    ),
    "the first of the smallest": Row(
        replace(VERIFYING, attempts=TRIED),
        SmallestMade(LEFT, Smallest(OTHER, from_rehearsal=True)),
        {"phase": P.SMALLEST, "from_rehearsal": True, "attempts": LEFT},
        (say(Line.SMALLEST, least_nbytes=1100), TakePlan(OTHER)),
    ),
    "another of the smallest": Row(
        SMALLEST,
        SmallestMade(LEFT, Smallest(AGAIN, from_rehearsal=False)),
        {"attempts": LEFT},
        (TakePlan(AGAIN),),
    ),
    "none of the smallest is left": Row(
        SMALLEST,
        SmallestMade(LEFT, None),
        {"phase": P.LAST_RESORT, "plan": None, "attempts": LEFT, "headroom": Headroom(0)},
        (say(Line.UNCORRECTED, least_nbytes=1100, preset="exact", refuses=False),),
    ),
    "none of the smallest is left, and no preset is known to add as little noise": Row(
        replace(SMALLEST, options=LIMITED, profile=Profile(noise="shares")),
        SmallestMade(LEFT, None),
        {"phase": P.SETTLED, "attempts": LEFT},
        (Refuse(MUCH),),
    ),
    "the same, of a step that is an exception": Row(
        replace(
            SMALLEST,
            options=LIMITED,
            profile=Profile(noise="shares"),
            unexpected=UnexpectedSteps(varies=True),
        ),
        SmallestMade(LEFT, None),
        {"phase": P.SETTLED, "attempts": LEFT},
        (
            TakePlan(MUCH.chosen),
            say(Line.ABOVE, peak_nbytes=1100, why="took no less within the limit of noise"),
        ),
    ),
    "no smallest is found, and no preset was seen to fit": Row(
        replace(VERIFYING, was_rehearsed=True, attempts=TRIED),
        SmallestMade(LEFT, None),
        {"phase": P.LAST_RESORT, "plan": None, "attempts": LEFT, "preset": 5},
        (say(Line.UNCORRECTED, least_nbytes=1100, preset="dither, 4 levels", refuses=True),),
    ),
    # What codes add.
    "a lossy plan fits": Row(
        replace(following(LOSSY), margins=Margins(plain_nbytes=20)),
        step(900),
        {
            "tries": 1,
            "has_fit": True,
            "watched": Watched(is_done=True),
            "headroom": Headroom(500, None, 550, 450),
            "attempts": KNOWN.attempts.after(LOSSY, 900),
        },
        (said(LOSSY, 900), MakeRoomToWatch(20 + 60)),
    ),
    "there is room to watch": Row(
        following(PLAN, watched=Watched(is_done=True)),
        RoomToWatch(LOSSY.plan),
        {"phase": P.WATCHING, "plan": LOSSY.plan},
        (BEGIN, StartMeter()),
    ),
    "there is room to watch one of the smallest": Row(
        SMALLEST,
        RoomToWatch(LOSSY.plan),
        {"phase": P.WATCHING, "watched": Watched(resumes=P.SMALLEST), "plan": LOSSY.plan},
        (BEGIN, StartMeter()),
    ),
    "there is no room to watch": Row(
        VERIFYING,
        RoomToWatch(None),
        {"phase": P.WATCHING},
        (StartMeter(predicts=True),),
    ),
    "noise is predicted, and not limited": Row(
        WATCHING,
        NoiseMeasured("shares", predicted=True, added="added"),
        {"phase": P.SETTLED, "watched": Watched(is_done=True, added="added")},
        (say(Line.ADDED, added="added"),),
    ),
    "a plan is followed after another one, whose noise was predicted": Row(
        replace(VERIFYING, watched=Watched(added="added")),
        RoomToWatch(LOSSY.plan),
        {"phase": P.WATCHING, "plan": LOSSY.plan, "watched": Watched()},
        (BEGIN, StartMeter()),
    ),
    "there is no room to watch, and none to predict": Row(
        following(chosen(replace(LOSSY.plan, noise=0.25))),
        RoomToWatch(None, predicts=False),
        {"phase": P.SETTLED},
        (say(Line.UNKNOWN, why="the budget leaves no room to look", noise=0.25 * 12),),
    ),
    "a step is watched": Row(WATCHING, step(900), {}),
    "a watched step takes the whole budget": Row(WATCHING, step(1000), {}),
    "enough steps are watched": Row(WATCHING, step(900, watched=True), {}, (ReadMeter(),)),
    "a watched step is above the budget": Row(
        WATCHING, step(1001), {}, (said(LOSSY, 1001), ReadMeter())
    ),
    "noise is measured": Row(
        replace(WATCHING, rounds=2),
        NoiseMeasured("shares"),
        {"phase": P.VERIFYING, "rounds": 0, "profile": Profile(noise="shares")},
        (MAKE, Then(NoiseUsed(is_measured=True))),
    ),
    "noise is measured of one of the smallest, and limited": Row(
        replace(WATCHING, options=LIMITED, watched=Watched(resumes=P.SMALLEST)),
        NoiseMeasured("shares"),
        {
            "phase": P.SMALLEST,
            "profile": Profile(noise="shares"),
            "attempts": Attempts().knowing(Profile(noise="shares")),
        },
        (CheckPlan(), MAKE, Then(NoiseUsed(is_measured=True))),
    ),
    # It settled on a plan whose noise nobody knew, and that no limit had bounded.
    "there is no room to watch, and noise is limited": Row(
        replace(VERIFYING, options=LIMITED),
        RoomToWatch(None),
        {"phase": P.WATCHING},
        (StartMeter(predicts=True),),
    ),
    "noise is predicted, and limited": Row(
        replace(WATCHING, options=LIMITED),
        NoiseMeasured("shares", predicted=True),
        {
            "phase": P.VERIFYING,
            "profile": Profile(noise="shares"),
            "attempts": Attempts().knowing(Profile(noise="shares")),
            "watched": Watched(is_done=True, predicts=True),
        },
        (CheckPlan(), MAKE, Then(NoiseUsed(is_measured=True))),
    ),
    # A forward alone tells too much to refuse what was measured to fit: smaller plans are measured.
    "noise is predicted and limited, and the step was planned from a forward alone": Row(
        replace(WATCHING, options=LIMITED, from_rehearsal=True),
        NoiseMeasured("shares", predicted=True),
        {
            "phase": P.VERIFYING,
            "profile": Profile(noise="shares"),
            "attempts": Attempts().knowing(Profile(noise="shares")),
            "watched": Watched(is_done=True, predicts=True),
        },
        (MAKE, Then(NoiseUsed(is_measured=True))),
    ),
    "another budget is given where noise is predicted: there may be room now": Row(
        replace(
            SETTLED, options=LIMITED, profile=Profile(noise=()), watched=Watched(predicts=True)
        ),
        OptionsChanged(LIMITED),
        {
            "phase": P.VERIFYING,
            "profile": Profile(),
            "headroom": SETTLED.headroom.grown(1.0),
            "has_fit": False,
            "attempts": Attempts().knowing(Profile()),
            "watched": Watched(predicts=False),
        },
        (FORGET, MakePlan(replans=True)),
    ),
    "noise was not told": Row(
        SETTLED,
        NoiseUsed(is_measured=False),
        {},
        (say(Line.UNKNOWN, why="the watched steps did not tell"),),
    ),
    "noise is used by a lossy plan": Row(
        following(LOSSY), NoiseUsed(is_measured=True), {}, (say(Line.NOISE, plan=LOSSY.plan),)
    ),
    "noise is used by an exact plan": Row(VERIFYING, NoiseUsed(is_measured=True), {}),
    # The last resort.
    "the last resort fits, and its forwards may hold what they have held": Row(
        LAST,
        step(1000),
        {"phase": P.SETTLED, "has_fit": True, "headroom": Headroom(600, None, 450, 450)},
    ),
    "the last resort is not measured": Row(LAST, step(None), {}),
    "the last resort does not fit, nor has a preset been seen to": Row(
        LAST, step(1200), {"phase": P.SETTLED}, (Refuse(MUCH),)
    ),
    "the last resort does not fit, and the step that begins has gradients that none had": Row(
        LAST,
        replace(step(1200), memory=GRADIENTS),
        replace(FRESH, memory=GRADIENTS, measured_least=1100),
        (above(1200), FORGET),
    ),
    "the last resort does not hold either, but other steps have fit": Row(
        replace(LAST, unexpected=UnexpectedSteps(varies=True)),
        step(1200),
        {"phase": P.SETTLED},
        (TakePlan(PLAN), say(Line.ABOVE, peak_nbytes=1100, **ABOVE)),
    ),
    "the last resort takes more than a plan has": Row(
        replace(LAST, was_rehearsed=False),
        step(1200),
        {"phase": P.SETTLED},
        (TakePlan(PLAN), say(Line.ABOVE, peak_nbytes=1100, **ABOVE)),
    ),
    "the last resort takes more than a plan that fits": Row(
        replace(LAST, was_rehearsed=False, attempts=Attempts(taken=(Taken(1000, PLAN),))),
        step(1100),
        {"phase": P.SETTLED},
        (above(1100), TakePlan(PLAN)),
    ),
    "the last resort takes as much as a plan has": Row(
        replace(LAST, was_rehearsed=False),
        step(1100),
        {"phase": P.SETTLED},
        (say(Line.ABOVE, peak_nbytes=1100, **ABOVE),),
    ),
    "the last resort takes the least": Row(
        replace(LAST, was_rehearsed=False),
        step(1050),
        {"phase": P.SETTLED},
        (say(Line.ABOVE, peak_nbytes=1050, **ABOVE),),
    ),
    "a step diverges in the last resort": Row(
        replace(
            LAST,
            unexpected=UnexpectedSteps(count=1, is_last=True),
        ),
        StepBegan(MEMORY, ONE),
        replace(FRESH, unexpected=UnexpectedSteps(count=1), measured_least=1100),
        (FORGET,),
    ),
}
