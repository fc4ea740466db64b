"""The machine behind `er.fit`: it keeps a model's training under a budget of bytes.

    Fitting       runs the forwards of one model, by its FitOptions (`session.py`, `planning.py`)
    Summary       what became of a budget
    check_alone   refuses an optimizer whose states are chosen for another model
    repeat        runs a step again that ran out of memory

The package is not called `fit`, because `elbowroom.fit` is the public function.
"""

from elbowroom.fitting.options import FitOptions as FitOptions
from elbowroom.fitting.retry import repeat as repeat
from elbowroom.fitting.session import Fitting as Fitting
from elbowroom.fitting.state_formats import check_alone as check_alone
from elbowroom.fitting.summary import Summary as Summary
from elbowroom.fitting.summary import summary as summary
