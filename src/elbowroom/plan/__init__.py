"""DECISION: pure data and arithmetic.

A `Site` goes in, an `Action` comes out; no CUDA, no autograd, no clock. For a whole step at once: a
`Problem` goes in, a `Solution` comes out of `elbowroom.plan.solve` (not imported here: scipy).
"""

from elbowroom.plan.action import Action as Action
from elbowroom.plan.action import Encode as Encode
from elbowroom.plan.action import Keep as Keep
from elbowroom.plan.action import Offload as Offload
from elbowroom.plan.action import Rebuild as Rebuild
from elbowroom.plan.coat import Coat as Coat
from elbowroom.plan.offload_rest import OffloadRest as OffloadRest
from elbowroom.plan.policy import Exact as Exact
from elbowroom.plan.policy import KeepAll as KeepAll
from elbowroom.plan.policy import Lean as Lean
from elbowroom.plan.policy import Lossy as Lossy
from elbowroom.plan.policy import Policy as Policy
from elbowroom.plan.problem import Choice as Choice
from elbowroom.plan.problem import Problem as Problem
from elbowroom.plan.problem import Solution as Solution
from elbowroom.plan.site import Need as Need
from elbowroom.plan.site import Rebuildable as Rebuildable
from elbowroom.plan.site import Site as Site
from elbowroom.plan.site import SiteName as SiteName
