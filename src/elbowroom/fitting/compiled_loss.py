"""The loss of a compiled model, where it is a module of its own: compiled in what the model leaves.

    er.fit(torch.compile(model), budget=..., loss=nn.CrossEntropyLoss())

    room of the loss = room of the step - what the model holds for its backward

The model's plan is made first. It leaves room for its results and for their gradients, which is all
that most losses need. A loss that needs more is not refused, since the model's forward has run: it
runs as it is, and the model is compiled again for less.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import torch
from torch import fx, nn

from elbowroom.compiled import Regions, Settings, compile_region
from elbowroom.errors import BudgetTooSmall


class CompiledLoss:
    """A loss, and the backend that compiles it."""

    compiler_name = "elbowroom.fit"

    def __init__(
        self, loss: nn.Module, settings: Settings, options: Mapping[str, Any], dynamic: bool | None
    ) -> None:
        self.regions = Regions(settings)
        self.refused: BudgetTooSmall | None = None
        self._options, self._room, self._offloads = options, 0, settings.offloads
        self._call: Callable[..., Any] = torch.compile(loss, backend=self, dynamic=dynamic)

    def __deepcopy__(self, memo: object) -> Self:
        """Returns itself: Lightning copies all that torch.compile is given (`fitting/twin.py`)."""
        return self

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compiles the loss. Its inputs count: they are what the model has computed."""
        self.regions.restrict(self._room, counts_inputs=True, offloads=self._offloads)
        try:
            return compile_region(gm, example_inputs, self.regions, self._options, True)
        except BudgetTooSmall as error:
            self.refused = error
            raise

    def run(self, room_nbytes: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a call of the loss, which is compiled for this room if it is new.

        Raises BudgetTooSmall if that is too small, and what Dynamo raises.
        """
        self.refused, self._room = None, room_nbytes
        try:
            return self._call(*args, **kwargs)
        except Exception:  # of any class: Dynamo wraps what a backend raises
            if self.refused is None:
                raise
        refused, self.refused = self.refused, None  # see `Twin.run`
        try:
            raise refused.with_traceback(None)
        finally:
            del refused
