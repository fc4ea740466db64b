"""The arms that `accuracy.py --arms` can train: a method, at a low and at a high rate each.

    plain     as it is; every difference is to it
    group     2 and 4 bits a value, the way of ActNN and GACT
    division  2 and 4 bits beside block averages
    fdsr      its default, which is biased; all bands dithered, about 2.3 bits
    comet     a tenth and three hundredths of the value range as the error bound
    ours      dither with 4 and with 8 levels, and outputs rebuilt
    lean      its smallest that is not two levels everywhere, and 8 / 3 / 4

All but ours and lean hold each saved tensor as a code of its own (rebuild=False).
"""

from collections.abc import Sequence
from statistics import median
from typing import Any

import torch
from _training import Bench, memory
from _ways import PLAIN, Way, saving
from one_plan import ALL, NOISE, POLICIES, profiled
from torch import nn

import elbowroom as er
from elbowroom.codecs.registry import codecs, nearest

Costs = dict[str, dict[str, float]]  # by arm
_Rates = dict[str, dict[str, Any]]
_RATES: dict[str, tuple[str, _Rates]] = {  # arm -> codec id, its two settings
    "group": ("group", {"low": {"bits": 2}, "high": {"bits": 4}}),
    "division": ("division", {"low": {"bits": 2}, "high": {"bits": 4}}),
    "fdsr": ("fdsr", {"low": {}, "high": {"bands": "5/2", "rounding": "dither"}}),
    "comet": ("comet", {"low": {"bound": 1e-1}, "high": {"bound": 3e-2}}),
    "ours": ("dither", {"low": {"levels": 4}, "high": {"levels": 8}}),
    "lean": (
        "lean",
        {"low": {"upper": 3, "lower": 2, "plain": 3}, "high": {"upper": 8, "lower": 3, "plain": 4}},
    ),
}
_OURS = ("ours", "lean")
_PAIRS = 5  # of a step and a plain one
_STEPS = 24  # before a step is profiled, whose noise is that of a training
ARMS = ("plain", *_RATES)


def ways(names: Sequence[str]) -> dict[str, Way]:
    """The chosen arms in their order, by label: plain, group-low, group-high, ...

    Raises ValueError for an arm that there is not, for a codec that is not registered, and without
    "plain".
    """
    found: dict[str, Way] = {}
    for name in names:
        if name not in ARMS:
            raise ValueError(
                f"no arm {name!r}; there are {', '.join(ARMS)}.{nearest(name, list(ARMS))}"
            )
        if name == "plain":
            found["plain"] = PLAIN
            continue
        id, rates = _RATES[name]
        if id not in (*codecs(), "lean"):
            raise ValueError(
                f"arm {name!r} needs the codec {id!r}, which is not registered; there are "
                f"{', '.join(codecs())}. Leave the arm out."
            )
        how = {} if name in _OURS else {"rebuild": False}
        for rate, fields in rates.items():
            found[f"{name}-{rate}"] = saving(id, **fields, **how)
    if "plain" not in found:
        raise ValueError(f"every difference is to plain: add it, as in --arms plain,{names[0]}")
    return found


def fitted(task: Any, share: float) -> Way:
    """er.fit at this share of plain's peak, with the plan over all codes of a measured profile."""
    bench = Bench.trained(task, steps=_STEPS, batch=task.batch)
    bench.grads(PLAIN)
    profile = profiled(bench)
    budget = int(share * (profile.static + memory(bench, PLAIN).peak_nbytes))
    plan = er.plan(profile, budget=budget, **POLICIES[ALL] | {"offload": None})

    def fit(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        er.fit(model, budget=budget, optimizer=optimizer, exact=False, noise=NOISE, plan=plan)

    return Way(
        f"er.fit(budget={share:g} of plain's, exact=False, noise={NOISE:g})",
        lambda seed: er.following(plan, seed=seed),
        exact=False,
        ours=True,
        fit=fit,
    )


def cost(bench: Bench, way: Way) -> dict[str, float]:
    """Bytes and seconds of one warm step, medians of pairs; `plain_step_s`: those right before."""
    bench.grads(PLAIN)  # makes the optimizer's states
    bench.grads(way)
    held = memory(bench, way)
    pairs = [(_seconds(bench, PLAIN), _seconds(bench, way)) for _ in range(_PAIRS)]
    return {
        "saved_nbytes": held.saved_nbytes,
        "peak_nbytes": held.peak_nbytes,
        "step_s": median(ours for _, ours in pairs),
        "plain_step_s": median(plain for plain, _ in pairs),
    }


def _seconds(bench: Bench, way: Way) -> float:
    taken_s = bench.seconds(way, seed=0)
    bench.take_grads()
    return taken_s
