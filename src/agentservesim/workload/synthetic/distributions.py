"""The distributions a synthetic workload is described with: log-normal, or a table of quantiles."""

from __future__ import annotations

import math
from statistics import NormalDist

import msgspec

from agentservesim.workload.synthetic.table import Table

_NORMAL = NormalDist()
_Z99 = _NORMAL.inv_cdf(0.99)
_TINY = 1e-15


class LogNormal(msgspec.Struct, frozen=True, tag_field="kind", tag="lognormal"):
    """A log-normal distribution: half of all values lie below `p50`; `sigma` spreads their logarithms.

    Values are clipped to [low, high]; `mean` and `sd` are those without clipping. The unit is the caller's.
    """

    p50: float
    sigma: float
    low: float = 0.0
    high: float = math.inf

    @classmethod
    def from_p99(cls, p50: float, p99: float, low: float = 0.0, high: float = math.inf) -> LogNormal:
        """The one with this median and 99th percentile."""
        return cls(p50, math.log(p99 / p50) / _Z99, low, high)

    @classmethod
    def from_mean(cls, p50: float, mean: float, low: float = 0.0, high: float = math.inf) -> LogNormal:
        """The one with this median and this mean, which is at least the median."""
        return cls(p50, math.sqrt(2 * math.log(mean / p50)), low, high)

    @classmethod
    def from_cv(cls, mean: float, cv: float, low: float = 0.0, high: float = math.inf) -> LogNormal:
        """The one with this mean and this coefficient of variation (sd / mean)."""
        variance = math.log1p(cv * cv)
        return cls(mean * math.exp(-variance / 2), math.sqrt(variance), low, high)

    @property
    def mean(self) -> float:
        return self.p50 * math.exp(self.sigma**2 / 2)

    @property
    def sd(self) -> float:
        return self.mean * math.sqrt(math.expm1(self.sigma**2))

    def quantile(self, share: float) -> float:
        """The value that `share` (0 to 1) of all values lie below; a uniform `share` makes it a sample."""
        inside = min(max(share, _TINY), 1 - _TINY)
        return min(max(self.p50 * math.exp(self.sigma * _NORMAL.inv_cdf(inside)), self.low), self.high)


Marginal = LogNormal | Table
"""A distribution of one quantity: a formula where it was described, quantiles where it was learned."""
