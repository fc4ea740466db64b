"""How every picture is opened and saved. Needs matplotlib (benchmarks/requirements.txt)."""

from pathlib import Path
from typing import Any

from _common import INSTALL, tell


def pyplot() -> Any | None:
    """matplotlib's, without a screen; None, and a line on stderr, if it is not installed."""
    try:
        import matplotlib
    except ImportError:
        tell(f"matplotlib is not installed, so there is no picture: {INSTALL}")
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def save(figure: Any, path: Path) -> Path:
    """Write a figure as PNG in few bytes, and close it."""
    from matplotlib import pyplot
    from PIL import Image  # comes with matplotlib

    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
    pyplot.close(figure)
    Image.open(path).convert("RGB").quantize(128).save(path, optimize=True)  # a third of the bytes
    return path
