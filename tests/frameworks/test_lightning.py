"""The Trainer of Lightning: the same weights in less memory."""

import logging

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

lightning = pytest.importorskip("lightning.pytorch")

from elbowroom.errors import BudgetTooSmall, PlanError  # noqa: E402
from elbowroom.integrations.lightning import Budget  # noqa: E402
from elbowroom.runtime.attach import attached  # noqa: E402


class Module(lightning.LightningModule):
    def __init__(self, heads=0):
        super().__init__()
        torch.manual_seed(0)
        parts = [(nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU()) for _ in range(6)]
        self.net = nn.Sequential(*(part for block in parts for part in block))
        for number in range(heads):
            self.add_module(f"head{number}", nn.Linear(64, 1))

    def training_step(self, batch, _):
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def trained(*callbacks, module=None, **settings):
    lightning.seed_everything(1, verbose=False)
    module = Module() if module is None else module
    x = torch.randn(14 * 512, 64, generator=torch.Generator().manual_seed(2))
    trainer = lightning.Trainer(
        max_epochs=1,
        accelerator="cpu",
        callbacks=list(callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        **{"logger": False} | settings,
    )
    trainer.fit(module, DataLoader(TensorDataset(x), batch_size=512))
    return module


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_the_same_weights_inside_a_tight_budget(precision):
    plain = trained(precision=precision)
    ample = Budget("60 GiB", exact=True)
    trained(ample, precision=precision)
    callback = Budget(int(0.8 * ample.summary.last_nbytes), exact=True)
    ours = trained(callback, precision=precision)
    pairs = zip(plain.parameters(), ours.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert callback.summary.last_nbytes <= callback.summary.budget_nbytes
    assert not attached()


@pytest.mark.parametrize("logs", [True, False])
def test_loggers_are_given_the_figures_if_they_may(tmp_path, logs):
    from lightning.pytorch.loggers import CSVLogger

    logger = CSVLogger(str(tmp_path))
    trained(Budget("60 GiB", logs=logs), logger=logger, log_every_n_steps=4)
    metrics = tmp_path / "lightning_logs" / "version_0" / "metrics.csv"
    head = metrics.read_text().splitlines()[0] if metrics.exists() else ""
    assert ("memory/peak_mib" in head) is logs


class Autoencoder(lightning.LightningModule):
    """As in Lightning's quick start; its decoders are in a list, which is not called itself."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.encoder = Module().net
        self.decoders = nn.ModuleList([Module().net])

    def training_step(self, batch, _):
        x = batch[0]
        for module in (self.encoder, *self.decoders):
            x = module(x)
        return nn.functional.mse_loss(x, batch[0])

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def test_all_networks_of_a_module_are_fitted():
    plain = trained(module=Autoencoder())
    ample = Budget("60 GiB", exact=True)
    trained(ample, module=Autoencoder())
    assert list(ample.summaries) == ["encoder", "decoders.0"]
    tight = Budget(int(0.8 * ample.summary.last_nbytes), exact=True, min_nbytes=4096)
    ours = trained(tight, module=Autoencoder())
    pairs = zip(plain.parameters(), ours.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert all(one.last_nbytes <= one.budget_nbytes for one in tight.summaries.values())
    assert not attached()


def test_a_refusal_is_not_followed_by_other_lines(caplog):
    with pytest.raises(BudgetTooSmall):
        trained(Budget("100 KiB", exact=True, min_nbytes=4096), module=Autoencoder())
    assert not [line for line in warnings_of(caplog) if "NOT kept" in line]
    assert not attached()


def test_children_that_no_step_calls_are_not_warned_of(caplog):
    plain = trained(module=Module(heads=2))
    ample = Budget("60 GiB", exact=True)
    trained(ample, module=Module(heads=2))
    assert list(ample.summaries) == ["net", "head0", "head1"]
    tight = Budget(int(0.8 * ample.summary.last_nbytes), exact=True)
    ours = trained(tight, module=Module(heads=2))
    pairs = zip(plain.parameters(), ours.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert tight.summary.last_nbytes <= tight.summary.budget_nbytes
    assert not [line for line in warnings_of(caplog) if "did not call" in line]


def test_a_network_can_be_named_and_one_is_needed():
    callback = Budget("60 GiB", network="net")
    trained(callback, module=Module(heads=2))
    assert list(callback.summaries) == ["net"]
    module = Module()
    module.net = nn.Identity()
    with pytest.raises(PlanError, match="no child with parameters"):
        Budget("60 GiB").on_train_start(None, module)


def test_an_error_in_a_step_releases_the_network():
    class Failing(Module):
        def training_step(self, batch, n):
            if n == 3:
                raise ValueError("mine")
            return super().training_step(batch, n)

    with pytest.raises(ValueError, match="mine"):
        trained(Budget("60 GiB"), module=Failing())
    assert not attached()


def warnings_of(caplog):
    ours = [one for one in caplog.records if one.name == "elbowroom"]
    return [one.getMessage() for one in ours if one.levelno >= logging.WARNING]


class Adversarial(lightning.LightningModule):
    """A generator and a discriminator, optimized by hand; `inside` holds both in one module."""

    def __init__(self, inside=False):
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(0)
        parts = {
            "g": nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)),
            "d": nn.Sequential(nn.Linear(64, 64), nn.LeakyReLU(), nn.Linear(64, 1)),
        }
        holder = nn.ModuleDict(parts)
        if inside:
            self.both = holder
        else:
            self.g, self.d = holder["g"], holder["d"]
        self.parts = lambda: (holder["g"], holder["d"])

    def training_step(self, batch, _):
        (g, d), (og, od) = self.parts(), self.optimizers()
        fake = g(batch[0])
        od.zero_grad()
        self.manual_backward(d(fake.detach()).mean() - d(batch[0]).mean())
        od.step()
        og.zero_grad()
        self.manual_backward(-d(fake).mean())
        og.step()

    def configure_optimizers(self):
        return [torch.optim.Adam(part.parameters()) for part in self.parts()], []


def test_networks_that_train_each_other_share_a_budget(caplog):
    plain = trained(module=Adversarial())
    ample = Budget("60 GiB", exact=True)
    trained(ample, module=Adversarial())
    assert set(ample.summaries) == {"g", "d"}
    assert not warnings_of(caplog)  # each optimizer is that of its own network
    highest = max(one.last_nbytes for one in ample.summaries.values())
    assert ample.summary.last_nbytes == highest
    tight = Budget(int(0.9 * highest), network=("g", "d"), exact=True, min_nbytes=4096)
    ours = trained(tight, module=Adversarial())
    pairs = zip(plain.parameters(), ours.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert all(one.last_nbytes <= one.budget_nbytes for one in tight.summaries.values())
    assert not attached()


def test_a_network_that_no_step_calls_is_warned_of_at_once_and_at_the_end(caplog):
    trained(Budget("60 GiB", network="both"), module=Adversarial(inside=True))
    first, last = warnings_of(caplog)
    assert "training_step did not call both" in first
    assert "had no effect: the training did not call ModuleDict" in last
