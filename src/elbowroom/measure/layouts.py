"""What the backward of a convolution takes for maps in layouts of the library's own.

On a CPU, oneDNN copies maps into layouts that have whole blocks of 16 channels. x and y are bytes
of input and result, [x] and [y] those of their copies:

    gradient of the input     [x] + [y], and the gradient itself once that is over
                              2 x with strides, if that is more
    gradient of the weight    [x] + [y], beside the gradient of the input
                              [x] has half a block if that is enough; of an image (3 channels) it
                              is 0, because that is read as it lies

(Measured with AVX-512 and fp32; docs/log.md, "Copies of maps, by layout".)
"""

from math import prod
from typing import Any

import torch

from elbowroom.runtime.kept import Deferred
from elbowroom.runtime.slot import View

_BLOCK = 16  # channels
_IMAGE = 3  # channels of an input that is read as it lies
_LIBRARY_SAMPLES = 16  # of which convolutions of one pixel are oneDNN's, on one thread


def copied_nbytes(fn: Any) -> int:
    """Returns the bytes that a convolution's backward takes beside gradients; 0 for other ops.

    On other devices than a CPU it is not known: about twice the larger of input and result.

    fn: node of autograd
    """
    if not fn.name().startswith("ConvolutionBackward"):
        return 0
    made, view = fn._input_metadata[0], _saved_input(fn)
    (given, nth), (weight, which) = fn.next_functions[:2]
    shape = made.shape if view is None else view.geometry.shape
    shape = shape if given is None else given._input_metadata[nth].shape
    of_weight = 0 if weight is None else _nbytes(weight._input_metadata[which].shape, made)
    x, y = _nbytes(shape, made), _nbytes(made.shape, made)
    if made.device.type != "cpu":
        return max(max(x, y) + (max(x, y) if given is None else x), of_weight)
    if not _copies_maps(fn, view):
        return of_weight
    block = _BLOCK // 2 if shape[1] <= _BLOCK // 2 else _BLOCK
    read = 0 if shape[1] <= _IMAGE else _blocked(x, shape[1], block)
    y = _blocked(y, made.shape[1], _BLOCK)
    of_input = 0
    if given is not None:
        has_strides = max(fn._saved_stride) > 1 and not fn._saved_transposed
        of_input = 2 * x if has_strides else _blocked(x, shape[1], _BLOCK) + y - x
    return max(read + y, of_input, of_weight)


def _nbytes(shape: tuple[int, ...], like: Any) -> int:
    return int(prod(shape) * like.dtype.itemsize)


def _blocked(nbytes: int, channels: int, block: int) -> int:
    """Returns the bytes of maps once their channels fill whole blocks."""
    return nbytes // max(channels, 1) * -(-channels // block) * block


def _copies_maps(fn: Any, view: View | None) -> bool:
    """Returns whether oneDNN copies a convolution's maps.

    It copies none whose channels come last in memory. Where each pixel is multiplied by a matrix
    alone, in one or two dimensions of fp32, PyTorch calls it for at least 16 samples or on several
    threads (`ConvParams::use_mkldnn` in ATen/native/Convolution.cpp); otherwise it multiplies
    matrices as the maps lie. Where it is not known, maps are taken to be copied.

    view: how the input is held
    """
    made = fn._input_metadata[0]
    if view is not None and len(view.geometry.shape) == 4:
        channels, stride = view.geometry.shape[1], view.geometry.stride
        if channels > 1 and stride[1] == 1 and stride[3] == channels:
            return False
    weight, which = fn.next_functions[1]
    if weight is None or made.dtype is not torch.float32 or fn._saved_groups != 1:
        return True
    pixels = weight._input_metadata[which].shape[2:]
    is_product = {*pixels, *fn._saved_stride} == {1} and len(pixels) < 3
    uses_library = made.shape[0] >= _LIBRARY_SAMPLES or torch.get_num_threads() > 1
    return uses_library or not is_product or prod(made.shape[2:]) == 1


def _saved_input(fn: Any) -> View | None:
    """Returns how a convolution's input is held; None: not by us."""
    packed = getattr(fn._raw_saved_input, "data", None)
    view = packed.held if isinstance(packed, Deferred) else packed
    return view if isinstance(view, View) else None
