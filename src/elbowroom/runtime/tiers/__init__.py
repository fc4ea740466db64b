"""Tiers, where offloaded bytes go, and how they come back.

base       the seam: Tier, Ticket, Arrival
extents    which parts of a file or a slab are free
window     how many bytes may be on their way
workers    the threads that read and write
copier     copies between a device and the host, on a stream of their own
slabs      pinned host memory, in large pieces
unlinked   a file that leaves nothing behind, and memory as the buffer of a system call
file       FileTier: memory -> file
host       HostTier: device -> host memory
traffic    how much of the moving is hidden behind computing
staged     StagedTier: device -> host memory -> file
choose     which tier serves a tensor
"""

from elbowroom.runtime.tiers.base import Arrival as Arrival
from elbowroom.runtime.tiers.base import Ticket as Ticket
from elbowroom.runtime.tiers.base import Tier as Tier
from elbowroom.runtime.tiers.choose import tier_for as tier_for
from elbowroom.runtime.tiers.file import FileTier as FileTier
from elbowroom.runtime.tiers.host import HostTier as HostTier
from elbowroom.runtime.tiers.staged import StagedTier as StagedTier
from elbowroom.runtime.tiers.traffic import CLOCK as CLOCK
from elbowroom.runtime.tiers.traffic import Traffic as Traffic
