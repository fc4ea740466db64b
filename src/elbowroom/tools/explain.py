"""Says what holds the memory when it has run out, and checks the peak of a step in a test."""

import linecache
import mmap
import os
import re
import sys
import types
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from elbowroom._checks import check_path
from elbowroom.errors import BudgetTooSmall
from elbowroom.fitting import Fitting, summary
from elbowroom.measure.peak import MemoryCurve, memory_curve, peak, pick_device
from elbowroom.plan import KeepAll
from elbowroom.plan.make import make_plan
from elbowroom.plan.profile import Profile
from elbowroom.runtime.attach import attached
from elbowroom.runtime.context import Context
from elbowroom.runtime.exhaustion import is_out_of_memory
from elbowroom.runtime.saving import Saving
from elbowroom.tools.holders import Holder, address_of, find_holders
from elbowroom.units import budget_argument, parse_nbytes, show_nbytes

_MAX = 5  # rows a kind
_ROOM_NBYTES = 64 << 20  # for an explanation, and what it imports
_SAID = "_elbowroom_has_explained"  # an attribute of an error
_LIBRARIES = tuple(
    os.path.dirname(os.path.abspath(path)) + os.sep
    for path in (torch.__file__, Path(__file__).parent, os.__file__)
)


class ExplainOutOfMemory:
    """Context that says on stderr what holds memory if it runs out inside; the error goes on."""

    def __init__(self, profile: Profile | str | Path | None = None) -> None:
        if profile is not None and not isinstance(profile, Profile):
            profile = Profile.load(check_path("profile", profile))
        self._profile = profile
        self._room: mmap.mmap | None = None

    def __enter__(self) -> Self:
        self._room = set_aside()
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        room, self._room = self._room, None
        if error is not None and is_out_of_memory(error):
            say_exhaustion(error, self._profile, room)
        elif room is not None:
            room.close()


def set_aside() -> mmap.mmap | None:
    """Returns memory that `say_exhaustion` gives back before it explains; None if there is none.

    It is address space alone, since nobody writes to it. Under `ulimit -v` that is what runs out.
    """
    try:
        return mmap.mmap(-1, _ROOM_NBYTES)
    except (OSError, MemoryError):
        return None


def say_exhaustion(
    error: BaseException, profile: Profile | None = None, room: mmap.mmap | None = None
) -> None:
    """Writes `explanation` on stderr, once for each error.

    It raises nothing: the error is what must be seen.

    room: what `set_aside` has returned before the memory ran out
    """
    if room is not None:
        room.close()
    if sys.stderr is None or getattr(error, _SAID, False):
        return
    with suppress(AttributeError, TypeError):  # of a class with __slots__
        setattr(error, _SAID, True)
    try:
        with torch._C.DisableTorchFunctionSubclass():  # a subclass of the user's may refuse
            text = explanation(error, profile)
    except Exception as failed:
        text = f"elbowroom: memory ran out, and there is not enough left to say why ({failed!r})"
    with suppress(OSError, ValueError):  # stderr is closed
        sys.stderr.write(text + "\n")


def explanation(error: BaseException, profile: Profile | None = None) -> str:
    """Returns lines of text that say what holds the memory at this error."""
    device_type = "cuda" if _is_of_a_gpu(error) else "cpu"
    frames = _frames(error)
    holders = find_holders(device_type, _names(frames))
    total = sum(holder.nbytes for holder in holders)
    lines = [
        f"elbowroom: memory ran out on {device_type}; tensors hold {show_nbytes(total)} of it",
        *_line_of(frames),
    ]
    kinds = dict.fromkeys(holder.kind for holder in holders)
    for kind in sorted(kinds, key=lambda kind: -_sum(holders, kind)):
        lines += _rows(kind, [holder for holder in holders if holder.kind == kind])
    asked = _asked_nbytes(error)
    if asked > total:
        lines.append(
            f"  {show_nbytes(asked)} were asked for at once, more than all tensors together: no "
            "plan makes that smaller; look at that line, or halve the batch"
        )
    else:
        saved = sum(holder.nbytes for holder in holders if holder.kind == "saved for backward")
        lines += _remedies(total, saved, profile)
    return "\n".join(lines)


def assert_peak(
    step: Callable[[], object], allowed: float | str, *, device: torch.device | str | None = None
) -> int:
    """Raises AssertionError if the peak memory of `step()` is above `allowed`; returns the peak.

        def test_the_step_stays_small():
            step()                                # the first step creates optimizer states
            er.assert_peak(step, "350 MiB")

    step     a function that runs one training step
    allowed  bytes, or a size such as "350 MiB", above the memory in use before the step
    device   as in `er.peak`

    The message names the measured bytes, the allowed bytes, and the three largest allocations. To
    find these, a step that exceeds `allowed` runs a second time.
    """
    allowed_nbytes = parse_nbytes(allowed)
    chosen = pick_device(device)
    if chosen.type == "cuda":
        measured, left = peak(step, device=chosen), 0
    else:
        curve: MemoryCurve = memory_curve(step, device=chosen)
        measured, left = curve.peak_nbytes, curve.end_nbytes
    if measured <= allowed_nbytes:
        return measured
    holders = _holders_of(step)
    if left > 0:
        holders.append(Holder("left behind by the step", "gradients, states, caches", left))
    largest = sorted(holders, key=lambda holder: -holder.nbytes)[:3]
    named = "; ".join(f"{one.where}: {show_nbytes(one.nbytes)} {one.kind}" for one in largest)
    raise AssertionError(
        f"the step takes {show_nbytes(measured)} at its peak (measured); "
        f"{show_nbytes(allowed_nbytes)} are allowed, {show_nbytes(measured - allowed_nbytes)} "
        f"less. The largest holders are {named or 'not known: nothing is saved for backward'}."
    )


def _holders_of(step: Callable[[], object]) -> list[Holder]:
    """Returns what plain autograd saves in the step, by module."""
    with Saving(KeepAll(), min_nbytes=0, context=Context(learns=False)) as saved:
        step()
    sums: dict[str, int] = {}
    for row in saved.ledger.rows:
        where = f"{row.module or '(no module)'} ({row.consumer})"
        sums[where] = sums.get(where, 0) + row.before_nbytes
    return [Holder("saved for backward", where, nbytes) for where, nbytes in sums.items()]


def _is_of_a_gpu(error: BaseException) -> bool:
    seen: set[int] = set()
    now: BaseException | None = error
    while now is not None and id(now) not in seen:
        if isinstance(now, torch.OutOfMemoryError):
            return True
        seen.add(id(now))
        now = now.__cause__ or now.__context__
    return False


def _frames(error: BaseException) -> list[tuple[types.FrameType, int]]:
    """Frames with their lines, from the outermost to the one that failed."""
    step = error.__traceback__
    outer = step.tb_frame.f_back if step is not None else None
    found: list[tuple[types.FrameType, int]] = []
    while outer is not None:
        found.insert(0, (outer, outer.f_lineno))
        outer = outer.f_back
    while step is not None:
        found.append((step.tb_frame, step.tb_lineno))
        step = step.tb_next
    return found


def _is_of_a_library(path: str) -> bool:
    return path.startswith(_LIBRARIES) or path.startswith("<")


def _names(frames: list[tuple[types.FrameType, int]]) -> dict[int, str]:
    """Names of variables that hold tensors, with their lines, by the address of their storage."""
    names: dict[int, str] = {}
    for frame, line in reversed(frames):  # the innermost name says most
        path = frame.f_code.co_filename
        if _is_of_a_library(path):
            continue
        for name, value in frame.f_locals.items():
            if issubclass(type(value), Tensor):
                where = f"{name} {tuple(value.shape)} at {os.path.basename(path)}:{line}"
                names.setdefault(address_of(value), where)
    return names


def _line_of(frames: list[tuple[types.FrameType, int]]) -> list[str]:
    """The user's last line before the error, and the module that was running."""
    own = [one for one in frames if not _is_of_a_library(one[0].f_code.co_filename)]
    lines = []
    if own:
        frame, line = own[-1]
        path = frame.f_code.co_filename
        text = linecache.getline(path, line).strip()
        lines.append(f"  at {os.path.basename(path)}:{line}: {text}")
    owners: list[Any] = [frame.f_locals.get("self") for frame, _ in frames]
    running = [module for module in owners if issubclass(type(module), nn.Module)]
    if running:
        outer, inner = running[0], running[-1]
        name = next((name for name, one in outer.named_modules() if one is inner), "")
        lines.append(f"  in module {name or '(outermost)'} ({type(inner).__name__})")
    return lines


def _sum(holders: list[Holder], kind: str) -> int:
    return sum(holder.nbytes for holder in holders if holder.kind == kind)


def _rows(kind: str, holders: list[Holder]) -> list[str]:
    rows = [f"  {show_nbytes(_sum(holders, kind)):>9}  {kind}"]
    rows += [f"      {show_nbytes(one.nbytes):>9}  {one.where}" for one in holders[:_MAX]]
    if len(holders) > _MAX:
        rest = show_nbytes(sum(one.nbytes for one in holders[_MAX:]))
        rows.append(f"      {rest:>9}  in {len(holders) - _MAX} more places")
    return rows


def _asked_nbytes(error: BaseException) -> int:
    """Returns the bytes that could not be had, where the error names them; else 0."""
    found = re.search(r"tried to allocate (\d+(?:\.\d+ [KMG]i?B)?)", str(error), re.IGNORECASE)
    return 0 if found is None else parse_nbytes(found[1] if " " in found[1] else int(found[1]))


def _remedies(total: int, saved: int, profile: Profile | None) -> list[str]:
    """Returns lines that say what would fit.

    total: bytes that the device had room for, at least. saved: those for backward.
    """
    fitted = [(model, one) for model, one in attached() if isinstance(one, Fitting)]
    if profile is None:
        profile = next((one.planner.profile for _, one in fitted if one.planner.profile), None)
    lines = [
        f"  {one.model} was fitted to {show_nbytes(one.budget_nbytes)}; if the device has less, "
        f"give a smaller budget, or run the step by er.step(...), which finds one"
        for one in (summary(fitting, type(model).__name__) for model, fitting in fitted)
    ]
    if profile is None:
        if fitted:
            return lines + [line for _, one in fitted for line in _foreseen(one, total)]
        return [
            *lines,
            f"  of the {show_nbytes(total)}, {show_nbytes(saved)} are saved for backward, and can "
            "be held in less or rebuilt; the rest stays. To train inside of what there was: "
            f"er.fit(model, budget={total}), or elbowroom run --budget {total}; the first step "
            "says whether a plan fits",
        ]
    try:
        plan = make_plan(profile, total)
    except BudgetTooSmall as error:
        return [*lines, f"  no plan of the known profile fits {show_nbytes(total)}: {error}"]
    kind = "exact" if plan.exact else "lossy"
    lines.append(
        f"  a plan of the known profile fits {show_nbytes(total)}: peak {show_nbytes(plan.peak)} "
        f"in place of {show_nbytes(plan.plain_peak)} (estimated), {kind}; "
        f"give {budget_argument(total)}"
    )
    return lines


def _foreseen(fitting: Fitting, total: int) -> list[str]:
    """Returns a line on the settings of a model of which no step was measured yet.

    total: as in `_remedies`
    """
    found = fitting.foreseen()
    if not found:
        return []
    plain, fits = found[0], next((one for one in found if one.nbytes <= total), None)
    best = found[-1] if fits is None else fits
    kind = "exact" if best.setting.exact else "lossy"
    by = "its first forward" if plain.is_whole else "the part of its first forward that had run"
    tail = (
        f"give {budget_argument(total)}"
        if fits is not None
        else f"more than the {show_nbytes(total)} that there were: give "
        f"{budget_argument(total)} all the same, since plans can take less than "
        "settings, or halve the batch"
    )
    return [
        f"  estimated by {by}, a step takes {show_nbytes(best.nbytes)} at setting "
        f"'{best.setting.name}' ({kind}) in place of {show_nbytes(plain.nbytes)}; {tail}"
    ]
