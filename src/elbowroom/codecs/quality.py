"""Quality of a codec setting, measured on a normal tensor: bits, error and bias.

    error     E|x~ - x|^2 / E|x|^2, of maps and of rows
    unbiased  the errors of two draws are uncorrelated, so that they average out over steps, and on
              average 0, over all elements and along x, so that no sum of many is off

The figures of this package's own settings are recorded (`_RECORDED`), because measuring them
compiles all kernels, which takes a minute on a new machine; a test measures them again. Any other
setting is measured when it is first asked for, and the size and error that it declares are checked:
a planner cannot use a codec that is wrong about them.
"""

from collections.abc import Iterator
from functools import cache
from math import prod, sqrt
from typing import NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.multiprocessing.reductions import StorageWeakRef

from elbowroom.codecs.base import FLOATS, Codec, Encoded, Expected
from elbowroom.codecs.facts import NOTHING
from elbowroom.codecs.names import setting_name

DESTROYED = "its decode changes the code, which backward may read again"
MAPS, ROWS = (4, 16, 64, 64), (64, 1024)
_TIMES = 2  # the error of a codec that its form for graphs may have
_ALIGNMENT = 256  # bytes that a buffer may have beyond what it holds
_PIECE = 1 << 14  # elements that are compared at a time
_ODD = (3, 1667)  # no multiple of any group
_AT_ONE = 1.85  # the error of a dither of two levels; of n levels it is this / (n - 1)^2
_OF_ZEROS = 0.57  # the same for outputs of a ReLU: zeros are exact, and ranges half as wide
_CORRELATED = 0.05  # the least correlation of two draws' errors that counts as a bias
_OFF, _SIGMAS = 1e-3, 6.0  # the least mean error, of a normal x, that does; and in its deviations


def error_of_dither(levels: float) -> float:
    """Returns the error of a dither of so many levels, from 2 on."""
    return _AT_ONE / (levels - 1) ** 2


class Quality(NamedTuple):
    """Quality of one codec setting. bits: stored bits per element of a float32 tensor."""

    bits: float
    error: float
    unbiased: bool

    @property
    def levels(self) -> float:
        """Levels of the dither that has the same error; below 2 if no dither is as coarse."""
        return 1 + sqrt(_AT_ONE / max(self.error, 1e-30))

    @property
    def levels_of_zeros(self) -> float:
        """Levels of a dither with the same error on outputs of a ReLU, if `is_relative`."""
        return 1 + sqrt(_OF_ZEROS / max(self.error, 1e-30))


def quality_of(codec: Codec, *, maps: bool) -> Quality:
    """Returns the quality for maps, of four dimensions and more, or for rows.

    Raises what the codec raises.
    """
    recorded = _recorded(codec)
    if recorded is None:
        return measured(codec, maps=maps)
    bits, of_maps, of_rows, unbiased = recorded
    return Quality(bits, of_maps if maps else of_rows, unbiased)


@cache
def is_own(cls: type[Codec]) -> bool:
    """Returns whether a codec is one of elbowroom's, which tests check."""
    return cls.__module__.startswith(__package__.partition(".")[0] + ".")


def _recorded(codec: Codec) -> tuple[float, float, float, bool] | None:
    """Returns what is recorded of a setting; None of another class of the same name, too."""
    return _RECORDED.get(setting_name(codec)) if is_own(type(codec)) else None


@cache
def measured(codec: Codec, *, maps: bool) -> Quality:
    """Measures the quality of one setting; once per process."""
    with unset_fake_temporarily(), torch.no_grad():
        x = normal(MAPS if maps else ROWS).to(dtypes_of(codec)[0])
        codes = [codec.encode(x, seed) for seed in (1, 2)]
        # Piece by piece: a plan asks in the middle of a step, whose memory is counted.
        decoded = [code.decode() for code in codes]
        held = [torch.split(one.flatten(), _PIECE) for one in (x, *decoded)]
        found = (
            torch.stack([_sums(*pieces) for pieces in zip(*held, strict=True)]).sum(0) / x.numel()
        )
        squares, product, shift, along, square = found.tolist()
        error = squares / 2
        correlation = product / max(error, 1e-30)
        stretch = along / square
        limit = max(_OFF, _SIGMAS * sqrt(error / (2 * x.numel())))
        is_off = max(abs(shift), abs(stretch)) > limit
        unbiased = error == 0 or (correlation < _CORRELATED and not is_off)
        return Quality(8 * codes[0].nbytes / x.numel(), error, unbiased)


def _sums(x: Tensor, one: Tensor, other: Tensor) -> Tensor:
    """Returns sums over a piece: the squares of both errors, their product, and what is biased."""
    x, one, other = x.double(), one.double(), other.double()
    one, other = one - x, other - x
    mean = (one + other) / 2
    each = (one.square() + other.square(), one * other, mean, mean * x, x.square())
    return torch.stack([values.sum() for values in each])


def dtypes_of(codec: Codec | type[Codec]) -> tuple[torch.dtype, ...]:
    """Returns the floating-point dtypes that a codec accepts."""
    return tuple(dtype for dtype in FLOATS if dtype in codec.dtypes)


@cache
def broken_promise(codec: Codec, *, is_planned: bool = True) -> str:
    """Returns in words what the codec declares and does not do; "" if it does all.

    Recorded codecs are known to keep their promises. is_planned: of its form for graphs, too, and
    it has a quality, which plans ask for.
    """
    if _recorded(codec) is not None:
        return ""
    try:
        with unset_fake_temporarily(), torch.no_grad(), torch.random.fork_rng(devices=[]):
            lie = next(_broken_promises(codec), "")
        if is_planned and not lie:
            lie = broken_form(codec)
        if is_planned and not lie and dtypes_of(codec):
            measured(codec, maps=True), measured(codec, maps=False)
        return lie
    except Exception as error:
        return f"it fails: {type(error).__name__}: {error}"


def _broken_promises(codec: Codec) -> Iterator[str]:
    for dtype in dtypes_of(codec):
        for shape in (MAPS, ROWS, _ODD, (5001,)):
            x, drawn = normal(shape).to(dtype), torch.get_rng_state()
            code = codec.encode(x, 3)
            if not torch.equal(x, normal(shape).to(dtype)):
                yield "it changes the tensor that it encodes"
            if any(b.untyped_storage()._cdata == x.untyped_storage()._cdata for b in code.buffers):
                yield "its code lies in the memory of the tensor, which is then never freed"
            said, held = codec.encoded_nbytes(shape, dtype), code.nbytes
            at_most = not codec.fixed_size()
            if held > said or (held != said and not at_most and not code.raw):
                what = f"{dtype} of shape {shape}".removeprefix("torch.")
                yield f"it says {said} bytes of {what}, and holds {held}"
            if kept_nbytes(code) > held + _ALIGNMENT:
                what = f"{dtype} of shape {shape}".removeprefix("torch.")
                yield f"it says {said} bytes of {what}, and its code keeps {kept_nbytes(code)}"
            before, y = states_of(code), code.decode()
            if states_of(code) != before:  # a second look at freed memory would end the process
                yield DESTROYED
            if y.shape != x.shape or y.dtype is not x.dtype:
                yield f"it gives back {y.dtype} of shape {tuple(y.shape)} for {dtype} of {shape}"
            error = _error(y, x)
            if error != error or error == float("inf"):
                yield "it gives back what is not finite"
            if codec.stated_error is not None and not error <= codec.stated_error:  # NaN, too
                yield f"it promises a squared error of {codec.stated_error:g}, and has {error:.2g}"
            if not torch.equal(code.decode(), y):
                yield "it gives back another tensor each time"
            again = codec.encode(x, 3)
            if not all(map(torch.equal, code.buffers, again.buffers)):
                yield "it makes another code each time, of the same tensor and seed"
            if not torch.equal(torch.get_rng_state(), drawn):
                yield "it draws from torch's own generator, or seeds it: the program's numbers"
            ref = StorageWeakRef(x.untyped_storage())  # type: ignore[no-untyped-call]
            del x
            if not ref.expired():  # type: ignore[no-untyped-call]
                yield "it keeps the tensor that it encodes, which is then never freed"


def broken_form(codec: Codec) -> str:
    """Returns in words how the form of a codec for graphs differs from the codec; "" if it agrees.

    See `GraphForm`. Those of elbowroom are compared in tests, others once a process.
    """
    if is_own(type(codec)):
        return ""
    is_hashable = True
    try:
        hash(codec)
    except TypeError:  # a field of it is a list, for example
        is_hashable = False
    return _compared(codec) if is_hashable else _compared.__wrapped__(codec)


@cache
def _compared(codec: Codec) -> str:
    try:
        with unset_fake_temporarily(), torch.no_grad():
            return next(_broken_forms(codec), "")
    except Exception as error:
        return f"its form for graphs fails: {type(error).__name__}: {error}"


def _broken_forms(codec: Codec) -> Iterator[str]:
    form = codec.graph_form(NOTHING)
    for dtype in () if form is None else dtypes_of(codec):
        for n in (prod(ROWS), 5001):
            assert form is not None
            x = normal((n,)).to(dtype)
            layout, allowed = (
                codec._layout(n, dtype, NOTHING),
                _error(codec.encode(x, 3).decode(), x),
            )
            buffers, out = form.quantize(x, 3), torch.empty_like(x)
            yield from _broken_layout(layout, buffers)
            if not torch.equal(x, normal((n,)).to(dtype)):
                yield "its form for graphs changes the tensor that it encodes"
            form.dequantize(buffers, 3, out)
            yield from _broken_error(_error(out, x), allowed)
            if form.written is not None:
                quantize, dequantize = form.written
                buffers = quantize(x, torch.tensor([3]))
                yield from _broken_layout(layout, buffers)
                y = dequantize(buffers, torch.tensor([3]), n, dtype)
                yield from _broken_error(_error(y, x), allowed)


def _broken_layout(layout: tuple[Expected, ...], buffers: tuple[Tensor, ...]) -> Iterator[str]:
    fits = len(layout) == len(buffers)
    if not fits or not all(one.fits(buffer) for one, buffer in zip(layout, buffers, strict=True)):
        said = ", ".join(map(str, layout))
        made = ", ".join(str(Expected(one.dtype, tuple(one.shape))) for one in buffers)
        yield f"it says that its code is {said}, and its form for graphs makes {made}"


def _broken_error(found: float, allowed: float) -> Iterator[str]:
    if not found <= _TIMES * allowed:
        yield f"its form for graphs has a squared error of {found:.2g}, and the codec {allowed:.2g}"


def _error(y: Tensor, x: Tensor) -> float:
    return float((y.double() - x.double()).square().sum() / x.double().square().sum())


def kept_nbytes(encoded: Encoded) -> int:
    """Returns the bytes of memory that a code's buffers keep: they may be views of larger ones."""
    storages = {b.untyped_storage()._cdata: b.untyped_storage().nbytes() for b in encoded.buffers}
    return sum(storages.values())


def states_of(encoded: Encoded) -> list[tuple[int, int]]:
    """Returns the version of each buffer of a code, and the bytes of its memory."""
    return [(one._version, one.untyped_storage().nbytes()) for one in encoded.buffers]


def normal(shape: tuple[int, ...]) -> Tensor:
    """Returns a normal tensor. It is not cached, because it would add to the peak of a step."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(prod(shape), generator=generator).view(shape)


# bits, error of maps, error of rows, unbiased; measured by `measured` (tests/unit/test_menu.py)
_RECORDED: dict[str, tuple[float, float, float, bool]] = {
    "cast": (16.000, 2.76e-06, 2.76e-06, False),
    "cast, to=fp8_e4m3": (8.125, 0.000662, 0.000661, False),
    "cast, to=fp8_e5m2": (8.125, 0.00263, 0.00261, False),
    "comet, bound=0.001": (8.760, 2.7e-05, 2.65e-05, True),
    "comet": (5.381, 0.00269, 0.00263, True),
    "comet, bound=0.05": (3.274, 0.0676, 0.0659, True),
    "dither, 256 levels": (8.266, 2.91e-05, 2.88e-05, True),
    "dither, 64 levels": (6.266, 0.000477, 0.000473, True),
    "dither, 16 levels": (4.266, 0.00842, 0.00836, True),
    "dither, 8 levels": (3.266, 0.0386, 0.0382, True),
    "dither, 6 levels": (2.934, 0.0756, 0.0749, True),
    "dither, 4 levels": (2.266, 0.21, 0.209, True),
    "dither, 3 levels": (1.867, 0.474, 0.47, True),
    "dither, 2 levels": (1.266, 1.89, 1.88, True),
    "division, bits=8": (8.258, 0.000135, 8.22e-05, True),
    "division, bits=6": (6.258, 0.00222, 0.00133, True),
    "division, bits=4": (4.258, 0.039, 0.0237, True),
    "division, bits=3": (3.258, 0.18, 0.107, True),
    "division": (2.258, 0.998, 0.596, True),
    "division, bits=8, rounding=dither": (8.258, 6.74e-05, 4.1e-05, True),
    "division, bits=6, rounding=dither": (6.258, 0.00111, 0.000673, True),
    "division, bits=4, rounding=dither": (4.258, 0.0195, 0.0119, True),
    "division, bits=3, rounding=dither": (3.258, 0.0897, 0.0544, True),
    "division, rounding=dither": (2.258, 0.488, 0.298, True),
    "fdsr, bands=6/3/0": (0.336, 0.955, 0, False),
    "fdsr, bands=6/4/3/0": (0.516, 0.908, 0, False),
    "fdsr, bands=6/3/1.6/1.6/1.6/0": (0.660, 0.831, 0, False),
    "fdsr": (0.914, 0.766, 0, False),
    "fdsr, bands=4/1.6/1.6/1.6/1.6/1.6/1.6/1, rounding=dither": (1.496, 1.61, 0, True),
    "fdsr, bands=4/1.6, rounding=dither": (1.836, 0.586, 0, True),
    "fdsr, bands=5/2, rounding=dither": (2.242, 0.261, 0, True),
    "fdsr, bands=5/2.67, rounding=dither": (2.898, 0.0937, 0, True),
    "fdsr, bands=6/4, rounding=dither": (4.227, 0.0104, 0, True),
    "group, bits=8": (8.125, 8.4e-05, 8.38e-05, True),
    "group, bits=6": (6.125, 0.00137, 0.00136, True),
    "group, bits=4": (4.125, 0.0242, 0.024, True),
    "group, bits=3": (3.125, 0.11, 0.11, True),
    "group, bits=4, group_size=32": (5.000, 0.0126, 0.0125, True),
    "group, bits=5": (5.125, 0.00567, 0.00563, True),
    "group, bits=8, group_size=64": (8.500, 5.81e-05, 5.75e-05, True),
    "group, bits=6, group_size=64": (6.500, 0.000942, 0.000929, True),
    "group, bits=4, group_size=64": (4.500, 0.0164, 0.0162, True),
    "group, bits=3, group_size=64": (3.500, 0.0749, 0.0742, True),
    "group, group_size=64": (2.500, 0.409, 0.403, True),
    "group": (2.125, 0.607, 0.602, True),
    "sided, upper=16, lower=4": (4.289, 0.0333, 0.0327, True),
    "sided, upper=8, lower=4": (3.793, 0.0379, 0.0372, True),
    "sided": (2.791, 0.321, 0.317, True),
    # What floors (`plan/precision_floor.py`) and rows of other lengths make of these.
    "cast, to=fp16": (16.000, 4.32e-08, 4.28e-08, False),
    "cast, to=fp8_e4m3, group_size=32": (8.500, 0.000577, 0.000573, False),
    "cast, to=fp8_e4m3, group_size=64": (8.250, 0.000629, 0.000622, False),
    "cast, to=fp8_e5m2, group_size=32": (8.500, 0.0023, 0.00228, False),
    "cast, to=fp8_e5m2, group_size=64": (8.250, 0.00251, 0.0025, False),
    "comet, bound=0.001176470588235294": (8.456, 3.74e-05, 3.65e-05, True),
    "comet, bound=0.002362204724409449": (7.449, 0.000151, 0.000147, True),
    "comet, bound=0.0047619047619047615": (6.438, 0.000612, 0.000598, True),
    "comet, bound=0.00967741935483871": (5.419, 0.00253, 0.00247, True),
    "comet, bound=0.02": (4.398, 0.0108, 0.0106, True),
    "division, bits=5": (5.258, 0.00914, 0.00559, True),
    "division, bits=5, rounding=dither": (5.258, 0.00457, 0.00279, True),
    "division, bits=7": (7.258, 0.000545, 0.000332, True),
    "division, bits=7, rounding=dither": (7.258, 0.000272, 0.000166, True),
    "group, bits=3, group_size=128": (3.250, 0.093, 0.0929, True),
    "group, bits=3, group_size=32": (4.000, 0.0574, 0.0569, True),
    "group, bits=4, group_size=128": (4.250, 0.0203, 0.0203, True),
    "group, bits=5, group_size=128": (5.250, 0.00477, 0.00475, True),
    "group, bits=5, group_size=32": (6.000, 0.00298, 0.00296, True),
    "group, bits=5, group_size=64": (5.500, 0.00387, 0.00384, True),
    "group, bits=6, group_size=128": (6.250, 0.00116, 0.00115, True),
    "group, bits=6, group_size=32": (7.000, 0.000736, 0.000728, True),
    "group, bits=7": (7.125, 0.000339, 0.000337, True),
    "group, bits=7, group_size=128": (7.250, 0.000287, 0.000285, True),
    "group, bits=7, group_size=32": (8.000, 0.000184, 0.000182, True),
    "group, bits=7, group_size=64": (7.500, 0.000234, 0.000231, True),
    "group, bits=8, group_size=128": (8.250, 7.1e-05, 7.11e-05, True),
    "group, bits=8, group_size=32": (9.000, 4.58e-05, 4.54e-05, True),
    "group, group_size=128": (2.250, 0.509, 0.503, True),
    "group, group_size=32": (3.000, 0.312, 0.31, True),
}
