"""Search for the node of the graph that reads a saved tensor, and how, once the call has ended.

A pack hook does not get the saving node. But a node exposes its saved tensors as hooks have packed
them (`node._raw_saved_self.data`). So the nodes that a call has created are walked from its outputs
down, and their saved tensors are looked up in the table of derivative formulas (`formulas.py`):
`readers_of`. `reading_by` says what a formula asks of a tensor, given what it is to the call.
"""

from collections.abc import Iterable, Iterator
from math import prod
from typing import Any, NamedTuple

from torch import Tensor
from torch.autograd.graph import Node
from torch.utils._pytree import tree_leaves

from elbowroom.plan import Need
from elbowroom.plan.precision_floor import FEW
from elbowroom.plan.site import MIN_WIDTH, Formula
from elbowroom.runtime.consumers import (
    MAX_RESHAPES,
    RESHAPES,
    Call,
    Reading,
    features_of,
    is_argument,
    is_given_as,
)
from elbowroom.runtime.formulas import (
    FORMULAS,
    INVERSES,
    LENGTHS,
    OURS,
    SIZES,
    WHY,
    formula_of,
    normalized_by,
    reduced_by,
)
from elbowroom.runtime.kept import Deferred
from elbowroom.runtime.storage import is_made_of_parameters

_MAX_NODES = 64  # nodes of one call: torch's own attention with dropout has 15
_SAVED = "_raw_saved_"
_BATCHES = ("Bmm", "Baddbmm")


class Reader(NamedTuple):
    """Derivative formula by which a node uses a tensor that it has saved.

    node, number: the node's name, or that of torch's own that it stands for, and autograd's number
    of: the node itself
    """

    formula: Formula = Formula.UNKNOWN
    node: str = ""
    number: int = -1
    of: Node | None = None


def readers_of(call: Call, out: Any, wanted: Iterable[Deferred]) -> dict[int, Reader]:
    """Returns, by id, how the nodes that `call` has made read each of the wanted tensors.

    A tensor is left out if no reader is found: its node is the user's, or lies too deep.
    """
    waiting, found = {id(one) for one in wanted}, dict[int, Reader]()
    for node in _nodes_of(call, out):
        if not waiting:
            break
        name = node.name()
        for field in _fields(node, name):
            for packed in _packed(node, field):
                if id(packed) in waiting:
                    waiting.remove(id(packed))
                    known, _ = OURS.get(name, (name, field))
                    formula = formula_of(node, name, field)
                    found[id(packed)] = Reader(formula, known, node._sequence_nr(), node)
    return found


def _nodes_of(call: Call, out: Any) -> Iterator[Node]:
    """The nodes that a call has made, from its outputs down, the nearest first."""
    before = {id(x.grad_fn) for x in _tensors((*call.args, *call.kwargs.values()))}
    first = [x.grad_fn for x in _tensors((out,)) if x.grad_fn is not None]
    waiting, seen = list(dict.fromkeys(first)), set(map(id, first))
    kept: list[Node] = []  # a node that is not held passes its address on to the next one
    while waiting and len(kept) < _MAX_NODES:
        node = waiting.pop(0)
        kept.append(node)
        yield node
        for below, _ in node.next_functions:
            if below is not None and id(below) not in seen and id(below) not in before:
                seen.add(id(below))
                waiting.append(below)


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple | dict):
            yield from (x for x in tree_leaves(value) if isinstance(x, Tensor))


def _fields(node: Node, name: str) -> Iterable[str]:
    """The names under which a node may have saved tensors; by its attributes if no table has it."""
    if name in FORMULAS:
        return FORMULAS[name]
    return [each.removeprefix(_SAVED) for each in dir(node) if each.startswith(_SAVED)]


def held_by(node: Any) -> Iterator[Any]:
    """Yields what a node holds for backward, as hooks have packed it; nothing is unpacked."""
    for name in dir(node):
        if not name.startswith(_SAVED):
            continue
        try:
            saved = getattr(node, name)
        except RuntimeError:  # backward has been there, and freed it
            continue
        for one in saved if isinstance(saved, list | tuple) else (saved,):
            if (held := getattr(one, "data", None)) is not None:
                yield held


def _packed(node: Node, field: str) -> list[Any]:
    """Returns what hooks have packed for the tensors that a node has saved under one name."""
    saved = getattr(node, _SAVED + field, None)
    each = saved if isinstance(saved, list | tuple) else [saved]
    return [getattr(one, "data", None) for one in each]


def reading_by(reader: Reader, x: Tensor, call: Call) -> Reading:
    """Returns how the call reads x, which a node of it has saved, by its derivative formula."""
    formula, name = reader.formula, reader.node
    if formula is Formula.SHAPE and x.is_floating_point():
        return Reading(Need.SHAPE, formula)
    if formula.tolerates_errors and not x.is_floating_point():
        return Reading(Need.EXACT, Formula.INDEX, "not a floating dtype")
    if formula.tolerates_errors and x.grad_fn is None and not is_argument(x, call):
        # Dropout's factors, for example: without exact zeros a gradient would pass where none
        # should.
        return Reading(Need.EXACT, Formula.STATISTIC, f"a constant that '{call.name}' has made")
    if formula in (Formula.SUMMED, Formula.MATRIX):
        formula = _as_product(formula, x, call)
        if formula is Formula.MATRIX and _is_divided_out(call):
            why = "a ReLU's results times a product, of which one part may be divided by another"
            return Reading(Need.EXACT, Formula.DIFFERENCE, why)
    if formula in (Formula.SINGULAR, Formula.RELATIVE) and _is_normalized(x, call):
        formula = Formula.PRODUCT
    elif formula is Formula.RELATIVE and _is_scaled(x, call, name):
        formula = Formula.SUMMED
    elif formula is Formula.PRODUCT and (_is_row_inverse(x, call) or _is_distance(x, name)):
        formula = Formula.RELATIVE
    if formula is Formula.RELATIVE:
        return Reading(Need.LOSSY, formula, f"'{call.name}': {WHY[formula]}")
    if formula is Formula.LOG_PROBABILITY:
        return Reading(Need.LOSSY, formula, dims=normalized_by(reader.of, x))
    if formula.tolerates_errors:
        width, dims = _row_of(x, call, name, reader.of)
        if width:
            return Reading(Need.LOSSY, formula, width=width, dims=dims, by_size=True)
        return Reading(Need.LOSSY, formula, width=features_of(x, call))
    return Reading(Need.EXACT, formula, f"'{call.name}': {WHY.get(formula, '')}")


def _row_of(x: Tensor, call: Call, name: str, node: Node | None) -> tuple[int, tuple[int, ...]]:
    """The elements of a row of x, if the op belongs to a norm that is written out, else 0.

    And the dimensions that it has; (): the last ones. x^2, |x| and var(x) become the size of a row,
    and x * rsqrt(...) reads x for the gradient of that.
    """
    dims = reduced_by(node, x) if name in SIZES else ()
    if dims:
        width = prod(x.shape[d] for d in dims)
        is_last = dims == tuple(range(x.dim()))[-len(dims) :]
        return width, () if is_last else dims
    if not x.dim() or x.shape[-1] < MIN_WIDTH:
        return 0, ()
    if _is_normalized(x, call):
        return x.shape[-1], ()
    if name in SIZES:
        shape = call.arg(1, "normalized_shape") if call.name == "rms_norm" else 1
        several = len(shape) if isinstance(shape, list | tuple) else 1
        return prod(x.shape[-several:]), ()
    if name != "MulBackward0":
        return 0, ()
    others = [one for one in call.args if isinstance(one, Tensor) and not is_given_as(x, one)]
    is_square = not others and len(call.args) > 1
    by_row = any(one.dim() and one.shape[-1] == 1 and _is_inverse(one) for one in others)
    return (x.shape[-1] if is_square or by_row else 0), ()


def _is_normalized(x: Tensor, call: Call) -> bool:
    """Returns whether the call divides rows of x by lengths that its nodes hold exactly.

    Both x / length and the gradient of a length, x / length again, are linear in x then.
    """
    if call.name != "normalize" or call.arg(1, "p", 2.0) != 2 or not is_argument(x, call):
        return False
    width = x.shape[-1] if x.dim() else 0
    return width >= MIN_WIDTH and call.arg(2, "dim", 1) in (-1, x.dim() - 1)


def _is_scaled(x: Tensor, call: Call, name: str) -> bool:
    """Returns whether the call divides x, element by element, by a single number.

    Only the gradient of that number reads x, in a sum over all elements.
    """
    by = call.arg(1, "other")
    return name == "DivBackward0" and isinstance(by, Tensor) and by.numel() == 1 < x.numel()


def _is_row_inverse(x: Tensor, call: Call) -> bool:
    """Returns whether the call multiplies rows by x, an inverse: of some it may be far larger."""
    if not x.dim() or x.shape[-1] != 1 or not _is_inverse(x):
        return False
    given = (y for y in (*call.args, *call.kwargs.values()) if isinstance(y, Tensor))
    return any(y.dim() and y.shape[-1] > 1 for y in given)


def _is_distance(x: Tensor, name: str) -> bool:
    """Returns whether a node makes lengths of x, a difference.

    Distances to two points are compared: their gradients, of length 1, may be nearly alike.
    """
    return name in LENGTHS and _is_made_by(x, ("SubBackward", "Rsub"), (*RESHAPES, "AddBackward"))


def _is_inverse(x: Tensor) -> bool:
    """Returns whether x, through casts and reshapes, is 1 / something or a power."""
    return _is_made_by(x, INVERSES)


def _is_made_by(x: Tensor, names: tuple[str, ...], through: tuple[str, ...] = RESHAPES) -> bool:
    """Returns whether x was made by a node of these names, but for nodes that are passed."""
    node = x.grad_fn
    for _ in range(MAX_RESHAPES):
        if node is None or not node.name().startswith(through):
            break
        node = next((below for below, _ in node.next_functions if below is not None), None)
    return node is not None and node.name().startswith(names)


def _is_divided_out(call: Call) -> bool:
    """Returns whether the call multiplies results of a ReLU with a product.

    That is attention without a softmax, q (k^T [v, 1]), which divides one part of the product by
    the other. If q has one positive element, both are multiples of it, and its gradient is 0: the
    difference of two terms, divided by q, in which no error of either factor cancels.
    """
    given = [y for y in call.args if isinstance(y, Tensor)]
    is_product = [_is_made_by(y, _BATCHES) for y in given]
    has_zeros = [_is_made_by(y, ("Relu",), (*RESHAPES, "Mul", "_Product")) for y in given]
    return [is_product, has_zeros] in (
        [[True, False], [False, True]],
        [[False, True], [True, False]],
    )


def _as_product(formula: Formula, x: Tensor, call: Call) -> Formula:
    """Returns `Formula.SUMMED` if x is summed as a whole, `Formula.MATRIX` if by matrices.

    A linear layer's input is read for the gradient of weights, which ends there. In a product of
    two activations (q k^T) its error goes on upstream, however many are summed.
    """
    given = call.tensors
    if sum(one.grad_fn is not None and not is_made_of_parameters(one) for one in given) > 1:
        return Formula.MATRIX
    if x.dim() == 3 and x.shape[0] > 1 and min(x.shape[1:]) < FEW:
        return formula
    return Formula.SUMMED
