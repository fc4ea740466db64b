"""The second engine: budgets inside torch.compile, where the graph says who reads what.

    collect.py     a joint graph -> facts of each node: storage, bytes, kind of work
    fusion.py      a graph -> the kernels that Inductor will make of it
    liveness.py    these kernels -> bytes alive at each of them
    cost.py        ... -> seconds, to compare two schedules
    joint.py       a choice of saved values -> forward and backward, judged by these
    simulated.py   ... only once, where a region is planned several times
    cut.py         minimum cuts, by a faster way than torch's
    decide.py      the choice: the fastest whose peak stays inside the budget
    codable.py     what may have a code, and which; integers whose range is known
    lossy.py       ... chosen, where saving less does not reach the budget; and what leaves memory
    readers.py     ... and what backward does with each value
    exponents.py   ... of which exponentials are computed
    logits.py      ... and how probabilities are held
    steep.py       ... and other functions with a steep slope
    noise.py       ... and what these add to the gradient
    attention.py   ... and attention's gradients from these alone
    rewrite.py     encode and decode in the joint graph
    ops.py         ... as ops over the forms that codecs declare
    expand.py      ... written out in aten ops, for GPUs
    away.py        memory in a file
    order.py       gradients of weights as soon as they can be made
    twice.py       values of backward that are computed for each of two uses
    sums.py        products that Inductor joins with a sum, before it is asked
    partition.py   what Inductor calls, with that choice in PyTorch's min-cut
    scheduling.py  ... and the order that Inductor then keeps
    tails.py       ... and how its loops end rows
    written.py     ... and what the code that it has written takes
    deferred.py    ... before any of its C++ is compiled
    attempts.py    ... of one plan after another, until one fits
    decision.py    ... in figures, which Inductor's cache stores with the code
    held.py        a policy of er.saving in the graph, whatever the budget
    redrawn.py     what codes add to the gradients of one step, measured
    options.py     settings, and options of torch.compile
    backend.py     torch.compile(..., backend="elbowroom")

Nothing of torch._dynamo or torch._inductor is imported before something is compiled.
"""

from elbowroom.compiled.backend import Regions as Regions
from elbowroom.compiled.backend import compile_region as compile_region
from elbowroom.compiled.backend import elbowroom as elbowroom
from elbowroom.compiled.backend import frame_of as frame_of
from elbowroom.compiled.backend import in_whole as in_whole
from elbowroom.compiled.backend import refusal as refusal
from elbowroom.compiled.decision import Decision as Decision
from elbowroom.compiled.held import GraphPolicy as GraphPolicy
from elbowroom.compiled.held import acts_in_graphs as acts_in_graphs
from elbowroom.compiled.held import counted as counted
from elbowroom.compiled.held import held_by as held_by
from elbowroom.compiled.held import is_in_region as is_in_region
from elbowroom.compiled.held import reporting_to as reporting_to
from elbowroom.compiled.options import Settings as Settings
from elbowroom.compiled.options import device_of_inputs as device_of_inputs
from elbowroom.compiled.options import place_of as place_of
from elbowroom.compiled.redrawn import Redraw as Redraw
from elbowroom.compiled.redrawn import Rehearsal as Rehearsal
from elbowroom.compiled.redrawn import redrawable as redrawable
