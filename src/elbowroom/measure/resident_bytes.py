"""The bytes of a live model and its optimizers: those that exist, and those that a step creates."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from elbowroom.optim.base import EncodedOptimizer
from elbowroom.optim.release import TOGETHER_NBYTES
from elbowroom.plan.resident_bytes import ResidentBytes
from elbowroom.runtime.undo import tensors_of


def resident_bytes_of(
    models: nn.Module | Iterable[nn.Module], optimizers: Iterable[Optimizer]
) -> ResidentBytes:
    """Returns the bytes between two steps, once all optimizer states exist.

    models: one, or all that share a step
    """
    optimizers = list(optimizers)
    each = [models] if isinstance(models, nn.Module) else list(models)
    weights = list({id(p): p for one in each for p in one.parameters()}.values())
    trained = [p for p in weights if p.requires_grad]
    updated = {id(p): (one, p) for one in optimizers for p in parameters_of(one)}
    pairs = updated.values()
    return ResidentBytes(
        weights=_elements(weights),
        weights_nbytes=sum(p.nbytes for p in weights),
        trained=_elements(trained),
        gradients_nbytes=gradients_nbytes(trained, optimizers),
        updated=_elements(p for _, p in pairs),
        states_nbytes=sum(_held_nbytes(one, p) for one, p in pairs),
        fp32_nbytes=sum(_fp32_nbytes(one, p) for one, p in pairs),
        states=joined(_name(one, p) for one, p in pairs),
    )


def joined(names: Iterable[str]) -> str:
    """Joins names, each once: "fp32 + int8"."""
    return " + ".join(sorted({name for name in names if name}))


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """Returns the parameters that the optimizer trains."""
    return [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]


def gradients_nbytes(trained: Iterable[Tensor], optimizers: Iterable[Optimizer]) -> int:
    """Returns the bytes of gradients at one time: of those released in backward, the largest.

    Small ones that wait for it stand beside it.
    """
    trained = list(trained)
    watched = _released(optimizers)
    released = [p.nbytes for p in trained if id(p) in watched]
    passing = max(released, default=0)
    passing += min(sum(released) - passing, TOGETHER_NBYTES)
    return passing + sum(p.nbytes for p in trained if id(p) not in watched)


def expected_nbytes(optimizer: Optimizer, p: Tensor) -> int:
    """Bytes of the states that a parameter has, or will have.

    Two fp32 states a parameter, unless the class is known to have others (`knows_states_of`).
    """
    if isinstance(optimizer, EncodedOptimizer):
        return optimizer.state_nbytes(p)
    if isinstance(optimizer, torch.optim.LBFGS):
        # Directions and steps of its history; the last direction and gradient.
        return int(2 * optimizer.param_groups[0]["history_size"] + 2) * p.nbytes
    if isinstance(optimizer, torch.optim.Adafactor):
        # Of a matrix, or of each that p has in its last two dimensions: its rows and columns.
        rows = p.numel() // p.shape[-1] + p.numel() // p.shape[-2] if p.dim() > 1 else 0
        return (rows or p.numel()) * p.element_size() if p.numel() else 0
    made = _states_made(optimizer)
    if made is None:
        return 8 * p.numel()
    always, options = made
    settings = optimizer.defaults
    return (always + sum(bool(settings.get(name)) for name in options)) * p.nbytes


# Tensors of a parameter's size that PyTorch's optimizers hold for it: always, and by an option.
_STATES: dict[type[Optimizer], tuple[int, tuple[str, ...]]] = {
    torch.optim.SGD: (0, ("momentum",)),
    torch.optim.Adam: (2, ("amsgrad",)),
    torch.optim.Adamax: (2, ()),
    torch.optim.NAdam: (2, ()),
    torch.optim.RAdam: (2, ()),
    torch.optim.Adadelta: (2, ()),
    torch.optim.Adagrad: (1, ()),
    torch.optim.ASGD: (1, ()),
    torch.optim.RMSprop: (1, ("momentum", "centered")),
    torch.optim.Rprop: (2, ()),
}


def _states_made(optimizer: Optimizer) -> tuple[int, tuple[str, ...]] | None:
    known = (_STATES.get(kind) for kind in type(optimizer).__mro__)
    return next((one for one in known if one is not None), None)


def knows_states_of(optimizer: Optimizer) -> bool:
    """Returns whether it is known which states an optimizer makes, before it has made them."""
    known = EncodedOptimizer, torch.optim.LBFGS, torch.optim.Adafactor
    return isinstance(optimizer, known) or _states_made(optimizer) is not None


def growing_nbytes(optimizer: Optimizer) -> int:
    """Bytes by which states that exist will grow: those of LBFGS, until its history is full."""
    if not isinstance(optimizer, torch.optim.LBFGS) or not optimizer.state:
        return 0
    held = sum(x.nbytes for x in tensors_of(optimizer.state.values()))
    return max(sum(expected_nbytes(optimizer, p) for p in parameters_of(optimizer)) - held, 0)


def passing_nbytes(optimizer: Optimizer) -> int:
    """Bytes beside states and gradients that an optimizer holds while forwards run in its step.

    LBFGS evaluates the model several times in one step. Meanwhile it holds the gradient, the
    direction before, and the buffer that the next one was made in. A line search also holds the
    weights that it begins at, and the gradients of up to four points.
    """
    if not isinstance(optimizer, torch.optim.LBFGS):
        return 0
    group = optimizer.param_groups[0]
    copies = 8 if group["line_search_fn"] is not None else 3 if group["max_iter"] > 1 else 0
    return copies * sum(p.nbytes for p in parameters_of(optimizer))


def _released(optimizers: Iterable[Optimizer]) -> set[int]:
    """Parameters that an optimizer updates inside backward."""
    releases = [one.released for one in optimizers if isinstance(one, EncodedOptimizer)]
    return {p for release in releases if release is not None for p in release.watched}


def _held_nbytes(optimizer: Optimizer, p: Tensor) -> int:
    tensors = _tensors(optimizer, p)
    if tensors or (isinstance(optimizer, torch.optim.LBFGS) and optimizer.state):
        return sum(x.nbytes for x in tensors)  # LBFGS keeps all of its with one parameter
    return expected_nbytes(optimizer, p)


def _fp32_nbytes(optimizer: Optimizer, p: Tensor) -> int:
    if isinstance(optimizer, EncodedOptimizer):
        return optimizer.state_nbytes(p, "fp32")
    tensors = _tensors(optimizer, p)
    if not tensors:
        return expected_nbytes(optimizer, p)
    return sum(4 * x.numel() if x.is_floating_point() else x.nbytes for x in tensors)


def _name(optimizer: Optimizer, p: Tensor) -> str:
    """Returns how the states of p are held, "" if there are none. Step counters do not count."""
    if isinstance(optimizer, EncodedOptimizer):
        return str(optimizer.group_of(p)["state"])
    tensors = [x for x in _tensors(optimizer, p) if x.dim() or not p.dim()]
    dtypes = {str(x.dtype).removeprefix("torch.") for x in tensors}
    if not tensors and expected_nbytes(optimizer, p):
        dtypes = {"float32"}
    return joined("fp32" if name == "float32" else name for name in dtypes)


def _tensors(optimizer: Optimizer, p: Tensor) -> list[Tensor]:
    return tensors_of([optimizer.state.get(p, {})])


def _elements(tensors: Iterable[Tensor]) -> int:
    return sum(p.numel() for p in tensors)
