"""Slopes of series whose neighbouring samples are alike, with errors that allow for that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

#: Share of a series, at its start, that is left out: caches and records of a limited number fill,
#: and every configuration of the long process has its first turn.
WARM_UP = 0.2
#: Fewer samples tell nothing of their own correlation.
LEAST = 8
METHOD = (
    f"Least squares after the first {WARM_UP:.0%} of the time. Standard errors are Newey and "
    "West's (1987), with Bartlett's weights up to 1.3 times the square root of the number of "
    "samples (Lazarus, Lewis, Stock and Watson, 2018); 95 % intervals have Kiefer and "
    "Vogelsang's critical values (2005) for that many lags."
)


@dataclass(frozen=True)
class Slope:
    """What a series does over time.

    Args:
        samples: how many counted.
        hours: from the first of them to the last.
        mean: of the values.
        per_hour: the least-squares slope.
        error: its standard error.
        low: lower end of the 95 % interval.
        high: upper end.
    """

    samples: int
    hours: float
    mean: float
    per_hour: float
    error: float
    low: float
    high: float

    @property
    def is_flat(self) -> bool:
        """Whether zero is inside the interval."""
        return self.low <= 0 <= self.high


def slope(samples: Sequence[tuple[float, float]]) -> Slope | None:
    """The slope of a series; None if there are too few samples.

    Args:
        samples: seconds and values, in order.
    """
    if not samples:
        return None
    times, values = np.array(samples, dtype=float).T
    begin = times[0] + WARM_UP * (times[-1] - times[0])
    times, values = times[times >= begin] / 3600, values[times >= begin]
    count = len(times)
    if count < LEAST or times[-1] == times[0]:
        return None
    centred = times - times.mean()
    spread = float(centred @ centred)
    per_hour = float(centred @ (values - values.mean())) / spread
    scores = centred * (values - values.mean() - per_hour * centred)
    lags = min(count - 1, int(np.ceil(1.3 * np.sqrt(count))))
    variance = float(scores @ scores)
    for lag in range(1, lags + 1):
        variance += 2 * (1 - lag / (lags + 1)) * float(scores[lag:] @ scores[:-lag])
    # Two degrees of freedom went into the line.
    error = float(np.sqrt(max(0.0, variance * count / (count - 2)))) / spread
    share = lags / count
    # The 0.975 quantile for Bartlett's weights, as a polynomial of the share of lags.
    critical = 1.96 + 2.9694 * share + 0.4160 * share**2 - 0.5324 * share**3
    # Where nothing changes, what is left of rounding is no slope.
    rounding = 1e-9 * float(np.abs(values).max(initial=0.0))
    half = critical * error + rounding
    return Slope(
        samples=count,
        hours=float(times[-1] - times[0]),
        mean=float(values.mean()),
        per_hour=per_hour,
        error=error,
        low=per_hour - half,
        high=per_hour + half,
    )


def thinned(samples: Sequence[tuple[float, float]], most: int) -> list[tuple[float, float]]:
    """Every n-th sample, so that there are at most so many; slopes are those of all."""
    every = -(-len(samples) // most) or 1
    return [*samples[::every]]
