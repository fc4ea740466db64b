"""Which functions of elbowroom one saved tensor enters: what `docs/follow-one-tensor.md` shows.

    python tests/following.py            prints the totals
    python tests/following.py --write    writes the tables of the page again

The tensor is the output of a GELU, which the linear layer behind it saves. Python is traced while
that layer is called, and again in backward from the gradient of the layer's output to the gradient
of the tensor. What PyTorch and compiled kernels do is not traced.
"""

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import elbowroom as er
from elbowroom.errors import BudgetTooSmall
from elbowroom.plan.make import plain_peak
from elbowroom.plan.plan import Plan
from elbowroom.runtime.replay.saving_context import forget_all

PAGE = Path(__file__).parents[1] / "docs" / "follow-one-tensor.md"
PACKAGE = os.path.dirname(er.__file__) + os.sep
HEAD = "| file | what it does | functions, by their first call | lines |\n|---|---|---|--:|"

PURPOSE = {
    "codecs/_checks.py": "checks a codec's settings",
    "codecs/base.py": "checks the tensor, encodes it, counts bytes, decodes",
    "codecs/compact.py": "writes and reads a code in one buffer",
    "codecs/dither.py": "the codec: chooses buffers, calls the kernel",
    "codecs/facts.py": "known properties of a tensor that a codec may use",
    "fitting/forward.py": "handles a saved tensor according to the phase of the fit",
    "kernels/layout.py": "computes the sizes of the code's buffers",
    "kernels/numba/affine.py": "prepares an affine map for a CPU kernel",
    "kernels/numba/dither.py": "launches the CPU kernel",
    "kernels/numba/launch.py": "converts tensors to arrays, and chooses serial or parallel loops",
    "kernels/ops.py": "chooses the backend",
    "kernels/outputs.py": "allocates what an op returns",
    "plan/precision_floor.py": "finds the fewest levels that the formula of the op allows",
    "plan/plan.py": "returns the plan's action for this site",
    "plan/policy.py": "returns the policy's action for this site",
    "plan/site.py": "describes the site: name, needs and rows",
    "runtime/arena.py": "provides memory for a restored tensor",
    "runtime/attach.py": "checks whether the module belongs to a fitted model",
    "runtime/calls.py": "hooks the call of a module",
    "runtime/checkpoints.py": "checks whether a checkpoint of the user is open",
    "runtime/compiler.py": "checks whether torch.compile is tracing",
    "runtime/consumers.py": "knows which op is running, and what it reads",
    "runtime/context.py": "holds the settings and seeds of the open context",
    "runtime/direct/__init__.py": "checks whether a node of elbowroom replaces the op",
    "runtime/handles/encode.py": "holds the code",
    "runtime/hooks.py": "contains the pack and unpack hooks",
    "runtime/ledger.py": "counts the bytes held",
    "runtime/observer.py": "knows the observers of each op",
    "runtime/modules.py": "knows which module is running",
    "runtime/producers/__init__.py": "knows which op computed the tensor",
    "runtime/producers/activations.py": "rebuilds the result of the op",
    "runtime/producers/products.py": "rebuilds the result of a linear layer",
    "runtime/handles/rebuild.py": "holds a recipe, and rebuilds the tensor with it",
    "runtime/replay/compiled.py": "compares the op with the script, and stores what it saves",
    "runtime/replay/replay.py": "runs the op at its place in the script",
    "runtime/replay/held.py": "holds the tensor as a tuple, and rebuilds it",
    "runtime/replay/following.py": "counts the stored bytes in a step that follows a script",
    "runtime/replay/tracer.py": "records the op and its saved tensor in the script",
    "runtime/replay/script.py": "describes what is done with this tensor",
    "runtime/serving.py": "asks the policy, and performs its action, now or later",
    "runtime/sites.py": "finds what the op needs, and the facts by which a policy decides",
    "runtime/slot.py": "stores one storage for all of its readers",
    "runtime/sources.py": "finds what the op could be recomputed from",
    "runtime/storage.py": "identifies the storage, whether it may be changed, and who saved it",
}


class Entered(NamedTuple):
    """What was entered in one file: names of functions, and how many of their lines ran."""

    functions: tuple[str, ...]
    lines: int


Way = Mapping[str, Entered]  # by file, in the order of the first call


class Tracer:
    """Traces this thread between `start` and `stop`, which may be called several times."""

    def __init__(self) -> None:
        self._functions: dict[str, dict[str, None]] = {}
        self._lines: set[tuple[str, int]] = set()
        self._before: Any = None

    def start(self) -> None:
        self._before = sys.gettrace()
        sys.settrace(self._called)

    def stop(self) -> None:
        sys.settrace(self._before)

    def way(self) -> Way:
        """Returns what was entered, by file."""
        ran = [file for file, _ in self._lines]
        return {
            file: Entered(tuple(functions), ran.count(file))
            for file, functions in self._functions.items()
        }

    def _called(self, frame: FrameType, event: str, _: object) -> Any:
        code = frame.f_code
        if not code.co_filename.startswith(PACKAGE):
            return None
        file = code.co_filename.removeprefix(PACKAGE).replace(os.sep, "/")
        # Comprehensions are functions of their own in some versions of Python only.
        name = code.co_qualname.split(".<locals>.<")[0]
        self._functions.setdefault(file, {})[name] = None

        def ran(frame: FrameType, event: str, _: object) -> Any:
            if event == "line":
                self._lines.add((file, frame.f_lineno))
            return ran

        return ran


class Followed(nn.Module):
    """Linear, GELU and linear; the second linear's part of a step is traced."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)
        self.tracer = Tracer()

    def forward(self, x: Tensor) -> Tensor:
        tracer = self.tracer
        h = F.gelu(self.up(x))
        h.register_hook(lambda _: tracer.stop())
        tracer.start()
        y: Tensor = self.down(h)
        tracer.stop()
        y.register_hook(lambda _: tracer.start())
        return y


class Net(nn.Module):
    """The followed layers, and four more blocks, so that the peak is at the end of forward."""

    def __init__(self) -> None:
        super().__init__()
        self.followed = Followed()
        blocks = [(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4)]
        self.rest = nn.Sequential(*(layer for block in blocks for layer in block))

    def forward(self, x: Tensor) -> Tensor:
        return self.rest(self.followed(x))  # type: ignore[no-any-return]


def by_hand(*policy: str, **settings: Any) -> tuple[Way, Way]:
    """The ways under `er.saving`: in a step that is examined, and in the second replay."""
    torch.manual_seed(0)
    net, x = Net(), torch.randn(512, 64)
    found = []
    for number in range(5):  # the first replay makes what a script is followed by
        if number == 2:  # what is done once in a process has been done
            forget_all()
        net.followed.tracer = Tracer()
        with er.saving(*policy, min_nbytes=0, **settings):
            loss = net(x).square().mean()
        loss.backward()
        found.append(net.followed.tracer.way())
    return found[2], found[4]


def fitted() -> tuple[Way, Way]:
    """The ways under `er.fit`: in the second step, which learns, and in the sixth, a replay."""
    torch.manual_seed(0)
    net, x = Net(), torch.randn(512, 64)

    def step() -> Way:
        net.followed.tracer = Tracer()
        net.zero_grad(set_to_none=False)
        net(x).square().mean().backward()
        return net.followed.tracer.way()

    step()  # gradients exist, and are zeroed in place from here on
    plan = _plan(step)
    er.fit(net, budget=plan.peak, plan=plan, exact=True, min_nbytes=0)
    try:
        ways = [step() for _ in range(6)]
    finally:
        er.release(net)
    return ways[1], ways[5]


def _plan(step: Callable[[], object]) -> Plan:
    """The mildest exact plan that makes the followed tensor again."""
    profile = er.measure(step, min_nbytes=0)
    room = plain_peak(profile) - profile.static
    for percent in range(95, 50, -5):
        budget = profile.static + percent * room // 100
        try:
            plan = er.plan(profile, budget=budget, exact=True, recompute=False)
        except BudgetTooSmall:
            break
        if any(line.module == "followed.down" and line.action == "rebuild" for line in plan.lines):
            return plan
    raise AssertionError("no exact plan makes the followed tensor again")


def ways() -> dict[str, Way]:
    """All ways that the page shows, by their headings, in one thread: more take another way."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        exact, exact_again = by_hand()
        coded, coded_again = by_hand("dither", levels=16, rebuild=False)
        learning, replay = fitted()
    finally:
        torch.set_num_threads(threads)
    return {
        "`er.saving()`, the first step: rebuilt": exact,
        "`er.saving()`, later steps: rebuilt": exact_again,
        '`er.saving("dither", levels=16, rebuild=False)`, the first step: encoded': coded,
        '`er.saving("dither", levels=16, rebuild=False)`, later steps: encoded': coded_again,
        "`er.fit`, a step that learns: rebuilt": learning,
        "`er.fit`, a settled step: rebuilt": replay,
    }


def total(way: Way) -> tuple[int, int, int]:
    """Files, functions and lines of a way."""
    entered = way.values()
    return len(way), sum(len(e.functions) for e in entered), sum(e.lines for e in entered)


def table(way: Way) -> str:
    """The rows of a way, as Markdown."""
    rows = [
        f"| `{file}` | {PURPOSE.get(file, '')} | {', '.join(f'`{name}`' for name in functions)} "
        f"| {lines} |"
        for file, (functions, lines) in way.items()
    ]
    return "\n".join([HEAD, *rows])


def section(heading: str, way: Way) -> str:
    files, functions, lines = total(way)
    said = f"{files} files, {functions} functions, {lines} lines."
    return f"## {heading}\n\n{said}\n\n{table(way)}\n"


def read(page: str) -> dict[str, Way]:
    """The ways that the page shows."""
    found: dict[str, Way] = {}
    for part in page.split("\n## ")[1:]:
        heading, _, body = part.partition("\n")
        rows = [line.split("|") for line in body.splitlines() if line.startswith("| `")]
        found[heading] = {
            file.strip(" `"): Entered(
                tuple(name.strip(" `") for name in functions.split(",")), int(lines)
            )
            for _, file, _, functions, lines, _ in rows
        }
    return found


def write() -> None:
    """Writes the tables of the page again, and leaves its opening as it is."""
    opening = PAGE.read_text().split("\n## ")[0].rstrip("\n")
    sections = [section(heading, way) for heading, way in ways().items()]
    PAGE.write_text("\n\n".join([opening, *(part.rstrip("\n") for part in sections)]) + "\n")


if __name__ == "__main__":
    if "--write" in sys.argv:
        write()
    else:
        for heading, way in ways().items():
            sys.stdout.write(f"{heading}: {total(way)} files, functions, lines\n")
