"""The eager engine: what happens between autograd's pack and unpack.

For a step that is examined in full, in the order in which a tensor passes through:

saving      the context of a forward: opens the hooks, and ends it
hooks       the two hooks themselves
consumers   which op is saving, and what its backward needs: by its name, or
readers     by the nodes that it has created, and formulas, the table of derivative formulas
storage     which tensors may be changed, and one record (`Slot`) for one storage at one version,
            however many ops save it; sources: what an op could be recomputed from
sites       what the op needs of the slot, and the facts by which a policy decides
serving     asks the policy, and performs its action, now or later; `perform`: an action becomes a
            handle, the only `match` on actions
deferred    inputs of norms, which wait until the next op is known
handles/    encode, rebuild (recipes), cast, offload; keep is in slot
producers/  recipes by which the output of an op can be rebuilt
direct/     ops whose backward needs no restored tensor
slot        what is stored, and the view of it that autograd gets; kept: tensors without a slot

For a settled step:

replay/     the script of a forward, and its replay

For both:

observer    the observers of each op: the tracer, a recorder, or none
masks       ops whose backward reads one bit per element, and which bit
storage     a storage seen from outside: whether it is alive and unchanged
arena       memory that restored tensors use in turns
ledger      elbowroom's own count of bytes
context     seed, steps, what was learned; device_seeds: seeds that a GPU draws itself
calls       calls of modules as a whole; attach: calls of a fitted model
recompute   modules that run again in backward; repeats, rewind, undo, reach: whether they can
checkpoints inputs of the user's checkpoints
tiers/      where offloaded tensors are stored
"""

# Slots and recipes import files of this package, which imports both; so it comes first, always.
from elbowroom.runtime import handles as handles
