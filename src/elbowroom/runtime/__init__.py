"""DEED: what happens between autograd's pack and unpack.

hooks       the two hooks themselves, on the main path
consumers   which op is saving, and what its backward needs
request     what that op asks of the tensor's slot, and whether what is held suffices
serving     the policy is asked, and what it says is performed, now or later
listener    who is told of each op: the scribe, or nobody
masks       ops whose backward reads a bit of an element, and which
identity    one record (`Slot`) for one storage at one version, however many ops save it
producers   how an op's output could be made again, in the terms of recipes
replay/     settled forwards, that follow what was written down
perform     action -> handle, the only `match` on actions
handles/    keep, encode, rebuild, drop
arena       memory that restored tensors take turns in
ledger      our own count of bytes
context     seed, steps, what was learned
attach      a model's forward
"""

# Slots and recipes import files of this package, which imports both; so it comes first, always.
from elbowroom.runtime import handles as handles
