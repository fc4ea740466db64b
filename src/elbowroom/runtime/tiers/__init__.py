"""Tiers, where offloaded bytes are stored, and how they come back.

base       the interfaces: Tier, Ticket, Arrival
extents    which parts of a file or a slab are free
window     how many bytes may be in transfer
workers    the threads that read and write
copier     copies between a device and the host, on a separate stream
slabs      pinned host memory, in large pieces
unlinked   an unlinked temporary file, and memory as the buffer of a system call
file       FileTier: memory -> file
host       HostTier: device -> host memory
traffic    how much of the transfer is hidden behind computation
staged     StagedTier: device -> host memory -> file
choose     which tier is used for a tensor
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
