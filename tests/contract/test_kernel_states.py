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


class Many:
    """Parameters of one format with all that a step takes; `rows` is (rows, elements of a row)."""

    def __init__(self, dtype, weights, rule, kinds, shapes, seed=0):
        self.draw = torch.Generator().manual_seed(seed)
        self.rule, self.weights, self.kinds, self.shapes = rule, weights, kinds, shapes
        self.params = [torch.randn(d * r, generator=self.draw).to(dtype) for d, r in shapes]
        has = weights == "residual" and dtype is torch.bfloat16
        self.residuals = [torch.zeros(d * r, dtype=torch.int8) for d, r in shapes] if has else []
        self.states = [[], [], [], []]
        for at, kind in enumerate(kinds):
            for d, r in shapes if kind != "none" else []:
                codes, bounds = empty(kind, d * r, r)
                self.states[2 * at].append(codes)
                if kind != "fp32":
                    self.states[2 * at + 1].append(bounds)

    def tensors(self):
        return [*self.params, *self.residuals, *(x for some in self.states for x in some)]

    def step(self, backend, grads, step, skip=None):
        factors = torch.zeros(len(self.params), 8)
        for i in range(len(self.params)):  # each has a step, and a rate, of its own
            factors[i, : len(FACTORS[self.rule])] = torch.tensor(FACTORS[self.rule])
            factors[i, 1] *= 1 + 0.1 * i
        backend.optimizer_step(
            *(self.params, self.residuals, grads, *self.states, self.rule, self.weights),
            *(*self.kinds, [r for _, r in self.shapes], factors),
            *([(step + i << 32) | (77 + i) for i in range(len(self.params))], skip),
        )


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
    if row == 150 and backend is triton:
        return  # large
    ours, theirs = (Many(dtype, weights, rule, (first, second), [(rows, row)]) for _ in range(2))
    for step, g in enumerate(gradients(rows * row, dtype, ours.draw)):
        ours.step(reference, [g], step)
        theirs.step(backend, [g], step)
        assert all(map(torch.equal, ours.tensors(), theirs.tensors()))


SHAPES = [(40, 32), (1, 32), (0, 7), (3, 150), (1, 1), (64, 129), (700, 130), (2, 5000), (1, 32)]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("rule", "first", "second"), KINDS)
@pytest.mark.parametrize(("dtype", "weights"), WEIGHTS)
@pytest.mark.parametrize("backend", [numba, triton], ids=["numba", "triton"])
def test_many_parameters_in_one_call_have_the_bits_of_one_call_each(
    backend, rule, first, second, dtype, weights
):
    if backend is triton and (rule, weights) not in (("adamw", "residual"), ("sgd", "sr")):
        return  # its interpreter is slow
    shapes = [shape for shape in SHAPES if backend is numba or shape[0] * shape[1] < 1500]
    ours, theirs = (Many(dtype, weights, rule, (first, second), shapes) for _ in range(2))
    every = [gradients(d * r, dtype, ours.draw) for d, r in shapes]
    for step in range(min(map(len, every))):
        grads = [some[step] for some in every]
        ours.step(reference, grads, step)
        theirs.step(backend, grads, step)
        assert all(map(torch.equal, ours.tensors(), theirs.tensors()))


@pytest.mark.parametrize("backend", [reference, numba, triton], ids=["torch", "numba", "triton"])
def test_a_step_that_is_skipped_writes_nothing(backend):
    many = Many(torch.bfloat16, "residual", "adamw", ("softsign8", "log8"), [(3, 40), (2, 150)])
    grads = [torch.ones_like(p) for p in many.params]
    before = [x.clone() for x in many.tensors()]
    many.step(backend, grads, 1, torch.tensor(1, dtype=torch.int32))
    assert all(map(torch.equal, before, many.tensors()))
    many.step(backend, grads, 1, torch.tensor(0, dtype=torch.int32))
    assert not any(map(torch.equal, before[:2], many.params))


@pytest.mark.parametrize("backend", [reference, numba], ids=["torch", "numba"])
@pytest.mark.parametrize("limit", [torch.finfo(torch.float32).max, 2.0**63.995])
def test_one_element_that_is_not_finite_or_too_large_is_found(backend, limit):
    dtypes = torch.float32, torch.bfloat16, torch.float16
    draw = torch.Generator().manual_seed(0)
    xs = [torch.randn(n, generator=draw).to(d) for d in dtypes for n in (1, 0, 37, 70000)]
    xs.append(torch.tensor(-2.0))
    assert backend.beyond([], limit) == backend.beyond(xs[1:2], limit) == 0
    for large in (torch.nan, -torch.nan, torch.inf, -torch.inf, 1.8e19, -1.9e19, 3e38, 65504.0):
        for x in xs:
            if not x.numel():
                continue
            at = int(torch.randint(x.numel(), (), generator=draw))
            held, x.view(-1)[at] = x.view(-1)[at].clone(), large
            value = x.view(-1)[at].float()
            expected = not bool(value.abs() <= limit)
            assert backend.beyond(xs, limit) == backend.beyond([x], limit) == expected
            x.view(-1)[at] = held
        assert backend.beyond(xs, limit) == 0


@pytest.mark.parametrize("backend", [reference, numba], ids=["torch", "numba"])
def test_counters_are_advanced(backend):
    counters = [torch.tensor(float(i)) for i in (0, 3, 2**24 - 2)]
    assert backend.advance(counters, 1).tolist() == [1, 4, 2**24 - 1]
    assert backend.advance(counters, -1).tolist() == [0, 3, 2**24 - 2]
    assert [x.item() for x in counters] == [0, 3, 2**24 - 2]
