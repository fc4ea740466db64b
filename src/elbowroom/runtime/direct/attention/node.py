"""Attention that is recomputed in backward, from what is held of q, k and v.

    forward    out = attention(q, k, v, mask); q, k, v and the mask are saved, and nothing else
    backward   the same op, on what is restored, then its own backward

torch's fused kernels save the logsumexp of each row of q k^T and the output besides, and backward
takes exp(q k^T - logsumexp) for the weights. This logsumexp belongs to the exact q and k of
forward: with coded ones the weights of a row do not add up to 1, by a factor that grows with
exp(error of a logit), and gradients were wrong by a factor of 31 where q and k have a standard
deviation of 3 (docs/log.md, "attention"). Recomputed, weights, output and gradient belong to one
attention, of q~, k~ and v~: the only error left is that of a logit itself, which `levels_for`
bounds.

    which kernel        what torch saves                        here
    fused               q, k, v, output, logsumexp              q, k, v, and one forward more (*)
    none (math)         five tensors, T x T three of them       q, k, v, the RNG's state, likewise

The math path is what a CPU takes for dropout, a mask that wants a gradient, or q of three
dimensions. There the node is used in exact contexts, too: the same op on the same tensors, with the
same random numbers, gives the same bits. The fused kernels save few additional bytes, so an exact
context leaves them to torch.

(*) None of float32 on a CPU: gradients take no forward there (`kernels/attention.py`).
"""

from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from elbowroom.codecs.base import FLOATS
from elbowroom.kernels import attention as one_pass
from elbowroom.runtime.consumers import Call
from elbowroom.runtime.direct.attention.dropout import Drawn, DrawnBits, drawn_for
from elbowroom.runtime.direct.attention.math_path import MATH_ATTENTION, MathPathArguments
from elbowroom.runtime.node import Node, itself, nothing
from elbowroom.runtime.storage import PLAIN

_DTYPES = (*FLOATS, torch.float64)
_MATH = 0  # torch._fused_sdp_choice's number for "no fused kernel"
_Grads = tuple[Tensor | None, ...]


class _CallSettings(NamedTuple):
    """Arguments of attention besides tensors, and the backend that it ran on."""

    dropout_p: float
    is_causal: bool
    scale: float | None
    enable_gqa: bool
    backend: int

    @property
    def settings(self) -> tuple[float, bool, float | None, bool]:
        """The arguments of `_backend` besides tensors."""
        return self.dropout_p, self.is_causal, self.scale, self.enable_gqa

    def run(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        out: Tensor = F.scaled_dot_product_attention(
            *(q, k, v, mask, self.dropout_p, self.is_causal),
            scale=self.scale,
            enable_gqa=self.enable_gqa,
        )
        return out


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Computes torch.nn.functional.scaled_dot_product_attention."""
    tensors: tuple[Tensor | None, ...] = query, key, value, attn_mask
    tensors = _as_autocast(tensors)
    backend = _backend(tensors, dropout_p, is_causal, scale, enable_gqa)
    how = _CallSettings(dropout_p, is_causal, scale, enable_gqa, backend)
    made: Tensor = _Attention.apply(*tensors, how)
    return made


def _as_autocast(tensors: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    """Casts tensors as autocast, where it is on, casts the op's inputs."""
    first = tensors[0]
    if first is None or not torch.is_autocast_enabled(first.device.type):
        return tensors
    dtype = torch.get_autocast_dtype(first.device.type)
    return tuple(
        x if x is None or not x.is_floating_point() or x.dtype is torch.float64 else x.to(dtype)
        for x in tensors
    )


def fits_attention(call: Call) -> bool:
    """Returns whether the node can run: on dense tensors of common dtypes that have elements.

    Other invalid tensors go to torch, for its own error. CUDA's dropout cannot be drawn again
    inside a graph that is being captured.
    """
    # Without generators: this is asked in every step.
    try:
        (q, k, v, mask), p, causal, *_ = given_to(*call.args, **call.kwargs)
    except TypeError:  # torch refuses them, too
        return False
    needs_grad = False
    for x in (q, k, v) if mask is None else (q, k, v, mask):
        if not (isinstance(x, Tensor) and type(x) in PLAIN and x.numel()):
            return False
        needs_grad = needs_grad or x.requires_grad
    if not needs_grad or q.dtype not in _DTYPES or q.dim() < 3 or q.shape[-1] != k.shape[-1]:
        return False
    if not k.device == v.device == q.device or not k.dim() == v.dim() == q.dim():
        return False
    cast: tuple[Any, ...] = _as_autocast((q, k, v))
    if not cast[0].dtype == cast[1].dtype == cast[2].dtype:
        return False
    if not isinstance(p, float | int) or not 0 <= p < 1 or not isinstance(causal, bool):
        return False
    return not (p and q.device.type == "cuda" and torch.cuda.is_current_stream_capturing())


def given_to(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: Any = 0.0,
    is_causal: Any = False,
    *,
    scale: Any = None,
    enable_gqa: Any = False,
) -> tuple[tuple[Any, ...], Any, Any, Any, Any]:
    """Returns the arguments of a call: the tensors, then those of `_backend`."""
    return (query, key, value, attn_mask), dropout_p, is_causal, scale, enable_gqa


def is_unfused(call: Call) -> bool:
    """Returns whether torch has no fused kernel for this call, and saves all intermediates."""
    tensors, p, causal, scale, gqa = given_to(*call.args, **call.kwargs)
    q, mask = tensors[0], tensors[3]
    if type(q) not in (Tensor, nn.Parameter):  # a stand-in, for which torch finds no kernel
        learned = mask is not None and mask.requires_grad
        return q.device.type == "cpu" and (p > 0 or q.dim() != 4 or learned)
    try:
        return _backend(_as_autocast(tensors), p, causal, scale, gqa) == _MATH
    except RuntimeError:  # of arguments that torch will refuse
        return False


def adds_nothing_up(call: Call) -> bool:
    """Returns whether q, k and v are three different tensors to autograd.

    If one tensor is several of them, its gradients are summed in their order of arrival. From a
    single node they arrive in another order, which gives other bits.
    """
    tensors, *_ = given_to(*call.args, **call.kwargs)
    edges = set()
    for x in tensors[:3]:
        node = x.grad_fn
        edges.add(id(x) if node is None else (node, x.output_nr))
    return len(edges) == 3


def _backend(
    tensors: tuple[Tensor | None, ...],
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> int:
    with torch._C.DisableTorchFunction():
        choice: Any = torch._fused_sdp_choice
        chosen: int = choice(*tensors, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    return chosen


def plain_nbytes(call: Call) -> int:
    """Bytes that torch's own op saves and the node does not, as in a module that is recomputed."""
    q, k = call.arg(0, "query"), call.arg(1, "key")
    if not is_unfused(call):
        return int(q.nbytes)  # the output
    dropped = 2 if call.arg(4, "dropout_p", 0.0) else 0
    weights = q.numel() // q.shape[-1] * k.shape[-2] * q.itemsize
    return int(q.nbytes + k.nbytes + (1 + dropped) * weights)


def _workspace_nbytes(
    how: _CallSettings, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, drawn: Drawn
) -> int:
    """Returns the bytes that backward takes beside gradients.

    Without a fused kernel, they were measured on a CPU.
    """
    learned_nbytes = mask.nbytes if mask is not None and mask.requires_grad else 0
    # Heads that share a key and a value take torch's math path, too, which copies both for each.
    shares = k.shape[:-2] != q.shape[:-2]
    if how.backend != _MATH and not (how.dropout_p or learned_nbytes or q.dim() != 4):
        given = one_pass.AttentionArguments(q, k, v, mask, how.is_causal, how.scale)
        return one_pass.workspace_nbytes(k.shape, v.shape) if given.fits else 0
    draws_again = how.dropout_p and not isinstance(drawn, DrawnBits)
    matrices = 4 if draws_again or q.dim() != 4 else 3
    wide = max(q.itemsize, 4)  # the math path computes in float32 where q has fewer bits
    nbytes = matrices * (q.numel() // q.shape[-1]) * k.shape[-2] * wide
    copies = 2 * (q.numel() // q.shape[-2]) * k.shape[-2] * wide if shares else 0
    return nbytes + copies - learned_nbytes  # the mask's own gradient is one of the matrices


class _Attention(Node):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, how: _CallSettings
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        tensors = q, k, v, mask
        drawn = drawn_for(q, k, how.dropout_p, is_math=how.backend == _MATH)
        ctx.how, ctx.drawn = how, drawn
        ctx.workspace_nbytes = _workspace_nbytes(how, q, k, v, mask, drawn)
        given = _written_out(ctx, tensors)
        run = partial(_run_first, ctx, tensors)
        out, *bits = run() if given is None else MATH_ATTENTION.output(given, run)
        ctx.save_for_backward(*tensors, *bits)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> _Grads:
        (grad,) = grads
        if grad is None:
            return (None,) * 5
        tensors = ctx.saved_tensors
        saved, drawn = tensors[:4], tensors[4:]
        whole = _of_whole_rows(ctx, saved)
        if whole is not None and not torch.is_grad_enabled():
            with _without_autocast():
                of_three = one_pass.gradients(whole, grad)
            asked = zip(of_three, ctx.needs_input_grad, strict=False)
            return *(x if needed else None for x, needed in asked), None, None
        run = partial(_run_again, ctx, saved, drawn, grad)
        given = _written_out(ctx, saved)
        if given is None or len(drawn) != 1 or torch.is_grad_enabled():
            return *run(), None
        with _without_autocast():
            found = MATH_ATTENTION.gradients(given, drawn[0], grad, run)
        wanted = zip(found, ctx.needs_input_grad, strict=False)
        return *(x if needed else None for x, needed in wanted), None


def _without_autocast() -> AbstractContextManager[Any]:
    """Context without autocast on a CPU: nothing is opened, which takes 6 us, if there is none."""
    if torch.is_autocast_enabled("cpu"):
        return torch.autocast("cpu", enabled=False)
    return nullcontext()


def _of_whole_rows(ctx: Any, tensors: tuple[Any, ...]) -> one_pass.AttentionArguments | None:
    """Returns the arguments for gradients in one pass; None if forward has to run again."""
    how, (q, k, v, mask) = ctx.how, tensors
    if how.backend == _MATH or how.dropout_p:
        return None
    given = one_pass.AttentionArguments(q, k, v, mask, how.is_causal, how.scale)
    return given if given.fits else None


def _written_out(ctx: Any, tensors: tuple[Any, ...]) -> MathPathArguments | None:
    """Returns the arguments for the math path op by op; None if attention is left to torch."""
    how, (q, k, v, mask) = ctx.how, tensors
    if how.enable_gqa or not isinstance(ctx.drawn, DrawnBits):
        return None
    learned = ctx.needs_input_grad[3]
    given = MathPathArguments(q, k, v, mask, how.dropout_p, how.is_causal, how.scale, learned)
    return given if given.fits else None


def _run_first(ctx: Any, tensors: tuple[Any, ...]) -> tuple[Tensor, ...]:
    """The result, and the random numbers drawn for it."""
    how, is_alone = ctx.how, not torch.is_grad_enabled() and tensors[0].device.type == "cpu"
    if is_alone and how.backend != _MATH and _backend(tensors, *how.settings) == how.backend:
        return (how.run(*tensors),)  # a CPU's fused kernel is the same without gradients
    with saved_tensors_hooks(nothing, itself), ctx.drawn.first():
        out = _run(ctx.how, _leaves(tensors, ctx.needs_input_grad)).detach()
    return out, *ctx.drawn.take()


def _run_again(ctx: Any, saved: Any, drawn: Any, grad: Tensor) -> _Grads:
    """The gradients of q, k, v and the mask by forward, run again, and autograd."""
    again = torch.is_grad_enabled()  # a gradient of the gradient is wanted
    given = _aliases(saved) if again else _leaves(saved, ctx.needs_input_grad)
    with ExitStack() as around:
        around.enter_context(torch._C.DisableTorchFunction())
        lean = None if again else ctx.drawn.lean(*drawn)
        pack, unpack = (Tensor.detach, itself) if lean is None else (lean.pack, lean.unpack)
        around.enter_context(saved_tensors_hooks(pack, unpack))
        around.enter_context(torch.autocast(grad.device.type, enabled=False))
        around.enter_context(ctx.drawn.again(*drawn) if lean is None else lean.drawing())
        out = _run(ctx.how, given)
    asked = [i for i in range(4) if ctx.needs_input_grad[i]]
    with nullcontext() if lean is None else lean:
        found = torch.autograd.grad(
            out, [given[i] for i in asked], grad, create_graph=again, allow_unused=True
        )
    made: dict[int, Tensor | None] = dict(zip(asked, found, strict=True))
    return tuple(made.get(i) for i in range(4))


def _run(how: _CallSettings, given: list[Any]) -> Tensor:
    """Runs the op as its caller did: with gradients and by the same kernel, since both matter."""
    with torch.enable_grad():
        if _backend(tuple(given), *how.settings) == how.backend:
            return how.run(*given)
        with sdpa_kernel(SDPBackend(how.backend)):  # chosen by a context that is closed by now
            return how.run(*given)


def _leaves(tensors: Any, wanted: Any) -> list[Any]:
    """Returns a leaf for each tensor, also where two are one tensor."""
    each = zip(tensors, wanted, strict=False)
    return [None if x is None else x.detach().requires_grad_(needed) for x, needed in each]


def _aliases(tensors: Any) -> list[Any]:
    return [None if x is None else x.view_as(x) for x in tensors]
