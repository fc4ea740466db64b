"""Modules whose backward needs less, with the weights and state_dict keys of torch's own.

    linear_cross_entropy   the head and its loss, without the logits
    norms                  LayerNorm, RMSNorm that save their output, as the next layer does
    activations            GELU and SiLU that save two bits an element
    dropout                dropout that saves a seed
    fp8                    layers that compute in 8-bit floats and save what they read in them
    convert, swap          put these in place of torch's in a model, and torch's back

FP8 is six files: _scaled (codes and products), _flow (nodes that save codes), _attention (one more
of them), _probe (what a module computes), _behaviors and _derived (what is put in front of it).

What they save is opaque to `er.saving` (codes are never encoded twice), except a norm's output,
which is one storage with what the next layer saves, and so is kept exactly. None can be
differentiated twice: that is refused.
"""

from elbowroom.nn.activations import GELU as GELU
from elbowroom.nn.activations import SiLU as SiLU
from elbowroom.nn.convert import convert as convert
from elbowroom.nn.convert import revert as revert
from elbowroom.nn.dropout import Dropout as Dropout
from elbowroom.nn.fp8 import Fp8Linear as Fp8Linear
from elbowroom.nn.fp8 import fp8 as fp8
from elbowroom.nn.linear_cross_entropy import LinearCrossEntropy as LinearCrossEntropy
from elbowroom.nn.linear_cross_entropy import linear_cross_entropy as linear_cross_entropy
from elbowroom.nn.norms import LayerNorm as LayerNorm
from elbowroom.nn.norms import RMSNorm as RMSNorm
from elbowroom.nn.swap import Replaced as Replaced
