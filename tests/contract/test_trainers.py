"""Hugging Face's Trainer and Lightning drive er.optim; skipped where they are not installed."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from elbowroom.optim import AdamW

# What these packages warn of is not ours.
pytestmark = pytest.mark.filterwarnings("ignore")


class Scored(nn.Module):
    """x [B, 100] and labels [B] -> a loss, as Trainer asks for it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(100, 150), nn.Tanh(), nn.Linear(150, 3))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        scores = self.layers(x)
        return {"loss": nn.functional.cross_entropy(scores, labels), "logits": scores}


def rows(n: int = 64) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, 100, generator=generator)
    return [{"x": row, "labels": torch.tensor(i % 3)} for i, row in enumerate(x)]


def same(one: nn.Module, other: nn.Module) -> bool:
    return all(map(torch.equal, one.parameters(), other.parameters()))


def test_a_hugging_face_trainer_resumes_with_the_same_bits(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")  # which its Trainer needs, and its package does not bring

    def trainer(name: str) -> Any:
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path / name),
            max_steps=6,
            save_steps=3,
            per_device_train_batch_size=8,
            gradient_accumulation_steps=2,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        )
        return transformers.Trainer(
            model=Scored(),
            args=arguments,
            train_dataset=rows(),
            optimizer_cls_and_kwargs=(AdamW, {"lr": 1e-3, "state": "int8"}),
        )

    first, second = trainer("first"), trainer("second")
    before = Scored()
    first.train()
    second.train(resume_from_checkpoint=str(tmp_path / "first" / "checkpoint-3"))
    states = first.optimizer.state[first.model.layers[0].weight]
    assert states["exp_avg_codes"].dtype is torch.int8
    assert states["step"] == 6
    assert not same(first.model, before)
    assert same(first.model, second.model)


def test_lightning_resumes_with_the_same_bits(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self, *, release: bool) -> None:
            super().__init__()
            self.scored, self.release = Scored(), release

        def training_step(self, batch: dict[str, Tensor], _: int) -> Tensor:
            return self.scored(**batch)["loss"]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            optimizer = AdamW(self.parameters(), lr=1e-3, state="int8")
            if self.release:
                optimizer.release_gradients()
            return optimizer

    def train(steps: int, *, release: bool = False) -> Any:
        module = Module(release=release)
        trainer = lightning.Trainer(
            max_steps=steps,
            accelerator="cpu",
            devices=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        data = torch.utils.data.DataLoader(rows(), batch_size=8)
        trainer.fit(module, data)
        trainer.save_checkpoint(tmp_path / "last.ckpt")
        return module

    whole, released = train(8), train(8, release=True)
    assert same(whole, released)
    assert not same(whole.scored, Scored())
    before = train(4)
    checkpoint = torch.load(tmp_path / "last.ckpt", weights_only=False)
    optimizer = AdamW(before.parameters(), state="int8")
    optimizer.load_state_dict(checkpoint["optimizer_states"][0])
    for batch in list(torch.utils.data.DataLoader(rows(), batch_size=8))[4:]:
        optimizer.zero_grad()
        before.scored(**batch)["loss"].backward()
        optimizer.step()
    assert same(whole, before)
