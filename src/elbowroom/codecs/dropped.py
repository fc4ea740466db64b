"""Codecs of other packages that were found not to do what they declare: no plan uses them.

They are found before a plan is made, on drawn data (`quality.broken_promise`), or in training, on
the tensors of the step (`broken_code`, `encoded_or_dropped`).
"""

import logging
from collections import Counter
from collections.abc import Callable
from math import sqrt

import torch
from torch import Tensor

from elbowroom.codecs.affine import Affine
from elbowroom.codecs.base import Codec, Encoded, memory_order
from elbowroom.codecs.quality import DESTROYED, is_own, quality_of, states_of
from elbowroom.errors import CodecError
from elbowroom.kernels.fakes import would_wait

_log = logging.getLogger("elbowroom.codecs")
_dropped: dict[type[Codec], str] = {}
_suspects: set[type[Codec]] = set()
_made: Counter[type[Codec]] = Counter()
_SAMPLED = 256  # elements
_ONE_OF = 32  # codes of a settled step is decoded at once: a codec may turn wrong later
_MAX = 16  # times the error for normal data: an outlier makes the steps of its group wider
_SCALE = 0.25  # by which unbiased codes may make all values smaller or larger
_SHIFT, _SIGMAS = 0.02, 8.0  # their mean error: of the root mean square, and in its deviations


def drop(cls: type[Codec], why: str) -> None:
    """Leaves a codec out of all plans from now on, and warns of it once."""
    if cls not in _dropped:
        _dropped[cls] = why
        _log.warning(
            "codec '%s' is left out of all plans, because it does not do what it declares: %s",
            cls.id,
            why,
        )


def why_dropped(cls: type[Codec]) -> str:
    """Returns why a codec is left out of plans; "" if it is not."""
    return _dropped.get(cls, "")


def dropped() -> int:
    """Returns how many codecs have been dropped so far."""
    return len(_dropped)


def encoded_or_dropped(
    codec: Codec, x: Tensor, affine: Affine | None, encode: Callable[[], Encoded], *, decodes: bool
) -> Encoded | None:
    """Returns what `encode` makes of x; None if the codec fails or lies, and is dropped for that.

    decodes: the code is decoded at once, so that its values are checked, and not only its size;
        one of 32 others is, too

    Raises CodecError if the codec has changed x.
    """
    cls, version = type(codec), x._version
    if cls in _dropped:
        return None
    _made[cls] += 1
    decodes |= _made[cls] % _ONE_OF == 0 and not would_wait(x)
    try:
        encoded = encode()
        why = broken_code(codec, x, affine, encoded, decodes=decodes)
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        why = f"it fails: {type(error).__name__}: {error}"
    if x._version != version:
        drop(cls, "it changes the tensor that it encodes")
        raise CodecError(
            f"codec '{codec.id}' has changed the tensor that it was to encode, so this step is "
            "wrong; repeat it from its batch on. No later plan uses this codec."
        )
    if why:
        drop(cls, why)
        return None
    return encoded


def refuse_undecodable(encoded: Encoded, error: Exception) -> None:
    """Raises CodecError for a code that a codec of another package fails to decode in backward.

    Nothing else holds the tensor, so no gradient can be had. The codec is dropped.
    """
    cls = type(encoded.codec)
    if is_own(cls):
        return
    drop(cls, f"it fails: {type(error).__name__}: {error}")
    raise CodecError(
        f"codec '{cls.id}' cannot decode what it has made of {encoded.dtype} of shape "
        f"{encoded.shape} ({type(error).__name__}: {error}), and nothing else holds the tensor. "
        "Repeat the step: no later plan uses this codec."
    ) from error


def broken_code(
    codec: Codec, x: Tensor, affine: Affine | None, encoded: Encoded, *, decodes: bool
) -> str:
    """Returns in words which declared property of the codec this code lacks; "" if none."""
    if not isinstance(encoded, Encoded):
        return f"it encodes to {type(encoded).__name__}"
    shape, what = tuple(x.shape), f"{x.dtype} of shape {tuple(x.shape)}".removeprefix("torch.")
    said, held = codec.encoded_nbytes(shape, x.dtype, encoded.facts), encoded.nbytes
    if encoded.raw:
        said = x.nbytes
    is_exact = codec.fixed_size(encoded.facts) or encoded.raw
    if held > said or (is_exact and held != said):
        return f"it says {said} bytes of {what}, and holds {held}"
    storage = x.untyped_storage()._cdata
    if any(buffer.untyped_storage()._cdata == storage for buffer in encoded.buffers):
        return "its code lies in the memory of the tensor, which is then never freed"
    if any(buffer.requires_grad for buffer in encoded.buffers):
        return "its code requires a gradient, so it holds what it was made of"
    if not (encoded.raw or all(map(_is_finite, encoded.buffers))) and _is_finite(x):
        return "its code is not finite, and the tensor is"
    decodes = decodes or type(codec) in _suspects
    return _broken_values(codec, x, affine, encoded) if decodes and x.numel() else ""


def suspect(encoded: Encoded, decoded: Tensor) -> None:
    """Has later codes of a codec decoded at once if it gives back what is not finite in backward.

    It may be right: of such a tensor. Some elements are looked at, of codecs of other packages.
    """
    cls = type(encoded.codec)
    if cls in _suspects or is_own(cls):
        return
    flat, n = memory_order(decoded)[0], max(decoded.numel() // _SAMPLED, 1)
    if not _is_finite(flat[::n]):
        _suspects.add(cls)
        _log.warning(
            "codec '%s' has given back what is not finite, so gradients of this step are not; its "
            "next codes are decoded at once, and it is left out of plans if it is wrong",
            cls.id,
        )


def _is_finite(x: Tensor) -> bool:
    """Returns whether all elements are finite; True of integers, and where the host would wait."""
    if not x.is_floating_point() or not x.numel() or would_wait(x):
        return True
    return float(x.detach().float().abs().amax()) < float("inf")


def _broken_values(codec: Codec, x: Tensor, affine: Affine | None, encoded: Encoded) -> str:
    before = states_of(encoded)
    flat, y = memory_order(x.detach())[0], encoded.decode().detach()
    if states_of(encoded) != before:
        return DESTROYED
    if y.shape != x.shape or y.dtype is not x.dtype:
        return f"it gives back {y.dtype} of shape {tuple(y.shape)} for {x.dtype} of {x.shape}"
    exact, found = flat if affine is None else affine.of(flat), memory_order(y)[0]
    if codec.lossless or encoded.raw:
        return "" if torch.equal(exact, found) else "it is lossless, and gives back other values"
    exact, found = exact.float(), found.float()
    size, product = float(exact.square().sum()), float(exact @ found)
    shift = float(found.sum(dtype=torch.float64) - exact.sum(dtype=torch.float64)) / len(exact)
    error = float((found - exact).square_().sum())
    if not size < float("inf"):
        return ""  # of a NaN nothing is promised
    if not error < float("inf"):
        return "it gives back what is not finite"
    known = quality_of(codec, maps=x.dim() >= 4)
    if error > _MAX * known.error * size:
        relative = error / max(size, 1e-30)
        return (
            f"its squared error is {relative:.2g} of the tensor's square, and {known.error:.2g} of "
            "that of a normal tensor"
        )
    if known.unbiased and abs(product - size) > _SCALE * size:
        return f"its values are {product / size:.2g} times what they should be"
    limit = _SHIFT * sqrt(size / len(exact)) + _SIGMAS * sqrt(error) / len(exact)
    if known.unbiased and abs(shift) > limit:
        return f"its values are off by {shift:.2g} on average, and by nothing for a normal tensor"
    return ""
