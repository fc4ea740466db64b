"""COAT's FP8 flow: norms, linear layers, activations and attention over 8-bit floats.

    x8, w8 = E4M3 of x, W        one scale a tensor (or a row): its largest absolute value / 448
    y  = x8 W8^T                 forward
    g8 = E5M2 of g
    dx = g8 W8        dW = g8^T x8

The input of a linear layer is saved once, as x8, and both products of backward read it. The result
of a norm, an activation, a product or attention is not saved at all: the input of that op is held
in FP8, with a scale for 128 elements; forward computes from these codes, and backward computes x8
from them again, with the same bits (`_flow.py`). Elsewhere x8 itself is saved (1 byte an element).
Layers that read the same x (q, k and v) share it if x is the result of an op: other tensors, such
as a buffer that each batch is read into, may change without autograd's notice (`x.data`, NumPy).

Weights keep their dtype and are rounded at each use, unless they are frozen and stored as w8.
`_scaled.py` computes the products, and says what "emulated" means. The master copy of a weight, its
gradient and the residual stream keep their dtype. (Facts: COAT, arXiv 2410.19313; FP8 formats,
arXiv 2209.05433.)
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from elbowroom.errors import ModuleError
from elbowroom.nn._autograd import apply, autocast_dtype, refuse_twice, without_autocast
from elbowroom.nn._behaviors import ATTENTION, FACTS, Fp8Activation, Fp8Flow, Fp8Norm
from elbowroom.nn._derived import Derived, derived
from elbowroom.nn._flow import Last, Make, is_traced, source_of
from elbowroom.nn._probe import is_elementwise, is_linear, norm_facts
from elbowroom.nn._scaled import E4M3, E5M2, backend, cast, product, quantize
from elbowroom.nn.swap import Replaced, replace

Scaling = Literal["tensor", "row"]
_SCALING, _HELD_AS = "_fp8_scaling", "_fp8_held_as"  # in a module's __dict__
_ALIKE = ("norm", "gelu", "silu", "swish", "activation", "linear", "conv1d")
_LIKE = (nn.Linear, nn.LayerNorm, nn.RMSNorm, nn.GELU, nn.SiLU)
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def fp8(
    model: nn.Module,
    *,
    keep: Iterable[str] = (),
    flow: bool = True,
    attention: bool = True,
    frozen: bool = False,
    scaling: Scaling = "tensor",
) -> Replaced:
    """Makes the layers of `model` compute on FP8 tensors and save these, in place.

        print(er.nn.fp8(model, keep=["lm_head"]))

    keep       names of modules that are not converted, including all modules inside; usually the
               head
    flow       also converts norms and activations, and products inside modules with several linear
               layers; False: linear layers alone
    attention  scaled_dot_product_attention also reads q, k and v in FP8 (needs flow)
    frozen     stores the weights of linear layers that do not require gradients in FP8, with their
               scale as `weight_scale` in the state_dict: 1 byte instead of 2 or 4. They are rounded
               permanently; `er.nn.revert` restores the decoded weights, and so does `merge` of an
               adapter over them
    scaling    "tensor": products have a scale per tensor; "row": a scale for each row of x, W and g

    Norms, activations and linear layers are recognized by what they compute, not by the names of
    their classes. Weights, keys and optimizers stay the same, except for frozen weights.
    `er.nn.revert(model)` undoes it.

    Returns what was replaced, which modules only look similar, and whether products run in FP8 on
    this device or are emulated. Layers that are in FP8 already stay as they are, so revert first to
    change settings. Raises ModuleError if `model` is not a module, if a name in `keep` does not
    exist, or for other scalings.
    """
    if scaling not in get_args(Scaling):
        raise ModuleError(
            f"er.nn.fp8: scaling={scaling!r} is not possible; "
            f"scaling is one of {', '.join(get_args(Scaling))}."
        )

    def choose(module: nn.Module) -> type[nn.Module] | None:
        kind = _kind_of(module, flow)
        if kind is not None and issubclass(kind, _Fp8):
            module.__dict__[_SCALING] = scaling
        return kind

    seen = {"like": _LIKE, "alike": _ALIKE} if flow else {"like": _LIKE[:1]}
    done = replace(model, choose, keep=keep, **seen)
    device = next(iter(model.parameters()), torch.empty(0)).device
    if any("Linear" in swap.now for swap in done.swaps):
        done = done.noting(f"products are {backend(device)}")
    held = _freeze(model, {swap.name for swap in done.swaps}) if frozen else []
    if held:
        done = done.noting(f"{len(held)} frozen weights are held in FP8")
    if flow:
        inside = _with_several(model, {swap.name for swap in done.swaps})
        for module in inside.values():
            module.__dict__[ATTENTION] = attention
        swaps = replace(model, lambda m: _flow_class(m, inside.values())).swaps
        done = done.joined(swaps)
    if held:
        replace(model, _merging_class)
    return done


def unfreeze(model: nn.Module) -> None:
    """Gives weights that are held in FP8 their dtype again: what they decode to."""
    for module in model.modules():
        if isinstance(module, _Fp8):
            module.thaw()


def _kind_of(module: nn.Module, flow: bool) -> type[nn.Module] | None:
    """Returns the class that a module gets; None if it is not converted."""
    kind = type(module)
    if kind is nn.Linear:
        return Fp8Linear
    if kind.__module__.startswith("elbowroom.nn.") or isinstance(module, (Derived, _Fp8)):
        return None
    if not isinstance(module, nn.Linear) and (found := is_linear(module)) is not None:
        return derived(Fp8Rows if found == "linear" else Fp8Columns, kind)
    if flow and (facts := norm_facts(module)) is not None:
        module.__dict__[FACTS] = facts
        return derived(Fp8Norm, kind)
    return derived(Fp8Activation, kind) if flow and is_elementwise(module) else None


def _flow_class(module: nn.Module, wanted: Iterable[nn.Module]) -> type[nn.Module] | None:
    return derived(Fp8Flow, type(module)) if any(module is each for each in wanted) else None


def _merging_class(module: nn.Module) -> type[nn.Module] | None:
    """Returns the class of an adapter's layer over a weight that is held in FP8."""
    kind = type(module)
    is_over = any(isinstance(m, _Fp8) and m.weight_scale is not None for m in module.children())
    is_adapter = all(callable(getattr(module, name, None)) for name in ("merge", "unmerge"))
    if not is_over or not is_adapter:
        return None
    if not issubclass(kind, Derived):
        return derived(Fp8Merging, kind)
    return derived(Fp8MergingFlow, kind.base) if kind.behavior is Fp8Flow else None


def _with_several(model: nn.Module, names: Iterable[str]) -> dict[str, nn.Module]:
    """The modules with two or more of these linear layers at most two levels below, by name.

    Containers are no level: their forward calls modules only. The second level is for wrappers of
    a layer, as adapters are.
    """
    modules = dict(model.named_modules())
    count: Counter[str] = Counter()
    for name in names:
        if isinstance(modules[name], _Fp8):
            count.update(_above(modules, name))
    return {
        name: modules[name]
        for name, n in count.items()
        if n > 1 and not isinstance(modules[name], (Derived, _Fp8))
    }


def _above(modules: dict[str, nn.Module], name: str) -> Iterator[str]:
    levels = 2
    while name and levels:
        name = name.rpartition(".")[0]
        if type(modules[name]) not in _CONTAINERS:
            levels -= 1
            yield name


def _freeze(model: nn.Module, names: Iterable[str]) -> list[str]:
    """Stores weights in FP8 that do not require gradients and that no other module shares."""
    owners = Counter(
        id(p) for m in model.modules() for p in m.__dict__.get("_parameters", {}).values()
    )
    held = []
    for name in names:
        module = model.get_submodule(name)
        if not isinstance(module, _Fp8) or module.weight_scale is not None:
            continue
        weight = module.weight
        if not weight.requires_grad and owners[id(weight)] == 1 and weight.is_floating_point():
            module.freeze()
            held.append(name)
    return held


class _Fp8(nn.Module):
    """A linear layer in FP8, whichever way its weight lies."""

    weight: Any
    bias: Any
    transposed = False  # weight is [in, out]

    @property
    def backend(self) -> str:
        """The backend that computes on the weights' device: "scaled_mm" or "emulated"."""
        return backend(self.weight.device)

    @property
    def weight_scale(self) -> Tensor | None:
        """The scale of a weight that is held in FP8, else None."""
        return self._buffers.get("weight_scale")

    @property
    def _rows(self) -> bool:
        return self.__dict__.get(_SCALING) == "row"

    def _linear(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out]."""
        weight = self.weight.t() if self.transposed else self.weight
        scale = self.weight_scale
        if scale is not None and weight.requires_grad:
            raise ModuleError(
                f"er.nn.{type(self).__name__}: this weight is held in FP8 and cannot learn, but "
                "requires gradients. Call er.nn.revert(model) first, and er.nn.fp8(model) again "
                "without frozen=True; or weight.requires_grad_(False)."
            )
        if scale is not None and self._rows and self.transposed:
            scale = scale.t()
        return linear(x, weight, self.bias, scale, rows=self._rows)

    def _accepts(self, x: Tensor) -> bool:
        return x.numel() > 0 and x.is_floating_point()

    # --- a weight that is held in FP8 ---

    def freeze(self) -> None:
        """Stores the weight in FP8; its rounding is permanent."""
        self.__dict__[_HELD_AS] = self.weight.dtype
        self._set_codes(*self._quantized(self.weight))

    def thaw(self) -> None:
        """Stores the decoded weight, in the dtype that it had."""
        scale = self.weight_scale
        if scale is None:
            return
        wide = (self.weight.detach().float() * scale).to(self.__dict__.pop(_HELD_AS))
        del self._buffers["weight_scale"]
        self.weight = nn.Parameter(wide, requires_grad=False)

    def _quantized(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        if self._rows and self.transposed:
            codes, scale = quantize(weight.t(), E4M3, rows=True)
            return codes.t().contiguous(), scale.t()
        return quantize(weight, E4M3, rows=self._rows)

    def _set_codes(self, codes: Tensor, scale: Tensor) -> None:
        self.weight = nn.Parameter(codes, requires_grad=False)
        self._buffers["weight_scale"] = scale.contiguous()

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Applies `fn` as torch does, but a change of dtype (`model.bfloat16()`) keeps codes."""
        scale = self.weight_scale
        if scale is None:
            return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.weight.dtype is not E4M3:
            self.__dict__[_HELD_AS] = self.weight.dtype
        self._set_codes(self.weight.detach().to(E4M3), scale.to(self.weight.device))
        return self

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        """Loads a state dict as torch does; weights are turned into what this layer holds.

        State dicts may have weights in FP8 or in other dtypes.
        """
        weight, scale = (state_dict.get(f"{prefix}{name}") for name in ("weight", "weight_scale"))
        if weight is not None and self.weight_scale is not None and scale is None:
            codes, made = self._quantized(weight.to(self.weight.device))
            state_dict[f"{prefix}weight"], state_dict[f"{prefix}weight_scale"] = codes, made
        elif weight is not None and self.weight_scale is None and scale is not None:
            state_dict[f"{prefix}weight"] = weight.float() * scale
            del state_dict[f"{prefix}weight_scale"]
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


class Fp8Linear(_Fp8, nn.Linear):
    """Linear layer that computes in FP8. Weights and keys are those of torch's."""

    def forward(self, input: Tensor) -> Tensor:
        """Input [..., in_features] -> [..., out_features]."""
        return self._linear(input) if self._accepts(input) else super().forward(input)


class Fp8Rows(_Fp8, Derived):
    """The user's linear layer, x W^T + b, in FP8."""

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out]."""
        if self._accepts(x):
            return self._linear(x)
        out: Tensor = super().forward(x)
        return out


class Fp8Columns(Fp8Rows):
    """The user's linear layer, x W + b (GPT-2's Conv1D), in FP8."""

    transposed = True


# --- adapters ---


class Fp8Merging(Derived):
    """The user's adapter (as PEFT's), whose product can be added to a weight that is in FP8."""

    merge: Any

    def merge(self, *args: Any, **kwargs: Any) -> Any:  # type: ignore[no-redef]
        """Merges as the user's class does, into the decoded weight, which stays decoded."""
        for module in self.children():
            if isinstance(module, _Fp8):
                module.thaw()
        return super().merge(*args, **kwargs)  # type: ignore[misc]


class Fp8MergingFlow(Fp8Merging, Fp8Flow):
    """The user's adapter, which can be merged as in `Fp8Merging` and is part of the flow."""


# --- the product ---


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    weight_scale: Tensor | None = None,
    *,
    rows: bool = False,
) -> Tensor:
    """x [..., K], weight [N, K], bias [N] -> x W^T + b [..., N].

    weight_scale  of a weight that is codes already; rows: scales of rows, not of tensors
    """
    dtype = autocast_dtype(x) or x.dtype
    last = _by_row if rows else _by_tensor
    x8, scale = last.compute(x) if is_traced() else last.of(x)
    source = None if is_traced() or weight_scale is not None else source_of(x)
    with without_autocast(x):
        args = x, weight, bias, weight_scale, x8, scale, dtype
        make, tensors = (None, ()) if source is None else source
        out: Tensor = apply(_Fp8Linear, *args, make, *tensors)
    return out


_by_tensor = Last(lambda x: quantize(x, E4M3))
_by_row = Last(lambda x: quantize(x, E4M3, rows=True))


class _Fp8Linear(torch.autograd.Function):
    """x [..., K], weight [N, K], bias [N], x8 [..., K] and scales -> [..., N].

    make, tensors  x again, in place of saving x8
    """

    @staticmethod
    def forward(
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        w_scale: Tensor | None,
        x8: Tensor,
        scale: Tensor,
        dtype: torch.dtype,
        make: Make | None,
        *tensors: Tensor,
    ) -> Tensor:
        w8, w_scale = _codes_of(weight, w_scale, rows=scale.dim() > 0)
        x8, scale = _flat(x8, scale)
        y = product(x8, w8.t(), scale, w_scale.t() if w_scale.dim() else w_scale, dtype)
        y = y if bias is None else y.add_(bias)
        return y.view(*x.shape[:-1], len(weight))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight, bias, w_scale, x8, scale, _, ctx.make, *tensors = inputs
        ctx.dtype, ctx.shape = x.dtype, x.shape
        ctx.bias_dtype = None if bias is None else bias.dtype
        read = () if not weight.requires_grad else (x8,) if ctx.make is None else tensors
        ctx.n = len(tensors)
        ctx.save_for_backward(weight, w_scale, scale, *read)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        refuse_twice("Fp8Linear")
        weight, w_scale, scale, *read = ctx.saved_tensors
        for_x, for_weight, for_bias = ctx.needs_input_grad[:3]
        g = grads[0].reshape(-1, len(weight))
        coded = quantize(g, E5M2) if scale.dim() == 0 else None
        dx = dw = None
        if for_x:
            w8, w_scale = _codes_of(weight, w_scale, rows=scale.dim() > 0)
            left, left_scale, w_scale = _left_factor(g, coded, w_scale)
            dx = product(left, w8, left_scale, w_scale, ctx.dtype).view(ctx.shape)
        if for_weight:
            x8 = read[0] if ctx.make is None else cast(ctx.make(read), scale, E4M3)
            x8, scale = _flat(x8, scale)
            turned = None if coded is None else (coded[0].t(), coded[1])
            left, left_scale, scale = _left_factor(g.t(), turned, scale)
            dw = product(left, x8, left_scale, scale, weight.dtype)
        db = g.sum(0, dtype=ctx.bias_dtype) if for_bias else None
        return dx, dw, db, *(None,) * (5 + ctx.n)


def _codes_of(weight: Tensor, scale: Tensor | None, *, rows: bool) -> tuple[Tensor, Tensor]:
    return quantize(weight, E4M3, rows=rows) if scale is None else (weight, scale)


def _flat(x8: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """x8 [M, K], and its scale [] or [M, 1]."""
    return x8.reshape(-1, x8.shape[-1]), scale.reshape(-1, 1) if scale.dim() else scale


def _left_factor(
    g: Tensor, coded: tuple[Tensor, Tensor] | None, scale: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The left factor of g [M, N] b8 [N, K] with its scale, and the scale that is left for b8.

    b8's scales of rows [N, 1] stand inside the sum, so g takes them in before it is rounded, with
    scales of its own rows: b8 serves as it is. E4M3, for the range of one row suffices.
    """
    if coded is not None:
        return *coded, scale
    codes, own = quantize(g * scale.t(), E4M3, rows=True)
    return codes, own, torch.ones_like(scale[:1])
