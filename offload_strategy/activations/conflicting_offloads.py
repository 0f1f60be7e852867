"""Refuses others who offload the same activations, before the first of them is computed.

Of nested saved-tensor hooks one pair gets the tensor, so two who offload do not add up: one of them
would do nothing, unnoticed. Two are known, and each is an option that somebody has set:

- TRL's `activation_offloading=True` puts hooks around the whole training step, outside of ours, and
  hands on numbers in place of tensors.
- Transformers' `activation_checkpointing_kwargs={"offload": True}` puts `save_on_cpu` around each
  recomputed layer, inside of ours.

Hooks that a model opens by itself are its own affair: see [Note: hooks around ours] in
`other_hooks`.
"""

from __future__ import annotations

from torch import nn

from offload_strategy.activations.foreign_hooks import HookPair
from offload_strategy.errors import ConfigError

#: Part of the names of modules that define such hooks: TRL's, and those that it was made after.
_OFFLOADERS = "activation_offload"

_ADVICE = (
    "and one tensor can leave only once. Leave that out and let this engine move activations, or "
    "keep it and set activations: {enabled: false} in the config of offload-strategy; optimizer "
    "states are offloaded either way."
)


def refuse_hooks_that_offload(outer: HookPair | None) -> None:
    """Refuse saved-tensor hooks around ours that offload.

    Args:
        outer: the hooks in force where ours begin.

    Raises:
        ConfigError: they are those of another activation offload.
    """
    module = getattr(outer.pack, "__module__", None) if outer is not None else None
    if module is not None and _OFFLOADERS in module:
        raise ConfigError(
            f"activations are offloaded by {module} already (in TRL: activation_offloading=True), "
            f"{_ADVICE}"
        )


def refuse_checkpoints_that_offload(model: nn.Module) -> None:
    """Refuse layers that move to the host what they keep for recomputing.

    Args:
        model: about to be attached.

    Raises:
        ConfigError: Transformers' activation checkpointing was enabled with ``offload``.
    """
    for name, module in model.named_modules():
        checkpoint = getattr(module, "_gradient_checkpointing_func", None)
        function = getattr(checkpoint, "func", checkpoint)  # a partial, with the user's options
        code = getattr(function, "__code__", None)
        if code is not None and "save_on_cpu" in code.co_names:
            raise ConfigError(
                f"activation checkpointing of {name or type(module).__name__!r} offloads what it "
                f'keeps (in Transformers: activation_checkpointing_kwargs={{"offload": True}}), '
                f"{_ADVICE}"
            )
