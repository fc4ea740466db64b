"""What a user can get wrong is answered with what was asked, what was found, and what to type."""

import pytest
import torch
from torch import nn

import elbowroom as er
from elbowroom.errors import CodecError, PlanError, UnknownCodec, UnknownField, UnsupportedTensor
from elbowroom.plan import Lean, OffloadRest


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"seed": "x"}, r"seed='x' is not possible; it is an int, or None"),
        ({"seed": 1.5}, r"seed=1.5 is not possible"),
        ({"rebuild": "no"}, r"rebuild='no' is not possible; it is True or False"),
        (
            {"min_nbytes": True},
            r"min_nbytes=True is not possible; it is an int of bytes, 0 or more",
        ),
        ({"min_nbytes": -1}, r"min_nbytes=-1 is not possible"),
        ({"min_nbytes": "a"}, r"min_nbytes='a' is not possible"),
    ],
)
def test_saving(settings, message):
    with pytest.raises(UnknownField, match=message):
        er.saving("dither", **settings)


def test_the_lean_policy():
    with pytest.raises(
        UnknownField,
        match=r"policy 'lean' has no field 'wrong'; it has upper, lower, plain, group_size, fold",
    ):
        er.saving("lean", wrong=1)
    with pytest.raises(UnknownField, match=r"no field 'uper'; .*Did you mean 'upper'\?"):
        er.saving("lean", uper=4)
    with pytest.raises(UnknownField, match=r"policy 'lean': upper=1 is not possible"):
        er.saving("lean", upper=1)
    with pytest.raises(UnknownCodec, match=r"there are exact, keep, lean, .*Did you mean 'lean'"):
        er.saving("leen")
    assert er.saving("lean", plain=6, rebuild=False).policy == Lean(plain=6, rebuild=False)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"wrong": 1},
            r"policy 'offload' has no field 'wrong'; it has tier, directory, from_nbytes, codec\.$",
        ),
        ({"teir": "file"}, r"Did you mean 'tier'\?"),
        ({"tier": "disk"}, r"tier='disk' is not possible; tier is 'host', 'file', or None"),
        ({"directory": 3}, r"directory=3 is not possible; directory is the path of one"),
        ({"directory": "/no/such"}, r"there is no directory '/no/such'; make it, or name another"),
        ({"from_nbytes": -1}, r"from_nbytes=-1 is not possible; from_nbytes is an int of bytes"),
        ({"from_nbytes": True}, r"from_nbytes=True is not possible"),
    ],
)
def test_the_offload_policy(fields, message):
    with pytest.raises(UnknownField, match=message):
        er.saving("offload", **fields)


def test_offload_is_a_policy():
    with pytest.raises(UnknownCodec, match=r"Did you mean 'offload'\?"):
        er.saving("ofload")
    assert er.saving("offload", tier="file", rebuild=False).policy == OffloadRest(
        "file", rebuild=False
    )


def test_fit_and_release():
    model = nn.Linear(2, 2)
    with pytest.raises(PlanError, match=r"fit takes a torch\.optim\.Optimizer; got str"):
        er.fit(model, budget="1 GiB", optimizer="adam")
    with pytest.raises(UnknownField, match="exact='yes' is not possible"):
        er.fit(model, budget="1 GiB", exact="yes")
    with pytest.raises(UnknownField, match="min_nbytes=-3 is not possible"):
        er.fit(model, budget="1 GiB", min_nbytes=-3)
    with pytest.raises(PlanError, match=r"release takes a torch\.nn\.Module; got int"):
        er.release(3)
    with pytest.raises(ValueError, match=r"positive; got 0\. Write bytes, as 6 \* 2\*\*30 or 6e9"):
        er.fit(model, budget=0)


@pytest.mark.parametrize("device", ["nope", [], "xpu", "meta", "cuda:99"])
@pytest.mark.parametrize(
    "verb",
    [
        lambda device: er.measure(lambda: None, device=device),
        lambda device: er.peak(lambda: None, device=device),
        lambda device: er.dry_run(
            nn.Linear(2, 2), lambda: torch.ones(2), loss=lambda m, x: m(x).sum(), device=device
        ),
    ],
    ids=["measure", "peak", "dry_run"],
)
def test_a_device_that_is_none_or_is_elsewhere(verb, device):
    with pytest.raises(
        PlanError, match=r"device=.* (is not possible|is not on this machine).*'cpu'"
    ):
        verb(device)


def test_an_optimizer_and_a_speed_that_are_none():
    model, loss = nn.Linear(2, 2), lambda m, x: m(x).sum()
    with pytest.raises(PlanError, match=r"dry_run takes a torch\.optim\.Optimizer; got int"):
        er.dry_run(model, lambda: torch.ones(2), loss=loss, optimizer=3)
    with pytest.raises(PlanError, match=r"speed is an elbowroom\.measure\.Speed, or None .* got 3"):
        er.dry_run(model, lambda: torch.ones(2), loss=loss, speed=3)
    with pytest.raises(PlanError, match=r"largest_batch takes a torch\.optim\.Optimizer; got int"):
        er.largest_batch(model, torch.ones, budget="1 GiB", loss=loss, optimizer=3)


def test_a_codec_takes_a_tensor():
    with pytest.raises(UnsupportedTensor, match=r"takes a tensor; got list\. Use torch\.as_tensor"):
        er.codec("dither").encode([1.0, 2.0])
    assert torch.equal(er.codec("bitmask").encode(torch.ones(3)).decode(), torch.ones(3))


@pytest.mark.parametrize("id", [None, 3, er.codec("dither")])
def test_an_id_that_is_no_string(id):
    with pytest.raises(
        UnknownCodec, match=r"the id of a codec is a string; got .* There are bitmask, cast"
    ):
        er.codec(id)


@pytest.mark.parametrize("asked", [{"seed": "a"}, {"seed": 1.5}, {"facts": {}}])
def test_a_seed_and_facts_of_other_types(asked):
    with pytest.raises(CodecError, match=r"a seed is an int, and facts are er\.Facts"):
        er.codec("dither").encode(torch.zeros(8), **asked)


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"largest": 2.5}, "smallest and largest are ints"),
        ({"smallest": 5, "largest": 2}, "smallest=5 is above largest=2"),
        ({"has_zeros": "a"}, "is not True or False"),
    ],
)
def test_facts_that_no_tensor_can_fulfil(facts, said):
    with pytest.raises(CodecError, match=said):
        er.Facts(**facts)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.int64, "float32"])
def test_bytes_of_a_dtype_that_is_not_taken(dtype):
    with pytest.raises(UnsupportedTensor, match="takes float32, bfloat16, float16; got"):
        er.codec("dither").encoded_nbytes((3,), dtype)


def _model():
    return nn.Linear(4, 4)


def _batch(n):
    return torch.randn(n, 4)


def _grow(loader=lambda n: [_batch(n)], **settings):
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = {"rule": "none", "batch": 2, **settings}
    growing = er.grow_batch(
        loader, model, optimizer, budget="1 GiB", loss=lambda model, x: model(x).sum(), **settings
    )
    return next(iter(growing))


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda: er.fit(_model(), budget="lots"), "cannot read 'lots' as a size; write bytes"),
        (lambda: er.fit(_model(), budget=float("nan")), "a size in bytes is positive; got nan"),
        (lambda: er.fit(_model(), budget=1.5), "could be bytes or a share of the device"),
        (lambda: er.fit(_model(), budget="150%"), "is no share of a device"),
        (lambda: er.assert_peak(int, "1 XiB"), "cannot read '1 XiB' as a size"),
        (lambda: er.fit(_model(), budget="1 GiB", loss=torch.tensor(1.0)), "got Tensor"),
        (lambda: er.peak(None), "step is a function; got NoneType"),
        (lambda: er.assert_peak(3, "1 GiB"), "step is a function; got int"),
        (lambda: er.step(torch.tensor(1.0)), "run is a function; got Tensor"),
        (lambda: er.log_to()(None, 1), "log takes a torch.nn.Module; got NoneType"),
        (lambda: er.load_snapshot(None), "path is the path of a file, a str or a Path; got None"),
        (lambda: er.load_snapshot("/"), "/ cannot be read .Is a directory"),
        (lambda: er.explain_oom(3), "profile is the path of a file, a str or a Path; got int"),
        (lambda: er.peak(int, device=10**30), "device=1000.* is not possible; it is 'cpu'"),
        (lambda: _grow(lambda n: None), "loader_factory.n. returns an iterable .*; got NoneType"),
        (lambda: _grow(lambda n: [None]), "one row per sample; got NoneType. It must"),
        (lambda: _grow(rule=[]), r"rule=\[\] is not possible; .* is one of 'none'"),
        (lambda: _grow(schedulers=3), "schedulers=3 is not possible; it is a list"),
    ],
)
def test_what_no_function_takes_is_an_error_of_ours(ask, message):
    with pytest.raises(er.errors.ElbowroomError, match=message):
        ask()


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (None, "returns a tensor; this one returned None"),
        (torch.tensor(1.0), r"got a tensor of shape \(\) with no graph"),
        (torch.ones(2, requires_grad=True), r"got a tensor of shape \(2,\) with a graph"),
    ],
)
def test_a_loss_that_backward_cannot_begin_at(found, message):
    model = _model()
    with pytest.raises(PlanError, match=message):
        er.dry_run(model, lambda: _batch(2), loss=lambda model, x: found)
    with pytest.raises(PlanError, match=message):
        er.largest_batch(model, _batch, budget="1 GiB", loss=lambda model, x: found)


def test_a_fitted_model_is_not_measured():
    """Two of its steps saved different tensors, and the message blamed shapes and branches."""
    model = er.fit(nn.Sequential(nn.Linear(256, 256), nn.ReLU()), budget="1 GiB")
    with pytest.raises(PlanError, match=r"call er\.release\(model\) first"):
        er.measure(lambda: model(torch.randn(256, 256)).sum().backward(), model=model)
