"""Replaces one class of module by another in a model that exists.

Only the class of a module changes. It stays the same object with the same parameters, hooks and
names, so optimizers, `state_dict` and all references to it stay valid. Modules of a subclass are
not replaced, because a subclass may compute something else.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from dataclasses import replace as changed
from typing import NamedTuple

from torch import nn

from elbowroom.errors import ModuleError
from elbowroom.nn._derived import Derived

_NAME = "_converted_as"  # in a module's __dict__: for messages


class Swap(NamedTuple):
    """One module: its name in the model ("" for the model itself), and its class before and now."""

    name: str
    before: str
    now: str


@dataclass(frozen=True)
class Replaced:
    """The result of a conversion; `str()` lists it by class.

    left  names and classes of modules that look similar, but were not converted: subclasses of the
          converted classes, modules with similar names (LlamaRMSNorm), and modules that work in
          place, whose changed input the model may use
    note  additional lines of the report
    """

    swaps: tuple[Swap, ...]
    left: tuple[tuple[str, str], ...] = ()
    note: str = ""

    def __len__(self) -> int:
        return len(self.swaps)

    def joined(self, swaps: tuple[Swap, ...]) -> "Replaced":
        """Returns the union of two results; what one of them converted is no longer left."""
        taken = {swap.name for swap in swaps}
        left = tuple(each for each in self.left if each[0] not in taken)
        return changed(self, swaps=(*self.swaps, *swaps), left=left)

    def noting(self, more: str) -> "Replaced":
        """Returns this result with one more line in `note`."""
        return changed(self, note="\n".join(filter(None, (self.note, more))))

    def __str__(self) -> str:
        kinds: dict[tuple[str, str], list[str]] = {}
        for name, before, now in self.swaps:
            kinds.setdefault((before, now), []).append(name or "the model itself")
        lines = [
            f"{len(names)} x {before} -> {now}: {_shortened(names)}"
            for (before, now), names in kinds.items()
        ]
        stayed: dict[str, list[str]] = {}
        for name, kind in self.left:
            stayed.setdefault(kind, []).append(name or "the model itself")
        return "\n".join(
            [
                *(lines or ["nothing was replaced"]),
                *(
                    f"left alone, {len(names)} x {kind}: {_shortened(names)}"
                    for kind, names in stayed.items()
                ),
                *([self.note] if self.note else []),
            ]
        )


def _shortened(names: list[str]) -> str:
    return ", ".join(names if len(names) <= 4 else [*names[:3], f"{len(names) - 3} more"])


def replace(
    model: nn.Module,
    choose: Callable[[nn.Module], type[nn.Module] | None],
    *,
    keep: Iterable[str] = (),
    like: tuple[type[nn.Module], ...] = (),
    alike: Iterable[str] = (),
) -> Replaced:
    """Gives each module the class that `choose` returns for it, if any.

    keep   names of modules that stay as they are, including all modules inside
    like   classes whose subclasses are reported if they are not replaced
    alike  parts of class names, in lower case; such classes are reported if they are not replaced
    """
    kept = _checked(model, keep)
    swaps, left = [], []
    for name, module in model.named_modules():
        if any(name == stays or name.startswith(f"{stays}.") for stays in kept):
            continue
        before, now = type(module), choose(module)
        if now is not None and _is_ours(now) and getattr(module, "inplace", False):
            left.append((name, f"{before.__name__}(inplace=True)"))
        elif now is not None:
            module.__class__ = now
            module.__dict__.pop("_saved_output", None)
            module.__dict__.pop(_NAME, None)
            if _is_ours(now):
                module.__dict__[_NAME] = name
            swaps.append(Swap(name, _name(before), _name(now)))
        elif not _is_ours(before) and (isinstance(module, like) or _is_alike(module, alike)):
            left.append((name, before.__name__))
    return Replaced(tuple(swaps), tuple(left))


def name_of(module: nn.Module) -> str:
    """Returns the name that a module had in the model when it was converted; "" for others."""
    return str(module.__dict__.get(_NAME, ""))


def _checked(model: nn.Module, keep: Iterable[str]) -> list[str]:
    if not isinstance(model, nn.Module):
        raise ModuleError(f"expected a torch.nn.Module; got {type(model).__name__}.")
    kept, names = list(keep), {name for name, _ in model.named_modules()}
    if isinstance(keep, str) or not names.issuperset(kept):
        wrong = keep if isinstance(keep, str) else ", ".join(set(kept) - names)
        raise ModuleError(
            f"keep={wrong!r} is not a list of names in this model; they are those of "
            f"model.named_modules(): {_shortened(sorted(names - {''}))}."
        )
    return kept


def _is_alike(module: nn.Module, alike: Iterable[str]) -> bool:
    """Returns whether a module that is not torch's has such a name, and no modules inside."""
    kind = type(module)
    foreign = not kind.__module__.startswith("torch.")
    alone = next(module.children(), None) is None
    return foreign and alone and any(part in kind.__name__.lower() for part in alike)


def _is_ours(kind: type) -> bool:
    return kind.__module__.startswith("elbowroom.nn.") or issubclass(kind, Derived)


def _name(kind: type) -> str:
    if issubclass(kind, Derived):
        return f"er.nn.{kind.behavior.__name__}"
    if kind.__module__.startswith("torch."):
        return f"nn.{kind.__name__}"
    return f"er.nn.{kind.__name__}" if _is_ours(kind) else kind.__name__
