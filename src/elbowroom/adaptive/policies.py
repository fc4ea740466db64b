"""Returns the policy and the meter for the arguments of `er.saving`.

Policies that change during training are cached for the process by their settings, because a context
lasts for one forward only.
"""

import dataclasses
import os
from collections.abc import Iterable
from functools import partial
from typing import Any

from elbowroom.adaptive.actnn import ActNN
from elbowroom.adaptive.noise_budget import LeanBudget, NoiseBudget
from elbowroom.codecs import Codec, codec, codecs
from elbowroom.codecs.names import setting_named
from elbowroom.codecs.quality import broken_promise, is_own
from elbowroom.codecs.registry import POLICIES, nearest
from elbowroom.errors import CodecError, UnknownCodec, UnknownField
from elbowroom.measure import NoiseMeter
from elbowroom.plan import Coat, Exact, KeepAll, Lean, Lossy, OffloadRest, Policy
from elbowroom.runtime.context import PROCESS

_UNIFORM: dict[str, type[Lean | Coat]] = {"lean": Lean, "coat": Coat}


def policy_of(policy: str | Codec | Policy | None, rebuild: bool, fields: dict[str, Any]) -> Policy:
    """An id with its fields, a codec, or a function of a Site.

    Raises UnknownCodec or UnknownField, which list what exists, and CodecError for a codec of
    another package that does not do what it declares.
    """
    if isinstance(policy, str) and policy not in POLICIES:
        if policy not in codecs():
            known = [*POLICIES, *codecs()]
            raise UnknownCodec(
                f"no policy or codec {policy!r}; there are {', '.join(known)}."
                f"{nearest(policy, known)}"
            )
        return Lossy(_honest(codec(policy, **fields)), rebuild)
    if isinstance(policy, str) and policy in _UNIFORM:
        return _uniform(policy, rebuild, fields)
    if policy == "offload":
        return _offload(rebuild, fields)
    if policy == "actnn":
        key = ("actnn", rebuild, repr(sorted(fields.items())))
        return PROCESS.remember(key, lambda: _actnn(rebuild, fields))
    if fields:
        raise UnknownField(
            f"{', '.join(fields)}: fields go with a codec id, as in saving('dither', bits=2)"
        )
    if isinstance(policy, Codec):
        return Lossy(_honest(policy), rebuild)
    if policy is None or policy == "exact":
        return Exact(rebuild)
    if policy == "keep":
        return KeepAll()
    if isinstance(policy, type):
        raise UnknownField(
            f"policy={policy.__name__} is a class; give one of it, as {policy.__name__}()"
        )
    if not callable(policy):
        raise UnknownField(
            f"policy={policy!r} is not possible; it is an id, a codec, or a function of a Site"
        )
    return policy


def _honest(codec: Codec) -> Codec:
    if is_own(type(codec)):
        return codec
    find = partial(broken_promise.__wrapped__, codec, is_planned=False)
    lie = PROCESS.remember(("promises", type(codec), repr(codec)), find)
    if lie:
        raise CodecError(
            f"codec '{codec.id}' cannot be used, because it does not do what it declares: {lie}. "
            "Correct the codec, or what it declares."
        )
    return codec


def within_noise(policy: Policy, noise: float, rebuild: bool) -> NoiseBudget:
    """Returns the controller that keeps this codec, or `Lean`, to a share of mini-batch variance.

    Raises UnknownField for any other policy.
    """
    if isinstance(policy, Lean):
        key = "noise", policy, repr(noise)
        return PROCESS.remember(key, partial(LeanBudget, policy, noise=noise))
    if not isinstance(policy, Lossy):
        raise UnknownField(
            "noise= goes with a codec or with 'lean', whose settings it chooses, as in "
            "saving('dither', noise=0.1); exact actions add none"
        )
    codec = policy.codec
    make = partial(NoiseBudget, codec, noise=noise, rebuild=rebuild)
    return PROCESS.remember(("noise", codec, repr(noise), rebuild), make)


def meter_of(policy: Policy) -> NoiseMeter:
    """Returns the meter of all contexts of one setting; a user's function gets a fresh one."""
    if not dataclasses.is_dataclass(policy):
        return NoiseMeter(every=1)
    return PROCESS.remember(("watch", policy), lambda: NoiseMeter(every=1))


def _uniform(name: str, rebuild: bool, fields: dict[str, Any]) -> Policy:
    kind = _UNIFORM[name]
    _check_fields(name, fields, [f.name for f in dataclasses.fields(kind) if f.name != "rebuild"])
    return kind(**fields, rebuild=rebuild)


def _offload(rebuild: bool, fields: dict[str, Any]) -> OffloadRest:
    _check_fields("offload", fields, ["tier", "directory", "from_nbytes", "codec"])
    if isinstance(fields.get("codec"), str):
        fields = {**fields, "codec": setting_named(fields["codec"])}
    policy = OffloadRest(**fields, rebuild=rebuild)
    if policy.directory is not None and not os.path.isdir(policy.directory):
        raise UnknownField(
            f"policy 'offload': there is no directory {policy.directory!r}; "
            "make it, or name another"
        )
    return policy


def _actnn(rebuild: bool, fields: dict[str, Any]) -> ActNN:
    _check_fields("actnn", fields, ["bits", "group_size"])
    return ActNN(**fields, rebuild=rebuild)


def _check_fields(policy: str, given: Iterable[str], known: list[str]) -> None:
    for name in given:
        if name not in known:
            raise UnknownField(
                f"policy '{policy}' has no field {name!r}; it has {', '.join(known)}."
                f"{nearest(name, known)}"
            )
