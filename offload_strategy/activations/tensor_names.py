"""What an item is called: the module that saved it, and what it looks like."""

from __future__ import annotations

import sys
import weakref

import torch
from torch import nn

#: Kinds of items that are remembered.
_MOST_NAMES = 65536


class ItemNames:
    """Names for people, found once for each kind of item.

    A module is found on the stack of calls, so that no hook has to be put on it; within a compiled
    region there is none.
    """

    def __init__(self) -> None:
        self._modules: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self._names: dict[int, str] = {}

    def add_modules(self, model: nn.Module) -> None:
        """From now on the modules of a model have the names that they have in it."""
        for name, module in model.named_modules():
            self._modules.setdefault(module, name or type(module).__name__)

    def note(self, prefix: int, tensor: torch.Tensor) -> None:
        """An item is saved by what runs at the moment.

        Args:
            prefix: what its pass looks like with it (`Trace.prefix_with`).
            tensor: that is saved.
        """
        if prefix in self._names:
            return
        if len(self._names) >= _MOST_NAMES:
            self._names.clear()
        looks = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
        self._names[prefix] = f"{self._running()} {looks}".strip()

    def of(self, prefix: int) -> str | None:
        """The name of an item, if it has one."""
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
