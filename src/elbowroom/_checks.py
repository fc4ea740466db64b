"""Checks of the public functions' arguments. Each error says what is possible."""

import logging
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from elbowroom.errors import PlanError, UnknownField

BACKEND_OPTIONS = ("budget", "exact", "noise", "offload")  # of ours; all others are Inductor's
_log = logging.getLogger("elbowroom")


def check_model(model: nn.Module, verb: str) -> None:
    if not isinstance(model, nn.Module):
        raise PlanError(
            f"{verb} takes a torch.nn.Module; got {type(model).__name__}. Pass the model itself."
        )


def check_initialized(model: nn.Module, verb: str) -> None:
    """Checks that lazy modules have made their parameters, whose sizes are counted."""
    lazy = next((name for name, p in model.named_parameters() if is_lazy(p)), None)
    if lazy is not None:
        raise PlanError(
            f"{verb} counts parameters, and {lazy!r} has no size yet: lazy modules make theirs in "
            f"their first forward. Call the model on a batch once, before er.{verb}."
        )


def check_min_nbytes(min_nbytes: int) -> None:
    if not isinstance(min_nbytes, int) or isinstance(min_nbytes, bool) or min_nbytes < 0:
        raise UnknownField(
            f"min_nbytes={min_nbytes!r} is not possible; it is an int of bytes, 0 or more"
        )


def check_exact(exact: bool | None) -> None:
    if exact is not None and not isinstance(exact, bool):
        raise UnknownField(
            f"exact={exact!r} is not possible; it is True, None for exact first, or False for "
            "whatever is cheapest"
        )


def check_device(device: torch.device | str) -> torch.device:
    """Returns the device, which is a CPU or one of this machine's GPUs of CUDA."""
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError, ValueError) as error:
        raise PlanError(
            f"device={device!r} is not possible; it is 'cpu', 'cuda', a torch.device, or None"
        ) from error
    gpus = torch.cuda.device_count() if chosen.type == "cuda" else 0
    if chosen.type != "cpu" and (chosen.index or 0) >= gpus:
        raise PlanError(
            f"device='{chosen}' is not on this machine, or its memory cannot be measured; use "
            "device='cpu', or run on a machine that has it"
        )
    return chosen


def check_optimizer(optimizer: Optimizer | None, model: nn.Module, verb: str = "fit") -> None:
    """Checks that an optimizer trains this model.

    If it has none of the model's parameters, it only warns, because parameters may be wrapped.
    """
    if optimizer is None:
        return
    if not isinstance(optimizer, Optimizer):
        remedy = "Pass the optimizer itself, or leave it out."
        if isinstance(optimizer, list | tuple):
            remedy = "Pass one, and each further one to er.add_optimizer(model, optimizer)."
        raise PlanError(
            f"{verb} takes a torch.optim.Optimizer; got {type(optimizer).__name__}. {remedy}"
        )
    trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
    of_model = {id(p) for p in model.parameters() if p.requires_grad}
    if of_model and trained.isdisjoint(of_model):
        _log.warning(
            "this optimizer has none of the model's parameters: its states are counted, and those "
            "of the one that trains the model are not; give that one to er.%s",
            verb,
        )


def check_offload(offload: str | None) -> None:
    if offload not in (None, "file", "host"):
        raise UnknownField(f"offload={offload!r} is not possible; it is 'file', 'host' or None")


def check_noise(noise: float | None, exact: bool | None = None) -> None:
    is_number = isinstance(noise, int | float) and not isinstance(noise, bool)
    if noise is not None and not (is_number and noise >= 0):
        raise UnknownField(
            f"noise={noise!r} is not possible; it is a number, as 0.1 for a tenth of what "
            "mini-batches vary by, or None"
        )
    if noise == 0 and exact is False:
        raise PlanError(
            "noise=0 allows no codes, and exact=False asks for them wherever they are cheaper; "
            "leave one of the two out"
        )


def check_flag(name: str, given: object) -> None:
    if not isinstance(given, bool):
        raise UnknownField(f"{name}={given!r} is not possible; it is True or False")


def check_function(name: str, given: object) -> None:
    if not callable(given):
        raise PlanError(f"{name} is a function; got {type(given).__name__}")


def check_path(name: str, given: object) -> Path:
    if not isinstance(given, str | Path):
        raise UnknownField(
            f"{name} is the path of a file, a str or a Path; got {type(given).__name__}"
        )
    return Path(given)


def check_scalar(loss: object) -> Tensor:
    """Returns what a loss function of the user's has returned, which backward begins at."""
    if not isinstance(loss, Tensor):
        raise PlanError(f"loss(model, batch) returns a tensor; this one returned {loss!r:.80}")
    if loss.numel() != 1 or not loss.requires_grad:
        graph = "a graph" if loss.requires_grad else "no graph"
        raise PlanError(
            "loss(model, batch) returns one number with a graph that leads to the parameters; got "
            f"a tensor of shape {tuple(loss.shape)} with {graph}"
        )
    return loss
