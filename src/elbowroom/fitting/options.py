"""Options of a budget, and the memory that is charged to it as a step begins."""

from dataclasses import dataclass, replace
from math import inf
from typing import Self

from elbowroom.codecs import Codec
from elbowroom.codecs.names import setting_name
from elbowroom.codecs.quality import quality_of
from elbowroom.plan.make import LOSSY_HELPS, MORE_NOISE
from elbowroom.plan.menu import presets_for
from elbowroom.plan.presets import EXACT_PRESETS, LOSSY_PRESETS, Preset
from elbowroom.plan.registered import by_error
from elbowroom.plan.shares import PREDICTED
from elbowroom.plan.solve import WITHOUT_CODES

_SMALLER = 16  # times smaller than min_nbytes are tensors that are planned where it is necessary


@dataclass(frozen=True)
class FitOptions:
    """Options of a fit, as the user gave them.

    exact    True: exact actions only, as noise=0 and some solvers ask for, too; None: exact ones
             first; False: what is cheapest
    offload  where plans may move tensors to: "file", "host", or None
    noise    the most that codes may add to the gradient's variance, as a share of that of
             mini-batches; None: as much as the budget asks for
    min_nbytes  storages smaller than that are kept as they are, unless no plan fits then; of what
             an op has saved larger ones of, in an earlier step, those below a fourth of it
    codecs   the settings of codes that plans may take; None: all that are registered
    solver   the name of the solver that makes the plans
    """

    budget_nbytes: int
    exact: bool | None = None
    offload: str | None = None
    min_nbytes: int = 65536
    noise: float | None = None
    codecs: tuple[Codec, ...] | None = None
    solver: str = "auto"

    @property
    def presets(self) -> tuple[Preset, ...]:
        """Presets of the ladder that these options allow: none adds more noise than `noise`."""
        if self.exact:
            return EXACT_PRESETS
        lossy = LOSSY_PRESETS if self.codecs is None else presets_for(by_error(self.codecs))
        limit = inf if self.noise is None else self.noise
        return EXACT_PRESETS + tuple(one for one in lossy if _noise(one) <= limit)

    @property
    def menu(self) -> tuple[str, ...] | None:
        """The names of `codecs`, as plans inside torch.compile take them."""
        return None if self.codecs is None else tuple(map(setting_name, self.codecs))

    @property
    def lossy_helps(self) -> str:
        """The remedy that a refusal names if these options forbid codes that would help; or ""."""
        if not self.exact and self.noise is not None:
            return MORE_NOISE
        if self.solver in WITHOUT_CODES:
            return f"leave out solver='{self.solver}', which takes no codes"
        if not self.exact:
            return "" if self.codecs is None else "leave out codecs=, so that all codes may serve"
        return f"{LOSSY_HELPS} and noise=0.1" if self.noise == 0 else LOSSY_HELPS

    @property
    def least_nbytes(self) -> int:
        """Size below which storages are kept as they are even where no plan fits."""
        return self.min_nbytes // _SMALLER

    def within(self, budget_nbytes: int) -> Self:
        """Returns these options with another budget."""
        return replace(self, budget_nbytes=budget_nbytes)


def _noise(preset: Preset) -> float:
    """Returns what codes of all tensors add, so that all of the gradient has their error."""
    codec = None if preset.exact else getattr(preset.policy, "codec", None)
    if codec is None or codec.lossless:
        return 0.0
    return PREDICTED / (quality_of(codec, maps=False).levels - 1) ** 2


@dataclass(frozen=True)
class MemoryState:
    """Bytes as a step begins.

    static_nbytes           held: weights, buffers, gradients, optimizer states, other resident
                            bytes
    unallocated_gradient_nbytes  of gradients that the step will create, and hold at one time
    unallocated_state_nbytes     of states that the optimizer will create
    co_resident_nbytes           held bytes that do not belong to the model (`co_resident.py`)
    gradient_nbytes         held bytes of gradients, such as those that micro-batches accumulate
    outputs_nbytes          of outputs of earlier forwards, held until this one has ended; they are
                            no part of `static_nbytes`
    """

    static_nbytes: int
    unallocated_gradient_nbytes: int = 0
    unallocated_state_nbytes: int = 0
    co_resident_nbytes: int = 0
    gradient_nbytes: int = 0
    outputs_nbytes: int = 0

    @property
    def unallocated_nbytes(self) -> int:
        """Bytes of gradients and optimizer states that the step will still create."""
        return self.unallocated_gradient_nbytes + self.unallocated_state_nbytes

    def with_co_resident(self, nbytes: int) -> "MemoryState":
        """Returns this state, with `nbytes` resident beside the model."""
        held = self.static_nbytes - self.co_resident_nbytes
        return replace(self, static_nbytes=held + nbytes, co_resident_nbytes=nbytes)
