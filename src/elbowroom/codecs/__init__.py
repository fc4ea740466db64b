"""HOW BYTES SHRINK: tensor -> `Encoded` -> tensor. Knows no autograd and no plan.

One codec a file, registered here by one visible line each; `base.py` holds what all share,
`registry.py` finds them by id, `facts.py` is what a caller may tell a codec so that no value needs
to be scanned, `affine.py` what a codec may do to a tensor in the same pass.
"""

from elbowroom.codecs.affine import Affine as Affine
from elbowroom.codecs.base import PART as PART
from elbowroom.codecs.base import Codec as Codec
from elbowroom.codecs.base import Encoded as Encoded
from elbowroom.codecs.bitmask import BitMask as BitMask
from elbowroom.codecs.cast import Cast as Cast
from elbowroom.codecs.comet import Comet as Comet
from elbowroom.codecs.dither import Dither as Dither
from elbowroom.codecs.division import Division as Division
from elbowroom.codecs.facts import Facts as Facts
from elbowroom.codecs.fdsr import Fdsr as Fdsr
from elbowroom.codecs.group import Group as Group
from elbowroom.codecs.narrow import Narrow as Narrow
from elbowroom.codecs.registry import codec as codec
from elbowroom.codecs.registry import codec_class as codec_class
from elbowroom.codecs.registry import codecs as codecs
from elbowroom.codecs.registry import register as register
from elbowroom.codecs.sided import Sided as Sided
from elbowroom.codecs.sparse_lossless import SparseLossless as SparseLossless

register(BitMask)
register(Narrow)
register(SparseLossless)
register(Cast)
register(Group)
register(Dither)
register(Division)
register(Fdsr)
register(Comet)
register(Sided)
