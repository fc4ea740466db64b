"""The gradient variance that codes would add, tensor by tensor, as watched steps have found.

    share(site, levels) = variance added by a code of so many levels / that of mini-batches

Written down by `measure/shares.py`; without it the menu goes by size alone.
"""

from dataclasses import dataclass
from functools import cached_property

from elbowroom.plan.site import SiteName


@dataclass(frozen=True)
class SiteShares:
    """The noise of a tensor encoded at one site: a share for each number of levels."""

    site: SiteName
    levels: tuple[int, ...]
    shares: tuple[float, ...]


@dataclass(frozen=True)
class NoiseShares:
    """The shares of all sites whose noise is known.

    steps     that were watched
    per_byte  the mean share of a byte that is encoded, times (levels - 1) ** 2: for the other sites
    """

    steps: int
    sites: tuple[SiteShares, ...]
    per_byte: float

    def of(self, site: SiteName, nbytes: int, levels: int) -> float:
        """Returns the share of a code of so many levels for what this site saves, so many bytes."""
        known = self._table.get((site, levels))
        return self.per_byte * nbytes / (levels - 1) ** 2 if known is None else known

    @cached_property
    def _table(self) -> dict[tuple[SiteName, int], float]:
        return {
            (known.site, levels): share
            for known in self.sites
            for levels, share in zip(known.levels, known.shares, strict=True)
        }
