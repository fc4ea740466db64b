"""Counts the bytes that the backward of a convolution takes for copies in layouts of its library.

On a CPU, oneDNN copies maps into layouts that have whole blocks of 16 channels. x and y are bytes
of input and result, [x] and [y] those of their copies:

    gradient of the input     [x] + [y], and the gradient itself once that is over
                              2 x with strides, if that is more
    gradient of the weight    [x] + [y], beside the gradient of the input
                              [x] has half a block if that is enough; of an image (3 channels) it
                              is 0, because that is read as it lies

No map is copied whose channels come last in memory; the weight is (`_weight_nbytes`).

(Measured with AVX-512 and fp32; docs/log.md, "Copies of maps, by layout".)
"""

from math import prod
from typing import Any

import torch

from elbowroom.runtime.kept import Deferred
from elbowroom.runtime.slot import View

_BLOCK = 16  # channels
_IMAGE = 3  # channels of an input that is read as it lies
_SMALL_KERNEL = 3  # pixels a side
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
    if view is not None and _has_channels_last(view):
        return of_weight if weight is None else max(of_weight, _weight_nbytes(fn, weight, which))
    if not _copies_maps(fn):
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


def _weight_nbytes(fn: Any, weight: Any, which: int) -> int:
    """Returns what oneDNN takes for the weight's gradient where channels come last in memory.

    It copies the weight, unless its channels come last, too, and computes the gradient in blocks of
    16 by 16 channels. A group of fewer is filled up, so that a depthwise kernel takes 256 times its
    bytes. Depthwise kernels of up to three pixels a side, and all of one pixel, have code of their
    own. Measured on one thread.

    weight, which: the node of the weight, and which of its outputs
    """
    made, groups = weight._input_metadata[which], fn._saved_groups
    outs, ins, *pixels = made.shape
    nbytes = _nbytes(made.shape, made)
    if max(pixels) == 1:
        return 0
    if groups == outs and ins == 1 and max(pixels) <= _SMALL_KERNEL:
        return 2 * nbytes
    if groups > 1 and (ins % _BLOCK or outs // groups % _BLOCK):
        return nbytes + _blocked(_blocked(nbytes, ins, _BLOCK), outs // groups, _BLOCK)
    leaf = getattr(weight, "variable", None)
    lies = leaf is not None and leaf.is_contiguous(memory_format=torch.channels_last)
    return 2 * nbytes if lies else 3 * nbytes


def _copies_maps(fn: Any) -> bool:
    """Returns whether oneDNN copies the maps of a convolution whose channels do not come last.

    Where each pixel is multiplied by a matrix alone, in one or two dimensions of fp32, PyTorch
    calls it for at least 16 samples or on several threads (`ConvParams::use_mkldnn` in
    ATen/native/Convolution.cpp); otherwise it multiplies matrices as the maps lie. Where it is not
    known, maps are taken to be copied.
    """
    made = fn._input_metadata[0]
    weight, which = fn.next_functions[1]
    if weight is None or made.dtype is not torch.float32 or fn._saved_groups != 1:
        return True
    pixels = weight._input_metadata[which].shape[2:]
    is_product = {*pixels, *fn._saved_stride} == {1} and len(pixels) < 3
    uses_library = made.shape[0] >= _LIBRARY_SAMPLES or torch.get_num_threads() > 1
    return uses_library or not is_product or prod(made.shape[2:]) == 1


def _has_channels_last(view: View) -> bool:
    """Returns whether the channels of images come last in memory."""
    shape, stride = view.geometry.shape, view.geometry.stride
    return len(shape) == 4 and shape[1] > 1 and stride[1] == 1 and stride[3] == shape[1]


def _saved_input(fn: Any) -> View | None:
    """Returns how a convolution's input is held; None: not by us."""
    packed = getattr(fn._raw_saved_input, "data", None)
    view = packed.held if isinstance(packed, Deferred) else packed
    return view if isinstance(view, View) else None
