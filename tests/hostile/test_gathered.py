"""Rows that are gathered when they are read: a program cannot tell, whatever it does with them.

Each program runs plainly and with rows that wait, three times, so that a script is followed in the
end. Losses, gradients and what else it looks at are compared bit by bit, with their types; where
plain raises, the same is raised.
"""

import copy
import gc
import io
import pickle
import threading
import warnings
import weakref
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import elbowroom as er
from elbowroom.errors import RestoreError
from elbowroom.runtime.context import PROCESS
from elbowroom.runtime.gathered import Gathered, here
from elbowroom.runtime.replay.replay import Replay

EDGES, NODES, HEADS, WIDTH = 20001, 700, 4, 16  # rows of 4.9 MiB, in five parts
D = HEADS * WIDTH

pytestmark = [
    pytest.mark.filterwarnings("ignore:this saving context changed nothing"),
    pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad"),
]


@pytest.fixture(autouse=True)
def rows_wait(monkeypatch):
    """All contexts of `er.saving` let rows wait, as those of a fit do whose budget is short."""
    monkeypatch.setattr(PROCESS, "rows_wait", True)


PROGRAMS: dict[str, Callable] = {}


def program(run: Callable) -> Callable:
    """Adds a program: (h, factor, index, at) -> loss, and what it looks at after backward."""
    PROGRAMS[run.__name__] = run
    return run


def added(rows: Tensor, at: Tensor) -> Tensor:
    return rows.new_zeros(NODES, D).index_add_(0, at, rows)


def scattered(rows: Tensor, at: Tensor) -> Tensor:
    index = at.view(-1, 1).expand_as(rows)
    return rows.new_zeros(NODES, D).scatter_add_(0, index, rows)


# ------------------------------------------------------------------ TorchScript, which no mode sees


def doubled_(x: Tensor) -> Tensor:
    return x.mul_(2.0)


def doubled_beside_(x: Tensor, rows: Tensor) -> Tensor:
    x.mul_(2.0)
    return rows * 2.0


class Doubling(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(2.0)


def as_script(one):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a DeprecationWarning, in torch 2.14 a FutureWarning
        return torch.jit.script(one)


@program
def a_script_changes_the_source(h, f, i, a):
    """It was a SystemError."""
    r = h.index_select(0, i)
    as_script(doubled_)(h)
    return (added(r, a) + h).square().sum(), list


@program
def a_script_reads_rows_after_it_has_changed_their_source(h, f, i, a):
    r = as_script(doubled_beside_)(h, h.index_select(0, i))
    return (added(r, a) + h).square().sum(), list


@program
def a_scripted_module_changes_the_source(h, f, i, a):
    r = h.index_select(0, i)
    as_script(Doubling())(h)
    return (added(r, a) + h).square().sum(), list


# ------------------------------------------------------------------ who looks at gradients of rows


@program
def hook_before_the_sum(h, f, i, a):
    seen, r = [], h.index_select(0, i)
    r.register_hook(lambda g: seen.append(g.clone()))
    return scattered(r, a).sin().sum(), lambda: seen


@program
def hook_after_the_sum(h, f, i, a):
    seen, r = [], h.index_select(0, i)
    s = scattered(r, a)
    r.register_hook(lambda g: seen.append(g))
    return s.sin().sum(), lambda: seen


@program
def hook_that_changes_the_gradient(h, f, i, a):
    r = h.index_select(0, i)
    s = added(f * r, a)
    r.register_hook(lambda g: 2 * g)
    return s.sin().sum(), list


@program
def hook_of_a_product(h, f, i, a):
    seen = []
    r = h.index_select(0, i) * f
    s = added(r, a)
    r.register_hook(lambda g: (seen.append(g), g * 2)[1])
    return s.sin().sum(), lambda: seen


@program
def retained_before(h, f, i, a):
    r = h.index_select(0, i)
    r.retain_grad()
    return scattered(r, a).sin().sum(), lambda: [r.grad, r.retains_grad]


@program
def retained_between_sums(h, f, i, a):
    r = h.index_select(0, i)
    s = scattered(r, a)
    r.retain_grad()
    return (s.sin() * added(r, i)).sum() + r.tanh().sum(), lambda: [r.grad]


@program
def retained_then_changed_in_place(h, f, i, a):
    r = h.index_select(0, i)
    r.retain_grad()
    r.mul_(2)
    return scattered(r, a).sin().sum(), lambda: [r.grad]


@program
def node_of_the_rows_is_hooked(h, f, i, a):
    seen, r = [], h.index_select(0, i)
    r.grad_fn.register_prehook(lambda g: seen.append(g[0]))
    return scattered(r, a).sin().sum(), lambda: seen


@program
def node_is_found_below_the_loss(h, f, i, a):
    seen = []
    loss = scattered(h.index_select(0, i), a).sin().sum()
    waiting = [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        waiting += [below for below, _ in node.next_functions if below is not None]
        if node.name() in ("_RowsBackward", "IndexSelectBackward0"):
            node.register_prehook(lambda g: seen.append(float(g[0].double().sum())))
    return loss, lambda: [set(seen)]


@program
def gradient_is_asked_for_inside(h, f, i, a):
    r = h.index_select(0, i)
    loss = added(r, a).sin().sum()
    (g,) = torch.autograd.grad(loss, r, retain_graph=True)
    return loss, lambda: [g]


@program
def gradient_of_the_gradient(h, f, i, a):
    r = f * h.index_select(0, i)
    loss = added(r, a).sin().sum()
    (g,) = torch.autograd.grad(loss, r, create_graph=True)
    return loss + g.square().sum(), lambda: [g]


@program
def penalty_of_the_gradient(h, f, i, a):
    loss = added(h.index_select(0, i) * f, a).sin().sum()
    (g,) = torch.autograd.grad(loss, h, create_graph=True)
    return loss + g.square().sum(), lambda: [g]


@program
def hooks_of_several(h, f, i, a):
    seen, r = [], h.index_select(0, i)
    s = added(r, a)
    torch.autograd.graph.register_multi_grad_hook([r, h], lambda g: seen.extend(g))
    return s.sin().sum(), lambda: seen


@program
def backward_for_the_rows_alone(h, f, i, a):
    r = h.index_select(0, i)
    loss = scattered(r, a).sin().sum()
    torch.autograd.backward([loss], inputs=[r], retain_graph=True)
    return loss, lambda: [r.grad]


@program
def hook_that_python_does_not_dispatch(h, f, i, a):
    seen, r = [], h.index_select(0, i)
    s = added(r, a)
    with torch._C.DisableTorchFunction():
        r.register_hook(lambda g: seen.append(g))
    return s.sin().sum(), lambda: seen


@program
def anomalies_are_looked_for(h, f, i, a):
    loss = added(h.index_select(0, i) * f, a).sin().sum()
    with torch.autograd.set_detect_anomaly(True):
        loss.backward(retain_graph=True)
    return loss, list


@program
def backward_twice(h, f, i, a):
    loss = added(h.index_select(0, i) * f, a).sin().sum()
    loss.backward(retain_graph=True)
    return loss, list


@program
def hook_changes_the_sums_gradient_in_place(h, f, i, a):
    base = h * 2
    base.register_hook(lambda g: g.mul_(2) and None)
    return base.index_add(0, a, h.index_select(0, i)).sin().sum(), list


# ------------------------------------------------------------------------ what changes in place


@program
def sum_into_the_source(h, f, i, a):
    h.index_add_(0, a, h.index_select(0, i))
    return h.sin().sum(), list


@program
def source_changes(h, f, i, a):
    r = h.index_select(0, i)
    h = torch.relu_(h)
    return (scattered(r, a) * h).sum(), list


@program
def source_changes_by_an_argument(h, f, i, a):
    r = h.index_select(0, i)
    h = nn.functional.relu(h, inplace=True)
    return (scattered(r, a) * h).sum(), list


@program
def part_of_the_source_changes(h, f, i, a):
    r = h.index_select(0, i)
    h[0] = 0
    return scattered(r, a).sin().sum() + h.sum(), list


@program
def view_of_the_source_changes(h, f, i, a):
    r = h.index_select(0, i)
    h.view(-1)[5:50].zero_()
    return scattered(r, a).sin().sum() + h.sum(), list


@program
def data_of_the_source_changes(h, f, i, a):
    r = h.index_select(0, i)
    h.data.mul_(2)
    return scattered(r, a).sin().sum() + h.sum(), list


@program
def data_of_the_source_is_set(h, f, i, a):
    r = h.index_select(0, i)
    h.data = torch.zeros_like(h)
    return scattered(r, a).sin().sum(), list


@program
def array_of_the_source_changes(h, f, i, a):
    r = h.index_select(0, i)
    h.detach().numpy()[:5] = 7
    return scattered(r, a).sin().sum(), list


@program
def source_is_an_output(h, f, i, a):
    r = h.index_select(0, i)
    with torch.no_grad():
        torch.mul(h.detach(), 2, out=h.detach())
    return scattered(r, a).sin().sum(), list


@program
def source_changes_after_the_product(h, f, i, a):
    s = scattered(f * h.index_select(0, i), a)
    return (s * torch.relu_(h)).sum(), list


@program
def index_changes(h, f, i, a):
    i = i.clone()
    r = h.index_select(0, i)
    i.fill_(3)
    r2 = r.tanh()  # no op after it reads the index: plain would refuse its backward
    return r2.sum().detach() + h.sum(), lambda: [r2.detach()]


@program
def factor_changes(h, f, i, a):
    f = f.detach().clone()
    r = f * h.index_select(0, i)
    f.zero_()
    return r.detach().sum() + h.sum(), lambda: [r.detach()]


@program
def rows_change(h, f, i, a):
    return scattered(h.index_select(0, i).mul_(2).add_(1), a).sin().sum(), list


@program
def rows_change_after_a_sum(h, f, i, a):
    r = h.index_select(0, i)
    s = scattered(r, a)
    r.mul_(2)
    return (s.sin() * scattered(r, a)).sum(), list


@program
def view_of_the_rows_changes(h, f, i, a):
    r = h.index_select(0, i)
    v = r.view(EDGES, HEADS, WIDTH)
    v.mul_(2)
    return scattered(r, a).sin().sum() + v.sum(), lambda: [v._base is r, r._version]


@program
def rows_change_without_a_gradient(h, f, i, a):
    r = h.index_select(0, i)
    with torch.no_grad():
        r.mul_(2)
        r[3] = 1
    return scattered(r, a).sin().sum() + r.tanh().sum(), lambda: [r.detach(), r._version]


@program
def data_of_the_rows_is_set(h, f, i, a):
    r = h.index_select(0, i)
    r.data = torch.ones_like(r)
    return scattered(r, a).sin().sum(), lambda: [r.detach()]


@program
def rows_are_detached_in_place(h, f, i, a):
    r = h.index_select(0, i)
    r.detach_()
    return scattered(r, a).sin().sum() + h.sum(), lambda: [r, r.is_leaf]


@program
def rows_are_no_more_in_shape(h, f, i, a):
    r = h.index_select(0, i)
    r.t_()
    return r.sin().sum(), lambda: [r.shape, r.detach()]


# --------------------------------------------------------------------------------- who gets them


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, r):
        ctx.save_for_backward(r)
        return r * 2 + r.exp()

    @staticmethod
    def backward(ctx, g):
        (r,) = ctx.saved_tensors
        return g * (2 + r.exp())


class Same(torch.autograd.Function):
    @staticmethod
    def forward(ctx, r):
        return r

    @staticmethod
    def backward(ctx, g):
        return 3 * g


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, r):
        return r.view_as(r)

    @staticmethod
    def backward(ctx, g):
        return -g


class InPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx, r):
        r.mul_(3)
        ctx.mark_dirty(r)
        return r

    @staticmethod
    def backward(ctx, g):
        return 3 * g


class Untouched(torch.autograd.Function):
    @staticmethod
    def forward(ctx, r):
        ctx.mark_dirty(r)
        return r

    @staticmethod
    def backward(ctx, g):
        assert type(g) is Tensor
        return 5 * g


class Differentiates(torch.autograd.Function):
    @staticmethod
    def forward(ctx, r):
        with torch.enable_grad():
            x = r.detach().requires_grad_()
            (ctx.slope,) = torch.autograd.grad(x.sin().sum(), x)
        return r.sin()

    @staticmethod
    def backward(ctx, g):
        return g * ctx.slope


for function in (Doubled, Same, Reversed, InPlace, Untouched, Differentiates):

    def through(h, f, i, a, function=function):
        r = function.apply(h.index_select(0, i))
        return scattered(r, a).sin().sum(), lambda: [type(r)]

    def through_alone(h, f, i, a, function=function):
        return scattered(function.apply(h.index_select(0, i)), a).sin().sum(), list

    def through_and_summed_before(h, f, i, a, function=function):
        r = h.index_select(0, i)
        s = scattered(r, a)
        q = function.apply(r)
        return (s * added(q, i)).sum() + r.cos().sum(), lambda: [type(q), q.detach(), r.detach()]

    PROGRAMS[f"function_{function.__name__}"] = through
    PROGRAMS[f"function_{function.__name__}_alone"] = through_alone
    PROGRAMS[f"function_{function.__name__}_after_a_sum"] = through_and_summed_before


@program
def threads_read_them(h, f, i, a):
    r = h.index_select(0, i)
    made = []
    threads = [
        threading.Thread(target=lambda k=k: made.append((k, r[k::7].tanh()))) for k in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    loss = sum(x.sum() for _, x in sorted(made, key=lambda one: one[0]))
    return loss + scattered(r, a).sin().sum(), lambda: [x.detach() for _, x in sorted(made)]


@program
def code_that_is_not_seen_reads_them(h, f, i, a):
    r = h.index_select(0, i)
    with torch._C.DisableTorchFunction():
        y = (r * f).tanh()
        z = torch.zeros(NODES, D).index_add_(0, a, r)
    return y.sum() + z.sin().sum(), lambda: [y.detach()]


def scripted(r: Tensor, a: Tensor):
    return torch.zeros([700, 64]).index_add(0, a, r * 2)


with warnings.catch_warnings(action="ignore"):  # it is deprecated
    scripted = torch.jit.script(scripted)


@program
def torchscript(h, f, i, a):
    return scripted(h.index_select(0, i), a).sin().sum(), list


@program
def mapped(h, f, i, a):
    r = h.index_select(0, i)
    return torch.func.vmap(lambda row: row.sin().sum())(r).sum(), list


@program
def checkpointed(h, f, i, a):
    r = h.index_select(0, i)
    y = checkpoint(lambda r, f: scattered(r * f, a).sin(), r, f, use_reentrant=False)
    return y.sum(), list


@program
def checkpointed_with_another_sum(h, f, i, a):
    r = h.index_select(0, i)
    s = scattered(r, a)
    y = checkpoint(lambda r: scattered(r, a).sin(), r, use_reentrant=False)
    return (s * y).sum(), list


@program
def checkpointed_by_reentry(h, f, i, a):
    r = h.index_select(0, i)
    return checkpoint(lambda r: added(r, a).sin(), r, use_reentrant=True).sum(), list


@program
def gathered_in_a_checkpoint(h, f, i, a):
    run = lambda h, f: scattered(h.index_select(0, i) * f, a).sin()  # noqa: E731
    return checkpoint(run, h, f, use_reentrant=False).sum(), list


@program
def hooks_of_others(h, f, i, a):
    r, packed = h.index_select(0, i), []
    with saved_tensors_hooks(lambda x: (packed.append(x.shape), x.clone())[1], lambda x: x):
        y = (r * r).sum() + scattered(r, a).sin().sum() + Doubled.apply(r).sum()
    return y, list


@program
def hooks_of_others_that_keep_them(h, f, i, a):
    r = h.index_select(0, i)
    with saved_tensors_hooks(lambda x: x, lambda x: x):
        y = Doubled.apply(r).sum() + r.square().sum()
    return y, list


@program
def function_modes_of_others(h, f, i, a):
    names = []

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            names.append(func.__name__)
            return func(*args, **(kwargs or {}))

    r = h.index_select(0, i)
    with Mode():
        s = added(r, a)
    return s.sin().sum(), lambda: [names]


@program
def dispatch_modes_of_others(h, f, i, a):
    names = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            names.append(func.__name__)
            return func(*args, **(kwargs or {}))

    r = h.index_select(0, i)
    with Mode():
        y = (r * 2).tanh()
    ours = "detach", "empty", "set_", "as_strided", "clone"  # elbowroom's own, in any context
    return y.sum(), lambda: [[name for name in names if not name.startswith(ours)]]


@program
def autocast(h, f, i, a):
    with torch.autocast("cpu"):
        r = h.index_select(0, i) * f
        s = scattered(r, a)
        y = s @ torch.ones(D, D) + r[:NODES] @ torch.ones(D, D)
    return y.float().sin().sum(), lambda: [y.detach()]


@program
def without_gradients(h, f, i, a):
    r = h.index_select(0, i)
    with torch.no_grad():
        most, s = r.max(), added(r, a)
    with torch.inference_mode():
        least = float(r.min())
    y = added(r, a)
    return (y.sin() * most * least + s).sum(), lambda: [s, s.requires_grad]


@program
def modules_with_hooks(h, f, i, a):
    seen, module = [], nn.Identity()
    module.register_forward_hook(lambda module, args, out: seen.append(out.detach()))
    module.register_full_backward_hook(lambda module, of_in, of_out: (of_in[0] * 2,))
    return added(module(h.index_select(0, i)), a).sin().sum(), lambda: seen


# ------------------------------------------------------------------------------ what they look like


@program
def looks(h, f, i, a):
    r = h.index_select(0, i)
    kept, before = weakref.ref(r), id(r)
    r.tag = 5
    s = scattered(r, a)
    y = r.sin()
    facts = [type(r) is Tensor, type(y) is Tensor, isinstance(r, Tensor), kept() is r]
    facts += [id(r) == before, r.tag, {r: 1}[r], len(r), r.shape, r.stride(), r.dtype, r.is_leaf]
    facts += [r._version, r.storage_offset(), r._is_view(), r.output_nr, r.is_shared()]
    facts += [r.untyped_storage().nbytes(), r.is_inference(), r.data_ptr() != 0, r.layout]
    return y.sum() + s.sin().sum(), lambda: facts


@program
def questions_alone(h, f, i, a):
    r = h.index_select(0, i)
    facts = [isinstance(r, Tensor), len(r), r.shape, r.stride(), r.dtype, r.is_leaf, r.dim()]
    facts += [r.requires_grad, r.device, r.is_contiguous(), r.numel(), r.nbytes, r.size(1)]
    facts += [r.new_zeros(2).dtype, r.new_full((2,), 3.0), r.ndim, r.is_floating_point()]
    return h.sum(), lambda: facts


@program
def pickled(h, f, i, a):
    r, file = h.index_select(0, i), io.BytesIO()
    torch.save(r, file)
    file.seek(0)
    read, other = torch.load(file), pickle.loads(pickle.dumps(r.detach()))
    return h.sum() + r.sum(), lambda: [read.detach(), other, type(read), read.requires_grad]


@program
def copied(h, f, i, a):
    r = h.index_select(0, i)
    by_user = pytest.raises(RuntimeError, match="explicitly by the user")
    with by_user if h.requires_grad else nullcontext():
        copy.deepcopy(r)
    deep, flat = copy.deepcopy(r.detach()), copy.copy(r)
    return r.sum() + flat.detach().sum(), lambda: [deep, type(flat), flat.is_leaf]


@program
def numbers(h, f, i, a):
    r = h.index_select(0, i)
    with pytest.raises(RuntimeError, match="requires grad") if h.requires_grad else nullcontext():
        r.numpy()
    found = [
        r.detach().numpy().sum().item(),
        r[0, 0].item(),
        r.tolist()[5][3],
        bool((r == r).all()),
    ]
    with torch.no_grad():
        found += [h.index_select(0, i).numpy().sum().item(), str(r.detach())]
    return r.sin().sum(), lambda: found


@program
def arrays_of_unread_rows(h, f, i, a):
    r, q = h.index_select(0, i), h.index_select(0, a)
    with torch.no_grad():
        pointer = r.data_ptr() != 0
        listed = q.tolist()[7][1]
    return (r * q).sum(), lambda: [pointer, listed]


@program
def printed(h, f, i, a):
    r = h.index_select(0, i)
    return r.sum(), lambda: [repr(r.detach())]


@program
def among_others(h, f, i, a):
    r = h.index_select(0, i)
    joined = torch.cat([r, *r.split(1000)])
    stacked = torch.stack([r, h.index_select(0, a)])
    return joined.cos().sum() + stacked.sin().sum(), list


@program
def an_error_in_between(h, f, i, a):
    r = h.index_select(0, i)
    with pytest.raises(RuntimeError):
        r @ torch.ones(3, 3)
    with pytest.raises(RuntimeError):
        r.new_zeros(NODES, D + 1).index_add_(0, a, r)
    return added(r, a).sin().sum(), list


# ------------------------------------------------------------------------------- what plain refuses


@program
def index_too_large(h, f, i, a):
    i = i.clone()
    i[3] = NODES
    h.index_select(0, i)


@program
def index_below_zero(h, f, i, a):
    i = i.clone()
    i[3] = -1
    h.index_select(0, i)


@program
def place_too_large(h, f, i, a):
    a = a.clone()
    a[-1] = NODES
    added(h.index_select(0, i), a)


@program
def place_below_zero(h, f, i, a):
    a = a.clone()
    a[-1] = -2
    scattered(h.index_select(0, i), a)


@program
def index_of_another_shape(h, f, i, a):
    r = h.index_select(0, i)
    r.new_zeros(NODES, D).scatter_add_(0, a, r)


@program
def index_with_columns(h, f, i, a):
    r = h.index_select(0, i)
    r.new_zeros(NODES, D).index_add_(0, a[:, None].expand(-1, D), r)


@program
def index_of_floats(h, f, i, a):
    h.index_select(0, i.float())


@program
def sum_into_a_leaf(h, f, i, a):
    torch.zeros(NODES, D, requires_grad=True).index_add_(0, a, h.index_select(0, i))


@program
def sum_into_another_dtype(h, f, i, a):
    torch.zeros(NODES, D, dtype=torch.float64).index_add_(0, a, h.index_select(0, i))


@program
def graph_is_gone(h, f, i, a):
    r = h.index_select(0, i)
    loss = added(r, a).sin().sum()
    loss.backward()
    return loss + r.sum(), list


def found(run: Callable, context, *, wants: bool = True) -> list:
    """What a program gives, with gradients of its leaves; or what it raises.

    wants: whether the source of the rows wants a gradient; features of the data want none
    """
    torch.manual_seed(0)
    x = torch.randn(NODES, D, requires_grad=wants)
    f = torch.rand(EDGES, 1, requires_grad=True)
    i, a = torch.randint(NODES, (2, EDGES)).unbind()
    try:
        with context:
            loss, look = run(x * 1, f * 1, i, a)
        loss.backward()
    except (RuntimeError, IndexError, AttributeError, AssertionError) as error:
        return [type(error).__mro__[-3], str(error).split(":")[0][:40]]
    return [loss.detach(), x.grad, f.grad, *look()]


def alike(one, other) -> bool:
    if isinstance(one, Tensor):
        return type(one) is type(other) and torch.equal(one, other)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(alike, one, other))
    return bool(one == other)


@pytest.mark.parametrize("wants", [True, False], ids=["features", "data"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_cannot_tell(name, wants):
    plain = found(PROGRAMS[name], nullcontext(), wants=wants)
    for _ in range(3):
        ours = found(PROGRAMS[name], er.saving(), wants=wants)
        assert [alike(x, y) for x, y in zip(ours, plain, strict=True)] == [True] * len(plain), ours
    assert here.rows is None


def test_rows_wait():
    with er.saving():
        x = torch.randn(NODES, D, requires_grad=True) * 1
        i, a = torch.randint(NODES, (2, EDGES)).unbind()
        r = x.index_select(0, i)
        scattered(r, a)
        assert isinstance(r, Gathered)
        assert r.waits
        r.sum()
        assert type(r) is Tensor


def test_nothing_holds_the_source_or_the_rows():
    x = torch.randn(NODES, D, requires_grad=True)
    h = x * 1
    gone = [weakref.ref(h)]
    with er.saving():
        r = h.index_select(0, torch.randint(NODES, (EDGES,)))
        s = added(r, torch.randint(NODES, (EDGES,)))
        gone.append(weakref.ref(r))
        del r, h
    loss = s.sin().sum()
    loss.backward()
    del s, loss
    gc.collect()
    assert [one() for one in gone] == [None, None]


@pytest.mark.parametrize(
    ("way", "waits"),
    [
        ({}, True),
        ({"policy": "dither", "levels": 16}, True),
        ({"policy": "dither", "levels": 16, "rebuild": False}, False),
    ],
)
def test_rows_wait_in_contexts_that_rebuild(way, waits, monkeypatch):
    monkeypatch.setattr(PROCESS, "rows_wait", False)
    for _ in range(3):  # the last ones follow a script
        x = torch.randn(NODES, D, requires_grad=True)
        index, at = torch.randint(NODES, (EDGES,)), torch.randint(NODES, (EDGES,))
        with er.saving(**way):
            rows = (x * 1).index_select(0, index)
            assert type(rows) is (Gathered if waits else Tensor)
            loss = added(rows, at).square().sum()
        loss.backward()
        (grad,) = torch.autograd.grad(added((x * 1).index_select(0, index), at).square().sum(), x)
        if not way:
            assert torch.equal(x.grad, grad)
        else:
            assert (x.grad - grad).square().sum() <= 0.01 * grad.square().sum()


def test_a_change_that_nobody_sees_is_said():
    x = torch.randn(NODES, D, requires_grad=True) * 1
    with er.saving():
        r = x.index_select(0, torch.randint(NODES, (EDGES,)))
        with torch._C.DisableTorchFunction():
            x.add_(1)
        with pytest.raises(RestoreError, match=r"changed in place before that.*x\.clone\(\)"):
            r.sum()


@pytest.mark.parametrize("late", [False, True])
def test_rows_that_a_model_gives_are_those_of_its_forward(late):
    """late: they are looked at after their source has changed."""
    table, i = nn.Parameter(torch.randn(NODES, D)), torch.randint(NODES, (EDGES,))
    for _ in range(3):
        with er.saving():
            r, loss = table.index_select(0, i), table.square().sum()
        expected = table.detach()[i]
        assert type(r) is Tensor
        if late:
            loss.backward()
            with torch.no_grad():
                table.sub_(0.1 * table.grad)
        assert torch.equal(r.detach(), expected)
        table.grad = None
        r.square().sum().backward()
        ours, table.grad = table.grad, None
        expected.requires_grad_().square().sum().backward()
        assert torch.equal(ours, torch.zeros(NODES, D).index_add_(0, i, expected.grad))


def test_a_forward_that_raises_leaves_rows_that_can_be_read():
    x = torch.randn(NODES, D, requires_grad=True) * 1
    i, held = torch.randint(NODES, (EDGES,)), []

    def run() -> None:
        with er.saving():
            held.append(x.index_select(0, i))
            raise KeyError

    for _ in range(2):
        with pytest.raises(KeyError):
            run()
    assert all(torch.equal(r, x.detach()[i]) for r in held)
    held[0].sum().backward()


# ------------------------------------------------------------------------------------------- bits

# The shape of a leaf, how the source is made of it, and the shape of a factor.
GEOMETRIES = {
    "heads": ((NODES, HEADS, WIDTH), lambda x: x * 1, (EDGES, HEADS, 1)),
    "one row": ((1, D), lambda x: x * 1, (EDGES, 1)),
    "narrow": ((NODES, 1), lambda x: x * 1, (400_001, 1)),
    "transposed": ((D, NODES), lambda x: (x * 1).t(), (EDGES, 1)),
    "expanded": ((1, D), lambda x: (x * 1).expand(NODES, D), (EDGES, 1)),
    "strided": ((NODES, 2 * D), lambda x: (x * 1).flip(0)[:, ::2], (EDGES, 1)),
    "a leaf": ((NODES, D), lambda x: x, (EDGES, 1)),
    "double": ((NODES, D), lambda x: x.double(), (EDGES, 1)),
    "half": ((NODES, D), lambda x: x.bfloat16(), (EDGES, 1)),
    "infinite": ((NODES, D), lambda x: x * 1e38, (EDGES, 1)),
    "no edges": ((NODES, D), lambda x: x * 1, (0, 1)),
    "two rows more than parts": ((NODES, D), lambda x: x * 1, (4 * 4096 + 2, 1)),
}


@pytest.mark.parametrize("name", GEOMETRIES)
@pytest.mark.parametrize("order", ["random", "sorted", "equal", "strided"])
@pytest.mark.parametrize("way", ["index_add", "scatter_add", "index_add_", "scatter_add_"])
def test_bits_of_sums_are_torchs(name, order, way):
    leaf, made_of, shape = GEOMETRIES[name]
    torch.manual_seed(0)
    x0, f0, edges = torch.randn(leaf), torch.randn(shape), shape[0]
    nodes = len(made_of(x0))
    i, a = torch.randint(nodes, (2, edges)).unbind()
    if order == "sorted":
        i, a = i.sort()[0], a.sort()[0]
    elif order == "equal":
        a = torch.zeros_like(a)
    elif order == "strided":
        i, a = torch.randint(nodes, (edges, 2)).unbind(1)

    def run(context) -> list[Tensor]:
        x, f = x0.clone().requires_grad_(), f0.clone().requires_grad_()
        with context:
            h = made_of(x)
            r = f.to(h.dtype) * h.index_select(0, i)
            into = made_of(x) * 0.5 if way.endswith("_") else torch.zeros_like(h)
            at = a if "index" in way else a.view(-1, *(1,) * (r.dim() - 1)).expand_as(r)
            y = getattr(into, way)(0, at, r)
        del r
        y.sin().nan_to_num().sum().backward()
        return [y.detach().nan_to_num(), x.grad.nan_to_num(), f.grad.nan_to_num()]

    plain, ours = run(nullcontext()), run(er.saving())
    assert all(map(torch.equal, plain, ours))


class Convolution(nn.Module):
    """Sums over neighbors, and a perceptron, as in a graph isomorphism network."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        rows = x.index_select(-2, edges[0])
        at = edges[1].view(-1, 1).expand_as(rows)
        summed = rows.new_zeros(x.shape).scatter_add_(0, at, rows)
        out: Tensor = self.last(torch.relu(self.first(x + summed)))
        return torch.relu(out)


class Network(nn.Module):
    """Three graph convolutions."""

    def __init__(self, width: int = D) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(Convolution(width) for _ in range(3))

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        for convolution in self.convolutions:
            x = convolution(x, edges)
        return x


@pytest.mark.parametrize("way", [{}, {"policy": "dither", "levels": 16}])
def test_steps_with_rows_that_wait_are_replayed(way, monkeypatch):
    left = []
    monkeypatch.setattr(Replay, "_diverge", lambda self, *_: left.append(self))
    torch.manual_seed(0)
    model, x, edges = Network(), torch.randn(NODES, D), torch.randint(NODES, (2, EDGES))
    begun = []
    enter = Replay.__enter__
    monkeypatch.setattr(Replay, "__enter__", lambda self: (begun.append(self), enter(self))[1])
    for _ in range(4):
        with er.saving(**way):
            loss = model(x, edges).square().mean()
        loss.backward()
    assert len(begun) >= 2
    assert not left
