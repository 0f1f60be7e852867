"""A stand-in answers as the plain gradient does: values, errors, aliases, steps and norms."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from offload_strategy.optimizer.gradients import GradientStandIn, Held, Recipe, norm_of
from tests.heap.rig import MakeRig, Rig
from tests.optimizer.gradients.pairs import (
    DTYPES,
    LAYOUTS,
    SOURCES,
    Pair,
    Raised,
    assert_same,
    for_each,
    gradient,
    outcome,
    source_of,
)

MakePair = Callable[..., Pair]


@pytest.fixture(params=SOURCES)
def kind(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture
def pair_of(kind: str, rig: Rig) -> MakePair:
    def make(values: torch.Tensor | None = None) -> Pair:
        return Pair.of(gradient() if values is None else values, kind, rig)

    return make


def saved(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def through_torch_save(g: torch.Tensor) -> Any:
    loaded = torch.load(io.BytesIO(saved(g)), weights_only=True)
    assert type(loaded) is torch.Tensor
    return loaded


# ---------------------------------------------------------------------- reading
#: What takes a copy, or a figure: the values stay where they are.
READS: dict[str, Callable[[Any], Any]] = {
    "clone": lambda g: g.clone(),
    "to another dtype": lambda g: g.to(torch.float64, copy=True),
    "half": lambda g: g.to(torch.bfloat16, copy=True),
    "arithmetic": lambda g: 2 * g + g / 3 - g**2,
    "with itself": lambda g: g * g + g,
    "a product": lambda g: g @ g.new_ones(g.shape[1]),
    "comparisons": lambda g: [g > 0, g == g, g != 0, g.lt(0.1)],
    "extremes": lambda g: [g.max(), g.min(), g.argmax(), g.aminmax(), g.abs().max()],
    "sums": lambda g: [g.sum(), g.mean(), g.pow(2).sum(), g.std(), g.sum(0)],
    "item": lambda g: g.sum().item(),
    "finite": lambda g: [torch.isfinite(g).all(), g.isnan().any(), torch.isinf(g)],
    "equality": lambda g: [torch.equal(g, g.clone()), torch.allclose(g, g.clone())],
    "zeros like it": lambda g: [torch.zeros_like(g), torch.ones_like(g), g.new_zeros(3)],
    "full like it": lambda g: [torch.full_like(g, 3.0), g.new_full((2,), 5)],
    "empty like it": lambda g: [torch.empty_like(g).stride(), g.new_empty(3).dtype],
    "like it in another dtype": lambda g: torch.zeros_like(g, dtype=torch.int64),
    "stacked": lambda g: torch.stack([g, g]),
    "concatenated": lambda g: torch.cat([g, torch.ones_like(g)]),
    "where": lambda g: torch.where(g > 0, g, torch.zeros_like(g)),
    "indexed by a mask": lambda g: g[g > 0],
    "indexed by a list": lambda g: g[[0, 2, 1]],
    "gathered": lambda g: g.gather(0, torch.zeros(1, 3, dtype=torch.int64)),
    "sorted": lambda g: g.sort(),
    "lists": lambda g: torch._foreach_mul([g, g], 2.0),
    "listed, with plain ones": lambda g: torch._foreach_add([g, g.clone()], [g.clone(), g]),
    "into another": lambda g: torch.empty_like(g).copy_(g),
    "added to another": lambda g: torch.ones_like(g).add_(g, alpha=0.5),
    "assigned into another": lambda g: torch.ones(2, *g.shape, dtype=g.dtype).index_put_(
        (torch.tensor([1]),), g
    ),
    "multiplied into another": lambda g: torch.addcmul(torch.ones_like(g), g, g),
    "tolist": lambda g: g.tolist(),
    "repr": lambda g: repr(g),
    "str": lambda g: f"{g} {g!s}",
    "deepcopy": lambda g: copy.deepcopy(g),
    "deepcopy in a dict": lambda g: copy.deepcopy({"a": g, "b": [g]}),
    "pickle": lambda g: pickle.loads(pickle.dumps(g)),
    "pickle, old protocol": lambda g: pickle.loads(pickle.dumps(g, protocol=2)),
    "torch.save": through_torch_save,
    "size of a file": lambda g: len(saved(g)),
    "torch.tensor": lambda g: torch.tensor(g.clone().tolist()),
    "one hot": lambda g: (g > 0).long().sum(),
    "cumulated": lambda g: g.cumsum(0),
    "random like it": lambda g: (torch.manual_seed(3), torch.rand_like(g), torch.randn_like(g))[1:],
    "metadata": lambda g: [
        g.shape,
        g.size(1),
        g.dtype,
        g.device,
        g.numel(),
        g.dim(),
        g.ndim,
        g.itemsize,
        g.nbytes,
        g.element_size(),
        g.is_leaf,
        g.is_sparse,
        g.is_cuda,
        g.is_floating_point(),
        g.is_contiguous(),
        g.storage_offset(),
        g.requires_grad,
        g.grad_fn,
        g.grad,
        g._version,
        g.type(),
        len(g),
        isinstance(g, torch.Tensor),
        torch.is_tensor(g),
        g is None,
    ],
    "float": lambda g: float(g.sum()),
    "bool": lambda g: bool(g),
    "contiguous": lambda g: g.contiguous().sum(),
    "unchanged by to": lambda g: g.to(g.dtype) is g and g.cpu() is g,
    "in inference mode": lambda g: _inference(lambda: (g.sum(), g.norm(), (g * 2).reshape(-1)))[:2],
    "refused": lambda g: g + torch.ones(3),
    "not a scalar": lambda g: g.item(),
}

#: What hands out memory, or changes it otherwise than by a step.
PINS: dict[str, Callable[[Any], Any]] = {
    "numpy": lambda g: g.float().numpy() if g.dtype is torch.bfloat16 else g.numpy(),
    "asarray": lambda g: np.asarray(g.double()) if g.dtype is torch.bfloat16 else np.asarray(g),
    "written through numpy": lambda g: (
        g.view(torch.uint8 if g.is_contiguous() else g.dtype).numpy().fill(3)
        if g.dtype is not torch.bfloat16
        else None
    ),
    "view": lambda g: g.t().contiguous().view(-1) if not g.is_contiguous() else g.view(-1),
    "changed through a view": lambda g: g[1].mul_(3),
    "changed through a view of a view": lambda g: g.t()[1:].add_(1),
    "a row": lambda g: g[3],
    "rows": lambda g: [row.sum() for row in g],
    "assigned": lambda g: g.__setitem__((slice(None), 1), 5.0),
    "assigned as a whole": lambda g: g.__setitem__(slice(None), 5.0),
    "assigned by a mask": lambda g: g.__setitem__(g < 0, 0.0),
    "assigned by a list": lambda g: g.__setitem__([0, 2], 1.0),
    "added": lambda g: g.add_(torch.ones_like(g)),
    "added to itself": lambda g: g.add_(g),
    "added and kept": lambda g: g.__iadd__(2.0),
    "multiplied by a tensor": lambda g: g.mul_(torch.full_like(g, 0.3)),
    "multiplied by itself": lambda g: g.mul_(g),
    "multiplied by a column": lambda g: g.mul_(torch.arange(g.shape[1])),
    "rounded down": lambda g: g.div_(0.3, rounding_mode="floor"),
    "filled": lambda g: g.fill_(3.0),
    "filled by a tensor": lambda g: g.fill_(torch.tensor(3.0)),
    "copied into": lambda g: g.copy_(torch.arange(g.shape[1])),
    "copied from itself": lambda g: g.copy_(g),
    "copied from its transpose": lambda g: g[:5, :5].copy_(g.t()[:5, :5]),
    "copied from what does not fit": lambda g: g.copy_(torch.ones(3)),
    "added what does not fit": lambda g: g.add_(torch.ones(3)),
    "noise": lambda g: (torch.manual_seed(1), g.add_(torch.randn_like(g)))[1],
    "normal": lambda g: (torch.manual_seed(1), g.normal_())[1],
    "as an output": lambda g: torch.add(torch.ones_like(g), 1, out=g),
    "as an output of itself": lambda g: torch.mul(g, g, out=g),
    "listed and added": lambda g: torch._foreach_add_([g, torch.ones_like(g)], [g.clone(), g]),
    "interpolated": lambda g: g.lerp_(torch.ones_like(g), 0.1),
    "masked": lambda g: g.masked_fill_(g > 0, 0),
    "apply_": lambda g: g.apply_(lambda x: x / 2) if g.dtype is torch.float32 else None,
    "map_": lambda g: g.map_(g.clone(), lambda x, y: x + y) if g.dtype is torch.float32 else None,
    "chunks": lambda g: list(g.chunk(3)),
    "expanded": lambda g: g[None].expand(2, -1, -1),
    "diagonal": lambda g: g.diagonal().zero_(),
    "transposed in place": lambda g: g.t_(),
    "resized": lambda g: g.unsqueeze_(0),
    "squeezed": lambda g: g.squeeze_(),
    "dlpack": lambda g: torch.from_dlpack(g),
    "dlpack of numpy": lambda g: np.from_dlpack(g) if g.dtype is not torch.bfloat16 else None,
    "as_tensor": lambda g: torch.as_tensor(g).mul_(torch.full_like(g, 3.0)),
    "copy": lambda g: copy.copy(g).add_(1),
    "size of its storage": lambda g: g.untyped_storage().nbytes(),
    "bytes of its storage": lambda g: bytes(g.untyped_storage().tolist()),
    "size of its typed storage": lambda g: len(g._typed_storage()),
    "address": lambda g: g.data_ptr() % 8,
    "shared": lambda g: (g.share_memory_() is g, g.is_shared()),
    "set from another": lambda g: g.set_(torch.ones(3, 5, dtype=g.dtype)),
    "another is set from it": lambda g: torch.empty(0, dtype=g.dtype).set_(g).add_(1),
    "data set": lambda g: setattr(g, "data", torch.ones_like(g)),
    "data set to another shape": lambda g: setattr(g, "data", torch.ones(4, 2, dtype=g.dtype)),
    "data set to another dtype": lambda g: setattr(g, "data", g.double()),
    "vectorised": lambda g: nn.utils.parameters_to_vector([g if g.is_contiguous() else g.t()]),
    "from a vector": lambda g: nn.utils.vector_to_parameters(torch.ones(g.numel()), [g]),
    "a subclass": lambda g: g.as_subclass(torch.Tensor).add_(1),
}

#: What shares the values without anything to look at.
ALIASES: dict[str, Callable[[Any], Any]] = {
    "data": lambda g: g.data,
    "detach": lambda g: g.detach(),
    "data of data": lambda g: g.data.detach().data,
}

#: What is written down.
STEPS: dict[str, Callable[[Any], Any]] = {
    "times a number": lambda g: g.mul_(0.3),
    "operator": lambda g: g.__imul__(0.3),
    "times an integer": lambda g: g.mul_(-3),
    "times a tensor": lambda g: g.mul_(torch.tensor(0.3)),
    "times a double": lambda g: g.mul_(torch.tensor(0.3, dtype=torch.float64)),
    "by a number": lambda g: g.div_(3),
    "by a tensor": lambda g: g.div_(torch.tensor(7.0)),
    "operator by": lambda g: g.__itruediv__(7.0),
    "clamped": lambda g: g.clamp_(-0.2, 0.3),
    "clamped above": lambda g: g.clamp_(max=0.3),
    "clipped": lambda g: g.clip_(-0.1),
    "clamped below": lambda g: g.clamp_min_(-0.3),
    "clamped by a tensor": lambda g: g.clamp_max_(torch.tensor(0.1, dtype=g.dtype)),
    "listed": lambda g: torch._foreach_mul_([g], 0.3),
    "listed, by a tensor": lambda g: torch._foreach_mul_([g], torch.tensor(0.3)),
    "listed, by numbers": lambda g: torch._foreach_mul_([g], [0.3]),
    "listed twice": lambda g: torch._foreach_mul_([g, g], [0.3, 0.7]),
    "listed with a plain one": lambda g: torch._foreach_div_([torch.ones(3), g], [0.5, 0.7]),
    "listed, divided": lambda g: torch._foreach_div_([g], 7.0),
    "listed, clamped below": lambda g: torch._foreach_clamp_min_([g], -0.1),
    "listed, clamped above": lambda g: torch._foreach_clamp_max_([g], [0.1]),
    "through data": lambda g: g.data.mul_(0.3),
    "through detach": lambda g: g.detach().clamp_(-0.1, 0.1),
    "by its norm": lambda g: g.div_(g.norm()),
    "times what overflows": lambda g: g.mul_(1e30).mul_(1e30),
    "times NaN": lambda g: g.mul_(float("nan")),
    "unscaled": lambda g: unscaled(g, 1 / 3),
    "unscaled by one": lambda g: unscaled(g, 1.0),
    "clipped by value": lambda g: nn.utils.clip_grad_value_(with_gradient(g), 0.1),
    "clipped by value, not as a list": lambda g: nn.utils.clip_grad_value_(
        with_gradient(g), 0.1, foreach=False
    ),
    "clipped by norm": lambda g: nn.utils.clip_grad_norm_(with_gradient(g), 0.1),
    "clipped by norm, not reached": lambda g: nn.utils.clip_grad_norm_(with_gradient(g), 1e9),
    "refused": lambda g: g.clamp_(),
}
# A tensor of another class in the place of a clamped one would be its limits.


def _inference(act: Callable[[], Any]) -> Any:
    with torch.inference_mode():
        return [result.sum().item() for result in act()]


def unscaled(g: torch.Tensor, inverse: float) -> float:
    found = torch.zeros(())
    torch._amp_foreach_non_finite_check_and_unscale_([g], found, torch.tensor(inverse))
    return float(found)


def with_gradient(g: torch.Tensor) -> nn.Parameter:
    """A parameter with this gradient, which is dense but maybe transposed."""
    parameter = nn.Parameter(torch.empty_like(g))
    parameter.grad = g
    assert parameter.grad is g
    return parameter


def scaled(g: Any) -> None:
    g.mul_(0.3)
    torch._foreach_clamp_min_([g], -0.2)


PREPARED: dict[str, Callable[[Any], Any]] = {"as it came": lambda g: None, "with steps": scaled}


@pytest.mark.parametrize("prepared", PREPARED)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_reads_give_what_the_plain_gradient_gives(
    pair_of: MakePair, dtype: torch.dtype, layout: str, prepared: str
) -> None:
    def check(name: str, act: Callable[[Any], Any]) -> None:
        pair = pair_of(gradient(dtype, layout, shape=(7, 5)))
        pair.same(PREPARED[prepared])
        recipe = pair.stand_in.recipe
        pair.same(act)
        pair.check()
        assert not pair.stand_in.edited
        assert pair.stand_in.recipe == recipe

    for_each(READS, check)


@pytest.mark.parametrize("prepared", PREPARED)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_writes_and_aliases_do_what_they_do_to_the_plain_gradient(
    pair_of: MakePair, dtype: torch.dtype, layout: str, prepared: str
) -> None:
    def check(name: str, act: Callable[[Any], Any]) -> None:
        pair = pair_of(gradient(dtype, layout, shape=(7, 5)))
        pair.same(PREPARED[prepared])
        expected, result = outcome(act, pair.plain), outcome(act, pair.stand_in)
        assert (expected is pair.plain) == (result is pair.stand_in)
        assert_same(result, expected)
        pair.check()
        if dtype is torch.float32 and not isinstance(result, Raised):
            assert pair.stand_in.edited
        # Aliases see what comes later.
        pair.same(lambda g: g.mul_(3))
        assert_same(result, expected)
        pair.check()

    for_each(PINS, check)


@pytest.mark.parametrize("prepared", PREPARED)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_steps_are_recorded_and_give_the_same_bits(
    pair_of: MakePair, dtype: torch.dtype, layout: str, prepared: str
) -> None:
    def check(name: str, act: Callable[[Any], Any]) -> None:
        pair = pair_of(gradient(dtype, layout, shape=(7, 5)))
        pair.same(PREPARED[prepared])
        expected, result = outcome(act, pair.plain), outcome(act, pair.stand_in)
        assert (expected is pair.plain) == (result is pair.stand_in)
        assert_same(result, expected)
        pair.check()
        assert not pair.stand_in.edited
        pair.same(lambda g: g._version)
        # The update gets them, once.
        assert_same(pair.stand_in.values(), pair.plain)
        assert_same(pair.stand_in.values(), pair.plain)
        pair.check()
        pair.same(lambda g: g.mul_(0.7))
        assert_same(pair.stand_in.values(), pair.plain)
        pair.same(lambda g: g.add_(1))
        assert_same(pair.stand_in.values(), pair.plain)
        pair.check()

    for_each(STEPS, check)


@pytest.mark.parametrize("alias", ALIASES)
@pytest.mark.parametrize("prepared", PREPARED)
def test_an_alias_shares_the_values_both_ways(pair_of: MakePair, alias: str, prepared: str) -> None:
    for act in (*STEPS.values(), *PINS.values()):
        for through_alias in (True, False):
            pair = pair_of(gradient(shape=(7, 5)))
            pair.same(PREPARED[prepared])
            other = Pair(ALIASES[alias](pair.plain), ALIASES[alias](pair.stand_in))
            assert other.stand_in is not pair.stand_in
            (other if through_alias else pair).same(act)
            other.check()
            pair.check()
            (pair if through_alias else other).same(lambda g: g.add_(1))
            other.check()
            pair.check()


def test_reading_leaves_the_values_where_they_are(pair_of: MakePair, rig: Rig) -> None:
    pair = pair_of()
    scaled(pair.stand_in)
    for act in READS.values():
        outcome(act, pair.stand_in)
        assert not pair.stand_in._backing.is_pinned
    assert rig.heap.live_tickets == (not pair.stand_in._backing.source.exposes)


def test_raw_is_from_before_the_steps(pair_of: MakePair) -> None:
    pair = pair_of()
    before = pair.plain.clone()
    scaled(pair.stand_in)
    assert_same(pair.stand_in.raw(), before)
    assert len(pair.stand_in.recipe.steps) == 2
    assert_same(pair.stand_in.recipe.apply_(before), pair.stand_in.values())


# ---------------------------------------------------------------------- every method there is
def _every_name() -> list[str]:
    # What starts something else, or tells two tensors apart.
    others = {"__class__", "__dict__", "__doc__", "__module__", "__weakref__", "__subclasshook__"}
    others |= {
        "__init_subclass__",
        "__new__",
        "__init__",
        "__dir__",
        "__hash__",
        "__getattribute__",
    }
    others |= {"__getstate__", "__sizeof__", "__torch_function__", "__torch_dispatch__"}
    others |= {"backward", "data_ptr", "_cdata", "cuda", "xpu", "hpu", "mtia", "ipu", "module_load"}
    others |= {"__setstate__", "__reduce__", "__reduce_ex__", "__iter__", "__annotations__"}
    others |= {"_lazy_clone"}  # of memory of PyTorch's own only
    others |= {
        "_python_dispatch",
        "const_data_ptr",
        "__dlpack_c_exchange_api__",
        "_use_count",
        "__dlpack__",
        "values",
    }
    # random, or undefined, contents
    others |= {"new", "new_empty", "bernoulli", "bernoulli_", "exponential_", "geometric_"}
    others |= {"cauchy_", "log_normal_", "normal_", "random_", "uniform_", "multinomial"}
    return [name for name in dir(torch.Tensor) if name not in others]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("prepared", PREPARED)
def test_every_attribute_and_every_method_without_arguments(
    pair_of: MakePair, prepared: str
) -> None:
    different = []
    for name in _every_name():
        pair = pair_of(gradient(shape=(4, 4)))
        pair.same(PREPARED[prepared])

        def act(g: Any, name: str = name) -> Any:
            attribute = getattr(g, name)
            return attribute() if callable(attribute) else attribute

        expected, result = outcome(act, pair.plain), outcome(act, pair.stand_in)
        try:
            if isinstance(expected, torch.Tensor | tuple | list | int | float | str | Raised):
                assert_same(result, expected)
            else:
                assert type(result) is type(expected)
            pair.check()
        except AssertionError as error:
            different.append(f"{name}: {error}")
    assert not different, "\n\n".join(different)


# ---------------------------------------------------------------------- norms
ORDERS = [2, 2.0, 1.0, float("inf"), float("-inf"), 0.0, 3.0, 0.5]
NORMS: dict[str, Callable[[Any, float], torch.Tensor]] = {
    "vector_norm": lambda g, order: torch.linalg.vector_norm(g, order),
    "torch.norm": lambda g, order: torch.norm(g, order),
    "method": lambda g, order: g.norm(order),
    "of data": lambda g, order: g.data.norm(order),
    "of detach": lambda g, order: g.detach().norm(p=order),
    "operator": lambda g, order: torch.ops.aten.norm.Scalar(g, order),
    "listed": lambda g, order: torch._foreach_norm([g], order)[0],
    "total": lambda g, order: nn.utils.get_total_norm([g], order),
    "total, not as a list": lambda g, order: nn.utils.get_total_norm([g], order, foreach=False),
    "total, as a list": lambda g, order: nn.utils.get_total_norm([g], order, foreach=True),
}


@pytest.mark.parametrize("prepared", PREPARED)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norms_are_those_of_the_plain_gradient_and_can_be_told_in_advance(
    pair_of: MakePair,
    dtype: torch.dtype,
    layout: str,
    prepared: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    values = gradient(dtype, layout, shape=(131, 77))
    for order in ORDERS:
        first, second = pair_of(values), pair_of(values)
        for pair in (first, second):
            pair.same(PREPARED[prepared])
        for norm in NORMS.values():
            result = first.same(lambda g, norm=norm, order=order: norm(g, order))
            assert type(result) is torch.Tensor
        assert first.stand_in.asked_norms == [(first.stand_in.recipe, float(order))]
        # The next step: all that was asked is told.
        for recipe, asked in first.stand_in.asked_norms:
            told = norm_of(recipe.apply_(second.stand_in.raw().clone()), asked)
            second.stand_in.note_norm(recipe, asked, told)
        with monkeypatch.context() as patch:
            forbid_loading(second.stand_in, patch)
            for norm in NORMS.values():
                second.same(lambda g, norm=norm, order=order: norm(g, order))
                # Whoever gets a norm may change it.
                norm(second.stand_in, order).fill_(7)


def forbid_loading(stand_in: GradientStandIn, patch: pytest.MonkeyPatch) -> None:
    backing = stand_in._backing

    def loaded() -> Any:
        raise AssertionError("the values were loaded")

    patch.setattr(backing, "_load", loaded)


def test_a_norm_is_forgotten_when_the_values_change(pair_of: MakePair) -> None:
    pair = pair_of()
    for act in (
        lambda g: g.norm(),
        lambda g: g.mul_(0.5).norm(),
        lambda g: g.mul_(1.0).norm(),
        lambda g: g.add_(1).norm(),
        lambda g: (g.view(-1).mul_(3), g.norm()),
        lambda g: g.zero_().norm(),
        lambda g: g.copy_(torch.ones_like(g)).norm(),
    ):
        pair.same(act)
    pair = pair_of()
    pair.same(lambda g: g.norm())
    pair.same(lambda g: (setattr(g, "data", torch.ones_like(g)), g.norm()))


def test_other_arguments_of_norms(pair_of: MakePair) -> None:
    for act in (
        lambda g: g.norm(2, dim=0),
        lambda g: g.norm(2, dim=1, keepdim=True),
        lambda g: torch.linalg.vector_norm(g, 2, dtype=torch.float64),
        lambda g: torch.linalg.vector_norm(g, dim=(0, 1)),
        lambda g: torch.linalg.norm(g),
        lambda g: torch.linalg.matrix_norm(g),
        lambda g: g.norm("fro"),
        lambda g: torch._foreach_norm([g, torch.ones(3), g]),
        lambda g: torch._foreach_norm([g], dtype=torch.float64),
        lambda g: torch._foreach_norm([g], ord=1),
        lambda g: torch.linalg.vector_norm(g, 2, out=torch.empty(())),
    ):
        pair = pair_of()
        pair.same(scaled)
        pair.same(act)
        assert not pair.stand_in.edited


def test_a_norm_of_values_changed_behind_its_back_is_not_the_old_one() -> None:
    values = gradient()
    stand_in = GradientStandIn.of(Held(values), like=values)
    stand_in.norm()
    assert not stand_in.edited
    values.mul_(2)
    assert stand_in.edited
    assert_same(stand_in.norm(), values.norm())
    assert stand_in.edited


# ---------------------------------------------------------------------- unscaling
@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan, None], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("prepared", PREPARED)
def test_unscaling_finds_every_value_that_is_not_finite(
    pair_of: MakePair, dtype: torch.dtype, prepared: str, bad: float | None
) -> None:
    values = gradient(dtype)
    if bad is not None:
        values[30, 20] = bad
    pair = pair_of(values)
    pair.same(PREPARED[prepared])
    found = pair.same(lambda g: unscaled(g, 0.25))
    # Clamping takes infinities away.
    clamped = prepared == "with steps" and bad == -torch.inf
    assert found == float(bad is not None and not clamped)
    pair.check()
    assert not pair.stand_in.edited


def test_unscaling_looks_at_the_values_only_if_the_norm_does_not_tell(
    pair_of: MakePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = pair_of()
    for order in (2.0, float("inf"), 1.0):
        told = pair_of()
        told.stand_in.note_norm(Recipe(), order, norm_of(pair.plain, order))
        with monkeypatch.context() as patch:
            forbid_loading(told.stand_in, patch)
            assert told.same(lambda g: unscaled(g, 0.5)) == 0
        told.check()
    # The norm of finite values can overflow.
    large = pair_of(torch.full((5, 5), 1e30))
    large.stand_in.note_norm(Recipe(), 2.0, norm_of(large.plain))
    assert large.stand_in.norm().isinf()
    assert large.same(lambda g: unscaled(g, 0.5)) == 0
    # Some orders say nothing.
    values = gradient()
    values[1, 1] = torch.inf
    silent = pair_of(values)
    for order in (0.0, float("-inf"), -1.0):
        silent.stand_in.note_norm(Recipe(), order, norm_of(values, order))
        assert silent.stand_in._backing.norm(order).isfinite()
    assert silent.same(lambda g: unscaled(g, 0.5)) == 1


# ---------------------------------------------------------------------- zeros
ZEROING: dict[str, Callable[[Any], Any]] = {
    "zero_": lambda g: g.zero_(),
    "listed": lambda g: torch._foreach_zero_([g, torch.ones(3)]),
    "through data": lambda g: g.data.zero_(),
}


@pytest.mark.parametrize("zeroing", ZEROING)
def test_zeroing_loads_nothing_and_lets_go(
    pair_of: MakePair, rig: Rig, zeroing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = pair_of()
    scaled(pair.stand_in)
    with monkeypatch.context() as patch:
        forbid_loading(pair.stand_in, patch)
        ZEROING[zeroing](pair.stand_in)
    ZEROING[zeroing](pair.plain)
    assert rig.heap.live_tickets == 0
    assert pair.stand_in.edited
    pair.check()
    for act in (lambda g: g.mul_(3), lambda g: g.add_(-0.0), lambda g: g.add_(2), lambda g: g[1]):
        pair.same(act)
        pair.check()
    # What others have an alias of is zeroed in place.
    pair.same(lambda g: setattr(g, "kept", g.view(-1)) if g.is_contiguous() else None)
    pair.same(ZEROING[zeroing])
    pair.same(lambda g: g.kept)
    pair.check()


def test_zeroed_infinities_scaled_after_that(pair_of: MakePair) -> None:
    pair = pair_of()
    pair.same(lambda g: g.zero_().mul_(torch.inf))
    pair.check()


# ---------------------------------------------------------------------- life
def test_nothing_is_left_when_it_is_gone(pair_of: MakePair, rig: Rig) -> None:
    parameter = nn.Parameter(torch.empty_like(gradient()))

    def give() -> weakref.ref[torch.Tensor]:
        parameter.grad = pair_of().stand_in
        return weakref.ref(parameter.grad)

    gc.disable()
    try:
        reference = give()
        assert reference() is parameter.grad
        alias = parameter.grad.data
        parameter.grad = None
        assert reference() is None
        live = rig.heap.live_tickets
        assert alias.sum().item() == gradient().sum().item()
        del alias
        assert rig.heap.live_tickets == 0
        reference = give()
        assert rig.heap.live_tickets == live
        parameter.grad = torch.ones_like(parameter)
        assert reference() is None
        assert rig.heap.live_tickets == 0
        give()
        parameter.grad.add_(1)  # what is pinned needs no ticket
        assert rig.heap.live_tickets == 0
    finally:
        gc.enable()


def test_gradients_that_share_a_ticket_free_it_together(rig: Rig) -> None:
    source = source_of("part of a ticket", gradient(), rig)
    assert isinstance(source, object)
    first = GradientStandIn.of(source, like=gradient())
    second = first.data
    del source
    first.add_(1)
    assert rig.heap.live_tickets == 0
    assert torch.equal(second, gradient() + 1)


def test_a_failing_disk_is_told_and_the_gradient_is_as_before(make_rig: MakeRig) -> None:
    import errno

    from offload_strategy.errors import StorageError

    rig = make_rig()
    pair = Pair.of(gradient(), "stored", rig)
    pair.same(scaled)
    rig.backend.error = OSError(errno.EIO, "broken")
    for act in (lambda g: g.sum(), lambda g: g.add_(1), lambda g: g.view(-1), lambda g: g.values()):
        with pytest.raises(StorageError):
            act(pair.stand_in)
    rig.backend.error = None
    assert not pair.stand_in.edited
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
        assert_same(pair.stand_in.values(), pair.plain)


def test_gradients_of_channels_last_models(pair_of: MakePair) -> None:
    values = gradient(shape=(4, 3, 5, 2)).to(memory_format=torch.channels_last)
    for act in (*READS.values(), *STEPS.values()):
        if act is not READS["a product"]:
            pair = pair_of(values)
            pair.same(act)
            pair.check()


def test_complex_gradients_are_not_recorded_but_right(rig: Rig) -> None:
    values = torch.complex(gradient(), gradient(seed=1))
    for source in ("held", "stored"):
        pair = Pair(values.clone(), GradientStandIn.of(source_of(source, values, rig), like=values))
        for act in (lambda g: g.mul_(0.5), lambda g: g.mul_(1j), lambda g: g.abs(), torch.norm):
            pair.same(act)
            assert torch.equal(torch.clone(pair.stand_in), pair.plain)


def test_no_gap_may_be_stored(rig: Rig) -> None:
    from offload_strategy.optimizer.gradients import Stored

    with pytest.raises(ValueError, match="dense"):
        Stored.put(rig.heap, torch.ones(4, 4)[:, :2], [rig.disk])


def test_c_code_that_wants_the_address_gets_an_error_and_not_a_null_pointer(
    pair_of: MakePair,
) -> None:
    pair = pair_of()
    assert not hasattr(GradientStandIn, "__dlpack_c_exchange_api__")
    assert not hasattr(pair.stand_in, "__dlpack_c_exchange_api__")
    for unbound in (
        lambda g: torch.Tensor.numpy(g),
        lambda g: torch.utils.dlpack.to_dlpack(g),
        lambda g: torch.Tensor.untyped_storage(g).tolist(),
        lambda g: torch.ones(37, 43).map_(g, lambda x, y: x + y),
    ):
        with pytest.raises(RuntimeError):
            unbound(pair.stand_in)
    pair.check()
