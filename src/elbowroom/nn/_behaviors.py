"""Behaviors that `er.nn.fp8` puts in front of the classes of a model's modules.

    Fp8Norm        the formula of a LayerNorm or RMSNorm, found by a probe, over x8
    Fp8Activation  an elementwise activation, over x8
    Fp8Flow        a module with several linear layers: inside it, activations that are called as
                   functions, products with what a node has given, and attention become nodes too

Each is the model's own module where a node does not apply: in float64, and under a compiler.
"""

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from elbowroom.nn._attention import attention
from elbowroom.nn._derived import Derived
from elbowroom.nn._flow import elementwise, in_flow, is_traced, multiply, norm
from elbowroom.nn._probe import NormFacts

FACTS, ATTENTION = "_fp8_facts", "_fp8_attention"  # in a module's __dict__
_ACTIVATIONS = {F.silu, F.gelu, F.relu, F.mish, F.hardswish, F.elu, F.leaky_relu}
_PRODUCTS = {torch.mul, torch.multiply, Tensor.mul, Tensor.multiply, Tensor.__mul__}


class Fp8Norm(Derived):
    """A norm that computes over its input in FP8, and saves that."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Computes the norm of one input [..., D], of the same shape."""
        x, facts = _only(args, kwargs), self.__dict__[FACTS]
        assert isinstance(facts, NormFacts)
        weight = getattr(self, facts.weight)
        bias = None if facts.bias is None else getattr(self, facts.bias)
        if x is None or not in_flow(x):
            return super().forward(*args, **kwargs)
        return norm(x, weight, bias, facts)


class Fp8Activation(Derived):
    """An elementwise activation that computes over its input in FP8, and saves that."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Computes the activation elementwise."""
        x = _only(args, kwargs)
        if x is None or getattr(self, "inplace", False) or not in_flow(x):
            return super().forward(*args, **kwargs)
        return elementwise(super().forward, x)


def _only(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
    """Returns the tensor that is the only argument, if there is just one."""
    given = (*args, *kwargs.values())
    return given[0] if len(given) == 1 and isinstance(given[0], Tensor) else None


class _Active(threading.local):
    inside = False


_active = _Active()


class Fp8Flow(Derived):
    """A module inside which activations, products and attention are nodes of the flow."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Computes the module's output."""
        if _active.inside or is_traced():
            return super().forward(*args, **kwargs)
        _active.inside = True
        try:
            with _Nodes(self.__dict__[ATTENTION]):
                return super().forward(*args, **kwargs)
        finally:
            _active.inside = False


class _Nodes(TorchFunctionMode):
    """Function mode that puts nodes in the place of functions."""

    def __init__(self, attention: bool) -> None:
        super().__init__()
        self.attention = attention

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        made = None
        if func in _PRODUCTS:
            made = _product(*args, **kwargs)
        elif func in _ACTIVATIONS:
            made = _activation(func, args, kwargs)
        elif func is F.scaled_dot_product_attention and self.attention:
            made = _attention(*args, **kwargs)
        return func(*args, **kwargs) if made is None else made


def _product(a: Any = None, b: Any = None, **kwargs: Any) -> Tensor | None:
    both = isinstance(a, Tensor) and isinstance(b, Tensor)
    if not both or kwargs or a.shape != b.shape or not in_flow(a, b):
        return None
    return multiply(a, b)


def _activation(
    func: Callable[..., Tensor], args: Sequence[Any], kwargs: dict[str, Any]
) -> Tensor | None:
    in_place = kwargs.get("inplace", False) or any(each is True for each in args[1:])
    if in_place or not args or not isinstance(args[0], Tensor) or not in_flow(args[0]):
        return None
    return elementwise(lambda x: func(x, *args[1:], **kwargs), args[0])


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    **kwargs: Any,
) -> Tensor | None:
    """Computes attention by a node of ours; None with dropout or a mask that learns.

    With dropout torch keeps its random state, and with a mask that learns its gradient.
    """
    if dropout_p > 0 or (attn_mask is not None and attn_mask.requires_grad):
        return None
    call = functools.partial(
        F.scaled_dot_product_attention, attn_mask=attn_mask, dropout_p=0.0, **kwargs
    )
    return attention(call, query, key, value)
