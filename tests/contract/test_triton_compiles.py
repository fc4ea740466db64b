"""Triton's kernels compile for a GPU, without one: to machine code, by the ptxas inside Triton.

The interpreter knows neither the compiler's limits nor its liberties. Here: every kernel compiles,
and nothing in it is fused, divided approximately or flushed to zero, for each would alter bits.
One form of each kernel, with `--all` all of them.

    python tests/contract/test_triton_compiles.py 90 --all   for compute capability 9.0; a line each
"""

import os
import re
import subprocess
import sys

import pytest
import torch

DTYPES = {
    torch.float32: "*fp32",
    torch.int8: "*i8",
    torch.float16: "*fp16",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.uint8: "*u8",
}
_LARGE = 150_000
INEXACT = r"fma\.\S+|(?:div|sqrt)\.(?:full|approx)\S+|\S+\.ftz\S*"


@pytest.mark.parametrize("capability", [90])  # 80 by hand: a minute each
def test_every_kernel_compiles_and_keeps_its_bits(capability, tmp_path, pytestconfig):
    pytest.importorskip("triton")
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": os.pathsep.join(sys.path), "TRITON_CACHE_DIR": str(tmp_path)}
    every_form = pytestconfig.getoption("--all") or torch.cuda.is_available()
    done = subprocess.run(
        [sys.executable, __file__, str(capability), *(["--all"] if every_form else [])],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    lines = done.stdout.splitlines()
    assert {line.split()[0] for line in lines} == {
        *("maps.sum_blocks", "maps.finish_ranges"),
        *(f"comet._{name}" for name in ("measure", "encode", "decode", "restore")),
        *("affine._affine", "bits._pack", "bits._unpack", "bits._masked", "narrow._narrow"),
        *("nonzero._sizes", "sided._sizes", "step._step", "fdsr_reuse.finish_codebook"),
        *(f"sparse._{name}" for name in ("sizes", "pack", "unpack")),
        *(f"{op}._{verb}" for op in KINDS for verb in ("quantize", "dequantize")),
    }
    for line in lines:
        wanted = "['fma.rn.f32']" if "'M_KIND': 3" in line else "[]"  # powers are by such alone
        assert line.endswith(f"inexact: {wanted}"), line


KINDS = ("group", "dither", "nonzero", "division", "sided", "fp8", "fdsr")

FDSR = (  # dtype, block, levels, kept, dither: large tiles take 14 s, and have the same parts
    (torch.float16, 4, (63, 15, 3, 0), 64, True),
    (torch.float32, 7, (63, 15, 3, 0), 0, False),
    (torch.bfloat16, 4, (16, 3), 0, True),
)
STATES = (  # rule, dtype, weights, kinds of m and v: each kind once
    ("adamw", torch.float32, "nearest", "softsign8", "log8"),
    ("adamw", torch.float16, "nearest", "fp32", "fp32"),
    ("adamw", torch.bfloat16, "residual", "expanded8", "expanded8"),
    ("adamw", torch.bfloat16, "sr", "softsign4", "log4"),
    ("lion", torch.float32, "nearest", "softsign8", "none"),
    ("sgd", torch.float32, "nearest", "softsign4", "none"),
)
COMET = (  # the others have the same parts, and take 3 s each
    (torch.float32, "dither", False, (0, 0, 0)),
    (torch.bfloat16, "nearest", True, (5, 10, 4)),
)


def compiling(capability, every_form):
    """A stand-in for `launch` that compiles the kernel for these arguments, and runs nothing.

    Unless `every_form` is wanted, only for the first arguments that each kernel is given; and once
    more for the first that have a spill, or whose seed lies in a tensor, if it is small: large ones
    take seconds, and their forms differ by the same few lines.
    """
    import triton
    from triton.backends.compiler import GPUTarget

    compiled = {}  # bytes of cubin, by kernel and whether it has a spill

    def launch(kernel, tiles, *args, R=None, **constants):
        names = kernel.arg_names
        spills = "p_spill" in names and args[names.index("p_spill")] is not None
        lies = "seed_low" in names and isinstance(args[names.index("seed_low")], torch.Tensor)
        spills = spills or lies
        is_large = compiled.get((id(kernel), False), 0) > _LARGE
        if ((id(kernel), spills) in compiled or (spills and is_large)) and not every_form:
            return
        signature, fixed, facts = {}, {}, {}
        for i, (name, arg) in enumerate(zip(names, args, strict=False)):
            if isinstance(arg, torch.Tensor):
                signature[name] = DTYPES[arg.dtype]
                facts[(i,)] = [["tt.divisibility", 16]]
            elif arg is None:
                signature[name], fixed[(i,)] = "constexpr", None
            elif isinstance(arg, float):
                signature[name] = "fp32"
            else:
                signature[name] = "i32" if -(2**31) <= arg < 2**31 else "i64"
        if "FUSED" in constants:  # as on a GPU
            constants["FUSED"], R = True, 8
        for name, value in (constants | {"R": R or 1}).items():
            signature[name], fixed[(names.index(name),)] = "constexpr", value
        source = triton.compiler.ASTSource(kernel, signature, fixed, facts)
        target = GPUTarget("cuda", capability, 32)
        done = triton.compile(source, target=target, options={"enable_fp_fusion": False})
        inexact = sorted(set(re.findall(INEXACT, done.asm["ptx"])))
        home = kernel.__module__.split(".")[-1]
        size = compiled[id(kernel), spills] = len(done.asm["cubin"])
        line = f"{home}.{kernel.__name__} {constants} {size} bytes of cubin, inexact: {inexact}"
        sys.stdout.write(line + "\n")

    return launch


def main(capability, *, every_form):
    """Every kernel, and the quick ones in each dtype and way of packing."""
    import importlib

    from elbowroom.kernels import states
    from elbowroom.kernels import triton as kernels

    quantizers = ("comet", "dither", "division", "fdsr", "fp8", "group", "nonzero", "sided")
    launch = compiling(capability, every_form)
    for module in ("affine", "bits", "launch", "narrow", "sparse", "step", *quantizers):
        importlib.import_module(f"{kernels.__name__}.{module}").launch = launch
    for dtype, levels, group_size in (
        (torch.float32, 4, 256),
        (torch.float16, 3, 64),
        (torch.bfloat16, 8, 32),
    ):
        x = torch.zeros(5000, dtype=dtype)
        by = torch.zeros(3), torch.zeros(3), 7, kernels.pack_bits(x)
        stored = kernels.group_quantize(x, 5, levels, group_size, *by[:3])
        kernels.group_dequantize(*stored, levels, group_size, x)
        kernels.group_dequantize(*stored, levels, group_size, x, *by)
        stored = kernels.dither_quantize(x, 5, levels, group_size)
        kernels.dither_dequantize(*stored, 5, levels, group_size, x)
        kernels.dither_dequantize(*stored, 5, levels, group_size, x, *by)
        seed = torch.zeros(1, dtype=torch.int64)
        stored = kernels.dither_quantize(x, seed, levels, group_size)
        kernels.dither_dequantize(*stored, seed, levels, group_size, x)
        for maps in ([8, 25, 25, 1], [8, 5, 5, 25], [5, 1, 1000, 1])[: 3 if levels == 4 else 1]:
            stored = kernels.division_quantize(x, 5, levels, 8, 0, maps)
            kernels.division_dequantize(*stored, 5, levels, 8, 0, maps, True, x)
        stored = kernels.fp8_quantize(x, group_size, "e4m3")
        kernels.fp8_dequantize(*stored, group_size, "e4m3", x)
        bits = kernels.pack_bits(x)
        kernels.unpack_bits(bits, 1.0, x)
        kernels.masked(x, bits, x)
        kernels.affine(x, torch.zeros(3), torch.zeros(3), 7, bits, x)
        kernels.affine(x, torch.zeros(3), torch.zeros(3), 1, None, x)
    into = payload, spill, _ = (*torch.empty(2, 5000, dtype=torch.uint8), torch.zeros(1))
    for dtype, rounding, aware, maps in COMET:
        x = torch.zeros(5000, dtype=dtype)
        settings = torch.zeros(3), 5, rounding
        stored = kernels.comet_quantize(x, *settings, aware, *maps)
        kernels.comet_dequantize(*stored, *settings, *maps, x)
        stored = kernels.comet_quantize_into(x, *settings, aware, *maps, *into)
        kernels.comet_dequantize(*stored, payload, *settings, *maps, x, spill)
    x = torch.zeros(5000, dtype=torch.bfloat16)
    bits = kernels.pack_bits(x)
    stored = kernels.sided_quantize(x, bits, 5, 4, 2, 64, 8)
    kernels.sided_dequantize(bits, *stored, 5, 4, 2, 64, 8, x, *by)
    bounds = kernels.sided_quantize_into(x, bits, 5, 4, 2, 64, 8, *into)
    kernels.sided_dequantize(bits, payload, bounds, 5, 4, 2, 64, 8, x, *by, 0, spill)
    x = torch.zeros(5000)
    stored = kernels.nonzero_quantize(x, 5, 4, 64)
    kernels.nonzero_dequantize(*stored, 5, 4, 64, x)
    kernels.nonzero_dequantize(*stored, 5, 4, 64, x, *by)
    bits, bounds = kernels.nonzero_quantize_into(x, 5, 4, 64, *into)
    kernels.nonzero_dequantize(bits, payload, bounds, 5, 4, 64, x, *by, 0, spill)
    for dtype in (torch.int32, torch.uint8, torch.int16, torch.int64):
        words, kept = torch.zeros(2, 5000, dtype=dtype)
        bits = kernels.sparse_pack_into(words, kept, kept, torch.zeros(1, dtype=torch.int64))
        kernels.sparse_unpack(bits, kept, kept, words)
    for dtype, block, levels, kept, dither in FDSR:
        x = torch.zeros(5000, dtype=dtype)
        settings = 5, [2, 50, 50, 1], block, levels, kept, dither
        kernels.fdsr_dequantize(*kernels.fdsr_quantize(x, *settings), *settings, x)
    kernels.narrow(torch.zeros(5000, dtype=torch.int64), torch.uint8)
    for rule, dtype, weights, *kinds in STATES:
        x, residual = torch.zeros(5120, dtype=dtype), torch.zeros(5120, dtype=torch.int8)
        held = [residual] if weights == "residual" else []
        codes = [torch.zeros(5120, dtype=states.CODES.get(kind, torch.uint8)) for kind in kinds]
        bounds = [torch.zeros(80, dtype=torch.int16)]
        stored = codes[:1], bounds, codes[1:], bounds
        for several in 1, 2:  # with a launch of its own, and with a search
            lists = [some * several for some in ([x], held, [x], *stored)]
            numbers = [512] * several, torch.zeros(several, 8), [5] * several
            kernels.optimizer_step(*lists, rule, weights, *kinds, *numbers, residual[:1].int())


if __name__ == "__main__":
    main(int(sys.argv[1]), every_form="--all" in sys.argv)
