"""fit: a step in which the graphs of several fitted models wait has one ledger and one plan."""

import logging
import re
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import elbowroom as er
from elbowroom.errors import BudgetTooSmall
from elbowroom.fitting.model_state import storage_nbytes
from elbowroom.measure import peak
from elbowroom.runtime.attach import opener_of
from elbowroom.runtime.undo import tensors_of
from elbowroom.tools import Discovery
from elbowroom.units import parse_nbytes

pytestmark = pytest.mark.usefixtures("nothing_stays_attached")
BATCH, WIDE = 512, 128
STEPS = 12  # of GradientPenalty, replayed steps hold more by their scripts, and are measured again


def net(*widths, act):
    layers = [one for pair in pairwise(widths) for one in (nn.Linear(*pair), act())]
    return nn.Sequential(*layers[:-1])


def leaky():
    return nn.LeakyReLU(0.2)


class Trained:
    """Models that train together, each by an optimizer of its own."""

    def __init__(self):
        torch.manual_seed(0)
        self.generator = nn.Sequential(net(16, 64, 96, WIDE, act=nn.ReLU), nn.Tanh())
        self.discriminator = net(WIDE, 96, 64, 1, act=leaky)
        self.encoder = net(WIDE, 96, 64, 32, act=nn.ReLU)
        self.criterion = nn.BCEWithLogitsLoss()
        self.seed = 0
        self.optimizers = {
            model: torch.optim.Adam(model.parameters(), 1e-3, foreach=False) for model in self
        }

    def __iter__(self):
        return iter((self.generator, self.discriminator))

    def fit(self, budget, *, loss):
        for model, optimizer in self.optimizers.items():
            losses = [self.criterion] if loss else None
            how = {"exact": True, "min_nbytes": 4096, "loss": losses}
            er.fit(model, budget=budget, optimizer=optimizer, **how)

    def draw(self):
        draw = torch.Generator().manual_seed(self.seed)
        self.seed += 1
        return (torch.randn(BATCH, width, generator=draw) for width in (WIDE, 16))

    def judged(self, images, real):
        return self.criterion(self.discriminator(images), torch.full((BATCH, 1), float(real)))

    def update(self, loss, *models):
        for model in models:
            self.optimizers[model].zero_grad()
        loss.backward()
        for model in models:
            self.optimizers[model].step()

    def weights(self):
        return [p.detach().clone() for model in self for p in model.parameters()]

    def held_nbytes(self):
        gradients = (p.grad for model in self for p in model.parameters() if p.grad is not None)
        states = [state for one in self.optimizers.values() for state in one.state.values()]
        kept = (p for model in self for p in model.parameters())
        return storage_nbytes([*kept, *gradients, *tensors_of(states)])


class Gan(Trained):
    def step(self):
        real, z = self.draw()
        fake = self.generator(z)
        loss = self.judged(real, 1) + self.judged(fake.detach(), 0)
        self.update(loss, self.discriminator)
        self.update(self.judged(fake, 1), self.generator)


class RealFirst(Trained):
    def step(self):
        real, z = self.draw()
        loss = self.judged(real, 1)
        fake = self.generator(z)
        self.update(loss + self.judged(fake.detach(), 0), self.discriminator)
        self.update(self.judged(fake, 1), self.generator)


class Dcgan(Trained):
    def step(self):
        real, z = self.draw()
        self.discriminator.zero_grad()
        self.judged(real, 1).backward()
        fake = self.generator(z)
        self.judged(fake.detach(), 0).backward()
        self.optimizers[self.discriminator].step()
        self.update(self.judged(fake, 1), self.generator)


class Wasserstein(Trained):
    """The discriminator is updated 5 times, and then the generator once."""

    keeps = False

    def step(self):
        real, z = self.draw()
        for n in range(5):
            fake = self.generator(z + n)
            fake = fake if self.keeps else fake.detach()
            score = self.discriminator(fake.detach()).mean() - self.discriminator(real).mean()
            self.update(score, self.discriminator)
        fake = self.generator(z)
        self.update(-self.discriminator(fake).mean(), self.generator)


class KeptImages(Wasserstein):
    keeps = True


class GradientPenalty(Trained):
    def step(self):
        real, z = self.draw()
        fake = self.generator(z)
        scores = self.discriminator(real), self.discriminator(fake)
        between = (0.3 * real + 0.7 * fake.detach()).requires_grad_()
        score = self.discriminator(between).sum()
        (slope,) = torch.autograd.grad(score, between, create_graph=True)
        penalty = ((slope.norm(2, 1) - 1) ** 2).mean()
        self.update(scores[1].mean() - scores[0].mean() + 10 * penalty, self.discriminator)
        self.update(-self.discriminator(self.generator(z)).mean(), self.generator)


class VaeGan(Trained):
    def __iter__(self):
        return iter((self.generator, self.discriminator, self.encoder))

    def step(self):
        real, z = self.draw()
        mean, spread = self.encoder(real).chunk(2, 1)
        fake = self.generator(mean + z * (spread / 2).exp())
        loss = self.judged(real, 1) + self.judged(fake.detach(), 0)
        self.update(loss, self.discriminator)
        divergence = (mean**2 + spread.exp() - spread - 1).mean() / 2
        loss = self.judged(fake, 1) + F.mse_loss(fake, real) + divergence
        self.update(loss, self.generator, self.encoder)


class Cycle(Trained):
    def __iter__(self):
        return iter((self.generator, self.discriminator, self.encoder))

    def step(self):
        real, z = self.draw()
        fake = self.generator(z)
        back, code = self.encoder(fake)[:, :16], self.encoder(real)[:, :16]
        loss = F.l1_loss(back, z) + F.l1_loss(self.generator(code), real) + self.judged(fake, 1)
        self.update(loss, self.generator, self.encoder)
        loss = self.judged(real, 1) + self.judged(fake.detach(), 0)
        self.update(loss, self.discriminator)


class Chain(Trained):
    """Five networks in a row, between which nothing is rebuilt: no plan is below plain training."""

    def __init__(self):
        super().__init__()
        self.chained = [nn.Sequential(nn.Linear(WIDE, WIDE), nn.GELU()) for _ in range(5)]
        self.optimizers = {
            model: torch.optim.Adam(model.parameters(), 1e-3, foreach=False) for model in self
        }

    def __iter__(self):
        return iter(getattr(self, "chained", ()))

    def step(self):
        real, _ = self.draw()
        x = real
        for model in self:
            x = model(x)
        self.update(F.mse_loss(x, real), *self)


ALL = [Gan, RealFirst, Dcgan, Wasserstein, KeptImages, GradientPenalty, VaeGan, Cycle]
CASES = [*((kind, 0.85) for kind in ALL), (Gan, 0.6), (VaeGan, 0.6), (Chain, 0.8)]


def trained_plainly(kind):
    plain = kind()
    for _ in range(STEPS):
        plain.step()
    weights = plain.weights()
    return weights, plain.held_nbytes() + peak(plain.step)


def named(messages):
    """Return the budgets that warnings name where steps vary: such a training is not refused."""
    found = (re.search(r'Give budget="([^"]+)"', one) for one in messages)
    return [parse_nbytes(one[1]) for one in found if one]


@pytest.mark.parametrize(("kind", "share"), CASES)
def test_models_keep_to_one_budget_or_are_told_one_that_holds(kind, share, caplog):
    weights, needs = trained_plainly(kind)
    budget, told = int(share * needs), []
    while len(told) < 3:
        trained = kind()
        trained.fit(budget, loss=kind in (Gan, RealFirst, Dcgan))
        caplog.clear()
        try:
            for _ in range(STEPS):
                trained.step()
            larger = named(caplog.messages)
        except BudgetTooSmall as error:
            larger = [error.least_nbytes]
        finally:
            fittings = [opener_of(model) for model in trained]
            for model in trained:
                er.release(model)
        if not larger:
            break
        budget = max(larger)
        told.append(budget / needs)
    assert all(map(torch.equal, trained.weights(), weights))
    assert len(told) <= 2, told
    assert all(one <= 1.25 for one in told), told
    hosts = [one for one in fittings if not one.is_guest]
    assert all(one.planner.settled for one in hosts)
    assert all(one.peak_nbytes <= budget for one in hosts)


def test_the_discriminator_is_a_guest_in_the_generators_step(caplog):
    """Its step was measured alone, the generator's never, and a false warning came in each step."""
    weights, needs = trained_plainly(Gan)
    trained = Gan()
    trained.fit(int(0.85 * needs), loss=True)
    host, guest = (opener_of(model) for model in trained)
    with caplog.at_level(logging.WARNING):
        for _ in range(STEPS):
            trained.step()
    assert all(map(torch.equal, trained.weights(), weights))
    assert guest.is_guest
    assert guest.host is host
    assert host.planner.settled
    unplanned = [one for one in caplog.messages if "this was not planned" in one]
    assert len(unplanned) <= 1, unplanned
    assert 0.7 * needs <= host.peak_nbytes <= 0.85 * needs
    told = [er.summary(model) for model in trained]
    assert told[0] == replace(told[1], model=told[0].model)


def test_a_generator_that_runs_again_begins_another_step():
    """Old images still wait for a backward that never comes; no step goes on for ever."""
    trained = KeptImages()
    trained.fit("1 GiB", loss=False)
    for _ in range(2):
        trained.step()
    assert opener_of(trained.generator).context.step == 12
    assert opener_of(trained.discriminator).context.step == 0


def test_what_waits_for_no_backward_takes_nobody_in():
    trained = Gan()
    trained.fit("1 GiB", loss=False)
    real, z = trained.draw()
    kept = trained.generator(z)
    trained.discriminator(kept.detach())
    assert opener_of(trained.discriminator).is_guest
    kept.sum().backward()
    trained.discriminator(real).sum().backward()
    assert not opener_of(trained.discriminator).is_guest


def test_a_released_guest_is_not_counted():
    trained = Gan()
    trained.fit("1 GiB", loss=False)
    trained.step()
    model_state = opener_of(trained.generator).model_state
    both = model_state.memory().static_nbytes
    guest = opener_of(trained.discriminator).model_state.memory().static_nbytes
    er.release(trained.discriminator)
    assert model_state.memory().static_nbytes == both - guest


def test_the_first_iteration_leaves_room_for_models_that_nobody_knows_yet():
    """What the first forwards held whole left none for the later ones: 1.09 of the budget.

    Not so of Gan (1.03, with a warning): no action lowers the peak of its first forward alone.
    """
    _, needs = trained_plainly(Dcgan)
    trained, budget = Dcgan(), int(0.8 * needs)
    trained.fit(budget, loss=True)
    assert trained.held_nbytes() + peak(trained.step) <= budget


def test_a_script_tells_by_its_optimizers_that_other_models_will_follow():
    with Discovery(lambda model: None) as discovery:
        one, other = nn.Linear(4, 4), nn.Linear(4, 4)
        optimizers = [torch.optim.SGD(one.parameters(), 0.1)]
        assert not discovery.trains_more([one])
        optimizers.append(torch.optim.SGD(other.parameters(), 0.1))
        assert discovery.trains_more([one])
        assert not discovery.trains_more([one, other])
        del optimizers[1]
        assert not discovery.trains_more([one])
