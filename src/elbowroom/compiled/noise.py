"""Predicts the variance that codes of a compiled step add to the gradient, before it has run.

Neither values nor gradients are known when a graph is compiled, so sizes stand in for them, as in
eager plans whose noise was not measured. What backward multiplies with a gradient is given an error
that is independent from one element to the next, and so is most of what mini-batches vary by:

    of one code     v_k = e_k * s_k     share of the variance of mini-batches
    of all          v   = sum of v_k
    reach of k      s_k = the larger of two shares:
                          bytes that are off by it / bytes that plain torch.compile saves and that
                          may have a code
                          bytes of what is multiplied for gradients of weights, likewise off by it
                          / bytes of all that is

e_k is what the codec adds to the square of numbers of a normal distribution, of which that is known
(`codecs/quality.py`); for dither it is 1.9 / (levels - 1)^2 (0.95 of a uniform one or behind a
ReLU, 1.3 behind a GELU). The error affects the value and
everything that backward recomputes from it, since the relative error of these is about as large.
The gradient of a weight is a product x^T d, as large as x is long: a plan that codes the wide
results inside of gated layers alone is off in most of |g|^2, though plain torch.compile saves
three more values of that width for each.
|g|^2 is at least as large as the variance of mini-batches, so gErr2 is at most v where the
prediction holds.
"""

from collections.abc import Iterable

import torch
from torch import fx

from elbowroom.compiled.collect import reached, tensors_of
from elbowroom.compiled.joint import Joint, Step
from elbowroom.compiled.order import ends_of
from elbowroom.compiled.readers import Extent, reading_of
from elbowroom.compiled.rewrite import CodedValue

_CONVOLUTION = torch.ops.aten.convolution_backward.default


class ErrorReach:
    """The reach of the errors of codes in one graph, as shares of all values that may be coded."""

    def __init__(self, joint: Joint, plain: Step) -> None:
        """Measure against what `plain` saves."""
        _, after = joint.parts(plain.saved)
        gradients = joint.gradients()
        self._joint = joint
        self._nbytes = {
            joint.facts[n].storage: joint.facts[joint.facts[n].storage].nbytes
            for n in plain.saved
            if n not in joint.outside
            and _is_float(n)
            and reading_of(n, after, gradients).use is not Extent.EXACT
        }
        self._total = sum(self._nbytes.values())
        self._multiplied = {
            joint.facts[n].storage: joint.facts[joint.facts[n].storage].nbytes
            for end in ends_of(joint, gradients)
            for n in (end.args[1:2] if end.target is _CONVOLUTION else end.all_input_nodes)
            if isinstance(n, fx.Node) and n not in gradients and _is_float(n)
        }
        self._of_weights = sum(self._multiplied.values())
        self._known: dict[frozenset[fx.Node], dict[fx.Node, float]] = {}

    def variance(self, base: Step, coded: Iterable[CodedValue]) -> float:
        """Returns the variance that codes of what `base` saves add, as a share of mini-batches'."""
        shares = self._known.setdefault(frozenset(base.saved), {})
        total = 0.0
        for one in coded:
            if not one.is_lossy:
                continue
            if one.node not in shares:
                shares[one.node] = self._share(base, one.node)
            total += one.error * shares[one.node]
        return total

    def _share(self, base: Step, node: fx.Node) -> float:
        facts = self._joint.facts
        again = set(base.again)
        off = reached([node], lambda one: [reader for reader in one.users if reader in again])
        own = facts[node].storage
        storages = {facts[n].storage for n in off if n in facts} & self._nbytes.keys() - {own}
        nbytes = facts[own].nbytes + sum(self._nbytes[s] for s in storages)
        if not self._total:
            return 1.0
        multiplied = {facts[n].storage for n in off if n in facts} & self._multiplied.keys()
        of_weights = sum(self._multiplied[s] for s in multiplied) / max(self._of_weights, 1)
        return min(max(nbytes / self._total, of_weights), 1.0)


def _is_float(node: fx.Node) -> bool:
    values = tensors_of(node)
    return len(values) == 1 and values[0].dtype in (torch.float32, torch.bfloat16, torch.float16)
