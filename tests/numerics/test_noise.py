"""What a watched step says about the error of gradients, against gradients that were compared."""

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import elbowroom as er
from elbowroom.demo.tasks import task
from elbowroom.measure import NoiseMeter
from elbowroom.measure.gradient_variance import GradientVariance
from elbowroom.measure.reach import CHOSEN, ReachMeter
from elbowroom.measure.watching import StepWatch
from elbowroom.plan import Encode, Keep, KeepAll, Lean, Lossy, Need, SiteName
from elbowroom.runtime.context import Context
from elbowroom.runtime.saving import Saving

SIZES = {"resnet18": (8, 16), "unet": (8, 8), "gpt": (64, 4)}  # width, batch


class Trained:
    """A demo network a few steps into its training, its dropout off, and one more batch."""

    def __init__(self, name, steps=20):
        torch.manual_seed(0)
        width, batch = SIZES[name]
        self.task = task(name, width=width, batch=batch)
        self.model = self.task.model()
        for module in self.model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        optimizer, batches = self.task.optimizer(self.model), self.task.batches(0)
        for _ in range(steps):
            self.batch = next(batches)
            self.grads(None)
            optimizer.step()
        self.state = {key: value.clone() for key, value in self.model.state_dict().items()}

    def grads(self, policy, seed=0, observer=None):
        """Flat gradients of one step from the same weights and statistics."""
        if hasattr(self, "state"):
            self.model.load_state_dict(self.state)
        self.model.zero_grad()
        saving = Saving(policy or KeepAll(), min_nbytes=0, context=Context(seed), observer=observer)
        with saving:
            loss = self.task.loss(self.model(self.batch[0]), self.batch[1])
        loss.backward()
        return torch.cat([p.grad.flatten() for p in self.model.parameters()]).double()


@pytest.fixture(scope="module", params=["resnet18", "unet", "gpt"])
def trained(request):
    return Trained(request.param)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("codec", [er.codec("dither", levels=6), er.codec("group", bits=4)])
def test_predicted_is_measured_within_a_fifth(trained, codec):
    policy, true = Lossy(codec), trained.grads(None)
    measured = [(trained.grads(policy, seed) - true).square().sum().item() for seed in range(12)]
    meter = NoiseMeter(run=100, probes=4)
    for seed in range(12):
        trained.grads(policy, 100 + seed, meter)
    meter.harvest()
    assert 0.8 < meter.table.added / (sum(measured) / len(measured)) < 1.25


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("probed", "levels"), [(3, 24), (16, 4)])
def test_what_probes_found_with_rough_codes_holds_for_fine_ones(trained, probed, levels):
    """The rough code of what ReLU holds back stays rough: its error must not count as the rest.

    Both parts are probed beside the norm's own statistics: what errors would do to them is not in
    the step (ResNet-18 said 3.3 times too much of 24 levels then).
    """
    policy, true = Lean(upper=levels, plain=levels), trained.grads(None)
    measured = [(trained.grads(policy, seed) - true).square().sum().item() for seed in range(6)]
    meter = NoiseMeter(run=100, probes=100)
    for seed in range(3):
        trained.grads(Lean(upper=probed, plain=probed), seed, meter)
        meter.harvest()
    meter.probes = 0
    trained.grads(policy, 0, meter)
    meter.harvest()
    assert 0.75 < meter.table.added / (sum(measured) / 6) < 1.35


def test_a_few_probes_tell_of_all_norms():
    """Those of the first layers and of the last: channels, places and scales differ."""
    trained = Trained("resnet18")
    policy, true = Lean(), trained.grads(None)
    measured = [(trained.grads(policy, seed) - true).square().sum().item() for seed in range(6)]
    meter = NoiseMeter(run=100, probes=2)
    for seed in range(5):  # one op of each kind is probed first
        trained.grads(policy, seed, meter)
        meter.harvest()
    norms = [op for name, op in meter.table.ops.items() if name.consumer == "batch_norm"]
    assert sum(bool(op.probes) for op in norms) < len(norms) / 2
    assert 0.5 < meter.table.added / (sum(measured) / 6) < 2


def test_a_probe_measures_what_one_op_does_to_all_gradients(trained):
    # One norm's input is lossy, nothing else: the probe must see exactly what happened.
    norms = []

    def policy(site):
        if site.consumer in ("batch_norm", "layer_norm") and site.need is Need.LOSSY:
            norms.append(site.module)
            if site.module == norms[len(set(norms)) // 2]:
                return Encode(er.codec("dither", levels=4), site.facts)
        return Keep("kept for this test")

    trained.grads(policy)  # learn the names
    wanted = norms[len(norms) // 2]
    norms[:] = [wanted]
    true = trained.grads(None)
    meter = NoiseMeter(run=100, probes=1000)
    lossy = trained.grads(policy, 7, meter)
    meter.harvest()
    (op,) = [op for op in meter.table.ops.values() if op.checked]
    happened = (lossy - true).square().sum().item()
    assert happened > 0
    assert op.checked[1] == pytest.approx(happened, rel=2e-3)


class SharedQuery(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.v, self.o = nn.Linear(16, 32), nn.Linear(16, 32), nn.Linear(32, 8)

    def forward(self, x):
        q, v = (part(x).unsqueeze(1) for part in (self.q, self.v))
        return self.o(nn.functional.scaled_dot_product_attention(q * 4, q * 4, v))


class Recurrent(nn.Module):
    """Most of its gradient is that of weights which come in a list."""

    def __init__(self):
        super().__init__()
        self.rnn, self.norm, self.o = (
            nn.GRU(16, 32, batch_first=True),
            nn.LayerNorm(32),
            nn.Linear(32, 8),
        )

    def forward(self, x):
        return self.o(nn.functional.gelu(self.norm(self.rnn(x)[0])))


def plain_rms():
    norm = nn.RMSNorm(64, elementwise_affine=False)
    return nn.Sequential(nn.Linear(16, 64), norm, nn.Linear(64, 8))


@pytest.mark.parametrize("made", [SharedQuery, Recurrent, plain_rms])
@pytest.mark.parametrize("levels", [16, 32])
def test_predicted_is_measured_where_an_op_is_no_simple_node(made, levels):
    torch.manual_seed(0)
    model, x, y = made(), torch.randn(24, 20, 16), torch.randn(24, 20, 8)

    def grads(policy, seed=0, meter=None):
        model.zero_grad()
        with Saving(policy, min_nbytes=0, context=Context(seed), observer=meter):
            loss = (model(x).view_as(y) - y).square().mean()
        loss.backward()
        return torch.cat([p.grad.flatten() for p in model.parameters()]).double()

    policy, true = Lossy(er.codec("dither", levels=levels)), grads(KeepAll())
    measured = [(grads(policy, seed) - true).square().sum().item() for seed in range(16)]
    meter = NoiseMeter(run=100, probes=8)
    for seed in range(16):
        grads(policy, 100 + seed, meter)
    meter.harvest()
    added = sum(measured) / 16
    assert 0.75 < meter.table.added / added < 1.3
    if made is Recurrent:
        assert meter.table.gradient.size == pytest.approx(true.square().sum().item(), rel=0.1)


def test_silu_in_place_is_probed_with_the_input_that_it_had():
    torch.manual_seed(0)
    layers = (nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.SiLU(inplace=True), nn.Conv2d(8, 8, 3))
    model, x = nn.Sequential(*layers), torch.randn(8, 3, 12, 12)

    def grads(policy, meter=None):
        model.zero_grad()
        with Saving(policy, min_nbytes=0, observer=meter):
            loss = model(x).square().mean()
        loss.backward()
        return torch.cat([p.grad.flatten() for p in model.parameters()]).double()

    def only_silu(site):
        lossy = site.consumer == "silu" and site.need is Need.LOSSY
        return Encode(er.codec("dither", levels=8), site.facts) if lossy else Keep("for this test")

    meter = NoiseMeter(run=100, probes=9)
    happened = (grads(only_silu, meter) - grads(KeepAll())).square().sum().item()
    meter.harvest()
    (op,) = [op for op in meter.table.ops.values() if op.checked]
    assert happened > 0
    assert op.checked[1] == pytest.approx(happened, rel=2e-3)


def test_watching_changes_no_bit(trained):
    policy = Lossy(er.codec("dither", levels=4))
    torch.manual_seed(5)
    plain = trained.grads(policy, 3)
    after, drawn = {k: v.clone() for k, v in trained.model.state_dict().items()}, torch.rand(1)
    torch.manual_seed(5)
    watched = trained.grads(policy, 3, NoiseMeter(probes=1000))
    assert torch.equal(plain, watched)
    assert torch.equal(drawn, torch.rand(1))  # the user's random numbers
    for key, value in trained.model.state_dict().items():
        assert torch.equal(after[key], value), key  # running statistics move once


def test_nothing_stays_alive_after_a_watched_step(trained):
    seen = []

    def note(module, args, out):
        seen.append(weakref.ref(out))

    hooks = [m.register_forward_hook(note) for m in trained.model.modules()]
    meter = NoiseMeter(probes=1000)
    trained.grads(Lossy(er.codec("dither")), 0, meter)
    for hook in hooks:
        hook.remove()
    gc.collect()
    assert seen
    assert not any(ref() is not None for ref in seen)


def test_a_watched_forward_without_a_backward_teaches_nothing():
    model, meter = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), NoiseMeter()
    x = torch.randn(64, 64, requires_grad=True) * 1
    with Saving(Lossy(er.codec("dither")), min_nbytes=0, observer=meter):
        model(x)
    meter.harvest()
    assert (meter.table.steps, meter.table.added, meter.table.ratio) == (0, None, None)


def test_shared_weights_and_two_backwards_are_summed():
    linear, meter = nn.Linear(64, 64), NoiseMeter(probes=0)
    x = torch.randn(128, 64, requires_grad=True) * 1
    policy = Lossy(er.codec("dither"), rebuild=False)
    with Saving(policy, min_nbytes=0, observer=meter):
        out = linear(linear(x))
    loss = out.square().sum()
    loss.backward(retain_graph=True)
    loss.backward()
    meter.harvest()
    assert len(meter.table.ops) == 2
    assert meter.table.added > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradient_variance_is_that_of_drawn_gradients(dtype):
    torch.manual_seed(0)
    weights = [torch.zeros(n, requires_grad=True, dtype=dtype) for n in (40, 3000)]
    spread = [0.5, 0.1]
    meter = GradientVariance(smoothing=1.0)
    for step in range(60):
        for weight, sigma in zip(weights, spread, strict=True):
            meter.listen(weight)
            drift = 3.0 * step  # moves steadily: taken off
            ((drift * 0.01 + sigma * torch.randn(weight.shape)) * weight).sum().backward()
        meter.end_step(last=step % 10 == 9)
    true = 40 * 0.5**2 + 3000 * 0.1**2
    size = [true + 3040 * (0.03 * step) ** 2 for step in range(60)]
    three = (size[k : k + 3] for k in range(60) if k % 10 < 8)
    shares = [6 * true / (first + 4 * second + third) for first, second, third in three]
    assert meter.share == pytest.approx(sum(shares) / len(shares), rel=0.15)
    assert meter.size == pytest.approx(size[-1], rel=0.15)
    assert meter.draws == 48


def test_a_gradient_that_falls_a_thousandfold_does_not_mislead():
    """Of each step a third is its mean, half varies with the batch, and codes add a sixth."""
    torch.manual_seed(0)
    weight, meter = torch.zeros(3000, requires_grad=True), GradientVariance()
    mean = torch.randn(3000) * 2**0.5
    for step in range(60):
        scale = 10.0 ** -(3 * (step // 10) / 5)
        meter.listen(weight)
        batch, codes = torch.randn(3000) * 3**0.5, torch.randn(3000)
        (scale * (mean + batch + codes) * weight).sum().backward()
        known = step % 10 == 3  # as a controller reads it
        meter.end_step(last=step % 10 == 3, added=3000 * scale**2 if known else None)
    assert meter.share == pytest.approx(1 / 2, rel=0.15)
    assert meter.size == pytest.approx(6 * 3000 * scale**2, rel=0.15)


def test_gradient_variance_skips_what_overflowed_and_removes_its_hooks():
    weight, meter = torch.zeros(8, requires_grad=True), GradientVariance()
    for step in range(3):
        meter.listen(weight)
        (weight * float("inf" if step == 1 else 1)).sum().backward()
        meter.end_step(last=False)
    assert (meter.draws, meter.share) == (0, 0.0)
    assert not weight._backward_hooks


class Sums(nn.Module):
    """A convolution reads x + tanh(f(x)) / 2, which is made again from the codes of x and tanh."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 1)
        self.inner = nn.Conv2d(16, 16, 3, padding=1, groups=16)
        self.after = nn.Conv2d(16, 16, 3, padding=1)
        self.last = nn.Linear(16, 10)

    def forward(self, x):
        x = self.first(x)
        x = self.after(x + torch.tanh(self.inner(x)) / 2)
        return self.last(x.square().mean((2, 3)))


class Alone(Lossy):
    """Encodes what one module saves, and keeps the rest, but for what is made again."""

    def __init__(self, codec, module, consumer):
        super().__init__(codec)
        self.named = module, consumer

    def __call__(self, site):
        action = super().__call__(site)
        if isinstance(action, Encode) and (site.name.module, site.name.consumer) != self.named:
            return Keep("kept for this test")
        return action


@pytest.mark.parametrize(("kind", "most"), [(NoiseMeter, 2), (ReachMeter, 9)])
def test_each_code_adds_what_reads_a_sum_of_it(kind, most):
    """The second code of a sum does, too, though its tensor is alive until the sum was saved.

    The parts of a sum are those of the errors of its codes: half of tanh counts as all of it.
    """
    torch.manual_seed(0)
    net, codec, meter = Sums(), er.codec("dither", levels=16), kind(4)
    batches = [(torch.randn(8, 3, 16, 16), torch.randint(10, (8,))) for _ in range(4)]

    def grads(policy, seed, observer=None):
        x, y = batches[seed]
        net.zero_grad()
        with Saving(policy, min_nbytes=0, context=Context(seed), observer=observer):
            loss = nn.functional.cross_entropy(net(x), y)
        loss.backward()
        return torch.cat([p.grad.flatten() for p in net.parameters()]).double()

    true = [grads(KeepAll(), seed) for seed in range(4)]
    for seed in range(4):
        grads(Lossy(codec), seed, meter)
    meter.harvest()
    size = sum(float(one @ one) for one in true)
    for named in (("inner", "conv2d"), ("Sums", "tanh")):
        added = [grads(Alone(codec, *named), seed) - true[seed] for seed in range(4)]
        measured = sum(float(one @ one) for one in added)
        if kind is NoiseMeter:
            predicted = 4 * meter.table.variance_of(SiteName(*named, 0))
        else:
            chosen = meter.shares(1).of(SiteName(*named, 0), 1, 16)
            predicted = size * meter._sampling * chosen / CHOSEN
        assert 1 / 3 < predicted / measured < most, named


def test_a_watch_that_fails_leaves_no_noisy_tensor_for_backward():
    class Root:
        whole = None

        def __init__(self, name: str) -> None:
            self.sites = [SimpleNamespace(name=name)]

        def restore_value(self, *, private: bool) -> torch.Tensor:
            return torch.ones(4)

    class Sum:
        def restore_value(self, *, private: bool) -> torch.Tensor:
            raise RuntimeError("no memory")

    roots = [Root("a"), Root("b")]
    held = {name: SimpleNamespace(energy=torch.ones(())) for name in "ab"}
    with pytest.raises(RuntimeError, match="no memory"):
        StepWatch._parts(SimpleNamespace(_held=held), Sum(), torch.ones(4), roots)
    assert [root.whole for root in roots] == [None, None]
