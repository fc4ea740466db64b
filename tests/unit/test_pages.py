"""The snippets of the pages in docs/ that belong to no codec run, on a small network."""

import doctest
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import elbowroom as er

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("page", ["coat.md", "nn.md", "optim/states.md"])
def test_the_example_of_a_page_runs(page):
    text = (DOCS / page).read_text().split("## Example")[1].split("\n## ")[0]
    example = text.replace("```pycon", "").replace("```", "")
    test = doctest.DocTestParser().get_doctest(example, {}, page, page, 0)
    assert test.examples
    told: list[str] = []
    failed = doctest.DocTestRunner().run(test, out=told.append).failed
    assert not failed, "".join(told)


def snippets(page):
    """The blocks of Python of a page, in their order, with a budget that makes a small batch."""
    text = (DOCS / page).read_text().replace("6 GiB", "24 MiB")
    return re.findall(r"^```python\n(.+?)^```", text, re.DOTALL | re.MULTILINE)


class Network(nn.Sequential):
    """A classifier of rows of 32 numbers, with the layers that the pages speak of."""

    def __init__(self):
        super().__init__(nn.Linear(32, 64), nn.LayerNorm(64), nn.GELU(), nn.Dropout(0.1))
        self.lm_head = nn.Linear(64, 10)


def make_batch(n):
    return torch.randn(n, 32), torch.randint(0, 10, (n,))


def names_of(model):
    """What a page takes as the reader's own."""
    optimizer = torch.optim.AdamW(model.parameters())
    x, y = make_batch(64)

    def step():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return {
        "er": er,
        "torch": torch,
        "model": model,
        "optimizer": optimizer,
        "opt": optimizer,
        "Model": Network,
        "make_batch": make_batch,
        "batches": [make_batch(64) for _ in range(2)],
        "loss_fn": F.cross_entropy,
        "criterion": nn.CrossEntropyLoss(),
        "x": x,
        "y": y,
        "step": step,
        "run": step,
        "train": lambda model, batch: step(),
        "compiled_model": model,
        "hidden": torch.randn(8, 64, requires_grad=True),
        "head": nn.Linear(64, 1000),
        "target": torch.randint(0, 1000, (8,)),
    }


@pytest.mark.parametrize(
    "page", ["quick-start.md", "transformers.md", "nn.md", "compiled.md", "guides/frameworks.md"]
)
def test_the_snippets_of_a_page_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    writer = SimpleNamespace(SummaryWriter=list)  # it may not be installed; a list takes figures
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", writer)
    others = ("transformers", "lightning", "accelerate")  # these are in tests/frameworks
    found = [
        one
        for one in snippets(page)
        if not any(f"elbowroom.integrations.{name}" in one for name in others)
    ]
    assert found
    torch.manual_seed(0)
    model = Network()
    names = names_of(model)
    if page == "guides/frameworks.md":
        er.fit(model, budget="1 GiB", optimizer=names["optimizer"])
    try:
        for one in found:
            if "er.step(" not in one and "log(model" not in one:  # these take a fitted model
                er.release(names["model"])
            # A snippet with imports stands alone.
            exec(compile(one, page, "exec"), {} if one.startswith("import torch") else names)
    finally:
        er.release(model)
        er.release(names["model"])
