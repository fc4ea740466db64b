"""A step that is not run, as a `Profile`: no memory, no data, only shapes.

    1. the model, its optimizer and a batch become fake tensors             (`Fakes`)
    2. a step of these, in which optimizer states come into being
    3. another one under the recorder: bytes are counted, seconds estimated (`Counting`)

Nothing is done to what is saved, so the peak is that of plain autograd. The ops are those that the
device would run, because fake tensors pass for its own; their workspaces are not seen. A step that
looks at a value (`loss.item()`, a boolean index) cannot run dry.
"""

import copy
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
    unset_fake_temporarily,
)
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from elbowroom._checks import check_scalar
from elbowroom.errors import PlanError
from elbowroom.measure.clocks import levels_of
from elbowroom.measure.rates import rates
from elbowroom.measure.record import check_saves, run_recorded
from elbowroom.measure.resident_bytes import resident_bytes_of
from elbowroom.measure.roofline import Speed, speed_of
from elbowroom.plan import KeepAll
from elbowroom.plan.profile import Profile
from elbowroom.runtime.storage import taken_for_plain

Loss = Callable[[nn.Module, Any], Tensor]
_NEED_VALUES = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)


def dry_run(
    model: nn.Module,
    make_batch: Callable[[], Any],
    loss: Loss,
    optimizer: Optimizer | None,
    *,
    device: torch.device,
    min_nbytes: int,
    speed: Speed | None,
) -> Profile:
    """Records a dry run of a step.

    Raises PlanError for a step that looks at values, or saves nothing.
    """
    counting = Counting(speed or speed_of(device.type), device.type)
    with _pretending(), counting:
        step = _fake_step(model, make_batch, loss, optimizer, device)
        step()
        counting.start()
        static = counting.level
        recorder = run_recorded(step, counting, KeepAll(), min_nbytes, counting)
    check_saves(recorder)
    levels, floors = counting.levels()
    speeds = rates(device.type) if speed is None else None
    return Profile(
        level=tuple(levels),
        floor=tuple(floors),
        starts_s=tuple(counting.starts_s),
        backward=recorder.moments - 1 if recorder.backward is None else recorder.backward,
        seconds=counting.seconds,
        static=static,
        storages=recorder.storages(),
        modules=recorder.modules(),
        rates={} if speeds is None else speeds,
        fixed_s={} if speeds is None else speeds.fixed_s,
        unlisted_nbytes=recorder.unlisted_nbytes,
        device=(device.type, ""),
        measured=False,
        standing=resident_bytes_of(model, [] if optimizer is None else [optimizer]),
    )


@contextmanager
def _pretending() -> Iterator[None]:
    """Makes new tensors fake inside this context, and plain to the hooks; RNG stays as it is."""
    try:
        with (
            torch.random.fork_rng(devices=[]),
            taken_for_plain(FakeTensor),
            FakeTensorMode(allow_non_fake_inputs=True),
        ):
            yield
    except _NEED_VALUES as error:
        raise PlanError(
            f"a dry run has shapes but no values, and this step needs values for {error.func}; "
            "leave it out of `loss` (or leave out the optimizer that needs it), or measure a real "
            "step with er.measure"
        ) from error


def _fake_step(
    model: nn.Module,
    make_batch: Callable[[], Any],
    loss: Loss,
    optimizer: Optimizer | None,
    device: torch.device,
) -> Callable[[], None]:
    """A training step of stand-ins."""
    fakes = Fakes(device)
    twin, update = fakes.copy((model, optimizer))
    batch = fakes.batch(make_batch())

    def step() -> None:
        check_scalar(loss(twin, batch)).backward()  # type: ignore[no-untyped-call]
        if update is not None:
            update.step()
        twin.zero_grad(set_to_none=True)

    twin.zero_grad(set_to_none=True)
    return step


T = TypeVar("T")
_DATA = torch.Tensor.data.__get__  # type: ignore[attr-defined]


class Fakes:
    """Makes stand-ins on `device`; to be used under a FakeTensorMode.

    A real or meta storage becomes one fake storage of the same size, so tied weights and views stay
    so. Of the originals only shapes are read, except for single numbers in host memory, such as an
    optimizer's count of steps.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # By the address of the original, which is held: nobody else may get it meanwhile.
        self._storages: dict[int, tuple[torch.UntypedStorage, Tensor]] = {}

    def copy(self, value: T) -> T:
        """A deep copy, in which every tensor is a stand-in. Raises PlanError if there is none."""
        try:
            with _Copying(self):
                return copy.deepcopy(value)
        except Exception as error:
            raise PlanError(
                f"a dry run works on a copy of the model and its optimizer, and deepcopy fails: "
                f"{error}. Use a model that can be copied, or measure a real step with er.measure"
            ) from error

    def batch(self, values: Any) -> Any:
        """Returns the same structure with stand-ins."""
        return tree_map(self._stand_in_for, values)

    def _stand_in_for(self, value: Any) -> Any:
        is_one = isinstance(value, FakeTensor) and value.device == self._device
        return value if is_one or not isinstance(value, Tensor) else self.of(value)

    def of(self, x: Tensor) -> Tensor:
        """The stand-in for one tensor, without its history."""
        if x.layout is not torch.strided:
            raise PlanError(
                f"a dry run supports dense tensors only; got a tensor of layout {x.layout}"
            )
        if x.dim() == 0 and x.device.type == "cpu" and not x.requires_grad:
            with unset_fake_temporarily():
                number = x.item()
            return torch.tensor(number, dtype=x.dtype)
        storage = x.untyped_storage()
        if storage._cdata not in self._storages:
            n = storage.nbytes() // x.element_size()
            blank = torch.empty(n, dtype=x.dtype, device=self._device)
            self._storages[storage._cdata] = storage, blank
        flat = self._storages[storage._cdata][1].view(x.dtype)
        fake = flat.as_strided(x.shape, x.stride(), x.storage_offset()).detach()
        return fake.requires_grad_(x.requires_grad)


class _Copying(TorchFunctionMode):
    """Function mode in which `copy.deepcopy` gives stand-ins for tensors."""

    def __init__(self, fakes: Fakes) -> None:
        super().__init__()
        self._fakes = fakes

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__deepcopy__:
            x, memo = args
            with torch._C.DisableTorchFunction():
                return memo.setdefault(id(x), self._fakes.of(x))
        if func == _DATA:  # a parameter is copied as parameter.data.clone()
            with torch._C.DisableTorchFunction():
                return self._fakes.of(args[0])
        if func is torch.Tensor.clone and isinstance(args[0], FakeTensor):
            return args[0]
        return func(*args, **(kwargs or {}))


_CUDA_BLOCK = 512  # bytes: what its caching allocator rounds a request up to


class Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A clock for `StepRecorder`, whose time and memory are arithmetic.

    A fake tensor has a storage with a size, but no memory. The storage of each result is added to
    the level when it is made, and subtracted when it is freed. Memory that an op allocates and
    frees inside (a workspace, a reordered weight) is not seen. Seconds are those of the roofline
    model, one op after another.

    level    bytes of all storages that were born under this mode, and are alive
    seconds  of all ops under this mode
    """

    def __init__(self, speed: Speed, device_type: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._speed = speed
        self._block = _CUDA_BLOCK if device_type == "cuda" else 1
        self._alive: dict[int, int] = {}  # bytes by the address of the storage
        self._begun: list[tuple[int, float, bool]] = []  # first change, seconds, frees
        self._changes: list[int] = []  # the level after each
        self._read_s: list[float] = []
        self.level = 0
        self.seconds = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        written = _tensors(out)
        for x in written:
            if x.layout is torch.strided:  # else its parts were counted as they were made
                self._count(x)
        passed = [*_tensors((args, kwargs)), *written]
        self.seconds += self._speed.seconds(func, args, {**kwargs, "out_val": out}, passed)
        return out

    def read(self) -> int:
        """Returns the number of a reading of the seconds so far, as the recorder's timer."""
        self._read_s.append(self.seconds)
        return len(self._read_s) - 1

    def paused(self) -> AbstractContextManager[None]:
        """Returns a context that changes nothing: looking is no op."""
        return nullcontext()

    def seconds_at(self, readings: Sequence[int]) -> list[float]:
        """Returns what was read."""
        return [self._read_s[reading] for reading in readings]

    def start(self) -> None:
        """Begins a step: what is counted already was there before."""
        self._begun.clear()
        self._changes = [self.level]
        self.seconds = 0.0

    def begin(self, moment: int, *, frees: bool = False) -> None:
        """Begins a moment, as the clock of the recorder."""
        self._begun.append((len(self._changes), self.seconds, frees))

    @property
    def starts_s(self) -> list[float]:
        """The start of each moment, in seconds."""
        return [at_s for _, at_s, _ in self._begun]

    def levels(self) -> tuple[list[int], list[int]]:
        """The highest level in each moment, and that at its beginning, in bytes."""
        firsts = [first for first, *_ in self._begun]
        return levels_of(self._changes, firsts, [frees for *_, frees in self._begun])

    def _count(self, x: Tensor) -> None:
        storage = x.untyped_storage()
        address, nbytes = storage._cdata, storage.nbytes()
        if nbytes and address not in self._alive:
            self._alive[address] = -(-nbytes // self._block) * self._block
            self._change(self._alive[address])
            weakref.finalize(storage, self._freed, address).atexit = False

    def _freed(self, address: int) -> None:
        self._change(-self._alive.pop(address))

    def _change(self, nbytes: int) -> None:
        self.level += nbytes
        self._changes.append(self.level)


def _tensors(values: Any) -> list[Tensor]:
    return [x for x in tree_leaves(values) if isinstance(x, FakeTensor)]
