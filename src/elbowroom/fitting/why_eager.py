"""Errors that make a compiled model run in the eager engine, and what is logged about them."""

from elbowroom.errors import BudgetTooSmall


class NothingCompiled(Exception):
    """Raised if Dynamo has run a model as it was written."""


def failures() -> tuple[type[Exception], ...]:
    """Returns the exceptions that Dynamo or our backend raise where a call cannot be compiled."""
    from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

    return BudgetTooSmall, FailOnRecompileLimitHit, TorchDynamoException, NothingCompiled


def why_eager(name: str, error: Exception) -> str:
    """Returns what is said of a model of this class that runs eagerly because of an error."""
    from torch._dynamo.exc import FailOnRecompileLimitHit

    if isinstance(error, FailOnRecompileLimitHit):
        return (
            f"{name} runs eagerly: torch.compile has compiled one of its functions as often as "
            "torch._dynamo.config.recompile_limit says. It does so for each value of a number "
            "that is an attribute of a module or an argument, and for sizes that no plan serves "
            "yet: keep numbers that change in tensors, pad inputs or begin with the largest, or "
            "raise that limit. The budget is kept by the eager engine."
        )
    if isinstance(error, NothingCompiled):
        return (
            f"{name} runs eagerly: torch.compile finds nothing to compile in it. A graph break "
            "inside a loop, or a layer such as nn.LSTM, leaves a whole function uncompiled. "
            "The budget is kept by the eager engine."
        )
    if isinstance(error, BudgetTooSmall):
        return (
            f"{name} runs eagerly: inside torch.compile the budget cannot be kept ({error}) "
            "The eager engine has coarser codes. exact=True raises instead."
        )
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return (
        f"{name} runs eagerly: torch.compile has failed ({type(error).__name__}: "
        f"{lines[-1] if len(lines) == 1 else ' '.join(lines[:2])}). The budget is kept by the "
        "eager engine."
    )
