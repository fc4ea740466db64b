"""Recognition of what a module computes: it is run on a few numbers, whatever its class is called.

    norm         y = (x - mean) * rstd * (weight + offset) + bias, or without mean and bias
    elementwise  y[i] = f(x[i]), smooth enough for the rounding of an 8-bit float
    linear       y = x W^T + b, or x W + b

Only modules without children and buffers are tried, in training and in evaluation, on a copy or
with other values in place of their parameters: the model itself is not run and nothing in it
changes. What raises, draws random numbers or keeps a state is none of the three.
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

_SLOPE, _SHIFT = 4.0, 2.0  # of |x f'(x)| <= slope * |f(x)| + shift


@dataclass(frozen=True)
class NormFacts:
    """The formula of a norm over the last dimension.

    centered  the mean is taken away
    offset    what is added to the weight: 1 where a weight of zeros means the identity
    weight, bias  names of the parameters
    """

    centered: bool
    offset: float
    eps: float
    weight: str
    bias: str | None

    def normalized(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [..., D] -> (x - mean) * rstd and rstd [..., 1], both in x's dtype."""
        if self.centered:
            x = x - x.mean(-1, keepdim=True)
        rstd = (x.square().mean(-1, keepdim=True) + self.eps).rsqrt()
        return x * rstd, rstd

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The norm of x [..., D], in x's dtype."""
        y = self.normalized(x)[0] * (weight + self.offset)
        return y if bias is None else y + bias


def norm_facts(module: nn.Module) -> NormFacts | None:
    """The formula of a module that is a LayerNorm or an RMSNorm with a weight; else None."""
    own = dict(module.named_parameters())
    shapes = {tuple(p.shape) for p in own.values()}
    if not own or len(own) > 2 or len(shapes) != 1 or not _is_leaf(module):
        return None
    (shape,) = shapes
    if len(shape) != 1 or shape[0] < 2:
        return None
    random = torch.Generator().manual_seed(0)
    values = {name: 0.5 + torch.rand(shape, generator=random) for name in own}
    x = torch.randn(2, 4, *shape, generator=random)
    for weight in own:
        bias = next((name for name in own if name != weight), None)
        for centered, offset in ((True, 0.0), (False, 0.0), (True, 1.0), (False, 1.0)):
            found = _fitted(module, values, x, NormFacts(centered, offset, 0.0, weight, bias))
            if found is not None:
                return found
    return None


def _fitted(
    module: nn.Module, values: Mapping[str, Tensor], x: Tensor, guess: NormFacts
) -> NormFacts | None:
    """The guess with the eps that the module has, or None if it computes something else."""
    weight, bias = values[guess.weight], None if guess.bias is None else values[guess.bias]
    # What eps adds shows only where x is small: there y / n = sqrt(var / (var + eps)).
    small = 1e-3 * x
    large, little = _run(module, values, 100 * x), _run(module, values, small)
    if large is None or little is None or not _are_close(large, guess(100 * x, weight, bias)):
        return None
    exact = guess(small, weight, None)
    ratio = ((little if bias is None else little - bias) / exact).clamp(1e-6, 1.0)
    variance = guess.normalized(small)[1].pow(-2)
    eps = _exact_eps(module, float((variance * (ratio.pow(-2) - 1)).median()))
    facts = NormFacts(guess.centered, guess.offset, eps, guess.weight, guess.bias)
    for scale in (1e-2, 1.0):
        y = _run(module, values, scale * x)
        if y is None or not _are_close(y, facts(scale * x, weight, bias)):
            return None
    return facts


def _exact_eps(module: nn.Module, eps: float) -> float:
    """Returns the module's own number nearest to `eps`, which has rounding errors; else `eps`."""
    held = (each for each in vars(module).values() if isinstance(each, float))
    near = (each for each in held if each > 0 and abs(each - eps) <= max(0.02 * each, 1e-9))
    return min(near, key=lambda each: abs(each - eps), default=max(eps, 0.0))


def is_elementwise(module: nn.Module) -> bool:
    """Returns whether each output depends on its own input alone, by a function that suits FP8.

    It suits if a relative change of x is not made much larger: |x f'(x)| <= 4 |f(x)| + 2, which
    holds for GELU, SiLU and their like, and not for exp.
    """
    if next(module.parameters(), None) is not None or not _is_leaf(module):
        return False
    if getattr(module, "inplace", False):
        return False
    random = torch.Generator().manual_seed(0)
    x = 3 * torch.randn(3, 5, 24, generator=random)
    y = _run(module, {}, x)
    if y is None or y.shape != x.shape or _are_close(y, x):  # what changes nothing saves nothing
        return False
    order = torch.randperm(x.numel(), generator=random)
    moved = _run(module, {}, x.flatten()[order].view_as(x))
    other = torch.where(torch.rand(x.shape, generator=random) < 0.5, x, x + 1)
    changed = _run(module, {}, other)
    if moved is None or changed is None:
        return False
    same = other == x
    local = _are_close(moved.flatten(), y.flatten()[order]) and _are_close(changed[same], y[same])
    return local and suits(module)


def suits(f: Callable[[Tensor], Tensor]) -> bool:
    """Returns whether FP8's rounding of x changes f(x) by no more than a few such roundings."""
    x = torch.linspace(-60, 60, 4001).requires_grad_()
    try:
        with torch.enable_grad():
            y = f(x)
            (slope,) = torch.autograd.grad(y.sum(), x)
    except Exception:  # whatever a stranger's module raises, it is not recognized
        return False
    fits = (x * slope).abs() <= _SLOPE * y.abs() + _SHIFT
    return bool(fits.all()) and bool(y.isfinite().all())


def is_linear(module: nn.Module) -> str | None:
    """`"linear"` for x W^T + b, `"transposed"` for x W + b, else None; the weight is `weight`."""
    own = dict(module.named_parameters())
    weight, bias = own.get("weight"), own.get("bias")
    if weight is None or weight.dim() != 2 or not _is_leaf(module):
        return None
    if own.keys() - {"weight", "bias"} or isinstance(module, nn.Embedding):
        return None
    random = torch.Generator().manual_seed(0)
    # A few numbers among zeros, which cost no memory until they are written.
    values = {"weight": _sprinkled(weight.shape, random)}
    if bias is not None:
        values["bias"] = _sprinkled(bias.shape, random)
    b = values.get("bias")
    for name, inner in (("linear", 1), ("transposed", 0)):
        w = values["weight"] if name == "linear" else values["weight"].t()
        if b is not None and b.shape != (len(w),):
            continue
        x = torch.randn(2, 3, weight.shape[inner], generator=random)
        y = _run(module, values, x)
        if y is not None and _are_close(y, F.linear(x, w, b)):
            return name
    return None


def _sprinkled(shape: torch.Size, random: torch.Generator) -> Tensor:
    out = torch.zeros(shape)
    where = torch.randint(0, out.numel(), (4096,), generator=random)
    out.view(-1)[where] = torch.randn(len(where), generator=random)
    return out


def _is_leaf(module: nn.Module) -> bool:
    return not next(module.children(), None) and next(module.buffers(), None) is None


def _run(module: nn.Module, values: Mapping[str, Tensor], x: Tensor) -> Tensor | None:
    """Returns the output for x with these parameters; None if it fails or varies between runs."""
    results = []
    random = torch.get_rng_state()
    try:
        twin = _copy(module)
        with torch.no_grad():
            for training in (True, False, True):
                twin.training = training
                given = x.clone()
                y = functional_call(twin, dict(values), (given,))
                if type(y) is not Tensor or y.shape[:-1] != x.shape[:-1]:
                    return None
                if not torch.equal(given, x):
                    return None
                results.append(y.clone())
    except Exception:  # whatever a stranger's module raises, it is not recognized
        return None
    finally:
        torch.set_rng_state(random)
    return results[0] if all(torch.equal(each, results[0]) for each in results) else None


def _copy(module: nn.Module) -> nn.Module:
    """Returns a copy that shares the parameters and has no hooks, so that runs have no effects."""
    twin = copy.deepcopy(module, {id(p): p for p in module.parameters()})
    for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
        getattr(twin, name).clear()
    return twin


def _are_close(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool(torch.allclose(a.float(), b.float(), rtol=1e-3, atol=1e-4))
