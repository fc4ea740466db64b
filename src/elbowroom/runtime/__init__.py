"""DEED: what happens between autograd's pack and unpack.

A step that is looked at, in the order in which a tensor meets it:

hooks       the two hooks themselves, on the main path
consumers   which op is saving, and what its backward needs: by its name, or
readers     by the nodes that it has made, and formulas, the table of derivative formulas
identity    one record (`Slot`) for one storage at one version, however many ops save it
sites       what the op asks of the slot, and facts of the save, which a policy decides by
serving     the policy is asked, and what it says is performed, now or later; `perform`: an action
            becomes a handle, the only `match` on actions
deferred    inputs of norms, which wait for the next op to be seen
handles/    encode, rebuild (recipes), cast, offload; keep: in slot
producers/  how an op's output could be made again, in the terms of recipes
direct/     ops whose backward needs no restored tensor
slot        what is held, and the view of it that autograd gets; kept: what needs no slot

A settled step:

replay/     the script of a forward, and what follows it

Beside them:

observer    who is told of each op: the scribe, a recorder, or nobody
masks       ops whose backward reads a bit of an element, and which
storage     a storage seen from outside: whether it lives and was changed
arena       memory that restored tensors take turns in
ledger      our own count of bytes
context     seed, steps, what was learned; device_seeds: seeds that a GPU draws for itself
calls       calls of modules, seen whole; attach: those of a fitted model
recompute   modules that run again in backward; repeats, rewind, undo, reach: whether they can
checkpoints inputs of the user's checkpoints
tiers/      where offloaded tensors lie
"""

# Slots and recipes import files of this package, which imports both; so it comes first, always.
from elbowroom.runtime import handles as handles
