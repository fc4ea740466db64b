"""Controllers that change bits, levels and bounds during a training.

    NoiseBudget   the fewest bytes whose added variance stays below a share of the mini-batch's
    LeanBudget    the same for the levels of `Lean`
    ActNN         an average number of bits, distributed by sensitivity (a baseline)
    CometBounds   error bounds that follow the momentum of each layer's gradient
    Guard         finer codes as soon as the training loss gets worse, coarser ones otherwise

Each is a policy for `er.saving` that observes its own codes (`base.py`), and has a `state_dict`.
"""

from elbowroom.adaptive.actnn import ActNN as ActNN
from elbowroom.adaptive.base import Adaptive as Adaptive
from elbowroom.adaptive.bounds import CometBounds as CometBounds
from elbowroom.adaptive.guard import Guard as Guard
from elbowroom.adaptive.noise_budget import LeanBudget as LeanBudget
from elbowroom.adaptive.noise_budget import NoiseBudget as NoiseBudget
