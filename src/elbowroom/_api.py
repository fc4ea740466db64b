"""The public verbs: `saving`; `measure`, `plan`, `following`; `fit`, `step`, `release`, and more.

Thin: the only file that knows all stages.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
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
    check_min_nbytes,
    check_model,
    check_noise,
    check_offload,
    check_optimizer,
)
from elbowroom.adaptive import Adaptive
from elbowroom.adaptive.policies import meter_of, policy_of, within_noise
from elbowroom.codecs import Codec, Dither
from elbowroom.compiled import GROUP_SIZE, Held
from elbowroom.errors import PlanError, UnknownField
from elbowroom.fitting import FitOptions, Fitting, Summary, check_alone, repeat
from elbowroom.fitting import summary as summary_of
from elbowroom.fitting.compiled import CompiledFitting, CompileSettings, compile_settings
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
from elbowroom.plan.solve import check_solver
from elbowroom.runtime.attach import attach, attached, detach, opener_of
from elbowroom.runtime.compiler import original
from elbowroom.runtime.context import PROCESS, Context
from elbowroom.runtime.hooks import Saving
from elbowroom.runtime.observer import Observer
from elbowroom.runtime.replay.saving_context import Identical, SavingContext
from elbowroom.runtime.replay.scribe import Scribe
from elbowroom.tools import ExplainOutOfMemory, GrowingBatch, LargestBatch, Log, find_largest
from elbowroom.tools.grow_batch import check_growing

M = TypeVar("M", bound=nn.Module)
T = TypeVar("T")
# Policies that give a step what they gave the one before.
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
    """Hold what autograd saves inside this context in fewer bytes.

        with er.saving("dither", bits=2) as saved:
            loss = loss_fn(model(x), y)
        loss.backward()
        print(saved.ledger)

    policy      None or "exact": exact actions only (no bit of any gradient changes);
                "keep": change nothing, count;
                "lean", with upper, lower, plain, group_size and fold: the fewest bits, for
                convolutions (see `elbowroom.plan.Lean`);
                "coat", with group_size, wide and format: for transformers, products included, in
                8-bit floats ("fp8") or dithered integers ("int8", "int4"; see `plan.Coat`);
                a codec id with its fields as keywords, or a codec: that codec wherever the saving
                op tolerates an error;
                "actnn", with bits and group_size: group codes whose bits follow the sensitivity
                of each tensor, `bits` on average (see `elbowroom.adaptive.ActNN`);
                "offload", with tier, directory and from_nbytes: exact actions first; what is left
                goes to pinned host memory or, from the CPU, to a temporary file
                (see `elbowroom.plan.OffloadRest`);
                a controller from `elbowroom.adaptive`, which adapts as the training goes;
                or any function of a `Site` that returns an action
    min_nbytes  storages below this size, in bytes, are left alone; 0: none are
    rebuild     whether outputs of norms, activations and dropout may be made again from what
                their op saves
    noise       with a codec or "lean": its settings follow the training, so that the variance
                which codes add to the gradient stays below this share of what mini-batches vary by
                anyway (0.1: a tenth; early in training that is read up to twice too large, see
                `measure.gradient_variance`). What was learned is remembered for the process, by
                these arguments; for more than one model make an `adaptive.NoiseBudget` for each, or
                an `adaptive.LeanBudget`
    watch       measure what the codes add, every step; `.error_report()` shows it (also with
                `noise` and controllers, which watch a few steps). A watched step is slower
    seed        where the noise of lossy codes starts; None: one sequence for the whole process, and
                another one after a restart. The number of the step (`seed=step`) gives each step
                noise of its own, and a resumed run the bits of one that went on

    Raises UnknownCodec or UnknownField, which list what exists. Tensors that cannot be touched are
    kept; `.ledger` says which and why. Warns if that is all there were, 1 MiB or more.
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

    def make(scribe: Scribe | None) -> Saving:
        return Saving(
            chosen,
            min_nbytes=min_nbytes,
            context=context,
            observer=observer,
            scribe=scribe,
            shares=True,
        )

    repeats = observer is None and type(chosen) in _REPEATED and _has_hash(chosen)
    setting = ("saving", chosen, min_nbytes) if repeats else None
    graphs = None if observer is not None else _in_graphs(chosen, min_nbytes, seed)
    return SavingContext(make, context, setting, warns=True, graphs=graphs, shares=True)


def _in_graphs(policy: Policy, min_nbytes: int, seed: int | None) -> Held | None:
    """Returns the policy for compiled modules; None: it has no form there, and they run eagerly."""
    if type(policy) is Exact:
        return Held(0, min_nbytes, seed)
    if type(policy) is KeepAll:
        return Held(None)
    codec = policy.codec if type(policy) is Lossy else None
    if type(codec) is Dither and codec.group_size == GROUP_SIZE:
        return Held(codec.levels, min_nbytes, seed)
    return None


def _has_hash(policy: Policy) -> bool:
    """Returns whether a codec can be looked up: the codec of somebody else's may have no hash."""
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
    """Run a training step warm_up + 2 times, and write down what it saves, when, and what it takes.

        def step():
            optimizer.zero_grad()
            loss_fn(model(x), y).backward()
            optimizer.step()

        profile = er.measure(step, model=model, optimizer=optimizer)
        print(er.plan(profile, budget="6 GiB").explain())

    step        forward, backward and whatever else belongs to it; it really trains
    model       and
    optimizer   of this step: `plan.explain()` then says their bytes a parameter, of weights,
                gradients and states. None: nothing is said; the profile is the same otherwise
    device      whose memory; None: CUDA if it is in use in this process, else the CPU
    min_nbytes  storages below this size, in bytes, will be left alone
    warm_up     steps before, in which optimizer states come into being; not for an optimizer that
                has made them

    noise       run 8 steps more, with lossy codes of 16 levels, to learn what the codes of each
                tensor add to the gradient's variance, and what mini-batches vary by anyway; the
                step should take another batch each time

    But for these, exact actions are used meanwhile, so no bit of any gradient changes. Raises
    PlanError for a step that saves nothing, or not the same each time, and for a device that this
    machine does not have.
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
                "measure counts the states of an optimizer for a model; give model=, too"
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
    """Computes the profile that `measure` would write down, from shapes alone.

    It takes no memory and no data; its seconds are estimated.

        with torch.device("meta"):
            model = Model()    # of any size
        profile = er.dry_run(
            model,
            lambda: (torch.randn(64, 3, 224, 224), torch.randint(0, 1000, (64,))),
            loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
            optimizer=torch.optim.AdamW(model.parameters()),
        )
        print(er.plan(profile, budget="6 GiB").explain())

    model       may be anywhere, also on "meta"; only its shapes are read
    make_batch  gives a batch, as `loss` takes it; what it makes takes no memory
    loss        (model, batch) -> a scalar
    optimizer   its states and its update are counted; None: no update
    device      where to pretend that all of it is; None: the model's own, or the CPU for "meta"
    min_nbytes  as in `measure`
    speed       of another machine's device, as `elbowroom.measure.Speed`; None: that of this one
                and of its codecs is measured, once a process

    The profile has `measured=False`. Its peak is that of plain autograd, without the workspaces
    that ops take inside themselves. Model, optimizer, gradients and PyTorch's RNG stay as they are.
    Raises PlanError for a step that looks at the values of tensors, for a model that cannot be
    copied, and for a device that this machine does not have.
    """
    check_model(model, "dry_run")
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
    """Returns the device on which a dry run of this model pretends to be."""
    if device is None:
        own = _home(model)
        device = torch.device("cpu") if own.type == "meta" else own
    return check_device(device)


def load_snapshot(path: str | Path, device: int | None = None) -> Snapshot:
    """Read a memory snapshot of PyTorch's, from `torch.cuda.memory._dump_snapshot(path)`.

        snapshot = er.load_snapshot("snapshot.pickle")
        print(snapshot)                               # the peak, and what it consists of
        er.plan(snapshot, budget="20 GiB")            # an estimate: could any plan fit?

    device  the index of a GPU; None: the one that held most

    No code of the file runs: whatever is no number, string, list or dict is refused. "elbowroom
    snapshot" draws a page of it. Raises DataError for what is no snapshot, or only a part of one.
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
    """Plans what to do with each tensor of a profiled step so that its peak stays within a budget.

    profile    what `measure` or `dry_run` gave; a snapshot (`load_snapshot`) has a plan only if all
               of it fits, else BudgetTooSmall says that none can, or PlanError how to find one
    budget     bytes (an int, or 6e9), "6 GiB", or a share of this machine's memory, as 0.8 or
               "80%" (of its GPU's, if the step ran on one; see `fit`): the peak, everything that
               is held counted
    exact      True: exact actions only; None: lossy codes only if the budget needs them; False:
               whatever is cheapest, seconds and noise together
    recompute  modules may run their forward a second time, in backward
    offload    "file", or, from a GPU, "host": tensors may be moved there; None: they stay
    noise      the most that codes may add to the variance of the gradient, as a share of what
               mini-batches vary by anyway (0.1: a tenth); None: as much as the budget asks for.
               It is known if the profile was measured with noise=True, and guessed by size else
    solver     "auto"; "milp", "rounding", "greedy"; and the baselines "uniform", "delta", "dtr",
               "capuchin"
    codecs     names of codecs, at all settings that they name, or codecs as they are: only these
               are taken, so that a system runs as its paper has it (["division"]); None: all that
               are registered. Where a formula needs a finer code than any of them, it is a dither

    `.explain()` is a table of it, `er.following(plan)` obeys it, `.save(path)` and
    `er.Plan.load(path)` keep it, its budget in bytes. Raises ValueError for a budget that cannot be
    read, PlanError for a share of a GPU that is not here, or codecs of which none can be used, and
    BudgetTooSmall with the least that would do.
    """
    if isinstance(profile, Snapshot):
        return profile.plan(budget_nbytes(budget, "cuda"))
    if not isinstance(profile, Profile):
        raise PlanError(f"plan takes what er.measure(step) gave; got {type(profile).__name__}")
    check_exact(exact)
    check_offload(offload)
    check_flag("recompute", recompute)
    check_noise(noise)
    return make_plan(
        profile,
        budget_nbytes(budget, profile.device[0]),
        exact=exact,
        recompute=recompute,
        offload=offload,
        noise=noise,
        solver=solver,
        codecs=chosen_settings(codecs, exact=exact),
    )


def following(plan: Plan, *, min_nbytes: int = 65536, seed: int | None = None) -> SavingContext:
    """A context that does what a plan says with everything that autograd saves inside.

        with er.following(plan):
            loss = loss_fn(model(x), y)
        loss.backward()

    A plan that changes nothing opens no hooks, and its ledger stays empty. What the plan does
    not know (another shape, another branch) is held exactly, and counted in `plan.strangers`.
    min_nbytes and seed as in `saving`.
    """
    check_min_nbytes(min_nbytes)
    if not isinstance(plan, Plan):
        raise PlanError(f"following takes what er.plan(...) gave; got {type(plan).__name__}")
    context = PROCESS if seed is None else Context(seed, learns=False)

    def make(scribe: Scribe | None) -> Saving:
        return Saving(
            plan,
            min_nbytes=min_nbytes,
            context=context,
            recompute=plan.recompute,
            idle=plan.changes_nothing,
            scribe=scribe,
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
    """Train `model` inside a budget of bytes.

        model = er.fit(model, budget="6 GiB", optimizer=opt)

    The budget covers weights, gradients, optimizer states, saved tensors and workspaces; on CUDA
    all that is allocated, on a CPU no tensor made before the step, such as the batch. The same
    model comes back, unchanged: from now on each of its forwards that records gradients runs
    inside a `saving` context. It starts at the safest setting, writes a step down, and from then on
    follows a plan, whose peak is measured and, if need be, corrected (`elbowroom.fitting.session`).
    Forwards of another kind (shapes, flags, modes) get plans of their own, as they come. A loss
    that is computed outside of `model` is covered if it is given (`loss`). A first forward that
    would need more than the budget is run up to three times, with RNG and buffers put back.

    budget      bytes, as an int or 6e9; "6 GiB", where "6 GB" is 6 * 10**9; or a share of the
                memory of the model's device: 0.8, "0.8" or "80%". That is all of a GPU's memory;
                on a CPU what the process may have, the least of RAM, cgroup limits and rlimits
                (of data, of address space). "100%" is all of it; 1.0 is refused
    optimizer   its states are counted, from before it makes them; those of an `er.optim` optimizer
                with state="auto" are held in fewer bytes where that is the cheapest way to fit
                (`elbowroom.fitting.state_formats`). None: it is found as it steps for the first
                time, and the next step is learned anew
    exact       True: exact actions only, no bit of any gradient changes; None: exact first, lossy
                codecs only if the budget needs them, said in one line by the logger "elbowroom";
                False: whatever is cheapest, where noise is priced as the steps that it costs
    offload     "file", or, from a GPU, "host": plans may move tensors there; None: they stay
    noise       the most that codes may add to the variance of the gradient, as a share of what
                mini-batches vary by anyway (0.1: a tenth). Measured in eight steps once a lossy
                plan stands, if there is room to look; a budget that asks for more is refused then.
                Inside torch.compile it is estimated from sizes, and no plan adds more. None: what
                is added is said by the logger, at WARNING above a tenth
    worst       what the model is called with for the longest batch: a tensor, a tuple of arguments
                or a dict of keyword arguments. Its forward runs once, holding nothing, and is
                planned before the training begins; RNG, buffers and modes are put back
    plan        what the first step follows, in place of learning: `er.plan(...)`,
                `er.Plan.load(path)`, or `er.largest_batch(...).plan`. Its step is measured; if it
                does not fit, or saves what the plan does not know, another is made
    loss        module that the program calls on the model's output, such as nn.CrossEntropyLoss(),
                or several: what it saves is part of the plan. It has no parameters that are trained
                (a model may hold such a loss); on a CPU, those that it has are not counted
    compile     True: forwards run through torch.compile, which saves what the budget has room for
                (`elbowroom.fitting.compiled`). A model that torch.compile has compiled with
                Inductor is treated so without it, unless worst, plan, offload, codecs or solver
                are given: these belong to the eager engine
    codecs      what lossy codes there are, and
    solver      who chooses, as in `er.plan`: codecs=["division"], solver="delta" with exact=False
                is DIVISION's code under DELTA's rule

    Raises ValueError for a budget that cannot be read, and PlanError for a plan that does not keep
    to these terms, or a share of a device whose memory is not known ("meta"); forward (and fit, for
    `worst`) raises er.errors.BudgetTooSmall with the least budget that would do.
    `er.release(model)` undoes it; a copied or pickled model is a plain one.
    """
    check_model(model, "fit")
    check_min_nbytes(min_nbytes)
    check_exact(exact)
    check_optimizer(optimizer, model)
    check_offload(offload)
    if offload == "host" and all(p.device.type == "cpu" for p in model.parameters()):
        raise PlanError(
            "offload='host' moves tensors from a GPU to host memory; this model is in host memory "
            "already. Use offload='file', or move the model to its GPU before fit."
        )
    check_noise(noise)
    check_solver(solver)
    options = FitOptions(
        budget_nbytes(budget, _home(model)),
        exact,
        offload,
        min_nbytes,
        noise,
        chosen_settings(codecs, exact=exact),
        solver,
    )
    args, kwargs = _arguments(worst)
    check_plan(plan, options.budget_nbytes, exact, noise, offload, options.codecs)
    check_alone(optimizer, [one.owned.states for other, one in _fittings() if other is not model])
    if plan is not None and worst is not None:
        raise PlanError("plan= and worst= both say what to begin with; give one of them")
    check_flag("compile", compile)
    losses = losses_of(loss, model)
    release(model)
    how = compile_settings(model) or (CompileSettings() if compile else None)
    is_plain = all(one is None for one in (worst, plan, offload, codecs))
    if how is not None and is_plain and solver == "auto":
        if losses:
            raise PlanError(
                "loss= belongs to the eager engine; compile one module that calls the model and "
                "the loss, and leave loss= out"
            )
        attach(model, CompiledFitting(model, options, optimizer, how))
        return model
    if compile:
        raise PlanError(
            "compile=True plans inside torch.compile; leave worst, plan, offload, codecs and "
            "solver out"
        )
    given = None if plan is None else replace(plan, strangers=Counter())  # it counts for this fit
    fitting = Fitting(model, options, optimizer, given)
    if worst is not None:
        fitting.prepare(model, args, kwargs)
    for one in losses:
        cover(one, fitting)
    attach(model, fitting)
    return model


def add_optimizer(model: nn.Module, optimizer: Optimizer) -> None:
    """Count the states of an optimizer that was made after `fit`, as trainers do.

        model = er.fit(model, budget="6 GiB")
        trainer = Trainer(model, ...)            # makes its optimizer
        er.add_optimizer(model, trainer.optimizer)

    From the next step on its states belong to the budget. An optimizer that `fit` was not told of
    counts from its first step on, when its states are there already. One that is counted already
    counts once; a model may have several. Raises PlanError for a model that is not fitted, and for
    what is no optimizer.
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
    others = [one.owned.states for other, one in _fittings() if other is not model]
    check_alone(optimizer, others)
    fitting.add_optimizer(optimizer)


def _arguments(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the arguments and keyword arguments that a model is called with for this batch."""
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
    """Run one training step of fitted models; if memory runs out, undo it, plan with less, repeat.

        def run():
            optimizer.zero_grad()
            loss = loss_fn(model(x), y)
            loss.backward()
            optimizer.step()
            return loss.detach()

        loss = er.step(run)

    run: forward, backward and, if you like, the optimizer that was given to `fit`; what else it
    changes (a counter, an iterator over batches) happens once more each time it is run. Before it
    is run again, PyTorch's RNG, the model's buffers and gradients are what they were. The smaller
    budget stays; the logger "elbowroom" says so once.

    Copied for every step: buffers and, where gradients are accumulated, those that stand already.
    Returns what `run` returns. Raises PlanError where no model is fitted, and OutOfMemory if plans
    for less memory do not help, or if the optimizer's update had begun.
    """
    found = _fittings()
    if not found:
        raise PlanError("step runs a step of a fitted model, and there is none; call er.fit first")
    return repeat(run, [model for model, _ in found], [fitting for _, fitting in found])


def log_to(*targets: Any) -> Log:
    """Returns a function that logs what a fitted model takes: peak, budget, setting, noise.

        log = er.log_to(SummaryWriter())              # or wandb, trackio, a function, several
        for n, batch in enumerate(batches):
            train(model, batch)
            figures = log(model, n)                   # a dict, always

    targets  a SummaryWriter of TensorBoard; the module or a run of wandb or trackio; Accelerate's
             `accelerator`; a logger of Lightning; a dict, which gets the last figures; a list,
             which gets an entry a step; or a function of (figures, step). None: the dict alone

    The figures are those that are known when `log` is called: the peak is that of the last step
    that was measured. A target that raises is named in a warning and gets nothing more.
    Raises PlanError for a target that cannot log.
    """
    return Log(*targets)


def explain_oom(profile: Profile | str | Path | None = None) -> ExplainOutOfMemory:
    """Say on stderr what holds the memory if it runs out inside this context.

        with er.explain_oom():
            train()

    It names the line and the module that asked for more; the weights, gradients, optimizer states
    and saved tensors, by module; and the tensors that variables hold, by name and line. The error
    that the program raised goes on, unchanged. Nothing is watched before, so it costs nothing.

    profile  of the step, from `er.measure` or a file of `elbowroom profile`: then it also says
             which plan would fit. The profile of a fitted model is known
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
    """The largest batch whose step `fit` could keep inside a budget.

        found = er.largest_batch(
            model,
            lambda n: (torch.randn(n, 3, 224, 224), torch.randint(0, 1000, (n,))),
            budget="6 GiB",
            loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
            optimizer=optimizer,
        )
        print(found)    # batch, predicted and measured peak, seconds a sample

    make_batch  batch size -> a batch, as `loss` takes it
    budget      as in `fit`: bytes, "6 GiB", or a share, as 0.8, of the memory of the model's device
    loss        (model, batch) -> a scalar; its backward runs, no optimizer does
    optimizer   its states are counted, from before it makes them; its update's workspace is not
    exact       as in `fit`; but for True, lossy codes count as room

    Predicted by a line through two small batches, then confirmed by a measured run of forward and
    backward; planned again, up to three times, for what that was over. Model, gradients, buffers,
    RNG and optimizer stay as they are, and so does the batch that you train with. Raises
    ValueError for a budget that cannot be read, BudgetTooSmall where a batch of 1 does not fit, and
    PlanError for a step that changes its parameters, or is another one at another batch size.
    """
    check_model(model, "largest_batch")
    check_min_nbytes(min_nbytes)
    check_exact(exact)
    check_function("make_batch", make_batch)
    check_function("loss", loss)
    check_optimizer(optimizer, model, "largest_batch")
    options = FitOptions(budget_nbytes(budget, _home(model)), exact, None, min_nbytes)
    return find_largest(model, make_batch, loss, options, optimizer)


def summary(model: nn.Module) -> Summary:
    """Returns what `fit` has done for a model so far: peaks, time, exactness and actions.

        print(er.summary(model))    # a table; each figure says whether it was measured or estimated

    It changes nothing and may be asked for at any time. Of a model that is planned inside
    torch.compile all figures are estimates. Raises PlanError for a model that is not fitted.
    """
    check_model(model, "summary")
    fitting, name = opener_of(model), type(original(model)).__name__
    if isinstance(fitting, CompiledFitting):
        return fitting.summary(name)
    if not isinstance(fitting, Fitting):
        raise PlanError("summary takes a fitted model, and this one is not; call er.fit first")
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
    """Batches of one epoch after the other; between epochs they grow into the budget.

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

    loader_factory  batch size -> an iterable over the batches of an epoch
    batch           samples a batch in the first epoch
    budget, loss, exact, min_nbytes  as in `largest_batch`, which says what fits before each epoch
    rule            what the learning rates of all groups do when the batch grows: "none", "linear"
                    (times new / old), "sqrt" (times its root). There is no default: it changes the
                    training
    most            no larger batch is taken; None: an epoch's samples
    growth          a batch becomes at most so many times as large at once
    schedulers      whose `base_lrs` follow, too

    The batch never shrinks. `growing.batch` is its size now, `growing.grown` says when it grew.
    Raises PlanError for arguments that are not possible, ValueError for a budget that cannot be
    read; while iterating what `largest_batch` raises, but for BudgetTooSmall, which leaves the
    batch as it is and is said by the logger "elbowroom".
    """
    check_model(model, "grow_batch")
    check_min_nbytes(min_nbytes)
    check_exact(exact)
    check_function("loader_factory", loader_factory)
    check_function("loss", loss)
    check_optimizer(optimizer, model, "grow_batch")
    check_growing(batch, rule, most, growth)
    options = FitOptions(budget_nbytes(budget, _home(model)), exact, None, min_nbytes)

    def find(make_batch: Callable[[int], Any]) -> int:
        return find_largest(model, make_batch, loss, options, optimizer).batch

    return GrowingBatch(
        loader_factory, optimizer, find, batch, rule, most, float(growth), tuple(schedulers)
    )


def release(model: M) -> M:
    """Undo `fit`: the model's forwards run plainly again. One that was not fitted stays as is."""
    check_model(model, "release")
    fitting = detach(model)
    if isinstance(fitting, Fitting | CompiledFitting):
        fitting.close()
    if isinstance(fitting, Fitting):
        uncover(fitting)
    return model
