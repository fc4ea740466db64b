"""`elbowroom demo`: a training on real data, plain and through elbowroom; a table and a page."""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

import elbowroom as er
from elbowroom.cli.mistakes import check_writable, errors_console, says_mistakes, tell_path
from elbowroom.demo.compare import Comparison, Saving, compare, try_out
from elbowroom.demo.compare import Progress as StageProgress
from elbowroom.demo.page import first_line, first_page, page
from elbowroom.demo.tasks import Task, task
from elbowroom.report import table, write

DEFAULT_STEPS = {"resnet18": 60, "unet": 150, "gpt": 120}  # under three minutes on two cores


class DemoModel(StrEnum):
    """The networks of the demo."""

    resnet18 = "resnet18"
    gpt = "gpt"
    unet = "unet"


Steps = Annotated[int | None, typer.Option(help="Training steps of each run.", min=1)]
Width = Annotated[int | None, typer.Option(help="Channels of the network. Fewer are faster.")]
Size = Annotated[int | None, typer.Option(help="Examples in a batch.")]
Codec = Annotated[
    str,
    typer.Option(help='The id of a codec (see "elbowroom codecs"), or "exact": no bit changes.'),
]
Bits = Annotated[
    int | None, typer.Option(help="Bits per element, for codecs that have this setting.")
]
Data = Annotated[
    Path | None, typer.Option(help="Folder with the IDX files of the full Fashion-MNIST.")
]
AsText = Annotated[bool, typer.Option("--text", help="Train the GPT on the sources of Python.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print only JSON on stdout.")]
Out = Annotated[Path, typer.Option(help="Write the HTML page to this file.")]


@says_mistakes
def demo(
    model: Annotated[DemoModel, typer.Option(help="The network to train.")] = DemoModel.resnet18,
    steps: Steps = None,
    width: Width = None,
    batch: Size = None,
    codec: Codec = "dither",
    bits: Bits = None,
    data: Data = None,
    text: AsText = False,
    as_json: AsJson = False,
    out: Out = Path("elbowroom-demo.html"),
) -> None:
    """Train a small network twice, plainly and through elbowroom, and compare.

    Before the trainings begin, a page with the memory of one step is written.
    """
    # Kineto announces each profile on stderr, in the middle of the progress bar; 99 is above all
    # its levels.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    check_writable(out, "--out")
    name = "gpt" if text else model.value
    if text and data is not None:
        raise ValueError("--data names a folder of images and --text trains on text; choose one")
    saving, recipe = saving_for(codec, bits)
    chosen = task(name, width=width, batch=batch, folder=data)
    glance = try_out(chosen, saving)
    write(first_page(glance, {**_settings(chosen), "saving": recipe}), out)
    errors_console().print(
        f"{first_line(glance)} Picture: {out}. Now the network trains twice, to compare accuracies",
        soft_wrap=True,
        highlight=False,
        markup=False,
    )
    with _progress() as tell:
        result = compare(chosen, saving, steps=steps or DEFAULT_STEPS[name], on_progress=tell)
    trained = {"steps": f"{result.steps}, seed {result.seed}", "saving": recipe}
    report = page(result, _settings(chosen) | trained)
    if as_json:
        typer.echo(json.dumps(_as_json(result, recipe, dict(report.versions), out), indent=2))
    else:
        Console().print(table(report))
        Console().print(report.lead)
    write(report, out)
    tell_path("Memory curves and settings:", out)


def saving_for(codec: str, bits: int | None) -> tuple[Saving, str]:
    """Returns a function that makes the context around forward, and its source text.

    Raises UnknownCodec.
    """
    fields: dict[str, Any] = {"levels": 6} if codec == "dither" else {}
    if bits is not None:
        fields = {"bits": bits}
    er.saving(codec, **fields)  # an unknown id or field is said now, not after a training
    shown = "".join(f", {name}={value}" for name, value in fields.items())
    return lambda: er.saving(codec, **fields), f'er.saving("{codec}"{shown})'


def _settings(chosen: Task) -> dict[str, str]:
    return {
        "model": f"{chosen.name}, width {chosen.width}",
        "data": chosen.origin,
        "batch": str(chosen.batch),
    }


def _as_json(
    result: Comparison, recipe: str, versions: dict[str, str], out: Path
) -> dict[str, Any]:
    chosen = result.task
    return {
        **result.as_dict(),
        "width": chosen.width,
        "batch": chosen.batch,
        "saving": recipe,
        "versions": versions,
        "page": str(out),
    }


@contextmanager
def _progress() -> Iterator[Callable[[StageProgress], None]]:
    """Shows a live bar for each stage on stderr or, without a terminal, a line for each quarter."""
    if not errors_console().is_terminal:
        yield _tell_lines
        return
    columns = (
        TextColumn("{task.description:<10}"),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=errors_console()) as bars:
        known: dict[str, Any] = {}

        def tell(step: StageProgress) -> None:
            if step.stage not in known:
                known[step.stage] = bars.add_task(step.stage, total=step.total, note="")
            bars.update(known[step.stage], completed=step.done, note=step.note)

        yield tell


def _tell_lines(step: StageProgress) -> None:
    """Prints a line for the first step, which shows that it runs, and for each quarter."""
    quarters = [4 * done // step.total for done in (step.done - 1, step.done)]
    if step.done == 1 or quarters[0] < quarters[1]:
        typer.echo(f"{step.stage}: {step.done}/{step.total}  {step.note}".rstrip(), err=True)
