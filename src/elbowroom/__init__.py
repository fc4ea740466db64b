"""elbowroom: trains any PyTorch model inside a memory budget.

    import elbowroom as er

    # One line: a plan for the model's own step, which is carried out and measured.
    model = er.fit(model, budget="6 GiB", optimizer=opt)
    print(er.summary(model))    # at any time: peaks, time and actions

    # By hand: the tensors that autograd saves, in a tenth of the bytes.
    with er.saving("dither", bits=2) as saved:
        loss = loss_fn(model(x), y)
    loss.backward()
    print(saved.ledger)    # bytes before and after, and why some tensors are kept

    # In three stages, each with its own data.
    profile = er.measure(step, model=model, optimizer=opt)
    plan = er.plan(profile, budget="6 GiB")
    with er.following(plan):
        loss = loss_fn(model(x), y)

    # Optimizer states in 2 bytes per parameter instead of 8.
    opt = er.optim.AdamW(model.parameters(), lr=3e-4, state="int8")

`import elbowroom` loads no other module. A module is imported when one of its names is first used
(`_lazy.py`).

The packages, from the top down. Each imports only packages below it:

    cli/  demo/            commands, and the data and models of the demo
    _training.py           the public functions of training; _checks.py: checks of arguments
    _api.py                the other public functions
    tools/                 the largest batch, profiles of whole programs, finding their models
    fitting/  report/      the state machine of fit; tables and pages
    adaptive/              controllers that change bits and bounds during training
    measure/               profiles, peaks, times, and the noise of codes
    nn/                    modules whose backward needs less, and conversions to them
    optim/                 AdamW, Lion and SGD with encoded states
    runtime/               the eager engine: autograd's two hooks, and what is stored between them
    compiled/              the engine inside torch.compile: what its graphs save
    plan/                  decisions: site -> action, as pure data
    codecs/                one codec per file
    kernels/               reference (the specification), numba (CPU), triton (GPU)
    errors.py  files.py  units.py  waiting.py

To follow one tensor: runtime/hooks.py `_pack` -> storage.py -> consumers.py (or, when its op has
ended, readers.py -> formulas.py, the table of derivative formulas) -> plan/policy.py ->
runtime/serving.py -> codecs/dither.py -> kernels/ops.py -> kernels/numba/dither.py, and back
through runtime/slot.py `View.restore`; or, for ops that need no restored tensor, runtime/direct/.

To follow a budget: measure/recorder.py -> plan/profile.py -> plan/menu.py, build_problem.py ->
plan/problem.py -> plan/solve/ -> plan/make.py -> plan/plan.py `action_for`; and fitting/session.py.
"""

from typing import TYPE_CHECKING

from elbowroom._lazy import show_lazily as _show_lazily

if TYPE_CHECKING:  # the same names for type checkers and editors
    from elbowroom import adaptive as adaptive
    from elbowroom import errors as errors
    from elbowroom import nn as nn
    from elbowroom import optim as optim
    from elbowroom._api import dry_run as dry_run
    from elbowroom._api import explain_oom as explain_oom
    from elbowroom._api import following as following
    from elbowroom._api import gradient_error as gradient_error
    from elbowroom._api import load_snapshot as load_snapshot
    from elbowroom._api import measure as measure
    from elbowroom._api import plan as plan
    from elbowroom._api import saving as saving
    from elbowroom._training import add_optimizer as add_optimizer
    from elbowroom._training import fit as fit
    from elbowroom._training import grow_batch as grow_batch
    from elbowroom._training import largest_batch as largest_batch
    from elbowroom._training import log_to as log_to
    from elbowroom._training import release as release
    from elbowroom._training import step as step
    from elbowroom._training import summary as summary
    from elbowroom.codecs import Codec as Codec
    from elbowroom.codecs import Encoded as Encoded
    from elbowroom.codecs import Facts as Facts
    from elbowroom.codecs import codec as codec
    from elbowroom.codecs import codecs as codecs
    from elbowroom.files import save_checkpoint as save_checkpoint
    from elbowroom.measure.peak import peak as peak
    from elbowroom.nn import convert as convert
    from elbowroom.plan.plan import Plan as Plan
    from elbowroom.plan.profile import Profile as Profile
    from elbowroom.tools import assert_peak as assert_peak

__version__ = "0.1.0"
__all__ = _show_lazily(
    __name__,
    ["adaptive", "errors", "nn", "optim"],
    {
        "_api": [
            "dry_run",
            "explain_oom",
            "following",
            "gradient_error",
            "load_snapshot",
            "measure",
            "plan",
            "saving",
        ],
        "_training": [
            "add_optimizer",
            "fit",
            "grow_batch",
            "largest_batch",
            "log_to",
            "release",
            "step",
            "summary",
        ],
        "codecs": ["Codec", "Encoded", "Facts", "codec", "codecs"],
        "files": ["save_checkpoint"],
        "measure.peak": ["peak"],
        "nn": ["convert"],
        "plan.plan": ["Plan"],
        "plan.profile": ["Profile"],
        "tools": ["assert_peak"],
    },
)
