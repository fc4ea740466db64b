"""Optimizers with encoded states: `torch.optim` in a fourth of its memory.

    opt = er.optim.AdamW(model.parameters(), lr=3e-4, state="int8")   # 2 bytes each, not 8

    formats.py      the format of each parameter's states, and its bytes
    base.py         the step that all share: checks, then one kernel call per device and format
    batch.py        groups the parameters of a step into these calls
    device_steps.py steps that a GPU counts itself, so that a CUDA graph may launch them again
    verdict.py      whether a step is done, and when the host reads this
    parameters.py   which parameters can be updated, and how; checked before each step
    layout.py       the states that an optimizer has for a parameter
    rules.py        AdamW, Lion and SGD: the settings of a rule, as numbers for the kernel
    release.py      gradients that are applied and freed inside backward
    order.py        the order of a parameter, and of its codes, in memory
    sharded.py      parameters that are distributed over processes (DTensor)
    settings.py     the possible settings
    state_dict.py   saving and loading, and conversion from and to torch.optim
    checked.py      checks of a state_dict before it is loaded
    auto.py         state="auto": the formats to choose from, and the conversion of states
    transcode.py    converts the states of one parameter to another format or order

The mathematics is in `kernels/reference/step.py` and `moments.py`.
"""

from elbowroom.optim.formats import STATES as STATES
from elbowroom.optim.formats import state_nbytes as state_nbytes
from elbowroom.optim.release import GradientRelease as GradientRelease
from elbowroom.optim.rules import SGD as SGD
from elbowroom.optim.rules import AdamW as AdamW
from elbowroom.optim.rules import Lion as Lion
