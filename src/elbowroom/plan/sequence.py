"""Forwards that run one after another before one backward, as the profile of one forward.

    first   its last floor is what it leaves behind: outputs, and what autograd holds by itself
    second  lies on that, moment after moment

Both must be profiles of forwards that held nothing (`plan/rehearsal.py`).
"""

from dataclasses import replace

from elbowroom.plan.profile import ModuleCall, Profile, Storage


def in_sequence(first: Profile, second: Profile) -> Profile:
    """Returns one profile of both. static, rates and what stands are those of the first."""
    moments, storages = len(first.level), len(first.storages)
    left = max(first.floor[-1] - first.static, 0) if first.floor else 0
    second = second.shifted(first.static + left - second.static)
    return replace(
        first,
        level=(*first.level, *second.level),
        floor=(*first.floor, *second.floor),
        starts_s=(*first.starts_s, *(first.seconds + at_s for at_s in second.starts_s)),
        backward=moments + second.backward,
        seconds=first.seconds + second.seconds,
        unlisted_nbytes=first.unlisted_nbytes + second.unlisted_nbytes,
        storages=(
            *first.storages,
            *(_later(storage, moments, storages) for storage in second.storages),
        ),
        modules=(
            *first.modules,
            *(_later_call(call, moments, storages) for call in second.modules),
        ),
    )


def _later(storage: Storage, moments: int, storages: int) -> Storage:
    """Returns it so many moments later; `storages` come before those that it names."""
    saves = tuple(replace(save, at=save.at + moments) for save in storage.saves)
    return replace(
        storage,
        born=storage.born + moments,
        used=storage.used + moments,
        freed=storage.freed + moments,
        saves=saves,
        made_of=tuple(at + storages for at in storage.made_of),
    )


def _later_call(call: ModuleCall, moments: int, storages: int) -> ModuleCall:
    """Returns a call of a module so many moments later; `storages` come before those it names."""
    return replace(
        call,
        inputs=tuple(i + storages if i >= 0 else i for i in call.inputs),
        sources=tuple(i + storages for i in call.sources),
        first=call.first + moments,
        last=call.last + moments,
    )
