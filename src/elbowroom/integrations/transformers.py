"""A budget for the Trainer of transformers, and of what is built on it (TRL).

    from elbowroom.integrations.transformers import Budget
    trainer = Trainer(model, args, train_dataset=data, callbacks=[Budget("6 GiB")])
    trainer.train()

A Trainer calls its loggers in the order in which they were added, and its own come first: what a
callback adds to a log, they do not see. `Budget.of(trainer, "6 GiB")` puts it before them.
"""

from typing import Any, Self

from torch import nn
from torch.optim import Optimizer
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from elbowroom.fitting import Summary
from elbowroom.integrations.budgeted import Budgeted


class Budget(TrainerCallback):  # type: ignore[misc]  # of a library whose types are skipped
    """Callback that keeps the training of a Trainer's model inside a memory budget.

        trainer = Trainer(model, args, train_dataset=data, callbacks=[Budget("6 GiB", exact=True)])

    The model is fitted after the Trainer has wrapped it and created its optimizer, whose states are
    counted. With `torch_compile=True`, and no other mode or backend, it is planned inside
    torch.compile, and all figures are estimates. Evaluation does not change. Every log of the
    Trainer gets the measured peak as `memory/peak_mib`, and other figures (`logs=False`: none). At
    the end, the model is released, and the logger "elbowroom" says in one line whether the budget
    was kept.
    """

    def __init__(self, budget: float | str, *, logs: bool = True, **settings: Any) -> None:
        """budget, settings: those of `er.fit`: exact, noise, offload, min_nbytes, plan.

        logs: whether the Trainer's logs get the figures
        """
        self._budgeted, self._logs = Budgeted(budget, settings), logs

    @classmethod
    def of(cls, trainer: Trainer, budget: float | str, **settings: Any) -> Self:
        """Adds a budget to a Trainer, before its loggers, so that they get its figures."""
        callback = cls(budget, **settings)
        trainer.callback_handler.callbacks.insert(0, callback)
        return callback

    @property
    def summary(self) -> Summary | None:
        """Summary of the budget so far; None before the training has begun."""
        return self._budgeted.summary

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        **kwargs: Any,
    ) -> None:
        """Fit the model."""
        # With a mode or a backend of its own, plain training would have other bits than our plan.
        mode, backend = args.torch_compile_mode, args.torch_compile_backend
        compiled = args.torch_compile and mode in (None, "default") and backend == "inductor"
        self._budgeted.begin(model, [] if optimizer is None else [optimizer], compiled=compiled)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Adds the figures to the log and to its history."""
        if not self._logs:
            return
        figures = self._budgeted.figures()
        if logs is not None:
            logs.update(figures)
        if state.log_history:
            state.log_history[-1].update(figures)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Release the model."""
        self._budgeted.end()
