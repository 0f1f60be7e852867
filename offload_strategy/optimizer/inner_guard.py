"""What a user's own optimizer refuses once it was wrapped: its states are elsewhere, or gone."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch.optim import Optimizer

from offload_strategy.errors import OffloadError

LOST = (
    "the states of this {kind} went with the earlier engine, or with the optimizer that attach or "
    "prepare returned, and it would begin again without them. Load a state_dict() of that one, "
    "saved before, into this one first, or make a new optimizer."
)

_STEP_ADVICE = (
    ", which does not step by itself any more. Train with the optimizer that attach returned: "
    "`optimizer = engine.attach(model, optimizer)`. To train without offload again, take the "
    "state_dict() of that one, close the engine, and load it into this one."
)
_STATE_ADVICE = (
    ". Use the optimizer that attach or prepare returned, or that trainer.optimizers has: "
    "`optimizer = engine.attach(model, optimizer); optimizer.{call}(...)`."
)

_guards: weakref.WeakKeyDictionary[Optimizer, InnerGuard] = weakref.WeakKeyDictionary()


class InnerGuard:
    """Hooks on a user's own optimizer, from the first time it is wrapped."""

    def __init__(self, inner: Optimizer) -> None:
        self._inner = weakref.ref(inner)
        #: The optimizers whose states the engine has that has wrapped `inner` last.
        self.attached: weakref.ref[weakref.WeakSet[Optimizer]] | None = None
        self.wrapper: weakref.ref[Optimizer] | None = None
        self.is_own_call = False
        #: Whether what has wrapped `inner` has states, or had some until it was freed.
        self.has_stored = False
        inner.register_step_pre_hook(partial(self._check, "step"))
        inner.register_state_dict_pre_hook(partial(self._check, "state_dict"))
        inner.register_load_state_dict_pre_hook(partial(self._check, "load_state_dict"))

    def _check(self, call: str, optimizer: Optimizer, *_: object) -> None:
        """Raise an OffloadError if the states are elsewhere, or gone and not about to be loaded."""
        # The wrapping optimizer runs these hooks with itself as argument, and so does a class whose
        # step() calls its base class on the stand-in for one subgroup.
        if optimizer is not self._inner() or self.is_own_call:
            return
        kind = type(optimizer).__name__
        attached = None if self.attached is None else self.attached()
        if attached is not None and optimizer in attached:
            advice = _STEP_ADVICE if call == "step" else _STATE_ADVICE.format(call=call)
            raise OffloadError(f"{call}(): an offload engine has the states of this {kind}{advice}")
        if call != "load_state_dict" and has_lost_states(optimizer):
            raise OffloadError(f"{call}(): {LOST.format(kind=kind)}")


def guard_of(inner: Optimizer) -> InnerGuard:
    """Return the guard of an optimizer that is wrapped, or was."""
    if inner not in _guards:
        _guards[inner] = InnerGuard(inner)
    return _guards[inner]


@contextmanager
def own_call(inner: Optimizer) -> Iterator[None]:
    """Context in which the wrapping optimizer saves or loads through its inner one."""
    guard = guard_of(inner)
    guard.is_own_call = True
    try:
        yield
    finally:
        guard.is_own_call = False


def has_lost_states(inner: Optimizer) -> bool:
    """Whether its states were freed with the optimizer that wrapped it, and not loaded since."""
    guard = _guards.get(inner)
    if guard is None or not guard.has_stored:
        return False
    if any(inner.state.get(p) for group in inner.param_groups for p in group["params"]):
        guard.has_stored = False  # it has states of its own again
        return False
    wrapper: Any = guard.wrapper and guard.wrapper()
    return wrapper is None or wrapper.closed
