"""The attempt at a region whose code fitted, found again when the program is started anew.

Inductor caches what it has compiled. But attempts that were not compiled, as their code takes more
than the room (`attempts.py`), are in no cache, and each start would plan them again to find out. So
a file beside Inductor's cache names the attempt that came after these:

    <Inductor's cache>/elbowroom/<key of the region and its settings>    {"tight": 525516, ...}

A later start begins with that attempt, whose graphs are in the cache. It is judged as ever: where
it does not fit, all attempts are made in their order.
"""

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx

from elbowroom.files import write_text

_log = logging.getLogger("elbowroom")


@dataclass(frozen=True)
class AttemptOptions:
    """The arguments of one attempt.

    tight   the room of its plan; None: as plain torch.compile
    fills   whether codes hold as much besides as there is room for
    raises  whether it fails where its code takes more than the region's room
    waits   whether the code of both graphs is judged together
    """

    tight: int | None
    fills: bool = False
    raises: bool = True
    waits: bool = False


class LaterStarts:
    """The file in which one region finds its attempt.

    None of its methods raises an error: without the file, attempts are made in their order.
    """

    def __init__(
        self,
        gm: fx.GraphModule,
        example_inputs: Sequence[Any],
        settings: object,
        options: Mapping[str, Any],
    ) -> None:
        """settings: all that a plan depends on, except the graph. options: those of Inductor."""
        self._path: Path | None = None
        with suppress(Exception):  # what cannot be told apart is not found again
            if _caches(options):
                key = _key(gm, example_inputs, settings, options)
                self._path = _folder() / key

    def load(self) -> AttemptOptions | None:
        """Returns the attempt that has fitted in an earlier start, if it was not the first one."""
        if self._path is None:
            return None
        try:
            found = AttemptOptions(**json.loads(self._path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):  # there is none, or its file is damaged
            return None
        return found if found.tight is None or type(found.tight) is int else None

    def save(self, attempt: AttemptOptions) -> None:
        """Stores the attempt that has fitted."""
        if self._path is None:
            return
        try:
            write_text(json.dumps(asdict(attempt)), self._path)
        except OSError as error:
            _log.debug("the plan of a compiled region is not found at the next start: %r", error)


def _caches(options: Mapping[str, Any]) -> bool:
    """Returns whether Inductor finds graphs of an earlier start."""
    from torch._inductor import config

    is_on = options.get("fx_graph_cache", config.fx_graph_cache)
    return bool(is_on) and not options.get("force_disable_caches", config.force_disable_caches)


def _folder() -> Path:
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return Path(cache_dir()) / "elbowroom"


def _key(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    settings: object,
    options: Mapping[str, Any],
) -> str:
    """Hashes what the attempts depend on; two regions of one key begin with the same attempt."""
    device = "cpu" if not torch.cuda.is_available() else torch.cuda.get_device_name()
    parts = (
        settings,
        gm.code,
        [_print_of(x) for x in example_inputs],
        sorted(options.items(), key=lambda one: one[0]),
        (torch.__version__, torch.backends.cpu.get_cpu_capability(), device),
        [
            (kind, torch.get_autocast_dtype(kind))
            for kind in ("cpu", "cuda")
            if torch.is_autocast_enabled(kind)
        ],
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _print_of(x: Any) -> object:
    if not isinstance(x, torch.Tensor):
        return str(x)
    return tuple(x.shape), x.stride(), x.dtype, x.device, x.requires_grad
