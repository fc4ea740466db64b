"""ADAPTATION: controllers that move bits, levels and bounds while a training runs.

    NoiseBudget   the fewest bytes whose added variance stays a share of the mini-batch's
    LeanBudget    the same with the levels of `Lean`
    ActNN         an average number of bits, spread by sensitivity (a baseline)
    CometBounds   error bounds that follow the momentum of each layer's gradient
    Guard         milder codes as soon as the training loss suffers, leaner ones while it does not

Each is a policy for `er.saving` that watches its own codes (`base.py`), with a `state_dict`.
"""

from elbowroom.adaptive.actnn import ActNN as ActNN
from elbowroom.adaptive.base import Adaptive as Adaptive
from elbowroom.adaptive.bounds import CometBounds as CometBounds
from elbowroom.adaptive.guard import Guard as Guard
from elbowroom.adaptive.lean import LeanBudget as LeanBudget
from elbowroom.adaptive.noise_budget import NoiseBudget as NoiseBudget
