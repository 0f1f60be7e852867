"""A step, event by event: what a plan will take on given paths."""

from offload_strategy.planning.simulation.lanes import Span
from offload_strategy.planning.simulation.picture import draw
from offload_strategy.planning.simulation.replay import Replay, StepReplay, replay

__all__ = ["Replay", "Span", "StepReplay", "draw", "replay"]
