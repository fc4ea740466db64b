"""Modules that save less for backward, with the weights and state_dict keys of torch's own.

    linear_cross_entropy   linear layer and cross entropy, without the logits
    norms                  LayerNorm and RMSNorm that save their output, as the next layer does
    activations            GELU and SiLU that save two bits per element
    dropout                dropout that saves a seed
    cached_prefix          a frozen part whose outputs are computed once, and kept in a folder
    fp8                    layers that compute in 8-bit floats, and save these
    convert, swap          replace torch's modules in a model by these, and back

FP8 has six files: _scaled (codes and products), _flow (nodes that save codes), _attention (the node
of attention), _probe (what a module computes), _behaviors and _derived (the classes that are put in
front of a module's own).

`er.saving` leaves what these modules save as it is, so codes are never encoded twice. The output of
a norm shares one storage with the tensor that the next layer saves, and is therefore kept exactly.
Second derivatives raise an error.
"""

from elbowroom.nn.activations import GELU as GELU
from elbowroom.nn.activations import SiLU as SiLU
from elbowroom.nn.cached_prefix import CachedPrefix as CachedPrefix
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
