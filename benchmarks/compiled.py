"""Budgets inside torch.compile against torch.compile's own ways to save memory.

    ./scripts/bench compiled [--quick] [--nets gpt resnet18] [--arms plain "ours 0.5"] [--times 8]

Nets `gpt`, `resnet18` and `unet` are those of the demo; all whose names begin with `hf_` are of
transformers, which must be there, in small configurations that one thread of a CPU can compile and
run. None has dropout, so that all arms compute the same gradient. Backward ends with a gradient of
each weight: with few tokens for each of these, no plan takes a quarter of the peak (`--times`).


    eager                   no compiler, nothing saved less
    eager, er.saving        our eager engine: dither at 16 levels
    plain                   torch.compile
    budget 0.8 to 0.2       torch.compile with torch._functorch.config.activation_memory_budget
    fp8                     torch.compile with Inductor's activation_quantization_aten_pass: all
                            float32 values of 32 KiB or more that are saved become float8_e5m2
    ours 0.7 to 0.166       backend "elbowroom" with that share of plain's estimated peak, exact
    ours, codes             the same, exact=False: what is fastest, codes among it

    peak       MiB of one step (forward with the loss, backward, gradients), by the allocator
    predicted  MiB of that peak, said when the step was compiled
    gErr2      squared error of the gradient over its square, against plain, on one batch
    time       median ratio to plain over interleaved pairs; --processor: of the processor's seconds
    compile    seconds of the first step: tracing, planning, Inductor and the C++ compiler;
               --processor: of the processor, the C++ compiler's among them if that runs in one
               process (TORCHINDUCTOR_COMPILE_THREADS=1)

Each arm has a copy of the model; the batch is the same. Each arm compiles in an empty cache, so
that it pays for its own code, the C++ compiler's among it; only the headers are compiled before.
"""

import copy
import os
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch._dynamo
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
from _common import (
    arguments,
    facts,
    finish,
    mib,
    out_path,
    paired_dict,
    target,
    tell,
    times,
    write_json,
)
from torch import Tensor, nn
from torch._inductor.utils import fresh_cache
from torch.nn import functional as F

import elbowroom as er
from elbowroom.compiled import elbowroom
from elbowroom.compiled.partition import Decision, listening
from elbowroom.demo.models import GPT, ResNet18, UNet
from elbowroom.errors import BudgetTooSmall
from elbowroom.measure import paired

NAME = "compiled"
BUDGETS = (0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2)
SHARES = (0.7, 0.5, 0.4, 0.3, 0.25, 0.166)
GOALS = (  # name of a share, share, time over plain's, whether exact
    ("half", 0.5, 1.10, True),
    ("a quarter", 0.25, 1.12, False),
    ("a sixth", 1 / 6, 1.30, False),
)
FP8 = {  # of torch._inductor.config.post_grad_fusion_options; as given, bfloat16 of 100 MB or more
    "activation_quantization_aten_pass": {
        "allowed_dtypes": "torch.float32",
        "size_in_mb": 0.03125,
        "use_scaling": True,
        "exclude_primals": True,
    }
}
ARMS = (
    *("plain", "eager", "eager, er.saving"),
    *(f"budget {budget}" for budget in BUDGETS),
    "fp8",
    *(f"ours {share}{codes}" for codes in ("", ", codes") for share in SHARES),
)


class Loss(nn.Module):
    """A model with its loss, as one step compiles them."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.model(x).reshape(y.numel(), -1), y.flatten())


@dataclass
class Arm:
    """One way to run the step of a net."""

    name: str
    net: nn.Module
    call: Callable[..., Tensor]
    batch: tuple[Tensor, Tensor]
    codec: dict[str, Any] | None = None

    def step(self) -> None:
        self.net.zero_grad()
        with nullcontext() if self.codec is None else er.saving("dither", **self.codec):
            loss = self.call(*self.batch)
        loss.backward()

    def gradient(self) -> Tensor:
        self.step()
        return torch.cat([p.grad.flatten() for p in self.net.parameters() if p.grad is not None])


def main() -> None:
    parser = arguments(__doc__, threads=1)
    parser.add_argument("--nets", nargs="+", default=["gpt", "resnet18"], help="which nets (both)")
    parser.add_argument("--pairs", type=int, default=15, help="pairs of steps (15)")
    parser.add_argument(
        "--arms", nargs="+", choices=ARMS, help="names of the arms to run beside plain (all)"
    )
    parser.add_argument("--small", action="store_true", help="nets of a quarter of the size")
    parser.add_argument("--times", type=int, default=1, help="as large a batch (1)")
    parser.add_argument(
        "--processor", action="store_true", help="time by the processor's clock (busy machines)"
    )
    options = parser.parse_args()
    if options.quick:
        options.pairs, options.nets = 1, ["tiny"]
    torch.set_num_threads(options.threads)
    torch._dynamo.config.recompile_limit = 64  # each arm compiles the same code anew
    torch._dynamo.config.automatic_dynamic_shapes = False  # though each net has its own shapes
    inductor_config.fx_graph_cache = False
    functorch_config.enable_autograd_cache = False
    known, path = facts(), out_path(options, NAME)
    clock = "processor" if options.processor else "wall"
    rows: list[dict[str, Any]] = []
    for name in options.nets:
        torch.manual_seed(0)
        net, batch = _nets(small=options.small, times=options.times)[name]()
        for row in _rows(name, Loss(net), batch, options):
            rows.append(row)
            write_json(path, _result(rows, options.pairs, clock, known))
    finish(_result(rows, options.pairs, clock, known), path)


def _nets(
    *, small: bool, times: int
) -> dict[str, Callable[[], tuple[nn.Module, tuple[Tensor, Tensor]]]]:
    width, batch, depth = (128, 4, 3) if small else (256, 8, 6)
    batch *= times

    def tokens(n: int, length: int) -> tuple[Tensor, Tensor]:
        return torch.randint(0, 255, (n, length)), torch.randint(0, 255, (n, length))

    def images(n: int) -> tuple[Tensor, Tensor]:
        return torch.randn(n, 1, 28, 28), torch.randint(0, 10, (n,))

    def pictures(n: int) -> tuple[Tensor, Tensor]:
        return torch.randn(n, 3, 64, 64), torch.randint(0, 10, (n,))

    def masks(n: int) -> tuple[Tensor, Tensor]:
        return torch.randn(n, 1, 28, 28), torch.randint(0, 11, (n, 28, 28))

    return {
        "gpt": lambda: (GPT(width=width, depth=4, context=256, dropout=0.0), tokens(batch, 256)),
        "resnet18": lambda: (ResNet18(width // 8), images(8 * batch)),
        "unet": lambda: (_Segmented(UNet(width // 8)), masks(8 * batch)),
        "hf_gpt2": lambda: (_transformer("GPT2", depth), tokens(batch // 2, 256)),
        "hf_llama": lambda: (_transformer("Llama", depth), tokens(batch // 2, 256)),
        "hf_vit": lambda: (_vision_transformer(depth), pictures(2 * batch)),
        "hf_resnet18": lambda: (_resnet("basic", [2, 2, 2, 2]), pictures(2 * batch)),
        "hf_resnet50": lambda: (_resnet("bottleneck", [3, 4, 6, 3]), pictures(2 * batch)),
        "tiny": lambda: (GPT(width=32, depth=2, context=32, dropout=0.0), tokens(2, 32)),
    }


class _Logits(nn.Module):
    """A model of transformers as a function from its input to logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x).logits  # type: ignore[no-any-return]


class _Segmented(nn.Module):
    """The U-Net, with the classes of a pixel last."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x).movedim(1, -1)  # type: ignore[no-any-return]


def _transformer(family: str, depth: int) -> nn.Module:
    import transformers

    size = {"hidden_size": 256, "num_hidden_layers": depth, "num_attention_heads": 8}
    more: dict[str, Any] = {"intermediate_size": 688, "num_key_value_heads": 4}
    name = "LlamaForCausalLM"
    if family == "GPT2":
        size = {"n_embd": 256, "n_layer": depth, "n_head": 8}
        more = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        name = "GPT2LMHeadModel"
    config = getattr(transformers, f"{family}Config")(
        **size, **more, vocab_size=1024, use_cache=False, bos_token_id=0, eos_token_id=0
    )
    return _Logits(getattr(transformers, name)(config))


def _vision_transformer(depth: int) -> nn.Module:
    import transformers

    config = transformers.ViTConfig(
        hidden_size=256,
        num_hidden_layers=depth,
        num_attention_heads=8,
        intermediate_size=1024,
        image_size=64,
        patch_size=4,
        num_labels=10,
    )
    return _Logits(transformers.ViTForImageClassification(config))


def _resnet(kind: str, depths: list[int]) -> nn.Module:
    import transformers

    widths = [32 * 2**i * (4 if kind == "bottleneck" else 1) for i in range(4)]
    config = transformers.ResNetConfig(
        embedding_size=32, hidden_sizes=widths, depths=depths, layer_type=kind, num_labels=10
    )
    return _Logits(transformers.ResNetForImageClassification(config))


def _rows(
    name: str, net: nn.Module, batch: tuple[Tensor, Tensor], options: Namespace
) -> Iterator[dict[str, Any]]:
    def is_wanted(title: str) -> bool:
        return not options.arms or title in options.arms

    pairs, quick = options.pairs, options.quick
    clock = time.process_time if options.processor else time.perf_counter

    def compiled(title: str, backend: Any, **given: Any) -> tuple[Arm, float, Decision | None]:
        passed = _with_children if options.processor else time.perf_counter
        return _compiled(title, net, batch, backend, passed, **given)

    decided: list[Decision] = []
    with listening(decided.append):
        plain = compiled("plain", elbowroom, options={"budget": 2**40})
    peak = max(decided, key=lambda one: one.plain_nbytes).plain_nbytes
    inputs = max(one.inputs_nbytes for one in decided)
    reference = plain[0].gradient()
    yield _row(name, *plain, plain[0], reference, pairs, clock)
    eager = Arm("eager", *_twin(net), batch)
    coded = Arm("eager, er.saving", *_twin(net), batch, {"levels": 16})
    for arm in (eager, coded):
        if is_wanted(arm.name):
            yield _row(name, arm, 0.0, None, plain[0], reference, pairs, clock)
    for budget in BUDGETS[:1] if quick else BUDGETS:
        if not is_wanted(f"budget {budget}"):
            continue
        with functorch_config.patch(activation_memory_budget=budget):
            made = compiled(f"budget {budget}", _inductor())
        yield _row(name, *made, plain[0], reference, pairs, clock)
    if is_wanted("fp8"):
        with inductor_config.patch(post_grad_fusion_options=FP8):
            made = compiled("fp8", _inductor())
        yield _row(name, *made, plain[0], reference, pairs, clock)
    for exact in (True, False):
        for share in SHARES[:1] if quick else SHARES:
            title = f"ours {share}" if exact else f"ours {share}, codes"
            if not is_wanted(title):
                continue
            given = {"budget": int(share * peak) + inputs, "exact": exact}
            try:
                made = compiled(title, elbowroom, options=given)
            except BudgetTooSmall as error:
                tell(f"{name}, {title}: {error}")
                continue
            yield _row(name, *made, plain[0], reference, pairs, clock)


def _inductor() -> Callable[..., Any]:
    """Inductor as another backend each time: Dynamo runs what the same one has compiled before."""
    from torch._inductor.compile_fx import compile_fx

    return lambda gm, given: compile_fx(gm, given)


def _twin(net: nn.Module) -> tuple[nn.Module, nn.Module]:
    twin = copy.deepcopy(net)
    return twin, twin


def _with_children() -> float:
    """Seconds of processor time that this process and those that it started have taken."""
    return sum(os.times()[:4])


def _compiled(
    name: str,
    net: nn.Module,
    batch: tuple[Tensor, Tensor],
    backend: Any,
    clock: Callable[[], float],
    **given: Any,
) -> tuple[Arm, float, Decision | None]:
    """The arm, the seconds of its first step, and what was decided for it."""
    twin = copy.deepcopy(net)
    arm = Arm(name, twin, torch.compile(twin, backend=backend, **given), batch)
    found: list[Decision] = []
    with fresh_cache():
        torch.compile(lambda x: x.sin(), backend=_inductor())(torch.ones(64))  # headers
        begun = clock()
        with listening(found.append):
            arm.step()
        passed = clock() - begun
    return arm, passed, found[0] if found else None


def _row(
    net: str,
    arm: Arm,
    compile_s: float,
    decision: Decision | None,
    plain: Arm,
    reference: Tensor,
    pairs: int,
    clock: Callable[[], float],
) -> dict[str, Any]:
    error = float((arm.gradient() - reference).square().sum() / reference.square().sum())
    arm.net.zero_grad()
    peak = er.peak(arm.step, device="cpu")
    clocked = paired(plain.step, arm.step, pairs=pairs, clock=clock)
    tell(f"{net}, {arm.name}: {mib(peak)} MiB, {times(clocked)}, gErr2 {error:.1e}")
    return {
        "net": net,
        "arm": arm.name,
        "peak_nbytes": peak,
        "predicted_nbytes": None if decision is None else decision.peak_nbytes,
        "saved_nbytes": None if decision is None else decision.saved_nbytes,
        "g_err2": error,
        "time": paired_dict(clocked),
        "compile_s": compile_s,
        "shown": times(clocked),
    }


def _result(
    rows: list[dict[str, Any]], pairs: int, clock: str, known: dict[str, Any]
) -> dict[str, Any]:
    predicted = [row for row in rows if row["predicted_nbytes"] is not None]
    off = max(abs(r["predicted_nbytes"] / r["peak_nbytes"] - 1) for r in predicted)
    ours = [row for row in rows if row["arm"].startswith("ours") and "codes" not in row["arm"]]
    worst = max((row["g_err2"] for row in ours), default=0.0)
    return {
        "name": NAME,
        "claim": "a compiled step keeps to a budget that is its peak, exactly or with codes",
        "n": pairs,
        "settings": {"budgets": BUDGETS, "shares": SHARES, "clock": clock},
        **known,
        "rows": rows,
        "table": {
            "head": ["net, arm", "peak MiB", "predicted", "saved", "time", "gErr2", "compile s"],
            "rows": [_line(row) for row in rows],
        },
        "targets": [
            target("peaks are predicted within 5 %", f"at most {100 * off:.1f} % off", off <= 0.05),
            target(
                "exact plans have the gradient of plain torch.compile, bit for bit",
                f"largest gErr2 {worst:.1e} of {len(ours)} plans",
                worst == 0,
            ),
            *_shares(rows),
        ],
    }


def _shares(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Shares of plain's peak that each net is to reach, in how much more time, and how exactly."""
    for net in dict.fromkeys(row["net"] for row in rows):
        of_net = [row for row in rows if row["net"] == net]
        plain = next(row for row in of_net if row["arm"] == "plain")
        for name, share, limit, exact in GOALS:
            ours = [
                row
                for row in of_net
                if row["arm"].startswith("ours") and ("codes" not in row["arm"]) is exact
            ]
            small = [row for row in ours if row["peak_nbytes"] <= share * plain["peak_nbytes"]]
            best = min(small, key=lambda row: row["time"]["ratio"], default=None)
            measured = "not reached" if best is None else f"{best['arm']}: {best['shown']}"
            is_met = best is not None and best["time"]["ratio"] <= limit and best["g_err2"] <= 0.02
            if ours or exact:
                how = "exact" if exact else "with codes, gErr2 at most 0.02"
                yield target(
                    f"{net}: {name} of plain's peak at {limit:.2f}x, {how}", measured, is_met
                )


def _line(row: dict[str, Any]) -> list[str]:
    sizes = [row[key] for key in ("predicted_nbytes", "saved_nbytes")]
    return [
        f"{row['net']}, {row['arm']}",
        mib(row["peak_nbytes"]),
        *("" if size is None else mib(size) for size in sizes),
        row["shown"],
        f"{row['g_err2']:.1e}",
        f"{row['compile_s']:.0f}",
    ]


if __name__ == "__main__":
    main()
