"""C++ kernels of a region, compiled once its code is known to fit.

A region's code is written for forward first, and for backward then; only both together tell whether
they keep to the room (`written.py`). Compiling the C++ of forward takes longer than all else, and
is lost where backward shows that the region needs another plan. So each kernel is a stand-in until
then:

    forward and backward are written   cpp_pybinding(...)  -->  stand-in
    they fit                           all kernels are compiled, in parallel where Inductor does so
    they do not                        nothing has been compiled

A stand-in that is called before, or from another thread, compiles its kernel and takes its own
place in the module. Kernels for a GPU are compiled as ever.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

_lock = threading.RLock()


class _DeferredKernel:
    """A kernel that is compiled at its first call, if it has not been by then."""

    def __init__(self, compiler: Any, *given: Any) -> None:
        self._compiler, self._given = compiler, given
        self._scope: dict[str, Any] = {}  # the module that calls it, and its name there
        self._name = "kernel"

    def enters(self, scope: dict[str, Any], name: str) -> None:
        """Notes the module in which it stands."""
        self._scope, self._name = scope, name

    def begin(self) -> dict[str, Any]:
        """Begins to compile the kernel, and returns its module, which then holds it or waits."""
        self._scope[self._name] = self._compiler.cpp_pybinding(*self._given)
        return self._scope

    def __call__(self, *args: Any) -> Any:
        if self._scope.get(self._name) in (None, self):
            self._compiler.wait(self.begin())
        return self._scope[self._name](*args)


class DeferredKernels:
    """The kernels of one region that wait."""

    def __init__(self) -> None:
        self._kernels: list[_DeferredKernel] = []

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Lets kernels that are written inside this context wait."""
        from torch._inductor.async_compile import AsyncCompile

        wait = AsyncCompile.wait

        def stand_in(compiler: Any, *given: Any) -> _DeferredKernel:
            self._kernels.append(_DeferredKernel(compiler, *given))
            return self._kernels[-1]

        def wait_for_others(compiler: Any, scope: dict[str, Any]) -> None:
            for name, value in scope.items():
                if isinstance(value, _DeferredKernel):
                    value.enters(scope, name)
            wait(compiler, scope)

        with (
            _lock,
            mock.patch.object(AsyncCompile, "cpp_pybinding", stand_in),
            mock.patch.object(AsyncCompile, "wait", wait_for_others),
        ):
            yield

    def compile(self) -> None:
        """Compiles all of them."""
        from torch._inductor.async_compile import AsyncCompile

        scopes = {id(scope): scope for scope in [one.begin() for one in self._kernels]}
        for scope in scopes.values():
            AsyncCompile().wait(scope)
        self._kernels.clear()
