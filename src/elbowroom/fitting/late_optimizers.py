"""Finds optimizers that `fit` was not given when they first step, so that their states count, too.

    er.fit(model, budget=...)    # no optimizer yet
    AdamW(model.parameters())    # counted from its first step on

PyTorch calls the single hook of this module before any optimizer's step. Each model is notified
once of each optimizer. The hook is removed with the last fitted model.
"""

import weakref
from typing import Protocol

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle


class Owner(Protocol):
    """Owner of a fitted model's memory, which counts the optimizers that train the model."""

    @property
    def is_called(self) -> bool:
        """True once a forward of the model itself was seen."""
        ...

    def meet(self, optimizer: Optimizer) -> None:
        """Called before the optimizer's first step."""
        ...

    def miss(self, optimizer: Optimizer) -> None:
        """Called before each step of an optimizer while no forward was seen."""
        ...


_owners: weakref.WeakSet[Owner] = weakref.WeakSet()
_asked: weakref.WeakKeyDictionary[Optimizer, weakref.WeakSet[Owner]] = weakref.WeakKeyDictionary()
_hook: list[RemovableHandle] = []  # at most one


def watch(owner: Owner) -> None:
    """Notifies the owner of each optimizer that steps from now on, as long as the owner exists."""
    weakref.finalize(owner, _end).atexit = False  # younger finalizers are called first
    _owners.add(owner)
    if not _hook:
        _hook.append(register_optimizer_step_pre_hook(_before_step))


def _end() -> None:
    if not _owners and _hook:
        _hook.pop().remove()


def _before_step(optimizer: Optimizer, *_: object) -> None:
    if torch.compiler.is_compiling():
        return
    asked = _asked.get(optimizer)
    if asked is None:
        asked = _asked[optimizer] = weakref.WeakSet()
    for owner in list(_owners):
        if owner not in asked:
            asked.add(owner)
            owner.meet(optimizer)
        if not owner.is_called:
            owner.miss(optimizer)
