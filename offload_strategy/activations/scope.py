"""Hooks on a module that open and close a forward scope around every call of it."""

from __future__ import annotations

import sys
import threading
import weakref
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from offload_strategy.activations.saved_tensors import ActivationOffload


class ForwardHooks:
    """Covers every training call of `module` with a scope of `offload`.

    Hooks rather than a replaced `forward`: signatures, scripts and other people's patches stay as
    they are.

    Args:
        module: the model.
        offload: whose scope to open.
        owner: kept alive as long as the module has these hooks.
    """

    def __init__(self, module: nn.Module, offload: ActivationOffload, owner: Any = None) -> None:
        self._module = weakref.ref(module)
        self._scopes = _Scopes(offload, owner)
        self._handles = [
            module.register_forward_pre_hook(_Before(self._scopes), prepend=True),
            module.register_forward_hook(_After(self._scopes), always_call=True),
        ]

    def remove(self) -> None:
        """Take the hooks off the module. Idempotent."""
        for handle in self._handles:
            handle.remove()
        module = self._module()
        if module is None or not _calls_under_way(module):
            self._scopes.leave_all()


class _Scopes:
    """The scopes that calls of one module have opened and not closed, on each thread."""

    def __init__(self, offload: ActivationOffload, owner: Any) -> None:
        self._offload = offload
        self._owner = owner
        self._local = threading.local()

    @property
    def _open(self) -> list[saved_tensors_hooks | None]:
        scopes: list[saved_tensors_hooks | None] = self._local.__dict__.setdefault("open", [])
        return scopes

    def enter(self, module: nn.Module) -> None:
        if self._open and _calls_under_way(module) == 1:
            # Only the call that asks is under way. A KeyboardInterrupt ended an earlier one: torch
            # runs "always called" hooks only for subclasses of Exception, so its scope is open.
            self.leave_all()
        trains = torch.is_grad_enabled() and module.training
        self._open.append(self._offload.enter() if trains else None)

    def leave(self) -> None:
        if self._open:
            self._offload.leave(self._open.pop())

    def leave_all(self) -> None:
        while self._open:
            self._offload.leave(self._open.pop())


def _calls_under_way(module: nn.Module) -> int:
    """How many calls of `module` are on this thread's stack."""
    calls = 0
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _CALL_CODE and frame.f_locals.get("self") is module:
            calls += 1
        frame = frame.f_back  # type: ignore[assignment]
    return calls


_CALL_CODE = nn.Module._call_impl.__code__


class _Before:
    """Forward pre-hook. A copy or a pickle of it does nothing: it belongs to one engine."""

    def __init__(self, scopes: _Scopes | None = None) -> None:
        self._scopes = scopes

    def __call__(self, module: nn.Module, args: Any) -> None:
        if self._scopes is not None:
            self._scopes.enter(module)

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        return type(self), ()


class _After:
    """Forward hook; see `_Before`."""

    def __init__(self, scopes: _Scopes | None = None) -> None:
        self._scopes = scopes

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._scopes is not None:
            self._scopes.leave()

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        return type(self), ()
