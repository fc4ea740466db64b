"""Measures what codes of a compiled region add to its gradients, in one step of the program.

    forward    as it is; what it saves is dropped at once
    backward   forward again, and its backward, twice, each time with other seeds: g, then g'

    gErr2 = |g - g'|^2 / (2 g g')     over the gradients of all weights

The errors of two draws are independent and on average 0, so both parts are right on average. g'
is what the program gets. Of g, sums of its elements with random signs are held (`_Sketch`), a 64th
of its bytes: products of sketches have the mean of those of the gradients. So such a step takes
what a planned one takes, and a little more.

What forward draws from PyTorch's generators is drawn again, and small tensors that it may change
are copied. Whether the program changes others before backward is seen in a step before
(`Rehearsal`): then nothing is measured. Neither is a region whose results are views of each other
or of what it is given, or that is given views of one another.
"""

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, Self

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import get_gradient_edge

_SUMS = 4096  # of a sketch, at least: they are right within 2 %
_SHARE = 64  # elements for each sum of larger ones
_SMALL = 2**16  # bytes of what forward may change in place: of it, each run has a copy
Region = Callable[..., Any]


class _Watcher(Protocol):
    def run(self, region: Region, args: tuple[Any, ...]) -> Any: ...


class _Thread(threading.local):
    """The watcher of the step that runs on this thread, if there is one."""

    watcher: "_Watcher | None" = None


_thread = _Thread()


def redrawable(region: Region) -> Region:
    """The region, which a `Rehearsal` or a `Redraw` may watch."""

    def run(*args: Any) -> Any:
        watcher = _thread.watcher
        if watcher is None or not torch.is_grad_enabled():
            return region(*args)
        return watcher.run(region, args)

    return run


class _Watching:
    """A context in which a forward runs; the first region in it is watched."""

    def __init__(self) -> None:
        self._outer: _Watcher | None = None

    def __enter__(self) -> Self:
        self._outer, _thread.watcher = _thread.watcher, self
        return self

    def __exit__(self, *_: object) -> None:
        _thread.watcher, self._outer = self._outer, None

    def run(self, region: Region, args: tuple[Any, ...]) -> Any:
        _thread.watcher = None
        return self._run(region, args)

    def _run(self, region: Region, args: tuple[Any, ...]) -> Any:
        raise NotImplementedError


class Rehearsal(_Watching):
    """A step that shows whether forward could run again in backward.

    is_steady  whether what the region is given is there then, as it was; None: not known (yet)
    """

    is_steady: bool | None = None

    def _run(self, region: Region, args: tuple[Any, ...]) -> Any:
        out = region(*args)
        given = _tensors_in(args)
        if not _may_run_again(out, given):
            self.is_steady = False
            return out
        seen = [(weakref.ref(x), x._version) for x in given if x.nbytes > _SMALL]

        def look(_: object) -> None:
            now = [(one(), version) for one, version in seen]
            self.is_steady = all(x is not None and x._version == version for x, version in now)

        node = next(x.grad_fn for x in out if x.requires_grad)
        node.register_prehook(look)
        return out


class Redraw(_Watching):
    """A step in which a region draws its codes twice, after a rehearsal.

    error  what the codes add, as a share of the squared gradient; None: not known (yet)
    """

    def __init__(self, left_nbytes: float, forward_nbytes: float) -> None:
        """left_nbytes: that it may take beside backward; forward_nbytes: beside forward."""
        super().__init__()
        self.error: float | None = None
        self._left_nbytes, self._forward_nbytes = left_nbytes, forward_nbytes

    def _run(self, region: Region, args: tuple[Any, ...]) -> Any:
        given = _tensors_in(args)
        held = _Sketch.nbytes_for(given) + sum(x.nbytes for x in given if _is_copied(x))
        if held > self._left_nbytes:
            return region(*args)
        again = _Again(region, args)
        out = region(*args)
        # Of the second run's results, only the nodes are held until its backward.
        taken = sum(x.nbytes for x in _tensors_in(out))
        if held + taken > self._forward_nbytes or not _may_run_again(out, given):
            return out
        again.needed = [x.requires_grad for x in out]
        results = [x.detach() for x in out]
        kind = type(out)
        del out  # and what it has saved
        made: Any = _Redrawn
        return kind(made.apply(self, again, results, *again.held))

    def compare(self, first: "_Sketch", second: "_Sketch") -> None:
        """Sets `error` by the sketches of two draws."""
        one, two = first.sums.double(), second.sums.double()
        product = float((one * two).sum())
        if product > 0:
            self.error = float((one - two).square().sum()) / 2 / product


class _Again:
    """A call of a region that can be made again.

    held    arguments that are held as they are: those that have gradients, and large ones
    needed  which of its results have gradients
    """

    def __init__(self, region: Region, args: tuple[Any, ...]) -> None:
        self._region = region
        self._places = [
            at for at, x in enumerate(args) if isinstance(x, Tensor) and not _is_copied(x)
        ]
        self.held = [args[at] for at in self._places]
        self.needed: list[bool] = []
        self._args = list(args)
        for at, x in enumerate(args):
            if isinstance(x, Tensor):
                self._args[at] = x.detach().clone() if _is_copied(x) else None
        self._devices = sorted({x.device.index for x in _tensors_in(args) if x.is_cuda})
        self._generators = [torch.get_rng_state(), *map(torch.cuda.get_rng_state, self._devices)]

    def gradients(self, given: Sequence[Tensor], held: Sequence[Tensor]) -> list[Tensor | None]:
        """Runs forward and backward. given: gradients of its results; held: see above."""
        held = [x.detach().requires_grad_(x.requires_grad) for x in held]
        args = [x.clone() if isinstance(x, Tensor) else x for x in self._args]
        for at, x in zip(self._places, held, strict=True):
            args[at] = x
        with torch.enable_grad(), self._as_drawn():
            out = self._region(*args)
            del args
            chosen = [at for at, is_needed in enumerate(self.needed) if is_needed]
            nodes = [get_gradient_edge(out[at]) for at in chosen]
            del out
            leaves = [x for x in held if x.requires_grad]
            wanted = [given[at] for at in chosen]
            found = iter(torch.autograd.grad(nodes, leaves, wanted, allow_unused=True))
        return [next(found) if x.requires_grad else None for x in held]

    @contextmanager
    def _as_drawn(self) -> Iterator[None]:
        """Has generators give the numbers of the first run."""
        with torch.random.fork_rng(self._devices):
            torch.set_rng_state(self._generators[0])
            for device, state in zip(self._devices, self._generators[1:], strict=True):
                torch.cuda.set_rng_state(state, device)
            yield


class _Redrawn(torch.autograd.Function):
    """Stands for the node of a region; a change of what it is given is an error."""

    @staticmethod
    def forward(
        ctx: Any, redraw: Redraw, again: _Again, results: list[Tensor], *held: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.redraw, ctx.again = redraw, again
        ctx.save_for_backward(*held)
        needed = zip(results, again.needed, strict=True)
        ctx.mark_non_differentiable(*(x for x, is_needed in needed if not is_needed))
        again.held = []
        return tuple(results)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *given: Tensor) -> tuple[Any, ...]:
        held = ctx.saved_tensors
        found = ctx.again.gradients(given, held)
        first = _Sketch(found, held)
        del found
        found = ctx.again.gradients(given, held)
        ctx.redraw.compare(first, _Sketch(found, held))
        return None, None, None, *found


class _Sketch:
    """Sums of the elements of many gradients with random signs, the same in each sketch."""

    def __init__(self, gradients: Sequence[Tensor | None], of: Sequence[Tensor]) -> None:
        """Makes a sketch of the gradients that belong to weights. of: what each belongs to."""
        width = _width(of)
        self.sums = torch.zeros(width, device=of[0].device)
        for at, (gradient, x) in enumerate(zip(gradients, of, strict=True)):
            if gradient is not None and x.is_leaf and gradient.numel():
                self._add(gradient, at)

    @staticmethod
    def nbytes_for(given: Sequence[Tensor]) -> int:
        """Returns the bytes of two sketches."""
        return 8 * _width(given)

    def _add(self, x: Tensor, seed: int) -> None:
        width = len(self.sums)
        generator = torch.Generator(device=x.device)
        generator.manual_seed(seed)
        # Row by row, so that no more than a few sums are copied at once.
        rows = torch.split(x, max(width * x.shape[0] // x.numel(), 1)) if x.dim() else [x]
        for part in rows:
            for one in torch.split(part.reshape(-1), width):
                signs = torch.randint(2, (one.numel(),), generator=generator, device=x.device)
                self.sums[: one.numel()] += one * signs.mul_(2).sub_(1)


def _width(given: Sequence[Tensor]) -> int:
    """The number of sums for the gradients of these."""
    elements = sum(x.numel() for x in given if x.requires_grad and x.is_leaf)
    return max(elements // _SHARE, _SUMS)


def _is_copied(x: Tensor) -> bool:
    """Returns whether each run of forward gets a copy of an argument, which it may change."""
    return x.nbytes <= _SMALL and not x.requires_grad


def _may_run_again(out: Any, given: Sequence[Tensor]) -> bool:
    """Returns whether results are tensors with memory of their own, and so are arguments."""
    if not isinstance(out, list | tuple) or len(_tensors_in(out)) < len(out):
        return False
    tensors = [*out, *given]
    if not all(x.layout is torch.strided for x in tensors):
        return False
    addresses = {x.untyped_storage()._cdata for x in tensors}
    return len(addresses) == len(tensors) and any(x.requires_grad for x in out)


def _tensors_in(values: Sequence[Any]) -> list[Tensor]:
    return [x for x in values if isinstance(x, Tensor)]
