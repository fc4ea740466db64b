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
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # Dynamo's own imports
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
