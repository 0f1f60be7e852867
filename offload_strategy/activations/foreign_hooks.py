"""Getting on with saved-tensor hooks that are not ours, and with code that allows none.

[Note: others who offload]
Of nested saved-tensor hooks torch calls the innermost alone, so of two who offload one would do
nothing, unnoticed. Two are known and refused: TRL's `activation_offloading=True` puts hooks around
the whole training step; Transformers' `activation_checkpointing_kwargs={"offload": True}` puts
`save_on_cpu` around each recomputed layer.

[Note: hooks around ours]
Whoever wraps the call of an attached module in hooks of his own (to count, to compress, to
recompute: non-reentrant checkpointing is such hooks) did not ask for them to be replaced by ours.
So a saved tensor goes through those first, and what they make of it leaves if it is a tensor.
Whoever opens hooks inside a forward pass wins, as always. Of a streamed weight all of them get
another Parameter on the same bytes, as they may keep it (as torch.utils.checkpoint does without
gradients): offloading takes the bytes away from the weight, unless others share its storage.

[Note: transforms allow no hooks]
`torch.func.grad`, `vjp`, `jacrev` and `hessian` raise an error where saved-tensor hooks are in
force. They announce themselves with two functions of torch's, which are replaced here: while hooks
are disallowed, ours are taken off the thread's stack, and what the transform saves stays, as do the
weights of blocks that compute.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from offload_strategy.errors import ConfigError

_autograd: Any = torch._C._autograd
_KEYS = torch._C._TorchDispatchModeKey
_TRACING_MODES = (_KEYS.FAKE, _KEYS.PROXY, _KEYS.FUNCTIONAL)

#: Part of the names of modules that define such hooks: TRL's, and those that it was made after.
_OFFLOADERS = "activation_offload"
_ADVICE = (
    "and one tensor can leave only once. Leave that out and let this engine move activations, or "
    "keep it and set activations: {enabled: false} in the config of offload-strategy; optimizer "
    "states are offloaded either way."
)


class HookPair(NamedTuple):
    """What `saved_tensors_hooks` are made of."""

    pack: Callable[[torch.Tensor], Any]
    unpack: Callable[[Any], torch.Tensor]

    @property
    def owner(self) -> Any:
        """The object whose methods they are, or None."""
        return getattr(self.pack, "__self__", None)


def innermost() -> HookPair | None:
    """The hooks that are in force on this thread, or None."""
    pair = _autograd._top_saved_tensors_default_hooks(True)
    return None if pair is None else HookPair(*pair)


def may_open() -> bool:
    """Whether no transform forbids hooks here, and there are bytes (nobody records operations)."""
    return (
        _autograd._saved_tensors_hooks_is_enabled()
        and torch._C._get_tracing_state() is None
        and all(torch._C._get_dispatch_mode(key) is None for key in _TRACING_MODES)
    )


def ours_and_foreign(kind: type) -> tuple[object, HookPair | None]:
    """Return the object of a `kind` whose methods are the hooks in force, and the foreign hooks.

    Foreign are those in force if they are nobody's of that `kind`, or those that his stand behind.
    """
    pair = innermost()
    owner = None if pair is None else pair.owner
    if isinstance(owner, _Through):
        return owner.ours.owner, owner.outer
    return (owner, None) if isinstance(owner, kind) else (None, pair)


def behind(
    outer: HookPair | None, pack: Callable[[torch.Tensor], Any], unpack: Callable[[Any], Any]
) -> saved_tensors_hooks:
    """Return hooks that see what `outer`, if there is one, makes of each saved tensor."""
    if outer is not None:
        both = _Through(HookPair(pack, unpack), outer)
        pack, unpack = both.pack, both.unpack
    return saved_tensors_hooks(pack, unpack)


class _Through:
    """Our hooks behind those of somebody else; see [Note: hooks around ours]."""

    def __init__(self, ours: HookPair, outer: HookPair) -> None:
        self.ours = ours
        self.outer = outer

    def pack(self, tensor: torch.Tensor) -> Any:
        packed = self.outer.pack(_to_keep(tensor))
        # Ours never make a tuple, so one stands for what is no tensor.
        return self.ours.pack(packed) if isinstance(packed, torch.Tensor) else (packed,)

    def unpack(self, packed: Any) -> torch.Tensor:
        known = packed[0] if isinstance(packed, tuple) else self.ours.unpack(packed)
        return self.outer.unpack(known)


def _to_keep(tensor: torch.Tensor) -> torch.Tensor:
    """Return another Parameter on the same bytes for a streamed weight, and others as they are."""
    if getattr(type(tensor), "stands_for_plain", False) and isinstance(tensor, nn.Parameter):
        return nn.Parameter(tensor.detach(), tensor.requires_grad)
    return tensor


# ---------------------------------------------------------------------- others who offload
def refuse_hooks_that_offload(outer: HookPair | None) -> None:
    """Raise a ConfigError if the hooks around ours are those of another activation offload."""
    module = getattr(outer.pack, "__module__", None) if outer is not None else None
    if module is not None and _OFFLOADERS in module:
        raise ConfigError(
            f"activations are offloaded by {module} already (in TRL: activation_offloading=True), "
            f"{_ADVICE}"
        )


def refuse_checkpoints_that_offload(model: nn.Module) -> None:
    """Raise a ConfigError if layers of Transformers offload what they keep for recomputing."""
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


# ---------------------------------------------------------------------- transforms
#: Its `pairs` are the hooks of ours that were taken off a thread's stack, innermost first.
_aside = threading.local()


@functools.cache
def watch_others(kind: type[Any]) -> None:
    """Give others' hooks what they may keep, and transforms no methods of a `kind`. Idempotent."""
    disable = _autograd._saved_tensors_hooks_disable
    enable = _autograd._saved_tensors_hooks_enable
    push = _autograd._push_saved_tensors_default_hooks

    def push_hooks(pack: Callable[[torch.Tensor], Any], unpack: Callable[[Any], Any]) -> None:
        if isinstance(HookPair(pack, unpack).owner, (kind, _Through)):
            push(pack, unpack)
        else:
            push(functools.wraps(pack)(lambda tensor: pack(_to_keep(tensor))), unpack)

    def disable_hooks(message: str, fail_if_non_empty: bool = True) -> None:
        if not fail_if_non_empty:
            disable(message, False)
            return
        # Somebody else's hooks stay, and ours behind somebody else's: the error is theirs.
        while (pair := innermost()) is not None and isinstance(pair.owner, kind):
            _aside.__dict__.setdefault("pairs", []).append(pair)
            pair.owner.keep_weights()
            _autograd._pop_saved_tensors_default_hooks()
        disable(message)

    def enable_hooks() -> None:
        enable()
        while pairs := _aside.__dict__.get("pairs"):
            push(*pairs.pop())

    _autograd._push_saved_tensors_default_hooks = push_hooks
    _autograd._saved_tensors_hooks_disable = disable_hooks
    _autograd._saved_tensors_hooks_enable = enable_hooks
