"""The specification: each op in plain torch, for any device.

It is slow, but short enough to check by reading.
"""

from elbowroom.kernels.reference.affine import affine as affine
from elbowroom.kernels.reference.attention_backward import attention_backward as attention_backward
from elbowroom.kernels.reference.batch_norm_backward import (
    batch_norm_backward as batch_norm_backward,
)
from elbowroom.kernels.reference.beyond import beyond as beyond
from elbowroom.kernels.reference.bits import masked as masked
from elbowroom.kernels.reference.bits import pack_bits as pack_bits
from elbowroom.kernels.reference.bits import times_bits as times_bits
from elbowroom.kernels.reference.bits import unpack_bits as unpack_bits
from elbowroom.kernels.reference.comet import comet_dequantize as comet_dequantize
from elbowroom.kernels.reference.comet import comet_quantize as comet_quantize
from elbowroom.kernels.reference.comet import comet_quantize_into as comet_quantize_into
from elbowroom.kernels.reference.dither import dither_dequantize as dither_dequantize
from elbowroom.kernels.reference.dither import dither_quantize as dither_quantize
from elbowroom.kernels.reference.division import division_dequantize as division_dequantize
from elbowroom.kernels.reference.division import division_quantize as division_quantize
from elbowroom.kernels.reference.dropout import dropout as dropout
from elbowroom.kernels.reference.fdsr import fdsr_dequantize as fdsr_dequantize
from elbowroom.kernels.reference.fdsr import fdsr_quantize as fdsr_quantize
from elbowroom.kernels.reference.fingerprint import fingerprint as fingerprint
from elbowroom.kernels.reference.fp8 import fp8_dequantize as fp8_dequantize
from elbowroom.kernels.reference.fp8 import fp8_quantize as fp8_quantize
from elbowroom.kernels.reference.group import group_dequantize as group_dequantize
from elbowroom.kernels.reference.group import group_quantize as group_quantize
from elbowroom.kernels.reference.head_spread import head_spread as head_spread
from elbowroom.kernels.reference.layer_norm_backward import (
    layer_norm_backward as layer_norm_backward,
)
from elbowroom.kernels.reference.narrow import narrow as narrow
from elbowroom.kernels.reference.nonzero import nonzero_dequantize as nonzero_dequantize
from elbowroom.kernels.reference.nonzero import nonzero_quantize as nonzero_quantize
from elbowroom.kernels.reference.nonzero import nonzero_quantize_into as nonzero_quantize_into
from elbowroom.kernels.reference.places import places_pack as places_pack
from elbowroom.kernels.reference.places import places_unpack as places_unpack
from elbowroom.kernels.reference.row_statistics import row_statistics as row_statistics
from elbowroom.kernels.reference.sided import sided_dequantize as sided_dequantize
from elbowroom.kernels.reference.sided import sided_quantize as sided_quantize
from elbowroom.kernels.reference.sided import sided_quantize_into as sided_quantize_into
from elbowroom.kernels.reference.sparse import sparse_pack as sparse_pack
from elbowroom.kernels.reference.sparse import sparse_pack_into as sparse_pack_into
from elbowroom.kernels.reference.sparse import sparse_unpack as sparse_unpack
from elbowroom.kernels.reference.step import advance as advance
from elbowroom.kernels.reference.step import moments_dequantize as moments_dequantize
from elbowroom.kernels.reference.step import moments_quantize as moments_quantize
from elbowroom.kernels.reference.step import optimizer_step as optimizer_step
