"""Getting on with saved-tensor hooks that are not ours, and with code that allows none.

[Note: hooks around ours]
Of nested saved-tensor hooks torch calls the innermost alone. Ours come with a module that was
attached, and whoever wraps the call of that module in hooks of his own (to count, to compress, to
recompute: non-reentrant checkpointing is such hooks) did not ask for them to be replaced. So where
hooks are in force already when ours begin, a saved tensor goes through those first, and what they
make of it leaves if it is a tensor. Whoever opens hooks inside a forward pass wins, as always.

[Note: transforms allow no hooks]
`torch.func.grad`, `vjp`, `jacrev` and `hessian` raise an error where saved-tensor hooks are in
force: a model that uses one of them in its forward pass would not run. They announce themselves
with two functions of torch's, which are replaced here: while hooks are disallowed, ours are taken
off the thread's stack, and what the transform saves stays.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

_autograd: Any = torch._C._autograd
_KEYS = torch._C._TorchDispatchModeKey
_TRACING_MODES = (_KEYS.FAKE, _KEYS.PROXY, _KEYS.FUNCTIONAL)


class HookPair(NamedTuple):
    """What `saved_tensors_hooks` are made of."""

    pack: Callable[[torch.Tensor], Any]
    unpack: Callable[[Any], torch.Tensor]


def innermost() -> HookPair | None:
    """The hooks that are in force on this thread, or None."""
    pair = _autograd._top_saved_tensors_default_hooks(True)
    return None if pair is None else HookPair(*pair)


def may_open() -> bool:
    """Whether hooks of ours may be put in force here.

    Not inside a transform that forbids it, and not where somebody records operations or computes
    without data, so that there are no bytes.
    """
    if not _autograd._saved_tensors_hooks_is_enabled():
        return False
    if torch._C._get_tracing_state() is not None:
        return False
    return all(torch._C._get_dispatch_mode(key) is None for key in _TRACING_MODES)


def foreign(owner: type) -> HookPair | None:
    """The hooks in force that do not belong to an `owner`, or to whom one of ours hands on.

    Args:
        owner: class whose methods our own hooks are.
    """
    pair = innermost()
    if pair is None:
        return None
    of = getattr(pair.pack, "__self__", None)
    if isinstance(of, _Through):
        return of.outer
    return None if isinstance(of, owner) else pair


def belong_to(owner: object) -> bool:
    """Whether the hooks in force are methods of `owner`."""
    pair = innermost()
    of = None if pair is None else getattr(pair.pack, "__self__", None)
    if isinstance(of, _Through):
        of = getattr(of.ours.pack, "__self__", None)
    return of is owner


def go_through(outer: HookPair) -> None:
    """Let the hooks that are in force see what `outer` makes of each saved tensor."""
    ours = innermost()
    assert ours is not None
    both = _Through(ours, outer)
    _autograd._pop_saved_tensors_default_hooks()
    _autograd._push_saved_tensors_default_hooks(both.pack, both.unpack)


class _Opaque(NamedTuple):
    """What foreign hooks made of a tensor, when that is no tensor."""

    packed: Any


class _Through:
    """Our hooks behind those of somebody else; see [Note: hooks around ours]."""

    def __init__(self, ours: HookPair, outer: HookPair) -> None:
        self.ours = ours
        self.outer = outer

    def pack(self, tensor: torch.Tensor) -> Any:
        packed = self.outer.pack(tensor)
        return self.ours.pack(packed) if isinstance(packed, torch.Tensor) else _Opaque(packed)

    def unpack(self, packed: Any) -> torch.Tensor:
        if isinstance(packed, _Opaque):
            return self.outer.unpack(packed.packed)
        return self.outer.unpack(self.ours.unpack(packed))


# ---------------------------------------------------------------------- transforms
class _Aside(threading.local):
    """Hooks of ours that were taken off this thread's stack, innermost first."""

    def __init__(self) -> None:
        self.pairs: list[HookPair] = []


_aside = _Aside()
_owner: type | None = None


def step_aside_for_transforms(owner: type) -> None:
    """See to it that transforms which allow no hooks find none of ours. Idempotent.

    Args:
        owner: class whose methods our own hooks are.
    """
    global _owner
    if _owner is not None or not _can_be_replaced():
        return
    _owner = owner
    disable, enable = _autograd._saved_tensors_hooks_disable, _autograd._saved_tensors_hooks_enable

    def disable_hooks(message: str, fail_if_non_empty: bool = True) -> None:
        if not fail_if_non_empty:
            disable(message, False)
            return
        _take_off()
        disable(message)

    def enable_hooks() -> None:
        enable()
        while _aside.pairs:
            _autograd._push_saved_tensors_default_hooks(*_aside.pairs.pop())

    _autograd._saved_tensors_hooks_disable = disable_hooks
    _autograd._saved_tensors_hooks_enable = enable_hooks


def _can_be_replaced() -> bool:
    names = ("_saved_tensors_hooks_disable", "_saved_tensors_hooks_enable")
    return all(hasattr(_autograd, name) for name in names)


def _take_off() -> None:
    while (pair := innermost()) is not None:
        of = getattr(pair.pack, "__self__", None)
        if _owner is None or not isinstance(of, _owner):
            return  # somebody else's, or ours behind somebody else's: the error is theirs
        _aside.pairs.append(pair)
        _autograd._pop_saved_tensors_default_hooks()
