"""The state machine behind `er.fit`, which keeps a model's training within a memory budget.

    Fitting       runs the forwards of one model, with its FitOptions (`session.py`); `steps.py` has
                  the measurements of its steps, `guests.py` the steps that several models share,
                  and `shortage.py` handles exhausted memory
    Summary       the figures of a fitted model
    check_alone   refuses an optimizer whose states are chosen for another model
    repeat        runs a step again that ran out of memory

A frozen `FitState` has all that is known of forwards of one kind. Pure functions, which do not use
PyTorch, take a state and an observation, and return the next state and commands:

    phase.py         the phases, and a diagram of their order
    state.py         the state
    observations.py  observations        -->  transitions.py, measured.py, planned.py
    commands.py      commands            <--  and carried out by execute.py
    planner.py       moves the state of one kind of forward
    state_view.py    what is derived from it
    messages.py      every line that is logged
    refusals.py      every refusal of a budget

The package is not called `fit`, because `elbowroom.fit` is the public function.
"""

from elbowroom.fitting.options import FitOptions as FitOptions
from elbowroom.fitting.retry import repeat as repeat
from elbowroom.fitting.session import Fitting as Fitting
from elbowroom.fitting.state_formats import check_alone as check_alone
from elbowroom.fitting.summary import Summary as Summary
from elbowroom.fitting.summary import summary as summary
