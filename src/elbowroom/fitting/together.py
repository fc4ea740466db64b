"""Models that several processes train together: a refusal in one process ends the step in all.

A process that raises alone leaves the others blocked in the next collective operation. So, as long
as one of them is learning, they exchange two numbers after each forward: the least budget that any
process needs, and whether any is still learning. Once all are settled, nothing is exchanged any
more.

    FSDP2   each forward gathers parameters, so all processes run equally many; none is run twice
    DDP     each forward whose backward averages gradients has one in every process. It runs twice
            only if it does not communicate: no buffers are sent, no statistics are shared

Everything else is learned by each process separately, so plans may differ.
"""

import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from elbowroom.errors import BudgetTooSmall
from elbowroom.fitting.refusals import without_frames
from elbowroom.measure.memory import device_of
from elbowroom.optim.sharded import is_sharded
from elbowroom.runtime.attach import Given
from elbowroom.runtime.undo import Undo
from elbowroom.units import budget_argument


class Together:
    """Agreement of a fitted model with its copies, or shards, in other processes.

    runs_once  its forward communicates with other processes, and must not run a second time
    """

    runs_once = False

    def __init__(self) -> None:
        self._is_over = False
        self._meshes: list[Any] | None = None  # of sharded parameters; None: not determined yet

    def groups_of(self, model: nn.Module) -> list[Any]:
        """Returns the process groups that run this forward, too; none if nothing is exchanged."""
        distributed = torch.distributed
        if self._is_over or not distributed.is_available() or not distributed.is_initialized():
            return []
        if self._meshes is None:
            self._meshes = _meshes_of(model)
        if self._meshes:
            self.runs_once = True
            dims = [mesh.get_group(dim) for mesh in self._meshes for dim in range(mesh.ndim)]
            return [*dims, *dims[:-1]]  # the first groups must learn what the last one knows
        return self._group_of_ddp(model)

    def _group_of_ddp(self, model: nn.Module) -> list[Any]:
        kind: Any = nn.parallel.DistributedDataParallel
        ddp: Any = model if isinstance(model, kind) else kind._get_active_ddp_module()
        if ddp is None or not ddp.require_backward_grad_sync or ddp._join_config.enable:
            return []
        whole = model is ddp
        self.runs_once = (whole and ddp.will_sync_module_buffers()) or any(
            isinstance(module, nn.SyncBatchNorm) for module in model.modules()
        )
        return [ddp.process_group]

    def run(
        self,
        groups: list[Any],
        run: Callable[[Callable[[], Any]], Any],
        model: nn.Module,
        forward: Callable[[], Any],
        given: Given,
        settled: Callable[[], bool],
    ) -> Any:
        """Runs run(forward), and raises BudgetTooSmall if that, or another process's, does."""
        refused, out, began = None, None, False

        def noted() -> Any:
            nonlocal began
            began = True
            return forward()

        try:
            out = run(noted)
        except BudgetTooSmall as error:
            refused = without_frames(error)
            if self.runs_once and not began:
                _take_part(model, forward, given)
        least, learns = _largest(
            groups, [0 if refused is None else refused.least_nbytes, not settled()], model
        )
        self._is_over = not learns
        if not least:
            return out
        if refused is None:
            raise BudgetTooSmall(
                f"another process of this training needs more than the budget; give "
                f"{budget_argument(least)} to all of them",
                least_nbytes=least,
            )
        if least > refused.least_nbytes:
            more = f" Another process needs more: give {budget_argument(least)} to all of them."
            raise BudgetTooSmall(
                f"{refused}{more}", least_nbytes=least, parts=refused.parts
            ) from None
        try:
            raise refused
        finally:
            refused = None  # the error has this frame, which must not have the error


def _meshes_of(model: nn.Module) -> list[Any]:
    """Returns the meshes of more than one process over which `fully_shard` has spread a model."""
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    if kind is None or not any(isinstance(module, kind) for module in model.modules()):
        return []
    meshes = {p.device_mesh: None for p in model.parameters() if is_sharded(p)}
    return [mesh for mesh in meshes if mesh.size() > 1]


def _take_part(model: nn.Module, forward: Callable[[], Any], given: Given) -> None:
    """Runs a forward that was refused before it began, for the processes that run theirs."""
    undo = Undo(model, (), given)
    try:
        with torch.no_grad():
            undo.watching(forward)()
    finally:
        with suppress(RuntimeError):  # where buffers cannot be restored
            undo.back()
        undo.close()


def _largest(groups: list[Any], values: list[int], model: nn.Module) -> list[int]:
    """Returns, for each value, the largest in all processes. All of them must call this."""
    found = torch.tensor(
        [int(value) for value in values], dtype=torch.int64, device=device_of(model)
    )
    for group in groups:
        torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MAX, group)
    return [int(value) for value in found.tolist()]
