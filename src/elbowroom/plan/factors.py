"""Factors by which measured steps correct predicted seconds, one for each class of what they pay.

    measured = sum over classes of factor * predicted

    step      the step itself, in plain autograd
    codes     bytes that are encoded, decoded, or looked at for a code
    tensors   what each code and each recipe takes however small its tensor is
    rebuilds  ops that run again to make one tensor
    modules   modules that run again
    links     copies out and in

A few measured steps do not tell six numbers apart. So the fit is by least squares to the steps and
to 1 at the same time, each by how far it may be off (the mean of a linear model with a normal
prior). All prices were measured in the same minutes, and are off by a part in common: one step that
takes longer than it should makes dearer what it pays most of, and the rest by less.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

STEP, CODES, TENSORS, REBUILDS, MODULES, LINKS = CLASSES = (
    "step",
    "codes",
    "tensors",
    "rebuilds",
    "modules",
    "links",
)
_MEASURED = 0.02  # of its seconds, by which a measured step is off
_KNOWN = 0.2  # what the factor of a step that was written down, in one run, is off from 1
_ROUGH = 0.3  # the same, where its backward is an estimate
_PRICED = 0.4  # the same of what is priced by rates, or by an op that ran once, each by itself
_COMMON = 0.3  # and of all of that together
_LEAST, _MOST = 0.25, 4.0


@dataclass(frozen=True)
class TimedStep:
    """Seconds of a step under a plan. predicted_s: by class; measured_s: of the whole step."""

    predicted_s: Mapping[str, float]
    measured_s: float


def factors_of(steps: Sequence[TimedStep], *, rough: bool = False) -> dict[str, float]:
    """Returns the factor of each class.

    rough: the seconds of the step itself are an estimate.
    """
    if not steps:
        return dict.fromkeys(CLASSES, 1.0)
    paid = np.array([[step.predicted_s.get(name, 0.0) for name in CLASSES] for step in steps])
    measured = np.array([step.measured_s for step in steps])
    known = np.full((len(CLASSES), len(CLASSES)), _COMMON**2) + _PRICED**2 * np.eye(len(CLASSES))
    i_step = CLASSES.index(STEP)
    known[i_step] = known[:, i_step] = 0.0
    known[i_step, i_step] = (_ROUGH if rough else _KNOWN) ** 2
    seen = paid @ known @ paid.T + np.diag((_MEASURED * measured) ** 2)
    more = known @ paid.T @ np.linalg.solve(seen, measured - paid.sum(axis=1))
    return dict(zip(CLASSES, np.clip(1 + more, _LEAST, _MOST).tolist(), strict=True))
