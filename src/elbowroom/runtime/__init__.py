"""DEED: what happens between autograd's pack and unpack.

hooks       the two hooks themselves, on the main path
consumers   which op is saving, what its backward needs, and how its output could be made again
identity    one record (`Slot`) for one storage at one version, however many ops save it
perform     action -> handle, the only `match` on actions
handles/    keep, encode, rebuild, drop
arena       memory that restored tensors take turns in
ledger      our own count of bytes
context     seed, steps, what was learned
attach      a model's forward
"""
