"""Tensors that a call saves are dropped, and made again by running the call once more in backward.

As PyTorch's non-reentrant checkpoint does it, with three functions of Python for each saved tensor
where that enters 25. A call saves the same tensors in the same order whenever it runs.

    Dropped      what autograd holds in place of a saved tensor
    DroppedCall  one call. The first Dropped that backward asks for runs it again, which fills all
                 that are alive; the run ends with the last of them. Each is given out once, so that
                 nothing outlives its use. A second backward (`retain_graph`) runs the call again:
                 parameters may have changed since. A few bytes of every other tensor are compared
                 with those of forward, except on a GPU: the call may read more than is known of it.
                 They are bytes of results that have a graph: what an op makes for its own backward
                 may have parts that it did not write
    Ambient      torch's own state that the call depends on: autocast, the default device, what
                 chooses kernels, and the default generators of random numbers

The inputs are saved through the hooks around the call. So such calls may lie in checkpoints of
the user's and these in them: the inner one's inputs are tensors that the outer one saves. Backward
may run inside of the call, on what it has saved so far.
"""

import weakref
from collections.abc import Callable, Iterable, Sequence
from ctypes import c_char
from functools import cache
from operator import call
from typing import Any

import torch
from torch import Tensor
from torch.utils._device import DeviceContext

from elbowroom.errors import RestoreError
from elbowroom.runtime.calls import dynamo_looks
from elbowroom.runtime.compiler import eagerly
from elbowroom.runtime.kernel_settings import OF_MODULES, set_kernels
from elbowroom.runtime.own_hooks import OwnHooks
from elbowroom.runtime.transforms import outside

_backward_now = torch._C._current_graph_task_id
_are_batched = torch._C._dispatch_tls_is_dispatch_key_included
_are_transformed = torch._C._are_functorch_transforms_active
_NO_BACKWARD = -1
_Sample = c_char * 32  # bytes
_ROUNDING = 1e-3  # of the largest value of a sample


class Dropped:
    """Place of a saved tensor.

    tensor: as the call has made it again, until it is given out
    """

    __slots__ = ("__weakref__", "region", "tensor")

    region: "DroppedCall"
    tensor: Tensor | None


class DroppedCall:
    """A call whose saved tensors are dropped.

    backward: number of the one for which it ran again last
    """

    __slots__ = (
        *("_again", "_ambient", "_current", "_dropped", "_inputs", "_name", "_samples"),
        "_compares",
        "backward",
    )

    def __init__(
        self,
        name: str,
        inputs: Sequence[Tensor],
        again: Callable[[list[Tensor]], Any],
        current: Callable[[Tensor], Tensor] = lambda x: x,
        *,
        compares: bool = True,
    ) -> None:
        """name: in errors. again: runs the call with its inputs, which are saved at once.

        current: gives what backward reads for a tensor that the second run saves
        compares: the second run makes the same values, unless something has changed that it reads
        """
        self._name, self._again, self._current = name, again, current
        self._ambient = Ambient(_default_generators(inputs))
        self._inputs = save(inputs)
        self._dropped: list[tuple[Any, torch.Size, torch.dtype, torch.device, bytes | None]] = []
        self.backward = _NO_BACKWARD
        self._compares = compares
        self._samples = False  # of every other tensor, from the second on

    def first(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls it for the first time, and drops what it saves."""
        with OwnHooks(self._drop, _unpack):
            return call(*args, **kwargs)

    @property
    def saves(self) -> int:
        """Number of tensors that the call has saved."""
        return len(self._dropped)

    def _drop(self, x: Tensor) -> Dropped:
        held = Dropped()
        held.region, held.tensor = self, None
        sample = _sample_of(x) if self._samples and not x.is_leaf else None
        self._samples = self._compares and not self._samples
        self._dropped.append((weakref.ref(held), x.shape, x.dtype, x.device, sample))
        return held

    def make(self, wanted: Dropped) -> Tensor:
        """Runs the call again, and returns one of its tensors; the others wait in their places."""
        dropped, at = self._dropped, -1
        last = len(dropped) - 1
        while dropped[last][0]() is None:  # it ends at `wanted`
            last -= 1

        def fill(x: Tensor) -> Tensor:
            nonlocal at
            at += 1
            sample = None if at > last or dropped[at][-1] is None else _sample_of(x)
            x = self._current(x)
            if x.requires_grad:  # without this run's graph, which would hold itself by its results
                x = x.detach()
            if at > last:  # the exception below was caught
                raise _AllMade
            ref, shape, dtype, device, before = dropped[at]
            held = ref()
            if held is not None:
                if x.shape != shape or x.dtype is not dtype or x.device != device:
                    now, then = (x.shape, x.dtype, x.device), (shape, dtype, device)
                    raise self._differs(f"the tensor {at} is {_words(*now)}, not {_words(*then)}")
                held.tensor = x
            if sample != before and not _are_close(sample, before, dtype):
                raise self._differs(
                    f"the tensor {at} has other values, so something has changed since that it "
                    "reads besides its inputs and attributes (a global, a class, a closure)"
                )
            if at == last:
                raise _AllMade
            return x

        inputs = self._inputs()
        again: Any = self._again
        if dynamo_looks():  # which would compile it: `backward` was called by compiled code
            again = torch.compiler.disable(again)  # type: ignore[no-untyped-call]
        if _are_batched("VmapMode") or _are_transformed():
            again = outside(again)
        before, gradients = self._ambient.replace(), torch.is_grad_enabled()
        torch._C._set_grad_enabled(True)
        torch.autocast_increment_nesting()
        try:
            with OwnHooks(fill, _given), eagerly():  # as in forward
                self._ambient.run(again, inputs)
        except _AllMade:
            pass
        except RestoreError:
            raise
        except Exception:
            if at < last:  # else it is `_AllMade` as TorchScript passes it on
                raise
        finally:
            if not torch.autocast_decrement_nesting():
                torch.clear_autocast_cache()
            torch._C._set_grad_enabled(gradients)
            before.replace()
        if at < last:
            raise self._differs(f"{at + 1} tensors, not {last + 1} or more")
        x, wanted.tensor = wanted.tensor, None
        self.backward = _backward_now()
        if self.backward == _NO_BACKWARD:  # somebody looks at one saved tensor
            for ref, *_ in dropped:
                if (held := ref()) is not None:
                    held.tensor = None
        assert x is not None
        return x

    def _differs(self, what: str) -> RestoreError:
        return RestoreError(
            f"'{self._name}' runs again in backward, and has saved other tensors than in forward: "
            f"{what}. It must do the same for the same inputs; leave it out of what is recomputed"
        )


class _AllMade(BaseException):
    """Ends a second run: it has saved all that is wanted.

    It is not an Exception, so that no error handler inside of the call catches it.
    """


def _unpack(held: Dropped) -> Tensor:
    x, region = held.tensor, held.region
    if x is None or region.backward != _backward_now():
        return region.make(held)
    held.tensor = None
    return x


def _given(x: Tensor) -> Tensor:
    """Returns x to a backward that runs inside of the second run, on its graph."""
    return x


def _sample_of(x: Tensor) -> bytes | None:
    """Returns a few bytes of a tensor; None where it has none, or the host would wait."""
    if not x.is_cpu or type(x) is not Tensor or x.layout is not torch.strided:
        return None
    nbytes = x.nbytes
    if nbytes < 64 or not x.is_contiguous():
        return None
    sample: bytes = _Sample.from_address(x.data_ptr() + nbytes // 2).raw
    return sample


def _are_close(one: bytes | None, other: bytes | None, dtype: torch.dtype) -> bool:
    """Returns whether samples differ by a rounding, as of a kernel that adds in any order."""
    if one is None or other is None or not (dtype.is_floating_point or dtype.is_complex):
        return False
    exactly = torch.complex128 if dtype.is_complex else torch.float64
    now, before = (torch.frombuffer(bytearray(x), dtype=dtype).to(exactly) for x in (one, other))
    finite = before[before.isfinite()].abs()
    size = float(finite.max()) if len(finite) else 0.0
    return torch.allclose(now, before, rtol=_ROUNDING, atol=_ROUNDING * size, equal_nan=True)


def _words(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> str:
    return f"{str(dtype).removeprefix('torch.')} {tuple(shape)} on {device}"


class _Saves(torch.autograd.Function):
    """Saves tensors through the hooks that are open, as a node that has no backward."""

    @staticmethod
    def forward(ctx: Any, _: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return torch.empty(0)


def save(tensors: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
    """Saves tensors through the hooks that are open; returns a function that restores them."""
    make = getattr(torch._C._autograd, "_make_saved_tensor", None)
    if make is None:  # in torch 2.11
        saves: Any = _Saves
        made = saves.apply(torch.empty(0, requires_grad=True), *tensors)
        return lambda: list(made.grad_fn.saved_tensors)
    saved = [make(x, is_output=False) for x in tensors]
    return lambda: [one.unpack() for one in saved]


class Ambient:
    """State of torch that a call depends on, as it is now."""

    __slots__ = ("_autocast", "_device", "_kernels", "_random")

    def __init__(self, generators: Iterable[torch.Generator]) -> None:
        self._random = [(one, one.get_state()) for one in generators]
        self._autocast, self._kernels = _autocast(), tuple(map(call, OF_MODULES))
        self._device: torch.device | None = None
        if torch._C._len_torch_function_stack():
            lowest = torch._C._get_function_stack_at(0)  # where torch puts the default device
            self._device = lowest.device if isinstance(lowest, DeviceContext) else None

    def replace(self) -> "Ambient":
        """Sets random numbers, autocast and kernels as they are here; returns what was before."""
        before = Ambient(one for one, _ in self._random)
        for one, state in self._random:
            one.set_state(state)
        if self._kernels != before._kernels:
            set_kernels(self._kernels)
        if self._autocast != before._autocast:
            caches, *kinds = self._autocast
            torch.set_autocast_cache_enabled(caches)
            for kind, is_on, dtype in kinds:
                torch.set_autocast_enabled(kind, is_on)
                torch.set_autocast_dtype(kind, dtype)
        return before

    def run(self, call: Callable[[list[Tensor]], Any], inputs: list[Tensor]) -> None:
        """Runs a call where its tensors were made."""
        if self._device is None:
            call(inputs)
        else:
            with DeviceContext(self._device):
                call(inputs)


def _autocast() -> tuple[Any, ...]:
    """Returns whether autocast caches, and for each kind of device whether it is on, and dtype."""
    kinds = [
        (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in _kinds()
    ]
    return torch.is_autocast_cache_enabled(), *kinds


@cache
def _kinds() -> tuple[str, ...]:
    """Returns the kinds of devices that this process has, and that have autocast."""
    accelerator = torch.accelerator.current_accelerator()
    kinds = {"cpu"} if accelerator is None else {"cpu", accelerator.type}
    return tuple(sorted(filter(torch.amp.is_autocast_available, kinds)))


def _default_generators(tensors: Iterable[Tensor]) -> list[torch.Generator]:
    """Returns the generators that random numbers beside these tensors are drawn from."""
    devices = {x.device for x in tensors}
    return [torch.default_generator, *filter(None, map(_default_generator, devices))]


@cache
def _default_generator(device: torch.device) -> torch.Generator | None:
    if device.type in ("cpu", "meta"):
        return None
    if device.type == "mps":
        return torch.mps._get_default_mps_generator()
    generators: Any = torch.get_device_module(device.type).default_generators
    found: torch.Generator = generators[device.index or 0]
    return found
