"""Attention that runs again in backward, from what is held of q, k and v.

node       the autograd node: which calls it fits, forward, and forward again in backward
dropout    what dropout draws, so that it is drawn again
math_path  torch's math path with dropout, written out, so that forward need not run again
levels     how fine a code of q, k and v must be
"""

from elbowroom.runtime.direct.attention.levels import as_node as as_node
from elbowroom.runtime.direct.attention.levels import attention_reading as attention_reading
from elbowroom.runtime.direct.attention.levels import levels_by_values as levels_by_values
from elbowroom.runtime.direct.attention.levels import spread as spread
from elbowroom.runtime.direct.attention.levels import spread_of_values as spread_of_values
from elbowroom.runtime.direct.attention.node import adds_nothing_up as adds_nothing_up
from elbowroom.runtime.direct.attention.node import attention as attention
from elbowroom.runtime.direct.attention.node import fits_attention as fits_attention
from elbowroom.runtime.direct.attention.node import is_unfused as is_unfused
from elbowroom.runtime.direct.attention.node import plain_nbytes as plain_nbytes
