"""`p.grad` between backward and `step()`, when the gradient's values are elsewhere."""

from offload_strategy.optimizer.gradients.access import has_gradient, values_of
from offload_strategy.optimizer.gradients.backing import norm_of
from offload_strategy.optimizer.gradients.recipe import Recipe
from offload_strategy.optimizer.gradients.sources import Consumed, Held, Source, Stored
from offload_strategy.optimizer.gradients.stand_in import GradientStandIn
from offload_strategy.optimizer.gradients.waiting import WaitingGradients

__all__ = [
    "Consumed",
    "GradientStandIn",
    "Held",
    "Recipe",
    "Source",
    "Stored",
    "WaitingGradients",
    "has_gradient",
    "norm_of",
    "values_of",
]
