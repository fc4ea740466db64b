"""What all tests share.

Tests marked `gpu` are skipped where there is no CUDA device. There, Triton's kernels run in its
interpreter, on CPU tensors: that must be chosen before anything imports them.
"""

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Which PyTorch was tested: a line of every run, of the quiet ones of CI, too.

    Those show no header (`pytest_report_header`).
    """
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no CUDA device"
    terminalreporter.write_line(f"torch {torch.__version__}, {device}")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture
def one_thread() -> Iterator[None]:
    """So that no bit depends on how work is divided; and small tensors are faster so."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh memory is filled with byte 0xFF, so that an output left partly unwritten cannot pass.

    That is NaN in all floats, -1 or 255 in integers.
    """
    for owner, name in (
        (torch, "empty"),
        (torch, "empty_like"),
        (torch, "empty_strided"),
        (torch.Tensor, "new_empty"),
    ):
        monkeypatch.setattr(owner, name, _poisoning(getattr(owner, name)))
    assert torch.empty(3).isnan().all()


def _poisoning(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def poisoned(*args: Any, **kwargs: Any) -> torch.Tensor:
        x = make(*args, **kwargs)
        if type(x) is torch.Tensor and not x.is_meta:
            x.untyped_storage().fill_(0xFF)
        return x

    return poisoned
