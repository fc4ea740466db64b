"""Settings of compiled regions, and how they are read from the options of torch.compile."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from elbowroom._checks import BACKEND_OPTIONS
from elbowroom.errors import PlanError, UnknownField
from elbowroom.units import Share, parse_budget


@dataclass(frozen=True)
class Settings:
    """Settings of a compiled model: its memory, and the changes that it may make.

    room_nbytes    bytes for the whole step; None: as plain torch.compile
    counts_inputs  whether parameters, buffers and inputs count
    exact          True: nothing that changes a bit; None: exact actions first; False: the fastest
    codes          the setting of a codec for all that it may hold, whatever the room; see
                   `Partitioner`
    min_nbytes     values below are not coded, where `codes` are given
    noise          the most that codes may add to the gradient's variance, as a share of that of
                   mini-batches; None: as much as the room needs
    offloads       whether saved values may leave the device's memory
    menu           the names of codes to choose from; None: all that are registered
    standing_nbytes  of outputs of the forward before, which stand until the next one has ended
    """

    room_nbytes: int | None = None
    counts_inputs: bool = True
    exact: bool | None = None
    codes: str | None = None
    min_nbytes: int = 32768
    noise: float | None = None
    offloads: bool = False
    menu: tuple[str, ...] | None = None
    standing_nbytes: int = 0

    @property
    def limit(self) -> float | None:
        """The limit of noise that errors name; None where codes may add none."""
        return None if self.exact else self.noise


def read_options(
    options: Mapping[str, Any], device: torch.device
) -> tuple[Settings, dict[str, Any]]:
    """Splits what torch.compile was given into our settings and Inductor's options."""
    from torch._inductor import config

    if not isinstance(options, Mapping) or not all(isinstance(name, str) for name in options):
        raise UnknownField(
            'backend "elbowroom" takes options={"budget": "6 GiB"}, values by their names; got '
            f"{options!r}"
        )
    ours = {name: value for name, value in options.items() if name in BACKEND_OPTIONS}
    rest = {name.replace("-", "_"): v for name, v in options.items() if name not in BACKEND_OPTIONS}
    unknown = [name for name in rest if name not in config.get_config_copy()]
    if unknown:
        raise UnknownField(
            f'backend "elbowroom" has no option {unknown[0]!r}; it has '
            f"{', '.join(BACKEND_OPTIONS)}, and the options of Inductor "
            "(torch._inductor.list_options())"
        )
    exact = ours.get("exact")
    if exact not in (True, None, False):
        raise UnknownField(
            f'backend "elbowroom" takes exact=True, None or False; got {exact!r}. None, the '
            "default, codes saved values only if the budget needs it."
        )
    noise = ours.get("noise")
    is_number = isinstance(noise, int | float) and not isinstance(noise, bool)
    if noise is not None and not (is_number and noise >= 0):
        raise UnknownField(
            f'backend "elbowroom" takes noise=0.1 for a tenth of what mini-batches vary by, or '
            f"None; got {noise!r}."
        )
    offloads = may_offload(ours.get("offload"), device)
    room = _room(ours.get("budget"), device)
    return Settings(room, exact=exact, noise=noise, offloads=offloads), rest


def may_offload(where: Any, device: torch.device) -> bool:
    """Returns whether values may leave the device. Raises PlanError for where they cannot go."""
    if where is None:
        return False
    possible = place_of(device)
    if where != possible:
        raise PlanError(
            f"inside torch.compile, offload={possible!r} moves what a model on {device.type} "
            f"saves; got {where!r}"
        )
    return True


def place_of(device: torch.device) -> str:
    """Returns the place to which saved tensors of a compiled model on this device can be moved."""
    return "file" if device.type == "cpu" else "host"


def _room(budget: Any, device: torch.device) -> int | None:
    if budget is None:
        return None
    found = parse_budget(budget)
    if not isinstance(found, Share):
        return found
    if device.type != "cuda":
        raise PlanError(
            f"budget={budget!r} is a share of a device, whose memory is known on CUDA only; this "
            f'region runs on {device.type}. Give a size such as "6 GiB".'
        )
    total = torch.cuda.get_device_properties(device).total_memory
    return int(found.fraction * total)


def device_of_inputs(example_inputs: Sequence[Any]) -> torch.device:
    """Returns the device of the first tensor that a region is given; the CPU without one."""
    tensors = [x for x in example_inputs if isinstance(x, torch.Tensor)]
    return tensors[0].device if tensors else torch.device("cpu")
