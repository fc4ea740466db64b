"""The step that all optimizers share: checks, then one kernel call a device and format.

    step   refuse what cannot be done -> look at all gradients -> states -> one call a format
           (what is like the last step is not looked at again: `prepared.py`)

1. A step updates all parameters or none. If a gradient has a NaN or an Inf, the step is skipped,
   because one such value would make all 128 elements of its group wrong for many steps. With an
   encoded v, gradients above 1.8e19 count as Inf, because their square is larger than float32 can
   hold. (In a v of fp32 the square becomes Inf, and this element is not updated any more, as in
   torch.optim.) `skipped` counts the skipped steps. It stays 0 under GradScaler, which checks the
   gradients itself. Where gradients are released (`release.py`), each parameter is skipped alone.
2. On CUDA the host does not wait for the gradients: the kernels skip the step themselves, and the
   host reads whether they did when the next step begins (`verdict.py`). To read `skipped` or a
   state_dict makes the host wait.
3. A parameter is updated as a flat run in memory order, so one in channels_last is not copied. Its
   gradient is brought into the same order, and so are states if the order changes (`order.py`).
4. Noise is a hash of (seed, step, index of the parameter, shard, group, element). So replicas that
   have the same gradients have the same bits, and a resumed run continues with the same noise.
5. The step is not compiled (torch.compiler.disable): it reads numbers from the states, and after a
   graph break compiled code used outdated ones.
"""

import logging
from collections import defaultdict
from collections.abc import Callable
from copy import copy, deepcopy
from typing import Any, ClassVar, overload

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.autograd.graph import increment_version
from torch.optim import Optimizer

from elbowroom.errors import InvalidSetting, UnsupportedGradient
from elbowroom.kernels import ops
from elbowroom.kernels.fakes import has_values
from elbowroom.kernels.states import WEIGHTS
from elbowroom.optim.batch import Batches, Due, new_due
from elbowroom.optim.checked import VERSION, check_dict, check_states, checked_groups
from elbowroom.optim.device_steps import DeviceSteps, Step, is_capturing
from elbowroom.optim.formats import Group, check_state, resolve, state_nbytes
from elbowroom.optim.layout import StateLayout
from elbowroom.optim.parameters import DTYPES, Update, check_held, facts_of, update_of
from elbowroom.optim.prepared import Prepared
from elbowroom.optim.release import CANNOT, Complete, GradientRelease, check_alone
from elbowroom.optim.settings import check_torchs, foreign
from elbowroom.optim.sharded import agreed, aligned, is_sharded, local
from elbowroom.optim.state_dict import decoded, loaded, portable
from elbowroom.optim.transcode import follow
from elbowroom.optim.verdict import Verdict, is_read_later

_log = logging.getLogger("elbowroom.optim")


class EncodedOptimizer(Optimizer):
    """A rule over encoded states; a subclass gives its names and its numbers.

    Raises InvalidSetting, and UnsupportedParameter for what is not a dense float32, bfloat16 or
    float16 tensor.
    """

    rule: ClassVar[str]
    moments: ClassVar[tuple[str, ...]]  # names in state_dict, as torch.optim has them
    layout: ClassVar[StateLayout]
    released: GradientRelease | None = None  # gradients are, inside backward, as long as it lasts
    _skipped: int = 0
    _running: list[Verdict] | None = None  # of this step, which are read later
    _ended: tuple[list[Verdict], int] | None = None  # of the last step, and what is known of it
    _counts: DeviceSteps | None = None  # where devices count steps for themselves
    _prepared: Prepared | None = None  # by the last step for the next one

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.layout = StateLayout(cls.__name__, cls.moments)

    def __init__(self, params: Any, defaults: Group, *, state: str, weights: str, seed: int):
        more = {"state": state, "weights": weights, "seed": seed, "version": VERSION}
        super().__init__(params, defaults | more)

    def __getstate__(self) -> dict[str, Any]:
        """Returns what a copy or a pickle has: not the hooks of released gradients, as in torch."""
        self.wait()
        return super().__getstate__() | {"skipped": self.skipped}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Takes over what `__getstate__` has returned."""
        super().__setstate__({key: value for key, value in state.items() if key != "skipped"})
        self.skipped = state.get("skipped", 0)

    @property
    def skipped(self) -> int:
        """Number of steps of which at least one gradient was not applied.

        On CUDA it waits for the last.
        """
        self.settle()
        return self._skipped

    @skipped.setter
    def skipped(self, steps: int) -> None:
        self._skipped = steps

    def add_param_group(self, param_group: Group) -> None:
        """Adds a group as torch's does; it may have a `state` and `weights` of its own."""
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
        """Applies and frees each gradient inside backward, from now on.

            release = optimizer.release_gradients()
            loss.backward()      # updates; a large gradient exists alone
            optimizer.step()     # ends the step; must be called after each backward

        The bits are those of an ordinary step, if all gradients are finite; one that is not leaves
        its parameter as it is, and no other. `release.remove()`, or the end of a `with` around it,
        undoes it. Raises InvalidSetting for what needs all gradients: several backwards a step,
        GradScaler, DistributedDataParallel. `clip_grad_norm_` finds no gradient, and does nothing.
        """
        if self.released is not None:
            raise InvalidSetting("gradients of this optimizer are released already")
        check_alone([p for group in self.param_groups for p in group["params"]])
        self.released, self._prepared = GradientRelease(self), None
        return self.released

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """False; GradScaler alone asks this, before its step."""
        if self.released is not None:
            raise InvalidSetting(
                f"{CANNOT}, but GradScaler's are scaled. Train in bfloat16 without a scaler, or "
                "remove() what release_gradients() has returned"
            )
        return False

    def check_settings(self, group: Group) -> None:
        """Raises InvalidSetting for numbers of `rule` that make no optimizer."""
        raise NotImplementedError

    def factors(self, group: Group, step: Step) -> list[Any]:
        """Returns the numbers of this step that the kernel of `rule` takes.

        step: a number, or float64 [P] (`device_steps.py`); then what depends on it is a tensor [P]
        """
        raise NotImplementedError

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @_disable_dynamo
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Updates every parameter that has a gradient, or none if a gradient is not finite.

        Where v is encoded, gradients whose square is larger than float32 can hold count as Inf. A
        sparse gradient (COO) counts as 0 elsewhere: weights and moments decay there, too. With
        released gradients, only parameters that were unfrozen later, and gradients that were set
        by hand, are left for this function.

        Raises UnsupportedGradient for other layouts, and UnsupportedParameter if a parameter has
        changed into one that cannot be updated; nothing has changed then.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.settle()
        self._read_graph_steps()
        if self.released is not None:
            self.released.apply_waiting()
        batches, grads = self._due()
        left = 0 if self.released is None else self.released.end_step()
        flag = batches.beyond(grads)
        if self._prepared is None:
            # All ranks must ask, also one where a parameter has no gradient in this step.
            flag = agreed((p for group in self.param_groups for p in group["params"]), flag)
        if not self._updated(batches, grads, flag):
            left += len(grads)
        self.end_step(left)
        return loss

    def apply(self, complete: list[Complete]) -> int:
        """Updates parameters; returns how many it has not: their gradients are not finite.

        On CUDA this is not known yet. It is read when the next step begins.
        """
        self.settle()
        for group in {id(one.group): one.group for one in complete}.values():
            self._check_torchs(group)
        made = [self._due_one(*one) for one in complete]
        grads = [grad for _, grad in made]
        batches = Batches(self.rule, [due for due, _ in made], grads)
        flag = agreed([one.p for one in complete], batches.beyond(grads))
        if self._updated(batches, grads, flag):
            return 0
        return 1 if len(complete) == 1 else sum(self.apply([one]) for one in complete)

    def end_step(self, left: int) -> None:
        """Ends a step. left: how many of its gradients are known not to have been applied."""
        self.settle()
        self._ended, self._running = (self._running or [], left), None
        if not self._ended[0]:
            self.settle()

    def settle(self) -> None:
        """Reads the verdict on the last step, and counts the step if it was skipped."""
        if self._ended is None:
            return
        (verdicts, left), self._ended = self._ended, None
        left += sum(len(verdict.counters) for verdict in verdicts if verdict.refused())
        if left:
            self._skipped += 1
            _log.warning(
                "a gradient, or its square, is not finite: step skipped for %s parameters, "
                "%d so far",
                *(left if self.released is not None else "all", self._skipped),
            )

    def wait(self) -> None:
        """Makes all counters of steps right, also in the middle of a step of released gradients."""
        self.settle()
        for verdict in self._running or ():
            verdict.refused()
        self._read_graph_steps()

    def _read_graph_steps(self) -> None:
        """Takes over the steps that CUDA graphs have done, if one was captured."""
        counts = self._counts
        if counts is None or not counts.was_captured:
            return
        parameters = [p for group in self.param_groups for p in group["params"]]
        if any(is_capturing(device) for device in {p.device for p in parameters}):
            return
        for places, steps in counts.read():
            for place, step in zip(places, steps, strict=True):
                state = self.state.get(parameters[place])
                if state:
                    state["step"].fill_(step)

    def state_dict(self) -> dict[str, Any]:
        """Returns a state_dict as torch's, of steps that were done. On CUDA: waits for the last."""
        self.wait()
        return super().state_dict()

    def portable_state_dict(self) -> dict[str, Any]:
        """Returns a state_dict with float32 states, for the class of this name in `torch.optim`.

        That class would also load the codes of `state_dict()`, without an error, and would fail in
        its next step (KeyError: 'exp_avg').
        """
        self.wait()
        more = {"dampening": 0} if self.rule == "sgd" else {}
        return portable(self.layout, self.param_groups, self.state, more)

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state_dict of this class, or of the class of the same name in `torch.optim`.

        It may have been saved with another `state`. `state` and `weights` of this optimizer stay;
        with state="auto" the file's format is used, and no bit of the states changes. Hooks
        (`register_load_state_dict_pre_hook`, `..._post_hook`) are called as in torch. Raises
        StateMismatch, and changes nothing then.
        """
        # Not by torch's own: it casts states, and its hooks would see a dict without any.
        self.wait()
        state_dict = copy(state_dict)
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            changed = hook(self, state_dict)
            state_dict = state_dict if changed is None else changed
        check_dict(state_dict)
        theirs = state_dict["param_groups"]
        known = type(self).__name__, self.param_groups, theirs, self.defaults, self.check_settings
        groups, origins = checked_groups(*known), check_states(theirs)
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
            p: loaded(self.layout, p, states[id], group, origin)
            for (p, group), id, origin in zip(params, ids, origins, strict=True)
            if states.get(id)
        }
        self.param_groups = [
            deepcopy(theirs) | {"params": ours["params"]}
            for ours, theirs in zip(self.param_groups, groups, strict=True)
        ]
        self.state, self._counts = defaultdict(dict, made), None
        for done in self._optimizer_load_state_dict_post_hooks.values():
            done(self)

    @torch.no_grad()
    def decoded_state(self, p: Tensor) -> dict[str, Tensor]:
        """Returns the moments of a parameter p in float32, in the shape of p, by torch's names.

        These are "exp_avg" and "exp_avg_sq", for example; {} before the first step. On CUDA the
        host waits for the last step.
        """
        self.wait()
        state = self.state.get(p)
        if not state:
            return {}
        return decoded(self.layout, p, state, self.group_of(p)["state"])

    def group_of(self, p: Tensor) -> Group:
        """The param group of one of its parameters."""
        return next(g for g in self.param_groups if any(p is known for known in g["params"]))

    def state_nbytes(self, p: Tensor, state: str = "") -> int:
        """Returns the bytes of the states of a parameter p, also if they do not exist yet.

        state: in this format; "": in the format of the parameter's group
        """
        group, second = self.group_of(p), self.layout.second
        return state_nbytes(p, state or group["state"], second=second, weights=group["weights"])

    def _due(self) -> tuple[Batches, list[Tensor]]:
        """Returns all that is due, and the gradients as the kernels take them."""
        for group in self.param_groups:
            self._check_torchs(group)
        if self._prepared is not None:
            same = self._prepared.grads(self.param_groups, self.state)
            if same is not None:
                return self._prepared.batches, same
            self._prepared = None
        made, index = [], 0
        for group in self.param_groups:
            for p in group["params"]:
                grad = p.grad
                if grad is not None:
                    if self.released is not None:
                        self.released.check(index, p)
                    made.append(self._due_one(index, group, p, grad))
                index += 1
        grads = [grad for _, grad in made]
        return Batches(self.rule, [due for due, _ in made], grads), grads

    def _due_one(self, index: int, group: Group, p: Tensor, grad: Tensor) -> tuple[Due, Tensor]:
        """Returns what is due of one parameter, and this rank's part of its gradient.

        A dense gradient lies as the parameter does; a sparse one is coalesced.

        Raises UnsupportedParameter and UnsupportedGradient; nothing has changed then.
        """
        facts, sharded = facts_of(p), is_sharded(p)
        update = update_of(facts, group["state"], group["weights"], self.moments)
        check_held(p, self.state.get(p) or {}, update, group["state"])
        if sharded:
            grad = aligned(grad, p)
        layout = grad.layout
        if layout is torch.sparse_coo and not sharded:
            grad = grad.coalesce()
            grad = grad if grad.dtype in DTYPES else grad.to(p.dtype)
        elif layout is torch.strided:
            grad = local(grad)
            if grad.stride() != facts.strides or grad.dtype not in DTYPES:  # as kernels take it
                grad = torch.empty_like(local(p)).copy_(grad)
        else:
            raise UnsupportedGradient(
                f"{type(self).__name__} takes dense and sparse_coo gradients, of DTensors dense "
                f"ones; that of a parameter of shape {tuple(p.shape)} is "
                f"{str(grad.layout).removeprefix('torch.')}. Use sparse=False in the layer"
            )
        return new_due(Due, (index, group, p, update)), grad

    def _updated(self, batches: Batches, grads: list[Tensor], flag: Tensor | None) -> bool:
        """Updates what is due, unless the flag is up; returns whether it did.

        Whether the flag is up is not asked where that waits.

        What it returns is right as far as that is known.
        """
        if flag is not None and is_read_later(flag):
            counters = self._update(batches, grads, flag)
            if not is_capturing(flag.device):  # a graph reports none of its launches
                self._running = [*(self._running or ()), Verdict(flag, counters)]
            return True
        usable = flag is None or not flag.tolist()
        if usable:
            self._update(batches, grads, None)
        return usable

    def _update(self, batches: Batches, grads: list[Tensor], skip: Tensor | None) -> list[Tensor]:
        """Runs one step of all; returns their counters. skip: see `ops.optimizer_step`."""
        if not grads:
            return []
        due = batches.due
        dry = not has_values(due[0].p)
        is_whole = not dry and self.released is None
        if self._prepared is not None:
            states = list(self.state.values())
        else:
            states = [self._state_of(one) for one in due]
            if is_whole:
                self._prepared = Prepared.of(self.param_groups, self.state, batches, grads)
        counters = [state["step"] for state in states]
        steps = [1] * len(due) if dry else [int(x) for x in ops.advance(counters, 1).tolist()]
        if self._counts is None:
            self._counts = DeviceSteps()
        counts = self._counts if is_whole else None
        written = batches.run(states, grads, steps, self.factors, counts, skip)
        # The kernels write unseen by autograd, whose checks go by these counters.
        increment_version([*counters, *written])
        return counters

    def _state_of(self, due: Due) -> dict[str, Tensor]:
        """Returns the states of a parameter, made if there are none, and lying as it lies now."""
        state: dict[str, Tensor] = self.state[due.p]
        if not state:
            state.update(self.layout.fresh(due.p, due.group))
        elif not _in_place(due.p, state, due.update):
            follow(self.layout, due.p, state, due.group)
        return state

    def _check_torchs(self, group: Group) -> None:
        """Checks, at each step, for settings set in a group later that would change nothing."""
        check_torchs(type(self).__name__, foreign(group, self.defaults))

    def _check_group(self, group: Group) -> None:
        self._check_torchs(group)
        self.check_settings(group)
        check_state(group["state"], second=self.layout.second)
        if group["weights"] not in WEIGHTS:
            raise InvalidSetting(f"no weights={group['weights']!r}; there are {', '.join(WEIGHTS)}")
        for p in group["params"]:
            update_of(facts_of(p), group["state"], group["weights"], self.moments)


def _in_place(p: Tensor, state: dict[str, Tensor], update: Update) -> bool:
    """Returns whether states certainly lie as the parameter does; if not, one looks closer."""
    residual = state.get("residual")
    if (residual is not None) is not update.residual:
        return False
    stride = p.stride()
    if residual is not None and residual.stride() != stride:
        return False
    if update.m_kind == "fp32":
        return state[update.first.codes].stride() == stride
    return not update.order and "order" not in state
