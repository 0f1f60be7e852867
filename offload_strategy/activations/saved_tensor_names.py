"""Names of saved tensors for people: the module that saved them, dtype and shape."""

from __future__ import annotations

import sys
import weakref

import torch
from torch import nn

#: Kinds of items that are remembered.
_MOST_NAMES = 65536


class SavedTensorNames:
    """Names for people, determined once for each kind of item.

    The module is found on the call stack, so that it needs no hook; a compiled region has none.
    """

    def __init__(self) -> None:
        self._modules: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self._names: dict[int, str] = {}

    def add_modules(self, model: nn.Module) -> None:
        """Register the modules of a model under their names in it."""
        for name, module in model.named_modules():
            self._modules.setdefault(module, name or type(module).__name__)

    def note(self, prefix: int, tensor: torch.Tensor) -> None:
        """Name an item after the module that runs now.

        Args:
            prefix: Hash of its pass up to this item (`Trace.prefix_with`).
            tensor: The saved tensor.
        """
        if prefix in self._names:
            return
        if len(self._names) >= _MOST_NAMES:
            self._names.clear()
        looks = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
        self._names[prefix] = f"{self._running()} {looks}".strip()

    def of(self, prefix: int) -> str | None:
        """Return the name of an item, or None."""
        return self._names.get(prefix)

    def _running(self) -> str:
        frame = sys._getframe(1)
        call = nn.Module._call_impl.__code__
        while frame.f_back is not None:
            frame = frame.f_back
            if frame.f_code is call:
                module = frame.f_locals.get("self")
                if isinstance(module, nn.Module):
                    return self._modules.get(module, type(module).__name__)
        return ""
