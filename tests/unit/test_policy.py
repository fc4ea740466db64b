"""Site facts in, action out: pure data, no tensor."""

import itertools

import pytest
import torch

from elbowroom.codecs import (
    BitMask,
    Cast,
    Dither,
    Facts,
    Group,
    Narrow,
    Sided,
    SparseLossless,
    codec,
    codecs,
)
from elbowroom.errors import UnknownField
from elbowroom.plan import (
    Encode,
    Exact,
    Keep,
    KeepAll,
    Lean,
    Lossy,
    Need,
    Offload,
    OffloadRest,
    Rebuild,
    Rebuildable,
    Site,
)


def site(**changes):
    facts = {
        "module": "layer1.0",
        "consumer": "conv2d",
        "producer": "relu",
        "shape": (8, 8),
        "dtype": torch.float32,
        "nbytes": 256,
        "need": Need.EXACT,
        "why": "it is a secret",
    }
    return Site(**{**facts, **changes})


FACTS = (
    Facts(),
    Facts(has_zeros=True),
    Facts(value=1.25),
    Facts(smallest=0, largest=300),
)
ALL_SITES = [
    site(need=need, rebuildable=rebuildable, dtype=dtype, facts=facts)
    for need, rebuildable, dtype, facts in itertools.product(
        Need,
        Rebuildable,
        (torch.float32, torch.float64, torch.int64, torch.bool, torch.complex64),
        FACTS,
    )
]
POLICIES = [KeepAll(), Exact(), Exact(rebuild=False), Lean(), Lean(rebuild=False)]
POLICIES += [Lossy(codec(id), rebuild) for id in codecs() for rebuild in (True, False)]


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_every_site_gets_an_action_that_can_be_performed(policy):
    for each in ALL_SITES:
        action = policy(each)
        assert policy(each) == action  # the same each time
        match action:
            case Keep(why):
                assert why
            case Rebuild():
                assert each.need is Need.SHAPE or each.rebuildable is not Rebuildable.NO
            case Encode(chosen, facts):
                assert each.need is Need.MASK or each.dtype in chosen.dtypes
                assert facts.value is not None or facts == each.facts


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_what_is_needed_exactly_is_never_lossy(policy):
    for each in ALL_SITES:
        action = policy(each)
        if each.need is Need.EXACT:
            assert not isinstance(action, Encode) or action.codec.lossless
            assert not isinstance(action, Rebuild) or each.rebuildable is Rebuildable.EXACT


def test_exact_policies_are_exact():
    for policy, each in itertools.product([Exact(), Exact(rebuild=False)], ALL_SITES):
        action = policy(each)
        assert not isinstance(action, Encode) or action.codec.lossless
        if isinstance(action, Rebuild):
            assert each.need is Need.SHAPE or (
                each.rebuildable is Rebuildable.EXACT and policy.rebuild
            )


def test_keep_all_keeps_all():
    assert {KeepAll()(each) for each in ALL_SITES} == {Keep("the policy keeps everything")}


@pytest.mark.parametrize(
    ("changes", "action"),
    [
        ({}, Keep("it is a secret")),
        ({"why": ""}, Keep("no exact action applies")),
        ({"need": Need.SHAPE}, Rebuild()),
        ({"need": Need.MASK}, Encode(BitMask(), Facts(value=1.0))),
        (
            {"need": Need.MASK, "rebuildable": Rebuildable.EXACT},
            Encode(BitMask(), Facts(value=1.0)),
        ),
        ({"dtype": torch.bool}, Encode(BitMask(), Facts(value=1.0))),
        ({"facts": Facts(value=2.0)}, Encode(BitMask(), Facts(value=2.0))),
        ({"dtype": torch.int64, "facts": Facts(largest=9)}, Encode(Narrow(), Facts(largest=9))),
        ({"dtype": torch.int64}, Keep("it is a secret")),
        ({"dtype": torch.float32, "facts": Facts(largest=9)}, Keep("it is a secret")),
        ({"rebuildable": Rebuildable.EXACT}, Rebuild()),
        ({"rebuildable": Rebuildable.LOSSY}, Keep("it is a secret")),
        ({"rebuildable": Rebuildable.LOSSY, "need": Need.LOSSY}, Keep("it is a secret")),
    ],
)
def test_the_exact_policy(changes, action):
    assert Exact()(site(**changes)) == action


def test_without_rebuilding():
    assert Exact(rebuild=False)(site(rebuildable=Rebuildable.EXACT)) == Keep("it is a secret")
    lossy = Lossy(Dither(), rebuild=False)
    assert lossy(site(rebuildable=Rebuildable.EXACT, need=Need.LOSSY)) == Encode(Dither(), Facts())


@pytest.mark.parametrize(
    ("changes", "action"),
    [
        ({"need": Need.LOSSY}, Encode(Dither(), Facts())),
        (
            {"need": Need.LOSSY, "facts": Facts(has_zeros=True)},
            Encode(Dither(), Facts(has_zeros=True)),
        ),
        ({"need": Need.LOSSY, "rebuildable": Rebuildable.LOSSY}, Rebuild()),
        ({"need": Need.LOSSY, "rebuildable": Rebuildable.EXACT}, Rebuild()),
        (
            {"need": Need.LOSSY, "dtype": torch.float64},
            Keep("codec 'dither' does not take float64"),
        ),
        ({"need": Need.LOSSY, "facts": Facts(value=2.0)}, Encode(BitMask(), Facts(value=2.0))),
        ({"need": Need.EXACT}, Keep("it is a secret")),
        ({"need": Need.MASK}, Encode(BitMask(), Facts(value=1.0))),
        ({"need": Need.EXACT, "rebuildable": Rebuildable.LOSSY}, Keep("it is a secret")),
        ({"need": Need.EXACT, "rebuildable": Rebuildable.EXACT}, Rebuild()),
    ],
)
def test_the_lossy_policy(changes, action):
    assert Lossy(Dither())(site(**changes)) == action


LOSSY = {"need": Need.LOSSY, "curved": False}


@pytest.mark.parametrize(
    ("changes", "action"),
    [
        ({}, Encode(Dither(levels=4), Facts())),
        (
            {"consumer": "batch_norm", "shape": (16, 8, 8, 8)},
            Encode(Dither(levels=4), Facts(), Sided(4, 2), Sided(4, 4, 64, 8), Sided(4, 4, 64, 8)),
        ),
        (
            {"consumer": "batch_norm", "shape": (8, 8, 8, 8)},  # 512 elements a channel
            Encode(Dither(levels=4), Facts(), Sided(4, 2), Sided(4, 4, 64, 4), Sided(4, 4, 64, 4)),
        ),
        (
            {"consumer": "batch_norm", "shape": (511, 8)},
            Encode(Dither(levels=4), Facts(), Sided(4, 2)),
        ),
        ({"consumer": "layer_norm"}, Encode(Dither(levels=4), Facts())),
        (
            {"consumer": "batch_norm", "facts": Facts(has_zeros=True)},
            Encode(Dither(levels=4), Facts(has_zeros=True)),
        ),
        ({"facts": Facts(has_zeros=True)}, Encode(Dither(levels=4), Facts(has_zeros=True))),
        ({"rebuildable": Rebuildable.LOSSY}, Rebuild()),
        ({"rebuildable": Rebuildable.EXACT}, Rebuild()),
        ({"dtype": torch.float64}, Keep("dither does not take float64")),
        ({"facts": Facts(value=2.0)}, Encode(BitMask(), Facts(value=2.0))),
        ({"need": Need.MASK}, Encode(BitMask(), Facts(value=1.0))),
        ({"need": Need.EXACT}, Keep("it is a secret")),
        ({"need": Need.EXACT, "rebuildable": Rebuildable.LOSSY}, Keep("it is a secret")),
        ({"need": Need.SHAPE}, Rebuild()),
    ],
)
def test_the_lean_policy(changes, action):
    assert Lean()(site(**LOSSY | changes)) == action


def test_the_lean_policys_fields():
    lean = Lean(upper=8, lower=3, plain=6, group_size=128)
    norm = site(**LOSSY, consumer="batch_norm", shape=(1024, 8))
    found = Sided(8, 3, 128), Sided(8, 4, 128, 8), Sided(6, 4, 128, 8)
    assert lean(norm) == Encode(Dither(6, 128), Facts(), *found)
    alone = Lean(upper=8, lower=3, plain=6, group_size=128, fold=1)
    assert alone(norm) == Encode(Dither(6, 128), Facts(), Sided(8, 3, 128))
    zeros = Facts(has_zeros=True)
    assert lean(site(**LOSSY, facts=zeros)) == Encode(Dither(8, 128), zeros)


def test_the_lean_policy_without_rebuilding():
    lean = Lean(rebuild=False)
    changed = {"rebuildable": Rebuildable.EXACT, "consumer": "batch_norm"}
    assert lean(site(**LOSSY | changed)) == Encode(Dither(levels=4), Facts())  # nobody shares it
    assert lean(site(**changed)) == Keep("it is a secret")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"upper": 1}, r"policy 'lean': upper=1 is not possible; upper is an int from 2 to 256"),
        ({"lower": 2.0}, r"policy 'lean': lower=2.0 is not possible"),
        ({"plain": 257}, r"policy 'lean': plain=257 is not possible"),
        ({"plain": True}, r"policy 'lean': plain=True is not possible"),
        ({"group_size": 100}, r"policy 'lean': group_size=100 .* one of 32, 64, 128, 256"),
        ({"group_size": 64.0}, r"policy 'lean': group_size=64.0 is not possible"),
        ({"fold": 2}, r"policy 'lean': fold=2 is not possible; fold is one of 1, 4, 8, 16"),
        ({"fold": True}, r"policy 'lean': fold=True is not possible"),
    ],
)
def test_the_lean_policys_fields_are_checked(fields, message):
    with pytest.raises(UnknownField, match=message):
        Lean(**fields)


def test_policies_compare_as_data():
    assert Lean() == Lean(upper=4) != Lean(upper=5)
    assert Lossy(Group(bits=2)) == Lossy(Group(bits=2)) != Lossy(Group(bits=3))
    assert Lossy(Cast()) != Lossy(SparseLossless())
    assert hash(Exact()) == hash(Exact())


def test_offload_comes_after_all_other_exact_actions():
    policy = OffloadRest("file", directory="there", from_nbytes=1000)
    assert policy(site(nbytes=1000)) == Offload("file", "there")
    assert policy(site(nbytes=1000, need=Need.EXACT)) == Offload("file", "there")
    assert policy(site(nbytes=999)) == Keep("too small to be worth a transfer")
    assert isinstance(policy(site(nbytes=5000, need=Need.MASK)), Encode)
    assert policy(site(nbytes=5000, need=Need.SHAPE)) == Rebuild()
    exact = site(nbytes=5000, rebuildable=Rebuildable.EXACT)
    assert policy(exact) == Rebuild()
    assert OffloadRest(rebuild=False)(site(nbytes=1 << 20, rebuildable=Rebuildable.EXACT)) == (
        Offload()
    )
