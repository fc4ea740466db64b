"""What a settled step costs in Python: microseconds a call and a saved tensor, above plain.

    ./scripts/bench steady_state [--quick] [--only "transformer, fit"]

Three networks so small that their arithmetic vanishes: 200 x (Linear(32, 32), ReLU) on 64 rows;
60 x (3x3 convolution of 8 channels, BatchNorm, ReLU) on 4 maps of 8 x 8; 12 transformer layers of
width 64 on 4 x 16 tokens. Gradients are zeroed in place, so that the peak is that of what is saved.

    plain, again     plain once more: what it shows above plain is the noise of all rows
    hooks            torch's own saved_tensors_hooks with functions that do nothing
    function mode    torch's own TorchFunctionMode that does nothing
    saving           er.saving by hand, from its second step on
    fit, idle        er.fit with a budget of 1 GiB, which needs nothing done
    fit, exact half  er.fit with a plan whose exact actions act on about half of the storages
    fit, lossy half  the same with a plan that has lossy codes

Nothing is too small to be acted on (`min_nbytes=0`). The plans of the last two are those of
`er.plan`, without recomputation, at the share of the plain peak that comes nearest to half; fit
begins with them. A row says so if no such plan exists.

    us a call     CPU time of this thread above plain, over the calls of torch functions in forward
    us a pack     the same, forward and backward together, over the tensors that autograd saves
    own kernels   of it, the operations that plain autograd does not run, less those that only it
                  runs: recorded below the dispatcher in one step, then each timed alone on the
                  same tensors. Views are no kernels
    beyond        us a pack less own kernels: what the looking and the bookkeeping cost
    functions     Python functions entered in a step above plain, over the calls
    held          bytes held as backward begins, as a share of plain's

Each time is the minimum of many steps. Modes take turns in blocks, each after a block of plain
steps, and a mode is compared with the plain steps of its own blocks alone: a minimum of more steps
is lower. Where nothing is to do, what a fitted model adds to a step is less than that noise. So it
is timed alone, too: the settled model's own forward is left out, and so is that of a plain one; the
difference, over the calls that the forward would make, is compared with the goal. A fitted model is
released after its block. It is taken to have settled when three steps in a row, from the ninth on,
enter the same number of Python functions within 1 %, which is checked again at the end. The goals
are those of a settled step that looks at nothing.

The optimizer rows are microseconds a parameter of one `step()`: the 400 parameters of the linear
stack, half of them 32 x 32, half 32.
"""

import gc
import sys
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from _common import arguments, facts, finish, out_path, show, target, tell
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import elbowroom as er
from elbowroom.errors import BudgetTooSmall
from elbowroom.measure.peak import mark, memory_curve
from elbowroom.plan.make import plain_peak
from elbowroom.plan.plan import Plan

NAME = "steady-state"
IDLE_BUDGET = "1 GiB"
SHARES = tuple(share / 20 for share in range(19, 5, -1))  # of the plain peak: 0.95 to 0.3
MAX_WARM_UP, MIN_WARM_UP = 40, 8
NEW_CONTEXT = Callable[[], AbstractContextManager[Any]]


class Layer(nn.Module):
    """One pre-norm transformer layer with causal attention."""

    def __init__(self, width: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, tokens, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def linear_stack(depth: int = 200) -> tuple[nn.Module, Tensor]:
    layers = [part for _ in range(depth) for part in (nn.Linear(32, 32), nn.ReLU())]
    return nn.Sequential(*layers), torch.randn(64, 32)


def conv_stack(depth: int = 60) -> tuple[nn.Module, Tensor]:
    def block() -> tuple[nn.Module, ...]:
        return nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU()

    return nn.Sequential(*(part for _ in range(depth) for part in block())), torch.randn(4, 8, 8, 8)


def transformer(depth: int = 12) -> tuple[nn.Module, Tensor]:
    return nn.Sequential(*(Layer() for _ in range(depth))), torch.randn(4, 16, 64)


NETWORKS: dict[str, Callable[..., tuple[nn.Module, Tensor]]] = {
    "linear stack": linear_stack,
    "conv stack": conv_stack,
    "transformer": transformer,
}
OPTIMIZERS = "optimizers"


class Clocked(NamedTuple):
    """Seconds of this thread's CPU time in forward and in backward."""

    forward_s: float
    backward_s: float


class Step:
    """One training step of a network; forward may run inside a context."""

    def __init__(self, net: nn.Module, x: Tensor, new_context: NEW_CONTEXT = nullcontext) -> None:
        self.net, self.x, self.new_context = net, x, new_context
        self.entered: Any = None  # the context of the last step

    def __call__(self) -> Clocked:
        self.net.zero_grad(set_to_none=False)
        begun = time.thread_time()
        with self.new_context() as self.entered:
            loss = self.net(self.x).square().mean()
        between = time.thread_time()
        mark("backward")
        resumed = time.thread_time()
        loss.backward()
        return Clocked(between - begun, time.thread_time() - resumed)

    def held_nbytes(self) -> int | None:
        """Bytes above the level before the step as backward begins; None: it cannot be measured."""
        try:
            curve = memory_curve(self)
        except RuntimeError:  # the step runs a profiler of its own
            return None
        moment = dict(curve.marks)["backward"]
        before = [n for at, n in zip(curve.times_s, curve.nbytes, strict=True) if at <= moment]
        return before[-1]

    def functions(self) -> int:
        """How many Python functions one step enters."""
        entered = 0

        def count(frame: FrameType, event: str, arg: object) -> None:
            nonlocal entered
            entered += event == "call"

        sys.setprofile(count)
        try:
            self()
        finally:
            sys.setprofile(None)
        return entered


@dataclass
class Mode:
    """A way to run the steps of a network, and what its steps took.

    open     makes its step, and leaves nothing behind once it is closed
    acts     "12 of 24" storages, once known; "" for a mode that never acts
    planned  the share of its bytes that its plan holds, estimated
    why_not  the reason for which it did not run
    beside   as many plain steps, of the same blocks
    alone    steps from which the network's forward is left out, and such plain ones; where nothing
             is to do
    """

    name: str
    open: Callable[[], AbstractContextManager[Step]]
    settles: bool = False
    goal: "Goal | None" = None
    acts: str = ""
    planned: float | None = None
    why_not: str = ""
    clocked: list[Clocked] = field(default_factory=list)
    beside: list[Clocked] = field(default_factory=list)
    alone: tuple[list[Clocked], list[Clocked]] = field(default_factory=lambda: ([], []))
    functions: int = 0
    held: int | None = None
    kernels_s: float = 0.0
    notes: list[str] = field(default_factory=list)


def _best(clocked: list[Clocked]) -> Clocked:
    """The least seconds of forward and of backward, which may be those of two steps."""
    return Clocked(*map(min, zip(*clocked, strict=True)))


class Goal(NamedTuple):
    """At most so many microseconds of one of a row's figures."""

    most: float
    figure: str  # a key of the row
    what: str


GOALS = {
    "idle": Goal(0.3, "us_call_alone", "a call, forward and backward, timed alone"),
    "exact": Goal(6, "us_pack_beyond", "a packed tensor beyond the actions' own kernels"),
    "lossy": Goal(10, "us_pack_beyond", "a packed tensor beyond the actions' own kernels"),
    "saving": Goal(12, "us_call_beyond", "a call beyond the actions' own kernels"),
    "optimizer": Goal(10, "us_parameter", "a small parameter"),
}


class Network:
    """A network, what is counted in its plain step, and its modes."""

    def __init__(self, name: str, net: nn.Module, x: Tensor) -> None:
        self.name, self.net, self.x = name, net, x
        plain = self.step()
        for _ in range(3):
            plain()
        self.calls, self.packs = _calls(self), _packs(self)
        self.plain = Mode("plain", self._by_context(nullcontext))
        self.modes = [
            Mode("plain, again", self._by_context(nullcontext)),
            Mode("hooks", self._by_context(_idle_hooks)),
            Mode("function mode", self._by_context(Passing)),
            self._saving("saving, exact", lambda: er.saving("exact", min_nbytes=0)),
            self._saving("saving, dither", lambda: er.saving("dither", levels=4, min_nbytes=0)),
            Mode("fit, idle", self._by_fit(IDLE_BUDGET, None), True, GOALS["idle"]),
            self._half("fit, exact half", exact=True),
            self._half("fit, lossy half", exact=False),
        ]

    def step(self, new_context: NEW_CONTEXT = nullcontext) -> Step:
        return Step(deepcopy(self.net), self.x, new_context)

    def _by_context(self, new_context: NEW_CONTEXT) -> Callable[[], AbstractContextManager[Step]]:
        return lambda: nullcontext(self.step(new_context))

    def _saving(self, name: str, new_context: NEW_CONTEXT) -> Mode:
        return Mode(name, self._by_context(new_context), goal=GOALS["saving"])

    def _by_fit(
        self, budget: int | str, plan: Plan | None
    ) -> Callable[[], AbstractContextManager[Step]]:
        @contextmanager
        def fitted() -> Iterator[Step]:
            step = self.step()
            step()  # gradients exist, and are zeroed in place from here on
            exact = None if plan is None else plan.exact or None
            er.fit(step.net, budget=budget, plan=plan, exact=exact, min_nbytes=0)
            try:
                yield step
            finally:
                er.release(step.net)

        return fitted

    def _half(self, name: str, *, exact: bool) -> Mode:
        goal = GOALS["exact" if exact else "lossy"]
        profile = er.measure(self.step(), min_nbytes=0)
        plain_nbytes = plain_peak(profile)
        found: list[tuple[float, int, Plan]] = []
        for share in SHARES:
            budget = profile.static + int(share * (plain_nbytes - profile.static))
            try:
                plan = er.plan(profile, budget=budget, exact=exact or None, recompute=False)
            except BudgetTooSmall:
                continue
            if plan.exact == exact and (acting := _acting(plan)):
                found.append((abs(acting / len(plan.lines) - 0.5), budget, plan))
        if not found:
            why = f"no plan of {'exact actions' if exact else 'lossy codes'} meets any budget"
            return Mode(name, self._by_fit(0, None), goal=goal, why_not=why)
        _, budget, plan = min(found, key=lambda one: one[:2])
        acts = f"{_acting(plan)} of {len(plan.lines)}"
        planned = plan.held_nbytes / sum(line.nbytes for line in plan.lines)
        return Mode(name, self._by_fit(max(budget, plan.peak), plan), True, goal, acts, planned)


def _acting(plan: Plan) -> int:
    return sum(line.action != "keep" for line in plan.lines)


def _idle_hooks() -> AbstractContextManager[Any]:
    return torch.autograd.graph.saved_tensors_hooks(_same, _same)


def _same(x: Tensor) -> Tensor:
    return x


def _calls(network: Network) -> int:
    """How many torch functions one forward calls."""
    count = 0

    class Counting(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            nonlocal count
            count += 1
            return func(*args, **(kwargs or {}))

    network.step(Counting)()
    return count


def _packs(network: Network) -> int:
    """How many tensors autograd saves in one step."""
    count = 0

    def pack(x: Tensor) -> Tensor:
        nonlocal count
        count += 1
        return x

    network.step(lambda: torch.autograd.graph.saved_tensors_hooks(pack, _same))()
    return count


class Passing(TorchFunctionMode):
    """Does nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Operations(TorchDispatchMode):
    """Records every operation that reaches the dispatcher, but for views, by name and shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.found: defaultdict[tuple[Any, ...], list[Callable[[], Any]]] = defaultdict(list)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not _is_view(func):
            key = (str(func), *map(_shape, args))
            self.found[key].append(lambda: func(*args, **kwargs))
        return func(*args, **kwargs)


def _is_view(func: Any) -> bool:
    infos = [result.alias_info for result in func._schema.returns]
    return any(info is not None and not info.is_write for info in infos)


def _shape(argument: Any) -> Any:
    if isinstance(argument, Tensor):
        return argument.dtype, tuple(argument.shape)
    return len(argument) if isinstance(argument, list | tuple) else None


def _recorded(step: Step) -> Operations:
    operations = Operations()
    with operations:
        step()
    return operations


def _kernels_s(of: Operations, plain: Operations, repetitions: int) -> float:
    """Seconds of the operations that only `of` has, less those that only `plain` has."""
    counts, plains = (Counter({k: len(v) for k, v in o.found.items()}) for o in (of, plain))

    def seconds(more: Counter[tuple[Any, ...]], calls: Operations) -> float:
        return sum(
            n * min(_seconds(call, repetitions) for call in calls.found[key][:4])
            for key, n in more.items()
        )

    with torch.no_grad():
        return seconds(counts - plains, of) - seconds(plains - counts, plain)


def _seconds(call: Callable[[], Any], repetitions: int) -> float:
    clocked = []
    for _ in range(3 * repetitions):
        begun = time.thread_time()
        call()
        clocked.append(time.thread_time() - begun)
    return min(clocked) - _CLOCK_S


def _clock_s() -> float:
    """What it takes to look at the clock, in seconds."""
    looks = [(time.thread_time(), time.thread_time()) for _ in range(1000)]
    return min(end - begin for begin, end in looks)


_CLOCK_S = _clock_s()


def _warm(mode: Mode, step: Step) -> None:
    """Steps until it has settled; of modes that do not settle, the first."""
    step()
    if not mode.settles:
        return
    for _ in range(MIN_WARM_UP - 1):
        step()
    last: list[int] = []
    for _ in range(MAX_WARM_UP - MIN_WARM_UP):
        last = [*last[-2:], step.functions()]
        if len(last) == 3 and _alike(*last):
            return
    mode.notes.append(f"did not settle in {MAX_WARM_UP} steps")


def _alike(*numbers: int) -> bool:
    return max(numbers) <= 1.01 * min(numbers)


def _block(network: Network, mode: Mode, steps: int, *, last: bool) -> None:
    """Some steps of plain, then some of one mode."""
    plain = network.step()
    plain()
    mode.beside += [plain() for _ in range(steps)]
    with mode.open() as step:
        _warm(mode, step)
        functions = step.functions()
        mode.clocked += [step() for _ in range(steps)]
        mode.functions = step.functions()
        if not _alike(functions, mode.functions):
            mode.notes.append("other work at the end than at the beginning")
        if mode.goal is GOALS["idle"]:
            for one, clocked in zip((step, plain), mode.alone, strict=True):
                with _left_out(one.net):
                    clocked += [one() for _ in range(10 * steps)]  # they are short
        if last:
            mode.held = step.held_nbytes()
            mode.kernels_s = _kernels_s(_recorded(step), _recorded(plain), steps)
            if mode.goal is GOALS["saving"]:
                mode.acts = _acted(step.entered)


@contextmanager
def _left_out(net: nn.Module) -> Iterator[None]:
    """Leaves a network's own forward out: what is around it is then seen alone."""
    factor = next(net.parameters()).detach().sum().requires_grad_()
    net.forward = lambda x: factor * x  # type: ignore[method-assign]
    try:
        yield
    finally:
        del net.forward


def _acted(saved: Any) -> str:
    rows = saved.ledger.rows
    done = sum(row.count for row in rows if row.after_nbytes < row.before_nbytes)
    return f"{done} of {sum(row.count for row in rows)}"


def _rows(network: Network, blocks: int, steps: int) -> list[dict[str, Any]]:
    running = [mode for mode in network.modes if not mode.why_not]
    gc.collect()  # of the networks before, whose tensors a budget would count
    for number in range(blocks):
        for mode in running:
            _block(network, mode, steps, last=number == blocks - 1)
    plain = network.step()
    plain()
    network.plain.held, network.plain.functions = plain.held_nbytes(), plain.functions()
    rows = [_row(network, mode) for mode in network.modes]
    for row in rows:
        tell(" | ".join(_shown(row)))
    return rows


def _row(network: Network, mode: Mode) -> dict[str, Any]:
    plain, calls, packs = network.plain, network.calls, network.packs
    row: dict[str, Any] = {
        "net": network.name,
        "mode": mode.name,
        "calls": calls,
        "packs": packs,
        "goal": mode.goal and mode.goal._asdict(),
    }
    if mode.why_not:
        return row | {"why_not": mode.why_not}
    least, plain_least = _best(mode.clocked), _best(mode.beside)
    forward_us = 1e6 * (least.forward_s - plain_least.forward_s)
    backward_us = 1e6 * (least.backward_s - plain_least.backward_s)
    both_us, kernels_us = forward_us + backward_us, 1e6 * mode.kernels_s
    held = None if mode.held is None or not plain.held else mode.held / plain.held
    alone = [sum(_best(clocked)) for clocked in mode.alone if clocked]
    if alone:
        row["us_call_alone"] = 1e6 * (alone[0] - alone[1]) / calls
    notes = list(dict.fromkeys(mode.notes))
    if mode.acts and (mode.acts.startswith("0 ") or (held is not None and held > 0.99)):
        notes.append("nothing was acted on")
    elif held is not None and mode.planned is not None and abs(held - mode.planned) > 0.1:
        notes.append(f"not as its plan says, which holds {100 * mode.planned:.0f} %")
    return row | {
        "forward_s": least.forward_s,
        "backward_s": least.backward_s,
        "plain_forward_s": plain_least.forward_s,
        "plain_backward_s": plain_least.backward_s,
        "steps": len(mode.clocked),
        "us_call_forward": forward_us / calls,
        "us_call_backward": backward_us / calls,
        "us_call": both_us / calls,
        "us_call_beyond": (both_us - kernels_us) / calls,
        "us_pack": both_us / packs,
        "us_pack_kernels": kernels_us / packs,
        "us_pack_beyond": (both_us - kernels_us) / packs,
        "functions": (mode.functions - plain.functions) / calls,
        "held": held,
        "acts": mode.acts,
        "planned": mode.planned,
        "notes": notes,
    }


def _optimizer_rows(steps: int, depth: int = 200) -> list[dict[str, Any]]:
    """Microseconds a parameter of one step of each optimizer, in turn."""
    net, x = linear_stack(depth)
    net(x).square().mean().backward()
    made = {
        "er.optim.AdamW, fp32": lambda p: er.optim.AdamW(p, state="fp32"),
        "er.optim.AdamW, int8": lambda p: er.optim.AdamW(p, state="int8"),
        "torch AdamW, foreach": lambda p: torch.optim.AdamW(p, foreach=True),
        "torch AdamW, fused": lambda p: torch.optim.AdamW(p, fused=True),
    }
    optimizers = {}
    for name, make in made.items():
        parameters = [nn.Parameter(p.detach().clone()) for p in net.parameters()]
        for mine, p in zip(parameters, net.parameters(), strict=True):
            mine.grad = p.grad.clone()
        optimizers[name] = make(parameters)
    best = dict.fromkeys(made, float("inf"))
    for _ in range(2):
        for optimizer in optimizers.values():
            optimizer.step()
    for _ in range(steps):
        for name, optimizer in optimizers.items():
            begun = time.thread_time()
            optimizer.step()
            best[name] = min(best[name], time.thread_time() - begun)
    count = sum(1 for _ in net.parameters())
    return [
        {
            "net": OPTIMIZERS,
            "mode": name,
            "parameters": count,
            "us_parameter": 1e6 * seconds / count,
            "goal": GOALS["optimizer"]._asdict() if name.startswith("er.") else None,
            "notes": [],
        }
        for name, seconds in best.items()
    ]


HEAD = [
    "net",
    "mode",
    "us a call, forward",
    "backward",
    "us a pack",
    "own kernels",
    "beyond",
    "functions",
    "held",
    "acted on",
    "goal",
    "measured",
    "note",
]


def _shown(row: dict[str, Any]) -> list[str]:
    def number(key: str) -> str:
        digits = 2 if key == "us_call_alone" else 1
        return f"{round(row[key], digits) + 0.0:.{digits}f}" if key in row else ""  # never -0.0

    goal = row["goal"]
    held = row.get("held")
    return [
        row["net"],
        row["mode"],
        number("us_call_forward"),
        number("us_call_backward"),
        number("us_pack"),
        number("us_pack_kernels"),
        number("us_pack_beyond"),
        number("functions"),
        "" if held is None else f"{100 * held:.0f} %",
        row.get("acts", ""),
        "" if goal is None else f"<= {goal['most']:g} us {goal['what'].split(',')[0]}",
        number("us_parameter") if goal is None else number(goal["figure"]),
        row.get("why_not") or "; ".join(row["notes"]),
    ]


def _targets(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One line a goal, met if all of its rows meet it and every fitted model followed its plan."""
    lines = []
    for goal in GOALS.values():
        mine = [row for row in rows if row["goal"] == goal._asdict() and not row.get("why_not")]
        if not mine:
            continue
        modes = sorted({row["mode"] for row in mine})
        figures = [f"{row[goal.figure]:.2g} ({row['net']}, {row['mode']})" for row in mine]
        flawed = [row for row in mine if row["notes"] and row["mode"].startswith("fit")]
        said = "".join(f"; {row['mode']} on {row['net']}: {row['notes'][0]}" for row in flawed)
        met = max(row[goal.figure] for row in mine) <= goal.most and not flawed
        text = f"{', '.join(modes)}: <= {goal.most:g} us {goal.what}"
        lines.append(target(text, ", ".join(figures) + said, met))
    return lines


def main() -> None:
    parser = arguments(__doc__, threads=1)
    parser.add_argument("--blocks", type=int, default=5, help="turns of each mode (5)")
    parser.add_argument("--steps", type=int, default=40, help="steps in a turn (40)")
    parser.add_argument(
        "--only",
        default="",
        help='rows that begin so, as "net, mode"; without --out they are only shown',
    )
    options = parser.parse_args()
    if options.quick:
        options.blocks, options.steps = 1, 2
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    known = facts()
    depth = {"depth": 2} if options.quick else {}
    # A row says it of each mode that changed nothing.
    warnings.filterwarnings("ignore", "this saving context changed nothing", UserWarning)
    rows: list[dict[str, Any]] = []
    for name, make in NETWORKS.items():
        if _are_alike(name, options.only):
            network = Network(name, *make(**depth))
            network.modes = [
                mode for mode in network.modes if f"{name}, {mode.name}".startswith(options.only)
            ]
            rows += _rows(network, options.blocks, options.steps)
    if _are_alike(OPTIMIZERS, options.only):
        rows += _optimizer_rows(options.blocks * options.steps, **depth)
    result = {
        "name": NAME,
        "claim": "what a settled step adds in Python, in microseconds of CPU time, above plain",
        **known,
        "n": options.blocks * options.steps,
        "settings": {"blocks": options.blocks, "steps": options.steps, "idle": IDLE_BUDGET},
        "rows": rows,
        "table": {"head": HEAD, "rows": [_shown(row) for row in rows]},
        "targets": _targets(rows),
        "notes": [],
    }
    if options.only and not options.out:
        show(result)
    else:
        finish(result, out_path(options, NAME))


def _are_alike(one: str, other: str) -> bool:
    """Whether either of them begins with the other."""
    return one.startswith(other) or other.startswith(one)


if __name__ == "__main__":
    main()
