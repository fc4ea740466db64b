"""Controllers on a small training: they reach what they promise, and a checkpoint goes on alike."""

import contextlib
import gc
import pickle
import weakref

import pytest
import torch
from torch import nn

import elbowroom as er
from elbowroom.adaptive import ActNN, CometBounds, Guard, LeanBudget, NoiseBudget
from elbowroom.adaptive.base import Adaptive
from elbowroom.errors import PlanError, UnknownField
from elbowroom.plan import Lean
from elbowroom.runtime.context import PROCESS


class Training:
    """A convolutional net on drawn images, always the same."""

    def __init__(self, momentum=0.9):
        torch.manual_seed(0)
        layers = []
        for inputs, outputs in ((3, 16), (16, 16), (16, 16)):
            layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()]
        self.model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(16 * 64, 10))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=momentum)
        self.images = torch.randn(512, 3, 8, 8)
        self.labels = (self.images.mean((1, 2, 3)) * 40).long().clamp(-4, 4) + 4
        self.scale = 1.0  # of the loss

    def step(self, control, nth):
        at = torch.arange(32 * nth, 32 * nth + 32) % 512
        self.optimizer.zero_grad()
        with er.saving(control, min_nbytes=0, seed=nth) as saved:
            out = self.model(self.images[at])
            loss = nn.functional.cross_entropy(out, self.labels[at]) * self.scale
        loss.backward()
        self.optimizer.step()
        if isinstance(control, Guard):
            control.loss(loss)
        return saved

    def run(self, control, steps, first=0):
        for nth in range(first, first + steps):
            saved = self.step(control, nth)
        return saved


def test_a_noise_budget_is_used_and_kept():
    training = Training()
    control = NoiseBudget(er.codec("dither", levels=16), noise=0.05, every=5)
    before = training.step(control, 0).ledger.after_nbytes
    saved = training.run(control, 24, 1)
    report = saved.error_report()
    assert 0.01 < report.ratio < 0.05 * 1.25  # chosen a step ago, from an average
    assert saved.ledger.after_nbytes < before
    assert len(set(control.variants.values())) > 1
    assert "of what mini-batches vary by (predicted)" in str(report)


def true_noise(training, policy):
    """What a policy adds over what mini-batches vary by, both drawn at the weights as they are."""
    parameters = list(training.model.parameters())

    def gradient(nth, context):
        at = torch.arange(32 * nth, 32 * nth + 32)
        with context:
            out = training.model(training.images[at])
            loss = nn.functional.cross_entropy(out, training.labels[at])
        return torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters)])

    exact = torch.stack([gradient(nth, contextlib.nullcontext()) for nth in range(16)])
    near = [gradient(nth, er.saving(policy, min_nbytes=0, seed=nth)) for nth in range(16)]
    varies = (exact - exact.mean(0)).square().sum() / 15
    return float((torch.stack(near) - exact).square().sum() / 16 / varies)


@pytest.mark.parametrize("early", [100.0, 0.01])
def test_gradients_of_another_size_at_first_do_not_mislead(early):
    """As where a loss falls steeply: an average of absolute variances let codes add 0.94 here."""
    training, control = Training(), NoiseBudget(er.codec("dither"), noise=0.05, every=10)
    rate = training.optimizer.param_groups[0]
    for nth in range(25):
        training.scale = early if nth < 8 else 1.0
        rate["lr"] = 0.01 / training.scale
        training.step(control, nth)
    control.error_report()
    assert 0.01 < true_noise(training, lambda site: Adaptive.__call__(control, site)) < 0.1


def test_a_tenth_of_the_noise_takes_more_bytes():
    sizes = []
    for noise in (0.5, 0.005):
        control = NoiseBudget(er.codec("dither", levels=16), noise=noise, every=5)
        sizes.append(Training().run(control, 12).ledger.after_nbytes)
    assert sizes[0] < sizes[1]


def test_lean_codes_keep_a_noise_budget_in_fewer_bytes():
    """Its codes serve several readers, and none is spent where ReLU lets nothing pass."""
    held = {}
    for control in (
        LeanBudget(Lean(), noise=0.05, every=5),
        NoiseBudget(er.codec("dither", levels=16), noise=0.05, every=5),
    ):
        saved = Training().run(control, 25)
        held[type(control)] = saved.ledger.after_nbytes
        assert 0.01 < saved.error_report().ratio < 0.05 * 1.25
        assert len(set(control.variants.values())) > 1
    assert held[LeanBudget] < 0.9 * held[NoiseBudget]


def test_actnn_spreads_its_average():
    control = ActNN(bits=2.5)
    training = Training()
    training.run(control, 10)
    held = control.table.held
    bits = sum(control.codec_of(name).bits * h.numel for name, h in held.items())
    assert 1.5 < bits / sum(h.numel for h in held.values()) <= 2.5
    assert len(set(control.variants.values())) > 1


@pytest.mark.parametrize("momentum", [0.9, "adam"])
def test_comet_holds_each_layers_noise_at_a_fraction_of_its_momentum(momentum):
    training = Training(0.9)
    if momentum == "adam":
        training.optimizer = torch.optim.AdamW(training.model.parameters(), lr=1e-3)
    control = CometBounds(training.optimizer, fraction=0.02, every=2)
    training.run(control, 40)
    shares = []
    for op in control.table.ops.values():
        weight = None if op.weight is None else op.weight()
        if weight is not None and op.variance:
            sigma = (op.variance / weight.numel()) ** 0.5
            shares.append(sigma / control._momentum(weight))
    assert len(shares) == 4  # of the first convolution, too: its input is made inside
    assert all(0.005 < share < 0.06 for share in shares)


def test_comet_predicts_where_that_takes_fewer_bits():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.smooth = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 4, 3)
            self.rough = nn.Conv2d(4, 2, 3)

        def forward(self, x):
            y = self.first(x)
            for _ in range(4):  # at once, a copy of what is so small would be held in its place
                y = nn.functional.interpolate(y, scale_factor=2.0, mode="bicubic")
            y = self.smooth(y)
            return self.rough(y * torch.randn_like(y))

    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3, momentum=0.9)
    control = CometBounds(optimizer, fraction=2e-3, codec=er.codec("comet", bound=1e-2), every=2)
    for _ in range(6):
        optimizer.zero_grad()
        with er.saving(control, min_nbytes=0):
            loss = net(torch.randn(4, 3, 4, 4)).square().mean()
        loss.backward()
        optimizer.step()
    control.error_report()
    found = {name.module: prediction for name, prediction in control.predictions.items()}
    assert found["smooth"] in ("1d", "2d")
    assert found["rough"] == "none"
    state = pickle.loads(pickle.dumps(control.state_dict()))
    again = CometBounds(optimizer, codec=er.codec("comet", bound=1e-2), every=2)
    again.load_state_dict(state)
    name = next(name for name in control.predictions if name.module == "smooth")
    assert again.codec_of(name) == control.codec_of(name)
    assert again.codec_of(name).prediction == found["smooth"]


def test_the_guard_goes_up_when_the_loss_rises_and_down_when_it_does_not():
    control = Guard(er.codec("group", bits=3), patience=10, every=100, noise=1e9)
    training = Training()
    training.run(control, 12)
    calm = dict(control.variants)
    assert calm
    assert all(variant > control.start for variant in calm.values())
    for _ in range(30):
        control.loss(5.0)
        control.loss(50.0)
    assert control.alarms > 0
    assert min(control.variants.values()) < control.start
    control.loss(float("nan"))
    assert control.alarms > 1


def test_a_guard_starts_in_the_middle_of_its_ladder():
    """An alarm can help, and calm can save: variants lie on either side, the mildest unbiased."""
    control = Guard()
    assert 3 <= control.start <= len(control.ladder) - 3
    assert control.ladder[0].rounding == "dither"
    control.loss(1.0)
    for _ in range(30):
        control.loss(1.0)
    start = control.start
    control.loss(50.0)  # before any look: all tensors get milder
    assert control.alarms == 1
    assert control.start == start - 1


def test_a_guard_learns_where_it_was_too_lean():
    """What went down before an alarm goes back, and does not go there again."""
    control = Guard(er.codec("group", bits=3), patience=10, every=100, noise=1e9)
    Training().run(control, 1)
    Training().run(control, 29)
    before = dict(control.variants)
    leaner = list(control._leaner)
    assert leaner
    control.loss(1e4)
    control.loss(1e4)
    assert control.alarms > 0
    assert all(control.variants[name] < before[name] for name in leaner)
    limits = {name: control.variants[name] for name in leaner}
    again = Guard(er.codec("group", bits=3), patience=10, every=100, noise=1e9)
    again.load_state_dict(pickle.loads(pickle.dumps(control.state_dict())))
    for one in (control, again):
        for _ in range(300):
            one.loss(1.0)  # calm
        assert all(one.variants[name] <= limits[name] for name in leaner)


def test_a_guard_saves_a_training_that_its_first_setting_harms():
    """One bit a value, fixed, costs a tenth of a nat; the guard leaves it in time."""

    def last_losses(control):
        training = Training()
        training.run(control, 100)
        with torch.no_grad():
            out = training.model(training.images)
            return float(nn.functional.cross_entropy(out, training.labels))

    harsh = er.codec("group", bits=1)
    plain, fixed = last_losses("keep"), last_losses(harsh)
    guarded = last_losses(Guard(harsh, every=5))
    assert fixed > plain + 0.05
    assert guarded < fixed - 0.5 * (fixed - plain)


@pytest.mark.parametrize("spoiled", [[float("inf")], [float("nan")] * 2, [-float("inf")]])
@pytest.mark.parametrize("before", [3, 30])
def test_a_loss_that_is_not_finite_is_an_alarm_and_no_end_of_hearing(spoiled, before):
    control = Guard()
    for loss in [1.0] * before + spoiled:
        control.loss(loss)
    assert control.alarms == len(spoiled)
    for loss in [1.0] * 30 + [3.0] * 3:
        control.loss(loss)
    assert control.alarms > len(spoiled)


@pytest.mark.parametrize("loss", ["2.0", None, torch.ones(2), torch.tensor(1j), [1.0]])
def test_what_is_no_loss_is_refused(loss):
    with pytest.raises(UnknownField, match="takes the loss of a step, a number or a tensor of one"):
        Guard().loss(loss)


def test_a_guard_that_hears_nothing_says_so(caplog):
    control = Guard(er.codec("group", bits=4), every=2)
    training = Training()
    for nth in range(12):
        with er.saving(control, min_nbytes=0, seed=nth):
            loss = nn.functional.cross_entropy(training.model(training.images), training.labels)
        loss.backward()
    control.error_report()
    assert "has not been told any loss" in caplog.text
    assert "guard.loss(loss)" in caplog.text


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", ["noise", "lean", "actnn", "comet", "guard"])
@pytest.mark.parametrize("first", [2, 5, 9])
def test_a_checkpoint_goes_on_with_the_same_choices(kind, first):
    def control(training):
        codec = er.codec("dither", levels=8)
        made = {
            "noise": lambda: NoiseBudget(codec, every=7),
            "lean": lambda: LeanBudget(Lean(), every=7),
            "actnn": lambda: ActNN(bits=3, every=7),
            "comet": lambda: CometBounds(training.optimizer, every=7),
            "guard": lambda: Guard(codec, every=7, patience=4),
        }
        return made[kind]()

    def training():
        made = Training()
        made.model[2] = made.model[5] = nn.GELU()  # probed in turn, as norms are
        return made

    whole = training()
    through = control(whole)
    whole.run(through, first)
    weights = {k: v.clone() for k, v in whole.model.state_dict().items()}
    moments = pickle.loads(pickle.dumps(whole.optimizer.state_dict()))
    state = pickle.loads(pickle.dumps(through.state_dict()))
    whole.run(through, 12, first)

    again = training()
    again.model.load_state_dict(weights)
    again.optimizer.load_state_dict(moments)
    resumed = control(again)
    resumed.load_state_dict(state)
    again.run(resumed, 12, first)
    for one, other in zip(whole.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(one, other)
    assert resumed.variants == through.variants


@pytest.mark.parametrize(
    ("made", "match"),
    [
        (lambda: NoiseBudget(er.codec("group")), "same codec"),
        (lambda: NoiseBudget(er.codec("dither", levels=5)), "same codec"),
        (lambda: Guard(er.codec("dither")), "no state of a Guard"),
    ],
)
def test_a_state_of_another_ladder_or_controller_is_refused(made, match):
    state = NoiseBudget(er.codec("dither")).state_dict()
    with pytest.raises(PlanError, match=match):
        made().load_state_dict(state)
    with pytest.raises(PlanError, match="no state of a NoiseBudget"):
        NoiseBudget(er.codec("dither")).load_state_dict({})


def test_codes_that_drown_what_mini_batches_vary_by_become_mild(caplog):
    training, control = Training(), NoiseBudget(er.codec("dither", levels=2))
    training.run(control, 8)
    control.error_report()  # takes in the last step
    movable = (r for name, r in control.variants.items() if name.consumer != "cross_entropy")
    assert min(movable) > 0  # that has the finest code anyway
    control.table.gradient.share = -0.1
    control._move()
    assert set(control.variants.values()) == {0}
    assert "most precise setting" in caplog.text
    assert "is drowned by them" in str(control.error_report())


@pytest.mark.parametrize(
    "of",
    [
        lambda params: torch.optim.SGD(params, 0.0, momentum=0.9),
        lambda params: torch.optim.SGD(params, 0.0, momentum=0.5, dampening=0.5),
        lambda params: torch.optim.AdamW(params, 0.0),
        lambda params: er.optim.Lion(params, 0.0, state="fp32"),
        lambda params: torch.optim.RMSprop(params, 1e-3, momentum=0.9),
        lambda params: torch.optim.Muon(params, 1e-9),
    ],
)
def test_of_gradients_that_are_noise_every_momentum_is_their_size(of):
    """An error as large would change the momentum as much, since it averages out as they do.

    RMSprop's buffer is of what was divided, and Muon's, a mean, a twentieth of a sum.
    """
    torch.manual_seed(0)
    weight = nn.Parameter(torch.zeros(50, 50))
    optimizer = of([weight])
    for _ in range(400):
        weight.grad = 3 * torch.randn(50, 50)
        optimizer.step()
    assert CometBounds(optimizer)._momentum(weight) == pytest.approx(3.0, rel=0.05)


def test_what_norms_read_may_add_as_much_as_what_layers_read():
    """Without a rule for norms, what they alone read stayed at its first bound."""
    training = Training()
    training.model.append(nn.BatchNorm1d(10))
    control = CometBounds(training.optimizer, fraction=0.1, every=2)
    training.run(control, 24)
    of_norms = of_layers = allowed = 0.0
    for op in control.table.ops.values():
        weight = None if op.weight is None else op.weight()
        if weight is None:
            of_norms += op.variance or 0.0
        else:
            of_layers += op.variance or 0.0
            allowed += weight.numel() * (0.1 * control._momentum(weight)) ** 2
    assert 0.02 * allowed < of_norms < 2 * allowed
    assert 0.02 * allowed < of_layers < 2 * allowed
    assert all(control.bounds[name] != control.codec.bound for name in control.table.held)


@pytest.mark.parametrize("dampening", [0.0, 0.5, 0.9])
def test_momentum_does_not_depend_on_the_dampening(dampening):
    weight = nn.Parameter(torch.zeros(100))
    optimizer = torch.optim.SGD([weight], 0.0, momentum=0.9, dampening=dampening)
    for _ in range(200):
        weight.grad = torch.full((100,), 3.0)
        optimizer.step()
    steady = 3.0 * (1.9 / 0.1) ** 0.5  # the error averages out in the momentum, and they do not
    assert CometBounds(optimizer)._momentum(weight) == pytest.approx(steady, rel=1e-3)


@pytest.mark.parametrize("state", ["fp32", "int8", "coat", "int4x2"])
@pytest.mark.parametrize("kind", ["AdamW", "SGD", "Lion"])
def test_momentum_is_read_from_states_that_are_held_encoded(kind, state):
    torch.manual_seed(0)
    gradients = torch.randn(20, 64, 64) + 0.5

    def momentum(optimizer_of):
        weight = nn.Parameter(torch.zeros(64, 64))
        optimizer = optimizer_of([weight])
        for gradient in gradients:
            weight.grad = gradient.clone()
            optimizer.step()
        return CometBounds(optimizer)._momentum(weight)

    more = {"momentum": 0.9} if kind == "SGD" else {}
    ours = momentum(lambda params: getattr(er.optim, kind)(params, lr=0.0, state=state, **more))
    if kind == "Lion":
        mean = torch.zeros(64, 64)
        for gradient in gradients:
            mean = 0.99 * mean + 0.01 * gradient
        noise = sum((0.01 * 0.99**k) ** 2 for k in range(20)) ** 0.5  # of drawn errors of size 1
        expected = float(mean.square().mean().sqrt()) / noise
    else:
        expected = momentum(lambda params: getattr(torch.optim, kind)(params, lr=0.0, **more))
    assert ours == pytest.approx(expected, rel=0.15 if state == "int4x2" else 0.03)


@pytest.mark.parametrize("kind", ["RMSprop", "NAdam", "Adafactor", "Adadelta", "RAdam", "Adam"])
def test_momentum_of_other_optimizers_of_torchs(kind):
    torch.manual_seed(0)
    weight = nn.Parameter(torch.zeros(32, 32))
    optimizer = getattr(torch.optim, kind)([weight])
    for _ in range(400):
        weight.grad = torch.randn(32, 32)
        optimizer.step()
    assert CometBounds(optimizer)._momentum(weight) == pytest.approx(1.0, rel=0.1)


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.5, 0.9999)])
@pytest.mark.parametrize("steps", [3, 200])
def test_the_first_moment_of_adamax_decays_by_the_first_beta(betas, steps):
    """By the second one it seemed 37 times as large."""
    torch.manual_seed(0)
    weight = nn.Parameter(torch.zeros(50, 50))
    optimizer = torch.optim.Adamax([weight], 0.0, betas=betas)
    for _ in range(steps):
        weight.grad = 3 * torch.randn(50, 50)
        optimizer.step()
    assert CometBounds(optimizer)._momentum(weight) == pytest.approx(3.0, rel=0.05)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_an_optimizer_that_teaches_nothing_is_named_once(momentum, caplog):
    training = Training(momentum)
    control = CometBounds(training.optimizer, every=1)
    training.run(control, 12)
    said = caplog.text.count("learns nothing from SGD")
    assert said == (momentum == 0)
    assert bool(control.bounds) == bool(momentum)


@pytest.mark.parametrize("state", ["int8", "coat"])
def test_comet_follows_an_optimizer_of_ours(state):
    training = Training()
    training.optimizer = er.optim.AdamW(training.model.parameters(), lr=1e-3, state=state)
    control = CometBounds(training.optimizer, every=2)
    training.run(control, 12)
    assert control.bounds


@pytest.mark.parametrize("unheard", [0, 2, 3])
def test_where_backward_comes_too_late_to_teach_anything_is_said(unheard, caplog):
    """Each unheard-th step has no backward before the next context begins."""
    training, control = Training(), NoiseBudget(er.codec("dither"))
    for step in range(20):
        with er.saving(control, min_nbytes=0):
            loss = training.model(training.images[:8]).square().mean()
        if not unheard or step % unheard:
            loss.backward()
    assert ("had no backward before the next context" in caplog.text) == bool(unheard)


class SiLUOfView(nn.Module):
    def forward(self, x):
        return nn.functional.silu(x.view_as(x), inplace=True)


@pytest.mark.parametrize(
    ("act", "unknown"), [(nn.SiLU(), 0), (nn.SiLU(inplace=True), 0), (SiLUOfView(), 1)]
)
def test_what_a_budget_cannot_know_it_says(act, unknown, caplog):
    """Of an op that works in place of a view, the graph has other nodes."""
    training, control = Training(), NoiseBudget(er.codec("dither"), every=10)
    training.model[2] = training.model[5] = act
    training.run(control, 50)
    assert caplog.text.count("cannot be probed at 'silu' in '2' (2 in all)") == unknown


@pytest.mark.parametrize("between", [nn.Identity, nn.GELU], ids=str)
def test_what_reads_a_norms_output_while_its_code_waits_is_predicted(between, monkeypatch):
    """Its input may be encoded with a ReLU's mask, so what comes next is saved before that."""
    monkeypatch.setattr(PROCESS, "_remembered", {})  # what other tests have measured, among it

    def predicted(policy):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), between(), nn.Conv2d(8, 8, 3))
        x = torch.randn(16, 3, 12, 12)
        for _ in range(4):
            with er.saving(policy, min_nbytes=0, watch=True, seed=0) as saved:
                loss = net(x).square().mean()
            loss.backward()
        rows = saved.error_report().rows
        return {(row.module, row.op): row.predicted for row in rows if row.op != "square"}

    lean, dither = predicted(Lean(plain=4)), predicted(er.codec("dither", levels=4))
    assert ("3", "conv2d") in lean
    assert lean == pytest.approx(dither, rel=0.3)


def test_strings_remember_by_their_settings():
    one, other = er.saving("dither", noise=0.1), er.saving("dither", noise=0.1)
    assert one.policy is other.policy
    assert er.saving("dither", noise=0.2).policy is not one.policy
    lean = er.saving("lean", fold=4, noise=0.1)
    assert lean.policy is er.saving("lean", fold=4, noise=0.1).policy
    assert lean.policy is not er.saving("lean", noise=0.1).policy
    assert er.saving("actnn", bits=3).policy is er.saving("actnn", bits=3).policy


def test_what_the_process_remembers_keeps_no_model_alive():
    training = Training()
    for nth in range(3):  # the last one is watched, and nothing follows it
        with er.saving("dither", noise=0.125, min_nbytes=0) as saved:
            loss = training.model(training.images[32 * nth : 32 * nth + 32]).square().mean()
        loss.backward()
    parameters = [weakref.ref(parameter) for parameter in training.model.parameters()]
    del training, saved, loss
    gc.collect()
    assert not any(ref() is not None for ref in parameters)


def test_an_overflowed_step_moves_nothing():
    training = Training()
    control = NoiseBudget(er.codec("dither", levels=16), noise=0.05, every=1)
    training.run(control, 5)
    control.state_dict()  # takes in the last step
    variants, steps = dict(control.variants), control.table.steps
    with er.saving(control, min_nbytes=0, seed=5) as saved:
        loss = training.model(training.images[:32]).square().mean() * float("inf")
    loss.backward()
    assert saved.error_report().added is not None
    assert (control.variants, control.table.steps) == (variants, steps)


def test_watching_a_fixed_codec_reports_on_it():
    training = Training()
    for nth in range(16):
        training.optimizer.zero_grad()
        at = 32 * (nth % 4)
        with er.saving("dither", levels=4, min_nbytes=0, watch=True) as saved:
            loss = training.model(training.images[at : at + 32]).square().mean()
        loss.backward()
    report = saved.error_report()
    assert {row.op for row in report.rows} == {"conv2d", "batch_norm", "linear", "square"}
    assert all(row.codecs for row in report.rows)
    assert any(row.agreement and 0.5 < row.agreement < 2 for row in report.rows)
    assert "module" in str(report)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: er.saving("dither", noise=0), "positive number"),
        (lambda: er.saving("dither", noise=True), "positive number"),
        (lambda: er.saving("dither", noise=[0.1]), "positive number"),
        (lambda: er.saving("actnn", bits=[2]), "from 1 to 8"),
        (lambda: er.saving("exact", noise=0.1), "goes with a codec"),
        (lambda: er.saving("cast", noise=0.1), "no ladder"),
        (lambda: er.saving("dither", watch=1), "True or False"),
        (lambda: er.saving("actnn", bits=9), "from 1 to 8"),
        (lambda: er.saving("actnn", bit=2), "has no field 'bit'"),
        (lambda: ActNN(every=0), "every=0 is not possible"),
        (lambda: Guard(er.codec("dither"), every=2.5), "every=2.5 is not possible"),
        (lambda: CometBounds(3), "takes the torch.optim.Optimizer"),
        (lambda: Guard(er.codec("dither"), patience=0), "positive number"),
        (lambda: er.saving("dither").error_report(), "watch=True"),
    ],
)
def test_wrong_arguments_say_what_is_possible(make, match):
    with pytest.raises((UnknownField, PlanError), match=match):
        make()
