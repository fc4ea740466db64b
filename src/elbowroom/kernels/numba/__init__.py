"""The ops on a CPU, compiled by numba: same names, signatures and bits as the reference.

Compiled functions are cached on disk by numba; `launch.py` keeps its threads in step with torch's.
"""

from elbowroom.kernels.numba.affine import affine as affine
from elbowroom.kernels.numba.attention_backward import attention_backward as attention_backward
from elbowroom.kernels.numba.batch_norm_backward import (
    batch_norm_backward as batch_norm_backward,
)
from elbowroom.kernels.numba.beyond import beyond as beyond
from elbowroom.kernels.numba.bits import masked as masked
from elbowroom.kernels.numba.bits import pack_bits as pack_bits
from elbowroom.kernels.numba.bits import times_bits as times_bits
from elbowroom.kernels.numba.bits import unpack_bits as unpack_bits
from elbowroom.kernels.numba.comet import comet_dequantize as comet_dequantize
from elbowroom.kernels.numba.comet import comet_quantize as comet_quantize
from elbowroom.kernels.numba.compile_notice import CompileNotice as CompileNotice
from elbowroom.kernels.numba.dither import dither_dequantize as dither_dequantize
from elbowroom.kernels.numba.dither import dither_quantize as dither_quantize
from elbowroom.kernels.numba.division import division_dequantize as division_dequantize
from elbowroom.kernels.numba.division import division_quantize as division_quantize
from elbowroom.kernels.numba.dropout import dropout as dropout
from elbowroom.kernels.numba.fdsr import fdsr_dequantize as fdsr_dequantize
from elbowroom.kernels.numba.fdsr import fdsr_quantize as fdsr_quantize
from elbowroom.kernels.numba.fingerprint import fingerprint as fingerprint
from elbowroom.kernels.numba.fp8 import fp8_dequantize as fp8_dequantize
from elbowroom.kernels.numba.fp8 import fp8_quantize as fp8_quantize
from elbowroom.kernels.numba.group import group_dequantize as group_dequantize
from elbowroom.kernels.numba.group import group_quantize as group_quantize
from elbowroom.kernels.numba.head_spread import head_spread as head_spread
from elbowroom.kernels.numba.layer_norm_backward import (
    layer_norm_backward as layer_norm_backward,
)
from elbowroom.kernels.numba.narrow import narrow as narrow
from elbowroom.kernels.numba.nonzero import nonzero_dequantize as nonzero_dequantize
from elbowroom.kernels.numba.nonzero import nonzero_quantize as nonzero_quantize
from elbowroom.kernels.numba.places import places_pack as places_pack
from elbowroom.kernels.numba.places import places_unpack as places_unpack
from elbowroom.kernels.numba.row_statistics import row_statistics as row_statistics
from elbowroom.kernels.numba.sided import sided_dequantize as sided_dequantize
from elbowroom.kernels.numba.sided import sided_quantize as sided_quantize
from elbowroom.kernels.numba.sparse import sparse_pack as sparse_pack
from elbowroom.kernels.numba.sparse import sparse_unpack as sparse_unpack
from elbowroom.kernels.numba.step import advance as advance
from elbowroom.kernels.numba.step import optimizer_step as optimizer_step
