"""Saved tensors leave after the forward pass and are back before the backward pass needs them."""

from offload_strategy.activations.other_offloads import refuse_checkpoints_that_offload
from offload_strategy.activations.planned import MemoryLimit
from offload_strategy.activations.rehearsal import rehearse
from offload_strategy.activations.saved_tensors import ActivationOffload, Packed
from offload_strategy.activations.scope import ForwardHooks

__all__ = [
    "ActivationOffload",
    "ForwardHooks",
    "MemoryLimit",
    "Packed",
    "refuse_checkpoints_that_offload",
    "rehearse",
]
