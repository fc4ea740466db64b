"""The step that all optimizers share: checks, then one kernel call for each parameter.

    step   refuse what cannot be done -> skip if a gradient is not finite -> states -> kernel

1. A step is done for all parameters or for none: one Inf would spoil a group of 128 for long. So
   would a finite gradient above 1.8e19, whose square is no float32, in an encoded v: it is treated
   like one. (In a v of fp32 it becomes Inf, and its element stands still, as torch.optim's.)
   `skipped` counts the steps that were not done. Under GradScaler, which looks itself, it stays 0.
   Where gradients are released (`release.py`) this holds for each parameter by itself.
2. A parameter is a flat run in memory order, so one in channels_last is not copied; its gradient
   is brought into the same order, and states follow when the order changes (`order.py`).
3. Noise is a hash of (seed, step, place of the parameter, shard, group, element): replicas that
   see the same gradients stay equal to the last bit, and a resumed run continues with the same.
4. torch.compile leaves the step alone: it reads numbers out of states, and a graph that is broken
   there went on with the wrong ones. (torch.compiler.disable, once dynamo has been imported.)
"""

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from copy import copy, deepcopy
from math import inf, sqrt
from typing import Any, ClassVar, overload

import torch
from torch import Tensor, linalg
from torch._compile import _disable_dynamo
from torch.autograd.graph import increment_version
from torch.optim import Optimizer

from elbowroom.errors import InvalidSetting, UnsupportedGradient
from elbowroom.kernels import ops
from elbowroom.kernels.fakes import has_values
from elbowroom.kernels.states import MOST, WEIGHTS
from elbowroom.optim.auto import resolve
from elbowroom.optim.checked import VERSION, check_dict, check_states, checked_groups
from elbowroom.optim.formats import (
    Format,
    Group,
    check_state,
    flat,
    format_of,
    names,
    row_of,
    seed_of,
    state_nbytes,
)
from elbowroom.optim.order import noted, order_of
from elbowroom.optim.parameters import DTYPES, check_now, check_parameter
from elbowroom.optim.release import CANNOT, GradientRelease, check_alone
from elbowroom.optim.settings import check_torchs, foreign
from elbowroom.optim.sharded import agreed, aligned, is_sharded, local, shard_of, spread
from elbowroom.optim.state_dict import loaded, portable
from elbowroom.optim.transcode import follow, has_residual

_log = logging.getLogger("elbowroom.optim")
# The sum of a gradient, below which nobody looks at its elements. Of elements beyond 1.8e19 only
# such a sum is left if others take them away to the 14th digit.
_SMALL = 1e15


class EncodedOptimizer(Optimizer):
    """A rule over encoded states; a subclass gives its names and its numbers.

    Raises InvalidSetting, and UnsupportedParameter for what is not a dense float32, bfloat16 or
    float16 tensor.
    """

    rule: ClassVar[str]
    moments: ClassVar[tuple[str, ...]]  # names in state_dict, as torch.optim has them
    skipped: int = 0  # steps, of which at least one gradient was not applied
    released: GradientRelease | None = None  # gradients are, inside backward, as long as it lasts

    def __init__(self, params: Any, defaults: Group, *, state: str, weights: str, seed: int):
        more = {"state": state, "weights": weights, "seed": seed, "version": VERSION}
        super().__init__(params, defaults | more)

    def __getstate__(self) -> dict[str, Any]:
        """What a copy or a pickle has: not the hooks of released gradients, as none of torch's."""
        return super().__getstate__() | {"skipped": self.skipped}

    def add_param_group(self, param_group: Group) -> None:
        """As torch's; a group may have a `state` and `weights` of its own."""
        super().add_param_group(param_group)
        try:
            resolve(self.param_groups)
            self._check_group(self.param_groups[-1])
        except Exception:
            del self.param_groups[-1]
            raise
        if self.released is not None:
            self.released.watch(len(self.param_groups) - 1)

    def release_gradients(self) -> GradientRelease:
        """From now on each gradient is applied, and freed, inside backward.

            release = optimizer.release_gradients()
            loss.backward()      # updates; one gradient exists at a time
            optimizer.step()     # ends the step; must be called after each backward

        The bits are those of an ordinary step, if all gradients are finite; one that is not leaves
        its parameter as it is, and no other. `release.remove()`, or the end of a `with` around it,
        undoes it. Raises InvalidSetting for what needs all gradients: several backwards a step,
        GradScaler, DistributedDataParallel. `clip_grad_norm_` finds no gradient, and does nothing.
        """
        if self.released is not None:
            raise InvalidSetting("gradients of this optimizer are released already")
        check_alone([p for group in self.param_groups for p in group["params"]])
        self.released = GradientRelease(self)
        return self.released

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Asked by GradScaler, before its step, and by nobody else."""
        if self.released is not None:
            raise InvalidSetting(
                f"{CANNOT}, but GradScaler's are scaled. Train in bfloat16 without a scaler, or "
                "remove() what release_gradients() has returned"
            )
        return False

    def check_settings(self, group: Group) -> None:
        """Raises InvalidSetting for numbers of `rule` that make no optimizer."""
        raise NotImplementedError

    def factors(self, group: Group, step: int) -> list[float]:
        """The numbers of this step that the kernel of `rule` takes."""
        raise NotImplementedError

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @_disable_dynamo
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient, or none if a gradient is not finite.

        Where v is encoded, neither may its square be more than float32 holds.
        A sparse gradient (COO) is one that is 0 elsewhere, where weights and moments decay as
        under a dense one. Raises UnsupportedGradient for other layouts, and UnsupportedParameter
        for what a parameter has become since it was given, before anything has changed. Where
        gradients are released there are none left, but of parameters that were unfrozen later or
        set by hand.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        due = list(self._due())
        left = 0 if self.released is None else self.released.end_step()
        # All ranks must ask, also one where a parameter has no gradient in this step.
        everything = (p for group in self.param_groups for p in group["params"])
        if agreed(everything, self._usable_values(due)):
            for index, group, p, grad in due:
                self._update(index, group, p, grad)
        else:
            left += len(due)
        if left:
            self.skipped += 1
            _log.warning(
                "a gradient, or its square, is not finite: step skipped for %s parameters, "
                "%d so far",
                *(left if self.released is not None else "all", self.skipped),
            )
        return loss

    def apply(self, index: int, group: Group, p: Tensor, grad: Tensor) -> bool:
        """Update one parameter, the index-th of all; False: not, since grad is not finite."""
        self._check_torchs(group)
        usable = self._usable(grad, p, group)
        if finite := agreed([p], self._usable_values([(index, group, p, usable)])):
            self._update(index, group, p, usable)
        return finite

    def portable_state_dict(self) -> dict[str, Any]:
        """Float32 states as the class of the same name in `torch.optim` loads them.

        That class takes what `state_dict()` returns, codes, without a word, and fails at its next
        step: KeyError 'exp_avg'.
        """
        return portable(self)

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what this class, with whichever `state`, or its twin in `torch.optim` has saved.

        `state` and `weights` stay as constructed; with state="auto" the file's are taken, bit for
        bit. Hooks (`register_load_state_dict_pre_hook`, `..._post_hook`) are called as torch's are.
        Raises StateMismatch, and then nothing changed.
        """
        # Not by torch's own: it casts states, and its hooks would see a dict without any.
        state_dict = copy(state_dict)
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            changed = hook(self, state_dict)
            state_dict = state_dict if changed is None else changed
        check_dict(state_dict)
        theirs = state_dict["param_groups"]
        groups, origins = checked_groups(self, theirs), check_states(theirs)
        ids = [id for group in groups for id in group["params"]]
        params = [
            (p, ours | {"state": theirs["state"]})
            for ours, theirs in zip(self.param_groups, groups, strict=True)
            for p in ours["params"]
        ]
        # None (momentum_buffer of torch's SGD) and {} stand for what has not been made yet.
        states = {
            id: {key: value for key, value in state.items() if value is not None}
            for id, state in state_dict["state"].items()
        }
        made = {
            p: loaded(self, p, states[id], group, origin)
            for (p, group), id, origin in zip(params, ids, origins, strict=True)
            if states.get(id)
        }
        self.param_groups = [
            deepcopy(theirs) | {"params": ours["params"]}
            for ours, theirs in zip(self.param_groups, groups, strict=True)
        ]
        self.state = defaultdict(dict, made)
        for done in self._optimizer_load_state_dict_post_hooks.values():
            done(self)

    def group_of(self, p: Tensor) -> Group:
        """The param group of one of its parameters."""
        return next(g for g in self.param_groups if any(p is known for known in g["params"]))

    def state_nbytes(self, p: Tensor, state: str = "") -> int:
        """Bytes of the states of one of its parameters, before or after they are made.

        state: held as this; "": as they are.
        """
        group, second = self.group_of(p), len(self.moments) > 1
        return state_nbytes(p, state or group["state"], second=second, weights=group["weights"])

    def format_of(self, p: Tensor, state: str) -> Format:
        """How the states of p are held."""
        return format_of(p.shape, state, second=len(self.moments) > 1)

    def fresh(self, p: Tensor, group: Group) -> dict[str, Tensor]:
        """States before the first step."""
        made: dict[str, Tensor] = {}
        found, part = self.format_of(p, group["state"]), local(p)
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
        """Codes and bounds of this rank as the kernels take them, then their kinds."""
        like = local(p)
        nothing = like.new_empty(0, dtype=torch.uint8), like.new_empty(0, dtype=torch.int16)
        parts: list[Tensor] = []
        for i, moment in enumerate((found.first, found.second)):
            held = names(self.moments[i], moment.kind) if i < len(self.moments) else None
            codes = nothing[0] if held is None else local(state[held.codes])
            bounds = nothing[1] if held is None else local(state.get(held.bounds, nothing[1]))
            parts += [flat(codes) if moment.kind == "fp32" else codes, bounds]
        return *parts, found.first.kind, found.second.kind

    def _due(self) -> Iterator[tuple[int, Group, Tensor, Tensor]]:
        index = 0
        for group in self.param_groups:
            self._check_torchs(group)
            for p in group["params"]:
                if p.grad is not None:
                    if self.released is not None:
                        self.released.check(index, p)
                    yield index, group, p, self._usable(p.grad, p, group)
                index += 1

    def _usable_values(self, due: Iterable[tuple[int, Group, Tensor, Tensor]]) -> bool:
        """Whether all gradients are finite and, where v is encoded, their squares."""
        full = [one for one in due if _values(one[-1]).numel() and has_values(one[-1])]
        return _small(grad for *_, grad in full) or all(
            bool(linalg.vector_norm(_values(grad), inf) <= self._most(p, group))
            for _, group, p, grad in full
        )

    def _most(self, p: Tensor, group: Group) -> float:
        """The largest element that a gradient of p may have."""
        plain = self.format_of(p, group["state"]).second.kind in ("none", "fp32")
        return torch.finfo(torch.float32).max if plain else sqrt(MOST)

    def _usable(self, grad: Tensor, p: Tensor, group: Group) -> Tensor:
        """This rank's part of grad, in the order of p, which may have changed since last time."""
        check_now(self, p, group)
        if grad.layout is torch.sparse_coo and not is_sharded(p):
            return grad.coalesce()  # dense for itself alone, when p is updated
        if grad.layout is not torch.strided:
            raise UnsupportedGradient(
                f"{type(self).__name__} takes dense and sparse_coo gradients, of DTensors dense "
                f"ones; that of a parameter of shape {tuple(p.shape)} is "
                f"{str(grad.layout).removeprefix('torch.')}. Use sparse=False in the layer"
            )
        return _like(local(p), local(aligned(grad, p)))

    def _update(self, index: int, group: Group, p: Tensor, grad: Tensor) -> None:
        state = self.state[p]
        if not state:
            state.update(self.fresh(p, group))
        follow(self, p, state, group)
        state["step"] += 1
        step = int(state["step"].item()) if has_values(p) else 1  # dry: any will do
        found = self.format_of(p, group["state"])
        residual = state.get("residual")
        *tensors, first, second = self.arguments(p, state, found)
        part, residual = local(p), None if residual is None else flat(local(residual))
        grad = _like(part, grad.to_dense()) if grad.is_sparse else grad
        ops.optimizer_step(
            *(flat(part), residual, flat(grad), *tensors),
            *(self.rule, group["weights"], first, second, row_of(p.shape)),
            *(self.factors(group, step), seed_of(group["seed"], step, index, shard_of(p))),
        )
        # The kernel writes unseen by autograd, whose checks go by these counters.
        increment_version([p, *(tensor for key, tensor in state.items() if key != "step")])

    def _check_torchs(self, group: Group) -> None:
        """At each step: what was set in a group later would change nothing, without a word."""
        check_torchs(type(self).__name__, foreign(group, self.defaults))

    def _check_group(self, group: Group) -> None:
        self._check_torchs(group)
        self.check_settings(group)
        check_state(group["state"], second=len(self.moments) > 1)
        if group["weights"] not in WEIGHTS:
            raise InvalidSetting(f"no weights={group['weights']!r}; there are {', '.join(WEIGHTS)}")
        for p in group["params"]:
            check_parameter(p, group["weights"])


def _like(part: Tensor, grad: Tensor) -> Tensor:
    """Grad in the order of part, and of a dtype that kernels take."""
    if grad.stride() != part.stride() or grad.dtype not in DTYPES:
        return torch.empty_like(part).copy_(grad)
    return grad


def _small(grads: Iterable[Tensor]) -> bool:
    """Whether there is no reason to look closer. One reading pass and, on a GPU, one wait a device.

    By sums: no NaN and no Inf is lost in one, and torch takes them with all threads (a norm not).
    """
    sums: dict[torch.device, list[Tensor]] = {}
    for grad in grads:
        sums.setdefault(grad.device, []).append(_values(grad).sum(dtype=torch.float32))
    return all(bool((torch.stack(some).abs() < _SMALL).all()) for some in sums.values())


def _values(grad: Tensor) -> Tensor:
    return (grad.values() if grad.is_sparse else grad).detach()
