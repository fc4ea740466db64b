"""Plans: pure data and arithmetic.

A policy maps a `Site` to an `Action`. This package uses no CUDA, no autograd and no clock. For a
whole step, `elbowroom.plan.solve` maps a `Problem` to a `Solution`. (It is not imported here,
because it needs scipy.)
"""

from elbowroom.plan.action import Action as Action
from elbowroom.plan.action import Encode as Encode
from elbowroom.plan.action import Keep as Keep
from elbowroom.plan.action import Offload as Offload
from elbowroom.plan.action import Rebuild as Rebuild
from elbowroom.plan.policy import Coat as Coat
from elbowroom.plan.policy import Exact as Exact
from elbowroom.plan.policy import KeepAll as KeepAll
from elbowroom.plan.policy import Lean as Lean
from elbowroom.plan.policy import Lossy as Lossy
from elbowroom.plan.policy import OffloadRest as OffloadRest
from elbowroom.plan.policy import Policy as Policy
from elbowroom.plan.problem import Choice as Choice
from elbowroom.plan.problem import Problem as Problem
from elbowroom.plan.problem import Solution as Solution
from elbowroom.plan.site import Need as Need
from elbowroom.plan.site import Rebuildable as Rebuildable
from elbowroom.plan.site import Site as Site
from elbowroom.plan.site import SiteName as SiteName
