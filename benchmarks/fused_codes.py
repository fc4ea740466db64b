"""What Inductor generates for a GPU from codes that are written out in aten ops, without a GPU.

    ./scripts/bench fused_codes [--elements 4194304] [--source]

    forward     y = GELU(x + bias); y is held as codes, and read by forward, too
    backward    grad * (y~ of the codes), as the gradient of a product by y has it
    masks       x > 0 as bits; and where(bits, grad, 0)
    indices     int64 as int16, by which backward adds rows up

    kernel      a Triton kernel, or a call into a library
    bytes       that it reads and writes, by Inductor's own count, for each element of x

A graph with a value in a host's memory, as a seed of the host's would be, is none that Inductor
captures in a CUDA graph (mode="reduce-overhead"); it is asked whether it would.

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

from elbowroom.codecs import BitMask, Cast, Codec, Dither, Division, Facts, Group, Narrow
from elbowroom.codecs.names import setting_name
from elbowroom.compiled import ops
from elbowroom.compiled.expand import expand

NAME = "fused_codes"
CUDA = torch.device("cuda", 0)
CODECS = (Dither(levels=4), Dither(levels=16), Dither(levels=256), Group(), Group(bits=4))
CODECS += (Cast("fp8_e4m3"), Cast("bf16"), Division())
QUICK = (Dither(levels=16), Group(bits=4), Cast("fp8_e4m3"), Division())


def main() -> None:
    parser = arguments(__doc__, threads=1)
    parser.add_argument("--elements", type=int, default=2**22, help="of x (4,194,304)")
    parser.add_argument("--source", action="store_true", help="print Triton's source, too")
    options = parser.parse_args()
    n = 2**16 if options.quick else options.elements
    known, rows = facts(), []
    refused: list[str] = []
    codecs = QUICK if options.quick else CODECS
    graphs = {k: v for codec in codecs for k, v in _coding(n, codec).items()} | _exact(n)
    for title, (work, given) in graphs.items():
        kernels, source, reasons = generated(work, given)
        refused += [f"{title}: {reason}" for reason in reasons]
        if options.source:
            print(source)
        rows += [_row(title, kernel, nbytes, n) for kernel, nbytes in kernels]
    finish(_result(rows, known, n, refused), out_path(options, NAME))


_Graph = tuple[Callable[..., Any], list[Any]]


def _coding(n: int, codec: Codec) -> dict[str, _Graph]:
    """What stores a value in codes, and what reads these."""
    size, order, how = [n // 2048, 2048], [0, 1], (ops.coding_name(codec), 0)

    def forward(x: Tensor, bias: Tensor) -> Any:
        seed, y = ops.DRAW(CUDA), F.gelu(x + bias)
        return y, *ops.ENCODE(y, order, how[0], seed, how[1])

    def backward(seed: Tensor, grad: Tensor, *buffers: Tensor) -> Any:
        return grad * ops.DECODE(buffers, how[0], seed, how[1], size, order, torch.float32)

    x, seed = (size, torch.float32), ([1], torch.int64)
    layout = ops.layout_of(torch.empty(size, device="meta"), order, how[0])
    buffers = [(list(one.shape), one.dtype) for one in layout]
    name = setting_name(codec)
    return {
        f"forward, {name}": (forward, [x, ([2048], torch.float32)]),
        f"backward, {name}": (backward, [seed, x, *buffers]),
    }


def _exact(n: int) -> dict[str, _Graph]:
    """Masks, and indices of rows."""
    size, order = [n // 2048, 2048], [0, 1]
    bits = ops.coding_name(BitMask(), Facts(value=1.0)), None, 0
    small = ops.coding_name(Narrow(), Facts(smallest=0, largest=30_000)), None, 0

    def mask_forward(x: Tensor) -> Any:
        return ops.ENCODE(x > 0, order, *bits)

    def mask_backward(held: Tensor, grad: Tensor) -> Any:
        return torch.where(ops.DECODE([held], *bits, size, order, torch.bool), grad, 0.0)

    def index_forward(x: Tensor, index: Tensor) -> Any:
        return x.gather(0, index), *ops.ENCODE(index, order, *small)

    def index_backward(held: Tensor, grad: Tensor) -> Any:
        index = ops.DECODE([held], *small, size, order, torch.int64)
        return grad.gather(0, index)

    x = size, torch.float32
    return {
        "mask, forward": (mask_forward, [x]),
        "mask, backward": (mask_backward, [([n // 8], torch.uint8), x]),
        "index, forward": (index_forward, [x, (size, torch.int64)]),
        "index, backward": (index_backward, [([n], torch.int16), x]),
    }


def generated(
    work: Callable[..., Any], given: list[Any]
) -> tuple[list[tuple[str, int]], str, list[str]]:
    """The kernels of a function with the bytes that each moves, and the source of its wrapper.

    And why Inductor would not capture it in a CUDA graph, if that is so.

    given: size and dtype of each argument on the GPU.
    """
    from torch._inductor.cudagraph_utils import (
        check_multiple_devices_or_any_cpu_nodes as check_devices,
    )
    from torch._inductor.debug import DebugContext
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V

    mode = FakeTensorMode()
    with mode:
        inputs = [torch.empty(size, dtype=dtype, device=CUDA) for size, dtype in given]
        gm = fx.experimental.proxy_tensor.make_fx(work, decomposition_table=select_decomp_table())(
            *inputs
        )
    expand(gm)
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
    found = lowering.disable_cudagraphs_reason, check_devices(lowering.device_node_mapping)
    return kernels, str(getattr(code, "value", code)), [str(one) for one in found if one]


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


def _result(
    rows: list[dict[str, Any]], known: dict[str, Any], n: int, refused: list[str]
) -> dict[str, Any]:
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
            ),
            target(
                "Inductor captures codes in CUDA graphs",
                "; ".join(refused) or "no graph is refused",
                not refused,
            ),
        ],
    }


if __name__ == "__main__":
    main()
