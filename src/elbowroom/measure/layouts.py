"""Counts the bytes that the backward of a convolution takes for copies in layouts of its library.

On a CPU, oneDNN copies maps into layouts that have whole blocks of channels, 16 with AVX-512 and 8
with AVX2. x and y are bytes of input and result, [x] and [y] those of their copies:

    gradient of the input     [x] + [y], and the gradient itself once that is over
                              2 x with strides, if that is more
    gradient of the weight    [x] + [y], beside the gradient of the input
                              [x] has half a block of 16 if that is enough; of an image
                              (3 channels) it is 0, because that is read as it lies
                              with AVX2, the columns of one sample and 4 weights where blocks do
                              not serve (`_multiplies_columns`)

torch writes out the windows of volumes that it does not give to oneDNN: x once for each tap of the
kernel, for one sample, or for the batch (`_windows_nbytes`).

No map is copied whose channels come last in memory; the weight is (`_weight_nbytes`).

(Measured with fp32; docs/log.md, "Copies of maps, by layout" for AVX-512, "What convolutions copy
with AVX2" for AVX2.)
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from elbowroom.runtime.kept import Deferred
from elbowroom.runtime.slot import View


@dataclass(frozen=True)
class _Layouts:
    """Describes what oneDNN copies with one instruction set.

    block        channels that copies are filled up to
    least        channels that the copy of an input is filled up to, if it has no more
    images       channels of inputs that are read as they lie
    fills_all    weights of a single group are filled up, too, where channels come last
    is_partial   only some gradients of weights are computed in blocks (`_multiplies_columns`)
    """

    block: int
    least: int
    images: tuple[int, ...]
    fills_all: bool
    is_partial: bool


_LAYOUTS = {  # by what `torch.backends.cpu.get_cpu_capability` begins with
    "AVX512": _Layouts(block=16, least=8, images=(1, 2, 3), fills_all=False, is_partial=False),
    "AVX2": _Layouts(block=8, least=8, images=(3,), fills_all=True, is_partial=True),
}
_SMALL_KERNEL = 3  # pixels a side
_LONG_ROW = 13  # pixels
_WRITES_WINDOWS = {  # of volumes; True: those of all samples at once
    "Slow3d": True,
    "SlowDilated3d": False,
    "SlowTranspose3d": False,
}
_LIBRARY_SAMPLES = 16  # of which convolutions of one pixel are oneDNN's, on one thread


def copied_nbytes(fn: Any) -> int:
    """Returns the bytes that a convolution's backward takes beside gradients; 0 for other ops.

    On a CPU of another instruction set it is the largest that is known. On other devices it is not
    known: about twice the larger of input and result.

    fn: node of autograd
    """
    if fn.name().startswith("ConvolutionBackwardBackward"):  # of a gradient of a gradient
        return _given_nbytes(fn)
    if not fn.name().startswith("ConvolutionBackward"):
        return 0
    made, view = fn._input_metadata[0], _saved_input(fn)
    (given, nth), (weight, which) = fn.next_functions[:2]
    if given is not None:
        shape = given._input_metadata[nth].shape
    else:
        shape = _input_shape(fn) if view is None else view.geometry.shape
    of_weight = 0 if weight is None else _nbytes(weight._input_metadata[which].shape, made)
    x, y = _nbytes(shape, made), _nbytes(made.shape, made)
    if made.device.type != "cpu":
        return max(max(x, y) + (max(x, y) if given is None else x), of_weight)
    if view is not None and _has_channels_last(view):
        of_copies = 0 if weight is None else max(_weight_nbytes(fn, shape, of) for of in _known())
        return max(of_weight, of_copies)
    windows = _windows_nbytes(fn, shape)
    if windows is not None:
        return max(of_weight, windows)
    if not _copies_maps(fn):
        return of_weight
    return max(of_weight, *(_maps_nbytes(fn, shape, of) for of in _known()))


def _given_nbytes(fn: Any) -> int:
    """Returns the bytes of all gradients that a node gives: it reads and makes maps of their sizes.

    What it takes may be undefined, and then has no shape.
    """
    each = (to._input_metadata[which] for to, which in fn.next_functions if to is not None)
    return sum(_nbytes(made.shape, made) for made in each)


def _input_shape(fn: Any) -> tuple[int, ...]:
    """Returns the smallest shape of an input that gives the result, where no tensor shows it.

    Pixels that strides leave over at the end are not counted.
    """
    made, (weight, which) = fn._input_metadata[0].shape, fn.next_functions[1]
    if weight is None:
        return tuple(made)
    kernel, is_up = weight._input_metadata[which].shape, fn._saved_transposed

    def side(out: int, pixels: int, stride: int, padding: int, dilation: int, more: int) -> int:
        reach = dilation * (pixels - 1)
        if is_up:
            return (out - more - 1 - reach + 2 * padding) // stride + 1
        return (out - 1) * stride + reach + 1 - 2 * padding

    how = fn._saved_stride, fn._saved_padding, fn._saved_dilation, fn._saved_output_padding
    channels = kernel[0] if is_up else kernel[1] * fn._saved_groups
    return made[0], channels, *map(side, made[2:], kernel[2:], *how)


def _known() -> Iterable[_Layouts]:
    """Returns the layouts of this CPU's instruction set; all, if they are not known."""
    capability = torch.backends.cpu.get_cpu_capability()
    found = [of for name, of in _LAYOUTS.items() if capability.startswith(name)]
    return found or _LAYOUTS.values()


def _windows_nbytes(fn: Any, shape: tuple[int, ...]) -> int | None:
    """Returns what torch takes for windows that it writes out; None where it writes none.

    It gives doubles to oneDNN never, and a single sample only above a number of elements.

    shape: of the input
    """
    weight, which = fn.next_functions[1]
    if weight is None or len(shape) != 5:
        return None
    made, like = fn._input_metadata[0], weight._input_metadata[which]
    one = torch.empty(1, dtype=made.dtype)  # shapes alone are read
    how = fn._saved_stride, fn._saved_padding, fn._saved_dilation, fn._saved_transposed
    more = fn._saved_output_padding, fn._saved_groups
    backend: Any = torch._C._select_conv_backend(
        one.expand(shape), one.expand(tuple(like.shape)), None, *how, *more
    )
    if backend.name not in _WRITES_WINDOWS:
        return None
    samples = shape[0] if _WRITES_WINDOWS[backend.name] else 1
    maps = shape if fn._saved_transposed else made.shape
    channels = made.shape[1] if fn._saved_transposed else shape[1]
    return _nbytes((samples, channels, *like.shape[2:], *maps[2:]), made)


def _maps_nbytes(fn: Any, shape: tuple[int, ...], of: _Layouts) -> int:
    """Returns what oneDNN takes for copies of maps whose channels do not come last in memory.

    shape: of the input
    """
    made, given = fn._input_metadata[0], fn.next_functions[0][0]
    x, y = _nbytes(shape, made), _blocked(_nbytes(made.shape, made), made.shape[1], of.block)
    if of.is_partial and len(shape) == 5 and _multiplies_pixels(fn):
        return 0 if given is None else x
    if _multiplies_columns(fn, shape, of, channels_last=False):
        of_weight = _columns_nbytes(fn, shape)
    elif shape[1] in of.images:
        of_weight = y
    else:
        of_weight = y + _blocked(x, shape[1], of.least if shape[1] <= of.least else of.block)
    if given is None:
        return of_weight
    copy = _blocked(x, shape[1], of.block)
    has_strides = max(fn._saved_stride) > 1 and not fn._saved_transposed
    return max(of_weight, 2 * x if has_strides else copy + max(y - x, 0))


def _multiplies_columns(
    fn: Any, shape: tuple[int, ...], of: _Layouts, *, channels_last: bool
) -> bool:
    """Returns whether oneDNN computes the gradient of a weight from columns of windows.

    With AVX2 it does so for dilated kernels, in three dimensions with padding, where kernels are
    higher than the maps or wider than 13 pixels, and for groups that fill no blocks, unless
    channels come last or kernels are small and depthwise.

    shape: of the input
    """
    weight, which = fn.next_functions[1]
    if weight is None or not of.is_partial:
        return False
    outs, ins, *pixels = weight._input_metadata[which].shape
    maps = fn._input_metadata[0].shape if fn._saved_transposed else shape
    if max(pixels) == 1:
        return False
    is_volume = len(pixels) > 2 and (fn._saved_transposed or max(fn._saved_padding) > 0)
    if max(fn._saved_dilation) > 1 or is_volume or pixels[-1] > _LONG_ROW:
        return True
    groups: int = fn._saved_groups
    if _is_small_depthwise(outs, ins, pixels, groups):
        return False
    if len(pixels) > 1 and pixels[0] > maps[2]:
        return True
    is_partly_filled = bool(ins % of.block or outs // groups % of.block)
    return groups > 1 and not channels_last and is_partly_filled


def _columns_nbytes(fn: Any, shape: tuple[int, ...]) -> int:
    """Returns what columns of one sample (of a volume: one plane) and copies of the weight take."""
    weight, which = fn.next_functions[1]
    made, like = fn._input_metadata[0], weight._input_metadata[which]
    _, ins, *pixels = like.shape
    maps = shape if fn._saved_transposed else made.shape
    return _nbytes((ins, *pixels, *maps[2:][-2:]), made) + 4 * _nbytes(like.shape, made)


def _is_small_depthwise(outs: int, ins: int, pixels: list[int], groups: int) -> bool:
    return groups == outs and ins == 1 and max(pixels) <= _SMALL_KERNEL


def _nbytes(shape: tuple[int, ...], like: Any) -> int:
    return int(prod(shape) * like.dtype.itemsize)


def _blocked(nbytes: int, channels: int, block: int) -> int:
    """Returns the bytes of maps once their channels fill whole blocks."""
    return nbytes // max(channels, 1) * -(-channels // block) * block


def _weight_nbytes(fn: Any, shape: tuple[int, ...], of: _Layouts) -> int:
    """Returns what oneDNN takes for the weight's gradient where channels come last in memory.

    It copies the weight, unless its channels come last, too, and computes the gradient in square
    blocks of channels. A group of fewer is filled up, so that a depthwise kernel takes 256 times
    its bytes with blocks of 16. Depthwise kernels of up to three pixels a side, and all of one
    pixel, have code of their own. Measured on one thread.

    shape: of the input
    """
    weight, which = fn.next_functions[1]
    made = weight._input_metadata[which]
    groups: int = fn._saved_groups
    outs, ins, *pixels = made.shape
    nbytes = _nbytes(made.shape, made)
    if max(pixels) == 1:
        return 0
    leaf = getattr(weight, "variable", None)
    lies = leaf is not None and leaf.is_contiguous(memory_format=torch.channels_last)
    if _multiplies_columns(fn, shape, of, channels_last=True):
        sample = fn._input_metadata[0].shape if fn._saved_transposed else shape
        read = _nbytes(tuple(sample[1:]), made) // groups
        return read + _columns_nbytes(fn, shape) + (0 if lies else nbytes)
    if _is_small_depthwise(outs, ins, pixels, groups):
        return 2 * nbytes
    filled = nbytes
    if groups > 1 or (of.fills_all and ins not in of.images):
        filled = _blocked(_blocked(nbytes, ins, of.block), outs // groups, of.block)
    return filled + (1 if lies else 2) * nbytes


def _copies_maps(fn: Any) -> bool:
    """Returns whether oneDNN copies the maps of a convolution whose channels do not come last.

    Where each pixel is multiplied by a matrix alone, in one or two dimensions of fp32, PyTorch
    calls it for at least 16 samples or on several threads (`ConvParams::use_mkldnn` in
    ATen/native/Convolution.cpp); otherwise it multiplies matrices as the maps lie. Where it is not
    known, maps are taken to be copied.
    """
    made = fn._input_metadata[0]
    is_flat = len(made.shape) < 5 and made.dtype is torch.float32
    uses_library = made.shape[0] >= _LIBRARY_SAMPLES or torch.get_num_threads() > 1
    is_product = is_flat and _multiplies_pixels(fn)
    return uses_library or not is_product or prod(made.shape[2:]) == 1


def _multiplies_pixels(fn: Any) -> bool:
    """Returns whether each pixel is multiplied by one matrix, which has a gradient, alone."""
    weight, which = fn.next_functions[1]
    if weight is None or fn._saved_groups != 1:
        return False
    return {*weight._input_metadata[which].shape[2:], *fn._saved_stride} == {1}


def _has_channels_last(view: View) -> bool:
    """Returns whether the channels of images come last in memory."""
    shape, stride = view.geometry.shape, view.geometry.stride
    return len(shape) == 4 and shape[1] > 1 and stride[1] == 1 and stride[3] == shape[1]


def _saved_input(fn: Any) -> View | None:
    """Returns how a convolution's input is held; None: not by us."""
    packed = getattr(fn._raw_saved_input, "data", None)
    view = packed.held if isinstance(packed, Deferred) else packed
    return view if isinstance(view, View) else None
