"""The two hooks on a module; apart from the rest, because torch.compile may trace them."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import nn

_COMPILED_AROUND_HOOKS = (
    "activation offload begins here, which cannot be part of a compiled graph. For "
    "torch.compile(model, fullgraph=True) compile first, and attach what it returns: "
    "engine.attach(compiled, ...)."
)


class Scopes(Protocol):
    """What the hooks of one module tell of its calls."""

    def enter(self, module: nn.Module) -> None:
        """A call begins."""

    def leave(self, module: nn.Module) -> None:
        """A call ends, or raised."""


class Before:
    """Forward pre-hook. A copy or a pickle of it does nothing: it belongs to one engine."""

    def __init__(self, scopes: Scopes | None = None) -> None:
        self._scopes = scopes

    def __call__(self, module: nn.Module, args: Any) -> None:
        """Open a scope."""
        if self._scopes is not None:
            if torch.compiler.is_dynamo_compiling():
                torch._dynamo.graph_break(msg=_COMPILED_AROUND_HOOKS)
            self._scopes.enter(module)

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        return type(self), ()


class After:
    """Forward hook; see `Before`."""

    def __init__(self, scopes: Scopes | None = None) -> None:
        self._scopes = scopes

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        """Close the scope."""
        if self._scopes is not None:
            self._scopes.leave(module)

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        return type(self), ()
