"""The gradient variance that codes would add, tensor by tensor, as watched steps have found.

    share(site, levels) = variance added by a code of so many levels / that of mini-batches

Measured by `measure/shares.py`, or predicted by `measure/reach.py` where there is no memory for
that; without either the menu goes by size alone.
"""

from dataclasses import dataclass
from functools import cached_property
from math import log

from elbowroom.plan.site import SiteName

# Of a code of two levels, relative to |dW|^2 of the weights that its error comes to: the largest
# that was measured (`measure/reach.py`).
PREDICTED = 3.0


@dataclass(frozen=True)
class SiteShares:
    """The noise of a tensor encoded at one site: a share for each number of levels."""

    site: SiteName
    levels: tuple[int, ...]
    shares: tuple[float, ...]


@dataclass(frozen=True)
class NoiseShares:
    """The shares of all sites whose noise is known.

    steps     that were watched; 0: the shares are predicted
    per_byte  the mean share of a byte that is encoded, times (levels - 1) ** 2: for the other sites
    """

    steps: int
    sites: tuple[SiteShares, ...]
    per_byte: float

    def of(self, site: SiteName, nbytes: int, levels: float) -> float:
        """Returns the share of a code of so many levels for what this site saves, so many bytes.

        Of levels that were not tried it goes by the nearest that were, as the square of a step.
        """
        known = self._table.get((site, levels))
        if known is not None:
            return known
        tried = self._sites.get(site)
        if tried is None or not tried.levels:
            return self.per_byte * nbytes / (levels - 1) ** 2
        pairs = zip(tried.levels, tried.shares, strict=True)
        near, share = min(pairs, key=lambda pair: abs(log((pair[0] - 1) / (levels - 1))))
        return share * ((near - 1) / (levels - 1)) ** 2

    @classmethod
    def by_size(cls, saved_nbytes: int) -> "NoiseShares":
        """Returns predicted shares where nothing is known but what plain training saves."""
        return cls(0, (), PREDICTED / max(saved_nbytes, 1))

    @cached_property
    def _sites(self) -> dict[SiteName, SiteShares]:
        return {known.site: known for known in self.sites}

    @cached_property
    def _table(self) -> dict[tuple[SiteName, float], float]:
        return {
            (known.site, levels): share
            for known in self.sites
            for levels, share in zip(known.levels, known.shares, strict=True)
        }


@dataclass(frozen=True)
class AddedVariance:
    """The variance that the codes of a plan add to the gradient, predicted.

    of_gradient   as a share of |g|^2
    of_batches    as a share of the variance over mini-batches; None: that is not known, or all
                  batches were the same
    steps         that it is the mean of
    """

    of_gradient: float
    of_batches: float | None
    steps: int

    @property
    def share(self) -> float:
        """The share of what mini-batches vary by, or else of |g|^2."""
        return self.of_gradient if self.of_batches is None else self.of_batches
