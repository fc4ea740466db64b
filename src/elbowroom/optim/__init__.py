"""Optimizers over encoded states: `torch.optim` in a fourth of its memory.

    opt = er.optim.AdamW(model.parameters(), lr=3e-4, state="int8")   # 2 bytes each, not 8

    formats.py      which parameter is held how, and in how many bytes
    base.py         the step that all share: checks, then one kernel call a device and format
    batch.py        the parameters of a step, gathered into these calls
    device_steps.py steps that a GPU counts for itself, so that a CUDA graph may launch them again
    verdict.py      whether a step is done, and when the host reads that
    parameters.py   which parameters can be updated, and how, asked before each step
    layout.py       which states an optimizer has for a parameter
    adamw.py lion.py sgd.py      the settings of a rule, as the numbers that the kernel takes
    release.py      gradients that are applied, and freed, inside backward
    order.py        in which order a parameter, and its codes, lie in memory
    sharded.py      parameters that are spread over processes (DTensor)
    settings.py     which settings are possible
    state_dict.py   save and load, and to and from what torch.optim saves
    checked.py      what a state_dict must be to be loaded
    auto.py         state="auto": which formats may be chosen, and states that exist changed to one
    transcode.py    the states of one parameter from one format, or order, to another

The mathematics is in `kernels/reference/step.py` and `moments.py`.
"""

from elbowroom.optim.adamw import AdamW as AdamW
from elbowroom.optim.formats import STATES as STATES
from elbowroom.optim.formats import state_nbytes as state_nbytes
from elbowroom.optim.lion import Lion as Lion
from elbowroom.optim.release import GradientRelease as GradientRelease
from elbowroom.optim.sgd import SGD as SGD
