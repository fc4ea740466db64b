"""What surrounds the kernels: schemas, fakes, the choice of a backend, threads and forks."""

import logging
import os
import subprocess
import sys
import textwrap
import threading
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_leaves

from elbowroom.kernels import ops, reference
from elbowroom.kernels.specs import SPECS
from waiting import NoWaiting

ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
PAIRS = [60, 1, 2, 1, 2, 0, 0, 1, 1]  # windows of two neighbours in a row of 60
CONVERSIONS = {"moments_quantize", "moments_dequantize"}  # once a load or save: not worth a kernel
UNSERVED = {  # by now: the reference serves them
    "triton": {
        *("places_pack", "places_unpack", "advance", "beyond", "batch_norm_backward"),
        *("layer_norm_backward", "times_bits", "row_statistics", "head_spread"),
        "attention_backward",
        *("sparse_pack", "fingerprint", *CONVERSIONS),
    },
    "numba": {  # on a CPU payloads are as long as they must be: nothing waits
        *("nonzero_quantize_into", "sided_quantize_into", "comet_quantize_into"),
        "sparse_pack_into",
        *CONVERSIONS,
    },
}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def reference_index(n: int, device: str) -> torch.Tensor:
    """What max-pooling by PAIRS might save for 2 x n / 100 maps of 50 rows: n indices."""
    row = torch.arange(n, device=device) // (n // 100) % 50
    return row * 60 + torch.arange(n, device=device) % (n // 100) * 2 + 1


def moments(n: int, device: str) -> list[torch.Tensor]:
    """An optimizer's states, 100 a row: codes and bounds of the first and the second moment."""
    made = [torch.zeros(n // 100, 100, dtype=d, device=device) for d in (torch.int8, torch.uint8)]
    bounds = [torch.zeros(n // 100, k, dtype=torch.int16, device=device) for k in (1, 2)]
    return [made[0], bounds[0], made[1], bounds[1]]


def arguments(op: str, device: str, n: int = 3000) -> tuple:
    """A plausible call of `op`."""
    x = torch.randn(n, generator=torch.Generator().manual_seed(0)).to(device)
    out = torch.empty_like(x)
    bits = reference.pack_bits(x.relu())
    maps = [2, 50, n // 100, 1]
    bands = 1, maps, 8, (32, 8, 3, 0), 16, True  # seed, maps, block, levels, kept, dither
    grid = torch.tensor([0.05, 0.099, 1 / 0.099], device=device)
    into = (
        *torch.zeros(2, 8 * n, dtype=torch.uint8, device=device).unbind(),
        torch.zeros(1, dtype=torch.int64, device=device),
    )
    kept, spill = (part[: 4 * n].view(torch.int32) for part in into[:2])
    return {
        "pack_bits": lambda: (x,),
        "unpack_bits": lambda: (bits, 1.0, out),
        "narrow": lambda: (torch.arange(n // 10, device=device), torch.uint8),
        "places_pack": lambda: (reference_index(n, device), PAIRS, maps),
        "places_unpack": lambda: (
            reference.places_pack(reference_index(n, device), PAIRS, maps)[0],
            *(PAIRS, maps, torch.empty(n, dtype=torch.int64, device=device)),
        ),
        "group_quantize": lambda: (x, 1, 4, 64),
        "group_dequantize": lambda: (*reference.group_quantize(x, 1, 4, 64), 4, 64, out),
        "dither_quantize": lambda: (x, 1, 3, 64),
        "dither_dequantize": lambda: (*reference.dither_quantize(x, 1, 3, 64), 1, 3, 64, out),
        "masked": lambda: (x, bits, out),
        "times_bits": lambda: (x, bits, 1.25, out),
        "batch_norm_backward": lambda: (x.cos(), torch.ones(3, device=device), n // 30, x),
        "layer_norm_backward": lambda: (
            *(x.cos(), torch.ones(30, device=device), torch.ones(n // 30, device=device), x),
        ),
        "nonzero_quantize": lambda: (x.relu(), 1, 4, 64),
        "nonzero_dequantize": lambda: (
            *reference.nonzero_quantize(x.relu(), 1, 4, 64),
            *(1, 4, 64, out),
        ),
        "division_quantize": lambda: (x, 1, 4, 8, 0, maps),
        "division_dequantize": lambda: (
            *reference.division_quantize(x, 1, 4, 8, 0, maps),
            *(1, 4, 8, 0, maps, True, out),
        ),
        "sided_quantize": lambda: (x, bits, 1, 4, 2, 64, 8),
        "sided_dequantize": lambda: (
            *(bits, *reference.sided_quantize(x, bits, 1, 4, 2, 64, 8)),
            *(1, 4, 2, 64, 8, out),
        ),
        "nonzero_quantize_into": lambda: (x.relu(), 1, 4, 64, *into),
        "sided_quantize_into": lambda: (x, bits, 1, 4, 2, 64, 8, *into),
        "comet_quantize_into": lambda: (x, grid, 1, "dither", True, 0, 0, 0, *into),
        "sparse_pack": lambda: (x.relu().view(torch.int32),),
        "sparse_pack_into": lambda: (x.relu().view(torch.int32), kept, spill, into[2]),
        "sparse_unpack": lambda: (bits, kept.zero_(), spill, out.view(torch.int32)),
        "fp8_quantize": lambda: (x, 64, "e4m3"),
        "fp8_dequantize": lambda: (*reference.fp8_quantize(x, 64, "e4m3"), 64, "e4m3", out),
        "optimizer_step": lambda: (
            *([x, x.clone()], [], [x.cos()] * 2),
            *([a, a.clone()] for a in moments(n, device)),
            *("adamw", "nearest", "softsign8", "log8", [100, 100]),
            *(torch.tensor([[1.0, 1e-3, 0.9, 0.1, 0.999, 0.001, 1.0, 1e-8]] * 2), [1, 2], None),
        ),
        "advance": lambda: ([torch.ones(()), torch.zeros(())], 1),
        "beyond": lambda: ([x, bits.bfloat16()], 2.0),
        "fingerprint": lambda: ([x, bits.bfloat16()], [3, 1]),
        "moments_quantize": lambda: (x, x * x, *moments(n, device), "softsign8", "log8", 100, 1),
        "moments_dequantize": lambda: (*moments(n, device), "softsign8", "log8", 100, n),
        "affine": lambda: (x, *torch.ones(2, 3, device=device), 5, bits, out),
        "dropout": lambda: (x, 1, 0.3, out),
        "attention_backward": lambda: (
            *(heads := [x.view(n // 100, 2, 5, 10).clone() for _ in range(4)]),
            *(None, True, 0.2, *(torch.empty_like(one) for one in heads[:3])),
        ),
        "row_statistics": lambda: (x, 30),
        "head_spread": lambda: (x, 30, (n // 300, 2, 5), (300, 30, 60), True),
        "fdsr_quantize": lambda: (x, *bands),
        "fdsr_dequantize": lambda: (*reference.fdsr_quantize(x, *bands), *bands, out),
        "comet_quantize": lambda: (x, grid, 1, "dither", True, 0, 0, 0),
        "comet_dequantize": lambda: (
            *reference.comet_quantize(x, grid, 1, "dither", True, 0, 0, 0),
            *(grid, 1, "dither", 0, 0, 0, out),
        ),
    }[op]()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("op", ops.NAMES)
def test_schema_and_fake(op, device):
    overload = getattr(torch.ops.elbowroom, op).default
    args = arguments(op, device)
    torch.library.opcheck(overload, args)
    schema = str(overload._schema)
    if "scale=None" in schema:
        by = (*torch.ones(2, 3, device=device), 5)
        mask = [reference.pack_bits(args[-1].relu())] if "mask=None" in schema else []
        torch.library.opcheck(overload, (*args, *by, *mask))


# --- seeds in tensors ---

SEEDED = [op for op, spec in SPECS.items() if " int seed" in spec.schema]


@pytest.mark.parametrize("op", SEEDED)
@pytest.mark.parametrize("where", ["ops", pytest.param("triton", marks=pytest.mark.sampled)])
def test_a_seed_in_a_tensor_is_that_number(where, op):
    """Of 64 bits, on every backend; of another one, something else is drawn."""
    if where == "triton":
        pytest.importorskip("triton")
        if op in UNSERVED["triton"]:
            pytest.skip("the reference serves it")
        from elbowroom.kernels import triton as kernels

    def called(by, *, lies):
        args = list(arguments(op, "cpu", 300))
        at = SPECS[op].schema[: SPECS[op].schema.index(" int seed")].count(",")
        args[at] = torch.tensor([by]) if lies else by
        if where == "triton":
            out = getattr(kernels, op)(*args)
        else:
            overload = getattr(torch.ops.elbowroom, op)
            out = (overload.seeded if lies else overload.default)(*args)
        return [x for x in tree_leaves([*args, out]) if isinstance(x, torch.Tensor) and x.ndim]

    seed = 0x7ABCDEF123456789
    number, tensor, other = (
        [x for x in called(by, lies=lies) if x.dtype is not torch.int64 or len(x) > 1]
        for by, lies in ((seed, False), (seed, True), (seed ^ (1 << 40), True))
    )
    assert all(map(equal_bits, number, tensor))
    assert not all(map(equal_bits, number, other))


def test_a_gpu_waits_for_no_seed_where_bands_are_used_again():
    """Which the reference does there, too."""
    pytest.importorskip("triton")
    from elbowroom.kernels import triton as kernels

    x, out, seed = torch.randn(6000), torch.empty(6000), torch.tensor([0x7ABCDEF123456789])
    how = [2, 50, 60, 1], 8, (32, 8, 3, 0), 2, True
    expected = kernels.fdsr_quantize(x, int(seed), *how)
    with NoWaiting():
        stored = kernels.fdsr_quantize(x, seed, *how)
        kernels.fdsr_dequantize(*stored, seed, *how, out)
    assert all(map(torch.equal, stored, expected))
    again = torch.empty_like(out)
    kernels.fdsr_dequantize(*stored, int(seed), *how, again)
    assert torch.equal(out, again)


@pytest.mark.parametrize("op", SEEDED)
def test_schema_and_fake_of_a_seed_in_a_tensor(op):
    args = list(arguments(op, "cpu"))
    at = SPECS[op].schema[: SPECS[op].schema.index(" int seed")].count(",")
    args[at] = torch.tensor([args[at]])
    torch.library.opcheck(getattr(torch.ops.elbowroom, op).seeded, tuple(args))


def equal_bits(one, other):
    """Whether all bytes are the same, those of a NaN, too."""
    return torch.equal(*(x.contiguous().view(torch.uint8) for x in (one, other)))


# --- what waits for a GPU ---

LOOK = {  # whose payloads are as long as they must be: in training others take their place
    *("nonzero_quantize", "sided_quantize", "comet_quantize", "sparse_pack"),
    *CONVERSIONS,  # of a file's states
    "advance",  # counters of steps are the host's
    "fingerprint",  # of the host's parameters alone
}


@pytest.mark.parametrize("op", [op for op in ops.NAMES if op not in LOOK])
def test_what_serves_a_gpu_waits_for_nothing(op):
    """Triton's launcher, in its interpreter; or the reference, where there is no kernel."""
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("the interpreter runs on a CPU")
    from elbowroom.kernels import triton

    where = reference if op in UNSERVED["triton"] else triton
    args = arguments(op, "cpu", 300)
    getattr(where, op)(*args)  # what is kept from the first call
    with NoWaiting():
        getattr(where, op)(*args)


# --- the choice of a backend ---


@pytest.fixture
def fresh_choice():
    """Forget which backends were found, and which gave up, before and after."""

    def forget():
        ops._given_up.clear()
        for chosen in (ops._backend, ops._implementation):
            chosen.cache_clear()

    forget()
    yield
    forget()


@pytest.mark.usefixtures("fresh_choice")
@pytest.mark.parametrize("backend", ["triton", "numba"])
def test_a_missing_backend_is_replaced_and_logged_once(monkeypatch, caplog, backend):
    def import_module(name):
        raise ImportError(f"no {name} here")

    monkeypatch.setattr(ops.importlib, "import_module", import_module)
    with caplog.at_level(logging.WARNING, "elbowroom.kernels"):
        for op in ops.NAMES:
            assert ops._implementation(op, backend) is getattr(reference, op)
    assert caplog.messages == [
        f"backend {backend} is not available (no elbowroom.kernels.{backend} here); "
        "the plain torch reference serves instead"
    ]


@pytest.mark.usefixtures("fresh_choice")
@pytest.mark.parametrize("backend", ["triton", "numba"])
def test_a_backend_serves_every_op(backend):
    pytest.importorskip(backend)
    for op in set(ops.NAMES) - UNSERVED.get(backend, set()):
        home = ops._implementation(op, backend).__module__
        assert home.startswith(f"elbowroom.kernels.{backend}."), op


class CannotCompile(Exception):
    """A failure as a backend declares it."""


@pytest.fixture
def failing(monkeypatch, fresh_choice):
    """A backend whose `pack_bits` raises what `failing.error` holds, and counts its calls."""

    def pack_bits(x):
        fake.calls += 1
        raise fake.error

    fake = SimpleNamespace(
        FAILURES=(CannotCompile,), pack_bits=pack_bits, narrow=reference.narrow, calls=0
    )
    monkeypatch.setattr(ops.importlib, "import_module", lambda name: fake)
    return fake


def test_a_kernel_that_fails_is_replaced_and_logged_once(failing, caplog):
    failing.error = CannotCompile("out of registers")
    x = torch.arange(100)
    with caplog.at_level(logging.WARNING, "elbowroom.kernels"):
        for _ in range(3):
            assert torch.equal(ops._serve("pack_bits", "triton")(x), reference.pack_bits(x))
    assert failing.calls == 1
    assert caplog.messages == [
        "backend triton cannot serve pack_bits (CannotCompile: out of registers); "
        "the plain torch reference serves it from now on"
    ]
    assert ops._implementation("narrow", "triton") is failing.narrow  # the others stay


@pytest.mark.parametrize("error", [ValueError("short"), TypeError("args"), RuntimeError("launch")])
def test_other_errors_of_a_kernel_reach_the_caller(failing, caplog, error):
    failing.error = error
    for calls in (1, 2):
        with pytest.raises(type(error), match=str(error)):
            ops._serve("pack_bits", "triton")(torch.arange(100))
        assert failing.calls == calls
    assert not caplog.messages


def test_triton_declares_what_its_compiler_raises_and_nothing_of_ours():
    pytest.importorskip("triton")
    from triton.compiler.errors import CompileTimeAssertionFailure
    from triton.runtime.errors import InterpreterError, OutOfResources

    failures = ops._failures("triton")
    for error in (CompileTimeAssertionFailure, OutOfResources):
        assert issubclass(error, failures)
    for error in (InterpreterError, ValueError, TypeError, RuntimeError, torch.OutOfMemoryError):
        assert not issubclass(error, failures)
    assert ops._failures("numba") == ()


# --- threads and forks: launch.py's rules ---

SCENE = """
import os, sys, threading, torch
from elbowroom.kernels import ops, reference

x = torch.randn(100_000, generator=torch.Generator().manual_seed(0))
expected = reference.dither_quantize(x, 5, 4, 256)

restored = torch.empty_like(x)
reference.dither_dequantize(*expected, 5, 4, 256, restored)

def same(a, b):  # by NumPy: torch's own parallel loops hang in a forked child
    return (a.view(torch.uint8).numpy() == b.view(torch.uint8).numpy()).all()

def right():
    got = ops.dither_quantize(x, 5, 4, 256)
    out = torch.empty_like(x)
    ops.dither_dequantize(*got, 5, 4, 256, out)
    return all(map(same, got, expected)) and same(out, restored)

torch.set_num_threads(2)
assert right()
"""

FORK = """
import warnings
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Python 3.12 warns of any fork beside threads
    child = os.fork()
if child == 0:
    os._exit(0 if right() and right() else 1)
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 0, status
assert right()
"""

THREADS = """
wrong = []
def work():
    for _ in range(20):
        if not right():
            wrong.append(1)
workers = [threading.Thread(target=work) for _ in range(3)]
for worker in workers: worker.start()
for worker in workers: worker.join()
assert not wrong
"""

FORK_WHILE_LAUNCHING = (
    """
stop = threading.Event()
def work():
    while not stop.is_set():
        right()
worker = threading.Thread(target=work)
worker.start()
for _ in range(5):
"""
    + textwrap.indent(FORK, "    ")
    + """
stop.set()
worker.join()
"""
)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("layer", ["default", "workqueue"])
@pytest.mark.parametrize(
    "scene", [FORK, THREADS, FORK_WHILE_LAUNCHING], ids=["fork", "threads", "fork while launching"]
)
def test_threads_and_forks_do_not_kill_the_process(scene, layer):
    """In a process of its own, because numba chooses its threading layer once for all."""
    environment = {**ENVIRONMENT, "NUMBA_THREADING_LAYER": layer}
    done = subprocess.run(
        [sys.executable, "-c", SCENE + scene],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr


def test_one_thread_gives_the_same_bytes():
    x = torch.randn(100_000)
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            results.append(ops.nonzero_quantize(x.relu(), 5, 4, 64))
    finally:
        torch.set_num_threads(threads)
    assert all(map(torch.equal, *results))


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("op", ops.NAMES)
def test_the_serial_and_the_threaded_twin_of_a_loop_give_the_same_bytes(monkeypatch, op):
    from elbowroom.kernels.numba import launch

    results = []
    for longest in (-1, 10**9):
        monkeypatch.setattr(launch, "SERIAL", longest)
        args = arguments(op, "cpu", 70_000)
        returned = getattr(ops, op)(*args)
        outputs = returned if isinstance(returned, tuple) else (returned,)
        results.append([t for t in (*args, *outputs) if isinstance(t, torch.Tensor)])
    for threaded, serial in zip(*results, strict=True):
        assert torch.equal(threaded, serial)


def test_small_tensors_run_serially(monkeypatch):
    from elbowroom.kernels.numba import launch

    ran = []
    monkeypatch.setattr(launch._pool, "threads", 0)
    monkeypatch.setattr(launch.torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(launch.numba, "set_num_threads", ran.append)  # a threaded loop asks for two
    for n, expected in ((0, []), (11, []), (launch.SERIAL, []), (launch.SERIAL + 1, [2])):
        ops.pack_bits(torch.ones(n))
        assert ran == expected, n


@pytest.mark.usefixtures("two_threads")
def test_two_threads_at_once_in_this_process():
    x = torch.randn(100_000)
    expected = ops.group_quantize(x, 1, 3, 32)
    wrong = []

    def work():
        for _ in range(20):
            if not all(map(torch.equal, ops.group_quantize(x, 1, 3, 32), expected)):
                wrong.append(1)

    workers = [threading.Thread(target=work) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong


@pytest.mark.parametrize(
    "x",
    [
        torch.arange(12.0).view(3, 4).t(),
        torch.arange(10)[1::2],
        torch.tensor(3.0),
        torch.empty(0),
        torch.empty(3, 1, 0).transpose(0, 1),
        torch.ones(2, 2, dtype=torch.bool),
    ],
    ids=lambda x: str(tuple(x.shape)),
)
def test_an_array_is_the_memory_of_its_tensor(x):
    """It has the shape, strides and dtype of `x.numpy()`, and lies at the same address."""
    from elbowroom.kernels.numba import launch

    made, expected = launch.array(x), x.numpy()
    assert (made.shape, made.strides) == (expected.shape, expected.strides)
    assert made.flags.writeable
    assert made.dtype == expected.dtype
    assert np.array_equal(made, expected)
    assert x.numel() == 0 or made.ctypes.data == x.data_ptr()


def test_an_array_keeps_its_tensor_alive():
    """Its memory is not freed, and goes with it."""
    from elbowroom.kernels.numba import launch

    x = torch.full((5,), 3.0)
    alive = weakref.ref(x)
    made = launch.array(x)
    del x
    assert alive() is not None
    del made
    assert alive() is None


def test_bits_of_minus_zero_are_not_those_of_zero():
    """Zeros of both signs are equal, but not the same bits."""
    for value in (0.0, -0.0, 0.0):
        out = torch.ones(8)
        ops.unpack_bits(torch.tensor([255], dtype=torch.uint8), value, out)
        assert torch.equal(out.signbit(), torch.full((8,), value).signbit())


@pytest.mark.parametrize("op", ["dither", "nonzero"])
def test_scale_and_shift_may_lie_in_any_order(op):
    quantize = getattr(ops, f"{op}_quantize")
    x, rows = torch.randn(64).relu(), torch.rand(4, 2) + 0.5
    scale, shift = rows[:, 0], torch.zeros(8)[::2]
    apart = quantize(x, 3, 4, 32, scale, shift, 16)
    together = quantize(x, 3, 4, 32, scale.contiguous(), shift.contiguous(), 16)
    assert all(torch.equal(a, b) for a, b in zip(apart, together, strict=True))
