"""Zeroing, freeing, failures, and gradients of unusual shapes and dtypes."""

from __future__ import annotations

import copy
import errno
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from offload_strategy.errors import StorageError
from offload_strategy.optimizer.gradients.gradient_backing import StoredGradient
from offload_strategy.optimizer.gradients.offloaded_gradient import OffloadedGradient
from tests.optimizer.gradients.acts import scaled, unscaled
from tests.optimizer.gradients.pairs import (
    MakePair,
    Pair,
    assert_same,
    forbid_loading,
    gradient,
    source_of,
)
from tests.store.rig import MakeRig, Rig

# ---------------------------------------------------------------------- zeros
ZEROING: dict[str, Callable[[Any], Any]] = {
    "zero_": lambda g: g.zero_(),
    "listed": lambda g: torch._foreach_zero_([g, torch.ones(3)]),
    "through data": lambda g: g.data.zero_(),
}


@pytest.mark.parametrize("zeroing", ZEROING)
def test_zeroing_loads_nothing_and_frees_the_ticket(
    pair_of: MakePair, rig: Rig, zeroing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = pair_of()
    scaled(pair.offloaded)
    with monkeypatch.context() as patch:
        forbid_loading(pair.offloaded, patch)
        ZEROING[zeroing](pair.offloaded)
    ZEROING[zeroing](pair.plain)
    assert rig.store.live_tickets == 0
    assert pair.edited
    pair.check()
    for act in (lambda g: g.mul_(torch.inf), lambda g: g.fill_(2), lambda g: g[1]):
        pair.same(act)
        pair.check()
    # What others have an alias of is zeroed in place.
    pair.same(lambda g: setattr(g, "kept", g.view(-1)) if g.is_contiguous() else None)
    pair.same(ZEROING[zeroing])
    pair.same(lambda g: g.kept)
    pair.check()


# ---------------------------------------------------------------------- life
def test_nothing_is_left_when_it_is_gone(pair_of: MakePair, rig: Rig) -> None:
    parameter = nn.Parameter(torch.empty_like(gradient()))

    def give() -> weakref.ref[torch.Tensor]:
        parameter.grad = pair_of().offloaded
        return weakref.ref(parameter.grad)

    gc.disable()
    try:
        reference = give()
        assert reference() is parameter.grad
        alias = parameter.grad.data
        parameter.grad = None
        assert reference() is None
        live = rig.store.live_tickets
        assert alias.sum().item() == gradient().sum().item()
        del alias
        assert rig.store.live_tickets == 0
        reference = give()
        assert rig.store.live_tickets == live
        parameter.grad = torch.ones_like(parameter)
        assert reference() is None
        assert rig.store.live_tickets == 0
        give()
        parameter.grad.add_(1)  # what is pinned needs no ticket
        assert rig.store.live_tickets == 0
    finally:
        gc.enable()


def test_operators_made_of_others_in_inference_mode(pair_of: MakePair) -> None:
    pair = pair_of()
    with torch.inference_mode():
        # Without autograd these arrive as they are.
        for act in (
            lambda g: g.contiguous() is g,
            lambda g: g.to(g.dtype) is g,
            lambda g: g.to(torch.float64),
            lambda g: g.isfinite().all(),
            lambda g: g.norm(),
        ):
            pair.same(act)
            pair.check()
        assert not pair.edited
        pair.same(lambda g: g.mul_(0.3))
        pair.same(lambda g: g.reshape(-1).sum())
        pair.same(lambda g: g.data.add_(1))
    # What was made there is an ordinary tensor, on which training goes on.
    assert not pair.offloaded.is_inference()
    assert not pair.backing.values().is_inference()
    pair.same(lambda g: g.add_(1))
    pair.check()


def test_copies_of_what_shares_memory_share_theirs(pair_of: MakePair) -> None:
    pair = pair_of()

    def act(g: Any) -> Any:
        row, whole = copy.deepcopy((g[1], g))
        row.fill_(7)
        return whole

    pair.same(act)


def test_a_failing_disk_is_told_and_the_gradient_is_as_before(make_rig: MakeRig) -> None:
    rig = make_rig()
    pair = Pair.of(gradient(), "stored", rig)
    pair.same(scaled)
    rig.backend.error = OSError(errno.EIO, "broken")
    for act in (
        lambda g: g.sum(),
        lambda g: g.add_(1),
        lambda g: g.view(-1),
        lambda g: g.backing.values(),
    ):
        with pytest.raises(StorageError):
            act(pair.offloaded)
    rig.backend.error = None
    assert not pair.edited
    pair.check()


@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 0), (1, 5), (5, 1), (2, 3, 4, 5)], ids=str)
def test_shapes_of_all_kinds(pair_of: MakePair, shape: tuple[int, ...]) -> None:
    for act in (
        lambda g: g.mul_(0.3),
        lambda g: g.norm(),
        lambda g: g.clone(),
        lambda g: g.sum().item(),
        lambda g: g.mul_(torch.tensor(1 / 3, dtype=torch.float64)),
        lambda g: unscaled(g, 1 / 3),
        lambda g: g.tolist(),
        lambda g: g.reshape(-1),
        lambda g: g.add_(1),
    ):
        pair = pair_of(gradient(shape=shape))
        pair.same(act)
        pair.check()
        assert_same(pair.backing.values(), pair.plain)


def test_complex_gradients_are_not_recorded_but_right(rig: Rig) -> None:
    values = torch.complex(gradient(), gradient(seed=1))
    for source in ("held", "stored"):
        pair = Pair(
            values.clone(), OffloadedGradient.of(source_of(source, values, rig), like=values)
        )
        for act in (lambda g: g.mul_(0.5), lambda g: g.mul_(1j), lambda g: g.abs(), torch.norm):
            pair.same(act)
            assert torch.equal(torch.clone(pair.offloaded), pair.plain)


def test_no_gap_may_be_stored(rig: Rig) -> None:
    with pytest.raises(ValueError, match="dense"):
        StoredGradient(rig.store, torch.ones(4, 4)[:, :2], [rig.disk])


def test_c_code_that_wants_the_address_gets_an_error_and_not_a_null_pointer(
    pair_of: MakePair,
) -> None:
    pair = pair_of()
    assert not hasattr(OffloadedGradient, "__dlpack_c_exchange_api__")
    assert not hasattr(pair.offloaded, "__dlpack_c_exchange_api__")
    for unbound in (
        lambda g: torch.Tensor.numpy(g),
        lambda g: torch.utils.dlpack.to_dlpack(g),
        lambda g: torch.Tensor.untyped_storage(g).tolist(),
        lambda g: torch.ones(37, 43).map_(g, lambda x, y: x + y),
    ):
        with pytest.raises(RuntimeError):
            unbound(pair.offloaded)
    pair.check()
