"""Tools around a training: they run or watch somebody's program, and report.

    find_largest  the largest batch that a budget has room for
    GrowingBatch  batches of epochs that grow into that room
    Profiling     writes down one step of a program
    assert_peak   checks the peak of a step, in a test
    ExplainOutOfMemory, say_exhaustion   what holds the memory, once it has run out
    Log           gives figures of a fitted model to TensorBoard, trackio, wandb and others
    Discovery     finds the models and the optimizers of somebody else's program

They stand above `fitting`, which knows none of them.
"""

from elbowroom.tools.discovery import Discovery as Discovery
from elbowroom.tools.discovery import Unseen as Unseen
from elbowroom.tools.explain import ExplainOutOfMemory as ExplainOutOfMemory
from elbowroom.tools.explain import assert_peak as assert_peak
from elbowroom.tools.explain import say_exhaustion as say_exhaustion
from elbowroom.tools.grow_batch import GrowingBatch as GrowingBatch
from elbowroom.tools.largest_batch import LargestBatch as LargestBatch
from elbowroom.tools.largest_batch import find_largest as find_largest
from elbowroom.tools.logging_targets import Log as Log
from elbowroom.tools.profiling import Profiling as Profiling
