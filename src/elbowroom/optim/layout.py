"""Tells which states an optimizer has for a parameter, their names, and how they are held."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from elbowroom.optim.formats import Format, Group, flat, format_of, names
from elbowroom.optim.order import noted, order_of
from elbowroom.optim.sharded import local, spread


@dataclass(frozen=True)
class StateLayout:
    """The states of one class of optimizers.

    owner    its name, for messages
    moments  the names of its states in a state_dict, as torch.optim has them: one or two
    """

    owner: str
    moments: tuple[str, ...]

    @property
    def second(self) -> bool:
        """True if there is a second moment."""
        return len(self.moments) > 1

    def format_of(self, shape: torch.Size, state: str) -> Format:
        """Returns how the states of a parameter of this shape are held."""
        return format_of(shape, state, second=self.second)

    def fresh(self, p: Tensor, group: Group) -> dict[str, Tensor]:
        """States before the first step."""
        made: dict[str, Tensor] = {}
        found, part = self.format_of(p.shape, group["state"]), local(p)
        for name, moment in zip(self.moments, (found.first, found.second), strict=False):
            held = names(name, moment.kind)
            codes, bounds = moment.empty(part)
            made |= (
                {held.codes: codes}
                if moment.kind == "fp32"
                else dict(zip(held, (codes, bounds), strict=True))
            )
        if has_residual(p, group):
            made["residual"] = torch.zeros_like(part, dtype=torch.int8)
        known = {"step": torch.zeros((), dtype=torch.float32)}
        if found.first.kind != "fp32":
            known |= noted(order_of(part))
        return known | {key: spread(state, p) for key, state in made.items()}

    def arguments(self, p: Tensor, state: dict[str, Tensor], found: Format) -> tuple[Any, ...]:
        """Codes and bounds of this rank as the `moments` kernels take them, then their kinds."""
        like = local(p)
        nothing = like.new_empty(0, dtype=torch.uint8), like.new_empty(0, dtype=torch.int16)
        parts: list[Tensor] = []
        for i, moment in enumerate((found.first, found.second)):
            held = names(self.moments[i], moment.kind) if i < len(self.moments) else None
            codes = nothing[0] if held is None else local(state[held.codes])
            bounds = nothing[1] if held is None else local(state.get(held.bounds, nothing[1]))
            parts += [flat(codes) if moment.kind == "fp32" else codes, bounds]
        return *parts, found.first.kind, found.second.kind


def has_residual(p: Tensor, group: Group) -> bool:
    """Returns whether p is a bfloat16 weight that is held in 24 bits."""
    return group["weights"] == "residual" and p.dtype is torch.bfloat16
