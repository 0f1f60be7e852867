"""A plain gradient and an offloaded gradient for the same, and how two results are compared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from offload_strategy.optimizer.gradients.gradient_backing import StoredGradient
from offload_strategy.optimizer.gradients.offloaded_gradient import OffloadedGradient
from tests.store.rig import Rig
from tests.training import bits

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda t: t,
    "transposed": lambda t: t.t(),
}
SOURCES = ["held", "stored"]
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def gradient(
    dtype: torch.dtype = torch.float32,
    layout: str = "contiguous",
    shape: tuple[int, ...] = (37, 43),
    seed: int = 0,
) -> torch.Tensor:
    """Normal numbers, zeros of both signs and subnormal ones."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    if values.numel() > 10:
        values.view(-1)[:4] = torch.tensor([0.0, -0.0, 1.0, -1.0])
        values.view(-1)[4:6] = torch.tensor([1, 77], dtype=_INTEGERS[dtype.itemsize]).view(dtype)
    return LAYOUTS[layout](values)


@dataclass
class Pair:
    plain: torch.Tensor
    offloaded: OffloadedGradient

    def __post_init__(self) -> None:
        self.backing = self.offloaded.backing

    @property
    def edited(self) -> bool:
        """Whether an update cannot rely on the values that were there at first."""
        return self.offloaded.backing is not self.backing or self.backing.edited

    @classmethod
    def of(cls, values: torch.Tensor, kind: str, rig: Rig) -> Pair:
        plain, source = values.clone(), values.clone()
        if kind == "stored":
            rig.at_once()
            source = StoredGradient(rig.store, source, [rig.disk])
        return cls(plain, OffloadedGradient.of(source, like=plain))

    def same(self, act: Callable[[Any], Any]) -> Any:
        """Do the same to both; returns what it gave for the offloaded gradient."""
        expected, result = outcome(act, self.plain), outcome(act, self.offloaded)
        assert_same(result, expected)
        return result

    def check(self) -> None:
        """Both still have the same values and looks; this loads them, and changes nothing."""
        assert_same(torch.clone(self.offloaded), torch.clone(self.plain))
        for look in ("shape", "dtype", "device", "layout", "requires_grad", "is_leaf", "grad_fn"):
            assert getattr(self.offloaded, look) == getattr(self.plain, look), look
        assert self.offloaded.stride() == self.plain.stride()
        assert self.offloaded.is_contiguous() == self.plain.is_contiguous()


@dataclass
class Raised:
    """An act that failed."""

    kind: type[BaseException]


def forbid_loading(offloaded: OffloadedGradient, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(offloaded.backing, "_load", lambda: pytest.fail("the values were loaded"))


def outcome(act: Callable[[Any], Any], subject: Any) -> Any:
    try:
        return act(subject)
    except Exception as error:
        return Raised(type(error))


def assert_same(result: Any, expected: Any) -> None:
    """Same values to the bit (any NaN is a NaN), shapes, strides, dtypes, types."""
    if isinstance(expected, torch.Tensor):
        assert isinstance(result, torch.Tensor)
        for look in ("shape", "dtype", "layout"):
            assert getattr(result, look) == getattr(expected, look), look
        if expected.layout is not torch.strided or expected.is_meta:
            return
        assert result.stride() == expected.stride()
        assert result.requires_grad == expected.requires_grad
        mine, theirs = torch.clone(result.detach()), torch.clone(expected.detach())
        if theirs.is_floating_point():
            assert torch.equal(mine.isnan(), theirs.isnan())
            mine, theirs = mine.nan_to_num(7.0), theirs.nan_to_num(7.0)
        assert bits(mine) == bits(theirs)
    elif isinstance(expected, np.ndarray):
        assert isinstance(result, np.ndarray)
        assert result.dtype == expected.dtype
        assert result.tobytes() == expected.tobytes()
        assert result.strides == expected.strides
    elif isinstance(expected, list | tuple):
        assert type(result) is type(expected)
        assert len(result) == len(expected)
        for one, other in zip(result, expected, strict=True):
            assert_same(one, other)
    else:
        assert type(result) is type(expected)
        assert result == expected or result != result


def for_each(acts: dict[str, Callable[[Any], Any]], check: Callable[[Any], None]) -> None:
    """Check every act; what failed is told at the end, by name."""
    failures = []
    for name, act in acts.items():
        try:
            check(act)
        except AssertionError as error:
            failures.append(f"{name}: {error}")
    assert not failures, "\n\n".join(failures)
