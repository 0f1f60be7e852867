"""How much and where: pure functions over numbers. No I/O, no work on devices."""

from offload_strategy.planning.requirements import (
    SpaceNeed,
    optimizer_need,
    shortfall,
    spare_memory_advice,
    weights_shortfall,
)

__all__ = ["SpaceNeed", "optimizer_need", "shortfall", "spare_memory_advice", "weights_shortfall"]
