"""ADAPTATION: what changes settings while a training runs.

    NoiseBudget   the fewest bytes whose added variance stays a share of the mini-batch's
    LeanBudget    the same with the levels of `Lean`
    ActNN         an average number of bits, spread by sensitivity (a baseline)
    CometBounds   error bounds that follow the momentum of each layer's gradient
    Guard         milder codes as soon as the training loss suffers, leaner ones while it does not
    BatchAdvisor  how large a batch the saved memory would take: says so, and does nothing
    Fitting       what `er.fit` runs, by its Terms; Summary: what became of it
    find_largest  the largest batch that a budget has room for
    check_alone   refuses an optimizer whose states are chosen for another model
    repeat        runs a step again that ran out of memory
    Profiling     writes down one step of a program
    Discovery     finds the model and the optimizers of somebody else's program

The first five are policies for `er.saving` that watch their own codes (`adaptive.py`).
"""

from elbowroom.control.actnn import ActNN as ActNN
from elbowroom.control.adaptive import Adaptive as Adaptive
from elbowroom.control.batch import BatchAdvisor as BatchAdvisor
from elbowroom.control.batch import BatchProposal as BatchProposal
from elbowroom.control.bounds import CometBounds as CometBounds
from elbowroom.control.budget import NoiseBudget as NoiseBudget
from elbowroom.control.discovery import Discovery as Discovery
from elbowroom.control.fitting import Fitting as Fitting
from elbowroom.control.guard import Guard as Guard
from elbowroom.control.largest import LargestBatch as LargestBatch
from elbowroom.control.largest import find_largest as find_largest
from elbowroom.control.lean import LeanBudget as LeanBudget
from elbowroom.control.profiling import Profiling as Profiling
from elbowroom.control.repeat import repeat as repeat
from elbowroom.control.states import check_alone as check_alone
from elbowroom.control.summary import Summary as Summary
from elbowroom.control.summary import summary as summary
from elbowroom.control.terms import Terms as Terms
