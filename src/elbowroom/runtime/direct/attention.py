"""Attention that runs again in backward, from what is held of q, k and v.

    forward    out = attention(q, k, v, mask); q, k, v and the mask are saved, and nothing else
    backward   the same op, on what is restored, then its own backward

torch's fused kernels save the logsumexp of each row of q k^T and the output besides, and backward
takes exp(q k^T - logsumexp) for the weights. That belongs to the very q and k of forward: of coded
ones the weights of a row do not add up to 1, by a factor that grows with exp(error of a logit), and
gradients were wrong by 31 times where q and k have a standard deviation of 3 (docs/log.md,
"attention"). Run again, weights, output and gradient are those of one attention, of q~, k~ and v~:
what is left is the error of a logit itself, which `levels_for` bounds.

    which kernel        what torch saves                        here
    fused               q, k, v, output, logsumexp              q, k, v, and one forward more
    none (math)         five tensors, T x T three of them       q, k, v, the RNG's state, likewise

The math path is what a CPU takes for dropout, a mask that wants a gradient, or q of three
dimensions. There the node stands in exact contexts, too: the same op on the same tensors, under the
same random numbers, gives the same bits. The fused kernels save little that is not needed anyway,
so that an exact context leaves them to torch.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from math import sqrt
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from elbowroom.codecs.base import FLOATS
from elbowroom.kernels import ops
from elbowroom.kernels.fakes import would_wait
from elbowroom.plan import Need, Site
from elbowroom.plan.precision_floor import MOST_LEVELS, UNSEEN_LEVELS, levels_for, levels_for_values
from elbowroom.plan.site import Formula, Reads
from elbowroom.runtime.consumers import Call, Levels, Reading, tolerant_arguments
from elbowroom.runtime.direct.math_attention import MATH_ATTENTION, Given
from elbowroom.runtime.normal import var_mean
from elbowroom.runtime.slot import Slot
from elbowroom.runtime.supported_types import PLAIN

_MATH = 0  # what torch._fused_sdp_choice calls the way without a fused kernel
_WORTH_BITS = 1 << 16  # weights: to draw as many takes as long as to see the ops of the math path
_GROUP = 64  # elements that share a step of a code, at most (`plan/precision_floor.py`)
_NAMES = ("query", "key", "value", "attn_mask")
_LOGITS, _VALUES = frozenset((0, 1, "query", "key")), frozenset((2, "value"))
_DIVIDES = (torch.ops.aten.div_.Tensor, torch.ops.aten.div_.Scalar)
_Grads = tuple[Tensor | None, ...]


@dataclass(frozen=True)
class _How:
    """Arguments of attention besides tensors, and the backend that it ran on."""

    dropout_p: float
    is_causal: bool
    scale: float | None
    enable_gqa: bool
    backend: int

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
    how = _How(dropout_p, is_causal, scale, enable_gqa, backend)
    made: Tensor = _Attention.apply(*tensors, how)  # type: ignore[no-untyped-call]
    return made


def _as_autocast(tensors: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    """Casts tensors as autocast, where it is on, casts what the op is given and saves."""
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

    Tensors that are wrong otherwise go to torch, for its own error. A dropout of CUDA's cannot be
    drawn again inside a graph that is being captured.
    """
    q, k, v, mask = (call.arg(i, name) for i, name in enumerate(_NAMES))
    given = (q, k, v) if mask is None else (q, k, v, mask)
    if not all(isinstance(x, Tensor) and type(x) in PLAIN and x.numel() for x in given):
        return False
    if not torch.is_tensor(q) or q.dtype not in (*FLOATS, torch.float64) or q.dim() < 3:
        return False
    if not all(x.device == q.device and x.dim() == q.dim() for x in (k, v)):
        return False
    if len({x.dtype for x in _as_autocast((q, k, v)) if x is not None}) > 1:
        return False
    if not any(x.requires_grad for x in given) or q.shape[-1] != k.shape[-1]:
        return False
    p, causal = call.arg(4, "dropout_p", 0.0), call.arg(5, "is_causal", False)
    if not isinstance(p, float | int) or not 0 <= p < 1 or not isinstance(causal, bool):
        return False
    return not (p and q.device.type == "cuda" and torch.cuda.is_current_stream_capturing())


def is_unfused(call: Call) -> bool:
    """Returns whether torch has no fused kernel for this call, and saves all intermediates."""
    tensors = tuple(call.arg(i, name) for i, name in enumerate(_NAMES))
    p, causal = call.arg(4, "dropout_p", 0.0), call.arg(5, "is_causal", False)
    scale, gqa = call.kwargs.get("scale"), call.kwargs.get("enable_gqa", False)
    q, mask = tensors[0], tensors[3]
    assert q is not None
    if type(q) not in (Tensor, nn.Parameter):  # a stand-in, of which torch says that nothing fits
        learned = mask is not None and mask.requires_grad
        return q.device.type == "cpu" and (p > 0 or q.dim() != 4 or learned)
    try:
        return _backend(_as_autocast(tensors), p, causal, scale, gqa) == _MATH
    except RuntimeError:  # of arguments that torch will refuse
        return False


def adds_nothing_up(call: Call) -> bool:
    """Returns whether q, k and v are three different tensors to autograd.

    Gradients of a tensor that is several of them are added up as they come. Where all of them come
    from one node, that is in another order, with other bits.
    """
    edges = set()
    for i in range(3):
        x = call.arg(i, _NAMES[i])
        edges.add(id(x) if x.grad_fn is None else (x.grad_fn, x.output_nr))
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
    """Bytes that torch's own op saves and the node does not: in a module that runs again, say."""
    q, k = call.arg(0, "query"), call.arg(1, "key")
    if not is_unfused(call):
        return int(q.nbytes)  # the output
    dropped = 2 if call.arg(4, "dropout_p", 0.0) else 0
    weights = q.numel() // q.shape[-1] * k.shape[-2] * q.itemsize
    return int(q.nbytes + k.nbytes + (1 + dropped) * weights)


def _workspace_nbytes(how: _How, q: Tensor, k: Tensor, mask: Tensor | None, drawn: "_Drawn") -> int:
    """Returns the bytes that backward takes beside gradients without a fused kernel.

    They were measured on a CPU.
    """
    learned_nbytes = mask.nbytes if mask is not None and mask.requires_grad else 0
    if not (how.dropout_p or learned_nbytes or q.dim() != 4):
        return 0
    draws_again = how.dropout_p and not isinstance(drawn, _Bits)
    matrices = 4 if draws_again or q.dim() != 4 else 3
    wide = max(q.itemsize, 4)  # the math path goes by float32 where q has fewer bits
    nbytes = matrices * (q.numel() // q.shape[-1]) * k.shape[-2] * wide
    return nbytes - learned_nbytes  # the mask's own gradient is one of them


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, how: _How
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        drawn, tensors = _drawn(how, q, k), (q, k, v, mask)
        ctx.how, ctx.drawn = how, drawn
        ctx.workspace_nbytes = _workspace_nbytes(how, q, k, mask, drawn)
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
        run = partial(_run_again, ctx, saved, drawn, grad)
        given = _written_out(ctx, saved)
        if given is None or len(drawn) != 1 or torch.is_grad_enabled():
            return *run(), None
        with torch.autocast("cpu", enabled=False):
            found = MATH_ATTENTION.gradients(given, drawn[0], grad, run)
        wanted = zip(found, ctx.needs_input_grad, strict=False)
        return *(x if needed else None for x, needed in wanted), None


def _written_out(ctx: Any, tensors: tuple[Any, ...]) -> Given | None:
    """Returns the arguments for the math path op by op; None if attention is left to torch."""
    how, (q, k, v, mask) = ctx.how, tensors
    if how.enable_gqa or not isinstance(ctx.drawn, _Bits):
        return None
    learned = ctx.needs_input_grad[3]
    given = Given(q, k, v, mask, how.dropout_p, how.is_causal, how.scale, learned)
    return given if given.fits else None


def _run_first(ctx: Any, tensors: tuple[Any, ...]) -> tuple[Tensor, ...]:
    """The result, and what was drawn for it."""
    with saved_tensors_hooks(_nothing, _same), ctx.drawn.first():
        out = _run(ctx.how, _leaves(tensors, ctx.needs_input_grad)).detach()
    return out, *ctx.drawn.take()


def _run_again(ctx: Any, saved: Any, drawn: Any, grad: Tensor) -> _Grads:
    """The gradients of q, k, v and the mask by forward, run again, and autograd."""
    again = torch.is_grad_enabled()  # somebody wants the gradient's own gradient
    given = _aliases(saved) if again else _leaves(saved, ctx.needs_input_grad)
    with ExitStack() as around:
        around.enter_context(torch._C.DisableTorchFunction())
        lean = None if again else ctx.drawn.lean(*drawn)
        pack, unpack = (Tensor.detach, _same) if lean is None else (lean.pack, lean.unpack)
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


def _run(how: _How, given: list[Any]) -> Tensor:
    """Runs the op as its caller had it: with gradients, and by the same kernel, for both matter."""
    now = how.dropout_p, how.is_causal, how.scale, how.enable_gqa
    with ExitStack() as around:
        around.enter_context(torch.enable_grad())
        if _backend(tuple(given), *now) != how.backend:  # chosen by a context that is closed by now
            around.enter_context(sdpa_kernel(SDPBackend(how.backend)))
        return how.run(*given)


def _leaves(tensors: Any, wanted: Any) -> list[Any]:
    """Returns a leaf for each tensor, also where two are one tensor."""
    each = zip(tensors, wanted, strict=False)
    return [None if x is None else x.detach().requires_grad_(needed) for x, needed in each]


def _aliases(tensors: Any) -> list[Any]:
    return [None if x is None else x.view_as(x) for x in tensors]


def _nothing(x: Tensor) -> None:
    """Drops a tensor that is saved inside: it is not needed, since it is made again."""


def _same(x: Tensor) -> Tensor:
    return x


class _Drawn:
    """Random numbers that dropout draws; this base class is for a run that draws none."""

    def first(self) -> AbstractContextManager[Any]:
        """Context around the run of forward."""
        return nullcontext()

    def take(self) -> tuple[Tensor, ...]:
        """Returns the tensors that are to be saved."""
        return ()

    def again(self, *saved: Tensor) -> AbstractContextManager[Any]:
        """Context around a second run, which draws the same. saved: what `take` gave."""
        return nullcontext()

    def lean(self, *saved: Tensor) -> "_LeanMask | None":
        """Returns the same for a run whose gradient is taken once; None: it takes no less so."""
        return None


class _Random(_Drawn):
    """State of a device's random numbers before the run, by which it draws the same once more."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._state = self._get()

    def _get(self) -> Tensor:
        on_cpu = self._device.type == "cpu"
        return torch.get_rng_state() if on_cpu else torch.cuda.get_rng_state(self._device)

    def _set(self, state: Tensor) -> None:
        if self._device.type == "cpu":
            torch.set_rng_state(state)
        else:
            torch.cuda.set_rng_state(state, self._device)

    @contextmanager
    def again(self, *saved: Tensor) -> Iterator[None]:
        now = self._get()
        self._set(self._state)
        try:
            yield
        finally:
            self._set(now)


class _Bits(_Drawn):
    """Random numbers of dropout held as one bit an element.

    To draw takes a third of attention's time on a CPU. The math path draws by one call of
    `bernoulli_`, which is told what to give the second time.
    """

    def __init__(self) -> None:
        self._bits: list[Tensor] = []

    def first(self) -> AbstractContextManager[Any]:
        return _Bernoulli(self._note)

    def _note(self, run: Callable[[], Tensor]) -> Tensor:
        made = run()
        self._bits.append(ops.pack_bits(made.contiguous().view(-1)))
        return made

    def take(self) -> tuple[Tensor, ...]:
        taken, self._bits = tuple(self._bits), []
        return taken

    def again(self, *saved: Tensor) -> AbstractContextManager[Any]:
        rest = iter(saved)
        return _Bernoulli(lambda run: _fill(run.args[0], next(rest)))

    def lean(self, *saved: Tensor) -> "_LeanMask | None":
        return _LeanMask(saved[0]) if len(saved) == 1 else None


def _fill(x: Tensor, bits: Tensor) -> None:
    """Write the ones and zeros that were drawn before into x."""
    flat = x.new_empty(x.numel()) if not x.is_contiguous() else x.view(-1)
    ops.unpack_bits(bits, 1.0, flat)
    if not x.is_contiguous():
        x.copy_(flat.view(x.shape))


class _Bernoulli(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that runs `instead`(the call) for each `bernoulli_`.

    changed  is told of each other op that changes a tensor in place, and of its arguments
    """

    def __init__(
        self,
        instead: Callable[[partial[Tensor]], Any],
        changed: Callable[..., None] | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._instead, self._changed = instead, changed

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        run = partial(func, *args, **(kwargs or {}))
        if func is torch.ops.aten.bernoulli_.float:
            self._instead(run)
            return args[0]
        if self._changed is not None and func._schema.is_mutable and isinstance(args[0], Tensor):
            self._changed(func, *args)
        return run()


class _LeanMask(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dropout's backward with one matrix of weights less at each of its two largest moments.

    The mask waits as bits, not as floats, while the gradient of the dropped weights is made; then
    that gradient, which nobody else has, is multiplied by the mask in place. The values are those
    of torch's own ops, so the bits are, too. Entered around backward.

    bits  what was drawn
    """

    def __init__(self, bits: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._bits = bits
        self._scales: list[Any] = []  # by which the drawn ones are divided
        self._at: int | None = None  # the address of the mask, as long as forward runs
        self._mask: Tensor | None = None  # as it was restored

    def drawing(self) -> AbstractContextManager[Any]:
        """Context around forward, in which it draws what was drawn before."""
        return _Bernoulli(self._give, self._changed)

    def _give(self, run: partial[Tensor]) -> None:
        mask: Tensor = run.args[0]
        _fill(mask, self._bits)
        self._at = mask.data_ptr() if mask.is_contiguous() else None

    def _changed(self, func: Any, x: Tensor, *rest: Any) -> None:
        """Notes what the mask is divided by; one that is changed otherwise is held as it is."""
        if x.data_ptr() != self._at:
            return
        if func in _DIVIDES and len(rest) == 1:
            self._scales.append(rest[0])
        else:
            self._at = None

    def pack(self, x: Tensor) -> Any:
        """Holds a saved tensor; of the mask, what it is made again from."""
        if x.data_ptr() == self._at and x.is_contiguous():
            self._at = None  # from here on another tensor may lie there
            return x.shape, x.dtype, x.device
        return x.detach()

    def unpack(self, held: Any) -> Tensor:
        if isinstance(held, Tensor):
            return held
        shape, dtype, device = held
        mask = torch.empty(shape, dtype=dtype, device=device)
        _fill(mask, self._bits)
        for scale in self._scales:
            mask.div_(scale)
        self._mask = mask
        return mask

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.mul.Tensor and self._mask is not None and args[1] is self._mask:
            mask, self._mask = self._mask, None
            if args[0].shape == mask.shape and args[0].dtype == mask.dtype:
                return args[0].mul_(mask)
        return func(*args, **(kwargs or {}))


def _drawn(how: _How, q: Tensor, k: Tensor) -> _Drawn:
    if not how.dropout_p:
        return _Drawn()
    weights = q.numel() // q.shape[-1] * k.shape[-2]
    on_cpu = type(q) is Tensor and q.device.type == "cpu" and q.dtype in FLOATS
    return (
        _Bits() if on_cpu and how.backend == _MATH and weights >= _WORTH_BITS else _Random(q.device)
    )


def attention_reading(
    x: Tensor, call: Call, slot: Slot, reading: Reading, *, looks: bool
) -> Reading:
    """Returns how attention reads x.

    Also notes how many levels a code must have (`Call.levels`).

    reading  how it would be read otherwise
    looks    whether to look at values, on a CPU: x may become a code
    """
    roles = tolerant_arguments(x, call)
    call.levels = _levels_of(roles, call, looks=looks)
    if reading.need is not Need.LOSSY:
        return reading
    if call.levels is None and _LOGITS.intersection(roles):
        why = "attention's logits are too sharp for any code of q and k"
    elif call.levels is None:
        why = "attention's v varies too little over its tokens for any code of it"
    elif looks and slot.waits:
        why = "its code waits for another op"
    else:
        return reading
    return Reading(Need.EXACT, Formula.DIFFERENCE, why)


def as_node(site: Site, x: Tensor, call: Call) -> Site:
    """Returns the site as it will be where the node stands; this step is written down without it.

    The output, which fused attention saves, is then saved by what reads it alone: any code does.
    """
    if call.reruns or call.levels is None or site.need is not Need.EXACT:
        return site
    if x.grad_fn is not None and x.grad_fn.name().startswith("ScaledDotProduct"):
        return replace(
            site,
            need=Need.LOSSY,
            formula=Formula.SUMMED,
            why="",
            least_levels=2,
            reads=Reads.GRADIENT,
        )
    if not tolerant_arguments(x, call):
        return site
    return replace(site, need=Need.LOSSY, formula=Formula.SUMMED, why="")


def _levels_of(roles: list[int | str], call: Call, *, looks: bool) -> int | None:
    """The fewest levels for a code of what attention saves; None: no code is fine enough.

    By values on a CPU, where looking is cheap. On a GPU, where it would make the host wait, and for
    stand-ins, q and k get the most: enough for a standard deviation of 5.5. v gets twice what it
    needs where no channel stands out: enough for one that is off by 14 standard deviations.

    roles  which arguments it is
    """
    logits, values = _LOGITS.intersection(roles), _VALUES.intersection(roles)
    q = call.arg(0, "query")
    if not looks or would_wait(q) or type(q) not in (Tensor, nn.Parameter):
        return MOST_LEVELS if logits else UNSEEN_LEVELS
    fewest = levels_by_values(call)
    asked = [*([fewest.logits] if logits else []), *([fewest.values] if values else [])]
    return None if None in asked else max((n for n in asked if n), default=levels_for(0.0))


def levels_by_values(call: Call) -> Levels:
    """The fewest levels for codes of this call's q and k, and of its v."""
    if call.fewest is None:
        q, k, v = (call.arg(i, _NAMES[i]) for i in range(3))
        logits = levels_for(spread(q, k, call.kwargs.get("scale")))
        call.fewest = Levels(logits, levels_for_values(spread_of_values(v)))
    return call.fewest


@torch.no_grad()
def spread(q: Tensor, k: Tensor, scale: float | None = None) -> float:
    """The variance of the error of a logit, times (levels - 1)^2, of the head where it is largest.

    q [..., T, D], k [..., S, D]. Of a code with step r / (levels - 1), r the range of the elements
    that share it, the error of an element has the variance step^2 / 12. So, on average over rows,

        scale^2 (mean(|q|^2) mean(r_k^2) + mean(|k|^2) mean(r_q^2)) / 12

    Softmax follows the longest rows, and so does the gradient: a key that is 15 times as long as
    the others has all of the weight of a query or none, and the queries in between make up most of
    q's gradient. Each mean is weighted by |row|^6: of rows alike it is the mean, and one row that
    is 4 times as long outweighs 4,000.

    Rows of a multiple of 64 elements hold whole groups. Others may share a step with those of
    another head, whose range counts for them then.
    """
    with torch._C.DisableTorchFunction():
        scale = 1 / sqrt(q.shape[-1]) if scale is None else scale
        norms, ranges = zip(*map(_norms_and_ranges, (q, k)), strict=True)
        if norms[0].shape != norms[1].shape:  # grouped queries, broadcast batches
            norms, ranges = (tuple(x.amax() for x in pair) for pair in (norms, ranges))
        both = norms[0] * ranges[1] + norms[1] * ranges[0]
        return float(both.max()) * scale**2 / 12


def _norms_and_ranges(x: Tensor) -> tuple[Tensor, Tensor]:
    """mean |row|^2 and mean range^2 of each head, by its longest rows."""
    wide = torch.promote_types(x.dtype, torch.float32)
    norms = torch.linalg.vector_norm(x.detach(), dim=-1, dtype=wide).float().square()  # [..., T]
    # 0 / 0 of a head of zeros: any weights do.
    weights = (norms / norms.amax(-1, keepdim=True)).pow(3).nan_to_num(1.0)
    weights = weights / weights.sum(-1, keepdim=True)
    return (norms * weights).sum(-1), (_ranges(x).square() * weights).sum(-1)


def _ranges(x: Tensor) -> Tensor:
    """The range of the elements that share a step with those of each row, [..., T]."""
    low, high = torch.aminmax(x.detach(), dim=-1)
    ranges = (high - low).float()
    if x.shape[-1] % _GROUP:
        ranges = ranges.amax(dim=-2, keepdim=True).expand(ranges.shape)
    return ranges


@torch.no_grad()
def spread_of_values(v: Tensor) -> float:
    """The variance of v's error over that of v, times (levels - 1)^2, of the worst head.

    v [..., S, D]. A logit's gradient is grad . (v_j - the weighted mean of v): what all tokens have
    in common cancels, but it widens the range that sets the step. So it is

        D mean(r_v^2) / 12 / (the sum over channels of the variance over tokens)
    """
    with torch._C.DisableTorchFunction():
        if v.shape[-2] == 1:
            return 0.0  # the only weight is 1, whatever v is
        varies = var_mean(v.detach(), dim=-2)[0].sum((-2, -1)).float()  # [...]
        noise = _ranges(v).square().mean(-1) * v.shape[-1] / 12
        return float((noise / varies).where(noise > 0, noise).max())
