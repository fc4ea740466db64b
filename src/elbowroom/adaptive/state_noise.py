"""Relative squared error that encoded optimizer states add to an update, after many steps.

Each step rounds the result of the step before, so errors accumulate for as long as a moment's decay
remembers: to tens or hundreds of times the error of one encoding. Figures are the worst of a GPT
and a ResNet-18 after 400 to 1200 steps, rounded up (benchmarks/results/running-states.json).
"""

from elbowroom.optim.formats import Group

_ADAMW = {"coat": 1.5e-3, "int8": 2.5e-4, "int4": 2.5e-2, "int4x2": 0.15}  # beta2 = 0.95
_ADAMW_SLOW = {"coat": 5e-3, "int8": 2.5e-3, "int4": 0.3, "int4x2": 0.6}  # 0.999
_LION = {"coat": 8e-2, "int8": 4e-2, "int4x2": 1.1}  # 0.99
_SGD = {"coat": 1e-3, "int8": 2e-4, "int4x2": 0.13}  # momentum 0.9
_SGD_SLOW = {"coat": 1.5e-2, "int8": 2.5e-3, "int4x2": 5.0}  # 0.99
_FAST_BETA2, _FAST_MOMENTUM = 0.95, 0.9


def update_noise(rule: str, group: Group, state: str) -> float:
    """Returns the noise of an update by this rule if a param group's states are held as `state`."""
    if state == "fp32":
        return 0.0
    if rule == "lion":
        return _LION[state]
    if rule == "sgd":
        return (_SGD if group["momentum"] <= _FAST_MOMENTUM else _SGD_SLOW)[state]
    return (_ADAMW if group["betas"][1] <= _FAST_BETA2 else _ADAMW_SLOW)[state]
