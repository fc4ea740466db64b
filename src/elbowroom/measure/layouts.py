"""Counts the bytes that the backward of a convolution takes for copies in layouts of its library.

On a CPU, oneDNN copies maps into layouts that have whole blocks of channels, 16 with AVX-512 and 8
with AVX2, or where blocks of 16 do not serve (`_is_narrow`). x and y are bytes of input and result,
[x] and [y] those of their copies, w those of the weight and [w] of it in whole blocks:

    gradient of the input     [x] + [y] + [w] - w, and the gradient itself once that is over
                              2 x with strides, if that is more
    gradient of the weight    [x] + [y] + [w] - w, beside the gradient of the input
                              [x] of an image (3 channels) is 0, because that is read as it lies
                              the columns of one sample and 4 w where blocks do not serve
                              (`_multiplies_columns`)

A transposed convolution is that of its result: x and y change places, so that [y] of an image is 0.
torch writes out the windows of volumes that it does not give to oneDNN: x once for each tap of the
kernel, for one sample, or for the batch (`_windows_nbytes`).

No map is copied whose channels come last in memory; the weight is (`_channels_last_nbytes`).

(Measured with fp32; docs/log.md, "What transposed and grouped convolutions copy" for AVX-512, "What
convolutions copy with AVX2" for AVX2.)
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

    block          channels that copies are filled up to
    images         channels of inputs that are read as they lie
    fills_images   weights of images are filled up, too, where channels come last
    """

    block: int
    images: tuple[int, ...]
    fills_images: bool


_LAYOUTS = {  # by what `torch.backends.cpu.get_cpu_capability` begins with
    "AVX512": _Layouts(block=16, images=(1, 2, 3), fills_images=True),
    "AVX2": _Layouts(block=8, images=(3,), fills_images=False),
}
_NARROW = 8  # channels of the smallest blocks
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
        of_copies = (
            0 if weight is None else max(_channels_last_nbytes(fn, shape, of) for of in _known())
        )
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
    is_product = _multiplies_pixels(fn) and fn._saved_groups == 1 and not fn._saved_transposed
    if is_product and fn.next_functions[0][0] is None:
        return 0
    samples = shape[0] if _WRITES_WINDOWS[backend.name] else 1
    maps = shape if fn._saved_transposed else made.shape
    channels = made.shape[1] if fn._saved_transposed else shape[1]
    return _nbytes((samples, channels, *like.shape[2:], *maps[2:]), made)


def _maps_nbytes(fn: Any, shape: tuple[int, ...], of: _Layouts) -> int:
    """Returns what oneDNN takes for copies of maps whose channels do not come last in memory.

    shape: of the input
    """
    made, given = fn._input_metadata[0], fn.next_functions[0][0]
    x, y, groups = _nbytes(shape, made), _nbytes(made.shape, made), fn._saved_groups
    if _multiplies_pixels(fn):
        if len(shape) == 5:
            return 0 if given is None and groups == 1 else x
        if groups > 1 and not _uses_library(fn):
            return (x + y) // groups if given is None else x + _weight_nbytes(fn)
    of_weight = _for_weight_nbytes(fn, shape, of)
    return of_weight if given is None else max(of_weight, _for_input_nbytes(fn, shape, of))


def _for_weight_nbytes(fn: Any, shape: tuple[int, ...], of: _Layouts) -> int:
    """Returns what the gradient of the weight takes; parameters as of `_maps_nbytes`."""
    if _multiplies_columns(fn, shape, of, channels_last=False):
        return _columns_nbytes(fn, shape)
    made = fn._input_metadata[0]
    ends = (shape, made.shape)
    read, written = ends[::-1] if fn._saved_transposed else ends
    block = _NARROW if _is_narrow(fn, shape, of) else of.block
    copy = _blocked(_nbytes(written, made), written[1], block)
    if read[1] in of.images:
        return copy + _filled_nbytes(fn, block, 1)
    return copy + _blocked(_nbytes(read, made), read[1], block) + _filled_nbytes(fn, block, block)


def _for_input_nbytes(fn: Any, shape: tuple[int, ...], of: _Layouts) -> int:
    """Returns what the gradient of the input takes; parameters as of `_maps_nbytes`."""
    made, groups, is_up = fn._input_metadata[0], fn._saved_groups, fn._saved_transposed
    x, y = _nbytes(shape, made), _nbytes(made.shape, made)
    if is_up and len(shape) == 5 and 1 < groups == shape[1]:
        return x + y
    if max(fn._saved_stride) > 1 and not is_up:
        return 2 * x
    block = _NARROW if groups > 1 and _is_narrow(fn, shape, of) else of.block
    copy = _blocked(x, shape[1], block)
    if is_up and made.shape[1] in of.images:
        return copy + (_filled_nbytes(fn, block, 1) if groups == 1 else 0)
    if is_up and made.shape[1] < block:  # read as it lies
        return copy - _weight_nbytes(fn)
    filled = _filled_nbytes(fn, block, block) if groups == 1 else 0
    return copy + max(_blocked(y, made.shape[1], block) - x, 0) + filled


def _channels_of_group(fn: Any, shape: tuple[int, ...]) -> tuple[int, int]:
    """Returns how many channels of a group are read, and how many are made of them.

    A transposed convolution reads its result's.

    shape: of the input
    """
    ends = shape[1] // fn._saved_groups, fn._input_metadata[0].shape[1] // fn._saved_groups
    return ends[::-1] if fn._saved_transposed else ends


def _is_narrow(fn: Any, shape: tuple[int, ...], of: _Layouts) -> bool:
    """Returns whether blocks have 8 channels: with AVX2, and where few channels are read or made.

    shape: of the input
    """
    read, made = _channels_of_group(fn, shape)
    if of.block == _NARROW:
        return True
    if fn._saved_groups > 1:
        return bool(read % of.block or made % of.block)
    if read in of.images:
        return False
    return read <= _NARROW or (made <= _NARROW and read % of.block > 0)


def _filled_nbytes(fn: Any, made: int, read: int) -> int:
    """Returns the bytes by which a weight grows as its channels fill whole blocks.

    made, read: channels of a block
    """
    weight, which = fn.next_functions[1]
    if weight is None:
        return 0
    like = weight._input_metadata[which]
    outs, ins, *pixels = like.shape
    groups: int = fn._saved_groups
    if _is_small_depthwise(outs, ins, pixels, groups):
        return 0
    nbytes = _nbytes(like.shape, fn._input_metadata[0])
    return _blocked(_blocked(nbytes, ins, read), outs // groups, made) - nbytes


def _multiplies_columns(
    fn: Any, shape: tuple[int, ...], of: _Layouts, *, channels_last: bool
) -> bool:
    """Returns whether oneDNN computes the gradient of a weight from columns of windows.

    It does so where kernels are wider than 13 pixels, of dilated volumes, and for groups that fill
    no blocks of 8, unless channels come last or kernels are small and depthwise. Of blocks of 8, it
    does so for all dilated kernels and in three dimensions with padding; with AVX2, also where
    kernels are higher than the maps.

    shape: of the input
    """
    weight, which = fn.next_functions[1]
    if weight is None:
        return False
    outs, ins, *pixels = weight._input_metadata[which].shape
    if max(pixels) == 1:
        return False
    is_narrow, is_volume = _is_narrow(fn, shape, of), len(pixels) > 2
    if pixels[-1] > _LONG_ROW or (max(fn._saved_dilation) > 1 and (is_narrow or is_volume)):
        return True
    if is_narrow and is_volume and max(fn._saved_padding) > 0:
        return True
    if not is_volume and _is_small_depthwise(outs, ins, pixels, fn._saved_groups):
        return False
    maps = fn._input_metadata[0].shape if fn._saved_transposed else shape
    if of.block == _NARROW and len(pixels) > 1 and pixels[0] > maps[2]:
        return True
    is_partly_filled = any(channels % _NARROW for channels in _channels_of_group(fn, shape))
    return fn._saved_groups > 1 and not channels_last and is_partly_filled


def _columns_nbytes(fn: Any, shape: tuple[int, ...]) -> int:
    """Returns what columns of one sample (of a volume: one plane) and copies of the weight take."""
    weight, which = fn.next_functions[1]
    made, like = fn._input_metadata[0], weight._input_metadata[which]
    _, ins, *pixels = like.shape
    maps = shape if fn._saved_transposed else made.shape
    return _nbytes((ins, *pixels, *maps[2:][-2:]), made) + 4 * _nbytes(like.shape, made)


def _weight_nbytes(fn: Any) -> int:
    """Returns the bytes of the weight; 0 for one without a gradient."""
    weight, which = fn.next_functions[1]
    if weight is None:
        return 0
    return _nbytes(weight._input_metadata[which].shape, fn._input_metadata[0])


def _is_small_depthwise(outs: int, ins: int, pixels: list[int], groups: int) -> bool:
    return groups == outs and ins == 1 and max(pixels) <= _SMALL_KERNEL


def _nbytes(shape: tuple[int, ...], like: Any) -> int:
    return int(prod(shape) * like.dtype.itemsize)


def _blocked(nbytes: int, channels: int, block: int) -> int:
    """Returns the bytes of maps once their channels fill whole blocks."""
    return nbytes // max(channels, 1) * -(-channels // block) * block


def _channels_last_nbytes(fn: Any, shape: tuple[int, ...], of: _Layouts) -> int:
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
    if groups > 1 or of.fills_images or ins not in of.images:
        filled += _filled_nbytes(fn, of.block, of.block)
    return filled + (1 if lies else 2) * nbytes


def _copies_maps(fn: Any) -> bool:
    """Returns whether oneDNN copies the maps of a convolution whose channels do not come last.

    Where each pixel is multiplied by a matrix alone, in one or two dimensions of fp32, PyTorch
    calls it for at least 16 samples or on several threads (`ConvParams::use_mkldnn` in
    ATen/native/Convolution.cpp); otherwise it multiplies matrices as the maps lie. Where it is not
    known, maps are taken to be copied.
    """
    made = fn._input_metadata[0]
    is_product = _multiplies_pixels(fn) and fn._saved_groups == 1
    return _uses_library(fn) or not is_product or prod(made.shape[2:]) == 1


def _uses_library(fn: Any) -> bool:
    """Returns whether PyTorch gives a convolution to oneDNN whatever its kernel."""
    made = fn._input_metadata[0]
    is_flat = len(made.shape) < 5 and made.dtype is torch.float32
    return not is_flat or made.shape[0] >= _LIBRARY_SAMPLES or torch.get_num_threads() > 1


def _multiplies_pixels(fn: Any) -> bool:
    """Returns whether each pixel is multiplied by a matrix, which has a gradient, alone."""
    weight, which = fn.next_functions[1]
    if weight is None:
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
