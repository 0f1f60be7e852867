"""How long drives last (SSDTrain, section III-D)."""

from __future__ import annotations

import math

from offload_strategy.planner.hardware import Drive
from offload_strategy.planner.step_time import StepTime
from offload_strategy.units import SECONDS_PER_YEAR

#: Bytes that can be written for each rated byte: as the manufacturer rates, on which the warranty
#: depends; with large sequential writes instead of the random ones of the rating; and as SSDTrain
#: assumes, sequential writes of data that need not stay readable for years, but for a day.
_SEQUENTIAL, SSDTRAIN = 2.5, 2.5 * 86.0
_WEARS = {
    "as rated": 1.0,
    "sequential writes (rated at WAF 2.5)": _SEQUENTIAL,
    "and data kept for a day (86 times the cycles)": SSDTRAIN,
}


def lifespan_seconds(
    endurance_bytes: float, step_seconds: float, written_bytes: float, wear: float = 1.0
) -> float:
    """Return the seconds of training until drives reach their endurance; inf if nothing is written.

    See SSDTrain, section III-D.
    """
    return endurance_bytes * wear * step_seconds / written_bytes if written_bytes else math.inf


def lifespan_years(drives: Drive, step: StepTime) -> dict[str, float]:
    """Return years of training without a pause, by assumption; empty if no rating is known."""
    rated = drives.endurance_bytes
    if rated is None:
        return {}
    return {
        name: lifespan_seconds(rated, step.seconds, step.moved_bytes("written"), wear)
        / SECONDS_PER_YEAR
        for name, wear in _WEARS.items()
    }
