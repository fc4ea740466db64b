"""Estimates of what a step that ran out of memory takes at each setting, by its first forward.

    weights and all else that was resident + gradients and states to come + what the setting holds
    + transients, which were not measured: as many largest tensors as a first step reserves

This is an upper bound in most cases. A plan, which is made from a whole step, may take less.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from elbowroom.plan.presets import Preset, held_nbytes
from elbowroom.plan.rehearsal import SAFE

if TYPE_CHECKING:
    from elbowroom.fitting.forward import FittedSaving
    from elbowroom.fitting.options import FitOptions, MemoryState


@dataclass(frozen=True)
class Foreseen:
    """The peak of a step at a setting, estimated.

    is_whole  the forward had ended; else what it had not saved yet is not counted
    """

    setting: Preset
    nbytes: int
    is_whole: bool


def foresee(
    saving: "FittedSaving", options: "FitOptions", memory: "MemoryState", *, is_whole: bool
) -> list[Foreseen]:
    """Returns an estimate for each setting that the options allow, the mildest first.

    memory: as the step began
    """
    largest = max((one.nbytes for one in saving.storages), default=0)
    stands = memory.static_nbytes + memory.unallocated_nbytes + SAFE * largest
    return [
        Foreseen(preset, stands + held_nbytes(preset, saving.storages), is_whole)
        for preset in options.presets
    ]
