"""What Inductor generates for a GPU from codes that are written out in aten ops, without a GPU.

    ./scripts/bench fused_codes [--elements 4194304] [--source]

    forward     y = GELU(x + bias); y is held as codes, and read by forward, too
    backward    grad * (y~ of the codes), as the gradient of a product by y has it
    masks       x > 0 as bits; and where(bits, grad, 0)

    kernel      a Triton kernel, or a call into a library
    bytes       that it reads and writes, by Inductor's own count, for each element of x

The gradient alone moves 8 bytes an element, GELU too: what is above that is what codes cost.

Graphs are lowered with fake CUDA tensors and the properties of an H100, up to Triton's source, of
which this counts the kernels. torch without CUDA refuses what comes after (a stream, autograd on
CUDA tensors, loading a kernel): so nothing here is a time.
"""

import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from _common import arguments, facts, finish, out_path, target
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from elbowroom.compiled import aten, ops
from elbowroom.compiled.rewrite import GROUP_SIZE

NAME = "fused_codes"
CUDA = torch.device("cuda", 0)


def main() -> None:
    parser = arguments(__doc__, threads=1)
    parser.add_argument("--elements", type=int, default=2**22, help="of x (4,194,304)")
    parser.add_argument("--source", action="store_true", help="print Triton's source, too")
    options = parser.parse_args()
    n = 2**16 if options.quick else options.elements
    known, rows = facts(), []
    for levels in (16,) if options.quick else (4, 16, 256):
        for name, (work, given) in _graphs(n, levels).items():
            is_mask = name.startswith("mask")
            if is_mask and levels != 16:
                continue
            title = name if is_mask else f"{name}, {levels} levels"
            kernels, source = generated(work, given)
            if options.source:
                print(source)
            rows += [_row(title, kernel, nbytes, n) for kernel, nbytes in kernels]
    finish(_result(rows, known, n), out_path(options, NAME))


def _graphs(n: int, levels: int) -> dict[str, tuple[Callable[..., Any], list[Any]]]:
    size, order = [n // 2048, 2048], [0, 1]
    grid = (0, levels, GROUP_SIZE)

    def forward(x: Tensor, bias: Tensor, seed: Tensor) -> Any:
        y = F.gelu(x + bias)
        return y, *ops.ENCODE(y, order, seed, *grid)

    def backward(codes: Tensor, ranges: Tensor, bounds: Tensor, seed: Tensor, grad: Tensor) -> Any:
        y = ops.DECODE(codes, ranges, bounds, seed, *grid, size, order, torch.float32)
        return grad * y

    def mask_forward(x: Tensor) -> Any:
        return ops.PACK_MASK(x > 0, order)

    def mask_backward(bits: Tensor, grad: Tensor) -> Any:
        return torch.where(ops.UNPACK_MASK(bits, size, order), grad, 0.0)

    x, seed = (size, torch.float32), None
    codes = ([n * (levels - 1).bit_length() // 8], torch.uint8)
    ranges = ([n // GROUP_SIZE, 2], torch.uint8)
    bounds = ([n // 2048, 2], torch.bfloat16)
    return {
        "forward": (forward, [x, ([2048], torch.float32), seed]),
        "backward": (backward, [codes, ranges, bounds, seed, x]),
        "mask, forward": (mask_forward, [x]),
        "mask, backward": (mask_backward, [([n // 8], torch.uint8), x]),
    }


def generated(work: Callable[..., Any], given: list[Any]) -> tuple[list[tuple[str, int]], str]:
    """The kernels of a function with the bytes that each moves, and the source of its wrapper.

    given: size and dtype of each argument on the GPU; None: a seed in host memory.
    """
    from torch._inductor.debug import DebugContext
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V

    mode = FakeTensorMode()
    with mode:
        inputs = [
            torch.empty((), dtype=torch.int64)
            if one is None
            else torch.empty(one[0], dtype=one[1], device=CUDA)
            for one in given
        ]
        gm = fx.experimental.proxy_tensor.make_fx(work, decomposition_table=select_decomp_table())(
            *inputs
        )
    aten.expand(gm)
    with as_if_there_were_a_gpu(), mode:
        lowering = GraphLowering(gm, example_inputs=inputs)
        with (
            V.set_graph_handler(lowering),
            V.set_fake_mode(mode),
            V.set_debug_handler(DebugContext()),
        ):
            lowering.run(*inputs)
            code = lowering.codegen()[0]
            counted = lowering.count_bytes()[1]
    kernels = [(_name(node), 4 * count) for node, count in counted]
    return kernels, str(getattr(code, "value", code))


@contextmanager
def as_if_there_were_a_gpu() -> Iterator[None]:
    """Meanwhile Inductor finds the properties of an H100 where it asks for those of a device."""
    from torch._inductor import scheduler
    from torch._inductor.runtime.hints import DeviceProperties
    from torch.utils import _triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import make_backend

    h100 = {"major": 9, "multi_processor_count": 132, "warp_size": 32}
    h100 |= {"regs_per_multiprocessor": 65536, "max_threads_per_multi_processor": 2048}
    found = DeviceProperties(type="cuda", index=0, cc=90, **h100)
    theirs = types.SimpleNamespace(name="H100", minor=0, total_memory=80 * 2**30, **h100)
    with ExitStack() as stack:
        for owner, name, value in (
            (DeviceProperties, "create", classmethod(lambda cls, device: found)),
            (torch.cuda, "get_device_properties", lambda device=None: theirs),
            (torch.cuda, "get_device_capability", lambda device=None: (9, 0)),
            (torch.cuda, "current_device", lambda: 0),
            (torch.version, "cuda", "13.0"),
            (scheduler, "has_triton", lambda: True),
            (_triton, "triton_backend", lambda: make_backend(GPUTarget("cuda", 90, 32))),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        yield


def _name(node: Any) -> str:
    """The ops of a kernel, in short."""
    origins = {
        str(origin.target).split(".")[1]
        for one in node.get_nodes()
        if one.node is not None
        for origin in one.node.get_origins()
        if origin.op == "call_function" and "." in str(origin.target)
    }
    wanted = ("erf", "amin", "amax", "floor", "clamp_min", "bitwise_xor", "mul", "gt", "where")
    return " ".join(name for name in wanted if name in origins) or "other"


def _row(title: str, kernel: str, nbytes: int, n: int) -> dict[str, Any]:
    return {"graph": title, "kernel": kernel, "nbytes": nbytes, "nbytes_per_element": nbytes / n}


def _result(rows: list[dict[str, Any]], known: dict[str, Any], n: int) -> dict[str, Any]:
    graphs = list(dict.fromkeys(row["graph"] for row in rows))
    kernels = {g: [row for row in rows if row["graph"] == g] for g in graphs}
    decoding = [g for g in graphs if "backward" in g]
    worst = max(sum(r["nbytes_per_element"] > 0.1 for r in kernels[g]) for g in decoding)
    return {
        "name": NAME,
        "claim": "codes in aten ops are fused with what makes and reads them, in Triton",
        "n": 1,
        "settings": {"elements": n, "device": "fake CUDA tensors, properties of an H100"},
        **known,
        "rows": rows,
        "table": {
            "head": ["graph", "kernel", "bytes an element"],
            "rows": [[r["graph"], r["kernel"], f"{r['nbytes_per_element']:.3f}"] for r in rows],
        },
        "targets": [
            target(
                "a decode is in the kernel of its reader",
                f"at most {worst} kernel that moves more than 0.1 bytes an element",
                worst == 1,
            )
        ],
    }


if __name__ == "__main__":
    main()
