"""How much and where: pure functions over numbers. No I/O, no work on devices."""

from offload_strategy.planning.lifetimes import (
    Block,
    GivenPlan,
    LifetimePlan,
    PathRates,
    PlannedItem,
    Profile,
    TensorLife,
    Update,
    load_plan,
    plan_lifetimes,
    save_plan,
    within,
)
from offload_strategy.planning.memory_forecast import (
    MemoryForecast,
    StreamedShapes,
    memory_forecast,
)
from offload_strategy.planning.recompute import Mix, choose_mix, with_recomputed
from offload_strategy.planning.requirements import (
    SpaceNeed,
    optimizer_need,
    shortfall,
    spare_memory_advice,
    weights_shortfall,
)
from offload_strategy.planning.step_plan import PlanRow, StepPlan, Turn, step_plan
from offload_strategy.planning.subgroup_sizes import subgroup_size

__all__ = [
    "Block",
    "GivenPlan",
    "LifetimePlan",
    "MemoryForecast",
    "Mix",
    "PathRates",
    "PlanRow",
    "PlannedItem",
    "Profile",
    "SpaceNeed",
    "StepPlan",
    "StreamedShapes",
    "TensorLife",
    "Turn",
    "Update",
    "choose_mix",
    "load_plan",
    "memory_forecast",
    "optimizer_need",
    "plan_lifetimes",
    "save_plan",
    "shortfall",
    "spare_memory_advice",
    "step_plan",
    "subgroup_size",
    "weights_shortfall",
    "with_recomputed",
    "within",
]
