"""Public names whose modules are imported when a name is first asked for (PEP 562).

A function may have the same name as a subpackage: `elbowroom.plan` is a function, and
`from elbowroom.plan import ...` imports from a package. Python sets each imported subpackage as an
attribute of its parent, which would hide the function, so this is prevented for these names. An
import statement still finds the package.

The garbage collector is paused during an import, which makes many objects and no garbage: one pass
over the objects of torch takes longer than the import of one of our packages.
"""

import gc
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from typing import Any


def show_lazily(
    package: str, modules: Iterable[str], homes: Mapping[str, Iterable[str]]
) -> list[str]:
    """Lets a package show names that are not imported yet; returns them.

    modules  modules inside of it that are public themselves
    homes    module inside of it -> the functions and classes of that module that are public
    """
    home_of = {name: f"{package}.{home}" for home, names in homes.items() for name in names}
    names = [*modules, *home_of]

    class Package(ModuleType):
        """A package whose functions and classes are found before packages of the same name."""

        def __setattr__(self, name: str, value: object) -> None:
            if not (name in home_of and isinstance(value, ModuleType)):
                super().__setattr__(name, value)

        def __getattr__(self, name: str) -> Any:
            if name in home_of:
                with _without_collections():
                    found = getattr(import_module(home_of[name]), name)
            elif name in names:
                with _without_collections():
                    found = import_module(f"{package}.{name}")
            else:
                message = f"module {package!r} has no attribute {name!r}"
                raise AttributeError(message, name=name, obj=self)
            setattr(self, name, found)
            return found

        def __dir__(self) -> list[str]:
            return sorted({*super().__dir__(), *names})

    sys.modules[package].__class__ = Package
    return names


@contextmanager
def _without_collections() -> Iterator[None]:
    """Pauses the garbage collector, unless it is paused already."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
