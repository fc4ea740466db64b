"""`er.saving` by hand, from its second step on: the same bits and counts; nothing is kept alive."""

import gc
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import elbowroom as er
from elbowroom.codecs import Cast
from elbowroom.runtime.replay import saving_context
from elbowroom.runtime.replay.saving_context import SavingContext, scripts_of
from programs import looking, same

pytestmark = pytest.mark.usefixtures("one_thread")
POLICIES: dict[str, dict[str, Any]] = {
    "exact": {"policy": None},
    "keep": {"policy": "keep"},
    "dither": {"policy": "dither", "levels": 4},
    "group": {"policy": "group", "bits": 4},
    "lean": {"policy": "lean"},
    "coat": {"policy": "coat"},
    "lossless": {"policy": "sparse_lossless"},
    "offload": {"policy": "offload", "from_nbytes": 0},
}
EACH = pytest.mark.parametrize("fields", POLICIES.values(), ids=POLICIES.keys())


class Attention(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:-1], 3, 2, -1).movedim(-3, 0).transpose(-2, -3)
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2)


def mixed() -> tuple[nn.Module, Callable[[int], Tensor]]:
    torch.manual_seed(0)
    layers = nn.LayerNorm(32), Attention(), nn.Dropout(0.1), nn.Linear(32, 64), nn.GELU()
    net = nn.Sequential(*layers, nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8), nn.Softmax(-1))
    return net, lambda n: torch.randn(n, 6, 32)


def convolutional() -> tuple[nn.Module, Callable[[int], Tensor]]:
    torch.manual_seed(0)
    first = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)
    net = nn.Sequential(*first, nn.Conv2d(8, 8, 3), nn.GroupNorm(2, 8), nn.SiLU(), nn.Flatten())
    return net, lambda n: torch.randn(n, 3, 12, 12)


NETS = pytest.mark.parametrize("make", [mixed, convolutional])


def step(net: nn.Module, x: Tensor, context: Any) -> tuple[list[Tensor | None], Any]:
    torch.manual_seed(4)
    with context as saved:
        loss = net(x).square().sum()
    ledger = saved.ledger
    seen = [
        sorted(map(repr, ledger.rows)),
        *(ledger.before_nbytes, ledger.after_nbytes, ledger.away_nbytes, ledger.held_nbytes),
    ]
    assert ledger.max_nbytes >= ledger.after_nbytes
    gradients = list(torch.autograd.grad(loss, list(net.parameters()), allow_unused=True))
    del loss
    assert ledger.held_nbytes == 0
    return gradients, seen


def followed(saved: SavingContext) -> bool:
    part = saved._parts[-1]
    return isinstance(part, saving_context.Following) and not part.diverged


@NETS
@EACH
def test_every_step_has_the_bits_and_counts_of_one_that_is_looked_at(make, fields):
    """Also with batches of other sizes in between, and whatever the codes draw."""
    net, batch = make()
    follows = 0
    for number, n in enumerate((8, 8, 5, 8, 5, 3, 8)):
        x = batch(n)
        saved = er.saving(**fields, min_nbytes=0, seed=number)
        got, seen = step(net, x, saved)
        wanted, known = step(net, x, looking(**fields, min_nbytes=0, seed=number))
        assert same(got, wanted)
        if fields["policy"] != "offload":  # whose bytes move away in the background
            assert seen == known
        follows += followed(saved)
    assert follows >= 3  # all but the first of each size, and one whose shapes were learned late


@NETS
@EACH
def test_every_step_but_the_first_is_followed(make, fields):
    """Also where an op was examined as a node of ours, and is torch's own when it is followed."""
    net, inputs = make()
    x, seen = inputs(4), []
    for _ in range(5):
        saved = er.saving(**fields, min_nbytes=0)
        step(net, x, saved)
        seen.append(followed(saved))
    assert seen == [False, True, True, True, True]


def test_two_models_that_take_turns_are_each_followed():
    (one, batch), (other, _) = mixed(), mixed()
    follows = 0
    for _ in range(3):
        for net in (one, other):
            saved = er.saving("dither", levels=4, min_nbytes=0)
            step(net, batch(4), saved)
            follows += followed(saved)
    assert follows == 4


def test_a_model_dies_with_its_scripts():
    net, batch = mixed()
    for _ in range(3):
        step(net, batch(4), er.saving("dither", levels=4, min_nbytes=0))
    scripts = next(iter(saving_context._known.values()))
    assert scripts.begin()
    alive = [weakref.ref(net), *map(weakref.ref, net.parameters())]
    del net
    gc.collect()
    assert not scripts.begin()
    assert not any(ref() is not None for ref in alive)


def test_a_parameter_of_no_module_is_not_kept_alive():
    w = nn.Parameter(torch.randn(16, 16))
    for _ in range(3):
        with er.saving("dither", levels=4, min_nbytes=0):
            loss = F.linear(F.gelu(F.linear(torch.randn(4, 16), w)), w).square().sum()
        loss.backward()
    del loss
    alive = weakref.ref(w)
    del w
    gc.collect()
    assert alive() is None


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)
        self.turn = False

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.a(x))
        return F.silu(self.b(x)) if self.turn else F.relu(self.b(x))


@EACH
def test_a_step_that_turns_another_way_is_looked_at_from_there(fields):
    net = Branches()
    x = torch.randn(32, 16)
    for number in range(6):
        net.turn = number in (3, 4)
        context = er.saving(**fields, min_nbytes=0, seed=1)
        got, seen = step(net, x, context)
        wanted, known = step(net, x, looking(**fields, min_nbytes=0, seed=1))
        if fields["policy"] in (None, "sparse_lossless", "offload"):
            assert same(got, wanted)
        assert seen[1] == pytest.approx(known[1], rel=0.4)  # of what came before: an estimate
    assert all(g is not None and g.isfinite().all() for g in got)


def test_a_context_that_is_opened_twice_in_a_step_counts_both():
    net, batch = mixed()
    x = batch(4)
    for _ in range(4):
        saved = er.saving("dither", levels=4, min_nbytes=0)
        with saved:
            out = net(x)
        alone = saved.ledger.before_nbytes
        with saved:
            loss = F.gelu(out).square().sum()
        assert saved.ledger.before_nbytes > alone
        assert saved.ledger.held_nbytes == saved.ledger.after_nbytes
        loss.backward()
        assert saved.ledger.held_nbytes == 0
        assert "gelu" in str(saved.ledger)
    assert followed(saved)


def test_a_backward_inside_is_never_followed_away():
    """Each step of it is examined: when its graph is gone, nobody can say what it held."""
    net, batch = mixed()
    for _ in range(3):
        with er.saving("dither", levels=4, min_nbytes=0) as saved:
            net(batch(4)).square().sum().backward()
        assert not followed(saved)
        assert saved.ledger.after_nbytes < saved.ledger.before_nbytes / 2


def test_autocast_of_another_type_is_another_step():
    net, batch = mixed()
    x = batch(4)
    for dtype in (torch.bfloat16, torch.bfloat16, None, torch.float16, torch.bfloat16):
        how = {"policy": "dither", "levels": 16, "min_nbytes": 0, "seed": 1}
        found = []
        for context in (er.saving(**how), looking(**how)):
            torch.manual_seed(4)
            with context, torch.autocast("cpu", dtype, enabled=dtype is not None):
                loss = net(x).float().square().sum()
            found.append(list(torch.autograd.grad(loss, list(net.parameters()))))
        for got, wanted in zip(*found, strict=True):
            torch.testing.assert_close(got, wanted, rtol=0.2, atol=0.2 * float(wanted.abs().max()))


def test_settings_that_are_not_used_any_more_are_forgotten():
    net, batch = mixed()
    for levels in range(3, 3 + 2 * saving_context._MAX_SETTINGS):
        step(net, batch(2), er.saving("dither", levels=levels, min_nbytes=0))
    assert len(saving_context._known) == saving_context._MAX_SETTINGS


def test_without_gradients_nothing_is_learned_that_harms():
    net, batch = mixed()
    for grad in (False, True, True, False, True):
        saved = er.saving("dither", levels=4, min_nbytes=0)
        with saved, torch.set_grad_enabled(grad):
            loss = net(batch(4)).square().sum()
        assert (saved.ledger.before_nbytes > 0) == grad
        if grad:
            loss.backward()
            assert saved.ledger.after_nbytes < saved.ledger.before_nbytes / 2


def test_an_error_inside_leaves_nothing_open():
    net, batch = mixed()
    for number in range(5):
        try:
            with er.saving("dither", levels=4, min_nbytes=0):
                out = net(batch(4))
                if number % 2:
                    raise KeyError
            out.sum().backward()
        except KeyError:
            pass
        assert torch._C._len_torch_function_stack() == 0
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def test_a_codec_without_a_hash_is_looked_at_in_each_step():
    @dataclass(frozen=True, eq=True)
    class Odd(Cast):
        id: ClassVar[str] = "odd"
        more: Any = None

    net, batch = mixed()
    for _ in range(3):
        saved = er.saving(Odd(more=[1]), min_nbytes=0)
        step(net, batch(4), saved)
        assert not followed(saved)


def test_scripts_are_those_of_equal_settings():
    assert scripts_of("saving", er.codec("dither", levels=4)) is scripts_of(
        "saving", er.codec("dither", levels=4)
    )
    assert scripts_of("saving", 1) is not scripts_of("saving", 2)


class Norms(nn.Module):
    """The second norm is given what is no parameter, but a view of one of two."""

    def __init__(self, view: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weights = nn.ParameterList([torch.rand(16), torch.rand(16)])
        self.linear, self.view, self.turn = nn.Linear(16, 16), view, 0

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(F.layer_norm(self.linear(x), (16,), self.weights[0]))
        weight = self.view(self.weights[self.turn])
        parts = F.layer_norm(x.unflatten(-1, (-1, len(weight))), weight.shape, weight)
        return self.linear(parts.flatten(-2))


def gradients(net: nn.Module, x: Tensor, context: Any) -> list[Tensor | None]:
    with context:
        loss = net(x).square().sum()
    return list(torch.autograd.grad(loss, list(net.parameters()), allow_unused=True))


@pytest.mark.parametrize("view", [lambda w: w[:8], lambda w: w.detach(), lambda w: w.view(16)])
def test_a_weight_that_lies_where_a_parameter_does_is_not_taken_for_it(view):
    net, x = Norms(view), torch.randn(8, 16)
    for turn in (0, 0, 1, 1, 0):
        net.turn = turn
        wanted = gradients(net, x, nullcontext())
        assert same(gradients(net, x, er.saving(min_nbytes=0)), wanted)


class SelfAttention(nn.Module):
    """The linear layer tolerates an error of what it saves; attention asks for far less of one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = 8 * self.first(x)
        return F.scaled_dot_product_attention(x[None], self.second(x)[None], x[None])[0]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("policy", ["dither", "coat", "lean"])
def test_a_step_of_nan_teaches_no_code_that_is_too_coarse(policy, bad):
    net, x = SelfAttention(), torch.randn(8, 16)
    follows = 0
    for number, one in enumerate((torch.full_like(x, bad), x, x, x)):
        context = er.saving(policy, min_nbytes=0, seed=number)
        got = gradients(net, one, context)
        assert same(got, gradients(net, one, looking(policy, min_nbytes=0, seed=number)))
        follows += followed(context)
    assert follows == 2


def test_what_is_written_without_gradients_may_be_given_to_what_is_made_again():
    class Fresh(nn.BatchNorm1d):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.running_mean.zero_()
            return super().forward(x)

    torch.manual_seed(0)
    net, x = (
        nn.Sequential(nn.Linear(16, 16), Fresh(16), nn.ReLU(), nn.Linear(16, 16)),
        torch.randn(8, 16),
    )
    for number in range(4):
        context = er.saving(min_nbytes=0)
        assert same(gradients(net, x, context), gradients(net, x, nullcontext()))
        assert followed(context) == (number > 0)


def test_steps_that_take_turns_with_autocast_are_followed():
    net, batch = mixed()
    x, follows = batch(4), 0
    for number in range(8):
        context = er.saving(min_nbytes=0)
        with torch.autocast("cpu", torch.bfloat16, enabled=number % 2 == 1):
            step(net, x, context)
        follows += followed(context)
    assert follows >= 5


@pytest.mark.parametrize("policy", ["dither", "coat", "lean"])
def test_one_tensor_that_two_norms_read_is_normalized_by_the_one_that_is_there(policy):
    class Twice(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            x = super().forward(x)
            y = F.relu6(4 * F.batch_norm(x, None, None, training=True))
            return y * F.layer_norm(x, (16,)) @ y.t()

    torch.manual_seed(0)
    net, x = Twice(16, 16), torch.randn(8, 16)
    for number in range(4):
        context = er.saving(policy, min_nbytes=0, seed=number)
        got = gradients(net, x, context)
        assert same(got, gradients(net, x, looking(policy, min_nbytes=0, seed=number)))
        assert followed(context) == (number > 0)


@pytest.mark.parametrize("policy", ["dither", "coat", "lean"])
@pytest.mark.parametrize("gate", [nn.ReLU, nn.LeakyReLU])
def test_the_input_of_a_norm_keeps_the_bits_that_it_is_made_again_with(policy, gate):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 16), nn.GELU(), gate(), nn.BatchNorm1d(16), nn.Linear(16, 16))
    x = torch.randn(64, 16)
    for number in range(4):
        context = er.saving(policy, min_nbytes=0, seed=number)
        got, seen = step(net, x, context)
        wanted, known = step(net, x, looking(policy, min_nbytes=0, seed=number))
        assert same(got, wanted)
        assert seen == known
        assert followed(context) == (number > 0)


@pytest.mark.parametrize("policy", [None, "dither", "coat"])
def test_what_is_made_again_of_the_input_of_a_checkpoint_that_an_op_saves_later(policy):
    class Checkpointed(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            x = super().forward(x)
            inner = checkpoint(lambda t: F.gelu(F.layer_norm(t, (16,))) * t, x, use_reentrant=False)
            out = inner @ inner.t()
            return out @ super().forward(x)

    torch.manual_seed(0)
    net, x = Checkpointed(16, 16), torch.randn(8, 16)
    for number in range(4):
        got = gradients(net, x, er.saving(policy, min_nbytes=0, seed=number))
        assert same(got, gradients(net, x, looking(policy, min_nbytes=0, seed=number)))


@pytest.mark.parametrize("policy", ["dither", "group", None])
def test_what_is_saved_first_by_an_op_whose_result_nobody_reads(policy):
    """SAM 2 computes its attention's weights, asks for attention, and lets go of them."""
    torch.manual_seed(0)
    net, x = nn.Linear(32, 96), torch.randn(4, 8, 8, 32)

    def loss() -> Tensor:
        q, k, v = torch.unbind(net(x).reshape(4, 64, 3, 1, 32), 2)
        weights = ((q * 0.25) @ k.transpose(-2, -1)).softmax(-1)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        out = F.scaled_dot_product_attention(q, k, v).square().sum()
        del weights
        return out

    (plain,) = torch.autograd.grad(loss(), [net.weight])
    fields = {} if policy is None else {"levels": 64} if policy == "dither" else {"bits": 8}
    for n in range(3):
        with er.saving(policy, min_nbytes=0, **fields) as saved:
            out = loss()
        assert followed(saved) == (n > 0)
        (got,) = torch.autograd.grad(out, [net.weight])
        assert (got - plain).square().sum() <= 0.01 * plain.square().sum()
