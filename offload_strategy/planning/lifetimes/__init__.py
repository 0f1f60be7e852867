"""What may leave memory between its uses: profiles of steps, and plans for them."""

from offload_strategy.planning.lifetimes.bandwidth import BookedPath, Timeline
from offload_strategy.planning.lifetimes.plan import (
    HOST,
    HostRoom,
    LifetimePlan,
    PlannedMove,
    plan_lifetimes,
    within,
)
from offload_strategy.planning.lifetimes.plan_file import (
    GivenPlan,
    PlannedItem,
    load_plan,
    save_plan,
)
from offload_strategy.planning.lifetimes.pressure import Pressure
from offload_strategy.planning.lifetimes.profile import (
    Block,
    PathRates,
    Profile,
    TensorLife,
    Update,
    peak_of,
)

__all__ = [
    "HOST",
    "Block",
    "BookedPath",
    "GivenPlan",
    "HostRoom",
    "LifetimePlan",
    "PathRates",
    "PlannedItem",
    "PlannedMove",
    "Pressure",
    "Profile",
    "TensorLife",
    "Timeline",
    "Update",
    "load_plan",
    "peak_of",
    "plan_lifetimes",
    "save_plan",
    "within",
]
