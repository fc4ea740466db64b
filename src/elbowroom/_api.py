"""The public functions beside training: `saving`; `measure`, `dry_run`, `plan`, `following`, ...

Those of training are in `_training.py`. Each function only checks its arguments and calls the
packages below.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from elbowroom._checks import (
    check_device,
    check_exact,
    check_flag,
    check_function,
    check_initialized,
    check_min_nbytes,
    check_model,
    check_noise,
    check_offload,
    check_optimizer,
)
from elbowroom.adaptive import Adaptive
from elbowroom.adaptive.policies import meter_of, policy_of, within_noise
from elbowroom.codecs import Codec, Dither
from elbowroom.codecs.names import setting_name
from elbowroom.compiled import GraphPolicy, acts_in_graphs
from elbowroom.errors import PlanError, UnknownField
from elbowroom.measure.dry import dry_run as run_dry
from elbowroom.measure.memory import budget_nbytes, device_of
from elbowroom.measure.record import record
from elbowroom.measure.resident_bytes import resident_bytes_of
from elbowroom.measure.roofline import Speed
from elbowroom.measure.snapshot import Snapshot
from elbowroom.measure.snapshot import load_snapshot as read_snapshot
from elbowroom.plan import Coat, Exact, KeepAll, Lean, Lossy, OffloadRest, Policy
from elbowroom.plan.make import make_plan
from elbowroom.plan.plan import Plan
from elbowroom.plan.profile import Profile
from elbowroom.plan.registered import chosen_settings
from elbowroom.plan.solve import WITHOUT_CODES, check_solver
from elbowroom.runtime.attach import opener_of
from elbowroom.runtime.context import PROCESS, Context
from elbowroom.runtime.observer import Observer
from elbowroom.runtime.replay.saving_context import Identical, SavingContext
from elbowroom.runtime.replay.tracer import Tracer
from elbowroom.runtime.saving import Saving
from elbowroom.tools import ExplainOutOfMemory, GradientError, measure_gradient_error

M = TypeVar("M", bound=nn.Module)
T = TypeVar("T")
# Policies whose actions are the same in each step.
_REPEATED = (KeepAll, Exact, Lossy, Lean, Coat, OffloadRest)


def saving(
    policy: str | Codec | Policy | None = None,
    *,
    min_nbytes: int = 32768,
    rebuild: bool = True,
    seed: int | None = None,
    noise: float | None = None,
    watch: bool = False,
    **fields: Any,
) -> SavingContext:
    """Context manager that stores the tensors that autograd saves in fewer bytes.

        with er.saving("dither", bits=2) as saved:
            loss = loss_fn(model(x), y)
        loss.backward()
        print(saved.ledger)

    policy      what to do with each saved tensor. None or "exact": exact actions only, so that no
                bit of any gradient changes.
                "keep": changes nothing, and counts the bytes.
                "lean", with upper, lower, plain, group_size and fold: the fewest bits for
                convolutional networks (see `elbowroom.plan.Lean`).
                "coat", with group_size, wide and format: for transformers. It also encodes the
                factors of products, in 8-bit floats ("fp8") or dithered integers ("int8", "int4";
                see `elbowroom.plan.Coat`).
                "actnn", with bits and group_size: group codes with `bits` bits on average. Each
                tensor gets bits according to its sensitivity (see `elbowroom.adaptive.ActNN`).
                "offload", with tier, directory, from_nbytes and codec: exact actions first. All
                other tensors go to pinned host memory or, from the CPU, to a temporary file. With
                a codec, what tolerates its error is encoded before
                (see `elbowroom.plan.OffloadRest`).
                The id of a codec, with its fields as keywords, or a codec: this codec is used
                wherever the op that saves the tensor tolerates an error. If the op needs a finer
                code than that, a finer setting or a dither is used; `.ledger` names the codec.
                A controller from `elbowroom.adaptive`, which changes settings during training.
                Any function that takes a `Site` and returns an action.
    min_nbytes  storages smaller than this number of bytes are kept as they are; 0: no such limit
    rebuild     whether outputs of norms, activations and dropout may be rebuilt in backward from
                the tensors that their op saves
    noise       with a codec or "lean": limits the variance that codes add to the gradient, relative
                to the variance over mini-batches (0.1: a tenth). Settings change during training.
                Early in training the variance over mini-batches is estimated up to twice too large
                (see `measure.gradient_variance`). The settings found so far are kept for the
                process, under these arguments. For several models, make an `adaptive.NoiseBudget`
                or an `adaptive.LeanBudget` for each
    watch       measure the noise that codes add, in every step; `.error_report()` shows it. With
                `noise` and with controllers, a few steps are measured anyway. A measured step is
                slower
    seed        the seed of the noise of lossy codes. None: one sequence for the whole process,
                and another one after a restart. With the number of the step (`seed=step`), each
                step has noise of its own, and a resumed run has the same bits as an uninterrupted
                one

    Raises UnknownCodec or UnknownField, which list the possible values, and CodecError for a codec
    of another package that does not do what it declares. Tensors that cannot be changed are kept;
    `.ledger` says which, and why. A warning is issued if a step saves 1 MiB or more and all of it
    is kept.
    """
    check_min_nbytes(min_nbytes)
    check_flag("rebuild", rebuild)
    if seed is not None and (not isinstance(seed, int) or isinstance(seed, bool)):
        raise UnknownField(f"seed={seed!r} is not possible; it is an int, or None")
    check_flag("watch", watch)
    context = PROCESS if seed is None else Context(seed, learns=False)
    chosen = policy_of(policy, rebuild, fields)
    if noise is not None:
        chosen = within_noise(chosen, noise, rebuild)
    observer: Observer | None = chosen if isinstance(chosen, Adaptive) else None
    if watch and observer is None:
        observer = meter_of(chosen)

    def make(tracer: Tracer | None) -> Saving:
        return Saving(
            chosen,
            min_nbytes=min_nbytes,
            context=context,
            observer=observer,
            tracer=tracer,
            shares=True,
        )

    repeats = observer is None and type(chosen) in _REPEATED and _has_hash(chosen)
    setting = ("saving", chosen, min_nbytes) if repeats else None
    graphs = None if observer is not None else _in_graphs(chosen, min_nbytes, seed)
    return SavingContext(make, context, setting, warns=True, graphs=graphs)


def _in_graphs(policy: Policy, min_nbytes: int, seed: int | None) -> GraphPolicy | None:
    """Returns the policy in the form for compiled modules; None: they run eagerly under it."""
    if type(policy) is Exact:
        return GraphPolicy("", min_nbytes, seed)
    if type(policy) is KeepAll:
        return GraphPolicy(None)
    codec = policy.codec if type(policy) is Lossy else None
    if type(policy) is Lean:
        # No code serves two readers there: the plain ones, and masks as bits.
        codec = Dither(levels=policy.plain, group_size=policy.group_size)
    if codec is None or not acts_in_graphs(codec):
        return None
    return GraphPolicy("" if codec.lossless else setting_name(codec), min_nbytes, seed)


def _has_hash(policy: Policy) -> bool:
    """Returns whether a policy can be the key of a dict; codecs of others may have no hash."""
    try:
        hash(policy)
    except TypeError:
        return False
    return True


def measure(
    step: Callable[[], object],
    *,
    model: nn.Module | None = None,
    optimizer: Optimizer | None = None,
    device: torch.device | str | None = None,
    min_nbytes: int = 65536,
    warm_up: int = 1,
    noise: bool = False,
) -> Profile:
    """Runs a training step warm_up + 2 times, and returns a profile of it.

        def step():
            optimizer.zero_grad()
            loss_fn(model(x), y).backward()
            optimizer.step()

        profile = er.measure(step, model=model, optimizer=optimizer)
        print(er.plan(profile, budget="6 GiB").explain())

    A profile has the tensors that autograd saves, when they are needed, the memory over time, and
    the time of each part.

    step        a function that runs forward, backward and all other parts of a step; it really
                trains
    model       the model of this step. With it, `plan.explain()` shows the bytes per parameter, of
                weights, gradients and states. None: the profile is the same, without these
    optimizer   the optimizer of this step, whose states are counted with `model`; None: none
    device      the device whose memory is measured; None: CUDA if it is in use in this process,
                else the CPU
    min_nbytes  storages smaller than this number of bytes will be kept as they are
    warm_up     the number of steps before the measurement, in which optimizers create their states;
                0 for an optimizer whose states exist
    noise       run 8 more steps, with lossy codes of 16 levels, and measure the variance that
                the code of each tensor adds to the gradient, and the variance over mini-batches.
                The step should use another batch each time

    With noise=False, only exact actions are used, so no bit of any gradient changes. Raises
    PlanError if the step saves nothing, if two steps save different tensors, if the model is
    fitted, or if this machine does not have the device.
    """
    check_min_nbytes(min_nbytes)
    if not callable(step) or isinstance(step, nn.Module):
        raise PlanError(
            f"measure takes a function that runs one training step; got {type(step).__name__}"
        )
    if not isinstance(warm_up, int) or isinstance(warm_up, bool) or warm_up < 0:
        raise UnknownField(f"warm_up={warm_up!r} is not possible; it is a number of steps, or 0")
    check_flag("noise", noise)
    if model is None:
        if optimizer is not None:
            raise PlanError(
                "measure counts the states of an optimizer with those of its model; give model=, "
                "too"
            )
    else:
        check_model(model, "measure")
        check_optimizer(optimizer, model, "measure")
        if opener_of(model) is not None:
            raise PlanError(
                "measure profiles a plain step, and er.fit changes what this model saves; call "
                "er.release(model) first"
            )
    profile = record(step, device=device, min_nbytes=min_nbytes, warm_up=warm_up, noise=noise)
    if model is None:
        return profile
    return replace(
        profile, standing=resident_bytes_of(model, [] if optimizer is None else [optimizer])
    )


def dry_run(
    model: nn.Module,
    make_batch: Callable[[], Any],
    *,
    loss: Callable[[nn.Module, Any], torch.Tensor],
    optimizer: Optimizer | None = None,
    device: torch.device | str | None = None,
    min_nbytes: int = 65536,
    speed: Speed | None = None,
) -> Profile:
    """Returns the profile that `measure` would return, computed from shapes alone.

    It takes no memory and no data. Its seconds are estimates.

        with torch.device("meta"):
            model = Model()    # of any size
        profile = er.dry_run(
            model,
            lambda: (torch.randn(64, 3, 224, 224), torch.randint(0, 1000, (64,))),
            loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
            optimizer=torch.optim.AdamW(model.parameters()),
        )
        print(er.plan(profile, budget="6 GiB").explain())

    model       a model on any device, also on "meta"; only its shapes are read
    make_batch  a function that returns a batch for `loss`; its tensors take no memory
    loss        a function of (model, batch) that returns a scalar
    optimizer   an optimizer whose states and update are counted; None: there is no update
    device      the device that is simulated; None: that of the model, or the CPU for "meta"
    min_nbytes  as in `measure`
    speed       the speed of another machine's device, an `elbowroom.measure.Speed`; None: the speed
                of this device and its codecs is measured, once per process

    The profile has `measured=False`. Its peak is that of plain autograd, without the temporary
    memory inside of ops. Model, optimizer, gradients and PyTorch's RNG stay as they are. Raises
    PlanError if the step reads the values of tensors, if the model cannot be copied, or if this
    machine does not have the device.
    """
    check_model(model, "dry_run")
    check_initialized(model, "dry_run")
    check_min_nbytes(min_nbytes)
    check_function("make_batch", make_batch)
    check_function("loss", loss)
    check_optimizer(optimizer, model, "dry_run")
    if speed is not None and not isinstance(speed, Speed):
        raise PlanError(
            f"speed is an elbowroom.measure.Speed, or None for this machine's; got {speed!r}"
        )
    return run_dry(
        model,
        make_batch,
        loss,
        optimizer,
        device=_device_of(model, device),
        min_nbytes=min_nbytes,
        speed=speed,
    )


def _device_of(model: nn.Module, device: torch.device | str | None) -> torch.device:
    """Returns the device that a dry run of this model simulates."""
    if device is None:
        own = device_of(model)
        device = torch.device("cpu") if own.type == "meta" else own
    return check_device(device)


def load_snapshot(path: str | Path, device: int | None = None) -> Snapshot:
    """Reads a memory snapshot that `torch.cuda.memory._dump_snapshot(path)` wrote.

        snapshot = er.load_snapshot("snapshot.pickle")
        print(snapshot)                               # the peak, and what it consists of
        er.plan(snapshot, budget="20 GiB")            # an estimate: could any plan fit?

    device  the index of a GPU; None: the GPU with the highest peak

    No code of the file runs: everything but numbers, strings, lists and dicts is refused.
    The command "elbowroom snapshot" draws a page of the file. Raises DataError if the file is not
    a snapshot, or is truncated.
    """
    return read_snapshot(path, device)


def plan(
    profile: Profile | Snapshot,
    *,
    budget: float | str,
    exact: bool | None = None,
    recompute: bool = True,
    offload: str | None = None,
    noise: float | None = None,
    solver: str = "auto",
    codecs: Sequence[str | Codec] | None = None,
) -> Plan:
    """Chooses an action for each tensor of a profiled step, so that its peak fits a budget.

        plan = er.plan(profile, budget="6 GiB")
        print(plan.explain())                # a line for each tensor
        with er.following(plan):             # carries it out
            loss = loss_fn(model(x), y)
        plan.save("plan.json")               # er.Plan.load("plan.json") loads it again

    profile    a profile from `measure` or `dry_run`, or a snapshot from `load_snapshot`. A snapshot
               has a plan only if the step fits the budget as it is. Otherwise BudgetTooSmall says
               that no plan can fit, or PlanError says how to find one
    budget     the allowed peak, with everything counted: bytes (an int, or 6e9), "6 GiB", or a
               share of this machine's memory, such as 0.8 or "80%" (that of the GPU if the step ran
               on one; see `fit`)
    exact      True: exact actions only; None: lossy codes only if the budget needs them; False: the
               cheapest actions, with seconds and noise weighed together
    recompute  whether modules may run their forward a second time, in backward
    offload    "file", or from a GPU "host": tensors may be moved there; None: they stay
    noise      the largest variance that codes may add to the gradient, relative to the variance
               over mini-batches (0.1: a tenth); None: no limit. It is known if the profile was
               measured with noise=True, and estimated from sizes otherwise
    solver     "auto", "milp", "rounding" or "greedy"; or one of the baselines: "uniform"; "delta",
               which moves, recomputes or encodes tensor by tensor; "dtr" and "capuchin", which take
               no codes
    codecs     the only codecs that may be used, as names (with all settings that the codec
               proposes) or as objects: ["division"] gives the method of that paper. None: all
               registered codecs. Where a formula needs a finer code than these have, dither is used

    Raises UnknownField if the budget cannot be parsed, PlanError if it is a share of a GPU that
    this machine does not have or if none of the codecs can be used, and BudgetTooSmall with the
    smallest budget that is possible.
    """
    if isinstance(profile, Snapshot):
        return profile.plan(budget_nbytes(budget, "cuda"))
    if not isinstance(profile, Profile):
        raise PlanError(f"plan takes a profile from er.measure(step); got {type(profile).__name__}")
    check_exact(exact)
    check_offload(offload)
    check_flag("recompute", recompute)
    check_noise(noise, exact)
    check_solver(solver, exact=exact, noise=noise, codecs=codecs)
    return make_plan(
        profile,
        budget_nbytes(budget, profile.device[0]),
        exact=True if solver in WITHOUT_CODES else exact,
        recompute=recompute,
        offload=offload,
        noise=noise,
        solver=solver,
        codecs=chosen_settings(codecs, exact=exact, noise=noise),
    )


def following(plan: Plan, *, min_nbytes: int = 65536, seed: int | None = None) -> SavingContext:
    """Context manager that carries out a plan for the tensors that autograd saves inside.

        with er.following(plan):
            loss = loss_fn(model(x), y)
        loss.backward()

    min_nbytes  as in `saving`
    seed        as in `saving`

    If the plan changes nothing, no hooks are installed, and the ledger stays empty, unless torch
    composes attention of smaller ops, which save more than the plan knows of. Tensors that the plan
    does not know (another shape, another branch) get exact actions, and are counted in
    `plan.unknown_sites`.
    """
    check_min_nbytes(min_nbytes)
    if not isinstance(plan, Plan):
        raise PlanError(f"following takes a plan from er.plan(...); got {type(plan).__name__}")
    context = PROCESS if seed is None else Context(seed, learns=False)
    idle = plan.changes_nothing and not plan.composes_attention

    def make(tracer: Tracer | None) -> Saving:
        return Saving(
            plan,
            min_nbytes=min_nbytes,
            context=context,
            recompute=plan.recompute,
            idle=idle,
            tracer=tracer,
        )

    setting = None if idle else ("following", Identical(plan), min_nbytes)
    return SavingContext(make, context, setting)


def gradient_error(
    run: Callable[[], object],
    model: nn.Module,
    context: AbstractContextManager[Any] | None = None,
    *,
    draws: int = 4,
) -> GradientError:
    """Measures how far the gradient with lossy codes is from the plain one.

        def run():                                 # one batch, always the same; no optimizer
            loss_fn(model(x), y).backward()

        print(er.gradient_error(run, model))       # of a fitted model that has settled
        print(er.gradient_error(run, model, er.saving("dither", levels=16)))

    run      a function that runs forward and backward, and leaves gradients in the model
    model    the model whose gradients are compared
    context  what to open around `run`. None: the model is fitted, and its plan is measured
    draws    how many times `run` is called with codes, 2 or more; it is called once without

    Each call begins with the same RNG, buffers and (no) gradients; afterwards these are as before.
    The result has `.error` (gErr2, the relative squared error of the gradient), `.bias` (the part
    of it that does not average out over steps), `.is_exact` (each call gave the bits of the plain
    step) and `.parameters`. The call without codes takes as much memory as a plain step: if that is
    not there, use a smaller batch with a context.

    Raises PlanError if the model is not fitted, is compiled or has not settled (without a context),
    if `run` changes parameters or leaves no gradient, and UnknownField for invalid `draws`.
    """
    check_function("run", run)
    check_model(model, "gradient_error")
    if isinstance(draws, bool) or not isinstance(draws, int) or draws < 2:
        raise UnknownField(f"draws={draws!r} is not possible; it is an int, 2 or more")
    return measure_gradient_error(run, model, context, draws)


def explain_oom(profile: Profile | str | Path | None = None) -> ExplainOutOfMemory:
    """Context manager that explains on stderr what takes the memory if it runs out inside.

        with er.explain_oom():
            train()

    The explanation names the line and the module that tried to allocate memory. It lists weights,
    gradients, optimizer states and saved tensors by module, and tensors in variables by name and
    line. The original error is then raised again, unchanged. As long as memory does not run out,
    the context costs nothing.

    profile  a profile of the step, from `er.measure` or a file of `elbowroom profile`. With it,
             the explanation also says which plan would fit. A fitted model needs none

    Raises DataError if the file is not a profile.
    """
    return ExplainOutOfMemory(profile)
