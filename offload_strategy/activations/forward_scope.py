"""Hooks on a module that open and close a forward scope around every call of it.

[Note: torch.compile]
Where a compiled graph breaks, torch.compile tries to compile every Python function that runs next,
those included that our hooks call: seconds of compilation for nothing, and a warning for each
builtin that it cannot trace. It has a list of files that it leaves alone.
"""

from __future__ import annotations

import pkgutil
import threading
import weakref
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from wrapt import when_imported

from offload_strategy.activations import foreign_hooks as other_hooks
from offload_strategy.activations.saved_tensor_hooks import ActivationOffload
from offload_strategy.errors import ConfigError, OffloadError
from offload_strategy.torch_support.accelerator import is_capturing_graph
from offload_strategy.torch_support.keyboard_interrupts import UninterruptedSection
from offload_strategy.torch_support.modules import calls_of

_COMPILED_AROUND_HOOKS = (
    "activation offload begins here, which cannot be part of a compiled graph. For "
    "torch.compile(model, fullgraph=True) compile first, and attach what it returns: "
    "engine.attach(compiled, ...)."
)


class ForwardHooks:
    """Covers every training call of `module` with a scope of `offload`.

    Hooks rather than a replaced `forward`: signatures, scripts and other people's patches stay as
    they are. The owner is kept alive as long as the module has these hooks.
    """

    def __init__(self, module: nn.Module, offload: ActivationOffload, owner: Any = None) -> None:
        if isinstance(module, torch.jit.ScriptModule):
            raise ConfigError(
                "attach: the model is a ScriptModule, and PyTorch calls no hooks of such a module. "
                "Attach one that calls it (torch.nn.Sequential(model)), or the one that it was "
                "before torch.jit."
            )
        other_hooks.watch_others(ActivationOffload)
        self._module = weakref.ref(module)
        scopes = _Scopes(offload, owner)
        self._handles = [
            module.register_forward_pre_hook(scopes, prepend=True),
            module.register_forward_hook(scopes, always_call=True),
        ]

    def remove(self) -> None:
        """Take the hooks off the module. Idempotent."""
        for handle in self._handles:
            handle.remove()
        leave_interrupted_calls(self._module())


class _OpenScope(NamedTuple):
    module: weakref.ref[nn.Module]
    call: list[int]  # its number, if it has one
    offload: ActivationOffload
    hooks: saved_tensors_hooks | None


_of_thread = threading.local()


def _open_scopes() -> list[_OpenScope]:
    """The scopes that calls of attached modules have opened on this thread and not closed."""
    scopes: list[_OpenScope] = _of_thread.__dict__.setdefault("scopes", [])
    return scopes


def _leave_last() -> None:
    with UninterruptedSection():
        _, _, offload, hooks = _open_scopes().pop()
        offload.leave(hooks)


def leave_interrupted_calls(own: nn.Module | None = None, beginning: int = 0) -> None:
    """Leave the scopes of this thread whose calls were ended by a KeyboardInterrupt.

    Torch runs hooks that are "always called" only for subclasses of Exception. Of the module `own`
    calls without a number, as compiled ones, count, and `beginning` calls have no scope yet.
    """
    scopes = _open_scopes()
    while scopes:
        module = scopes[-1].module()
        if module is not None:
            running = len(calls_of(module)) - (beginning if module is own else 0)
            opened = sum(scope.module() is module for scope in scopes)
            if opened <= running or not (scopes[-1].call or module is own):
                break
        _leave_last()


class _Scopes:
    """The forward pre-hook and the forward hook of one module; a copy or a pickle does nothing."""

    def __init__(self, offload: ActivationOffload | None = None, owner: Any = None) -> None:
        self._offload: Any = offload
        self._owner = owner

    def __call__(self, module: nn.Module, args: Any, *output: Any) -> None:
        if self._offload is not None:
            (self._close if output else self._enter)(module)

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        return type(self), ()

    def _enter(self, module: nn.Module) -> None:
        """Open a scope for a call that begins."""
        calls = calls_of(module)
        if calls:
            leave_interrupted_calls(module, beginning=1)
        # What a checkpointed region computes again inside backward is needed at once.
        trains = torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1
        if trains and is_capturing_graph():
            raise OffloadError(
                f"the forward pass of {type(module).__name__} is being captured into a CUDA graph, "
                f"which would replay the kernels but not the moves of activations to the host. "
                f"Train without CUDA graphs (torch.compile: any mode but 'reduce-overhead' and "
                f"'max-autotune'), or without activation offload (activations.enabled: false)."
            )
        # Ctrl-C between hooks that are in force and the note of it would leave them so for ever.
        with UninterruptedSection():
            hooks = self._offload.enter() if trains else None
            _open_scopes().append(_OpenScope(weakref.ref(module), calls[:1], self._offload, hooks))

    def _close(self, module: nn.Module) -> None:
        """Close the scope of a call that ends, or raised."""
        call, scopes = calls_of(module)[:1], _open_scopes()
        # When a hook before ours raises, ours are not told of the beginning, but of the end.
        places = [
            place
            for place, scope in enumerate(scopes)
            if scope.module() is module and scope.call == call
        ]
        while places and len(scopes) > places[-1]:  # interrupted calls inside of it end with it
            _leave_last()


# ---------------------------------------------------------------------- torch.compile
# Importing torch._dynamo takes seconds, and who does not compile may never need it.
@when_imported("torch._dynamo")
def _keep_torch_compile_out(dynamo: ModuleType) -> None:
    """See to it that torch.compile does not look into this package."""
    for module in pkgutil.iter_modules([str(Path(__file__).parents[1])], "offload_strategy."):
        if module.name != "offload_strategy.examples":  # models of ours are to be compiled
            dynamo.trace_rules.add(module.name)
    # A graph that reaches a hook breaks with words of ours.
    _Scopes.__call__ = dynamo.disable(_Scopes.__call__, reason=_COMPILED_AROUND_HOOKS)  # type: ignore[method-assign]
