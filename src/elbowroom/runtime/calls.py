"""Interception of module calls: to open a context around a call, to record it, to repeat it.

PyTorch's global module hooks get no keyword arguments, and cannot change how a call runs. So
`__call__` itself is replaced while interception is on (as by torch.fx's tracer); no module is
changed.

    nn.Module.__call__     where any module may be meant: it costs about 1 us for each of them, and
                           to replace it 0.8 ms where 1,500 classes inherit it (transformers)
    that of some classes   where modules are known, as a fitted model is (`watch_known`), or those
                           that a settled step recomputes: a call of any other costs nothing

Where modules are known, their own classes alone get another `__call__`. That of the wrappers that
torch.compile makes gets a `_call_impl`, in which its own `__call__` ends. No module is changed, and
classes are restored afterwards.
"""

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Set
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

Around = Callable[[nn.Module, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]

_plain_call = nn.Module.__call__
_dynamo_callback = torch._C._dynamo.eval_frame.get_eval_frame_callback
_everywhere: Around | None = None
_of: Callable[[nn.Module], bool] | None = None
_users: Counter[type[nn.Module]] = Counter()  # contexts that intercept calls of a class
_ours: dict[type[nn.Module], Callable[..., Any]] = {}  # classes, and the `__call__` they have now
_lock = threading.RLock()  # see attach.py


def _none(module: nn.Module) -> bool:
    return False


# Of modules that are known:
_around: Around | None = None
_is_known: Callable[[nn.Module], bool] = _none
_wanted: set[type[nn.Module]] = set()
_optimized: type[nn.Module] | None = None  # that of compiled wrappers


class Interception:
    """Calls that go through `around` while a context is open.

    only  the `id` of each module whose calls do; None: of all modules
    """

    __slots__ = ("_classes", "_lasts", "around", "only")

    def __init__(self, around: Around, modules: Iterable[nn.Module] | None, *, lasts: bool) -> None:
        self.around, self._lasts = around, lasts
        self.only, self._classes = _ids_and_classes(modules)
        _install(self._classes)

    def see(self, modules: Iterable[nn.Module] | None) -> None:
        """Intercepts the calls of these modules from now on, in place of others; None: of all."""
        before = self._classes
        self.only, self._classes = _ids_and_classes(modules)
        _install(self._classes)
        _uninstall(before, lasts=self._lasts)

    def end(self) -> None:
        """Intercepts no call any more."""
        _uninstall(self._classes, lasts=self._lasts)


def _ids_and_classes(
    modules: Iterable[nn.Module] | None,
) -> tuple[frozenset[int] | None, Set[type[nn.Module]]]:
    """Returns the ids of modules, and the classes whose `__call__` is replaced to see them."""
    if modules is None:
        return None, {nn.Module}
    modules = list(modules)
    classes = {type(module) for module in modules}
    is_known = _optimized_class() not in classes and not any(map(calls_by_itself, classes))
    return frozenset(map(id, modules)), classes if is_known else {nn.Module}


class _Thread(threading.local):
    def __init__(self) -> None:
        self.around: list[Interception] = []


_thread = _Thread()


def watch(around: Around | None, of: Callable[[nn.Module], bool] | None = None) -> None:
    """Makes calls of modules on all threads go through `around` from now on. None ends that.

    of: only the calls of modules for which it is true
    """
    global _everywhere, _of
    if (around is None) != (_everywhere is None):
        (_uninstall if around is None else _install)({nn.Module})
    _everywhere, _of = around, of


@contextmanager
def intercepted(
    around: Around, modules: Iterable[nn.Module] | None = None, *, lasts: bool = False
) -> Iterator[Interception]:
    """Makes calls of modules on this thread go through around(module, call, args, kwargs).

    `call` is the plain call, without the module. Of several contexts, only the innermost sees it.

    modules: those whose calls are intercepted; None: all
    lasts: another such context will follow, so the classes of these modules may keep their
    `__call__` until the models of `watch_known` change. Python forgets what it knew of a class each
    time that one of its attributes is set, and from 3.13 on learns it 1,000 times at most
    """
    interception = Interception(around, modules, lasts=lasts)
    _thread.around.append(interception)
    try:
        yield interception
    finally:
        _thread.around.remove(interception)
        interception.end()


@contextmanager
def undisturbed() -> Iterator[None]:
    """Suspends `intercepted` on this thread: inside, modules are called without interception."""
    held, _thread.around = _thread.around, []
    try:
        yield
    finally:
        _thread.around = held


def _install(classes: Set[type[nn.Module]]) -> None:
    with _lock:
        _users.update(classes)
        for cls in classes:
            _replace(cls)
    pass_through()


def _uninstall(classes: Set[type[nn.Module]], *, lasts: bool = False) -> None:
    """Restores classes that nobody uses any more. lasts: as of `intercepted`."""
    with _lock:
        _users.subtract(classes)
        for cls in classes:
            if not _users[cls]:
                del _users[cls]
                if cls is nn.Module or not (cls in _wanted or (lasts and _wanted)):
                    _restore(cls)


def _replace(cls: type[nn.Module]) -> None:
    """Gives a class our `__call__`."""
    if cls is nn.Module:
        _ours[cls] = _call
        if cls.__call__ is not _call:  # to set it takes long
            cls.__call__ = _call  # type: ignore[method-assign]
    elif cls not in _ours:
        _ours[cls] = cls.__call__ = _call_of(cls)  # type: ignore[method-assign]


def _restore(cls: type[nn.Module]) -> None:
    """Gives a class its own `__call__` again, unless other code has wrapped ours since."""
    ours = _ours.pop(cls)
    if cls.__dict__.get("__call__") is not ours:
        return
    if cls is nn.Module:
        cls.__call__ = _plain_call  # type: ignore[method-assign]
    else:
        del cls.__call__


def pass_through() -> None:
    """Lets Dynamo, if it is there, look through our functions as it looks through torch.nn's own.

    After a graph break each call of a module would be compiled by itself else, and after eight
    modules none any more.
    """
    skip = getattr(sys.modules.get("torch._dynamo.eval_frame"), "skip_code", None)
    if skip is not None:
        for function in OURS:
            skip(function.__code__)


def dynamo_looks() -> bool:
    """Returns whether a compiled call is running, so that what is called next is compiled, too."""
    return _dynamo_callback() not in (None, False)


def _call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    # Asked first, and so that it costs little: Dynamo would guard on whatever else is asked, on the
    # identity of each module above all.
    if torch.compiler.is_dynamo_compiling():  # inside a compiled region of the user
        return _plain_call(module, *args, **kwargs)
    if (_everywhere is None or (_of is not None and not _of(module))) and not _around_of(module):
        return _plain_call(module, *args, **kwargs)  # most calls, so little else is asked
    if torch.compiler.is_compiling() or dynamo_looks():  # after a graph break, the same
        return _plain_call(module, *args, **kwargs)

    def inner(*args: Any, **kwargs: Any) -> Any:
        return _plain_call(module, *args, **kwargs)

    def call(*args: Any, **kwargs: Any) -> Any:
        around = _around_of(module)
        return inner(*args, **kwargs) if around is None else around(module, inner, args, kwargs)

    everywhere = _everywhere
    return call(*args, **kwargs) if everywhere is None else everywhere(module, call, args, kwargs)


def _around_of(module: nn.Module) -> Around | None:
    """Returns what the calls of a module go through on this thread, by the innermost context."""
    if not _thread.around:
        return None
    innermost = _thread.around[-1]
    only = innermost.only
    return innermost.around if only is None or id(module) in only else None


def watch_known(
    around: Around, is_known: Callable[[nn.Module], bool], classes: Iterable[type[nn.Module]]
) -> None:
    """Makes calls of known modules on all threads go through `around`.

    is_known: of a module, or of a compiled wrapper; classes: of all known modules. Of none: no more
    """
    global _around, _is_known
    with _lock:
        _around, _is_known = around, is_known
        _wanted.clear()
        _wanted.update(classes)
        _keep_in_step()


def watches_calls_of(module: nn.Module) -> bool:
    """Returns whether calls of this module are seen here."""
    return bool(_wanted) and _is_known(module)


def calls_by_itself(cls: type[nn.Module]) -> bool:
    """Returns whether a class has a `__call__` of its own, which it may change at any time."""
    if cls is nn.Module:
        return True
    above = cls.__mro__[: cls.__mro__.index(nn.Module)]
    return any(
        "__call__" in one.__dict__ and one is not _optimized_class() and one not in _ours
        for one in above
    )


def _keep_in_step() -> None:
    """Gives the classes that are wanted our `__call__`, and others their own again."""
    global _optimized
    optimized = _optimized_class()
    wanted = _wanted - {optimized}
    for cls in _ours.keys() - wanted - _users.keys():
        _restore(cls)
    for cls in wanted:
        _replace(cls)
    if optimized is not None:
        if _wanted and _optimized is None:
            _optimized = optimized
            optimized._call_impl = _call_optimized  # type: ignore[method-assign,assignment]
        elif not _wanted and _optimized is not None:
            _optimized = None
            if optimized.__dict__.get("_call_impl") is _call_optimized:
                del optimized._call_impl
    if _wanted and optimized is None:  # it may be imported during interception
        nn.Module.__init_subclass__ = classmethod(_init_subclass)  # type: ignore[assignment,arg-type]
    elif "__init_subclass__" in nn.Module.__dict__:
        del nn.Module.__init_subclass__
    pass_through()


def _optimized_class() -> type[nn.Module] | None:
    """Returns the class of compiled wrappers, if torch.compile has been imported."""
    return getattr(sys.modules.get("torch._dynamo.eval_frame"), "OptimizedModule", None)


def _init_subclass(cls: type[nn.Module], **settings: Any) -> None:
    """A class of modules is made, by which the first import of torch.compile is noticed."""
    super(nn.Module, cls).__init_subclass__(**settings)
    if cls.__module__ == "torch._dynamo.eval_frame" and cls.__name__ == "OptimizedModule":
        sys.modules[cls.__module__].OptimizedModule = cls  # type: ignore[attr-defined]
        with _lock:
            _keep_in_step()


def _call_of(cls: type[nn.Module]) -> Callable[..., Any]:
    """Returns what takes the place of the `__call__` that a class inherits."""

    def call_known(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling() or not _is_known(module):
            return _pass(cls, module, *args, **kwargs)
        return _seen(module, partial(_pass, cls), args, kwargs)

    return call_known


def _pass(cls: type[nn.Module], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Calls a module as if this class had no `__call__`, through the innermost context."""
    # By name, and now: this finds other interceptors (torch.fx).
    plain = nn.Module.__call__ if type(module) is cls else _inherited(cls, module)
    if torch.compiler.is_dynamo_compiling() or nn.Module in _users:  # whose `__call__` asks itself
        return plain(module, *args, **kwargs)
    around = _around_of(module)
    if around is None or torch.compiler.is_compiling() or dynamo_looks():
        return plain(module, *args, **kwargs)
    return around(module, partial(plain, module), args, kwargs)


def _inherited(cls: type[nn.Module], module: nn.Module) -> Callable[..., Any]:
    """Returns the `__call__` behind this class's, of a module whose class inherits from it.

    It need not be that of nn.Module: another class may stand between the two.
    """
    kinds = type(module).__mro__
    behind = (one for one in kinds[kinds.index(cls) + 1 :] if "__call__" in one.__dict__)
    found: Any = next(one for one in behind if one is nn.Module or one not in _ours)
    call: Callable[..., Any] = found.__call__
    return call


def _call_optimized(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    if torch.compiler.is_dynamo_compiling() or not _is_known(module):
        return nn.Module._call_impl(module, *args, **kwargs)  # type: ignore[no-untyped-call]
    pass_through()  # torch.compile may have been imported since
    return _seen(module, nn.Module._call_impl, args, kwargs)


def _seen(
    module: nn.Module, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        return plain(module, *args, **kwargs)

    around = _around
    if around is None or torch.compiler.is_compiling() or dynamo_looks():  # after a graph break
        return call(*args, **kwargs)
    return around(module, call, args, kwargs)


# What takes the place of a `__call__`; that of all classes has one code.
OURS = _call, _call_of(nn.Module), _pass, _call_optimized
