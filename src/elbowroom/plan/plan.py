"""A plan: for each site of a step an action, and what all of them come to.

A plan is a policy: a site goes in, an action comes out. It knows a site by its name, and takes it
for the one that was profiled only if it saves the same dtype, in no more bytes (a last, smaller
batch is fine); for any other it has one exact answer, and counts it.
"""

import io
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from math import ceil, isfinite
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal

from elbowroom.codecs import Codec, Sided, codec_class, codecs
from elbowroom.codecs.names import setting_name
from elbowroom.errors import CodecError, PlanError
from elbowroom.plan import files
from elbowroom.plan.action import Action
from elbowroom.plan.menu import EXACT_MENU, preset_named
from elbowroom.plan.policy import Lean, OffloadRest
from elbowroom.plan.precision_floor import ATTENTION
from elbowroom.plan.presets import Preset
from elbowroom.plan.resident_bytes import ResidentBytes, resident_bytes_from
from elbowroom.plan.site import (
    FINE,
    NO_MODULE,
    RECOMPUTE,
    Rebuildable,
    Site,
    SiteName,
    prefix,
)
from elbowroom.units import budget_argument, show_nbytes, show_percent, show_seconds

VERSION = 1
_COLUMNS = ("module", "op", "shape", "bytes", "held", "action", "seconds", "error", "why")
_NUMBERS = ("bytes", "held", "seconds", "error")
_SHORTEST_S = 1e-6
# Times the planned bytes that a tensor may have in a fit: experts get other numbers of tokens in
# each step. Of another batch a fit makes another plan.
FITTED = 2
# Equal to `Site.name`, and read without a call of a Python function.
_name_of: Callable[[Site], Any] = attrgetter(*SiteName._fields)


@dataclass(frozen=True)
class ExplainedLine:
    """One line of `explain`: a storage, or a module that is recomputed.

    error  estimated variance that it adds to the gradient, relative to that over mini-batches
    """

    module: str
    op: str
    shape: tuple[int, ...]
    nbytes: int
    held: int
    action: str
    seconds: float
    error: float
    why: str


@dataclass(frozen=True)
class PlanEntry:
    """The plan's action at one site, and the facts by which it recognizes the site.

    preset  the name of a preset (`menu.preset_named`)
    curved  see `Site`
    shared  once it is rebuilt or decoded, it waits for its next reader (`shared.py`)
    apart   it has a code of its own even where it could be rebuilt (`coarse.py`)
    """

    preset: str
    dtype: str
    nbytes: int
    curved: bool = False
    shared: bool = False
    apart: bool = False


@dataclass(frozen=True)
class Plan:
    """The action for each tensor of a step, and the predicted cost of the step.

    budget         the budget, in bytes
    peak           the predicted peak, in bytes
    plain_peak     the predicted peak of plain autograd, in bytes
    seconds        the predicted time of a step
    plain_seconds  the predicted time of a step in plain autograd
    exact          whether no bit of any gradient changes
    recompute      modules whose forward runs again in backward
    watched        steps in which the noise of codes was measured; 0: it is estimated from sizes
    standing       bytes of the model and its optimizers between steps; None: not known
    parted_nbytes  bytes that are held, but not beside the others: in another part of the step
    profiled_peak  the predicted peak of a profiled step, in bytes: torch's own ops read what is
                   restored
    unlisted_nbytes  bytes of kept tensors that have no line: see `Profile`
    composes_attention  see `Profile`: `plain_peak` is too low then
    """

    budget: int
    peak: int
    plain_peak: int
    seconds: float
    plain_seconds: float
    exact: bool
    solver: str
    sites: dict[SiteName, PlanEntry]
    recompute: frozenset[str]
    lines: tuple[ExplainedLine, ...]
    watched: int = 0
    standing: ResidentBytes | None = None
    unknown_sites: Counter[SiteName] = field(default_factory=Counter, compare=False, repr=False)
    parted_nbytes: int = field(default=0, compare=False, repr=False)
    profiled_peak: int = field(default=0, compare=False, repr=False)
    unlisted_nbytes: int = field(default=0, compare=False, repr=False)
    composes_attention: bool = field(default=False, compare=False, repr=False)

    def __hash__(self) -> int:
        return hash((self.budget, self.peak, self.solver, self.recompute))  # sites is a dict

    def action_for(self, site: Site, times: int = 1) -> Action:
        """Returns the action for the tensor that this site saves.

        times: the planned bytes that it may have; a larger one is another, and gets an exact action
        """
        known = self.sites.get(_name_of(site))
        preset = self._preset_for(site, known, times)
        if preset is None:
            self.unknown_sites[site.name] += 1
        return _action_by(preset, site, known)

    __call__ = action_for  # a plan is a policy

    def look_up(self, site: Site) -> Action:
        """Returns the action for this site in a fit; counts none in `unknown_sites`."""
        known = self.sites.get(_name_of(site))
        return _action_by(self._preset_for(site, known, FITTED), site, known)

    def is_shared(self, name: SiteName) -> bool:
        """Returns whether the tensor of this site, once restored, waits for its next reader."""
        known = self.sites.get(name)
        return known is not None and known.shared

    def codes_input(self, name: SiteName) -> bool:
        """Returns whether a module runs again from a code of the input with this name."""
        known = self.sites.get(name)
        return known is not None and not preset_named(known.preset).exact

    def encodes(self, module: str, consumer: str) -> bool:
        """Returns whether any tensor that an op of this module saves has a lossy code."""
        return (module, consumer) in self._encoded

    def reruns_attention(self, module: str) -> bool:
        """Returns whether an attention of this module encodes any of the tensors that it saves.

        If not, torch's own attention runs, which stores what it needs for its backward.
        """
        return self.encodes(module, ATTENTION)

    @cached_property
    def _encoded(self) -> frozenset[tuple[str, str]]:
        return frozenset(
            (name.module, name.consumer)
            for name, known in self.sites.items()
            if "float" in known.dtype and not preset_named(known.preset).exact
        )

    def _preset_for(self, site: Site, known: PlanEntry | None, by: int) -> Preset | None:
        """Returns the setting that decides for a site; None for a site that is not in the plan."""
        if known and site.nbytes <= by * known.nbytes and f"torch.{known.dtype}" == str(site.dtype):
            return preset_named(known.preset)
        if site.consumer == RECOMPUTE and site.module in self.recompute and known is None:
            return EXACT_MENU[0]  # an input that is saved for the second run only
        return None

    def grown(self, ratio: float, static_nbytes: int, budget: int) -> "Plan":
        """Returns the plan for tensors that are `ratio` times as large, for `budget`.

        Lines keep the shapes that were profiled. static_nbytes: the part of the peak that does not
        grow.
        """

        def larger(nbytes: int) -> int:
            return ceil(nbytes * ratio)

        lines = (
            replace(line, nbytes=larger(line.nbytes), held=larger(line.held)) for line in self.lines
        )
        return replace(
            self,
            budget=budget,
            peak=static_nbytes + larger(self.peak - static_nbytes),
            plain_peak=static_nbytes + larger(self.plain_peak - static_nbytes),
            seconds=ratio * self.seconds,
            plain_seconds=ratio * self.plain_seconds,
            parted_nbytes=larger(self.parted_nbytes),
            unlisted_nbytes=larger(self.unlisted_nbytes),
            profiled_peak=static_nbytes + larger(self.profiled_peak - static_nbytes),
            sites={
                name: replace(one, nbytes=larger(one.nbytes)) for name, one in self.sites.items()
            },
            lines=tuple(lines),
        )

    def has_call(self, nth: int) -> bool:
        """Returns whether the plan contains an nth forward of the same step (`in_sequence`)."""
        names = (*(name.module for name in self.sites), *self.recompute)
        return any(name.startswith(prefix(nth)) for name in names)

    @property
    def slowdown(self) -> float:
        """Predicted time divided by that of plain autograd, minus one."""
        return self.seconds / self.plain_seconds - 1 if self.plain_seconds > 0 else 0.0

    @property
    def noise(self) -> float:
        """Variance that codes add to the gradient, relative to that over mini-batches."""
        return sum(line.error for line in self.lines)

    @property
    def is_lossy(self) -> bool:
        """True if codes add errors. If neither lossy nor exact, some op rounds differently."""
        return self.noise > 0

    @property
    def codecs(self) -> set[Codec]:
        """The settings of codecs that the plan uses."""
        policies = {preset_named(known.preset).policy for known in self.sites.values()}
        found = {getattr(policy, "codec", None) for policy in policies}
        shared = {policy.upper for policy in policies if isinstance(policy, Lean)}
        found |= {one for one in Sided.settings() if isinstance(one, Sided) and one.upper in shared}
        return {codec for codec in found if codec is not None}

    @property
    def substitution(self) -> str:
        """Says which codes take the place of those that the plan names; "" if none does.

        What reads a tensor may need a finer code than a codec has (`precision_floor.py`).
        """
        named = {codec.id for codec in self.codecs}
        if not named:
            return ""
        others = {id for id in codecs() if not codec_class(id).lossless} - named
        found = [
            (line.nbytes, code)
            for line in self.lines
            for code in (part.partition(",")[0] for part in line.action.split(" + "))
            if code in others
        ]
        if not found:
            return ""
        taken = {code for _, code in found}
        coded, instead = (", ".join(map(repr, sorted(ids))) for ids in (taken, named))
        nbytes = show_nbytes(sum(nbytes for nbytes, _ in found))
        return (
            f"{coded} in {len(found)} tensors ({nbytes}) in the place of {instead}: what reads "
            "them needs a finer code"
        )

    @property
    def tier(self) -> str | None:
        """The tier to which tensors or their codes are moved; None: nothing is moved."""
        policies = {preset_named(known.preset).policy for known in self.sites.values()}
        tiers = (policy.tier for policy in policies if isinstance(policy, OffloadRest))
        return next(tiers, None)

    @property
    def held_nbytes(self) -> int:
        """Bytes that are stored between forward and backward, at one time."""
        held_nbytes = sum(line.held for line in self.lines) + self.unlisted_nbytes
        return held_nbytes - self.parted_nbytes

    @cached_property
    def largest_nbytes(self) -> int:
        """Bytes of the largest storage; cached, because each save reads it."""
        return max((line.nbytes for line in self.lines), default=0)

    @property
    def changes_nothing(self) -> bool:
        """True if all tensors are kept, all ops are torch's own, and the budget has room for it."""
        is_kept = self.exact and all(line.action == "keep" for line in self.lines)
        return is_kept and self.plain_peak <= self.budget

    def totals(self) -> dict[str, tuple[int, int]]:
        """Returns bytes in plain autograd, and stored bytes, by action."""
        sums: dict[str, tuple[int, int]] = {}
        for line in self.lines:
            before, after = sums.get(line.action, (0, 0))
            sums[line.action] = before + line.nbytes, after + line.held
        return sums

    def explain(self) -> str:
        """Returns a table: module, op, shape, bytes, action, seconds, error and reason per tensor.

        Seconds and errors are those that an action adds. A reason says what the option that costs
        least would break, and which one is next best, with its bytes, seconds and noise. Below the
        sums are the codes that take the place of others, if there are any (`substitution`), and the
        bytes per parameter of states, weights and gradients, if they are known.
        """
        below = (self.substitution, "" if self.standing is None else str(self.standing))
        return _table(self) + "".join(f"{one}\n" for one in below if one)

    def __str__(self) -> str:
        return (
            f"plan for {show_nbytes(self.budget)}: peak {show_nbytes(self.peak)} "
            f"(plain {show_nbytes(self.plain_peak)}), {100 * self.slowdown:+.1f} % time, both "
            f"estimated; {self._gradients}"
        )

    @property
    def _gradients(self) -> str:
        if self.exact:
            return "exact"
        if not self.is_lossy:
            return "without codes; convolutions that take turns round otherwise"
        if not self.watched:
            return f"lossy; its noise was not measured (predicted: {show_percent(self.noise)})"
        share = show_percent(self.noise)
        return f"lossy, adding {share} of what mini-batches vary by (estimated)"

    def save(self, path: str | Path) -> None:
        """Writes the plan as JSON."""
        data = asdict(self) | {
            "elbowroom_plan": VERSION,
            "sites": [[*name, asdict(known)] for name, known in self.sites.items()],
            "recompute": sorted(self.recompute),
        }
        del data["unknown_sites"], data["parted_nbytes"], data["profiled_peak"]
        files.write(path, data)

    @classmethod
    def load(cls, path: str | Path) -> "Plan":
        """Reads a plan that `save` wrote. Raises DataError for any other file."""
        return files.read(path, "plan", VERSION, _plan)


def check_plan(
    plan: Plan | None,
    budget: int,
    exact: bool | None,
    noise: float | None = None,
    offload: str | None = None,
    codecs: tuple[Codec, ...] | None = None,
) -> None:
    """Raises PlanError unless this is None, or a plan to begin with under these terms."""
    if plan is None:
        return
    if not isinstance(plan, Plan):
        raise PlanError(
            f"plan={type(plan).__name__} is not possible; it is a plan from er.plan or "
            "er.Plan.load(path)"
        )
    if plan.peak > budget:
        raise PlanError(
            f"this plan needs {show_nbytes(plan.peak)}, more than the budget of "
            f"{show_nbytes(budget)}; make it with {budget_argument(budget)}, or give "
            f"{budget_argument(plan.peak)}"
        )
    if exact and not plan.exact:
        what = "has lossy codes" if plan.is_lossy else "has convolutions that round otherwise"
        raise PlanError(
            f"this plan {what}, and exact=True allows none; make it with exact=True, too"
        )
    if noise is not None and plan.is_lossy and not (plan.watched and plan.noise <= noise):
        adds = f"adds {plan.noise:.2g}" if plan.watched else "was made without measuring its own"
        raise PlanError(
            f"noise={noise:g} is asked for, and this plan {adds}; make it with noise={noise:g}, "
            "from er.measure(step, noise=True)"
        )
    others = plan.codecs - set(codecs) if codecs is not None else set()
    if others:
        name = min(map(setting_name, others))
        raise PlanError(
            f"this plan has codes that codecs= leaves out, as '{name}'; make it with the same "
            "codecs="
        )
    place = plan.tier
    if place is not None and offload is None:
        raise PlanError(
            f"this plan moves tensors to the {place}, and offload=None lets none leave; give "
            f"offload='{place}', or make the plan without"
        )


def difference(one: Plan, other: Plan) -> list[str]:
    """Returns how the other plan differs, a line a site: "layer1.conv: keep -> exact"."""
    found = [f"{name}: recompute in one only" for name in sorted(one.recompute ^ other.recompute)]
    for name in {**one.sites, **other.sites}:
        presets = [_preset(plan, name) for plan in (one, other)]
        if presets[0] != presets[1]:
            found.append(f"{name.module} {name.consumer} {name.nth}: {presets[0]} -> {presets[1]}")
    return found


def _preset(plan: Plan, name: SiteName) -> str:
    known = plan.sites.get(name)
    return "-" if known is None else known.preset


def _action_by(preset: Preset | None, site: Site, known: PlanEntry | None) -> Action:
    """Returns the action for a site. preset, known: what the plan has for it."""
    policy = (preset or EXACT_MENU[0]).policy
    if known is None:
        return policy(site)
    # Whatever a fine formula reads is made of here is known to be, and has a code for that.
    again = Rebuildable.NO if known.apart else site.rebuildable
    return policy(replace(site, curved=known.curved or site.formula in FINE, rebuildable=again))


def _plan(data: dict[str, Any]) -> Plan:
    sites = {
        SiteName(module, consumer, nth): files.made(PlanEntry, known)
        for module, consumer, nth, known in data["sites"]
    }
    for preset in sorted({known.preset for known in sites.values()}):
        try:
            preset_named(preset)
        except CodecError as error:
            raise ValueError(f"no setting {preset!r}: {error}") from error
    lines = tuple(
        files.made(ExplainedLine, {**line, "shape": _shape(line["shape"])})
        for line in data["lines"]
    )
    if not all(isfinite(line.seconds) for line in lines):
        raise ValueError("seconds of a line are finite")
    recompute = data["recompute"]
    if not (isinstance(recompute, list) and all(isinstance(name, str) for name in recompute)):
        raise ValueError(f"recompute is {recompute!r}, and should be a list of strings")
    return files.made(
        Plan,
        {
            **data,
            "sites": sites,
            "recompute": frozenset(recompute),
            "lines": lines,
            "standing": resident_bytes_from(data.get("standing")),
        },
    )


def _shape(sizes: Any) -> tuple[int, ...]:
    if not (isinstance(sizes, list) and all(type(size) is int for size in sizes)):
        raise ValueError(f"shape is {sizes!r}, and should be a list of whole numbers")
    return tuple(sizes)


def _table(plan: Plan) -> str:
    from rich.console import Console  # most trainings draw no table
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(str(plan), style="table.title"), show_footer=True)
    for name, total in zip(_COLUMNS, _sums(plan), strict=True):
        justify: Literal["left", "right"] = "right" if name in _NUMBERS else "left"
        table.add_column(name, footer=Text(total), justify=justify)
    for line in sorted(_shown(plan), key=lambda line: -line.nbytes):
        cells = (
            line.module or NO_MODULE,
            line.op,
            "x".join(map(str, line.shape)),
            show_nbytes(line.nbytes) if line.nbytes else "",
            show_nbytes(line.held) if line.nbytes else "",
            line.action,
            show_seconds(line.seconds) if line.seconds else "",
            f"{line.error:.1e}" if line.error else "",
            line.why,
        )
        table.add_row(*(Text(cell) for cell in cells))  # "[mask]" is a name, and no markup
    console = Console(width=150, record=True, file=io.StringIO())
    console.print(table)
    return console.export_text()


def _shown(plan: Plan) -> Iterator[ExplainedLine]:
    """Yields the lines of the table: small tensors in one, and last what several add together."""
    small = [line for line in plan.lines if line.why == "small"]
    yield from (line for line in plan.lines if line.why != "small")
    if small:
        nbytes, held = sum(line.nbytes for line in small), sum(line.held for line in small)
        yield ExplainedLine("", f"{len(small)} others", (), nbytes, held, "keep", 0.0, 0.0, "small")
    if unlisted := plan.unlisted_nbytes:
        why = "subclasses, sparse tensors and lazy conjugates"
        yield ExplainedLine("", "others", (), unlisted, unlisted, "keep", 0.0, 0.0, why)
    together = plan.seconds - plan.plain_seconds - sum(line.seconds for line in plan.lines)
    if together > _SHORTEST_S:
        why = "attentions that run again for several codes, and waiting for what is moved"
        yield ExplainedLine("", "", (), 0, 0, "", together, 0.0, why)


def _sums(plan: Plan) -> tuple[str, ...]:
    """Returns the last row of the table."""
    apart = plan.parted_nbytes
    nbytes = sum(line.nbytes for line in plan.lines) + plan.unlisted_nbytes
    added_s = plan.seconds - plan.plain_seconds
    return (
        *("sum", "", "", show_nbytes(nbytes), show_nbytes(plan.held_nbytes), ""),
        show_seconds(added_s) if added_s > _SHORTEST_S else "",
        f"{plan.noise:.1e}" if plan.noise else "",
        f"{show_nbytes(apart)} more are held in another part of the step" if apart else "",
    )
