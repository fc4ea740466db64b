"""The plans of one model: one for each kind of forward, up to a bound."""

from collections import OrderedDict
from collections.abc import Hashable, Iterator

from elbowroom.fitting.model_state import ModelState
from elbowroom.fitting.options import FitOptions
from elbowroom.fitting.planner import Planner
from elbowroom.fitting.signature import Signature
from elbowroom.plan.plan import Plan
from elbowroom.runtime.context import Context

_MAX = 16  # plans that are cached
_MAX_LEARNED = 64  # plans that are learned, at most: shapes may keep changing


class PlanCache:
    """Cache of plans, least recently used first out.

    Once no more plans are learned, a forward follows the plan of a larger one of the same
    structure, or runs with the safest exact preset; its memory is checked as always.
    """

    def __init__(
        self,
        options: FitOptions,
        model_state: ModelState,
        context: Context,
        plan: Plan | None = None,
    ) -> None:
        """plan: the plan with which the first kind begins."""
        self._options, self._model_state, self._context = options, model_state, context
        self._first = self._given = plan
        self._known: OrderedDict[Hashable, Planner] = OrderedDict()
        self._learned = 0

    def __iter__(self) -> Iterator[Planner]:
        return iter(self._known.values())

    @property
    def was_given(self) -> bool:
        """True if the first kind of forward begins with a plan of the user's."""
        return self._first is not None

    def of(self, signature: Signature) -> Planner:
        """Returns the planner for forwards of this signature."""
        found = self._known.get(signature.bucket)
        if found is None:
            found = self._admit(signature)
        if signature.bucket in self._known:
            self._known.move_to_end(signature.bucket)
        return found

    def least_of_others(self, but: Planner) -> int:
        """The lowest budget that steps of other shapes were measured at, or will be refused below.

        Those of `but` count where it has had calls of several sizes. 0: each kind of forward was
        within the budget, or none was measured.
        """
        others = (one for one in self if one is not but or one.now != one.state.largest)
        tried = (one.state.attempts.least for one in others if not one.state.has_fit)
        return max((least.peak_nbytes for least in tried if least is not None), default=0)

    def use(self, options: FitOptions) -> None:
        """Replaces the options of all plans, and plans again."""
        self._options = options
        for planner in self:
            planner.use(options)

    def forget(self, but: Planner | None = None) -> None:
        """Lets each kind of forward be learned anew, the first of them by the plan it was given.

        but: except for this one
        """
        for bucket in [bucket for bucket, one in self._known.items() if one is not but]:
            self._known.pop(bucket).is_forgotten = True
        self._given = self._first

    def _admit(self, signature: Signature) -> Planner:
        covering = [one for one in self if one.covers(signature)]
        nearest = min(covering, key=lambda one: one.numel, default=None)
        learns = self._learned < _MAX_LEARNED
        if not learns and nearest is not None:
            return nearest
        if not learns:
            return Planner(self._options, self._model_state, self._context, learns=False)
        given, self._given = self._given, None
        made = Planner(self._options, self._model_state, self._context, given)
        if nearest is not None:
            made.inherit(nearest)
        self._learned += 1
        self._known[signature.bucket] = made
        if len(self._known) > _MAX:
            self._known.popitem(last=False)
        return made
