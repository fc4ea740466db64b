"""The public functions of training: `fit`, `step`, `summary`, `release`; `largest_batch`, ...

Each function only checks its arguments and calls the packages below.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar
from weakref import WeakSet

import torch
from torch import nn
from torch.optim import Optimizer

from elbowroom._checks import (
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
from elbowroom.codecs import Codec
from elbowroom.compiled import acts_in_graphs, place_of
from elbowroom.errors import PlanError
from elbowroom.fitting import FitOptions, Fitting, Summary, check_alone, repeat
from elbowroom.fitting import summary as summary_of
from elbowroom.fitting.compiled import CompiledFitting
from elbowroom.fitting.compiled_later import take_over
from elbowroom.fitting.inside import leave_regions, plan_inside, planned_inside
from elbowroom.fitting.loss import cover, losses_of, uncover
from elbowroom.fitting.summary import summary_of_regions
from elbowroom.fitting.twin import CompileSettings, compile_settings
from elbowroom.measure.memory import budget_nbytes, device_of
from elbowroom.plan.plan import Plan, check_plan
from elbowroom.plan.registered import chosen_settings
from elbowroom.plan.solve import WITHOUT_CODES, check_solver
from elbowroom.runtime.attach import attach, attached, detach, opener_of
from elbowroom.runtime.compiler import original
from elbowroom.tools import GrowingBatch, LargestBatch, Log, find_largest
from elbowroom.tools.grow_batch import check_growing, warn_unfitted

M = TypeVar("M", bound=nn.Module)
T = TypeVar("T")

_released: WeakSet[nn.Module] = WeakSet()  # models whose fit was undone, for a message


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
        budget_nbytes(budget, device_of(model)),
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
    is_plain &= offload is None or offload == place_of(device_of(model))
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
    given = None if plan is None else replace(plan, unknown_sites=Counter())  # counted for this fit
    fitting = Fitting(model, options, optimizer, given)
    if worst is not None:
        fitting.prepare(model, args, kwargs)
    if is_plain:
        fitting.compiled = take_over
        plan_inside(fitting)
    fitting.context.plans_loss = bool(losses)
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
        raise _not_fitted("add_optimizer", model)
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


def summary(model: nn.Module) -> Summary:
    """Returns a summary of what `fit` has done for a model: peaks, time, exactness and actions.

        print(er.summary(model))    # a table; each figure says whether it was measured or estimated

    It can be called at any time, and changes nothing. The plan that it shows is that of the largest
    inputs, not of a last batch with few samples. For a model that is planned inside torch.compile,
    all figures are estimates. Raises PlanError if the model is not fitted.
    """
    check_model(model, "summary")
    fitting, name = opener_of(model), type(original(model)).__name__
    if isinstance(fitting, CompiledFitting):
        return fitting.summary(name)
    if not isinstance(fitting, Fitting):
        raise _not_fitted("summary", model)
    inside, resident_nbytes = planned_inside(fitting)
    if inside and not fitting.context.step:
        given = fitting.model_state, fitting.options, resident_nbytes, inside
        return summary_of_regions(name, *given, 0)
    return summary_of(fitting, name)


def _not_fitted(function: str, model: nn.Module) -> PlanError:
    what = "was released" if model in _released else "is not"
    remedy = "call er.fit first"
    if function == "summary" and model in _released:
        remedy = "call it before that, or read the callback that fitted it: print(callback.summary)"
    return PlanError(f"{function} takes a fitted model, and this one {what}; {remedy}")


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
    options = FitOptions(budget_nbytes(budget, device_of(model)), exact, None, min_nbytes)
    return find_largest(model, make_batch, loss, options, optimizer)


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
    most            the largest batch size; None: the number of samples in an epoch, or of those
                    taken, where the loader has no length and epochs end early
    growth          the largest factor by which the batch may grow from an epoch to the next
    schedulers      learning rate schedulers whose `base_lrs` change in the same way

    The batch never shrinks. `growing.batch` is the current size, and `growing.grown` says when it
    grew. Raises PlanError for invalid arguments, and UnknownField if the budget cannot be parsed.
    While iterating, it raises the errors of `largest_batch`, except for BudgetTooSmall: then the
    batch stays as it is, and the logger "elbowroom" says so. It also says where a batch fits by a
    plan that no step follows, because the model is not fitted.
    """
    check_model(model, "grow_batch")
    check_min_nbytes(min_nbytes)
    check_exact(exact)
    check_function("loader_factory", loader_factory)
    check_function("loss", loss)
    check_optimizer(optimizer, model, "grow_batch")
    check_growing(optimizer, batch, rule, most, growth, schedulers)
    options = FitOptions(budget_nbytes(budget, device_of(model)), exact, None, min_nbytes)

    def find(make_batch: Callable[[int], Any]) -> int:
        found = find_largest(model, make_batch, loss, options, optimizer)
        if opener_of(model) is None and not found.plan.changes_nothing:
            warn_unfitted(found.batch, options.budget_nbytes)
        return found.batch

    return GrowingBatch(
        loader_factory, optimizer, find, batch, rule, most, float(growth), tuple(schedulers)
    )


def release(model: M) -> M:
    """Undoes `fit` and returns the model; a model that is not fitted stays as it is."""
    check_model(model, "release")
    fitting = detach(model)
    if isinstance(fitting, Fitting | CompiledFitting):
        _released.add(model)
        fitting.close()
        uncover(fitting)
    if isinstance(fitting, Fitting):
        leave_regions(fitting)
    return model
