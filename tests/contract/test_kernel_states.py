"""The one-pass step of every backend equals the reference, bit for bit."""

import pytest
import torch

from elbowroom.kernels import numba, reference, states, triton

pytestmark = pytest.mark.usefixtures("poisoned_memory")
FACTORS = {
    "adamw": [1 - 1e-5, 1e-3, 0.9, 0.1, 0.999, 0.001, 1.3, 1e-8],
    "lion": [1 - 1e-5, 1e-3, 0.9, 0.1, 0.99, 0.01],
    "sgd": [1e-4, 0.05, 0.9, 0.9, 1.0],
}
KINDS = [
    ("adamw", "fp32", "fp32"),
    ("adamw", "expanded8", "expanded8"),
    ("adamw", "softsign8", "log8"),
    ("adamw", "softsign8", "log4"),
    ("adamw", "softsign4", "log4"),
    ("lion", "softsign8", "none"),
    ("sgd", "softsign4", "none"),
    ("sgd", "expanded8", "none"),
]
WEIGHTS = [
    (torch.float32, "nearest"),
    (torch.bfloat16, "residual"),
    (torch.bfloat16, "sr"),
    (torch.float16, "nearest"),
]


def empty(kind: str, n: int, row: int) -> list[torch.Tensor]:
    dtype = states.CODES.get(kind, torch.uint8)
    return [
        torch.zeros(states.code_shape(kind, n, row), dtype=dtype),
        torch.zeros(states.bound_shape(kind, n, row), dtype=torch.int16),
    ]


def gradients(n: int, dtype: torch.dtype, generator: torch.Generator) -> list[torch.Tensor]:
    """Plain; wide and with zeros; so small that squares vanish; so large that they overflow."""
    made = []
    for scale in (1.0, 1e-5, 1e-30, 1e25):
        g = torch.randn(n, generator=generator)
        g *= torch.exp2(torch.randint(-20, 4, (n,), generator=generator).float())
        g[: n // 9] = 0
        made.append((g * scale).to(dtype))
    return [g for g in made if g.isfinite().all()]


@pytest.mark.parametrize(("rule", "first", "second"), KINDS)
@pytest.mark.parametrize(("dtype", "weights"), WEIGHTS)
@pytest.mark.parametrize(("rows", "row"), [(7, 128), (5, 333), (3, 37), (1, 1), (600, 150)])
@pytest.mark.parametrize(
    "backend",
    [pytest.param(numba, id="numba"), pytest.param(triton, id="triton", marks=pytest.mark.sampled)],
)
def test_every_backend_equals_the_reference(
    backend, rule, first, second, dtype, weights, rows, row
):
    if row == 150 and (backend is triton or dtype is not torch.float32):
        return  # large: run in parallel, which takes seconds to compile for each width of weights
    generator, n = torch.Generator().manual_seed(rows), rows * row
    p = torch.randn(n, generator=generator).to(dtype)
    residual = torch.zeros(n, dtype=torch.int8) if weights == "residual" else None
    ours = [p.clone(), residual, *empty(first, n, row), *empty(second, n, row)]
    theirs = [None if x is None else x.clone() for x in ours]
    for step, g in enumerate(gradients(n, dtype, generator)):
        settings = (rule, weights, first, second, row, FACTORS[rule], (step << 32) | 77)
        for where, held in ((reference, ours), (backend, theirs)):
            where.optimizer_step(held[0], held[1], g, *held[2:], *settings)
        for a, b in zip(ours, theirs, strict=True):
            assert a is None or torch.equal(a, b)
