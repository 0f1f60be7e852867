"""Zeroing, freeing, failures, gradients of unusual shapes, and those that an update used up."""

import errno
import gc
import weakref

import pytest
import torch
from torch import nn

from offload_strategy.errors import OffloadError, StorageError
from offload_strategy.optimizer.gradients.gradient_backing import ConsumedGradient
from offload_strategy.optimizer.gradients.offloaded_gradient import OffloadedGradient
from tests.optimizer.gradients.acts import PINS, READS, STEPS, scaled, unscaled, with_gradient
from tests.optimizer.gradients.pairs import Pair, assert_same, forbid_loading, gradient

ZEROING = {
    "zero_": lambda p: p.grad.zero_(),
    "listed": lambda p: torch._foreach_zero_([p.grad, torch.ones(3)]),
    "by the optimizer, foreach": lambda p: torch.optim.SGD([p], lr=0.1, foreach=True).zero_grad(
        set_to_none=False
    ),
    "through data": lambda p: p.grad.data.zero_(),
    "by the model": lambda p: nn.ParameterList([p]).zero_grad(set_to_none=False),
    "filled": lambda p: p.grad.fill_(0.0),
    "copied into": lambda p: p.grad.copy_(torch.zeros_like(p)),
}


@pytest.mark.parametrize("zeroing", ZEROING.values(), ids=ZEROING)
def test_zeroing_loads_nothing_and_frees_the_ticket(pair_of, rig, zeroing, monkeypatch):
    pair = pair_of()
    scaled(pair.offloaded)
    with monkeypatch.context() as patch:
        forbid_loading(pair.offloaded, patch)
        zeroing(with_gradient(pair.offloaded))
    zeroing(with_gradient(pair.plain))
    assert rig.store.registry.live == 0
    assert pair.edited
    pair.check()
    for act in (lambda g: g.mul_(torch.inf), lambda g: g.fill_(2), lambda g: g[1]):
        pair.same(act)
        pair.check()
    # What others have an alias of is zeroed in place.
    pair.same(lambda g: setattr(g, "kept", g.view(-1)))
    pair.same(lambda g: zeroing(with_gradient(g)))
    pair.same(lambda g: g.kept)
    pair.check()


# ---------------------------------------------------------------------- life
def test_nothing_is_left_when_it_is_gone(pair_of, rig):
    parameter = nn.Parameter(torch.empty_like(gradient()))

    def give():
        parameter.grad = pair_of().offloaded
        return weakref.ref(parameter.grad)

    gc.disable()
    try:
        reference = give()
        assert reference() is parameter.grad
        alias = parameter.grad.data
        parameter.grad = None
        assert reference() is None
        live = rig.store.registry.live
        assert alias.sum().item() == gradient().sum().item()
        del alias
        assert rig.store.registry.live == 0
        reference = give()
        assert rig.store.registry.live == live
        parameter.grad = torch.ones_like(parameter)
        assert reference() is None
        assert rig.store.registry.live == 0
        give()
        parameter.grad.add_(1)  # what is pinned needs no ticket
        assert rig.store.registry.live == 0
    finally:
        gc.enable()


def test_operators_made_of_others_in_inference_mode(pair_of):
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


def test_a_failing_disk_is_told_and_the_gradient_is_as_before(make_rig):
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
def test_shapes_of_all_kinds(pair_of, shape):
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


def test_complex_gradients_are_not_recorded_but_right(pair_of):
    pair = pair_of(torch.complex(gradient(), gradient(seed=1)))
    for act in (lambda g: g.mul_(0.5), lambda g: g.mul_(1j), lambda g: g.abs(), torch.norm):
        pair.same(act)
        assert torch.equal(torch.clone(pair.offloaded), pair.plain)


def test_c_code_that_wants_the_address_gets_an_error_and_not_a_null_pointer(pair_of):
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


# ---------------------------------------------------------------------- used up by an update
WHAT = "parameter 'head.weight' (3 x 5)"


def consumed():
    return OffloadedGradient.of(ConsumedGradient(WHAT), like=torch.empty(3, 5))


#: Acts that need no values, or are refused for another reason.
WITHOUT_VALUES = {
    *("full like it", "empty like it", "like it in another dtype", "random like it"),
    *("repr", "classes", "bool", "unchanged by to", "not a scalar"),
    *("filled", "filled by a tensor", "copied into", "copied from its transpose", "data set"),
    *("data set to another shape", "from a vector", "refused", "refused for its limit"),
}
USES = {
    **{n: act for n, act in (READS | PINS | STEPS).items() if n not in WITHOUT_VALUES},
    "norm of data": lambda g: g.data.norm(),
    "listed norm": lambda g: torch._foreach_norm([g]),
    "raw": lambda g: g.backing.raw(),
    "updated with": lambda g: torch.optim.SGD([with_gradient(g)], lr=0.1).step(),
    "of a model that is converted": lambda g: nn.ParameterList([with_gradient(g)]).double(),
    "of another backward": lambda g: (with_gradient(g) ** 2).sum().backward(create_graph=True),
}


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_whatever_needs_the_values_names_parameter_reason_and_remedy():
    for name, use in USES.items():
        offloaded = consumed()
        with pytest.raises(OffloadError) as refused:
            use(offloaded)
        for part in (WHAT, "overlap: eager", "overlap: commit", "step()"):
            assert part in str(refused.value), name
        assert not offloaded.backing.edited, name
        assert not offloaded.backing.history.edits, name


def test_its_metadata_are_those_of_the_gradient():
    g = consumed()
    assert (g.shape, g.dtype, g.stride(), g.grad_fn) == ((3, 5), torch.float32, (5, 1), None)
    assert "consumed" in repr(g)
    assert "consumed" in f"{g}"
    assert g.data.shape == g.detach().shape == (3, 5)
    assert torch.equal(torch.zeros_like(g), torch.zeros(3, 5))
    g.detach_()
    g.requires_grad_(False)
    assert g.to("cpu") is g


def replaced(parameter):
    parameter.grad.data = torch.zeros_like(parameter)


@pytest.mark.parametrize("zeroing", [*ZEROING.values(), replaced], ids=[*ZEROING, "replaced"])
def test_zeroed_it_is_a_gradient_again(zeroing):
    parameter = with_gradient(consumed())
    kept = parameter.grad
    zeroing(parameter)
    assert parameter.grad is kept
    assert torch.equal(parameter.grad, torch.zeros(3, 5))
    assert "consumed" not in repr(parameter.grad)
    (parameter * 2).sum().backward()
    assert torch.equal(parameter.grad, torch.full((3, 5), 2.0))
