"""Puts modules of elbowroom in place of torch's, in a model that exists, and back."""

from collections.abc import Iterable

from torch import nn

from elbowroom.nn._derived import Derived
from elbowroom.nn.activations import GELU, SiLU
from elbowroom.nn.dropout import Dropout
from elbowroom.nn.fp8 import Fp8Linear, unfreeze
from elbowroom.nn.norms import LayerNorm, RMSNorm
from elbowroom.nn.swap import Replaced, replace

Classes = dict[type[nn.Module], type[nn.Module]]
_NORMS: Classes = {nn.LayerNorm: LayerNorm, nn.RMSNorm: RMSNorm}
_ACTIVATIONS: Classes = {nn.GELU: GELU, nn.SiLU: SiLU}
_DROPOUT: Classes = {nn.Dropout: Dropout}
_KINDS = (_NORMS, ("norm",)), (_ACTIVATIONS, ("gelu", "silu", "swish")), (_DROPOUT, ("dropout",))


def convert(
    model: nn.Module,
    *,
    norms: bool = True,
    activations: bool = False,
    dropout: bool = True,
    keep: Iterable[str] = (),
) -> Replaced:
    """Replaces norms, activations and dropout of `model` by modules that save less, in place.

        print(er.convert(model, norms=True, activations=True, dropout=True))

    norms        LayerNorm and RMSNorm save their output, which the next layer saves anyway
    activations  GELU and SiLU save their derivative in two bits. This adds unbiased noise to
                 gradients
    dropout      Dropout saves a seed
    keep         names of modules that are not converted, including all modules inside

    Weights, `state_dict` keys and optimizers stay the same. `er.nn.revert(model)` undoes it.

    Returns what was replaced, and which modules were not: subclasses of torch's classes; modules of
    other libraries with a similar name (LlamaRMSNorm); and modules that work in place
    (`inplace=True`), because the model may go on to use their changed input. If it uses only their
    result, set `inplace = False` first. Functions that a model calls (F.gelu) are not converted.
    Raises ModuleError if `model` is not a module, or if a name in `keep` does not exist.
    """
    wanted: Classes = {}
    alike: tuple[str, ...] = ()
    for chosen, (classes, parts) in zip((norms, activations, dropout), _KINDS, strict=True):
        if chosen:
            wanted, alike = wanted | classes, alike + parts
    return replace(model, lambda m: wanted.get(type(m)), keep=keep, like=tuple(wanted), alike=alike)


def revert(model: nn.Module) -> Replaced:
    """Undoes `convert` and `fp8`: each module of elbowroom in `model` gets its own class again.

    Weights that `fp8(frozen=True)` stores in 8 bits are decoded to their original dtype.
    """
    ours = {**_NORMS, **_ACTIVATIONS, **_DROPOUT, nn.Linear: Fp8Linear}
    before = {now: torchs for torchs, now in ours.items()}

    def choose(module: nn.Module) -> type[nn.Module] | None:
        kind = type(module)
        return kind.base if issubclass(kind, Derived) else before.get(kind)

    if isinstance(model, nn.Module):
        unfreeze(model)
    return replace(model, choose)
