"""Recognition of the op that saves a tensor, and of what its backward needs.

The pack hook does not get the saving op. A TorchFunctionMode does: it sees each call from Python to
torch, and a tensor that is packed during a call is saved by it (about 3 us a call; CPU, torch
2.13). Calls that torch makes inside a Python function of its own (multi_head_attention_forward) or
in C++ (lstm) are seen as that function.

Codes are lossy only for known readers. A few functions are recognized immediately, by their
arguments; of these only the arguments named here may carry an error, never weights or statistics.
The saved tensors of all others stay as they are (`Deferred`) until the call has ended: then its
nodes exist, and show by which formula backward reads each tensor (`readers.py`).
"""

import sys
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache
from math import prod
from types import CodeType, FrameType, FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import handle_torch_function
from torch.utils._device import DeviceContext

from elbowroom.plan import Need
from elbowroom.plan.precision_floor import ATTENTION, CURVED
from elbowroom.plan.site import AGAIN, MIN_FEATURES, NORMS, RECURRENT, Formula, Reads, SiteName
from elbowroom.runtime.gathered import here
from elbowroom.runtime.kept import Deferred
from elbowroom.runtime.masks import CAPPED, MASKED_INPUT, MASKED_OUTPUT
from elbowroom.runtime.nested import tensors_in
from elbowroom.runtime.repeats import Observing
from elbowroom.runtime.slot import Geometry, Slot
from elbowroom.runtime.storage import PLAIN, version_of
from elbowroom.runtime.waiting import ready

if TYPE_CHECKING:
    from elbowroom.runtime.sources import Source, Sources

# Functions that are recognized immediately -> arguments (position, name) that may carry an error.
_FIRST = ((0, "input"),)
TOLERANT: dict[str, tuple[tuple[int, str], ...]] = {
    **dict.fromkeys(("conv1d", "conv2d", "conv3d"), _FIRST),
    **dict.fromkeys(("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"), _FIRST),
    "linear": _FIRST,
    **dict.fromkeys(("batch_norm", "layer_norm", "group_norm", "instance_norm"), _FIRST),
    **dict.fromkeys((*CURVED, *RECURRENT), _FIRST),
    "scaled_dot_product_attention": (*((0, "query"), (1, "key"), (2, "value"), (3, "attn_mask")),),
}
_RUNNING = ((1, "running_mean"), (2, "running_var"))
_GROUP_NORM = "NativeGroupNormBackward0"
BUFFERS = dict.fromkeys(("batch_norm", "instance_norm"), _RUNNING)  # saved, but the module's own
_METHODS = (types.MethodDescriptorType, types.WrapperDescriptorType, types.GetSetDescriptorType)
_TENSOR_CLASSES = (Tensor, torch._C.TensorBase, object)
_TORCH_MODULES = (
    "torch",
    "torch.functional",
    "torch.nn.functional",
    "torch._tensor",
    "torch._C._nn",
    *(f"elbowroom.runtime.{name}" for name in ("gathered", "computed_rows", "extremes")),  # our own
)
RESHAPES = (
    *(
        "ToCopy",
        "Clone",
        "View",
        "UnsafeView",
        "ReshapeAlias",
        "Alias",
        "Expand",
        "Unsqueeze",
        "Squeeze",
    ),
    *("TBackward", "Transpose", "Permute"),
)
_IN_PLACE = frozenset(
    (
        *(f"__i{op}__" for op in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")),
        *(f"__i{op}__" for op in ("and", "or", "xor", "lshift", "rshift", "matmul", "div")),
        *("__setitem__", "::__set__"),  # of a property, as in `x.data = y`
    )
)
# What `x.data` returns may be changed, and counts versions of its own.
_DATA = Tensor.data.__get__  # type: ignore[attr-defined]
_ASKED = {  # the argument that requests it
    **dict.fromkeys(("relu", "relu6", "silu", "mish", "hardswish", "hardsigmoid", "selu"), 1),
    **dict.fromkeys(("leaky_relu", "elu", "celu"), 2),
    **dict.fromkeys(("hardtanh", "threshold", "dropout", "alpha_dropout", "dropout2d"), 3),
    "rrelu": 4,
}
UNKNOWN = "?::"  # begins the name of what may be any op
LENDS = ("numpy", "__array__", "__dlpack__")  # memory, to what no version tells of
MAX_RESHAPES = 8
QUESTIONS = frozenset(  # reading metadata of a tensor saves nothing and creates nothing
    (
        *(Tensor.dim, Tensor.size, Tensor.numel, Tensor.stride, Tensor.is_contiguous),
        *(Tensor.is_floating_point, Tensor.data_ptr, torch.is_floating_point, torch.numel),
        *(
            getattr(Tensor, name).__get__
            for name in (
                *("shape", "dtype", "device", "ndim", "requires_grad", "layout", "is_cuda"),
                "grad_fn",  # checkpoint of torch 2.11 reads it before its piece begins
            )
        ),
    )
)

is_functorch_wrapped = torch._C._functorch.is_functorch_wrapped_tensor  # inside vmap: no memory


class Levels(NamedTuple):
    """The fewest levels that codes of attention's q and k, of its v and of its bias must have.

    None: no code is fine enough. halves: of q and k, but 16-bit floats are
    scale: of a product, what it is multiplied with before its softmax; None: of fused attention
    """

    logits: int | None
    values: int | None
    halves: bool = False
    bias: int | None = None
    scale: float | None = None

    def reach(self, wanted: "Levels") -> bool:
        """Returns whether a code of these levels, or its replacement, serves the wanted levels."""
        if self.halves and not wanted.halves and wanted.logits is None:
            return False
        logits = None if self.halves else self.logits  # which reach what any levels do
        pairs = (logits, wanted.logits), (self.values, wanted.values), (self.bias, wanted.bias)
        return all(has is None or (asks is not None and asks <= has) for has, asks in pairs)


@dataclass(eq=False)
class Call:
    """One call from Python to a torch function, while it runs.

    saved        slots of what it has saved so far
    own          slot of its first argument, if it has saved that
    at_end       is called with its result: tensors that wait for its statistics
    deferred     saved tensors that are decided on when it has ended
    fine         the sources of what it reads with a fine formula
    small        its statistics among what it has saved, which a recipe may need
    reads        the form of the saved tensor that its backward reads
    rounds       whether it runs as a node of ours whose backward rounds in another way
    would_rerun  attention: whether a node of ours may run it again; reruns: whether it does
    levels       the levels that attention needs of the code of the tensor that it saves now
    fewest       the fewest levels for attention's codes (`direct/attention/`)
    samples      the number of samples that a convolution's backward takes at once
    cast         slot of a cast of its first argument, by autocast
    in_parts     whether it runs as a node of ours that saves a tensor in parts
    of_parts     the name of a tensor that it saves in parts
    began        the sequence number of autograd that the call's own nodes begin with
    first        its first argument; version: the version of that as the call began
    """

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    name: str = ""
    saved: list[Slot] = field(default_factory=list)
    own: Slot | None = None
    at_end: "list[Callable[[Call, Any], None]]" = field(default_factory=list)
    deferred: list[tuple[Deferred, Tensor]] = field(default_factory=list)
    fine: list[Slot] = field(default_factory=list)
    small: list[Tensor] = field(default_factory=list)
    reads: Reads = Reads.RESTORED
    rounds: bool = False
    reruns: bool = False
    would_rerun: bool = False
    levels: int | None = 16
    fewest: Levels | None = None
    samples: int = 0
    cast: Slot | None = None
    in_parts: bool = False
    of_parts: SiteName | None = None
    began: int = field(default_factory=torch._C._autograd._get_sequence_nr)
    _tensors: list[Tensor] | None = None

    def __post_init__(self) -> None:
        self.name = self.name or _name(self.func)
        first: Any = self.args[0] if self.args else self.kwargs.get("input")
        # A subclass may raise for any attribute (an uninitialized parameter does).
        self.first, self.version = first, version_of(first) if type(first) in PLAIN else 0

    def arg(self, position: int, name: str, default: Any = None) -> Any:
        """An argument, by position or keyword."""
        return self.args[position] if position < len(self.args) else self.kwargs.get(name, default)

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors among its arguments, in nested containers, too."""
        found = self._tensors
        if found is None:
            found = self._tensors = [*tensors_in((self.args, self.kwargs))]
        return found

    @property
    def changes_first(self) -> bool:
        """True if the call changes its first argument in place, or lends its memory."""
        name = self.name.removeprefix(UNKNOWN)
        if name.endswith("__") or name in LENDS:
            return name in _IN_PLACE or self.lends
        return name.endswith("_") or self.arg(_ASKED.get(name, 99), "inplace") is True

    @property
    def lends(self) -> bool:
        """True if the call hands out the memory of its first argument, to be changed unseen."""
        return self.name.removeprefix(UNKNOWN) in LENDS or self.func == _DATA

    @property
    def may_have_changed_first(self) -> bool:
        """True if the ended call has changed its first argument, or lets others change it."""
        return type(self.first) in PLAIN and (version_of(self.first) != self.version or self.lends)

    @property
    def reading_is_known(self) -> bool:
        """True if the reading of a saved tensor is known as it is saved.

        Otherwise the nodes of the ended call show it.
        """
        return self.name in _READERS or self.reads not in (Reads.RESTORED, Reads.PLACE, Reads.ROWS)

    def saves_part(self, x: Tensor) -> bool:
        """Returns whether x, which it saves, is a part of what one of our nodes makes in parts."""
        return self.in_parts and x.dim() >= 2 and x.is_floating_point()

    def source(self, sources: "Sources") -> "tuple[Source | None, Geometry]":
        """Returns the source for recomputing the call, as `Sources.source` does.

        Mostly that is its first argument, as the call itself has saved it.
        """
        own = self.own
        if own is None or own.value is None or version_of(self.first) != self.version:
            return sources.source(self)
        return own, Geometry.of(self.first)

    def note_saved(self, slot: Slot, x: Tensor) -> None:
        """Notes that the call has saved x."""
        self.saved.append(slot)
        if x is self.first:
            self.own = slot
        elif self.cast is None and _is_cast(x, self.first):
            self.cast = slot
        if self.name in NORMS and slot.value is not None and _is_statistic(x):
            self.small.append(x.detach())


@lru_cache(1024)
def _name(func: Callable[..., Any]) -> str:
    """The name of one of torch's own functions; "mylib::relu" for a custom op of that name.

    A custom op may have the name of one of torch's, and save something else.
    """
    name: str = getattr(func, "__name__", "")
    if isinstance(func, _METHODS):
        return name if func.__objclass__ in _TENSOR_CLASSES else f"{UNKNOWN}{name}"
    module = getattr(func, "__module__", None) or ""
    return name if module in _TORCH_MODULES else f"{module.removeprefix('torch._ops.')}::{name}"


def sees_another_mode() -> bool:
    """Returns whether a function mode of somebody else's is open around our own."""
    modes = map(torch._C._get_function_stack_at, range(torch._C._len_torch_function_stack()))
    return not all(isinstance(mode, Observing | DeviceContext) for mode in modes)


def called_function(func: FunctionType) -> Any:
    """Returns the function of torch's that calls a mode, if the program has wrapped it.

    torch finds a function of Python by its name in its module. A wrapper that has taken that name
    (as a profiler's has) would run again inside of itself.
    """
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_MAX_FRAMES):
        if frame is None or frame.f_code is _HANDLES:
            break
        frame = frame.f_back
    caller = None if frame is None or frame.f_code is not _HANDLES else frame.f_back
    if caller is None or caller.f_globals.get(caller.f_code.co_name) is not func:
        return func  # as `max_pool2d` is that of a function that it calls
    code = caller.f_code
    if code is func.__code__ or code.co_freevars:
        return func
    if code not in _wrapped:
        _wrapped[code] = FunctionType(code, caller.f_globals)
    return _wrapped[code]


_HANDLES = handle_torch_function.__code__
_MAX_FRAMES = 8  # of ours, between torch's and the one that asks
_wrapped: dict[CodeType, FunctionType] = {}


class Consumers(Observing):
    """Keeps `call` at the current torch function, and reports ended calls to `finished`.

    The call runs as `run_as`(call); `failed`() is called if it raises. If a function mode of
    somebody else's sees the calls, too, another op may run in place of each: none has a known name.
    """

    def __init__(
        self,
        finished: Callable[[Call, Any], None],
        run_as: Callable[[Call], Callable[..., Any]],
        failed: Callable[[], None] | None = None,
    ) -> None:
        super().__init__()
        self._failed = failed
        self.call: Call | None = None
        self._finished, self._run_as = finished, run_as
        self._prefix = UNKNOWN if sees_another_mode() else ""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in QUESTIONS:
            return func(*args, **(kwargs or {}))
        if here.alive:
            func, args, kwargs = ready(func, args, kwargs, self.__torch_function__)
        outer = self.call
        func = called_function(func) if type(func) is FunctionType else func
        self.call = Call(func, args, kwargs or {}, self._prefix + _name(func))
        try:
            out = self._run_as(self.call)(*args, **(kwargs or {}))
            self._finished(self.call, out)
        except BaseException:
            if self._failed is not None:
                self._failed()
            raise
        finally:
            self.call = outer
        return out


def _is_statistic(x: Tensor) -> bool:
    """Returns whether x may be a statistic that a norm has saved: group_norm's have a node."""
    made = x.grad_fn
    is_made = not x.requires_grad if made is None else made.name() == _GROUP_NORM
    return is_made and x.is_floating_point()


def _is_cast(x: Tensor, of: Any) -> bool:
    """Returns whether x is, or is a view of, a copy of this argument in another dtype.

    By its node, for a weight may have the shape of the argument, and is cast, too.
    """
    copy = x if x._base is None else x._base
    if type(of) not in PLAIN or copy.dtype is of.dtype or copy.shape != of.shape:
        return False
    node = copy.grad_fn
    if node is None:
        return not of.requires_grad
    below, number = node.next_functions[0] if node.next_functions else (None, 0)
    if of.grad_fn is None:
        return getattr(below, "variable", None) is of
    return (below, number) == (of.grad_fn, of.output_nr)


class FormulaPart(Enum):
    """Part of a saved tensor in a later formula, which decides whether it may have a code."""

    NONE = "none"
    SATURATED = "saturated"  # the result of sigmoid, tanh or softmax
    EXPONENTIAL = "exponential"  # the result of exp
    GAUSSIAN = "gaussian"  # the result of exp of what was squared, which needs it exactly itself
    SQUARED = "squared"  # it is squared
    DIFFERENCE = "difference"  # a difference that is squared, or a square that something scales
    FACTOR = "factor"  # of a product of matrices


class Reading(NamedTuple):
    """How an op reads a tensor that it saves.

    why        the reason if it needs the exact value
    width      elements of a row, if a code should not mix the rows of x; 0: no rows
    dims       the dimensions of x that a row has; (): its last ones
    by_size    whether the op divides by the size of each row, so that no code may mix rows
               (`plan/site.py`)
    part       what x is to later ops that may need it exactly (`saturated.py`)
    number     autograd's number of the node that saved it, where it is of such a part
    """

    need: Need
    formula: Formula
    why: str = ""
    width: int = 0
    dims: tuple[int, ...] = ()
    by_size: bool = False
    part: FormulaPart = FormulaPart.NONE
    number: int = -1


_UNSEEN = "saved by an autograd.Function, or by an op that Python did not call"


def reading_of(x: Tensor, call: Call | None) -> Reading:
    """Returns how the op that saves x reads it, for ops that are recognized immediately."""
    if call is None or not call.name:
        return Reading(Need.EXACT, Formula.UNKNOWN, _UNSEEN)
    if call.in_parts and call.saves_part(x):
        return Reading(Need.LOSSY, Formula.LOG_PROBABILITY, dims=(1,))
    return _READERS.get(call.name, _unknown)(x, call)


def _unknown(x: Tensor, call: Call) -> Reading:
    return Reading(Need.EXACT, Formula.UNKNOWN, f"'{call.name}' is not known to tolerate errors")


def _input_of_second_run(x: Tensor, call: Call) -> Reading:
    if x.is_floating_point() and x.requires_grad:
        width = features_of(x)  # which a norm inside may read
        return Reading(Need.LOSSY, Formula.CURVED, width=width, by_size=width > 0)
    return Reading(Need.EXACT, Formula.UNKNOWN, "an input that wants no gradient")


def _mask(x: Tensor, call: Call) -> Reading:
    is_mask = x.is_floating_point() and (call.name not in CAPPED or is_capped(call))
    return Reading(Need.MASK, Formula.COMPARED) if is_mask else _unknown(x, call)


def _tolerant(x: Tensor, call: Call, formula: Formula, width: int) -> Reading:
    """Returns how an op reads x, of whose arguments some may carry an error."""
    if not x.is_floating_point():
        return Reading(Need.EXACT, Formula.INDEX, "not a floating dtype")
    if tolerant_arguments(x, call) or _is_layer_output(x, call):
        return Reading(Need.LOSSY, formula, width=width)
    return Reading(Need.EXACT, Formula.STATISTIC, f"a weight or statistic of '{call.name}'")


def _maps(x: Tensor, call: Call) -> Reading:
    return _tolerant(x, call, Formula.SUMMED, 0)


def _normalized(x: Tensor, call: Call) -> Reading:
    return _tolerant(x, call, Formula.SUMMED, prod(call.arg(1, "normalized_shape")))


def _features(x: Tensor, call: Call) -> Reading:
    return _tolerant(x, call, Formula.SUMMED, features_of(x, call))


def _curved(x: Tensor, call: Call) -> Reading:
    return _tolerant(x, call, Formula.CURVED, features_of(x, call))


def _attention(x: Tensor, call: Call) -> Reading:
    if call.reruns or not x.is_floating_point():
        return _features(x, call)
    why = "attention's logsumexp and output are those of the exact q, k and v"
    return Reading(Need.EXACT, Formula.DIFFERENCE, why)


def features_of(x: Tensor, call: Call | None = None) -> int:
    """The elements of a row of x, if it has the shape of features of tokens or nodes; else 0.

    Gradients may be as large as 1 / rms of a row, far from the norm that makes them so.
    """
    is_rows = 2 <= x.dim() <= 3 or (call is not None and call.name == "linear")
    return x.shape[-1] if is_rows and x.shape[-1] >= MIN_FEATURES else 0


def is_capped(call: Call) -> bool:
    """Returns whether the call is ReLU6, by this name or as a Hardtanh of its limits."""
    if call.name not in CAPPED:
        return False
    limits = (call.arg(1, "min_val"), 0), (call.arg(2, "max_val"), 6)
    return call.name == "relu6" or all(_is_number(*limit) for limit in limits)


def _is_number(argument: Any, number: int) -> bool:
    """Returns whether an argument is this number.

    Tensors are not compared: they may be large, and on a GPU.
    """
    return not isinstance(argument, Tensor) and bool(argument == number)


def tolerant_arguments(x: Tensor, call: Call) -> list[int | str]:
    """Returns which of the arguments that may carry an error x is, as positions or keywords."""
    known = TOLERANT.get(call.name)
    if known is _FIRST:
        return [0 if call.args else "input"] if is_given_as(x, call.first) else []
    if known is None:
        places: list[int | str] = [*range(len(call.args)), *call.kwargs]
        values = (*call.args, *call.kwargs.values())
        return [place for place, value in zip(places, values, strict=True) if is_given_as(x, value)]
    return [
        position if position < len(call.args) else name
        for position, name in known
        if is_given_as(x, call.arg(position, name))
    ]


def is_given_as(x: Tensor, argument: Any) -> bool:
    """Returns whether x is this argument.

    It is the same memory, or what the op made of it before its own work (a cast, a reshape).
    """
    if x is argument:
        return True
    if not isinstance(argument, Tensor) or is_functorch_wrapped(argument):
        return False
    if type(argument) in PLAIN and argument.layout is torch.strided and _starts_at(x, argument):
        return True
    if x.grad_fn is None:
        autocast = torch.is_autocast_enabled(x.device.type)
        return autocast and x.dtype is not argument.dtype and x.shape == argument.shape
    return argument.grad_fn is not None and _is_reshaped(x, argument)


def _starts_at(x: Tensor, argument: Tensor) -> bool:
    """Returns whether both tensors begin at the same place in memory."""
    if type(x) is Tensor:
        return x.data_ptr() == argument.data_ptr()
    same_storage = x.untyped_storage()._cdata == argument.untyped_storage()._cdata
    return same_storage and x.storage_offset() == argument.storage_offset()


def _is_reshaped(x: Tensor, argument: Tensor) -> bool:
    """Returns whether only casts, copies and reshapes lie between `argument` and x in the graph."""
    node, output = x.grad_fn, x.output_nr
    for _ in range(MAX_RESHAPES):
        if node is argument.grad_fn and output == argument.output_nr:
            return True
        if node is None or not node.name().startswith(RESHAPES):
            return False
        node, output = node.next_functions[0]
    return False


def is_buffer(x: Tensor, call: Call | None) -> bool:
    """Returns whether x is a running statistic, which is the module's as parameters are."""
    if call is None or call.name not in BUFFERS or x.dim() > 1:
        return False
    return any(is_given_as(x, call.arg(*buffer)) for buffer in BUFFERS[call.name])


def is_running_copy(x: Tensor, call: Call | None) -> bool:
    """Returns whether x may be running statistics that instance norm repeated for each sample.

    Instance norm saves them, and changes them afterwards without raising their version.
    """
    if call is None or call.name != "instance_norm" or x.dim() != 1 or x.grad_fn is not None:
        return False
    return any(call.arg(*buffer) is not None for buffer in _RUNNING)


def is_argument(x: Tensor, call: Call | None) -> bool:
    """Returns whether x is an argument of the op, rather than its result."""
    if call is None:
        return False
    given = (*call.args, *call.kwargs.values())
    return any(is_given_as(x, argument) for argument in given if argument is not None)


def _is_layer_output(x: Tensor, call: Call) -> bool:
    """Returns whether a recurrent layer made x for the layer above it in the same call."""
    of_layer = x.grad_fn is not None and x.grad_fn.name() == "_RunAgainBackward"
    return call.name in RECURRENT and of_layer


# How functions that are recognized immediately read what they save.
_READERS: dict[str, Callable[[Tensor, Call], Reading]] = {
    **dict.fromkeys((*MASKED_OUTPUT, *MASKED_INPUT, *CAPPED), _mask),
    **dict.fromkeys((name for name in TOLERANT if name.startswith("conv")), _maps),
    **dict.fromkeys((name for name in NORMS if name != "layer_norm"), _maps),
    "layer_norm": _normalized,
    "linear": _features,
    **dict.fromkeys((*CURVED, *RECURRENT), _curved),
    ATTENTION: _attention,
    "dropout": _unknown,
    **dict.fromkeys(AGAIN, _input_of_second_run),
}
