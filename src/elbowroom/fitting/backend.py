"""The backend of torch.compile(..., backend="elbowroom"), which measures its steps.

`compiled/backend.py` plans the regions, and `region_steps.py` measures the steps in which they run.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx

from elbowroom.compiled import Settings
from elbowroom.compiled import elbowroom as planned
from elbowroom.fitting.region_steps import Region, RegionSteps


def elbowroom(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Region:
    """Compiles one region. options, mode: see `elbowroom.compiled.elbowroom`."""
    return planned(gm, example_inputs, options=options, mode=mode, watching=_watching)


def _watching(settings: Settings) -> Callable[[Region], Region]:
    """Returns what sees the calls of the regions of one program."""
    if settings.room_nbytes is None:
        return lambda region: region
    return RegionSteps(settings.room_nbytes).watch
