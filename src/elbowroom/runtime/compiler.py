"""Inside a context, compiled code runs eagerly, except by `in_graph.py`.

A compiled region passes all its saved tensors to the hooks at once, after its forward, and without
the ops that saved them: nothing could be gained there. Worse, Dynamo would try to compile the hooks
themselves, and all that they call. So a context sets the stance "force_eager" while it is open, and
logs this once when it sees a compiled module. Dynamo is used only if it is imported already, since
the import takes seconds.

The stance is the process's, and contexts need not close in the order in which they were opened, nor
be of one thread: the first sets it, and the last restores the one before.
"""

import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from elbowroom._checks import BACKEND_OPTIONS

_said = False


class _Thread(threading.local):
    """Number of contexts that are open on this thread."""

    depth = 0


_thread = _Thread()
_lock = threading.Lock()
_forcing = 0  # contexts of the process that are open
_stance: Any = None  # what the first of them has set
_patched = ExitStack()  # restores Dynamo's function


@contextmanager
def eagerly() -> Iterator[None]:
    """A context in which torch.compile'd code runs as it was written."""
    is_there = "torch._dynamo" in sys.modules
    _thread.depth += 1
    _force(is_there)
    try:
        yield
    finally:
        _force(-is_there)
        _thread.depth -= 1


def _force(more: int) -> None:
    """Changes the number of open contexts."""
    global _forcing, _stance
    with _lock:
        if more > 0 and not _forcing:
            _stance = torch.compiler.set_stance("force_eager")
            _stance.__enter__()
            _notice_functions()
        _forcing += more
        if more < 0 and not _forcing:
            _stance.__exit__(None, None, None)
            _stance = None
            _patched.close()


def _notice_functions() -> None:
    """Notices calls of compiled functions, until `_patched` is closed.

    There is no public interface for this: for each compiled call, Dynamo calls an internal function
    that applies its stance. In a version without it, calls are not noticed.
    """
    dynamo: Any = sys.modules["torch._dynamo.eval_frame"]
    plain = getattr(dynamo, "_callback_from_stance", None)
    if _said or plain is None:
        return

    def asked(callback: Any) -> Any:
        found = plain(callback)
        if found is None and callback not in (False, None) and _thread.depth and may_compile():
            _warn_eager("A compiled function is called, and")
        return found

    dynamo._callback_from_stance = asked
    _patched.callback(setattr, dynamo, "_callback_from_stance", plain)


@contextmanager
def forced_backend(backend: Callable[..., Any] | None) -> Iterator[None]:
    """Compiles with this backend in place of any other; None: with the backends as given.

    The process may have only one caller at a time.
    """
    with torch.compiler.set_stance("default", force_backend=backend):
        yield


def may_compile() -> bool:
    """Returns whether compiled code would run compiled if no context were open."""
    with _lock:
        before = getattr(_stance, "prev", None)
    return getattr(before, "stance", "default") == "default"


def compilations() -> frozenset[int] | None:
    """Returns ids of everything this process has passed to torch.compile; None: unknown.

    Dynamo notes a backend for each.
    """
    noted = getattr(sys.modules.get("torch._dynamo.eval_frame"), "cached_backends", None)
    return None if noted is None else frozenset(noted)


def is_compiled(module: nn.Module) -> bool:
    """Returns whether a call of the module is compiled: by a wrapper or by `.compile()`.

    It may also be compiled by `module.forward = torch.compile(module.forward)`.
    """
    if module._compiled_call_impl is not None or original(module) is not module:
        return True
    return compiled_forward(module) is not None


def calls_compiled(model: nn.Module, called: nn.Module | None) -> bool:
    """Returns whether a model's call goes through Dynamo now. called: the model, or its wrapper."""
    if called is None or called is model:
        called = model
        if model._compiled_call_impl is None and "forward" not in model.__dict__:
            return False  # most calls, so no more is asked
    return not _forcing and may_compile() and is_compiled(called)


def compiled_forward(module: nn.Module) -> Callable[..., Any] | None:
    """The compiled function that replaces the module's forward, if there is one."""
    forward = module.__dict__.get("forward")
    is_ours = forward is not None and original(module) is module
    return forward if is_ours and hasattr(forward, "_torchdynamo_orig_callable") else None


def inductor_options(module: nn.Module) -> dict[str, Any] | None:
    """The options for Inductor, if that compiles the module; None: another backend does.

    Our own backend is Inductor's, too; its own options are not for contexts.
    """
    backend = _backend_of(module)
    if backend is None:
        return None
    if isinstance(backend, torch._TorchCompileInductorWrapper):
        return dict(backend.config)
    if getattr(backend, "compiler_name", None) != "elbowroom":
        return None
    given = getattr(backend, "kwargs", {})
    inductor = {name.replace("-", "_"): v for name, v in (given.get("options") or {}).items()}
    if "mode" in given:
        from torch._inductor import list_mode_options

        inductor = {**list_mode_options(given["mode"]), **inductor}
    return {name: v for name, v in inductor.items() if name not in BACKEND_OPTIONS}


def context_of(module: nn.Module) -> Any:
    """Returns the context that torch.compile made: it knows backend, dynamic and fullgraph."""
    call = module._compiled_call_impl or compiled_forward(module)
    if call is None:
        return getattr(module, "dynamo_ctx", None)
    code, cells = getattr(call, "__code__", None), getattr(call, "__closure__", None) or ()
    found = dict(zip(code.co_freevars if code else (), cells, strict=False))
    return found["self"].cell_contents if "self" in found else None


def _backend_of(module: nn.Module) -> Any:
    """Returns the backend that compiles the module's graphs, as torch.compile was given it."""
    backend = getattr(context_of(module), "callback", None)
    while backend is not None:
        if isinstance(backend, torch._TorchCompileInductorWrapper | torch._TorchCompileWrapper):
            return backend
        backend = getattr(backend, "_torchdynamo_orig_backend", None)
    return None


def original(module: nn.Module) -> nn.Module:
    """The module that torch.compile was given, or the module itself."""
    # Asking for an attribute that is not there takes a microsecond, for each call of each module.
    if type(module._modules) is dict and "_orig_mod" not in module._modules:
        return module
    found = getattr(module, "_orig_mod", module)
    return found if isinstance(found, nn.Module) else module


def has_said() -> None:
    """Notes that the user knows: the message that compiled code runs eagerly is not repeated."""
    global _said
    _said = True


def ran_eagerly() -> bool:
    """Returns whether a compiled module has been seen to run eagerly in this process."""
    return _said


def say_eager(module: nn.Module) -> None:
    """Warns, once, if a compiled module is called while a context is open."""
    if _thread.depth and original(module) is not module:
        _warn_eager(f"{type(original(module)).__name__} is compiled, and")


def _warn_eager(what: str) -> None:
    global _said
    if _said:
        return
    _said = True
    warnings.warn(
        f"{what} runs eagerly inside an elbowroom context: saved tensors of a compiled region "
        "cannot be told apart. To keep it compiled, fit what torch.compile returns, as in "
        "er.fit(torch.compile(model), budget=...), or save by a policy that acts in compiled "
        "graphs (docs/compiled.md lists them).",
        stacklevel=4,
    )
