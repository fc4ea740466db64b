"""Classes that are made at run time: a behavior of ours as a mixin before the user's module class.

    derived(Fp8Norm, LlamaRMSNorm)     a subclass of both, with the name of the second

A module that gets such a class keeps its parameters, hooks and attributes, and `isinstance`, class
names and `super().forward` keep working. It can be copied and pickled: a pickle has the pair of
classes, from which the class is made again.
"""

from typing import Any, ClassVar

from torch import nn


class Derived(nn.Module):
    """The base of behaviors that are put in front of a class."""

    base: ClassVar[type[nn.Module]]
    behavior: ClassVar[type["Derived"]]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles as torch does, but for the class."""
        made: tuple[Any, ...] = super().__reduce_ex__(max(protocol, 2))  # type: ignore[assignment]
        return _revived, (self.behavior, self.base), *made[2:]


_made: dict[tuple[type[Derived], type[nn.Module]], type[nn.Module]] = {}


def derived(behavior: type[Derived], base: type[nn.Module]) -> type[nn.Module]:
    """Returns the class that is both: the same for the same pair."""
    made = _made.get((behavior, base))
    if made is None:
        names = {name: getattr(base, name) for name in ("__module__", "__qualname__", "__doc__")}
        body = {**names, "base": base, "behavior": behavior}
        made = _made[behavior, base] = type(base.__name__, (behavior, base), body)
    return made


def _revived(behavior: type[Derived], base: type[nn.Module]) -> nn.Module:
    kind = derived(behavior, base)
    return kind.__new__(kind)
