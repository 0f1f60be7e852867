"""Whose parameters are whose: what is a weight, and which engine has it."""

from offload_strategy.parameters.registry import ParameterRegistry

__all__ = ["ParameterRegistry"]
