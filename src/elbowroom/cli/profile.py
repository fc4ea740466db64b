"""`elbowroom profile`: where the memory of a script's training step goes."""

import shlex
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from torch import nn

from elbowroom.cli.mistakes import check_writable, says_mistakes, tell_path
from elbowroom.cli.script import (
    Arguments,
    IsModule,
    NoScript,
    Script,
    check_script,
    run_script,
    show_traceback,
)
from elbowroom.errors import DataError, PlanError
from elbowroom.files import write_text
from elbowroom.plan.profile import Profile
from elbowroom.report import profile_table, render_profile, step_page
from elbowroom.report.step import plain
from elbowroom.runtime.attach import attach, detach
from elbowroom.tools import Discovery, Profiling, Unseen
from elbowroom.units import show_nbytes

Out = Annotated[Path, typer.Option(help="Write the profile to this file, as JSON.")]
Html = Annotated[
    Path | None, typer.Option(help="Write the page to this file; by default beside --out.")
]


@says_mistakes
def profile(
    script: Script,
    arguments: Arguments = None,
    module: IsModule = False,
    out: Out = Path("profile.json"),
    html: Html = None,
) -> None:
    """Run a script until one of its training steps is recorded, and show where its memory goes.

    The second step is recorded. At the third one, the script is ended by a SystemExit that is
    raised in it. With gradient accumulation, the recorded step is the last forward before the
    optimizer's second step. The command writes a profile, which "elbowroom plan" reads, and a page
    in one file.

    Write options of elbowroom before the script; everything after it belongs to the script. With
    -m, the script is a module, as in "elbowroom profile -m package.train".

    Exit code: 0 if a step was recorded; the script's own if it ended with an error before; 2 for a
    mistake that one line explains; 130 if stopped.
    """
    if html is None:
        html = out.with_suffix(".html")
        if html == out:
            raise DataError(
                f"--out {out} is also the file of the page; name a .json file, or give --html"
            )
    check_script(script, is_module=module)
    read = None if module else script
    check_writable(out, "--out", read)
    check_writable(html, "--html", read, out)
    running = _ProfiledRun()
    code = running.of(script, arguments or [], is_module=module)
    if running.profile is None:
        if code:
            raise typer.Exit(code)
        raise PlanError(running.why_none)
    _show(running.profile, running.model, running.remark, out, html)


def _show(found: Profile, model: str, remark: str, out: Path, html: Path) -> None:
    found.save(out)
    write_text(render_profile(step_page(found, model, remark)), html)
    Console().print(profile_table(found))
    Console().print(
        f"{model}: peak {show_nbytes(plain(found).peak)}, of which {show_nbytes(found.static)} is "
        f"held before the step; {show_nbytes(found.saved_nbytes)} saved for backward in "
        f"{len(found.storages)} tensors. {remark}",
        soft_wrap=True,
        markup=False,
    )
    tell_path("Page:", html)
    tell_path("What would a smaller one cost?", f"elbowroom plan {shlex.quote(str(out))} --sweep")


class _Enough(SystemExit):
    """Raised to end the script after a step was recorded."""


class _ProfiledRun:
    """One run of a script: the first model that was found in it, and one step of it."""

    def __init__(self) -> None:
        self.model = ""
        self.others: list[str] = []
        self._profiling: Profiling | None = None
        self._fitted: nn.Module | None = None
        self._discovery = Discovery(self._found)

    @property
    def profile(self) -> Profile | None:
        return None if self._profiling is None else self._profiling.profile

    @property
    def remark(self) -> str:
        """Names the other models that were trained."""
        if not self.others:
            return ""
        return (
            f"The script trains {', '.join(self.others)} as well: that is in the level, but what "
            "it saves is not told apart."
        )

    @property
    def why_none(self) -> str:
        """Reason why there is no profile."""
        if self._profiling is None:
            return (
                "the script ended, and no model was trained: no module that holds an optimizer's "
                "parameters was called in training mode with gradients on, on the main thread"
            )
        return (
            f"no step was written down (calls of {self.model} with gradients on: "
            f"{self._profiling.steps}). The second call, or a later one, must be followed by its "
            "backward before the next; let the script run at least two such steps"
        )

    def of(self, script: Path, arguments: list[str], *, is_module: bool) -> int:
        """Runs the script and returns its exit code."""
        try:
            with self._discovery:
                return run_script(script, arguments, is_module=is_module)
        except (Unseen, NoScript):
            raise
        except Exception as error:
            show_traceback(error)
            return 1
        finally:
            if self._profiling is not None:
                self._profiling.finish()
            self._release()

    def _found(self, model: nn.Module) -> None:
        name = type(model).__name__
        if self._profiling is not None:
            if name not in self.others:
                self.others.append(name)
            return
        optimizers = self._discovery.optimizers_of(model)
        self.model, self._fitted = name, model
        self._profiling = Profiling(model, optimizers, self._done)
        attach(model, self._profiling)

    def _done(self) -> None:
        self._release()  # if the script goes on all the same, then plainly
        raise _Enough(0)

    def _release(self) -> None:
        if self._fitted is not None:
            detach(self._fitted)
            self._fitted = None
        if self._profiling is not None:
            self._profiling.close()
