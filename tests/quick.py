"""Runs the quick form of a benchmark in this process, which has imported what it needs."""

from pathlib import Path
from types import ModuleType

import pytest
import torch


def quick(script: ModuleType, monkeypatch: pytest.MonkeyPatch, path: Path, *more: str) -> None:
    """Calls main() of the script with --quick, --out PATH and more arguments."""
    threads = torch.get_num_threads()
    monkeypatch.setattr("sys.argv", [script.__file__, "--quick", "--out", str(path), *more])
    try:
        script.main()
    finally:
        torch.set_num_threads(threads)
