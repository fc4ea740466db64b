"""State that outlives one forward: the seed, the count of steps, and what was learned about sites.

They are kept nowhere else. Every encoded tensor gets a seed of its own, a hash of (base seed, rank,
count): noise never repeats between tensors, steps or micro-batches, the user's RNG is untouched,
and a run with the same base seed draws the same noise.
"""

import threading
import weakref
from collections.abc import Callable, Hashable
from functools import lru_cache
from typing import Any, ClassVar, TypeVar, cast

from torch import distributed, nn

from elbowroom.codecs.compact import Coders
from elbowroom.plan.site import SiteKey, SiteName, strictness
from elbowroom.runtime.capacities import Capacities
from elbowroom.runtime.device_seeds import DeviceSeeds
from elbowroom.runtime.prefetcher import Prefetcher
from elbowroom.runtime.slot import MadeAgain
from elbowroom.runtime.storage import changes

T = TypeVar("T")
_MASK = (1 << 64) - 1
OUTLIVED = "other code held it until backward"  # so that encoding it frees nothing


class Context:
    """Seed, steps and the plan cache of one model's training; for `er.saving`, of the process.

    unrepeatable  names of modules that must not be recomputed
    blames_classes  whether other modules of their classes are not recomputed either, as long as
                    there are plans without them
    capacities    sizes of payloads that only the device knows
    coders        cache of coders for small tensors
    device_seeds  seeds of settled steps whose codes are made on a GPU
    kept          reasons for sites that are always kept
    exact         the same, by the outermost module, of contexts that learn nothing else
    learned       how often a site was added to either, or a parameter noted that changes
    held_raw      names of modules of which a tensor was held as it is where a code was planned
    survivors     sites of which a tensor was still there, unchanged, as backward read its code
    made_again    rebuilt tensors that wait for their next readers
    planned       the same of plans, where decoded ones wait, too
    recurrent_layers  the largest number of recurrent layers that one forward has called
    layer_nbytes      what the largest of them saves, about
    runs_again    whether recurrent layers are recomputed in backward, in every forward
                  (`recurrent.py`)
    keeps_bits    whether each recurrent layer is then recomputed as a whole, so that sums are
                  rounded as in plain autograd
    gathers       whether a forward has gathered large rows
    rows_wait     whether large rows that are gathered are made when they are read, in every forward
                  (`gathered.py`)
    plans_loss      whether a fit was given the loss, so that plans hold what it saves
    has_linears     whether a forward of a fit has run a linear layer
    products_again  whether linear layers may run again for what a plan rebuilds: every second one
                    of a chain
    waited_in     names of the modules in which rows waited, or were summed
    finer_levels  whether codes for attention are made finer than its values need now, since a
                  forward left its script because they had come to need more
    has_checkpoints    whether a forward of a fit has come to a checkpoint of the user's
    opens_checkpoints  whether these are opened, in every forward (`opened_checkpoints.py`)
    takes_small   whether a fit also plans tensors below its min_nbytes
    taken         sites of a fit that have saved storages of its min_nbytes, or some times that
                  (`left_alone`); None: min_nbytes is a strict limit, as it is outside of fits
    drops_codecs  whether a codec of another package that fails or lies is dropped, and its tensors
                  kept; otherwise what it raises is raised
    """

    # Of the process: a context with a seed of its own may last for one step.
    exact: ClassVar[weakref.WeakKeyDictionary[object, dict[SiteKey, str]]] = (
        weakref.WeakKeyDictionary()
    )

    def __init__(self, seed: int = 0, *, learns: bool = True, keeps_bits: bool = False) -> None:
        self.seed, self.keeps_bits = seed, keeps_bits
        self.count = 0
        self.step = 0
        self.learns = learns
        self.prefetcher = Prefetcher()
        self.capacities = Capacities()
        self.coders = Coders()
        self.device_seeds = DeviceSeeds()
        self.made_again, self.planned = MadeAgain(), MadeAgain(takes_codes=True)
        self.unrepeatable: frozenset[str] = frozenset()
        self.blames_classes = True
        self.recurrent_layers = self.layer_nbytes = 0
        self.waited_in: set[str] = set()
        self.runs_again = self.gathers = self.rows_wait = False
        self.has_linears = self.products_again = self.plans_loss = False
        self.takes_small = self.drops_codecs = self.finer_levels = False
        self.has_checkpoints = self.opens_checkpoints = False
        self.kept: dict[SiteKey, str] = {}
        self.held_raw: set[str] = set()
        self.survivors: set[SiteName] = set()
        self.taken: set[SiteName] | None = None
        self._learned = 0
        self._remembered: dict[Hashable, Any] = {}
        self._lock = threading.Lock()

    @property
    def rounds(self) -> bool:
        """True if recurrent layers are recomputed in stretches: sums are rounded otherwise."""
        return self.runs_again and not self.keeps_bits

    @property
    def learned(self) -> int:
        return self._learned + changes()

    def first_seed(self) -> int:
        """Returns the number to which the count is added; `mixed` makes a seed of the sum."""
        return _first_seed_of(self.seed, _rank())

    def reserve(self, seeds: int) -> int:
        """Takes so many seeds at once; returns the count before the first of them."""
        with self._lock:
            before = self.count
            self.count += seeds
            return before

    def give_back(self, before: int, seeds: int, used: int = 0) -> None:
        """Takes back reserved seeds that were not used, if none was reserved since.

        used: number of used ones.
        """
        with self._lock:
            if self.count == before + seeds:
                self.count = before + used

    def begin_step(self) -> None:
        """Begins a training step."""
        self.step += 1

    def note_survivor(self, name: SiteName, key: SiteKey) -> None:
        """Notes that a tensor of this site was still there, so that encoding it freed nothing."""
        self.survivors.add(name)
        if self.learns:  # from the next step on it is kept
            self.kept.setdefault(key, OUTLIVED)

    def learn_limit(self, model: nn.Module | None, key: SiteKey, why: str) -> bool:
        """Keeps this site, or makes its code finer, from the next step on; returns if that is new.

        A context that learns nothing else remembers it while the model exists, for any shape. model
        None: it is an op of no module.
        """
        if self.learns:
            known = self.kept
        else:
            known, key = (
                self.exact.setdefault(self if model is None else model, {}),
                _of_any_shape(key),
            )
        before = known.get(key)
        is_new = before is None or strictness(before) < strictness(why)
        (self if self.learns else PROCESS)._learned += is_new
        if is_new:
            known[key] = why
        return is_new

    def why_limited(self, model: nn.Module | None, key: SiteKey) -> str | None:
        """Returns why this site is kept, or how fine its code is to be; None: nothing is known."""
        return self.exact.get(self if model is None else model, {}).get(_of_any_shape(key))

    @property
    def needs_exact(self) -> dict[SiteKey, str]:
        """Sites that are kept because a code of them makes gradients wrong, with the reasons."""
        return {key: why for key, why in self.kept.items() if why != OUTLIVED}

    def learn_unrepeatable(self, module: str) -> None:
        """Notes that a second run of the module of this name gives another result."""
        if self.learns:
            self.unrepeatable |= {module}

    def remember(self, key: Hashable, make: Callable[[], T]) -> T:
        """Returns what `make` gave when it was first called for this key."""
        with self._lock:
            if key not in self._remembered:
                self._remembered[key] = make()
            return cast(T, self._remembered[key])


def _of_any_shape(key: SiteKey) -> SiteKey:
    module, consumer, _, dtype = key
    return module, consumer, (), dtype


def mixed(x: int) -> int:
    """A bijective hash of 64 bits (multiply and xor-shift, twice); also in `device_seeds.py`."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return (x ^ (x >> 31)) & (_MASK >> 1)  # op schemas take a signed 64-bit int


def seeds_after(count: int, n: int) -> list[int]:
    """Returns the seeds of the counts count + 1 .. count + n."""
    return [mixed(count + nth) for nth in range(1, n + 1)]


@lru_cache(maxsize=16)
def _first_seed_of(seed: int, rank: int) -> int:
    return mixed(seed ^ (rank << 40))


def _rank() -> int:
    is_one_of_many = distributed.is_available() and distributed.is_initialized()
    return distributed.get_rank() if is_one_of_many else 0


PROCESS = Context(learns=False)
