"""Public models at the sizes that people train, on one GPU: peak, time, and the first steps.

    ./scripts/bench on_gpu [--models resnet50,gpt2] [--quick]

bf16 autocast over fp32 weights, torch.optim.AdamW(fused=True), random data, in these ways:

    plain            twice, before and after the others: what the two differ by is noise
    checkpoint       the library's own gradient checkpointing
    exact, 70 %      er.fit(exact=True), 70 % of what plain's peak has above weights and states
    exact, as checkpoint    the same with the room that `checkpoint` takes
    lossy, 40 %      er.fit(exact=None), 40 % of it

    peak       bytes that PyTorch's allocator holds at most in a settled step, over plain's
    kept       that peak over the budget; in brackets the highest of the first steps
    time       seconds a step, without waiting between steps, over the mean of both plains
    busy       milliseconds for which the GPU works in one step, by PyTorch's profiler: where `time`
               is more, the GPU waits for Python
    first      seconds of the first step: plans, and kernels that are compiled once
    loss       after six steps, less plain's; the second plain shows what is not repeatable

After each way the file is replaced.
"""

import argparse
import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from _common import arguments, facts, out_path, show, tell, write_json
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import elbowroom as er
from elbowroom.errors import BudgetTooSmall

NAME = "on-gpu"
LEARNING, TIMED = 14, 20  # steps
COMPARED = 6  # steps after which losses are compared
CUDA = torch.device("cuda")
Loss = Callable[[nn.Module], Tensor]
Fit = Callable[[nn.Module, torch.optim.Optimizer], None]


class Size(NamedTuple):
    """What differs between a run and a smoke run."""

    width: int
    depth: int
    batch: int
    length: int  # tokens, or pixels of a side
    vocabulary: int = 32000


SIZES = {
    "resnet50": Size(0, 0, 96, 224),
    "gpt2": Size(768, 12, 8, 1024),
    "llama": Size(1024, 12, 4, 1024),
}
QUICK = {
    "resnet50": Size(0, 0, 2, 64),
    "gpt2": Size(64, 2, 2, 64, 500),
    "llama": Size(64, 2, 2, 64, 500),
}


def resnet50(size: Size) -> tuple[nn.Module, Loss]:
    import timm

    images = torch.randn(size.batch, 3, size.length, size.length, device=CUDA)
    labels = torch.randint(0, 100, (size.batch,), device=CUDA)
    net = timm.create_model("resnet50", num_classes=100).to(CUDA)
    return net, lambda model: F.cross_entropy(model(images), labels)


def gpt2(size: Size) -> tuple[nn.Module, Loss]:
    from transformers import GPT2Config, GPT2LMHeadModel

    settings = {"n_embd": size.width, "n_layer": size.depth, "n_head": size.width // 64}
    config = GPT2Config(vocab_size=size.vocabulary, bos_token_id=0, eos_token_id=0, **settings)
    return _language_model(GPT2LMHeadModel(config), size)


def llama(size: Size) -> tuple[nn.Module, Loss]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=size.vocabulary,
        hidden_size=size.width,
        intermediate_size=11 * size.width // 4,
        num_hidden_layers=size.depth,
        num_attention_heads=max(size.width // 64, 2),
        num_key_value_heads=max(size.width // 128, 1),
    )
    return _language_model(LlamaForCausalLM(config), size)


def _language_model(net: nn.Module, size: Size) -> tuple[nn.Module, Loss]:
    ids = torch.randint(0, size.vocabulary, (size.batch, size.length), device=CUDA)
    return net.to(CUDA), lambda model: model(input_ids=ids, labels=ids).loss


MODELS = {"resnet50": resnet50, "gpt2": gpt2, "llama": llama}


def main() -> None:
    options = _options()
    if not torch.cuda.is_available():
        raise SystemExit("needs a CUDA device")
    path, known = out_path(options, NAME), facts()
    known["device"]["gpu"] = torch.cuda.get_device_name()
    sizes = QUICK if options.quick else SIZES
    found: dict[str, dict[str, Any]] = {}
    for name in options.models.split(","):
        rows = found[name] = {}
        for way, row in measured(name, sizes[name]):
            rows[way] = row
            tell(f"{name}, {way}: {row.get('refused') or _told(row)}")
            write_json(path, result(found, known, sizes))
    show(result(found, known, sizes))


def _options() -> argparse.Namespace:
    parser = arguments(__doc__)
    parser.add_argument("--models", default=",".join(MODELS), help=f"of {', '.join(MODELS)}")
    return parser.parse_args()


# --- the ways ---


def measured(name: str, size: Size) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each way that a model is trained, and its numbers."""
    plain = trained(name, size, _nothing)
    yield "plain", plain
    beside, above = plain["state_nbytes"], plain["peak_nbytes"] - plain["state_nbytes"]
    checkpoint = trained(name, size, _checkpoint)
    yield "checkpoint", checkpoint
    for way, budget, exact in (
        ("exact, 70 %", beside + 0.7 * above, True),
        ("exact, as checkpoint", checkpoint["peak_nbytes"], True),
        ("lossy, 40 %", beside + 0.4 * above, None),
    ):
        try:
            yield way, trained(name, size, _fitted(int(budget), exact=exact), int(budget))
        except BudgetTooSmall as error:
            yield way, {"budget_nbytes": int(budget), "refused": str(error)}
    yield "plain, again", trained(name, size, _nothing)


def _nothing(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    pass


def _checkpoint(model: Any, optimizer: torch.optim.Optimizer) -> None:
    if hasattr(model, "gradient_checkpointing_enable"):
        model.gradient_checkpointing_enable()
    else:
        model.set_grad_checkpointing(True)


def _fitted(budget: int, *, exact: bool | None) -> Fit:
    def fit(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        er.fit(model, budget=budget, optimizer=optimizer, exact=exact)

    return fit


def trained(name: str, size: Size, fit: Fit, budget: int | None = None) -> dict[str, Any]:
    """The numbers of one way."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.manual_seed(0)
    model, loss_of = MODELS[name](size)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    fit(model, optimizer)

    def step() -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            loss = loss_of(model)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    torch.manual_seed(1)
    first_s, peaks, losses = [], [], []
    for _ in range(LEARNING):
        with highest(peaks):
            start_s = time.perf_counter()
            losses.append(step().item())
            first_s.append(time.perf_counter() - start_s)
    torch.cuda.synchronize()
    start_s = time.perf_counter()
    with highest(peaks):
        for _ in range(TIMED):
            step()
        torch.cuda.synchronize()
    seconds = (time.perf_counter() - start_s) / TIMED
    row = {
        "budget_nbytes": budget,
        "step_s": seconds,
        "busy_s": busy_s(step),
        "first_s": first_s,
        "peak_nbytes": peaks[-1],
        "first_peaks_nbytes": peaks[:-1],
        "state_nbytes": torch.cuda.memory_allocated(),
        "loss": losses[COMPARED - 1],
        "summary": str(er.summary(model)) if budget else "",
    }
    if budget:
        er.release(model)
    return row


@contextmanager
def highest(into: list[int]) -> Iterator[None]:
    """Appends the highest level of the allocator, also if something resets its counter."""
    reset, found = torch.cuda.reset_peak_memory_stats, [0]

    def seen(device: Any = None) -> None:
        found.append(torch.cuda.max_memory_allocated())
        reset(device)

    reset()
    torch.cuda.reset_peak_memory_stats = seen
    try:
        yield
    finally:
        torch.cuda.reset_peak_memory_stats = reset
    into.append(max(*found, torch.cuda.max_memory_allocated()))


def busy_s(step: Callable[[], object]) -> float:
    """Seconds for which kernels and copies run in one step."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    on_gpu = [e for e in profiler.key_averages() if "cuda" in str(e.device_type).lower()]
    return float(sum(e.self_device_time_total for e in on_gpu)) / 1e6


# --- the report ---


def result(
    found: dict[str, dict[str, Any]], known: dict[str, Any], sizes: dict[str, Size]
) -> dict[str, Any]:
    return {
        "name": NAME,
        "claim": "a budget is kept on a GPU, and what it costs there",
        **known,
        "n": TIMED,
        "settings": {name: sizes[name]._asdict() for name in found},
        "rows": found,
        "table": {
            "head": ["model", "way", "peak", "kept", "time", "busy", "first", "loss"],
            "rows": [
                [name, way, *_cells(row, rows)]
                for name, rows in found.items()
                for way, row in rows.items()
            ],
        },
        "targets": [],
        "notes": ["lossy: exact plans come first, and codes only where these do not fit"],
    }


def _cells(row: dict[str, Any], rows: dict[str, dict[str, Any]]) -> list[str]:
    if "refused" in row:
        return ["-", "refused", "-", "-", "-", "-"]
    plains = [one["step_s"] for way, one in rows.items() if way.startswith("plain")]
    plain, budget = rows["plain"], row["budget_nbytes"]
    kept = "-"
    if budget:
        first = max(row["first_peaks_nbytes"]) / budget
        kept = f"{row['peak_nbytes'] / budget:.3f} ({first:.3f})"
    return [
        f"{row['peak_nbytes'] / plain['peak_nbytes']:.3f}",
        kept,
        f"{row['step_s'] / (sum(plains) / len(plains)):.3f}",
        f"{row['busy_s'] * 1e3:.1f} ms",
        f"{row['first_s'][0]:.1f} s",
        f"{row['loss'] - plain['loss']:+.1e}",
    ]


def _told(row: dict[str, Any]) -> str:
    return f"{row['peak_nbytes'] / 2**20:.0f} MiB, {row['step_s'] * 1e3:.1f} ms"


if __name__ == "__main__":
    main()
