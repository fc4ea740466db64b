"""The ops on a GPU, compiled by Triton: same names, signatures and bits as the reference.

Under TRITON_INTERPRET=1, set before this package is imported, they run on CPU tensors: slow, for
tests.
"""

from elbowroom.kernels.triton.affine import affine as affine
from elbowroom.kernels.triton.bits import masked as masked
from elbowroom.kernels.triton.bits import pack_bits as pack_bits
from elbowroom.kernels.triton.bits import unpack_bits as unpack_bits
from elbowroom.kernels.triton.comet import comet_dequantize as comet_dequantize
from elbowroom.kernels.triton.comet import comet_quantize as comet_quantize
from elbowroom.kernels.triton.comet import comet_quantize_into as comet_quantize_into
from elbowroom.kernels.triton.dither import dither_dequantize as dither_dequantize
from elbowroom.kernels.triton.dither import dither_quantize as dither_quantize
from elbowroom.kernels.triton.division import division_dequantize as division_dequantize
from elbowroom.kernels.triton.division import division_quantize as division_quantize
from elbowroom.kernels.triton.dropout import dropout as dropout
from elbowroom.kernels.triton.fdsr import fdsr_dequantize as fdsr_dequantize
from elbowroom.kernels.triton.fdsr import fdsr_quantize as fdsr_quantize
from elbowroom.kernels.triton.fp8 import fp8_dequantize as fp8_dequantize
from elbowroom.kernels.triton.fp8 import fp8_quantize as fp8_quantize
from elbowroom.kernels.triton.group import group_dequantize as group_dequantize
from elbowroom.kernels.triton.group import group_quantize as group_quantize
from elbowroom.kernels.triton.launch import FAILURES as FAILURES
from elbowroom.kernels.triton.narrow import narrow as narrow
from elbowroom.kernels.triton.nonzero import nonzero_dequantize as nonzero_dequantize
from elbowroom.kernels.triton.nonzero import nonzero_quantize as nonzero_quantize
from elbowroom.kernels.triton.nonzero import nonzero_quantize_into as nonzero_quantize_into
from elbowroom.kernels.triton.sided import sided_dequantize as sided_dequantize
from elbowroom.kernels.triton.sided import sided_quantize as sided_quantize
from elbowroom.kernels.triton.sided import sided_quantize_into as sided_quantize_into
from elbowroom.kernels.triton.sparse import sparse_pack_into as sparse_pack_into
from elbowroom.kernels.triton.sparse import sparse_unpack as sparse_unpack
from elbowroom.kernels.triton.step import optimizer_step as optimizer_step
