"""Checkpoints of Transformers' `Trainer` with data-parallel processes that share states.

The Trainer asks its optimizer for a state dict on the process that saves and on no other. All of
them call the method in which it does, so there they bring the states together first.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

_METHOD = "_save_optimizer_and_scheduler"
_INSTALLED = "_ssd_offload_installed"


def install() -> None:
    """Wrap the method, if the Trainer is imported, as it is when one makes its `Accelerator`."""
    trainer = getattr(sys.modules.get("transformers.trainer"), "Trainer", None)
    original = getattr(trainer, _METHOD, None)
    if original is not None and not hasattr(original, _INSTALLED):
        setattr(trainer, _METHOD, _collected(original))


def _collected(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def save(self: Any, *args: Any, **kwargs: Any) -> Any:
        from offload_strategy.optimizer.offloaded_optimizer import OffloadedOptimizer

        optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
        if isinstance(optimizer, OffloadedOptimizer):
            optimizer.consolidate_state_dict()
        return original(self, *args, **kwargs)

    setattr(save, _INSTALLED, True)
    return save
