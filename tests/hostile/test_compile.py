"""torch.compile beside us.

Compiled code runs eagerly inside a context, says so, and gets the same gradients.
"""

import pytest
import torch
from torch import nn

import elbowroom as er
from elbowroom.runtime import compiler

pytestmark = [
    pytest.mark.filterwarnings("ignore:Using `torch.compile.module.` when there are global hooks"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # Dynamo's own imports, torch.jit
]


@pytest.fixture(autouse=True)
def silent_again(monkeypatch):
    monkeypatch.setattr(compiler, "_said", False)
    yield
    torch.compiler.reset()


def make():
    torch.manual_seed(0)
    conv = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3))
    return nn.Sequential(conv, nn.Flatten(), nn.Linear(8 * 8 * 8, 10)), torch.randn(4, 1, 12, 12)


def gradients(model, called, x, context=None):
    model.zero_grad()
    if context is None:
        loss = called(x).square().sum()
    else:
        with context:
            loss = called(x).square().sum()
    loss.backward()
    return [p.grad.clone() for p in model.parameters()]


def same(a, b):
    return all(torch.equal(p, q) for p, q in zip(a, b, strict=True))


def test_a_compiled_model_inside_saving():
    model, x = make()
    plain = gradients(model, model, x)
    compiled = torch.compile(model, backend="aot_eager")
    gradients(model, compiled, x)
    saved = er.saving(min_nbytes=0)
    with pytest.warns(UserWarning, match="Sequential is compiled, and runs eagerly inside"):
        assert same(plain, gradients(model, compiled, x, saved))
    assert saved.ledger.after_nbytes < saved.ledger.before_nbytes
    assert "_orig_mod" not in str(saved.ledger)
    gradients(model, compiled, x)  # and compiled again outside


@pytest.mark.parametrize("order", ["fit first", "compile first"])
def test_fit_and_compile_in_either_order(order):
    model, x = make()
    plain = gradients(model, model, x)
    if order == "fit first":
        er.fit(model, budget="1 GiB", min_nbytes=0)
        called = torch.compile(model, backend="aot_eager")
        fitted = model
    else:
        called = torch.compile(model, backend="aot_eager")
        fitted = er.fit(called, budget="1 GiB", min_nbytes=0)
    with pytest.warns(UserWarning, match="is compiled, and runs eagerly inside"):
        assert same(plain, gradients(model, called, x))
    assert same(plain, gradients(model, called, x))
    er.release(fitted)
    gradients(model, called, x)


def test_a_fitted_module_inside_a_compiled_one():
    model, x = make()
    plain = gradients(model, model, x)
    er.fit(model[0], budget="1 GiB", min_nbytes=0)
    called = torch.compile(model, backend="aot_eager")
    close = zip(plain, gradients(model, called, x), strict=True)
    assert all(torch.allclose(p, q, rtol=1e-4, atol=1e-5) for p, q in close)
    er.release(model[0])


class Around(nn.Module):
    """A residual block around another module."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return x + self.inner(x).sin()


COMPILED = {
    "wrapper": lambda inner: torch.compile(inner, backend="aot_eager"),
    "compile()": lambda inner: (inner.compile(backend="aot_eager"), inner)[1],
    "trace": lambda inner: torch.jit.trace(inner, torch.randn(2, 32)),
    "script": torch.jit.script,
}


@pytest.mark.filterwarnings("ignore:Sequential is compiled, and runs eagerly")
@pytest.mark.filterwarnings("ignore:A compiled function is called, and runs eagerly")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.torch.jit:FutureWarning")
@pytest.mark.parametrize("how", COMPILED)
def test_a_compiled_child_of_a_module_that_runs_again(how):
    """Forward has run it eagerly, so the second run does, too."""

    def built():
        torch.manual_seed(0)
        inner = [
            nn.Sequential(nn.BatchNorm1d(32), nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32))
            for _ in range(4)
        ]
        return nn.Sequential(*[Around(COMPILED[how](one)) for one in inner])

    x = torch.randn(256, 32)
    plain = built()
    expected = [gradients(plain, plain, x) for _ in range(3)]
    peak = er.peak(lambda: gradients(plain, plain, x), device="cpu")
    torch.compiler.reset()
    model = built()
    weights = sum(p.nbytes for p in model.parameters())
    er.fit(model, budget=weights + int(0.6 * peak), exact=True)
    found = [gradients(model, model, x) for _ in range(3)]
    assert all(map(same, found, expected))
    assert [one.action for one in er.summary(model).lines if one.action == "recompute"]
    for (name, b), one in zip(model.named_buffers(), plain.buffers(), strict=True):
        assert not name.endswith("num_batches_tracked") or b + 1 == one  # the peak was a step more
    er.release(model)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_contexts_that_close_in_any_order_leave_compiled_code_compiled(order):
    import torch._dynamo.eval_frame as eval_frame

    before = eval_frame._stance
    contexts = [er.saving(), er.saving()]
    for context in contexts:
        context.__enter__()
    assert eval_frame._stance.stance == "force_eager"
    for n in order:
        contexts[n].__exit__(None, None, None)
    assert eval_frame._stance == before
