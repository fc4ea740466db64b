"""Script of a settled forward, op by op: the tracer writes it, and `Replay` replays it.

    ScriptedCall  one call from Python to torch: its guards, and what it saves
    ScriptedSave  one tensor that an op saves: its geometry, and the slot that it goes to
    Instruction  the value that a slot gets, and when: as it is saved, or before or after an op has
                 run
    Ref       a tensor of this forward that a recipe or a code reads: a statistic, as it was saved

A script is made of numbers. It holds no tensor of the step that it was written from; of the model
it holds parameters, which recipes read.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from elbowroom.plan import Action, Encode, Need, SiteName
from elbowroom.runtime.consumers import Levels
from elbowroom.runtime.direct import Direct
from elbowroom.runtime.handles.rebuild import Op
from elbowroom.runtime.ledger import Counts
from elbowroom.runtime.modules import Counts as CallCounts
from elbowroom.runtime.normal import Statistics
from elbowroom.runtime.replay.sizes import now, number_now
from elbowroom.runtime.slot import Geometry

if TYPE_CHECKING:
    from elbowroom.runtime.replay.compiled import Compiled
    from elbowroom.runtime.replay.replay import Replay

NOWHERE = -1


class Ref(NamedTuple):
    """A view of the tensor that this forward has noted as number `noted`, or all of it."""

    noted: int
    geometry: Geometry
    is_whole: bool = False

    def tensor(self, replay: Replay) -> Tensor:
        """Returns that view in the forward that runs."""
        noted = replay.noted[self.noted]
        return noted if self.is_whole else now(self.geometry, replay.sizes).on(noted)


class NormStatistics(NamedTuple):
    """The statistics of a norm, as `Statistics` has them."""

    mean: Ref
    rstd: Ref
    inner: int
    rows: int

    def statistics(self, replay: Replay) -> Statistics:
        """Returns them in the forward that runs."""
        rows = number_now(self.rows, replay.sizes)
        return Statistics(self.mean.tensor(replay), self.rstd.tensor(replay), self.inner, rows)


@dataclass(frozen=True)
class NumberedRecipe:
    """A recipe whose slots are numbers.

    given  the statistics that `op` reads, of this forward
    works_lossy  whether `op` works on codes, once it has them
    """

    op: Op
    source: int | NumberedRecipe
    seen: Geometry
    made: Geometry
    bits: int
    noise: int
    others: tuple[int | NumberedRecipe, ...]
    given: tuple[Ref, ...]
    works_lossy: bool

    def __iter__(self) -> Iterator[NumberedRecipe]:
        """Yields this recipe, and those that it starts from."""
        yield self
        for one in (self.source, *self.others):
            if isinstance(one, NumberedRecipe):
                yield from one

    @property
    def sources(self) -> list[int]:
        """Numbers of the slots whose values it reads itself."""
        below = [one for one in (self.source, *self.others) if isinstance(one, int)]
        return below if self.noise == NOWHERE else [*below, self.noise]

    @property
    def slots(self) -> list[int]:
        """Numbers of the slots that it reads itself, NOWHERE among them."""
        return [*self.sources, self.bits]


@dataclass(frozen=True)
class Instruction:
    """Action on one slot in a settled forward, and all that it takes.

    action  None: a later op decides
    bits    the op whose mask is taken of the tensor; "": none is
    covers  whether the op that saves it made all of its storage
    mask    the slot whose bits an encoding takes; NOWHERE: none
    draw    which of the forward's seeds an encoding takes, from 1 on
    varies  the slot is of another size in each forward
    """

    slot: int
    name: SiteName
    need: Need
    action: Action | None = None
    recipe: NumberedRecipe | None = None
    norm: NormStatistics | None = None
    mask: int = NOWHERE
    bits: str = ""
    covers: bool = False
    draw: int = 0
    varies: bool = False

    @property
    def is_lossy(self) -> bool:
        """True if the slot gets a code that is not exact."""
        return isinstance(self.action, Encode) and not self.action.codec.lossless

    def masked(self, bits: Tensor | None) -> Action:
        """Returns the encoding with the bits of the forward that runs."""
        action = self.action
        assert isinstance(action, Encode)
        return replace(action, facts=replace(action.facts, mask=bits))


class ScriptedSave(NamedTuple):
    """One tensor that an op saves.

    slot    NOWHERE: it is kept, and its value is not used
    fresh   no op before has saved this slot
    whole   of its storage; nbytes: that has so many; NOWHERE: as many as `whole` takes
    instruction  done at once
    waits   something is done when the op has run: until then it is kept
    shared  once restored, it waits for its next reader. True: also if it was a code; False: only if
            it was rebuilt; None: it does not
    noted   recipes read it by this number; place: later ops are compared with it by that one
    """

    geometry: Geometry
    dtype: torch.dtype
    slot: int = NOWHERE
    fresh: bool = False
    whole: Geometry | None = None
    nbytes: int = 0
    need: Need = Need.EXACT
    instruction: Instruction | None = None
    waits: bool = False
    noted: int = NOWHERE
    place: int = NOWHERE
    same: int = NOWHERE
    shared: bool | None = None


class Like(NamedTuple):
    """Requirements of a tensor among the arguments of an op.

    traits     dtype, device, requires_grad and layout
    same       its storage is that of this place, at that version; NOWHERE: any
    place      it becomes that place
    parameter  it is this one, at this address: compared with no place
    """

    kind: type
    traits: tuple[Any, ...]
    geometry: Geometry
    same: int = NOWHERE
    place: int = NOWHERE
    parameter: nn.Parameter | None = None
    address: int = 0


@dataclass(frozen=True)
class ScriptedCall:
    """One call from Python to torch.

    saves   what it saves, in this order, None for what is only kept; None: all of it is
    args    what its arguments must be, with kwargs; None: any
    run     runs in place of func
    direct  what `run` is of, where that depends on more than arguments
    levels  that its codes of q, k and v have at least, as its values asked; None: they need not
            be examined
    opens   its body is run with what it calls seen
    place   its output is that place from now on
    copies  arguments, by position, of which a slot gets a copy: constants
    before, after  instructions to be done then
    module  it is no call of torch's, but of this module, which runs again in backward
    inside  number of tensors that this module saves, none of which is held, if nothing is done with
            what it calls: the script has no steps of it then. None: it has
    inputs  it is no call, but what checkpoints and functions of the user's save between two
    numel   elements that it saves; None: it ran as another function when it was written down
    out_numel  elements of its result; 0: that is not one tensor
    replaced_by  the `Direct` that `run` belongs to, whether or not it is asked again
    frees   slots that nothing of ours reads any more: their graph may end before the forward does
    so_far  bytes that the forward holds as the step begins, in plain autograd and as they are held
    """

    func: Callable[..., Any]
    saves: tuple[ScriptedSave | None, ...] | None = None
    args: tuple[Any, ...] | None = None
    kwargs: tuple[tuple[str, Any], ...] = ()
    run: Callable[..., Any] | None = None
    direct: Direct | None = None
    levels: Levels | None = None
    opens: bool = False
    place: int = NOWHERE
    copies: tuple[tuple[int, int], ...] = ()
    before: tuple[Instruction, ...] = ()
    after: tuple[Instruction, ...] = ()
    module: weakref.ref[nn.Module] | None = None
    inside: int | None = None
    inputs: bool = False
    numel: int | None = 0
    out_numel: int = 0
    replaced_by: Direct | None = None
    frees: tuple[int, ...] = ()
    so_far: tuple[int, int] = (0, 0)

    @cached_property
    def is_plain(self) -> bool:
        """True if this step has no action: calls are only compared with it."""
        acts = self.before or self.after or self.copies or self.frees or self.place != NOWHERE
        special = self.opens or self.module is not None
        return self.saves is None and self.args is None and not (acts or special)

    @property
    def acts(self) -> bool:
        """True if its saved tensors have actions, or are noted."""
        return bool(self.before or self.after or any(self.saves or ()))


@dataclass(frozen=True, eq=False)
class Script:
    """Record of a settled forward, step by step.

    slots, noted, places  how many there are
    last          instructions to be done as the forward ends
    counts        final figures of its ledger; of slots that are acted on, by their numbers
    calls         of outermost modules in this step, at the end of it: the next forward's names go
                  on from there
    sizes         how many numbers of its geometries are others in each forward (`generalize.py`)
    max_numel     the most elements that a forward has saved from which it was written
    numel         elements of all tensors that it saved, except in steps with an unknown number;
                  NOWHERE: another number in each forward
    seeds         how many it took
    state         of torch, on which kernels depend, as it was written
    """

    steps: tuple[ScriptedCall, ...]
    slots: int
    noted: int
    places: int
    last: tuple[Instruction, ...]
    counts: Counts
    numel: int
    seeds: int
    state: tuple[Any, ...]
    calls: CallCounts = ()
    sizes: int = 0
    max_numel: int = 0

    @cached_property
    def compiled(self) -> Compiled:
        """The functions that replay a forward."""
        from elbowroom.runtime.replay.compiled import Compiled

        return Compiled(self.steps, self.last, self._max_numels())

    def _max_numels(self) -> list[int]:
        """Returns how many elements the forward has saved at most after each step."""
        own = [step.numel or 0 for step in self.steps]
        if self.numel == NOWHERE:
            return [self.max_numel] * len(own)
        between = self.numel - sum(own)  # calls: nobody knows when
        sums = [between + so_far for so_far in accumulate(own)]
        # What a function of torch's own calls has steps of its own, behind that of the function.
        return [
            self.numel if step.opens else most for step, most in zip(self.steps, sums, strict=True)
        ]

    @property
    def held_nbytes(self) -> int:
        """Bytes that are held at the end of the forward."""
        return self.counts.held_nbytes

    @property
    def before_nbytes(self) -> int:
        """Bytes that plain autograd would hold."""
        return self.counts.before_nbytes

    @property
    def nbytes_each(self) -> float:
        """Bytes that plain autograd would hold for each element that is saved."""
        return max(self.before_nbytes, 1) / max(self.numel, self.max_numel, 1)

    @cached_property
    def parameters(self) -> tuple[nn.Parameter, ...]:
        """Parameters that the script compares arguments with, and keeps alive."""
        found = (p for step in self.steps for p in _parameters_in((step.args, step.kwargs)))
        return tuple({id(p): p for p in found}.values())

    @property
    def recomputed(self) -> list[nn.Module]:
        """The modules that are recomputed in backward, if they still exist."""
        return [module for ref in self._recomputed if (module := ref()) is not None]

    @cached_property
    def _recomputed(self) -> tuple[weakref.ref[nn.Module], ...]:
        return tuple(step.module for step in self.steps if step.module is not None)

    @cached_property
    def recomputes(self) -> bool:
        """True if modules are recomputed in backward."""
        return bool(self._recomputed)

    @cached_property
    def sources(self) -> tuple[int, ...]:
        """Numbers of the slots that tensors are rebuilt from."""
        all_of_them = instructions_of(self.steps, self.last)
        recipes = (recipe for one in all_of_them for recipe in one.recipe or ())
        return tuple({number for recipe in recipes for number in recipe.sources})

    @cached_property
    def acts_between(self) -> bool:
        """True if tensors that are saved between two calls have actions."""
        return any(step.inputs for step in self.steps)

    @cached_property
    def does_nothing(self) -> bool:
        """True if every op is torch's own, and all that is saved is kept."""
        return all(step.is_plain for step in self.steps)


def instructions_of(
    steps: Sequence[ScriptedCall], last: Sequence[Instruction]
) -> Iterator[Instruction]:
    """Yields all that is done with slots."""
    for step in steps:
        yield from (*step.before, *step.after)
        yield from (save.instruction for save in step.saves or () if save and save.instruction)
    yield from last


def _parameters_in(x: Any) -> Iterator[nn.Parameter]:
    if type(x) is Like:
        if x.parameter is not None:
            yield x.parameter
    elif type(x) is tuple or type(x) is list:
        for one in x:
            yield from _parameters_in(one)


def state_of_torch() -> tuple[Any, ...]:
    """Returns the settings that kernels depend on, and that are not arguments."""
    return (
        *(torch.is_autocast_enabled(device) for device in ("cpu", "cuda")),
        *(torch.get_autocast_dtype(device) for device in ("cpu", "cuda")),
        torch.backends.cudnn.enabled,
        torch.are_deterministic_algorithms_enabled(),
        torch.get_num_threads(),
    )


PLAIN_VALUES = frozenset(
    (
        *(int, float, bool, str, complex, type(None), type(...)),
        *(torch.dtype, torch.device, torch.layout, torch.memory_format),
    )
)
