"""Codecs: tensor -> `Encoded` -> tensor. They do not know autograd or plans.

There is one codec per file, and each is registered here by one line. `base.py` has what all codecs
share, `registry.py` finds them by id, `facts.py` has known properties of a tensor, which make a
scan of its values unnecessary, and `affine.py` has maps that a codec applies in the same pass.
"""

from elbowroom.codecs.affine import Affine as Affine
from elbowroom.codecs.base import PART as PART
from elbowroom.codecs.base import Codec as Codec
from elbowroom.codecs.base import Encoded as Encoded
from elbowroom.codecs.base import Expected as Expected
from elbowroom.codecs.bitmask import BitMask as BitMask
from elbowroom.codecs.cast import Cast as Cast
from elbowroom.codecs.comet import Comet as Comet
from elbowroom.codecs.dither import Dither as Dither
from elbowroom.codecs.division import Division as Division
from elbowroom.codecs.facts import Facts as Facts
from elbowroom.codecs.fdsr import Fdsr as Fdsr
from elbowroom.codecs.graph_form import GraphForm as GraphForm
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
