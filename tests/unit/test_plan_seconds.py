"""Seconds in plans: those of the step's own work, and of what each action really takes."""

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import elbowroom as er
from elbowroom.codecs import BitMask, Dither, Group
from elbowroom.codecs.compact import Coder
from elbowroom.measure.clocks import StepClock, Stopwatch
from elbowroom.measure.rates import Rates, rates
from elbowroom.measure.record import least_times, record, run_recorded
from elbowroom.plan import Exact
from elbowroom.plan.build_problem import build_problem
from elbowroom.plan.make import plain_peak
from elbowroom.plan.menu import option as option_of
from elbowroom.plan.menu import preset_named, shared_s
from elbowroom.plan.precision_floor import ATTENTION
from elbowroom.plan.prices import ATTENTION_LOOK, RESTORE, ROWS, fixed_name, rate_name, seconds_of
from elbowroom.plan.profile import Profile
from elbowroom.plan.site import Reads
from elbowroom.runtime import hooks, saving
from elbowroom.runtime.handles import RebuildHandle

_LOOK_S = 0.5  # that each look takes by the clock that we turn
_WORK_S = {"first": 3.0, "second": 5.0}


class Turned:
    """A clock that goes on only when the user says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def now_s(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Turned:
    """A clock on which every stopwatch runs, and on which looking at an op takes long."""
    turned = Turned()
    monkeypatch.setattr(
        sys.modules["elbowroom.measure.clocks"],
        "Undisturbed",
        lambda: turned,
    )
    for name in ("_finished", "_pack", "_run_as"):
        _slow(monkeypatch, turned, name)
    return turned


def _slow(monkeypatch: pytest.MonkeyPatch, clock: Turned, name: str) -> None:
    """Makes what looks take its time, inside of the pause in which it looks."""
    disable = torch._C.DisableTorchFunction
    if name == "_run_as":
        replaced = hooks.REPLACED

        class Slow:
            def __contains__(self, func: Any) -> bool:
                clock.now += _LOOK_S
                return func in replaced

        monkeypatch.setattr(hooks, "REPLACED", Slow())
        return
    inner = {"_finished": "_decide_on_deferred", "_pack": "_taken"}[name]
    plain_inner: Callable[..., Any] = getattr(saving.Saving, inner)

    def slow_inner(self: Any, *args: Any) -> Any:
        with disable():
            clock.now += _LOOK_S
        return plain_inner(self, *args)

    monkeypatch.setattr(saving.Saving, inner, slow_inner)


class Worker(nn.Module):
    """A layer whose forward takes known seconds."""

    def __init__(self, clock: Turned, seconds: float) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.clock, self.seconds = clock, seconds

    def forward(self, x: Tensor) -> Tensor:
        self.clock.now += self.seconds
        return torch.relu(self.linear(x))


class Net(nn.Module):
    def __init__(self, clock: Turned) -> None:
        super().__init__()
        self.first, self.second = (Worker(clock, seconds) for seconds in _WORK_S.values())

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


def test_looking_is_in_no_second_of_a_profile(clock: Turned) -> None:
    net, x = Net(clock), torch.randn(512, 64)
    watch = StepClock()
    before = clock.now
    recorder = run_recorded(lambda: net(x).sum().backward(), watch, Exact(), 1024, watch.stopwatch)
    looked_s = clock.now - before - sum(_WORK_S.values())
    assert looked_s > 10 * _LOOK_S, "the looks took no time, so nothing is tested"
    seconds = {call.name: call.seconds for call in recorder.modules()}
    assert {name: seconds[name] for name in _WORK_S} == pytest.approx(_WORK_S)
    assert watch.times_s()[-1] == pytest.approx(sum(_WORK_S.values()))
    assert sum(one.producer_s for one in recorder.storages()) <= sum(_WORK_S.values()) + 1e-9


def test_a_stopwatch_stands_still_in_the_outermost_pause(clock: Turned) -> None:
    watch = Stopwatch()
    clock.now += 1
    with watch.paused():
        clock.now += 10
        inside = watch.read()
        with watch.paused():
            clock.now += 100
        clock.now += 1000  # the inner one has ended nothing
    clock.now += 2
    assert watch.seconds_at([inside, watch.read()]) == [1, 3]
    with pytest.raises(ValueError, match="raised"), watch.paused():
        raise ValueError("raised")
    clock.now += 4
    assert watch.seconds_at([watch.read()]) == [7]
    watch.start()
    clock.now += 1
    assert watch.seconds_at([watch.read()]) == [1]


def test_each_moment_takes_the_lesser_of_two_runs() -> None:
    assert least_times([1, 2, 9], [2, 6, 7]) == [1, 2, 3]


def _net() -> tuple[nn.Module, Tensor]:
    layers = [layer for _ in range(5) for layer in (nn.Linear(64, 64), nn.GELU())]
    return nn.Sequential(*layers), torch.randn(4096, 64)


@pytest.fixture(scope="module")
def profiled() -> Profile:
    """A profile of known costs: 1 GB/s each way, 7 ms a tensor to encode and 3 to decode."""
    torch.manual_seed(0)
    net, x = _net()
    profile = record(lambda: net(x).sum().backward())
    codecs = BitMask(), *(Dither(levels=n) for n in (2, 3, 4, 6, 8, 16, 64, 256))
    verbs = {"encode": 0.007, "decode": 0.003}
    return replace(
        profile,
        rates={rate_name(verb, codec): 1e9 for verb in verbs for codec in codecs},
        fixed_s={fixed_name(verb, codec): s for verb, s in verbs.items() for codec in codecs},
    )


def test_a_code_costs_its_fixed_part_and_its_bytes(profiled: Profile) -> None:
    storage = next(s for s in profiled.storages if s.saves[0].site.consumer == "gelu")
    made = option_of(profiled, storage, preset_named("dither, 16 levels"))
    assert made.forward_s == pytest.approx(0.007 + storage.nbytes / 1e9)
    assert made.backward_s == pytest.approx(0.003 + storage.nbytes / 1e9)
    again = option_of(profiled, storage, preset_named("dither, 16 levels"), again=1)
    assert again.backward_s == pytest.approx(2 * made.backward_s)  # also for what is made from it


def test_a_second_forward_costs_python_beside_its_ops() -> None:
    """As often a restored tensor's fixed seconds, and so much for each module inside."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)]
    net, x = nn.Sequential(*blocks), torch.randn(4096, 64)
    profile = replace(record(lambda: net(x).sum().backward()), rates={}, fixed_s={})
    dear = replace(profile, fixed_s={RESTORE: 0.01})
    free, priced = (build_problem(one, exact=True).problem.regions for one in (profile, dear))
    more = {two.name: two.seconds - one.seconds for one, two in zip(free, priced, strict=True)}
    assert [more["0"], more["1"]] == pytest.approx([0.01 * (3 + 2 * 0.1)] * 2)

    def runs_again(profile: Profile) -> int:
        budget = profile.static + int(0.7 * (plain_peak(profile) - profile.static))
        return len(er.plan(profile, budget=budget, exact=True).recompute)

    slow = replace(
        profile, storages=tuple(replace(one, producer_s=0.1) for one in profile.storages)
    )
    assert runs_again(slow) > runs_again(replace(slow, fixed_s={RESTORE: 0.1})) == 0


def test_predicted_seconds_are_what_a_step_of_known_costs_takes(
    profiled: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a plan adds is within a factor of 1.2 of what its step takes on a clock that we turn.

    Every encode, decode and recipe turns it by its cost, and nothing else does.
    """
    spent = {"encode": 0.0, "decode": 0.0}
    _count(monkeypatch, spent)
    torch.manual_seed(0)
    net, x = _net()
    cheap = replace(
        profiled,
        storages=tuple(replace(one, producer_s=0.0) for one in profiled.storages),
    )
    for share in (0.8, 0.7, 0.6):
        # Of what the step itself takes: other tests of the process may hold tensors.
        budget = cheap.static + int(share * (cheap.peak - cheap.static))
        plan = er.plan(cheap, budget=budget, exact=False, recompute=False, codecs=["dither"])
        spent.update(encode=0.0, decode=0.0)
        with er.following(plan, seed=0):
            loss = net(x).sum()
        loss.backward()
        taken_s = sum(spent.values())
        predicted_s = plan.seconds - plan.plain_seconds
        assert taken_s > 0
        assert taken_s / 1.2 <= predicted_s <= 1.2 * taken_s, (share, predicted_s, taken_s)


def _count(monkeypatch: pytest.MonkeyPatch, spent: dict[str, float]) -> None:
    base = sys.modules["elbowroom.codecs.base"]
    encode, decode = base.Codec.encode, base.Encoded.decode_own
    restore = RebuildHandle.restore

    def counted_encode(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        spent["encode"] += 0.007 + x.nbytes / 1e9
        return encode(self, x, *args, **kwargs)

    def counted_decode(self: Any, room: Tensor, *args: Any, **kwargs: Any) -> Any:
        spent["decode"] += 0.003 + room.nbytes / 1e9
        return decode(self, room, *args, **kwargs)

    def counted_restore(self: Any, **kwargs: Any) -> Any:
        spent["decode"] += 0.003
        return restore(self, **kwargs)

    monkeypatch.setattr(Coder, "of", lambda *_: None)  # which would encode by itself
    monkeypatch.setattr(RebuildHandle, "restore", counted_restore)
    monkeypatch.setattr(base.Codec, "encode", counted_encode)
    monkeypatch.setattr(base.Encoded, "decode_own", counted_decode)


class Attending(nn.Module):
    """A norm whose output three layers read, attention, and a layer that reads its result."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
        self.out = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        normed = x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
        q, k, v = (layer(normed).view(4, -1, 4, 16).transpose(1, 2) for layer in self.layers)
        out = nn.functional.scaled_dot_product_attention(q, k, v)
        return x + self.out(out.transpose(1, 2).reshape(x.shape))


_AGAIN_S, _RATE = 0.1, 1e8  # of an attention's forward; bytes a second that are examined


@pytest.fixture(scope="module")
def attended(profiled: Profile) -> tuple[Profile, nn.Module, Tensor]:
    """A profile in which nothing takes time but codes, attention, and a look at its values."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 64), *(Attending() for _ in range(4)))
    x = torch.randn(1024, 64)
    profile = record(lambda: net(x).sum().backward())

    def of(storage: Any) -> float:
        saves = [save.site for save in storage.saves]
        is_output = any(s.consumer == ATTENTION and s.reads is Reads.GRADIENT for s in saves)
        return _AGAIN_S if is_output else 0.0

    storages = tuple(replace(one, producer_s=of(one)) for one in profile.storages)
    rates = {**profiled.rates, ROWS: 1e12, ATTENTION_LOOK: _RATE}
    known = replace(profile, storages=storages, rates=rates, fixed_s=profiled.fixed_s)
    return known, net, x


@pytest.mark.parametrize("share", [0.9, 0.7, 0.6, 0.5])
def test_so_they_are_of_attention_and_of_what_is_made_of_what_is_made_again(
    attended: tuple[Profile, nn.Module, Tensor], monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    """An attention does not run again, and its values are looked at once for all of its tensors.

    Layers that read a norm's output decode its input, through all that lies between.
    """
    profile, net, x = attended
    spent = {"encode": 0.0, "decode": 0.0, "look": 0.0}
    _count(monkeypatch, spent)
    levels = sys.modules["elbowroom.runtime.direct.attention.levels"]
    by_values = levels.levels_by_values

    def counted_look(call: Any, **how: Any) -> Any:
        if call.fewest is None:
            spent["look"] += 3 * x.nbytes / _RATE
        return by_values(call, **how)

    monkeypatch.setattr(levels, "levels_by_values", counted_look)
    replayed = sys.modules["elbowroom.runtime.replay.replay"]
    monkeypatch.setattr(replayed, "levels_by_values", counted_look)
    budget = profile.static + int(share * (profile.peak - profile.static))
    try:
        plan = er.plan(profile, budget=budget, exact=False, recompute=False, codecs=["dither"])
    except er.errors.BudgetTooSmall as error:
        budget = int(1.01 * error.least_nbytes)
        plan = er.plan(profile, budget=budget, exact=False, recompute=False, codecs=["dither"])
    for _ in range(3):  # the last one follows what the first ones have written down
        spent.update(dict.fromkeys(spent, 0.0))
        with er.following(plan, seed=0):
            loss = net(x).sum()
        loss.backward()
    taken_s, predicted_s = sum(spent.values()), plan.seconds - plan.plain_seconds
    assert taken_s > 0
    assert taken_s / 1.3 <= predicted_s <= 1.3 * taken_s, (share, predicted_s, spent)


def test_a_look_at_values_costs_its_fixed_part_too(
    attended: tuple[Profile, nn.Module, Tensor],
) -> None:
    profile, *_ = attended
    saves = ((one, one.saves[0].site) for one in profile.storages)
    storage = next(one for one, site in saves if site.rows is not None and site.by_size)
    dear = replace(profile, fixed_s={**profile.fixed_s, ROWS: 0.01, ATTENTION_LOOK: 0.02})
    found = [option_of(p, storage, preset_named("dither, 16 levels")) for p in (profile, dear)]
    assert found[1].forward_s - found[0].forward_s == pytest.approx(0.01)
    assert [more - once for once, more in zip(*map(shared_s, (profile, dear)), strict=True)] == (
        pytest.approx([0.0, 0.02] * 4)
    )


def test_values_are_not_looked_at_where_only_an_output_is_a_code(
    attended: tuple[Profile, nn.Module, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    profile, net, x = attended
    saves = [(one, save.site) for one in profile.storages for save in one.saves]
    of_attention = {site.name for _, site in saves if site.consumer == ATTENTION}
    outputs = {
        site.name
        for storage, site in saves
        if any(save.site.reads is Reads.GRADIENT for save in storage.saves)
    }
    looks, again = (
        _calls(monkeypatch, "runtime.replay.replay", "levels_by_values"),
        _calls(monkeypatch, "kernels.attention", "gradients"),
    )
    loose = er.plan(profile, budget=profile.peak, exact=False, recompute=False)
    for coded, looked in ((outputs, False), (of_attention | outputs, True)):
        sites = {
            name: replace(entry, preset="dither, 16 levels" if name in coded else "keep")
            for name, entry in loose.sites.items()
        }
        plan = replace(loose, sites=sites, exact=False)
        for _ in range(3):  # the last one follows what the first ones have written down
            looks.clear()
            again.clear()
            with er.following(plan, seed=0) as saved:
                loss = net(x).sum()
            loss.backward()
        assert again, "no attention ran again, so nothing is tested"
        assert bool(looks) is looked, saved.ledger


def _calls(monkeypatch: pytest.MonkeyPatch, module: str, name: str) -> list[Any]:
    """The calls of a function of the package."""
    found: list[Any] = []
    place = sys.modules[f"elbowroom.{module}"]
    plain = getattr(place, name)

    def noted(*args: Any) -> Any:
        found.append(args)
        return plain(*args)

    monkeypatch.setattr(place, name, noted)
    return found


def test_rates_tell_the_fixed_part_from_the_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a codec that takes 2 ms and 1 ns a byte, both are found; other work makes 2 into 5."""
    module = sys.modules["elbowroom.measure.rates"]
    sizes: list[int] = []
    plain = module._sample

    def sample(codec: Any, device: torch.device, elements: int, *, has_zeros: bool = False) -> Any:
        x, facts = plain(codec, device, elements, has_zeros=has_zeros)
        sizes.append(x.nbytes)
        return x, facts

    monkeypatch.setattr(module, "_sample", sample)
    monkeypatch.setattr(module, "busy_s", lambda run, device: 0.002 + sizes[-1] / 1e9)
    monkeypatch.setattr(module, "typical_s", lambda run, between, device: 0.005 + sizes[-1] / 1e9)
    found = Rates(torch.device("cpu"))
    assert found[rate_name("encode", Dither(levels=4))] == pytest.approx(1e9)
    assert found.fixed_s[fixed_name("decode", Dither(levels=16))] == pytest.approx(0.005)

    found.measure_of_zeros(Dither(levels=4))
    assert found["decode dither of zeros"] == pytest.approx(1e9)
    assert found.fixed_s["encode dither of zeros"] == pytest.approx(0.005)


def test_a_code_with_a_bitmap_of_zeros_has_a_price_of_its_own(profiled: Profile) -> None:
    """It takes half as much again to encode and twice as much to decode, as it was measured."""
    fixed = {"decode dither": 1.0, "decode dither of zeros": 2.0}
    known = {"decode dither, 4 levels": 2e6, "decode group": 2e6}
    profile = replace(profiled, rates=known | {"decode dither of zeros": 1e6}, fixed_s=fixed)
    dither, group = Dither(levels=4), Group(bits=2)
    assert seconds_of(profile, "decode", dither, 10**6) == 1.5
    assert seconds_of(profile, "decode", dither, 10**6, has_zeros=True) == 3.0
    assert seconds_of(profile, "decode", group, 10**6, has_zeros=True) == 0.5  # it has no bitmap
    older = replace(profile, rates=known)
    assert seconds_of(older, "decode", dither, 10**6, has_zeros=True) == 1.5
    known = rates("cpu")
    assert {"encode dither of zeros", "decode dither of zeros"} <= known.keys()


def test_a_tensor_that_moves_to_a_file_has_a_fixed_time_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a move that takes 2 ms and 10 ns a byte beside other work, both are found."""
    module = sys.modules["elbowroom.measure.rates"]
    begun = Rates(torch.device("cpu"))
    begun.has_links = False
    links = {"out file": 1e9, "copy out file": 1e9, "in file": 1e9, "copy in file": 1e7}

    def seconds(device: torch.device, elements: int) -> tuple[float, float]:
        return 0.002 + 4 * elements / 1e8, 0.001 + 4 * elements / 1e8

    monkeypatch.setattr(module, "_begun", lambda device_type: begun)
    monkeypatch.setattr(module, "_links", lambda device: links)
    monkeypatch.setattr(module, "_beside_work", seconds)
    found = rates("cpu", lossy=False)
    assert found["copy out file"] == pytest.approx(1e8)
    assert found.fixed_s["copy out file"] == pytest.approx(0.002)
    assert found["copy in file"] == 1e7, "the slower of the two: what it takes alone"
    assert found.fixed_s["copy in file"] == 0.0, "never below zero"


def test_what_moving_takes_is_measured_on_this_machine() -> None:
    """The clock is coarse and the machine may be busy, so that a fixed part of zero is possible."""
    known = rates("cpu")
    for way in ("out", "in"):
        assert 0 <= known.fixed_s[f"copy {way} file"] < 0.1
        assert known[f"copy {way} file"] > 0


def test_a_profile_keeps_fixed_seconds_in_its_file(profiled: Profile, tmp_path: Any) -> None:
    profiled.save(tmp_path / "profile.json")
    assert Profile.load(tmp_path / "profile.json").fixed_s == profiled.fixed_s
