"""Tools around a training: they run or watch somebody's program, and report.

    find_largest  the largest batch that a budget has room for
    Profiling     writes down one step of a program
    Discovery     finds the model and the optimizers of somebody else's program

They stand above `fitting`, which knows none of them.
"""

from elbowroom.tools.discovery import Discovery as Discovery
from elbowroom.tools.largest_batch import LargestBatch as LargestBatch
from elbowroom.tools.largest_batch import find_largest as find_largest
from elbowroom.tools.profiling import Profiling as Profiling
