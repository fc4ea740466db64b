"""Tools around a training: they run or watch a user's program, and report.

    find_largest  finds the largest batch that fits a budget
    GrowingBatch  lets the batch grow between epochs, within a budget
    Profiling     profiles one step of a program
    measure_gradient_error  measures how far a coded gradient is from the plain one
    assert_peak   checks the peak of a step, in a test
    ExplainOutOfMemory, say_exhaustion   explain what takes the memory after it has run out
    Log           sends the figures of a fitted model to TensorBoard, trackio, wandb and others
    Discovery     finds the models and the optimizers of a user's program

They use `fitting`, which does not use them.
"""

from elbowroom.tools.discovery import Discovery as Discovery
from elbowroom.tools.discovery import Unseen as Unseen
from elbowroom.tools.explain import ExplainOutOfMemory as ExplainOutOfMemory
from elbowroom.tools.explain import assert_peak as assert_peak
from elbowroom.tools.explain import say_exhaustion as say_exhaustion
from elbowroom.tools.explain import set_aside as set_aside
from elbowroom.tools.gradient_error import GradientError as GradientError
from elbowroom.tools.gradient_error import measure_gradient_error as measure_gradient_error
from elbowroom.tools.grow_batch import GrowingBatch as GrowingBatch
from elbowroom.tools.largest_batch import LargestBatch as LargestBatch
from elbowroom.tools.largest_batch import find_largest as find_largest
from elbowroom.tools.logging_targets import Log as Log
from elbowroom.tools.profiling import Profiling as Profiling
