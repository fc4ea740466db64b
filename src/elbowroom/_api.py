"""The public functions: `saving`; `measure`, `plan`, `following`; `fit`, `step`, `release`, ...

Each function only checks its arguments and calls the packages below. No other file uses all stages.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
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
from elbowroom.compiled import GraphPolicy, acts_in_graphs, place_of
from elbowroom.errors import PlanError, UnknownField
from elbowroom.fitting import FitOptions, Fitting, Summary, check_alone, repeat
from elbowroom.fitting import summary as summary_of
from elbowroom.fitting.compiled import (
    CompiledFitting,
    CompileSettings,
    compile_settings,
    planned,
    take_over,
)
from elbowroom.fitting.inside import leave_regions, plan_inside, planned_inside
from elbowroom.fitting.loss import cover, losses_of, uncover
from elbowroom.measure.dry import dry_run as run_dry
from elbowroom.measure.memory import budget_nbytes
from elbowroom.measure.record import record
from elbowroom.measure.resident_bytes import resident_bytes_of
from elbowroom.measure.roofline import Speed
from elbowroom.measure.snapshot import Snapshot
from elbowroom.measure.snapshot import load_snapshot as read_snapshot
from elbowroom.plan import Coat, Exact, KeepAll, Lean, Lossy, OffloadRest, Policy
from elbowroom.plan.make import make_plan
from elbowroom.plan.plan import Plan, check_plan
from elbowroom.plan.profile import Profile
from elbowroom.plan.registered import chosen_settings
from elbowroom.plan.solve import WITHOUT_CODES, check_solver
from elbowroom.runtime.attach import attach, attached, detach, opener_of
from elbowroom.runtime.compiler import original
from elbowroom.runtime.context import PROCESS, Context
from elbowroom.runtime.hooks import Saving
from elbowroom.runtime.observer import Observer
from elbowroom.runtime.replay.saving_context import Identical, SavingContext
from elbowroom.runtime.replay.tracer import Tracer
from elbowroom.tools import (
    ExplainOutOfMemory,
    GradientError,
    GrowingBatch,
    LargestBatch,
    Log,
    find_largest,
    measure_gradient_error,
)
from elbowroom.tools.grow_batch import check_growing

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
                wherever the op that saves the tensor tolerates an error.
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

    Raises UnknownCodec or UnknownField, which list the possible values. Tensors that cannot be
    changed are kept; `.ledger` says which, and why. A warning is issued if a step saves 1 MiB or
    more and all of it is kept.
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
    PlanError if the step saves nothing, if two steps save different tensors, or if this machine
    does not have the device.
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


def _home(model: nn.Module) -> torch.device:
    """Returns the device of the first parameter; the CPU if there is none."""
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def _device_of(model: nn.Module, device: torch.device | str | None) -> torch.device:
    """Returns the device that a dry run of this model simulates."""
    if device is None:
        own = _home(model)
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

    If the plan changes nothing, no hooks are installed, and the ledger stays empty. Tensors that
    the plan does not know (another shape, another branch) get exact actions, and are counted in
    `plan.strangers`.
    """
    check_min_nbytes(min_nbytes)
    if not isinstance(plan, Plan):
        raise PlanError(f"following takes a plan from er.plan(...); got {type(plan).__name__}")
    context = PROCESS if seed is None else Context(seed, learns=False)

    def make(tracer: Tracer | None) -> Saving:
        return Saving(
            plan,
            min_nbytes=min_nbytes,
            context=context,
            recompute=plan.recompute,
            idle=plan.changes_nothing,
            tracer=tracer,
        )

    setting = None if plan.changes_nothing else ("following", Identical(plan), min_nbytes)
    return SavingContext(make, context, setting)


def fit(
    model: M,
    *,
    budget: float | str,
    optimizer: Optimizer | None = None,
    exact: bool | None = None,
    offload: str | None = None,
    noise: float | None = None,
    min_nbytes: int = 65536,
    worst: Any = None,
    plan: Plan | None = None,
    loss: nn.Module | Iterable[nn.Module] | None = None,
    compile: bool = False,
    codecs: Sequence[str | Codec] | None = None,
    solver: str = "auto",
) -> M:
    """Trains `model` inside a memory budget. Returns the same model; `er.release(model)` undoes it.

        model = er.fit(model, budget="6 GiB", optimizer=opt)

    The budget covers weights, gradients, optimizer states, saved tensors and temporary memory. On
    CUDA it covers everything that is allocated. On a CPU it does not cover tensors that exist
    before the step, such as the batch.

    Each forward of the model that records gradients then runs inside a context like `saving`. The
    first steps use one cautious setting for all tensors, and a step is profiled. Later steps follow
    a plan, whose peak is measured, and which is corrected if needed (`elbowroom.fitting.session`).
    Forwards with other shapes, flags or modes get plans of their own. If the first forward would
    exceed the budget, it runs up to three times, with RNG and buffers restored.

    budget      bytes, as an int or 6e9; "6 GiB", where "6 GB" is 6 * 10**9; or a share of the
                memory of the model's device: 0.8, "0.8" or "80%". For a GPU, this is a share of its
                whole memory. For a CPU, it is a share of what the process may use, which is the
                smallest of RAM, cgroup limits and rlimits (of data, of address space). Write "100%"
                for all of it; 1.0 is refused
    optimizer   the optimizer, whose states are counted even before it creates them. The states of
                an `er.optim` optimizer with state="auto" are encoded if that is the cheapest way to
                fit the budget (`elbowroom.fitting.state_formats`). None: the optimizer is found at
                its first step, and the next step is measured again
    exact       True: exact actions only, so that no bit of any gradient changes. None: lossy codes
                only if the budget needs them; the logger "elbowroom" then says so in one line.
                False: the cheapest actions; noise counts as the additional steps that it costs
    offload     "file", or from a GPU "host": plans may move tensors there; None: they stay
    noise       the largest variance that codes may add to the gradient, relative to the variance
                over mini-batches (0.1: a tenth). It is measured in eight steps under the first
                lossy plan, if there is enough memory for it, and predicted from the gradients of
                weights otherwise. If the budget then needs more noise, it is refused. Inside
                torch.compile the noise is estimated from sizes, and no plan adds more. 0: no codes,
                as with exact=True. None: no limit; the logger says how much is added, at WARNING
                above 0.1
    worst       the arguments of the model for the largest batch: a tensor, a tuple of arguments or
                a dict of keyword arguments. Forward runs once, without storing tensors, and a plan
                is made before the training begins. RNG, buffers and modes are restored
    plan        the plan of the first step: `er.plan(...)`, `er.Plan.load(path)`, or
                `er.largest_batch(...).plan`. This step is measured. If it does not fit, or if it
                saves tensors that the plan does not know, a new plan is made
    loss        a module that the program calls on the model's output, such as
                nn.CrossEntropyLoss(), or several: the tensors that it saves become part of the
                plan. It must not have trained parameters (put such a loss into the model). On a
                CPU, its other parameters are not counted. With a compiled model it is compiled, too
    compile     True: forwards run through torch.compile, and the plan is made inside the compiled
                graph (`elbowroom.fitting.compiled`). A model that was compiled with Inductor is
                treated in the same way without this argument, unless worst, plan, solver, codecs
                without a form for graphs or, on a GPU, offload="file" are given, because these work
                only in eager mode
    codecs      the lossy codecs that may be used, as in `er.plan`; a codec of another package that
                fails, or lies about its sizes or values, is named in a warning and left out
    solver      the solver, as in `er.plan`. "delta" weighs codes as well, unless exact=True; with
                "dtr" and "capuchin" fit is exact. Where no plan of a solver keeps the budget, and
                codes are allowed, all tensors use one setting of codes, which a warning names

    Raises UnknownField if the budget cannot be parsed, and PlanError if the given plan contradicts
    the other arguments or the memory of the device is not known ("meta"). Forward (and fit, for
    `worst`) raises er.errors.BudgetTooSmall with the smallest budget that is possible. A copied or
    pickled model is a plain one.
    """
    check_model(model, "fit")
    check_initialized(model, "fit")
    check_min_nbytes(min_nbytes)
    check_exact(exact)
    check_optimizer(optimizer, model)
    check_offload(offload)
    if offload == "host" and all(p.device.type == "cpu" for p in model.parameters()):
        raise PlanError(
            "offload='host' moves tensors from a GPU to host memory; this model is in host memory "
            "already. Use offload='file', or move the model to its GPU before fit."
        )
    check_noise(noise, exact)
    check_solver(solver, exact=exact, noise=noise, codecs=codecs)
    options = FitOptions(
        budget_nbytes(budget, _home(model)),
        # Other limits are kept once the noise of the first lossy plan is measured or predicted.
        True if noise == 0 or solver in WITHOUT_CODES else exact,
        offload,
        min_nbytes,
        noise,
        chosen_settings(codecs, exact=exact, noise=noise),
        solver,
    )
    args, kwargs = _arguments(worst)
    check_plan(plan, options.budget_nbytes, exact, noise, offload, options.codecs)
    check_alone(
        optimizer, [one.model_state.states for other, one in _fittings() if other is not model]
    )
    if plan is not None and worst is not None:
        raise PlanError("plan= and worst= both determine the first step; give one of them")
    check_flag("compile", compile)
    losses = losses_of(loss, model)
    release(model)
    how = compile_settings(model) or (CompileSettings() if compile else None)
    is_plain = worst is None and plan is None
    is_plain &= options.codecs is None or any(map(acts_in_graphs, options.codecs))
    is_plain &= offload is None or offload == place_of(_home(model))
    is_plain &= solver == "auto"
    if how is not None and is_plain:
        compiled = CompiledFitting(model, options, optimizer, how)
        for one in losses:
            cover(one, compiled)
        attach(model, compiled)
        return model
    if compile:
        raise PlanError(
            "compile=True plans inside torch.compile; leave worst, plan, solver, codecs without a "
            "form for graphs (see docs/compiled.md) and, for a model on a GPU, offload='file' out"
        )
    given = None if plan is None else replace(plan, strangers=Counter())  # counted for this fit
    fitting = Fitting(model, options, optimizer, given)
    if worst is not None:
        fitting.prepare(model, args, kwargs)
    if is_plain:
        fitting.compiled = take_over
        plan_inside(fitting)
    for one in losses:
        cover(one, fitting)
    attach(model, fitting)
    return model


def add_optimizer(model: nn.Module, optimizer: Optimizer) -> None:
    """Adds an optimizer that was created after `fit`, so that its states are counted.

        model = er.fit(model, budget="6 GiB")
        trainer = Trainer(model, ...)            # creates its optimizer
        er.add_optimizer(model, trainer.optimizer)

    The states count from the next step on. Without this call, they count from the optimizer's first
    step on, when they exist already. A model may have several optimizers, and each counts once.
    Raises PlanError if the model is not fitted, or if `optimizer` is not an optimizer.
    """
    check_model(model, "add_optimizer")
    if optimizer is None:
        raise PlanError("add_optimizer takes a torch.optim.Optimizer; got None")
    check_optimizer(optimizer, model, "add_optimizer")
    fitting = opener_of(model)
    if not isinstance(fitting, Fitting | CompiledFitting):
        raise PlanError(
            "add_optimizer takes a fitted model, and this one is not; call er.fit first"
        )
    others = [one.model_state.states for other, one in _fittings() if other is not model]
    check_alone(optimizer, others)
    fitting.add_optimizer(optimizer)


def _arguments(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the arguments and keyword arguments of the model for this batch."""
    if batch is None or isinstance(batch, tuple):
        return batch or (), {}
    if isinstance(batch, torch.Tensor):
        return (batch,), {}
    if isinstance(batch, Mapping):
        return (), dict(batch)
    raise PlanError(
        f"worst={type(batch).__name__} is not possible; it is a tensor, a tuple of arguments, or a "
        "dict of keyword arguments, as the model is called with for the longest batch"
    )


def step(run: Callable[[], T]) -> T:
    """Runs one training step, and repeats it with less memory if memory runs out.

        def run():
            optimizer.zero_grad()
            loss = loss_fn(model(x), y)
            loss.backward()
            optimizer.step()
            return loss.detach()

        loss = er.step(run)

    run  a function that runs forward, backward and, optionally, the optimizer that `fit` was given.
         Other effects of it (a counter, an iterator over batches) are repeated with each run

    If memory runs out, elbowroom restores PyTorch's RNG, buffers and gradients, makes a plan for a
    smaller budget, and calls `run` again. The smaller budget stays, and the logger "elbowroom" says
    so once. For this, each step copies the buffers and, if gradients are accumulated, the existing
    gradients.

    Returns the result of `run`. Raises PlanError if no model is fitted, and OutOfMemory if plans
    for less memory do not help, or if the update of the optimizer had begun.
    """
    check_function("run", run)
    found = _fittings()
    if not found:
        raise PlanError("step runs a step of a fitted model, and there is none; call er.fit first")
    return repeat(run, [model for model, _ in found], [fitting for _, fitting in found])


def log_to(*targets: Any) -> Log:
    """Returns a function that logs the figures of a fitted model: peak, budget, setting, noise.

        log = er.log_to(SummaryWriter())              # or wandb, trackio, a function, several
        for n, batch in enumerate(batches):
            train(model, batch)
            figures = log(model, n)                   # a dict, always

    targets  any number of: a SummaryWriter of TensorBoard; the module or a run of wandb or trackio;
             the `accelerator` of Accelerate; a logger of Lightning; a dict, which gets the last
             figures; a list, which gets an entry per step; a function of (figures, step). With no
             targets, the figures are only returned

    The peak is that of the last measured step before the call. If a target raises an exception, a
    warning names it, and it gets no more figures. Raises PlanError for a target that cannot log.
    """
    return Log(*targets)


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
    """
    return ExplainOutOfMemory(profile)


def _fittings() -> list[tuple[nn.Module, Fitting]]:
    """Returns the fittings of all fitted models."""
    return [(model, one) for model, one in attached() if isinstance(one, Fitting)]


def largest_batch(
    model: nn.Module,
    make_batch: Callable[[int], Any],
    *,
    budget: float | str,
    loss: Callable[[nn.Module, Any], torch.Tensor],
    optimizer: Optimizer | None = None,
    exact: bool | None = None,
    min_nbytes: int = 65536,
) -> LargestBatch:
    """Finds the largest batch whose step `fit` can keep inside a budget.

        found = er.largest_batch(
            model,
            lambda n: (torch.randn(n, 3, 224, 224), torch.randint(0, 1000, (n,))),
            budget="6 GiB",
            loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
            optimizer=optimizer,
        )
        print(found)    # batch, predicted and measured peak, seconds a sample

    make_batch  a function that takes a batch size and returns a batch for `loss`
    budget      as in `fit`: bytes, "6 GiB", or a share of the memory of the model's device
    loss        a function of (model, batch) that returns a scalar; its backward runs, but no
                optimizer does
    optimizer   the optimizer, whose states are counted even before it creates them. The temporary
                memory of its update is not counted
    exact       as in `fit`; unless it is True, lossy codes may be used
    min_nbytes  as in `fit`

    The batch is predicted from two small batches, and then confirmed by a measured forward and
    backward. If that exceeds the budget, a new plan is made, up to three times. Model, gradients,
    buffers, RNG and optimizer stay as they are. Raises UnknownField if the budget cannot be parsed,
    BudgetTooSmall if a batch of 1 does not fit, and PlanError if the step changes its parameters,
    or runs other ops at another batch size.
    """
    check_model(model, "largest_batch")
    check_initialized(model, "largest_batch")
    check_min_nbytes(min_nbytes)
    check_exact(exact)
    check_function("make_batch", make_batch)
    check_function("loss", loss)
    check_optimizer(optimizer, model, "largest_batch")
    options = FitOptions(budget_nbytes(budget, _home(model)), exact, None, min_nbytes)
    return find_largest(model, make_batch, loss, options, optimizer)


def summary(model: nn.Module) -> Summary:
    """Returns a summary of what `fit` has done for a model: peaks, time, exactness and actions.

        print(er.summary(model))    # a table; each figure says whether it was measured or estimated

    It can be called at any time, and changes nothing. For a model that is planned inside
    torch.compile, all figures are estimates. Raises PlanError if the model is not fitted.
    """
    check_model(model, "summary")
    fitting, name = opener_of(model), type(original(model)).__name__
    if isinstance(fitting, CompiledFitting):
        return fitting.summary(name)
    if not isinstance(fitting, Fitting):
        raise PlanError("summary takes a fitted model, and this one is not; call er.fit first")
    inside, beside_nbytes = planned_inside(fitting)
    if inside and not fitting.context.step:
        return planned(name, fitting.model_state, fitting.options, beside_nbytes, inside, 0)
    return summary_of(fitting, name)


def grow_batch(
    loader_factory: Callable[[int], Iterable[Any]],
    model: nn.Module,
    optimizer: Optimizer,
    *,
    batch: int,
    budget: float | str,
    loss: Callable[[nn.Module, Any], torch.Tensor],
    rule: str,
    most: int | None = None,
    growth: float = 2.0,
    schedulers: Sequence[Any] = (),
    exact: bool | None = None,
    min_nbytes: int = 65536,
) -> GrowingBatch:
    """Returns an iterable over batches, whose size grows between epochs as the budget allows.

        model = er.fit(model, budget="6 GiB", optimizer=opt)
        growing = er.grow_batch(
            lambda n: DataLoader(data, batch_size=n, shuffle=True),
            model,
            opt,
            batch=32,
            budget="6 GiB",
            loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
            rule="sqrt",
        )
        for epoch in range(epochs):
            for images, labels in growing:
                ...

    loader_factory  a function that takes a batch size and returns an iterable over one epoch
    batch           the batch size of the first epoch
    budget          as in `largest_batch`, which is called before each epoch
    loss            as in `largest_batch`
    exact           as in `largest_batch`
    min_nbytes      as in `largest_batch`
    rule            how the learning rates of all groups change when the batch grows: "none",
                    "linear" (times new / old), or "sqrt" (times its square root). There is no
                    default, because the rule changes the training
    most            the largest batch size; None: the number of samples in an epoch
    growth          the largest factor by which the batch may grow at once
    schedulers      learning rate schedulers whose `base_lrs` change in the same way

    The batch never shrinks. `growing.batch` is the current size, and `growing.grown` says when it
    grew. Raises PlanError for invalid arguments, and UnknownField if the budget cannot be parsed.
    While iterating, it raises the errors of `largest_batch`, except for BudgetTooSmall: then the
    batch stays as it is, and the logger "elbowroom" says so.
    """
    check_model(model, "grow_batch")
    check_min_nbytes(min_nbytes)
    check_exact(exact)
    check_function("loader_factory", loader_factory)
    check_function("loss", loss)
    check_optimizer(optimizer, model, "grow_batch")
    check_growing(batch, rule, most, growth, schedulers)
    options = FitOptions(budget_nbytes(budget, _home(model)), exact, None, min_nbytes)

    def find(make_batch: Callable[[int], Any]) -> int:
        return find_largest(model, make_batch, loss, options, optimizer).batch

    return GrowingBatch(
        loader_factory, optimizer, find, batch, rule, most, float(growth), tuple(schedulers)
    )


def release(model: M) -> M:
    """Undoes `fit` and returns the model; a model that is not fitted stays as it is."""
    check_model(model, "release")
    fitting = detach(model)
    if isinstance(fitting, Fitting | CompiledFitting):
        fitting.close()
        uncover(fitting)
    if isinstance(fitting, Fitting):
        leave_regions(fitting)
    return model
