"""The memory that codecs take beside tensor and code, and that plans count it."""

from contextlib import nullcontext
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

import elbowroom as er
from elbowroom.codecs import Codec, register, registry
from elbowroom.codecs.base import FLOATS, Expected
from elbowroom.codecs.names import setting_name
from elbowroom.codecs.workspace import workspace_of
from elbowroom.plan.registered import all_settings

SHAPE = (1024, 256)


@dataclass(frozen=True)
class Written(Codec):
    """8 bits a value, in tensor operations, each of which has a result of its own."""

    id: ClassVar[str] = "written"
    lossless: ClassVar[bool] = False
    dtypes: ClassVar[tuple[torch.dtype, ...]] = FLOATS

    def _layout(self, n, dtype, facts):
        return Expected(torch.int8, (n,)), Expected(torch.float32, (1,))

    def _encode(self, flat, seed, facts):
        generator = torch.Generator().manual_seed(seed % 2**32)
        scale = flat.float().abs().max() / 126
        noise = torch.rand(len(flat), generator=generator) - 0.5
        return (flat.float() / scale + noise).round().to(torch.int8), scale.reshape(1)

    def _decode_into(self, encoded, out):
        codes, scale = encoded.buffers
        out.copy_(codes * scale)


def seen(codec):
    """Returns what the allocator saw of encoding and decoding, as shares of the tensor."""
    x = torch.randn(SHAPE)
    code = codec.encode(x, 1)
    code.decode()
    encode = er.peak(lambda: codec.encode(x, 1)) - code.nbytes
    decode = er.peak(code.decode) - x.nbytes
    return encode / x.nbytes, decode / x.nbytes


@pytest.mark.parametrize("codec", all_settings(), ids=setting_name)
def test_own_codecs_take_what_is_recorded(codec):
    for found, said in zip(seen(codec), workspace_of(codec), strict=True):
        assert found <= said + 0.005


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_a_codec_of_another_package_takes_is_measured(dtype):
    said = workspace_of(Written())
    assert said.encode > 2
    assert said == pytest.approx(seen(Written()), abs=0.01)


def test_a_plan_says_what_a_step_takes_with_such_a_codec(monkeypatch):
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    register(Written)
    weights = [torch.nn.Parameter(torch.randn(64, 64) / 8) for _ in range(12)]
    x = torch.randn(1024, 64)

    def step(context=None):
        with context or nullcontext():
            out = x
            for weight in weights:
                out = out @ weight
            loss = out.square().mean()
        loss.backward()
        for weight in weights:
            weight.grad = None

    step()
    profile = er.measure(step)
    plan = er.plan(profile, budget=int(0.75 * profile.peak), exact=False, codecs=["written"])
    assert plan.is_lossy
    following = er.following(plan)
    step(following)
    measured = profile.static + er.peak(lambda: step(following))
    assert measured == pytest.approx(plan.peak, rel=0.03)


@pytest.mark.parametrize("codec", ["division", "comet", "dither"])
def test_a_plan_counts_the_copy_that_is_normalized(codec):
    blocks = [
        torch.nn.Sequential(
            torch.nn.LayerNorm(128),
            torch.nn.Linear(128, 512),
            torch.nn.GELU(),
            torch.nn.Linear(512, 128),
        )
        for _ in range(4)
    ]
    net = torch.nn.Sequential(*blocks)
    x = torch.randn(8, 128, 128)

    def step(context=None):
        with context or nullcontext():
            loss = net(x).square().mean()
        loss.backward()
        net.zero_grad()

    step()
    profile = er.measure(step)
    with pytest.raises(er.errors.BudgetTooSmall) as refused:
        er.plan(profile, budget=profile.static, exact=False, codecs=[codec], recompute=False)
    budget = refused.value.least_nbytes
    plan = er.plan(profile, budget=budget, exact=False, codecs=[codec], recompute=False)
    following = er.following(plan)
    step(following)
    measured = profile.static + er.peak(lambda: step(following))
    assert measured == pytest.approx(plan.peak, rel=0.05)


def test_a_codec_of_no_floats_has_none():
    @dataclass(frozen=True)
    class Whole(Written):
        id: ClassVar[str] = "whole"
        dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.int64,)

    assert workspace_of(Whole()) == (0.0, 0.0)
