"""A call with and without activation offload: the same outputs and gradients, to the last bit.

Everything that is saved leaves, with checksums; what plain PyTorch cannot run does not count.
"""

from __future__ import annotations

import random
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from offload_strategy import OffloadEngine
from offload_strategy.io.backends import posix
from offload_strategy.io.backends.protocol import BlockRequest
from offload_strategy.units import MiB
from tests.paced import PacedBackend
from tests.training import Numbers, bits, on_disk, settings

#: Inputs of this size are enlarged to `LARGE_BYTES`.
LARGE_BYTES = MiB
#: An enlarged case has at most so large tensors, so many, and attention to so many positions.
MOST_BYTES, MOST_TENSORS, MOST_POSITIONS = 16 * MiB, 300, 2048
#: Bytes per second of the slow path, and the longest delay of a transfer, in seconds.
RATE, DELAY = 400e6, 0.004


class SlowBackend(PacedBackend):
    """A slow path: each write begins late, and each read ends late."""

    def __init__(self, **options: Any) -> None:
        super().__init__(read=RATE, write=RATE, **options)
        self._random = random.Random(0)

    def run(self, request: BlockRequest) -> None:
        if request.write:
            time.sleep(self._random.uniform(0, DELAY))
        super().run(request)
        if not request.write:
            time.sleep(self._random.uniform(0, DELAY))


@pytest.fixture
def engine(disk: Path) -> Iterator[OffloadEngine]:
    """Everything leaves."""
    yield from _engine(disk)


@pytest.fixture
def slow_engine(disk: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[OffloadEngine]:
    """Everything leaves, on a slow path."""
    monkeypatch.setattr(posix, "PosixBackend", SlowBackend)
    yield from _engine(disk)


def _engine(disk: Path) -> Iterator[OffloadEngine]:
    config = settings(disk, optimizer={"enabled": False}, io={"checksum": True})
    config["tiers"][0]["capacity"] = "512MiB"
    with OffloadEngine(config) as made, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield made


@dataclass(frozen=True)
class Call:
    """A call whose gradients are those of the tensors in `inputs`; `twice`: and theirs."""

    function: Callable[[], Any]
    inputs: Any
    twice: bool = False

    def numbers(
        self,
        scope: Callable[[], AbstractContextManager[Any]] = nullcontext,
        between: Callable[[], None] = lambda: None,
    ) -> Numbers:
        """Outputs and gradients; what is saved in `scope` may leave."""
        torch.manual_seed(0)
        with scope():
            outputs = _tensors(self.function())
        between()
        numbers = {f"output {place}": each.detach().clone() for place, each in enumerate(outputs)}
        starts = [tensor for tensor in _tensors(self.inputs) if tensor.requires_grad]
        for order in ("gradient", "second gradient")[: 1 + self.twice]:
            ends = [tensor for tensor in outputs if tensor.requires_grad]
            if not ends:
                break
            incoming = [
                torch.randn_like(end) if end.layout is torch.strided else torch.ones_like(end)
                for end in ends
            ]
            found = torch.autograd.grad(
                ends, starts, incoming, allow_unused=True, create_graph=self.twice
            )
            outputs = [grad for grad in found if grad is not None]
            numbers |= {f"{order} {place}": each for place, each in enumerate(outputs)}
        return numbers


class Comparison:
    """Compares calls; `compared` counts those that plain PyTorch can differentiate."""

    def __init__(self, engine: OffloadEngine) -> None:
        self._engine = engine
        self.compared = 0
        self.different: list[str] = []

    def add(self, name: str, call: Call) -> None:
        """Compare a call; backward runs at once, or when everything is on the disk, in turn."""
        try:
            expected = call.numbers()
        except Exception:
            return
        if not any(key.startswith("gradient") for key in expected):
            return
        self.compared += 1
        waits = self.compared % 2 == 1
        try:
            got = call.numbers(
                self._engine.forward, lambda: on_disk(self._engine) if waits else None
            )
        except Exception as error:
            self.different.append(f"{name}: {error!r}")
            return
        wrong = _different(got, expected)
        if wrong and not any(_different(call.numbers(), expected) for _ in range(3)):
            self.different.append(f"{name}: {wrong}")


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _different(got: Numbers, expected: Numbers) -> list[str]:
    if got.keys() != expected.keys():
        return sorted(got.keys() ^ expected.keys())
    return [name for name in expected if _bits(got[name]) != _bits(expected[name])]


def _bits(tensor: torch.Tensor) -> Any:
    if tensor.is_nested:
        return [bits(part) for part in tensor.unbind()]
    plain = tensor.layout in (torch.strided, torch.sparse_coo)
    return bits(tensor if plain else tensor.to_dense())


# ---------------------------------------------------------------------- large inputs
def enlarged(args: Any, kwargs: Any, dim: int = 0) -> Any:
    """Repeat tensors along a dimension, as often as makes the first one large.

    Those that are as long as the first one there are repeated with it. None if that makes no sense.
    """
    tensors = _tensors((args, kwargs))
    if not tensors or tensors[0].ndim <= dim or tensors[0].nbytes == 0:
        return None
    length = tensors[0].shape[dim]
    times = -(-LARGE_BYTES // tensors[0].nbytes)

    def repeat(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.layout is not torch.strided or tensor.shape[dim : dim + 1] != (length,):
            return tensor
        with torch.no_grad():
            large = torch.cat([tensor.detach()] * times, dim)
        return large.requires_grad_(tensor.requires_grad)

    return tree_map_only(torch.Tensor, repeat, (args, kwargs))


def fits(function: Callable[..., Any], args: Any, kwargs: Any) -> bool:
    """Whether a call and its backward make neither large nor many tensors; nothing is computed."""
    try:
        # A kernel that can only run for real might take long.
        fake = FakeTensorMode(allow_non_fake_inputs=True, allow_fallback_kernels=False)
        with fake, _Bounded():
            Call(lambda: function(*args, **kwargs), (args, kwargs)).numbers()
    except Exception:
        return False
    return True


class _Bounded(TorchDispatchMode):
    """Raises an error in a call that would take long."""

    def __init__(self) -> None:
        super().__init__()
        self._made = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # All pairs of a long sequence: one kernel that keeps none of them.
        assert "dot_product" not in func.name() or args[0].shape[-2] <= MOST_POSITIONS
        result = func(*args, **kwargs or {})
        made = _tensors(result)
        self._made += len(made)
        assert self._made <= MOST_TENSORS
        assert all(tensor.numel() * tensor.itemsize <= MOST_BYTES for tensor in made)
        return result
