"""Hooks on a module that open and close a forward scope around every call of it.

[Note: torch.compile]
Where a compiled graph breaks, torch.compile tries to compile every Python function that runs next,
those included that our hooks call: seconds of compilation for nothing, and a warning for each
builtin that it cannot trace. It has a list of files that it leaves alone.
"""

from __future__ import annotations

import functools
import pkgutil
import threading
import weakref
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from wrapt import register_post_import_hook

from offload_strategy.activations import foreign_hooks as other_hooks
from offload_strategy.activations.saved_tensor_hooks import ActivationOffload
from offload_strategy.errors import OffloadError
from offload_strategy.torch_support.accelerator import is_capturing_graph
from offload_strategy.torch_support.interrupts import UninterruptedSection
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
        other_hooks.step_aside_for_transforms(ActivationOffload)
        _keep_torch_compile_out()
        self._module = weakref.ref(module)
        self._scopes = _Scopes(offload, owner)
        self._handles = [
            module.register_forward_pre_hook(self._scopes, prepend=True),
            module.register_forward_hook(self._scopes, always_call=True),
        ]

    def remove(self) -> None:
        """Take the hooks off the module. Idempotent."""
        for handle in self._handles:
            handle.remove()
        module = self._module()
        if module is None or not calls_of(module):
            self._scopes.leave_all()


class _Scopes:
    """The scopes that calls of one module have opened and not closed, on each thread.

    It is a forward pre-hook and a forward hook. A copy or a pickle of it does nothing.
    """

    def __init__(self, offload: ActivationOffload | None = None, owner: Any = None) -> None:
        self._offload: Any = offload
        self._owner = owner
        self._local = threading.local()

    @property
    def _open(self) -> list[tuple[list[int], saved_tensors_hooks | None]]:
        """Of each call its number, if it has one, and the hooks that it opened."""
        scopes: list[tuple[list[int], saved_tensors_hooks | None]]
        scopes = self._local.__dict__.setdefault("open", [])
        return scopes

    def __call__(self, module: nn.Module, args: Any, *output: Any) -> None:
        if self._offload is not None:
            (self._close if output else self._enter)(module)

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        return type(self), ()

    def _enter(self, module: nn.Module) -> None:
        """Open a scope for a call that begins."""
        calls = calls_of(module)
        if self._open and len(calls) == 1:
            # Only the call that asks is under way. A KeyboardInterrupt ended an earlier one: torch
            # runs "always called" hooks only for subclasses of Exception, so its scope is open.
            self.leave_all()
        # What a checkpointed region computes again inside backward is needed at once.
        recomputes = torch._C._current_graph_task_id() != -1
        trains = torch.is_grad_enabled() and not recomputes
        if trains and is_capturing_graph():
            raise OffloadError(
                f"the forward pass of {type(module).__name__} is being captured into a CUDA graph, "
                f"which would replay the kernels but not the moves of activations to the host. "
                f"Train without CUDA graphs (torch.compile: any mode but 'reduce-overhead' and "
                f"'max-autotune'), or without activation offload (activations.enabled: false)."
            )
        # Ctrl-C between hooks that are in force and the note of it would leave them so for ever.
        with UninterruptedSection():
            self._open.append((calls[:1], self._offload.enter() if trains else None))

    def _close(self, module: nn.Module) -> None:
        """Close the scope of a call that ends, or raised."""
        # When a hook before ours raises, ours are not told of the beginning, but of the end.
        if self._open and self._open[-1][0] == calls_of(module)[:1]:
            self._leave()

    def leave_all(self) -> None:
        """Close the scopes of this thread."""
        while self._open:
            self._leave()

    def _leave(self) -> None:
        with UninterruptedSection():
            self._offload.leave(self._open.pop()[1])


# ---------------------------------------------------------------------- torch.compile
@functools.cache
def _keep_torch_compile_out() -> None:
    """See to it that torch.compile does not look into this package."""
    # Importing torch._dynamo takes seconds, and who does not compile may never need it.
    register_post_import_hook(_keep_out, "torch._dynamo")


def _keep_out(dynamo: ModuleType) -> None:
    for module in pkgutil.iter_modules([str(Path(__file__).parents[1])], "offload_strategy."):
        if module.name != "offload_strategy.examples":  # models of ours are to be compiled
            dynamo.trace_rules.add(module.name)
    # A graph that reaches a hook breaks with words of ours.
    _Scopes.__call__ = dynamo.disable(_Scopes.__call__, reason=_COMPILED_AROUND_HOOKS)  # type: ignore[method-assign]
