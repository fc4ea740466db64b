"""Results of sigmoid, tanh, softmax and exp, and the ops that divide by 1 - y, by y or the like.

Their derivatives y (1 - y), 1 - y^2 and y (g - sum(g y)) vanish as y saturates, but the error of a
code does not. For most readers this is harmless: the error is small compared to the gradients of
elements that are not saturated. But log(1 - y + 1e-8) has a gradient of 1 / (1 - y + 1e-8), and
makes of an error of 1/30 one of a million: gErr2 was 1e10 for the loss of a GAN that was written
like this, and 4e7 for the log-density of a squashed normal distribution (SAC).

An exponential is of any size: log(y / sum(y)), the way in which contrastive losses are written,
has a gradient of 1 / y, however small y is beside its neighbors, which set the step of its code.
With a temperature of 0.1 gErr2 was 66, with 0.07 it was 44,000, and in the likelihood of a normal
distribution whose variance is exp of what a network makes, 9 and more. There sums and quotients of
y are divisors, too.

So such a result waits while it is held elsewhere, when a code would free nothing; after a sum, a
selection or the like of it, it waits for three more ops that save a tensor. If one of these divides
by a result of it, element by element, or takes its logarithm or root, it stays exact; else it gets
its code. An op that divides by it even later (a logarithm of a product) is found, too: the code is
taken back if something else holds the tensor. If nothing does, a warning is logged, and the tensor
is kept from the next step on. The same applies to ops that divide in a profiled step, in which
nothing waits, because its memory over time is that of plans.

What is squared on the way into an exponential is the reverse of that: a Gaussian of width s,
exp(-(x - m)^2 / (2 s^2)), passes a gradient to the few x that are near m, and the step of a code
follows the range of all. For s of a hundredth of that range, the code moved every x - m from one
end of the Gaussian to the other. So a difference waits where it is squared, and the square where
something scales it. If an exponential, a softmax or the like of them follows, they stay exact
(`exponents`), and so does the exponential: what is far from m has a slope of (x - m) / s^2, which
only a result of 0 cancels. Other squares have their code at once, for most are those of norms, and
it is taken back. So are the factors of a product of matrices beside a square: what is left of
|x|^2 - 2 x y + |y|^2 is as small as (x - y)^2. 1 / (x^2 + c) is like a Gaussian, too.

So is a saturated result of what may have any slope, as in tanh(1 / (d^2 + 0.0001)): where the slope
is huge, 1 - y^2 is 0, and an error of y is not. gErr2 was 1,500 for tanh, 200 for a sigmoid, and
140,000 for exp(-1 / (d^2 + 0.0001)). They stay exact (`_is_singular`); a softmax has a code whose
error is a share of each probability.
"""

import logging
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial, reduce
from math import prod
from typing import Any

from torch import Tensor
from torch.autograd.graph import Node

from elbowroom.plan import Action, Encode, Site
from elbowroom.plan.precision_floor import at_least, at_precision_floor, keeps_rows_apart
from elbowroom.plan.site import Formula, HalfSuffices
from elbowroom.runtime.consumers import RESHAPES, Call, FormulaPart
from elbowroom.runtime.formulas import LENGTHS
from elbowroom.runtime.handles import KeepHandle
from elbowroom.runtime.slot import Slot
from elbowroom.runtime.sources import Sources
from elbowroom.runtime.storage import WeakStorage, is_touchable

_log = logging.getLogger("elbowroom")
EXPONENTIAL = frozenset(("ExpBackward0", "Exp2Backward0", "Expm1Backward0"))
SATURATING = EXPONENTIAL | frozenset(
    (
        *("SigmoidBackward0", "TanhBackward0", "SoftmaxBackward0", "SafeSoftmaxBackward0"),
        *("MaskedSoftmaxBackward0", "_ProbabilitiesBackward"),
    )
)
_SOFTMAX = frozenset(
    (
        *("SoftmaxBackward0", "SafeSoftmaxBackward0", "MaskedSoftmaxBackward0"),
        "_ProbabilitiesBackward",
    )
)
# Nodes whose slopes have no bound; of quotients and powers, `_is_singular` decides.
_SINGULAR = (
    *("Reciprocal", "Rsqrt", "Sqrt", "Log10", "Log1P", "Log2", "LogBackward", "Logit"),
    *("ExpBackward", "Exp2Backward", "Expm1", "Cosh", "Sinh", "TanBackward", "Atanh"),
    *("Acos", "AsinBackward", "Erfinv", "Xlogy", "Pow"),
)
_QUOTIENTS = "Div", "Addcdiv"
_DIVIDED = "what is made of it is divided by, or its logarithm or root is taken"
_SQUARED = "an exponential of its square follows, to which a small part of its range matters"
WHY = {
    FormulaPart.SATURATED: _DIVIDED,
    FormulaPart.EXPONENTIAL: HalfSuffices(_DIVIDED),
    **dict.fromkeys((FormulaPart.SQUARED, FormulaPart.DIFFERENCE), _SQUARED),
    FormulaPart.FACTOR: (
        "a small difference of squares and its product, or an inverse of it, follows"
    ),
    FormulaPart.GAUSSIAN: "where it is 0, its argument may have any slope",
}
_MAX_SAVES = 3  # saving calls, in a chain of results of it alone
_OURS = 1  # the handle
# Functions -> the argument whose inverse, logarithm, root or quotients appear in gradients.
_DIVIDING: dict[str, tuple[int, str]] = {
    **dict.fromkeys(
        (
            *("log", "log2", "log10", "log1p", "log_", "sqrt", "rsqrt", "reciprocal", "logit"),
            *("acos", "asin", "atanh", "acosh", "lgamma", "digamma", "prod", "cumprod"),
            *(
                "binary_cross_entropy",
                "poisson_nll_loss",
                "__rtruediv__",
                "__rdiv__",
                "__pow__",
                "pow",
                "erfinv",
            ),
        ),
        (0, "input"),
    ),
    **dict.fromkeys(("div", "divide", "true_divide", "__truediv__", "div_"), (1, "other")),
    **dict.fromkeys(("xlogy",), (1, "other")),
    "gaussian_nll_loss": (2, "var"),
}
_POWERS = ("pow", "__pow__")
# Functions of a matrix whose gradients have its inverse, or differences of its eigenvalues below a
# fraction: cholesky(x x^T) passes back much where x x^T has little.
_DECOMPOSITIONS = frozenset(
    (
        *("cholesky", "det", "eig", "eigh", "eigvals", "eigvalsh", "inv", "inverse", "ldl_factor"),
        *("logdet", "lstsq", "lu", "lu_factor", "pinv", "pinverse", "qr", "slogdet", "solve"),
        *("svd", "svdvals", "tensorinv", "tensorsolve"),
    )
)
# Nodes that preserve a small difference: element by element, or of some elements.
_ALONE = (
    *("Add", "Sub", "Rsub", "Neg", "Clamp", "_Clamp", "Where", "MaskedFill"),
    *("Gather", "Index", "Select", "Slice", "Narrow", "Split", "Unbind", "MaskedSelect"),
    *("Diagonal", "Cat", "Stack"),
    *RESHAPES,
)
_ELEMENTWISE = (*_ALONE, "Mul", "_Product", "Addcmul", "Pow", "Div")
_SUMMED = ("Sum", "Mean")  # ... of exponentials: the smallest sum is as small as they are
_MAX_NODES = 32
# Products of matrices; in one op with what is added to them.
_ADDED = ("Addmm", "Baddbmm", "Addbmm", "Addmv")
_CONTRACTIONS = (*_ADDED, "Mm", "Bmm", "Mv", "Dot", "Linear")
_QUOTIENT = "DivBackward0"  # of which the dividend may have a code: by a single number
_POWER, _PRODUCT, _SUM_OF_PRODUCT = "PowBackward0", "MulBackward0", "AddcmulBackward0"
_SCALED = ("Mul", "_Product", "Div", "Neg", *RESHAPES)
# Functions -> their nodes, which contain an exponential of what is below.
_EXPONENTS = frozenset(
    (
        *("exp", "exp_", "exp2", "exp2_", "expm1", "softmax", "softmin", "log_softmax"),
        *("logsumexp", "cross_entropy", "sigmoid", "sigmoid_"),
    )
)
_OF_EXPONENTS = (
    *("Exp", "Softmax", "LogSoftmax", "Logsumexp", "NllLoss", "Sigmoid"),
    *("_Probabilities", "_LogProbabilities", "_Logits"),
)
_TO_SQUARES = (*_ELEMENTWISE, *_SUMMED, *_ADDED, "Sqrt", *LENGTHS)


def part_of(node: str, x: Tensor, out: Any) -> FormulaPart:
    """Returns what x is, which a node of this name has saved in making `out`."""
    if node in SATURATING:
        if node not in _SOFTMAX and _reaches(
            _argument(x), partial(_is_singular, x.numel()), (*_ELEMENTWISE, "Abs")
        ):
            return FormulaPart.GAUSSIAN
        if node not in EXPONENTIAL:
            return FormulaPart.SATURATED
        of_square = _reaches(x.grad_fn, _is_steep, (*_TO_SQUARES, "Exp"))
        return FormulaPart.GAUSSIAN if of_square else FormulaPart.EXPONENTIAL
    if node == _PRODUCT and not (isinstance(out, Tensor) and _is_square(out.grad_fn)):
        through = (*_ALONE, *_SUMMED, *_SCALED, *_ADDED)
        is_scaled = _reaches(x.grad_fn, _is_square, through)
        return FormulaPart.DIFFERENCE if is_scaled else FormulaPart.NONE
    if node.startswith(_CONTRACTIONS):
        return FormulaPart.FACTOR
    if node not in (_POWER, _PRODUCT, _SUM_OF_PRODUCT, _QUOTIENT, *LENGTHS):
        return FormulaPart.NONE
    return (
        FormulaPart.DIFFERENCE
        if _reaches(x.grad_fn, _is_difference, _SCALED)
        else FormulaPart.SQUARED
    )


def _reaches(node: Node | None, found: Callable[[Node], bool], through: tuple[str, ...]) -> bool:
    """Returns whether a node, or one below it through nodes of these names, is what is sought."""
    waiting = [node]
    for _ in range(_MAX_NODES):
        node = waiting.pop(0) if waiting else None
        if node is not None and found(node):
            return True
        if node is not None and node.name().startswith(through):
            waiting += _linear_below(node)
        if not waiting:
            break
    return False


def _linear_below(node: Node) -> list[Node | None]:
    """Returns the nodes below one, without those of the factors of a product of matrices."""
    below = [one for one, _ in node.next_functions]
    return below[:1] if node.name().startswith(_ADDED) else below


def _is_difference(node: Node) -> bool:
    return node.name().startswith(("Sub", "Rsub"))


def _is_square(node: Node | None) -> bool:
    """Returns whether a node is a power, or multiplies two products with a factor in common."""
    if node is None or not node.name().startswith(("Pow", "Mul", "_Product", "Addcmul")):
        return False
    operands = [one for one, _ in node.next_functions][-2:]
    if node.name().startswith("Pow"):
        return True
    factors = [_factors(one) for one in operands]
    return len(factors) > 1 and not factors[0].isdisjoint(factors[1])


def _is_steep(node: Node) -> bool:
    """Returns whether a node is a square, or something else whose slope may be of any size."""
    return _is_square(node) or node.name().startswith(("Cosh", "Sinh", "HuberLoss", "SmoothL1Loss"))


def _argument(result: Tensor) -> Node | None:
    """Returns the node of the argument of the op that has made a result."""
    return None if result.grad_fn is None else result.grad_fn.next_functions[0][0]


def _is_singular(numel: int, node: Node) -> bool:
    """Returns whether the slope of a node has no bound, for each of so many elements apart.

    The size of a row, by which all of it is divided, and a learned temperature have fewer.
    """
    name = node.name()
    if name.startswith(_QUOTIENTS):
        divisors = node.next_functions[2 if name.startswith("Addcdiv") else 1 :]
        return any(_numel_of(*one) == numel for one in divisors)
    exponent = node._saved_exponent if name == _POWER else 0  # type: ignore[attr-defined]
    if exponent.real >= 1 or not name.startswith(_SINGULAR):
        return False
    return _numel_of(node, 0) == numel


def _numel_of(node: Node | None, output: int) -> int:
    """Returns the number of elements of a node's result; 0 if it wants no gradient."""
    if node is None:
        return 0
    leaf = getattr(node, "variable", None)
    return prod(node._input_metadata[output].shape) if leaf is None else leaf.numel()


def _factors(node: Node | None) -> set[Node]:
    """Returns what a tensor is a product of, but for what needs no gradient, and divisors."""
    found, waiting = set[Node](), [] if node is None else [node]
    for _ in range(_MAX_NODES):
        if not waiting:
            break
        one = waiting.pop()
        below = [operand for operand, _ in one.next_functions]
        if one.name().startswith(("Neg", "Mul", "_Product")):
            waiting += [operand for operand in below if operand is not None]
        elif one.name().startswith("Div"):
            waiting += [operand for operand in below[:1] if operand is not None]
        else:
            found.add(one)
    return found


class Saturated:
    """Slot whose encoding waits for ops that may divide by 1 minus the tensor, or the like."""

    def __init__(
        self,
        slot: Slot,
        action: Action,
        hold: Callable[[Slot, Tensor, Action], None],
        part: FormulaPart,
    ) -> None:
        self.slot = weakref.ref(slot)
        slot.waits = True
        self._action, self._hold = action, hold
        self._open = _ALONE if part is FormulaPart.SATURATED else (*_ELEMENTWISE, *_SUMMED)
        self._saves = 0  # saving calls since then
        self._is_read = False
        self._is_open = False  # a result of it alone may still be a divisor
        self._others: list[Site] = []

    def ended(self, call: Call, out: Any, sources: Sources) -> bool:
        """Notes that a call has ended; returns whether the slot has waited for long enough."""
        slot = self.slot()
        kept = None if slot is None else slot.value
        if slot is None or slot.pinned or not isinstance(kept, KeepHandle):
            return True
        storage = kept.restore().untyped_storage()._cdata
        read = (x.untyped_storage()._cdata for x in call.tensors if is_touchable(x))
        if storage in read:
            self._is_read, self._is_open = True, self._is_open or _is_made_by(self._open, out)
        elif call.saved and not self._is_held_by_others(kept):
            self._saves += 1
        return self._saves >= (_MAX_SAVES if self._is_open else 1)

    @property
    def is_known(self) -> bool:
        """True if it can have no further reader, and all readers so far multiply it."""
        slot = self.slot()
        kept = None if slot is None else slot.value
        closed = self._is_read and not self._is_open
        return closed and isinstance(kept, KeepHandle) and not self._is_held_by_others(kept)

    def _is_held_by_others(self, kept: KeepHandle) -> bool:
        """Returns whether the tensor is held elsewhere, so that a code would free nothing yet."""
        return WeakStorage(kept.restore()).holders() > _OURS

    def also(self, site: Site) -> None:
        """Notes another reader, which must be able to read the code, too."""
        self._others.append(site)

    def end(self) -> None:
        """Encodes the slot, unless a reader needs it, or 1 minus it, exactly."""
        slot = self.slot()
        kept = None if slot is None else slot.value
        if slot is not None:
            slot.waits = False
        if slot is None or not isinstance(kept, KeepHandle) or kept.was_changed:
            return
        action = self._action
        if isinstance(action, Encode):
            codec = reduce(at_precision_floor, self._others, action.codec)
            rows = action.rows
            if not all(
                keeps_rows_apart(codec, one, normalized=rows is not None and one.rows == rows)
                for one in self._others
            ):
                return
            if slot.logits_levels:
                codec = at_least(codec, slot.logits_levels)
            action = replace(action, codec=codec)
        elif any(one.formula is Formula.RELATIVE for one in self._others):
            return  # what it is rebuilt from may get another code
        self._hold(slot, kept.restore(), action)


def divided(call: Call) -> Iterator[int]:
    """Yields autograd's numbers of the nodes y for which a call divides by 1 - y or the like.

    So are those that square an element alone: 1 / (x^2 + c) has its gradient where x is small. It
    walks the graph from the argument whose inverse, root or logarithm the call's gradient has,
    through ops that work element by element, and to exponentials through sums, too.
    """
    place = _DIVIDING.get(call.name)
    x = None if place is None else call.arg(*place)
    if not isinstance(x, Tensor) or (call.name in _POWERS and not _is_singular_power(call)):
        return
    waiting: list[tuple[Node | None, bool, bool]] = [(x.grad_fn, False, False)]
    sums: list[int] = []  # the nodes of squares that are summed
    factors: list[int] = []
    for _ in range(_MAX_NODES):
        node, is_sum, is_squared = waiting.pop(0) if waiting else (None, False, False)
        if node is None:
            if not waiting:
                break
            continue
        name = node.name()
        if name in EXPONENTIAL or (name in SATURATING and not is_sum):
            yield node._sequence_nr()
            continue
        if not is_squared and name.startswith(_CONTRACTIONS):
            factors.append(node._sequence_nr())
        if not is_squared and _is_square(node):
            is_squared = True
            if is_sum:
                sums.append(node._sequence_nr())
            elif call.name != "sqrt":
                yield node._sequence_nr()
        if name.startswith((*_ELEMENTWISE, *_SUMMED, *_ADDED)):
            is_sum |= name.startswith(_SUMMED)
            waiting += [(below, is_sum, is_squared) for below in _linear_below(node)]
    if sums and factors:
        yield from (*sums, *factors)


def exponents(call: Call, out: Any) -> Iterator[int]:
    """Yields autograd's numbers of the nodes that an exponential's argument is computed by.

    Of these, a caller knows the ones that square, or scale a square. Products of matrices are among
    them where something is squared, as in |x|^2 - 2 x y + |y|^2.
    """
    if call.name not in _EXPONENTS or not isinstance(out, Tensor):
        return
    through = (*_TO_SQUARES, *_OF_EXPONENTS)
    waiting: list[tuple[Node | None, bool]] = [(out.grad_fn, False)]
    factors, has_squares = list[int](), False
    for _ in range(_MAX_NODES):
        node, is_squared = waiting.pop(0) if waiting else (None, False)
        is_product = node is not None and node.name().startswith(_CONTRACTIONS)
        if node is not None and is_product and not is_squared:
            factors.append(node._sequence_nr())
        if node is not None and node.name().startswith(through):
            is_squared |= _is_square(node)
            has_squares |= is_squared
            if not is_product:
                yield node._sequence_nr()
            waiting += [(below, is_squared) for below in _linear_below(node)]
        if not waiting:
            break
    if has_squares:
        yield from factors


def decomposed(call: Call) -> Iterator[int]:
    """Yields autograd's numbers of the products that make a matrix that a call takes apart.

    An error of their factors may be small beside the matrix, and large beside its least part.
    """
    name = call.name.rpartition("::")[2].removeprefix("linalg_").removesuffix("_ex")
    x = call.first if name in _DECOMPOSITIONS else None
    waiting = [x.grad_fn] if isinstance(x, Tensor) else []
    for _ in range(_MAX_NODES):
        node = waiting.pop(0) if waiting else None
        if node is not None and node.name().startswith(_CONTRACTIONS):
            yield node._sequence_nr()
        if node is not None and node.name().startswith((*_ELEMENTWISE, *_ADDED)):
            waiting += _linear_below(node)
        if not waiting:
            break


def _is_made_by(names: tuple[str, ...], out: Any) -> bool:
    """Returns whether a result was made by a node whose name begins with one of these."""
    node = out.grad_fn if isinstance(out, Tensor) else None
    return node is not None and node.name().startswith(names)


def _is_singular_power(call: Call) -> bool:
    exponent = call.arg(1, "exponent")
    return not isinstance(exponent, int | float) or exponent < 1


class LateWarnings(set[tuple[str, str]]):
    """Warnings of one step about codes made too early: one for each module and reason."""

    def warn(self, consumer: str, module: str, why: str) -> None:
        """Warns that a code was made before its readers were known, and its tensor is freed."""
        if (module, why) in self:
            return
        self.add((module, why))
        _log.warning(
            "what '%s' saves in '%s' has a code, and %s: gradients of this step may be far off "
            "there. It is kept, or has a finer code, from the next step on",
            *(consumer, module, why),
        )
