"""Measures, once a process, how long an optimizer's update takes by format of its states.

On 2^20 elements, the best of a few runs: 16 MiB for a moment. What the formats differ by is 0.50 ns
an element so, and 0.42 on 2^23 (fp32 and int8 of AdamW, EPYC, two cores, best of nine).
"""

from functools import cache

import torch

from elbowroom.measure.timing import least_s
from elbowroom.optim import SGD, AdamW, Lion
from elbowroom.optim.release import Complete

_KINDS: dict[str, type[AdamW | Lion | SGD]] = {kind.rule: kind for kind in (AdamW, Lion, SGD)}
_ROWS, _ROW = 1 << 10, 1 << 10


@cache
def update_s(rule: str, state: str, device_type: str) -> float:
    """Seconds an element of one step of this rule ("adamw") with states in this format."""
    device = torch.device(device_type)
    p = torch.nn.Parameter(torch.zeros(_ROWS, _ROW, device=device))
    grad = torch.ones_like(p)
    optimizer = _KINDS[rule]([p], state=state)
    (group,) = optimizer.param_groups
    return least_s(lambda: optimizer.apply([Complete(0, group, p, grad)]), device) / p.numel()
