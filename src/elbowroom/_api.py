"""The public verbs: `saving`, `fit`, `release`. Thin; the only file that knows all stages."""

from typing import Any

from elbowroom.codecs import Codec, codec, codecs
from elbowroom.codecs.registry import nearest
from elbowroom.errors import UnknownCodec, UnknownField
from elbowroom.plan import Exact, KeepAll, Lossy, Policy
from elbowroom.runtime.context import PROCESS, Context
from elbowroom.runtime.hooks import Saving

_POLICIES = ("exact", "keep")


def saving(
    policy: str | Codec | Policy | None = None,
    *,
    min_nbytes: int = 65536,
    rebuild: bool = True,
    seed: int | None = None,
    **fields: Any,
) -> Saving:
    """Hold what autograd saves inside this context in fewer bytes.

        with er.saving("dither", bits=2) as saved:
            loss = loss_fn(model(x), y)
        loss.backward()
        print(saved.ledger)

    policy      None or "exact": exact actions only (no bit of any gradient changes); "keep": change nothing, count;
                a codec id with its fields as keywords, or a codec: that codec wherever the saving op tolerates an
                error; or any function of a `Site` that returns an action
    min_nbytes  storages below this size, in bytes, are left alone; 0: none are
    rebuild     whether outputs of norms, activations and dropout may be made again from what their op saves
    seed        where the noise of lossy codes starts; None: one sequence for the whole process

    Raises UnknownCodec or UnknownField, which list what exists. Tensors that cannot be touched are kept; `.ledger`
    says which and why.
    """
    if not isinstance(min_nbytes, int) or min_nbytes < 0:
        raise UnknownField(f"min_nbytes={min_nbytes!r} is not possible; it is an int of bytes, 0 or more")
    context = PROCESS if seed is None else Context(seed, learns=False)
    return Saving(_policy(policy, rebuild, fields), min_nbytes=min_nbytes, context=context)


def _policy(policy: str | Codec | Policy | None, rebuild: bool, fields: dict[str, Any]) -> Policy:
    if isinstance(policy, str) and policy not in _POLICIES:
        if policy not in codecs():
            known = [*_POLICIES, *codecs()]
            raise UnknownCodec(f"no policy or codec {policy!r}; there are {', '.join(known)}.{nearest(policy, known)}")
        return Lossy(codec(policy, **fields), rebuild)
    if fields:
        raise UnknownField(f"{', '.join(fields)}: fields go with a codec id, as in saving('dither', bits=2)")
    if isinstance(policy, Codec):
        return Lossy(policy, rebuild)
    if policy is None or policy == "exact":
        return Exact(rebuild)
    if policy == "keep":
        return KeepAll()
    if not callable(policy):
        raise UnknownField(f"policy={policy!r} is not possible; it is an id, a codec, or a function of a Site")
    return policy
