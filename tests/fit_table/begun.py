"""What follows from a step that begins, a forward that ends, and a rehearsal."""

from collections import Counter
from dataclasses import replace

from elbowroom.fitting.attempts import Attempts
from elbowroom.fitting.commands import (
    BLAME_NO_CLASSES,
    LET_ROWS_WAIT,
    OPEN_CHECKPOINTS,
    RUN_LAYERS_AGAIN,
    RUN_PRODUCTS_AGAIN,
    RUN_STRETCHES_AGAIN,
    TAKE_SMALL,
    ForgetCalls,
    HoldAsGiven,
    Line,
    MakePlan,
    PlanByForward,
    Raise,
    RefusePresets,
    say,
)
from elbowroom.fitting.headroom import Headroom
from elbowroom.fitting.observations import (
    CannotRehearse,
    CodesWithdrawn,
    CoResidentBytes,
    Fallbacks,
    ForwardEnded,
    ForwardProfiled,
    GivenHeld,
    HeldMore,
    LargerKnown,
    LayersHeldTooMuch,
    ModelJoined,
    NoPlanLeft,
    NothingToDo,
    NotRepeatable,
    OptionsChanged,
    OutputsHeld,
    PlanOutgrown,
    Rehearsed,
    RehearsedInVain,
    RowsTakeTooMuch,
    StepBegan,
    UnexpectedStep,
)
from elbowroom.fitting.options import FitOptions, MemoryState
from elbowroom.fitting.parts import HigherSteps, UnexpectedSteps, Watched
from elbowroom.fitting.state import ReplacedState
from fit_table.values import (
    BEGIN,
    ERROR,
    ESTIMATES,
    FORGET,
    FRESH,
    GIVEN,
    GIVENS,
    GRADIENTS,
    GUESSED,
    IDLE,
    LAST,
    MEMORY,
    MORE,
    OF_FORWARD,
    ONE,
    PLAN,
    SETTLED,
    TRIED,
    TWO,
    UNSEEN,
    VERIFYING,
    WATCHING,
    WRITING,
    P,
    Plan,
    Profile,
    Row,
)

ROWS = {
    # A forward that runs a backward cannot be rehearsed.
    "a first forward cannot be rehearsed": Row(FRESH, CannotRehearse(), {"takes_anything": True}),
    "a forward cannot be rehearsed after a preset was measured": Row(
        WRITING,
        CannotRehearse(),
        replace(FRESH, phase=P.WRITING, takes_anything=True),
        (FORGET,),
    ),
    "nor where no preset fits": Row(
        replace(FRESH, infeasible=True),
        CannotRehearse(),
        replace(FRESH, phase=P.WRITING, takes_anything=True),
        (FORGET,),
    ),
    # A step begins.
    "the first step looks at a preset": Row(
        UNSEEN, StepBegan(MEMORY, ONE), {"now": ONE, "largest": ONE}
    ),
    "the first step follows what was given": Row(
        replace(UNSEEN, given=GIVEN),
        StepBegan(MEMORY, ONE),
        replace(GIVENS, headroom=Headroom()),
        (BEGIN, HoldAsGiven()),
    ),
    "what was given leaves room for transients": Row(
        replace(GIVENS, headroom=Headroom()),
        GivenHeld(MemoryState(150, 10, 20)),
        {"memory": MemoryState(150, 10, 20), "headroom": Headroom(420)},
    ),
    "a step like those before": Row(
        SETTLED, StepBegan(MemoryState(90), ONE), {"memory": MemoryState(90)}
    ),
    "gradients stand that did not before, and it may be too much": Row(
        SETTLED,
        StepBegan(GRADIENTS, ONE),
        replace(FRESH, memory=GRADIENTS, gradient_nbytes=150),
        (FORGET,),
    ),
    "gradients stand that did not as nothing needed to be done": Row(
        replace(IDLE, phase=P.SETTLED, profile=Profile(peak=851)),
        StepBegan(GRADIENTS, ONE),
        replace(FRESH, memory=GRADIENTS, gradient_nbytes=150),
        (FORGET,),
    ),
    "gradients stand that did not as a given plan was settled": Row(
        replace(GIVENS, phase=P.SETTLED),
        StepBegan(GRADIENTS, ONE),
        {"memory": GRADIENTS, "phase": P.GIVEN, "gradient_nbytes": 150},
    ),
    "gradients stand that did not before, and there is room": Row(
        replace(SETTLED, plan=Plan("small", peak=850)),
        StepBegan(GRADIENTS, ONE),
        {"memory": GRADIENTS},
    ),
    "gradients stand that did not before, and next to none": Row(
        replace(SETTLED, plan=Plan("large", peak=995)),
        StepBegan(MemoryState(110, gradient_nbytes=10), ONE),
        {"memory": MemoryState(110, gradient_nbytes=10)},
    ),
    "gradients stand, and nothing is known yet": Row(
        WRITING, StepBegan(GRADIENTS, ONE), {"memory": GRADIENTS}
    ),
    "fewer gradients stand than in a step that was measured": Row(
        replace(VERIFYING, gradient_nbytes=150),
        StepBegan(MEMORY, ONE),
        {"skipped_steps": 1},
    ),
    "fewer gradients stand, and nothing is to be learned": Row(
        replace(SETTLED, gradient_nbytes=150), StepBegan(MEMORY, ONE), {}
    ),
    "a smaller call": Row(replace(SETTLED, largest=TWO), StepBegan(MEMORY, ONE), {"now": ONE}),
    "a call as large as any, for whose size the plan was never measured": Row(
        replace(SETTLED, largest=TWO, proven=(ONE,), rounds=3, tries=2),
        StepBegan(MEMORY, TWO),
        {"now": TWO, "phase": P.VERIFYING, "rounds": 0, "tries": 0},
    ),
    "a call that is no larger than one for which it was": Row(
        replace(SETTLED, largest=TWO, proven=(ONE,)), StepBegan(MEMORY, ONE), {}
    ),
    "a larger call is planned by the same profile": Row(
        replace(
            SETTLED,
            rounds=2,
            tries=3,
            watched=Watched(is_done=True),
            preset=0,
            unexpected=UnexpectedSteps(varies=True),
        ),
        StepBegan(MEMORY, TWO),
        {
            "phase": P.VERIFYING,
            "now": TWO,
            "largest": TWO,
            "unexpected": UnexpectedSteps(varies=False),
            "headroom": Headroom(1000),
            "has_fit": False,
            "rounds": 0,
            "tries": 0,
            "preset": 1,
            "attempts": Attempts().knowing(Profile()),
        },
        (FORGET, MakePlan(replans=True)),
    ),
    "a larger call than a preset was settled for": Row(
        replace(WRITING, phase=P.SETTLED),
        StepBegan(MEMORY, TWO),
        {"phase": P.WRITING, "now": TWO, "largest": TWO, "headroom": Headroom(800)},
        (FORGET,),
    ),
    "a larger call than the given plan was settled for": Row(
        replace(GIVENS, phase=P.SETTLED, has_fit=True),
        StepBegan(MEMORY, TWO),
        {
            "phase": P.GIVEN,
            "now": TWO,
            "largest": TWO,
            "headroom": Headroom(1000),
            "has_fit": False,
        },
        (FORGET,),
    ),
    "a larger call than was rehearsed": Row(
        GUESSED,
        StepBegan(MEMORY, TWO),
        replace(FRESH, now=TWO, largest=TWO),
        (FORGET,),
    ),
    "after a step with more forwards": Row(
        replace(SETTLED, unexpected=UnexpectedSteps(count=1), only_largest=True),
        StepBegan(MEMORY, ONE, grew=True, calls=1),
        replace(
            FRESH,
            infeasible=True,
            unexpected=UnexpectedSteps(count=1),
            only_largest=True,
            before=ReplacedState(
                replace(SETTLED, unexpected=UnexpectedSteps(count=1), only_largest=True), 1
            ),
        ),
        (FORGET,),
    ),
    "after one with more forwards than nothing was settled for": Row(
        WRITING, StepBegan(MEMORY, ONE, grew=True), replace(FRESH, infeasible=True), (FORGET,)
    ),
    "after a step that diverged from what fits": Row(
        replace(
            SETTLED,
            unexpected=UnexpectedSteps(count=1, is_last=True),
        ),
        StepBegan(MEMORY, ONE),
        replace(
            FRESH,
            unexpected=UnexpectedSteps(count=1, varies=True),
            before=ReplacedState(replace(SETTLED, unexpected=UnexpectedSteps(count=1)), 1),
        ),
        (FORGET,),
    ),
    "after a step that diverged from what nobody has seen to fit": Row(
        replace(
            VERIFYING,
            unexpected=UnexpectedSteps(count=1, is_last=True),
        ),
        StepBegan(MEMORY, ONE),
        replace(FRESH, unexpected=UnexpectedSteps(count=1)),
        (FORGET,),
    ),
    "little more beside the model": Row(SETTLED, CoResidentBytes(10), {}),
    "little more than before beside the model": Row(
        replace(SETTLED, co_resident_nbytes=20), CoResidentBytes(30), {}
    ),
    "much beside a step that is not known": Row(WRITING, CoResidentBytes(11), {}),
    "another model runs in the step": Row(
        SETTLED, ModelJoined(MemoryState(150)), {"memory": MemoryState(150)}, ()
    ),
    "much more beside the model": Row(
        SETTLED,
        CoResidentBytes(11),
        {
            "phase": P.VERIFYING,
            "has_fit": False,
            "co_resident_nbytes": 11,
            "max_co_resident_nbytes": 11,
            "profile": Profile(111, 1211),
            "attempts": Attempts().knowing(Profile(111, 1211)),
        },
        (FORGET, MakePlan(replans=True)),
    ),
    "little of outputs of the forward before": Row(SETTLED, OutputsHeld(10), {}),
    "no more outputs than before": Row(replace(SETTLED, outputs_nbytes=200), OutputsHeld(200), {}),
    "outputs that the plan leaves room for": Row(
        SETTLED, OutputsHeld(100), {"outputs_nbytes": 100, "profile": Profile(100, 1300)}
    ),
    "outputs that may be too much for the plan": Row(
        SETTLED,
        OutputsHeld(101),
        {
            "phase": P.VERIFYING,
            "has_fit": False,
            "outputs_nbytes": 101,
            "profile": Profile(100, 1301),
            "attempts": Attempts().knowing(Profile(100, 1301)),
        },
        (FORGET, MakePlan(replans=True)),
    ),
    "outputs that may be too much for a plan by an estimate": Row(
        replace(GUESSED, tries=1, attempts=TRIED),
        OutputsHeld(101),
        {
            "tries": 0,
            "outputs_nbytes": 101,
            "profile": Profile(100, 1301),
            "attempts": Attempts().knowing(Profile(100, 1301)),
        },
        (FORGET, MakePlan(replans=True)),
    ),
    "outputs that may be too much for a given plan": Row(
        replace(GIVENS, phase=P.SETTLED, tries=2),
        OutputsHeld(101),
        {"phase": P.GIVEN, "tries": 0, "outputs_nbytes": 101},
    ),
    "outputs in a step that is measured anyway": Row(
        WRITING, OutputsHeld(101), {"outputs_nbytes": 101}
    ),
    "outputs where nothing is known but that it fits": Row(
        replace(FRESH, phase=P.SETTLED, has_fit=True),
        OutputsHeld(101),
        replace(FRESH, outputs_nbytes=101),
        (FORGET,),
    ),
    "another budget": Row(
        SETTLED,
        OptionsChanged(FitOptions(900)),
        {"phase": P.VERIFYING, "options": FitOptions(900), "has_fit": False},
        (FORGET, MakePlan(replans=True)),
    ),
    "another budget for what could not be planned": Row(
        replace(SETTLED, infeasible=True),
        OptionsChanged(FitOptions(900)),
        replace(FRESH, options=FitOptions(900)),
        (FORGET,),
    ),
    "another budget while codes are watched, which leaves no room to look": Row(
        WATCHING,
        OptionsChanged(FitOptions(900)),
        {
            "phase": P.VERIFYING,
            "options": FitOptions(900),
            "has_fit": False,
            "watched": Watched(is_done=False),  # so it is examined again
        },
        (FORGET, MakePlan(replans=True)),
    ),
    "another budget in the last resort": Row(
        LAST,
        OptionsChanged(FitOptions(900)),
        {
            "phase": P.VERIFYING,
            "options": FitOptions(900),
            "attempts": Attempts().knowing(Profile()),
            "measured_least": 1100,
        },
        (FORGET, MakePlan(replans=True)),
    ),
    "other options in the last resort, by which steps may take less": Row(
        LAST,
        OptionsChanged(FitOptions(900, exact=True)),
        {
            "phase": P.VERIFYING,
            "options": FitOptions(900, exact=True),
            "preset": 1,
            "attempts": Attempts().knowing(Profile()),
        },
        (FORGET, MakePlan(replans=True)),
    ),
    "a larger kind": Row(FRESH, LargerKnown(Headroom(70)), {"headroom": Headroom(None, 70)}),
    "after a step that diverged from a plan that is watched": Row(
        replace(
            WATCHING,
            unexpected=UnexpectedSteps(count=1, is_last=True),
        ),
        StepBegan(MEMORY, ONE),
        replace(
            FRESH,
            unexpected=UnexpectedSteps(count=1, varies=True),
            before=ReplacedState(replace(WATCHING, unexpected=UnexpectedSteps(count=1)), 1),
        ),
        (FORGET,),
    ),
    "another budget where nothing need be done, but for a step that no preset is sure to fit": Row(
        replace(IDLE, infeasible=True),
        OptionsChanged(FitOptions(900)),
        replace(FRESH, options=FitOptions(900)),
        (FORGET,),
    ),
    # Forwards.
    "a forward that climbed, of which nothing is known": Row(
        FRESH, ForwardEnded(3, impossible=False), {"preset": 3}
    ),
    "a forward that climbed": Row(VERIFYING, ForwardEnded(3, impossible=False), {}),
    "a forward that holds too much": Row(
        FRESH, ForwardEnded(5, impossible=True, saving="saving"), {}, (RefusePresets("saving"),)
    ),
    "a forward that diverged": Row(
        replace(
            SETTLED,
            unexpected=UnexpectedSteps(is_last=True, nbytes=600),
        ),
        ForwardEnded(1, impossible=False, before_nbytes=700),
        {"unexpected": UnexpectedSteps(is_last=True, nbytes=700)},
    ),
    "the first step that diverges": Row(
        SETTLED,
        UnexpectedStep(900),
        {
            "unexpected": UnexpectedSteps(count=1, is_last=True),
        },
        (say(Line.LARGER_STEP, held_nbytes=900, learns=True),),
    ),
    "the last step that diverges and is learned from": Row(
        replace(SETTLED, unexpected=UnexpectedSteps(count=2)),
        UnexpectedStep(),
        {
            "unexpected": UnexpectedSteps(count=3, is_last=True),
        },
        (say(Line.LARGER_STEP, held_nbytes=0, learns=True),),
    ),
    "one divergence too many": Row(
        replace(SETTLED, unexpected=UnexpectedSteps(count=3)),
        UnexpectedStep(),
        {
            "unexpected": UnexpectedSteps(count=4, is_last=False),
        },
        (say(Line.LARGER_STEP, held_nbytes=0, learns=False),),
    ),
    "a settled forward that held much more is measured": Row(
        replace(SETTLED, rounds=2, tries=3, higher=HigherSteps(lower=2)),
        HeldMore(800),
        {
            "phase": P.VERIFYING,
            "rounds": 0,
            "tries": 0,
            "higher": HigherSteps(count=1, held_nbytes=800),
        },
    ),
    "so is one that runs a module again which saves more": Row(
        replace(SETTLED, higher=HigherSteps(ran_again=Counter(a=2, b=3))),
        HeldMore(400, Counter(a=2, b=4, c=1)),
        {
            "phase": P.VERIFYING,
            "higher": HigherSteps(
                ran_again=Counter(a=2, b=3),
                count=1,
                held_nbytes=400,
                others=Counter(b=4, c=1),
            ),
        },
    ),
    "where nothing is planned, it is profiled": Row(
        replace(SETTLED, plan=None, higher=HigherSteps(count=1)),
        HeldMore(800),
        {"phase": P.WRITING, "higher": HigherSteps(count=2, held_nbytes=800)},
    ),
    "of a given plan it is compared with that": Row(
        replace(SETTLED, plan=GIVEN, given=GIVEN),
        HeldMore(800),
        {"phase": P.GIVEN, "higher": HigherSteps(count=1, held_nbytes=800)},
    ),
    "divergences that were said": Row(
        replace(SETTLED, unexpected=UnexpectedSteps(count=4)),
        UnexpectedStep(),
        {"unexpected": UnexpectedSteps(count=5)},
    ),
    "no plan fits a step that saved more, but smaller ones have followed": Row(
        replace(
            FRESH,
            unexpected=UnexpectedSteps(nbytes=900, smaller=1, varies=True),
            before=ReplacedState(SETTLED, 1),
        ),
        RehearsedInVain(ERROR),
        replace(
            SETTLED,
            attempts=Attempts(),
            unexpected=UnexpectedSteps(nbytes=900, smaller=1, varies=True),
        ),
        (ForgetCalls(1),),
    ),
    "no plan fits steps that save more from now on": Row(
        replace(
            FRESH,
            unexpected=UnexpectedSteps(nbytes=900, varies=True),
            before=ReplacedState(SETTLED, 1),
        ),
        RehearsedInVain(ERROR),
        {},
        (Raise(ERROR),),
    ),
    "layers that hold too much": Row(
        FRESH,
        LayersHeldTooMuch(Fallbacks(layers=True, stretches=True)),
        {},
        (say(Line.RUNS_AGAIN, rounds=False), RUN_LAYERS_AGAIN),
    ),
    "one layer that holds too much": Row(
        FRESH,
        LayersHeldTooMuch(Fallbacks(stretches=True)),
        {},
        (say(Line.RUNS_AGAIN, rounds=True), RUN_STRETCHES_AGAIN),
    ),
    "rows that take too much": Row(FRESH, RowsTakeTooMuch(), {}, (LET_ROWS_WAIT,)),
    "rows that take too much under a plan": Row(VERIFYING, RowsTakeTooMuch(), {}),
    "layers that hold too much under a plan": Row(VERIFYING, LayersHeldTooMuch(MORE), {}),
    "layers that hold too much under exact=True": Row(
        replace(FRESH, options=FitOptions(1000, exact=True)), LayersHeldTooMuch(MORE), {}
    ),
    "a module gives another result, and nothing is known": Row(
        replace(WRITING, tries=2), NotRepeatable(None), FRESH, (FORGET,)
    ),
    "a module gives another result": Row(
        SETTLED,
        NotRepeatable(Profile(peak=1300)),
        {
            "phase": P.VERIFYING,
            "has_fit": False,
            "profile": Profile(peak=1300),
            "attempts": Attempts().knowing(Profile(peak=1300)),
        },
        (FORGET, MakePlan(replans=True)),
    ),
    "codes are withdrawn from a plan that was settled on": Row(
        replace(SETTLED, rounds=2, attempts=TRIED),
        CodesWithdrawn(Profile(peak=1300)),
        {
            "phase": P.VERIFYING,
            "profile": Profile(peak=1300),
            "rounds": 0,
            "attempts": Attempts(),
            "withdrawn": True,
        },
    ),
    "codes are withdrawn from a plan that was given": Row(
        replace(GIVENS, phase=P.SETTLED),
        CodesWithdrawn(Profile()),
        {"phase": P.GIVEN, "profile": Profile(), "withdrawn": True},
    ),
    "codes are withdrawn while a plan is measured": Row(
        VERIFYING,
        CodesWithdrawn(Profile(peak=1300)),
        {"profile": Profile(peak=1300), "withdrawn": True},
    ),
    # A rehearsal.
    "a forward is rehearsed": Row(
        replace(FRESH, memory=MemoryState(100, co_resident_nbytes=7)),
        ForwardProfiled(OF_FORWARD),
        {"profiled": ONE, "co_resident_nbytes": 7, "is_recurrent": True, "small_nbytes": 60},
        (PlanByForward(OF_FORWARD),),
    ),
    "a plan by a rehearsal": Row(
        replace(FRESH, profiled=ONE, infeasible=True),
        Rehearsed(PLAN, MEMORY, ESTIMATES),
        {
            "phase": P.VERIFYING,
            "from_rehearsal": True,
            "was_rehearsed": True,
            "infeasible": False,
            "plan": PLAN.plan,
            "chosen": PLAN,
            "profile": Profile(),
            "headroom": Headroom(500),
            "attempts": Attempts(ESTIMATES),
        },
        (BEGIN,),
    ),
    "a plan by a rehearsal once a preset is known": Row(
        WRITING,
        Rehearsed(PLAN, MEMORY, ESTIMATES),
        {
            "phase": P.VERIFYING,
            "from_rehearsal": True,
            "was_rehearsed": True,
            "plan": PLAN.plan,
            "chosen": PLAN,
            "profile": Profile(),
            "headroom": Headroom(500),
            "attempts": Attempts(ESTIMATES),
        },
        (BEGIN,),
    ),
    "a forward holds too much for a plan of another one": Row(
        GUESSED, PlanOutgrown(), replace(FRESH, infeasible=True), (FORGET,)
    ),
    "before the first step all may be kept": Row(GUESSED, NothingToDo(), FRESH, (FORGET,)),
    "before the first step another plan is found than the given one": Row(
        replace(GIVENS, profiled=ONE),
        Rehearsed(PLAN, MEMORY, ESTIMATES),
        {
            "phase": P.VERIFYING,
            "from_rehearsal": True,
            "was_rehearsed": True,
            "plan": PLAN.plan,
            "chosen": PLAN,
            "profile": Profile(),
            "attempts": Attempts(ESTIMATES),
        },
        (BEGIN,),
    ),
    "no plan by a rehearsal": Row(FRESH, RehearsedInVain(ERROR), {}, (Raise(ERROR),)),
    "no plan by a rehearsal of an odd step": Row(
        replace(FRESH, unexpected=UnexpectedSteps(count=1), before=ReplacedState(SETTLED, 2)),
        RehearsedInVain(ERROR),
        replace(SETTLED, unexpected=UnexpectedSteps(count=1), attempts=Attempts()),
        (ForgetCalls(2),),
    ),
    "no plan by a rehearsal of an odd step, whose preset is known": Row(
        replace(WRITING, before=ReplacedState(replace(GIVENS, phase=P.SETTLED, has_fit=True), 1)),
        RehearsedInVain(ERROR),
        replace(GIVENS, phase=P.SETTLED, has_fit=True),
        (ForgetCalls(1),),
    ),
    # It was settled on though nobody had measured it.
    "no plan by a rehearsal of an odd step, and the one before was not measured yet": Row(
        replace(FRESH, before=ReplacedState(replace(VERIFYING, has_fit=True), 2)),
        RehearsedInVain(ERROR),
        replace(
            VERIFYING,
            phase=P.SETTLED,
            unexpected=UnexpectedSteps(is_last=True),
            attempts=Attempts(),
        ),
        (ForgetCalls(2),),
    ),
    "another budget, by which nobody has seen the steps before to fit": Row(
        replace(GUESSED, before=ReplacedState(SETTLED, 2)),
        OptionsChanged(FitOptions(900)),
        replace(FRESH, options=FitOptions(900)),
        (FORGET,),
    ),
    "more plans than leave out whole classes": Row(
        replace(FRESH, infeasible=True), NoPlanLeft(MORE), FRESH, (FORGET, BLAME_NO_CLASSES)
    ),
    "more plans than were measured, which may take less": Row(
        replace(WRITING, attempts=TRIED), NoPlanLeft(MORE), FRESH, (FORGET, BLAME_NO_CLASSES)
    ),
    "more plans once rows wait": Row(
        replace(WRITING, is_recurrent=True),
        NoPlanLeft(Fallbacks(layers=True, rows=True)),
        replace(FRESH, is_recurrent=True),
        (FORGET, LET_ROWS_WAIT),
    ),
    "more plans once linear layers run again": Row(
        replace(WRITING, is_recurrent=True),
        NoPlanLeft(Fallbacks(layers=True, checkpoints=True, products=True)),
        replace(FRESH, is_recurrent=True),
        (FORGET, RUN_PRODUCTS_AGAIN),
    ),
    "more plans once checkpoints are opened": Row(
        replace(WRITING, is_recurrent=True),
        NoPlanLeft(Fallbacks(layers=True, checkpoints=True)),
        replace(FRESH, is_recurrent=True),
        (FORGET, say(Line.OPENS), OPEN_CHECKPOINTS),
    ),
    "more plans once layers run again": Row(
        replace(WRITING, is_recurrent=True),
        NoPlanLeft(Fallbacks(layers=True)),
        replace(FRESH, is_recurrent=True),
        (FORGET, say(Line.RUNS_AGAIN, rounds=False), RUN_LAYERS_AGAIN),
    ),
    "more plans once layers run again in stretches": Row(
        replace(WRITING, is_recurrent=True),
        NoPlanLeft(Fallbacks(stretches=True)),
        replace(FRESH, is_recurrent=True),
        (FORGET, say(Line.RUNS_AGAIN, rounds=True), RUN_STRETCHES_AGAIN),
    ),
    "more plans once small tensors are planned": Row(
        replace(WRITING, is_recurrent=True, small_nbytes=51),
        NoPlanLeft(Fallbacks(stretches=True, small=True)),
        replace(FRESH, is_recurrent=True, small_nbytes=51),
        (FORGET, TAKE_SMALL),
    ),
    "small tensors are too few": Row(
        replace(WRITING, small_nbytes=50), NoPlanLeft(Fallbacks(small=True)), {}
    ),
    "small tensors are planned already": Row(
        replace(WRITING, small_nbytes=500), NoPlanLeft(Fallbacks()), {}
    ),
    "no more plans": Row(WRITING, NoPlanLeft(Fallbacks(layers=True)), {}),
}
