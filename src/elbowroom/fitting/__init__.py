"""The machine behind `er.fit`: it keeps a model's training under a budget of bytes.

    Fitting       runs the forwards of one model, by its FitOptions (`session.py`); what is
                  measured of its steps (`steps.py`); where memory runs out (`shortage.py`)
    Summary       what became of a budget
    check_alone   refuses an optimizer whose states are chosen for another model
    repeat        runs a step again that ran out of memory

What is known of forwards of one kind is a frozen `FitState`. What is seen of them moves it, and it
asks for what is to be done, by pure functions that know no PyTorch:

    phase.py         the phases, and a picture of which follow which
    state.py         all that decides
    observations.py  what is seen        -->  transitions.py, measured.py, planned.py
    commands.py      what is asked for   <--  and carried out by execute.py
    planning.py      what forwards of one kind do moves their state
    followed.py      what is read off it
    messages.py      every line that is logged, and every refusal

The package is not called `fit`, because `elbowroom.fit` is the public function.
"""

from elbowroom.fitting.options import FitOptions as FitOptions
from elbowroom.fitting.retry import repeat as repeat
from elbowroom.fitting.session import Fitting as Fitting
from elbowroom.fitting.state_formats import check_alone as check_alone
from elbowroom.fitting.summary import Summary as Summary
from elbowroom.fitting.summary import summary as summary
