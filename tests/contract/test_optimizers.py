"""Every optimizer with every state: bytes, resume, hostile input, torch.optim as the truth."""

import copy
import itertools
import pickle

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import elbowroom as er
from elbowroom import errors
from elbowroom.fitting.model_state import ModelState
from elbowroom.optim import SGD, STATES, AdamW, Lion
from elbowroom.optim.release import Complete

CASES = [
    (cls, state)
    for cls, state in itertools.product((AdamW, Lion, SGD), STATES)
    if cls is AdamW or state != "int4"
]
every = pytest.mark.parametrize(("cls", "state"), CASES, ids=lambda x: getattr(x, "__name__", x))


def model(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Rows of 100 (less than a group), of 150 (a group and a rest), and small parameters."""
    torch.manual_seed(0)
    layers = (nn.Linear(100, 150), nn.Tanh(), nn.Linear(150, 41), nn.Tanh(), nn.Linear(41, 3))
    return nn.Sequential(*layers).to(dtype)


def steps(net: nn.Module, optimizer: torch.optim.Optimizer, n: int, seed: int = 0) -> float:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(n):
        p = next(net.parameters())
        x = torch.randn(16, 100, generator=generator)
        loss = net(x.to(p.dtype)).float().square().mean() + net(-x.to(p.dtype)).float().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


def same(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


def snapshot(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [t.clone() for s in optimizer.state.values() for t in s.values()]


@every
def test_a_budget_counts_the_states_before_they_are_made(cls, state):
    net = model()
    optimizer = cls(net.parameters(), lr=1e-3, state=state)
    model_state = ModelState(net, optimizer)
    unallocated = model_state.unallocated_state_nbytes()
    steps(net, optimizer, 1)
    assert unallocated == sum(t.nbytes for s in optimizer.state.values() for t in s.values())
    assert model_state.unallocated_state_nbytes() == 0


@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bytes_are_as_predicted_and_a_resumed_run_has_the_same_bits(cls, state, dtype):
    net = model(dtype)
    optimizer = cls(net.parameters(), lr=1e-3, state=state, weight_decay=0.01)
    before = steps(net, optimizer, 3)
    held = sum(t.nbytes for s in optimizer.state.values() for t in s.values())
    assert held == sum(
        er.optim.state_nbytes(p, state, second=cls is AdamW) for p in net.parameters()
    )
    twin = copy.deepcopy(net)
    resumed = cls(twin.parameters(), lr=9.0, state=state, seed=7)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    dtypes = [t.dtype for s in optimizer.state.values() for t in s.values()]
    assert [t.dtype for s in resumed.state.values() for t in s.values()] == dtypes
    assert steps(net, optimizer, 3, 1) == steps(twin, resumed, 3, 1) != before
    assert same(net, twin)
    assert all(map(torch.equal, snapshot(optimizer), snapshot(resumed)))


def test_bytes_a_parameter_are_within_what_is_promised():
    p = torch.empty(64, 1024)
    limits = {"fp32": 8.001, "coat": 2.19, "int8": 2.07, "int4": 1.56, "int4x2": 1.07}
    assert limits.keys() == STATES.keys()
    for state, most in limits.items():
        assert er.optim.state_nbytes(p, state) / p.numel() <= most


@pytest.mark.parametrize(
    ("ours", "theirs", "settings"),
    [
        (AdamW, torch.optim.AdamW, {"lr": 1e-3, "weight_decay": 0.1, "betas": (0.8, 0.95)}),
        (AdamW, torch.optim.AdamW, {"lr": 1e-3, "maximize": True}),
        (SGD, torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "weight_decay": 0.1}),
        (SGD, torch.optim.SGD, {"lr": 1e-2, "momentum": 0.8, "nesterov": True}),
    ],
)
def test_fp32_is_torch_optim(ours, theirs, settings):
    net, twin = model(), model()
    one, other = (
        ours(net.parameters(), state="fp32", **settings),
        theirs(twin.parameters(), **settings),
    )
    schedules = [torch.optim.lr_scheduler.ExponentialLR(o, 0.9) for o in (one, other)]
    for seed in range(5):
        steps(net, one, 2, seed)
        steps(twin, other, 2, seed)
        for schedule in schedules:
            schedule.step()
    for p, q in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


@every
def test_states_convert_to_any_other_and_to_torch_optim(cls, state):
    net = model()
    optimizer = cls(net.parameters(), lr=1e-3, state=state)
    steps(net, optimizer, 3)
    saved = optimizer.portable_state_dict()
    if cls is not Lion:
        twin = {AdamW: torch.optim.AdamW, SGD: torch.optim.SGD}[cls](net.parameters(), lr=1.0)
        twin.load_state_dict(copy.deepcopy(saved))
        saved = twin.state_dict()
    for other in (s for c, s in CASES if c is cls):
        for source in (optimizer.state_dict(), saved):
            loaded = cls(net.parameters(), state=other)
            loaded.load_state_dict(source)
            assert loaded.param_groups[0]["state"] == other
            assert loaded.param_groups[0]["lr"] == 1e-3
            limit = max({"int4": 0.2, "int4x2": 0.4}.get(held, 0.02) for held in (state, other))
            again = loaded.portable_state_dict()["state"]
            for i, truth in saved["state"].items():
                for name in optimizer.moments:
                    error = (again[i][name] - truth[name]).norm() / truth[name].norm()
                    assert error <= limit, (other, name)
            assert again[0]["step"] == 3
            steps(net, loaded, 1)


@every
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_gradient_that_is_not_finite_changes_nothing(cls, state, bad):
    net = model()
    optimizer = cls(net.parameters(), state=state)
    steps(net, optimizer, 2)
    before, weights = snapshot(optimizer), copy.deepcopy(net)
    net[4].bias.grad[1] = bad
    optimizer.step()
    assert optimizer.skipped == 1
    assert same(net, weights)
    assert all(map(torch.equal, before, snapshot(optimizer)))


@pytest.mark.parametrize("released", [False, True], ids=["ordinary", "released"])
@every
def test_a_gradient_whose_square_is_not_finite_changes_no_encoded_state(cls, state, released):
    net = model()
    optimizer = cls(net.parameters(), state=state)
    steps(net, optimizer, 2)
    before, weight = snapshot(optimizer), net[0].weight.clone()
    release = optimizer.release_gradients() if released else None
    net[0].weight.register_hook(lambda grad: grad.index_fill(0, torch.tensor([1]), 2e19))
    steps(net, optimizer, 1)
    refused = cls is AdamW and state != "fp32"
    assert optimizer.skipped == refused
    assert torch.equal(net[0].weight, weight) == refused
    assert released or all(map(torch.equal, before, snapshot(optimizer))) == refused
    assert all(p.isfinite().all() for p in net.parameters())
    del release


@every
def test_large_gradients_are_taken(cls, state):
    net = model()
    optimizer = cls(net.parameters(), lr=1e-3, state=state)
    for size in (1e16, 1.8e19):
        for p in net.parameters():
            p.grad = torch.full_like(p, size)
            p.grad.view(-1)[1::2] *= -1
        before = copy.deepcopy(net)
        optimizer.step()
        assert not same(net, before)
    assert optimizer.skipped == 0
    if cls is not SGD:  # whose update is as large as its gradients
        assert all((p.abs() < 1).all() for p in net.parameters())


@every
def test_zero_gradients_at_lr_0_move_nothing_and_leave_no_nan(cls, state):
    for dtype, weights in (
        (torch.float32, "nearest"),
        (torch.bfloat16, "residual"),
        (torch.bfloat16, "sr"),
    ):
        net = model(dtype)
        optimizer = cls(net.parameters(), lr=0.0, state=state, weights=weights)
        before = copy.deepcopy(net)
        for p in net.parameters():
            p.grad = torch.zeros_like(p)
        optimizer.step()
        optimizer.step()
        assert same(net, before)
        assert all(t.float().isfinite().all() for t in snapshot(optimizer))


@every
def test_autograd_sees_that_a_step_has_changed_a_parameter(cls, state):
    net = model()
    optimizer = cls(net.parameters(), state=state)
    steps(net, optimizer, 1)
    losses = [net(torch.ones(2, 100)).sum()]
    with er.saving():
        losses.append(net(torch.ones(2, 100)).sum())
    versions = [x._version for x in everything(net, optimizer)]
    optimizer.step()
    assert all(x._version > v for x, v in zip(everything(net, optimizer), versions, strict=True))
    for loss in losses:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def everything(net: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [*net.parameters(), *(t for s in optimizer.state.values() for t in s.values())]


@every
def test_odd_parameters(cls, state):
    shapes = [(), (0,), (0, 500), (5000,), (64, 65), (3, 5000), (2, 3, 64, 64)]
    params = [nn.Parameter(torch.ones(s)) for s in shapes]
    params.append(nn.Parameter(torch.ones(64, 32, 3, 3).to(memory_format=torch.channels_last)))
    params.append(nn.Parameter(torch.ones(70, 80).t()))
    frozen = nn.Parameter(torch.ones(64, 64))
    optimizer = cls([*params, frozen], lr=0.1, state=state)
    for p in params:
        p.grad = (
            torch.ones(p.shape) * torch.arange(max(1, p.numel())).view(p.shape or ())
            if p.numel()
            else torch.ones(p.shape)
        )
    optimizer.step()
    for p in params:
        assert p.isfinite().all()
        assert p.numel() < 2 or (p.flatten()[1:] < 1).all()
        if p.dim() > 1 and p.numel() and cls is AdamW:
            # Adam's first step is lr times the sign, whatever the order in memory.
            torch.testing.assert_close(p.flatten()[1:], torch.full((p.numel() - 1,), 0.899))
    assert torch.equal(frozen, torch.ones(64, 64))
    assert frozen not in optimizer.state
    assert len(optimizer.portable_state_dict()["state"]) == len(params)


def test_groups_have_states_of_their_own():
    net = model()
    groups = [
        {"params": net[0].parameters()},
        {"params": net[2].parameters(), "state": "fp32", "lr": 0.0},
    ]
    optimizer = AdamW(groups, state="int8")
    before = net[2].weight.clone()
    steps(net, optimizer, 1)
    assert "exp_avg_codes" in optimizer.state[net[0].weight]
    assert "exp_avg" in optimizer.state[net[2].weight]
    assert torch.equal(net[2].weight, before)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("whole", [False, True], ids=["step", "train step"])
@pytest.mark.parametrize("released", [False, True], ids=["ordinary", "released"])
@pytest.mark.parametrize(("cls", "state"), [(AdamW, "fp32"), (AdamW, "int8"), (SGD, "int8")])
def test_under_torch_compile_it_has_the_bits_of_the_eager_step(cls, state, released, whole):
    def trained(compiled: bool) -> nn.Module:
        torch._dynamo.reset()
        net = model()
        optimizer = cls(net.parameters(), lr=1e-2, state=state)
        release = optimizer.release_gradients() if released else None

        def train_step(x: torch.Tensor) -> None:
            optimizer.zero_grad()
            net(x).square().mean().backward()
            update()

        update = optimizer.step
        if compiled and whole:
            train_step = torch.compile(train_step, backend="eager")
        elif compiled:
            update = torch.compile(update, backend="eager")
        for seed in range(4):
            train_step(torch.randn(16, 100, generator=torch.Generator().manual_seed(seed)))
        del release
        assert {float(s["step"]) for s in optimizer.state.values()} == {4}
        return net

    assert same(trained(compiled=True), trained(compiled=False))


def test_grad_scaler_and_closure():
    net = model()
    optimizer = AdamW(net.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for bad in (False, True, False):
        optimizer.zero_grad()
        scaler.scale(net(torch.ones(2, 100)).sum()).backward()
        if bad:
            net[0].weight.grad[0, 0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 2.0
    assert optimizer.state[net[0].weight]["step"] == 2
    assert optimizer.skipped == 0
    assert optimizer.step(lambda: 3.5) == 3.5


# --- what is refused ---


def test_what_is_refused_says_what_to_do():
    real = nn.Parameter(torch.ones(4))
    for dtype, say in (
        (torch.complex64, "complex64"),
        (torch.float64, "torch.optim"),
        (torch.float16, "nearest"),
    ):
        with pytest.raises(errors.UnsupportedParameter, match=say):
            AdamW([nn.Parameter(torch.ones(4, dtype=dtype))])
    with pytest.raises(errors.UnsupportedParameter, match="contiguous"):
        AdamW([nn.Parameter(torch.ones(8, 8)[:, ::2])])
    for settings, say in (
        ({"state": "int7"}, "coat"),
        ({"weights": "master"}, "residual"),
        ({"lr": -1.0}, "at least 0; got -1"),
        ({"lr": float("inf")}, "finite"),
        ({"lr": "fast"}, "'fast'"),
        ({"betas": (0.9, 1.0)}, "below 1"),
        ({"betas": (0.9,)}, "two numbers"),
        ({"betas": 0.9}, "two numbers"),
    ):
        with pytest.raises(errors.InvalidSetting, match=say):
            AdamW([real], **settings)
    with pytest.raises(errors.InvalidSetting, match="int8"):
        Lion([real], state="int4")
    with pytest.raises(errors.InvalidSetting, match=r"torch\.optim\.SGD"):
        SGD([real], momentum=0.0)
    with pytest.raises(errors.InvalidSetting, match="lr is"):
        AdamW([{"params": [real], "lr": -1.0}])
    optimizer = AdamW([real])
    with pytest.raises(errors.UnsupportedParameter):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(4, dtype=torch.complex64))]})
    assert len(optimizer.param_groups) == 1


@every
def test_settings_of_torch_optim_are_taken_where_they_change_nothing(cls, state):
    off = {"amsgrad": False, "capturable": False, "differentiable": False, "dampening": 0}
    settings = {"foreach": None, "fused": True, "maximize": False, **off}
    optimizer = cls([nn.Parameter(torch.ones(4))], state=state, **settings)
    assert not optimizer.defaults.keys() & {*off, "foreach", "fused"}
    for name, value in (("amsgrad", True), ("capturable", True), ("dampening", 0.5)):
        with pytest.raises(errors.InvalidSetting, match=f"{cls.__name__} does not offer {name}="):
            cls([nn.Parameter(torch.ones(4))], **{name: value})
    with pytest.raises(errors.InvalidSetting, match="no setting 'wieght_decay'"):
        cls([nn.Parameter(torch.ones(4))], wieght_decay=0.1)


@pytest.mark.parametrize("released", [False, True], ids=["ordinary", "released"])
@pytest.mark.parametrize(
    ("cls", "name", "value"),
    [(SGD, "maximize", True), (SGD, "dampening", 0.5), (AdamW, "amsgrad", True)],
)
def test_what_is_not_offered_is_refused_in_a_group_too_and_where_it_is_set_later(
    cls, name, value, released
):
    say = f"{cls.__name__} does not offer {name}="
    net = model()
    with pytest.raises(errors.InvalidSetting, match=say):
        cls([{"params": net.parameters(), name: value}])
    optimizer = cls([{"params": net[0].parameters(), name: False, "foreach": True, "name": "a"}])
    with pytest.raises(errors.InvalidSetting, match=say):
        optimizer.add_param_group({"params": net[2].parameters(), name: value})
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0][name] = value
    with pytest.raises(errors.StateMismatch, match=name):
        optimizer.load_state_dict(saved)
    before = copy.deepcopy(net)
    release = optimizer.release_gradients() if released else None
    optimizer.param_groups[0][name] = value
    with pytest.raises(errors.InvalidSetting, match=say):
        steps(net, optimizer, 1)
    assert same(net, before)
    optimizer.param_groups[0][name] = False
    steps(net, optimizer, 1)
    del release


def test_what_torch_took_for_speed_is_not_loaded_into_a_group_that_names_it():
    net = model()
    other = torch.optim.AdamW(net.parameters(), capturable=False, foreach=False)
    saved = other.state_dict()
    saved["param_groups"][0]["capturable"] = True
    optimizer = AdamW([{"params": net.parameters(), "capturable": False}])
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["capturable"] is False
    steps(net, optimizer, 1)


def test_sgd_takes_no_weight_decay_by_place_where_torch_has_dampening():
    with pytest.raises(TypeError, match="positional"):
        SGD([nn.Parameter(torch.ones(4))], 0.1, 0.9, 0, 5e-4)
    with pytest.raises(errors.InvalidSetting, match="SGD does not offer maximize=True"):
        SGD([nn.Parameter(torch.ones(4))], maximize=True)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch 2.11 warns once
@every
@pytest.mark.parametrize("released", [False, True])
def test_a_sparse_gradient_has_the_bits_of_the_dense_one_that_it_stands_for(cls, state, released):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(200, 64, sparse=True), nn.Linear(64, 4))
    twin = copy.deepcopy(net)
    twin[0].sparse = False
    optimizers = [cls(one.parameters(), state=state, weight_decay=0.1) for one in (net, twin)]
    if released:
        optimizers[0].release_gradients()
    for _ in range(3):
        words = torch.randint(0, 50, (4, 20))  # with repetitions
        for one, optimizer in zip((net, twin), optimizers, strict=True):
            optimizer.zero_grad()
            one(words).square().mean().backward()
            optimizer.step()
    for p, q in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q)
    optimizers[0].zero_grad()
    before = copy.deepcopy(net)
    large = [[3, 3]], [[3e38] * 64] * 2, (200, 64)
    net[0].weight.grad = torch.sparse_coo_tensor(*large, check_invariants=True)
    optimizers[0].step()
    assert optimizers[0].skipped == 1  # what is finite twice, and not summed
    assert same(net, before)


def test_a_gradient_that_is_a_view_with_another_sign_is_taken_as_it_reads():
    g = torch.randn(64, 80, generator=torch.Generator().manual_seed(0))
    moved = []
    for grad in (torch._neg_view(g), g.neg()):
        p = nn.Parameter(torch.ones(64, 80))
        p.grad = grad
        AdamW([p], state="int8").step()
        moved.append(p.detach())
    assert torch.equal(*moved)


def test_a_sparse_gradient_whose_values_lie_with_gaps_is_looked_at_as_it_reads():
    for row, skipped in ((1, 0), (2, 1)):
        p = nn.Parameter(torch.ones(64, 80))
        optimizer = AdamW([p], state="fp32")
        held = torch.ones(4, 80)
        held[row] = torch.nan
        how = {"is_coalesced": True, "check_invariants": True}
        p.grad = torch.sparse_coo_tensor([[0, 1]], held[::2], (64, 80), **how)
        optimizer.step()
        assert optimizer.skipped == skipped


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_a_gradient_of_another_layout_is_refused_before_anything_changes():
    net = nn.Linear(50, 4)
    optimizer = AdamW(net.parameters())
    net(torch.ones(2, 50)).sum().backward()
    net.bias.grad = torch.ones(4)
    before = copy.deepcopy(net)
    compressed = torch.ones(4, 50).to_sparse_csr()
    with pytest.raises(errors.UnsupportedGradient, match="is sparse_csr"):
        optimizer.apply([Complete(0, optimizer.param_groups[0], net.weight, compressed)])
    assert same(net, before)
    assert not optimizer.state


@every
@pytest.mark.parametrize(("before", "after"), [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_a_model_that_changes_its_dtype_gets_or_loses_its_residual(cls, state, before, after):
    net = model(getattr(torch, before))
    optimizer = cls(net.parameters(), lr=1e-3, state=state)
    steps(net, optimizer, 2)
    net.to(getattr(torch, after))
    twin = copy.deepcopy(net)
    fresh = cls(twin.parameters(), state=state)
    fresh.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    if after == "float32":  # what it cannot use is not held, loaded or not
        assert all("residual" not in held for held in fresh.state.values())
    steps(net, optimizer, 2)
    steps(twin, fresh, 2)
    assert same(net, twin)
    assert all(map(torch.equal, snapshot(optimizer), snapshot(fresh)))
    has = ["residual" in held for held in optimizer.state.values()]
    assert has == [after == "bfloat16"] * 6


@pytest.mark.parametrize("released", [False, True])
def test_a_parameter_that_cannot_be_updated_any_more_is_refused_at_the_next_step(released):
    for change, say in (
        (lambda net: net.double(), "float64"),
        (lambda net: net.half(), "weights='nearest'"),
        (lambda net: setattr(net[0].weight, "data", torch.ones(300, 100)[::2]), "contiguous"),
    ):
        net, optimizer, _ = _saved()
        release = optimizer.release_gradients() if released else None
        change(net)
        before, weights = snapshot(optimizer), copy.deepcopy(net)
        with pytest.raises(errors.UnsupportedParameter, match=say):
            steps(net, optimizer, 1)
        if release is None:
            assert same(net, weights)
            assert all(map(torch.equal, before, snapshot(optimizer)))


def test_states_of_another_shape_or_device_are_not_taken_for_those_of_a_parameter():
    for spoil in (
        lambda p, state: setattr(p, "data", torch.ones(170, 100)),
        lambda p, state: setattr(p, "data", torch.ones(3, 100)),  # which would be held as fp32
        lambda p, state: state.update(exp_avg_codes=state["exp_avg_codes"].to("meta")),
    ):
        net, optimizer, _ = _saved()
        p = net[0].weight
        spoil(p, optimizer.state[p])
        p.grad = torch.ones_like(p)
        before = p.detach().clone()
        with pytest.raises(errors.UnsupportedParameter, match=r"load_state_dict.*\.pop\(p\)"):
            optimizer.step()
        assert torch.equal(p, before)
        optimizer.state.pop(p)
        optimizer.step()
        assert not torch.equal(p, before)


def test_a_parameter_without_values_is_refused_at_its_step():
    p = nn.Parameter(torch.ones(64, 64, device="meta"))
    optimizer = AdamW([p])  # which a dry run may need
    p.grad = torch.ones_like(p)
    with pytest.raises(errors.UnsupportedParameter, match=r"'meta'.*to_empty"):
        optimizer.step()
    assert not optimizer.state


def _saved() -> tuple[nn.Module, AdamW, dict]:
    net = model()
    optimizer = AdamW(net.parameters())
    steps(net, optimizer, 1)
    return net, optimizer, copy.deepcopy(optimizer.state_dict())


@pytest.mark.parametrize(
    ("spoil", "say"),
    [
        (lambda d: d["param_groups"][0].update(version=3), "newer elbowroom"),
        (lambda d: d["param_groups"][0].update(amsgrad=True), "amsgrad"),
        (lambda d: d["param_groups"][0].update(state="int9"), "int9"),
        (lambda d: d["param_groups"][0].update(state="coat"), "exp_avg"),
        (lambda d: d["param_groups"][0].update(params=[0]), "param groups"),
        (lambda d: d["state"][0].pop("exp_avg_bounds"), "exp_avg_bounds"),
        (lambda d: d["state"][0].update(exp_avg_codes=torch.zeros(3)), "exp_avg_codes"),
        (lambda d: d["state"][2].pop("step"), "'step'.*is missing"),
        (lambda d: d["state"][2].update(step=torch.tensor(-1.0)), "'step'.*-1"),
        (lambda d: d["state"][2].update(step=torch.tensor(torch.nan)), "'step'.*nan"),
        (lambda d: d["state"][0]["exp_avg_bounds"].fill_(0x7FC0), "'exp_avg_bounds'.*NaN"),
        (lambda d: d["state"][0]["exp_avg_sq_bounds"].fill_(-1), "'exp_avg_sq_bounds'.*NaN"),
        (lambda d: d["state"][1]["exp_avg"].fill_(torch.nan), "'exp_avg'.*NaN"),
        (lambda d: d["state"][1]["exp_avg"].view(-1)[1].fill_(-torch.inf), "'exp_avg'.*Inf"),
        (lambda d: d["state"][1]["exp_avg"].view(-1)[1].fill_(torch.inf), "'exp_avg'.*Inf"),
        (lambda d: d["state"][1]["exp_avg_sq"].view(-1)[1].fill_(-1e-9), "'exp_avg_sq'.*below 0"),
        (lambda d: d["state"][0]["exp_avg_sq_bounds"].fill_(0x7F80), "'exp_avg_sq_bounds'.*Inf"),
        (lambda d: d["param_groups"][0].update(betas=(2, 2)), r"betas.*\(2, 2\)"),
        (lambda d: d["param_groups"][0].update(betas=(0.9,)), "betas are two numbers"),
        (lambda d: d["param_groups"][0].update(lr=torch.nan), "lr is a finite number"),
        (lambda d: d["param_groups"][0].pop("params"), "as optimizer.state_dict"),
        (lambda d: d.pop("state"), "as optimizer.state_dict"),
        (lambda d: d.clear(), "as optimizer.state_dict"),
    ],
)
def test_a_state_dict_that_does_not_fit_is_refused_and_changes_nothing(spoil, say):
    _, optimizer, saved = _saved()
    before = snapshot(optimizer)
    spoil(saved)
    with pytest.raises(errors.StateMismatch, match=say):
        optimizer.load_state_dict(saved)
    assert all(map(torch.equal, before, snapshot(optimizer)))


@pytest.mark.parametrize(
    ("theirs", "settings", "ours", "say"),
    [
        (torch.optim.SGD, {"momentum": 0.9, "maximize": True}, SGD, "maximize=True"),
        (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.5}, SGD, "dampening=0.5"),
        (torch.optim.SGD, {"momentum": 0.0}, SGD, r"use torch\.optim\.SGD"),
        (torch.optim.Adam, {"weight_decay": 0.1}, AdamW, "decoupled.*weight_decay to 0"),
        (torch.optim.NAdam, {}, AdamW, "'mu_product'.*not of AdamW"),
        (AdamW, {"state": "int8"}, Lion, "'exp_avg_sq_codes'.*not of Lion"),
        (AdamW, {"state": "fp32"}, Lion, "'exp_avg_sq'.*not of Lion"),
        (Lion, {"state": "int8"}, AdamW, "no 'exp_avg_sq"),
        (AdamW, {}, SGD, "not of SGD"),
        (SGD, {}, Lion, "not of Lion"),
    ],
)
def test_the_state_of_another_optimizer_is_refused(theirs, settings, ours, say):
    net = model()
    other = theirs(net.parameters(), **settings)
    steps(net, other, 2)
    optimizer = ours(net.parameters())
    with pytest.raises(errors.StateMismatch, match=say):
        optimizer.load_state_dict(other.state_dict())
    assert not optimizer.state


def test_what_torch_optim_saves_is_loaded_where_it_means_the_same():
    for theirs, settings, ours in (
        (torch.optim.SGD, {"momentum": 0.8, "nesterov": True, "weight_decay": 0.1}, SGD),
        (torch.optim.Adam, {"lr": 1e-3, "maximize": True}, AdamW),
    ):
        net = model()
        other = theirs(net.parameters(), **settings)
        steps(net, other, 2)
        twin = copy.deepcopy(net)
        optimizer = ours(twin.parameters(), state="fp32")
        optimizer.load_state_dict(copy.deepcopy(other.state_dict()))
        steps(net, other, 2)
        steps(twin, optimizer, 2)
        for p, q in zip(net.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("state", STATES)
def test_hooks_around_loading_see_all_states_and_may_change_them(state):
    a, b = (nn.Parameter(torch.zeros(64, 128)) for _ in range(2))
    optimizer = AdamW([("a", a), ("b", b)], state=state)
    a.grad, b.grad = torch.ones(64, 128), torch.full((64, 128), -3.0)
    optimizer.step()
    saved = optimizer.state_dict()
    before = copy.deepcopy(saved)
    other = AdamW([("b", b), ("a", a)], state=state)
    seen = []

    def by_name(one, given):
        """As torch's documentation has it: what was saved in another order."""
        seen.append(len(given["state"]))
        names = given["param_groups"][0]["param_names"]
        ours = one.param_groups[0]["param_names"]
        states = {i: given["state"][names.index(name)] for i, name in enumerate(ours)}
        return {**given, "state": states}

    hook = other.register_load_state_dict_pre_hook(by_name)
    other.register_load_state_dict_post_hook(lambda one: seen.append(len(one.state)))
    other.load_state_dict(saved)
    assert seen == [2, 2]
    for p in (a, b):
        assert all(torch.equal(other.state[p][k], x) for k, x in optimizer.state[p].items())
    assert str(saved) == str(before)

    hook.remove()
    other.register_load_state_dict_pre_hook(lambda one, given: given.pop("state") and None)
    with pytest.raises(errors.StateMismatch):
        other.load_state_dict(saved)
    assert seen == [2, 2]
    assert len(other.state) == 2
    assert str(saved) == str(before)


@pytest.mark.parametrize("state", STATES)
def test_a_v_that_has_overflowed_goes_on_in_fp32_alone(state):
    p = nn.Parameter(torch.zeros(64, 128))
    other = torch.optim.AdamW([p])
    p.grad = torch.full_like(p, 1e25)
    other.step()
    optimizer = AdamW([p], state=state)
    if state == "fp32":
        optimizer.load_state_dict(other.state_dict())
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.step()
        assert p.isfinite().all()
    else:
        with pytest.raises(errors.StateMismatch, match=r"'exp_avg_sq'.*Inf"):
            optimizer.load_state_dict(other.state_dict())


@pytest.mark.parametrize("nothing", [{}, {"momentum_buffer": None}])
def test_a_momentum_that_torch_has_not_made_yet_begins_anew(nothing):
    net = model()
    other = torch.optim.SGD(net.parameters(), momentum=0.9)
    steps(net, other, 1)
    other.state[net[0].weight] = nothing
    optimizer = SGD(net.parameters())
    optimizer.load_state_dict(other.state_dict())
    assert net[0].weight not in optimizer.state
    assert len(optimizer.state) == len(other.state) - 1
    steps(net, optimizer, 1)


@pytest.mark.parametrize("theirs", [AdamW, torch.optim.AdamW])
def test_what_a_schedule_or_a_user_keeps_in_groups_is_loaded(theirs):
    net = model()
    other = theirs(net.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.StepLR(other, 1)
    other.param_groups[0]["name"] = "all"
    steps(net, other, 1)
    schedule.step()
    optimizer = AdamW(net.parameters())
    settings = optimizer.param_groups[0].keys() | {"initial_lr", "name"}
    optimizer.load_state_dict(other.state_dict())
    assert optimizer.param_groups[0]["name"] == "all"
    assert optimizer.param_groups[0].keys() == settings
    resumed = torch.optim.lr_scheduler.StepLR(optimizer, 1, last_epoch=schedule.last_epoch)
    assert resumed.base_lrs == [1e-3]


@every
def test_states_go_through_safetensors(cls, state, tmp_path):
    net = model(torch.bfloat16)
    optimizer = cls(net.parameters(), lr=1e-3, state=state)
    steps(net, optimizer, 2)
    saved = optimizer.state_dict()
    flat = {f"{i}.{key}": x for i, held in saved["state"].items() for key, x in held.items()}
    save_file(flat, tmp_path / "states.safetensors")
    read: dict[int, dict[str, torch.Tensor]] = {}
    for name, x in load_file(tmp_path / "states.safetensors").items():
        index, key = name.split(".")
        read.setdefault(int(index), {})[key] = x
    twin = copy.deepcopy(net)
    resumed = cls(twin.parameters(), state=state)
    resumed.load_state_dict({"state": read, "param_groups": saved["param_groups"]})
    steps(net, optimizer, 2)
    steps(twin, resumed, 2)
    assert same(net, twin)


@pytest.mark.parametrize("policy", [{"policy": "coat", "format": "int8"}, {"policy": "dither"}])
def test_a_run_under_codes_resumes_with_the_same_bits_if_its_seed_says_the_step(policy):
    def network():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(100, 64), nn.GELU(), nn.Linear(64, 8))

    def run(net, optimizer, numbers, seeded=True):
        for step in numbers:
            x = torch.randn(16, 100, generator=torch.Generator().manual_seed(step))
            with er.saving(**policy, min_nbytes=0, seed=step if seeded else None):
                loss = net(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return net

    def resumed(checkpoint, **how):
        net = network()
        optimizer = AdamW(net.parameters(), lr=1e-2)
        net.load_state_dict(checkpoint[0])
        optimizer.load_state_dict(checkpoint[1])
        return run(net, optimizer, range(3, 6), **how)

    net = network()
    optimizer = AdamW(net.parameters(), lr=1e-2)
    run(net, optimizer, range(3))
    checkpoint = copy.deepcopy((net.state_dict(), optimizer.state_dict()))
    run(net, optimizer, range(3, 6))
    assert same(net, resumed(checkpoint))
    assert not same(net, resumed(checkpoint, seeded=False))


def test_an_optimizer_is_copied_and_pickled():
    net, optimizer, _ = _saved()
    optimizer.skipped = 2
    twin, other = copy.deepcopy((net, optimizer))
    assert other.skipped == pickle.loads(pickle.dumps(optimizer)).skipped == 2
    steps(net, optimizer, 2)
    steps(twin, other, 2)
    assert same(net, twin)
