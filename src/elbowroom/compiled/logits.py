"""Probabilities of a softmax are held as logits, so that codes keep what is small on both sides.

    u = log(p / (1 - p))        p = 1 / (1 + exp(-u))

The gradient of a cross entropy is p - 1 for the class that is true. Once a model has learned its
data, p is nearly 1 there, and the error of a code of p, or of log(p), is larger than what is left:
of log-probabilities from -24 to 0 at 256 levels it is 0.03, where p - 1 may be 0.001. An error of u
is a relative error of p where p is small, and of 1 - p where that is.
"""

from collections.abc import Callable
from enum import Enum
from math import exp

import torch
from torch import fx

LARGEST = -exp(-24)  # of log-probabilities: what is above it has a logit of 24
MOST, LEAST = 1 - 2**-24, exp(-24)  # of probabilities: the largest float32 below 1
_aten = torch.ops.aten
InsertCall = Callable[..., fx.Node]


class AsLogit(Enum):
    """Marks a value that is held as a logit: a probability, or its logarithm."""

    PROBABILITY = "probability"
    LOGARITHM = "logarithm"

    def logit_of(self, value: fx.Node, insert: InsertCall) -> fx.Node:
        """Inserts the calls that compute the logit, each after the one before."""
        if self is AsLogit.LOGARITHM:  # log(p) - log(1 - p)
            logarithm = value
            less = insert(value, _aten.expm1.default, value)
            rest = insert(less, _aten.neg.default, less)
            other = insert(rest, _aten.log.default, rest)
        else:
            logarithm = insert(value, _aten.log.default, value)
            rest = insert(logarithm, _aten.neg.default, value)
            other = insert(rest, _aten.log1p.default, rest)
        return insert(other, _aten.sub.Tensor, logarithm, other)

    def of_logit(self, logit: fx.Node, insert: InsertCall) -> fx.Node:
        """Inserts the calls that compute the value from its logit."""
        if self is AsLogit.PROBABILITY:
            return insert(logit, _aten.sigmoid.default, logit)
        # -(max(-u, 0) + log(1 + exp(-|u|)))
        size = insert(logit, _aten.abs.default, logit)
        far = insert(size, _aten.neg.default, size)
        raised = insert(far, _aten.exp.default, far)
        above = insert(raised, _aten.log1p.default, raised)
        other = insert(above, _aten.neg.default, logit)
        at_least = insert(other, _aten.relu.default, other)
        total = insert(at_least, _aten.add.Tensor, at_least, above)
        return insert(total, _aten.neg.default, total)
