"""A model that was fitted first, and is called compiled later, as a trainer does it."""

from torch import nn

from elbowroom.fitting.compiled import CompiledFitting
from elbowroom.fitting.inside import leave_regions
from elbowroom.fitting.loss import succeed
from elbowroom.fitting.session import Fitting
from elbowroom.fitting.twin import compile_settings
from elbowroom.runtime.attach import attach, opener_of
from elbowroom.runtime.compiler import original


def take_over(fitting: Fitting, called: nn.Module) -> CompiledFitting | None:
    """Plans a model inside torch.compile from now on, because its calls are compiled.

    Returns None if another backend than Inductor compiles them.

    fitting: the eager engine of the model; called: the model, or torch.compile's wrapper
    """
    how = compile_settings(called)
    if how is None:
        return None
    model = original(called)
    successor = CompiledFitting(model, fitting.asked, None, how)
    for optimizer in fitting.model_state.optimizers():
        successor.add_optimizer(optimizer)
    leave_regions(fitting)
    succeed(fitting, successor)
    fitting.close()
    attach(model if opener_of(model) is fitting else called, successor)
    return successor
