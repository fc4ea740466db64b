"""Saved-tensor hooks that the program sets around a fitted model.

PyTorch calls the innermost hooks alone, so those of a fitted model replace the program's. If these
give back what they got (they count tensors, or move them), no value changes. If they do not (half
precision), gradients would differ from those of plain training. Nobody knows which before they have
been called. So the first step with such hooks runs without elbowroom: they are called as in plain
training, and what they give back is compared with what they got, by checksums.

    all is equal       elbowroom replaces them from the next step on
    anything differs   they stay: gradients are those of plain training, and no budget is kept

Hooks of torch itself (`save_on_cpu`, checkpoints) give back what they got, and are not checked.
"""

import zlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from elbowroom.fitting.messages import say_replaced_hooks, warn_checked_hooks, warn_kept_hooks
from elbowroom.fitting.options import FitOptions
from elbowroom.runtime.ledger import Tally

_OURS = ("torch", "elbowroom")


class ForeignHooks:
    """Memory of the hooks that were met around a model, and of whether they change values.

    graph  that of the last forward, if such hooks hold what it has saved
    """

    def __init__(self) -> None:
        self._known: dict[object, _PairVerdict] = {}
        self.graph: Tally | None = None

    @property
    def waits(self) -> bool:
        """True while that graph waits for its backward."""
        return self.graph is not None and self.graph.waits

    def follow(self, out: object) -> None:
        """Follows the graph of the results of a forward whose saved tensors such hooks hold."""
        self.graph = Tally(0, 0)
        self.graph.follow(out)

    def around(self, options: FitOptions) -> AbstractContextManager[object] | None:
        """Returns a context for a forward that the hooks set now keep for themselves.

        None: there are no such hooks, or elbowroom may replace them.
        """
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
        if hooks is None:
            return None
        name = _name_of(hooks[0])
        if name.split(".")[0] in _OURS:
            return None
        key = tuple((_name_of(hook), getattr(hook, "__code__", None)) for hook in hooks)
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = _PairVerdict()
            warn_checked_hooks(options, name)
        elif known.differs:
            if not known.was_said:
                warn_kept_hooks(options, name)
            known.was_said = True
            return nullcontext()
        elif known.backward_began:
            if not known.was_said:
                say_replaced_hooks(options, name)
            known.was_said = True
            return None
        checked = _ComparedHooks(known, *hooks)
        return saved_tensors_hooks(checked.pack, checked.unpack)


class _PairVerdict:
    """A verdict says what is known of one pair of hooks.

    backward_began  backward has called them
    differs    they have changed a value
    was_said   the user was told what follows from that
    """

    backward_began = differs = was_said = False


class _Packed(NamedTuple):
    """The value that the pair of hooks holds in place of a saved tensor.

    packed  what the program's own hook has made of the tensor
    was     facts of the tensor before that (`_facts`); None: they are not known
    """

    packed: Any
    was: object


class _ComparedHooks:
    """Pair of hooks that call the program's own, and compare what these give back and got."""

    def __init__(
        self, verdict: _PairVerdict, pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]
    ) -> None:
        self._verdict, self._pack, self._unpack = verdict, pack, unpack

    def pack(self, x: Tensor) -> _Packed:
        was = _facts(x)  # before the hook: what it packs may be the tensor itself
        return _Packed(self._pack(x), was)

    def unpack(self, held: _Packed) -> Tensor:
        x = self._unpack(held.packed)
        verdict = self._verdict
        verdict.backward_began = True
        if not verdict.differs:
            verdict.differs = held.was is None or held.was != _facts(x)
        return x


def _name_of(hook: object) -> str:
    module = getattr(hook, "__module__", None) or ""
    return f"{module}.{getattr(hook, '__qualname__', type(hook).__qualname__)}"


def _facts(x: object) -> object:
    """Returns facts that are equal for tensors of equal bits in an equal layout.

    None: they are not known.
    """
    if not isinstance(x, Tensor) or x.layout is not torch.strided or x.is_nested:
        return None
    with torch.no_grad(), torch._C.DisableTorchFunction():
        try:
            plain = x.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
            read = plain.view(torch.uint8).cpu().numpy()
        except (RuntimeError, TypeError):  # a subclass without memory of its own
            return None
    return x.shape, x.stride(), x.dtype, x.device, zlib.crc32(read.data)
