"""Random numbers of attention's dropout: forward draws them, and backward draws them again.

Drawn      nothing is drawn
Random     the state of the device's random numbers before the run
DrawnBits  what was drawn, as one bit an element (CPU, the math path)
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from elbowroom.codecs.base import FLOATS
from elbowroom.kernels import ops

_WORTH_BITS = 1 << 16  # weights: drawing fewer is faster than intercepting the ops of the math path
_DIVIDES = (torch.ops.aten.div_.Tensor, torch.ops.aten.div_.Scalar)


class Drawn:
    """Random numbers that dropout draws; this base class is for a run that draws none."""

    def first(self) -> AbstractContextManager[Any]:
        """Context around the run of forward."""
        return nullcontext()

    def take(self) -> tuple[Tensor, ...]:
        """Returns the tensors that are to be saved."""
        return ()

    def again(self, *saved: Tensor) -> AbstractContextManager[Any]:
        """Context around a second run, which draws the same. saved: what `take` gave."""
        return nullcontext()

    def lean(self, *saved: Tensor) -> "LeanMask | None":
        """Returns the same for a run whose gradient is taken once; None: it takes no less so."""
        return None


class _Random(Drawn):
    """State of a device's random numbers before the run, by which it draws the same once more."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._state = self._get()

    def _get(self) -> Tensor:
        on_cpu = self._device.type == "cpu"
        return torch.get_rng_state() if on_cpu else torch.cuda.get_rng_state(self._device)

    def _set(self, state: Tensor) -> None:
        if self._device.type == "cpu":
            torch.set_rng_state(state)
        else:
            torch.cuda.set_rng_state(state, self._device)

    @contextmanager
    def again(self, *saved: Tensor) -> Iterator[None]:
        now = self._get()
        self._set(self._state)
        try:
            yield
        finally:
            self._set(now)


class DrawnBits(Drawn):
    """Random numbers of dropout held as one bit an element.

    Drawing takes a third of attention's time on a CPU. The math path draws by one call of
    `bernoulli_`, which is replaced in the second run.
    """

    def __init__(self) -> None:
        self._bits: list[Tensor] = []

    def first(self) -> AbstractContextManager[Any]:
        return _Bernoulli(self._note)

    def _note(self, run: Callable[[], Tensor]) -> Tensor:
        made = run()
        self._bits.append(ops.pack_bits(made.contiguous().view(-1)))
        return made

    def take(self) -> tuple[Tensor, ...]:
        taken, self._bits = tuple(self._bits), []
        return taken

    def again(self, *saved: Tensor) -> AbstractContextManager[Any]:
        rest = iter(saved)
        return _Bernoulli(lambda run: _fill(run.args[0], next(rest)))

    def lean(self, *saved: Tensor) -> "LeanMask | None":
        return LeanMask(saved[0]) if len(saved) == 1 else None


def _fill(x: Tensor, bits: Tensor) -> None:
    """Writes the ones and zeros that were drawn before into x."""
    flat = x.new_empty(x.numel()) if not x.is_contiguous() else x.view(-1)
    ops.unpack_bits(bits, 1.0, flat)
    if not x.is_contiguous():
        x.copy_(flat.view(x.shape))


class _Bernoulli(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that runs `instead`(the call) for each `bernoulli_`.

    changed  is called for each other op that changes a tensor in place, with its arguments
    """

    def __init__(
        self, instead: Callable[[partial[Tensor]], Any], changed: Callable[..., None] | None = None
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._instead, self._changed = instead, changed

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        run = partial(func, *args, **(kwargs or {}))
        if func is torch.ops.aten.bernoulli_.float:
            self._instead(run)
            return args[0]
        if self._changed is not None and func._schema.is_mutable and isinstance(args[0], Tensor):
            self._changed(func, *args)
        return run()


class LeanMask(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dropout's backward with one matrix of weights less at each of its two largest moments.

    The mask is held as bits, not as floats, while the gradient of the dropped weights is computed;
    then that gradient, which is private, is multiplied by the mask in place. The values are those
    of torch's own ops, so the bits are, too. Entered around backward.

    bits  what was drawn
    """

    def __init__(self, bits: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._bits = bits
        self._scales: list[Any] = []  # by which the drawn ones are divided
        self._at: int | None = None  # the address of the mask, as long as forward runs
        self._mask: Tensor | None = None  # the restored mask

    def drawing(self) -> AbstractContextManager[Any]:
        """Context around forward, in which it draws what was drawn before."""
        return _Bernoulli(self._give, self._changed)

    def _give(self, run: partial[Tensor]) -> None:
        mask: Tensor = run.args[0]
        _fill(mask, self._bits)
        self._at = mask.data_ptr() if mask.is_contiguous() else None

    def _changed(self, func: Any, x: Tensor, *rest: Any) -> None:
        """Notes the divisor of the mask; a mask that is changed otherwise is held as it is."""
        if x.data_ptr() != self._at:
            return
        if func in _DIVIDES and len(rest) == 1:
            self._scales.append(rest[0])
        else:
            self._at = None

    def pack(self, x: Tensor) -> Any:
        """Holds a saved tensor; for the mask, it holds what rebuilds it."""
        if x.data_ptr() == self._at and x.is_contiguous():
            self._at = None  # from here on another tensor may have this address
            return x.shape, x.dtype, x.device
        return x.detach()

    def unpack(self, held: Any) -> Tensor:
        if isinstance(held, Tensor):
            return held
        shape, dtype, device = held
        mask = torch.empty(shape, dtype=dtype, device=device)
        _fill(mask, self._bits)
        for scale in self._scales:
            mask.div_(scale)
        self._mask = mask
        return mask

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.mul.Tensor and self._mask is not None and args[1] is self._mask:
            mask, self._mask = self._mask, None
            if args[0].shape == mask.shape and args[0].dtype == mask.dtype:
                return args[0].mul_(mask)
        return func(*args, **(kwargs or {}))


def drawn_for(q: Tensor, k: Tensor, dropout_p: float, *, is_math: bool) -> Drawn:
    """Returns the object that draws the random numbers of one run.

    is_math: it runs without a fused kernel
    """
    if not dropout_p:
        return Drawn()
    weights = q.numel() // q.shape[-1] * k.shape[-2]
    on_cpu = type(q) is Tensor and q.device.type == "cpu" and q.dtype in FLOATS
    return DrawnBits() if on_cpu and is_math and weights >= _WORTH_BITS else _Random(q.device)
