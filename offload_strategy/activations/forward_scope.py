"""Hooks on a module that open and close a forward scope around every call of it."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Iterator
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from offload_strategy.activations import foreign_hooks as other_hooks
from offload_strategy.activations.compile_exclusion import keep_torch_compile_out
from offload_strategy.activations.module_hooks import After, Before
from offload_strategy.activations.saved_tensor_hooks import ActivationOffload
from offload_strategy.errors import OffloadError
from offload_strategy.torch_support.accelerator import is_capturing_graph
from offload_strategy.torch_support.interrupts import UninterruptedSection


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
        other_hooks.step_aside_for_transforms(ActivationOffload)
        keep_torch_compile_out()
        self._module = weakref.ref(module)
        self._scopes = _Scopes(offload, owner)
        self._handles = [
            module.register_forward_pre_hook(Before(self._scopes), prepend=True),
            module.register_forward_hook(After(self._scopes), always_call=True),
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
    def _open(self) -> list[_Scope]:
        scopes: list[_Scope] = self._local.__dict__.setdefault("open", [])
        return scopes

    def enter(self, module: nn.Module) -> None:
        call = _innermost_call(module)
        if self._open and _calls_under_way(module) == 1:
            # Only the call that asks is under way. A KeyboardInterrupt ended an earlier one: torch
            # runs "always called" hooks only for subclasses of Exception, so its scope is open.
            self.leave_all()
        # What a checkpointed region computes again inside backward is needed at once.
        recomputes = torch._C._current_graph_task_id() != -1
        trains = torch.is_grad_enabled() and module.training and not recomputes
        if trains:
            _refuse_capture(module)
        # Ctrl-C between hooks that are in force and the note of it would leave them so for ever.
        with UninterruptedSection():
            self._open.append(_Scope(call, self._offload.enter() if trains else None))

    def leave(self, module: nn.Module) -> None:
        # When a hook before ours raises, ours are not told of the beginning, but of the end.
        if self._open and self._open[-1].call == _innermost_call(module):
            self._leave()

    def leave_all(self) -> None:
        while self._open:
            self._leave()

    def _leave(self) -> None:
        with UninterruptedSection():
            self._offload.leave(self._open.pop().hooks)


class _Scope(NamedTuple):
    """What one call of the module opened."""

    #: Of the call's frame, or 0; tells calls that are under way at the same time apart.
    call: int
    hooks: saved_tensors_hooks | None


def _innermost_call(module: nn.Module) -> int:
    for frame in _calls(module):
        return id(frame)
    return 0


def _calls_under_way(module: nn.Module) -> int:
    """How many calls of `module` are on this thread's stack."""
    return sum(1 for _ in _calls(module))


def _calls(module: nn.Module) -> Iterator[FrameType]:
    """Frames of the calls of `module` on this thread's stack, innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _CALL_CODE and frame.f_locals.get("self") is module:
            yield frame
        frame = frame.f_back


_CALL_CODE = nn.Module._call_impl.__code__


def _refuse_capture(module: nn.Module) -> None:
    if is_capturing_graph():
        raise OffloadError(
            f"the forward pass of {type(module).__name__} is being captured into a CUDA graph, "
            f"which would replay the kernels but not the moves of activations to the host. Train "
            f"without CUDA graphs (torch.compile: any mode but 'reduce-overhead' and "
            f"'max-autotune'), or without activation offload (activations.enabled: false)."
        )
