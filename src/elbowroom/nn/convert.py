"""Put modules of elbowroom in place of torch's, in a model that exists, and back."""

from collections.abc import Iterable

from torch import nn

from elbowroom.nn._derived import Derived
from elbowroom.nn.activations import GELU, SiLU
from elbowroom.nn.dropout import Dropout
from elbowroom.nn.fp8 import Fp8Linear, unfreeze
from elbowroom.nn.norms import LayerNorm, RMSNorm
from elbowroom.nn.swap import Replaced, replace, replace_classes

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
    """Let norms, activations and dropout of `model` save less, in place.

        print(er.convert(model, norms=True, activations=True, dropout=True))

    norms        LayerNorm and RMSNorm save their output, which the next layer saves too
    activations  GELU and SiLU save their derivative in two bits: unbiased noise in gradients
    dropout      Dropout saves a seed
    keep         names of modules that stay as they are, with all inside

    Weights, `state_dict` keys and optimizers stay. `er.nn.revert(model)` puts torch's back. Returns
    what was replaced, and which modules were left alone because their class only inherits from
    torch's, because they only have such a name (LlamaRMSNorm), or because they work in place
    (`inplace=True`), and the model may go on with their input: set `inplace = False` first where it
    goes on with their result. What a model calls as a function (F.gelu) is
    not a module, and is not seen. Raises ModuleError for what is not a model, and for names in
    `keep` that do not exist.
    """
    wanted: Classes = {}
    alike: tuple[str, ...] = ()
    for chosen, (classes, parts) in zip((norms, activations, dropout), _KINDS, strict=True):
        if chosen:
            wanted, alike = wanted | classes, alike + parts
    return replace_classes(model, wanted, keep=keep, alike=alike)


def revert(model: nn.Module) -> Replaced:
    """Undo `convert` and `fp8`: every module of elbowroom in `model` gets its own class again.

    Weights that `fp8(frozen=True)` holds in 8 bits get their dtype again, and what they decode to.
    """
    ours = {**_NORMS, **_ACTIVATIONS, **_DROPOUT, nn.Linear: Fp8Linear}
    before = {now: torchs for torchs, now in ours.items()}

    def choose(module: nn.Module) -> type[nn.Module] | None:
        kind = type(module)
        return kind.base if issubclass(kind, Derived) else before.get(kind)

    if isinstance(model, nn.Module):
        unfreeze(model)
    return replace(model, choose)
