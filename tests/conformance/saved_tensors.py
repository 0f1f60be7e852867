"""A call with and without activation offload: the same outputs and gradients, to the last bit.

Everything that is saved leaves, with checksums; what plain PyTorch cannot run does not count.
"""

import random
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

from offload_strategy import OffloadEngine
from offload_strategy.io.backends import posix
from offload_strategy.io.backends.protocol import BlockRequest
from tests.paced import PacedBackend
from tests.training import Numbers, bits, on_disk, settings

#: Bytes per second of the path, and the longest delay of a transfer, in seconds.
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
def engine(disk, monkeypatch):
    """Everything leaves, on a slow path."""
    monkeypatch.setattr(posix, "PosixBackend", SlowBackend)
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
            options = {"allow_unused": True, "create_graph": self.twice}
            found = torch.autograd.grad(ends, starts, incoming, **options)
            outputs = [grad for grad in found if grad is not None]
            numbers |= {f"{order} {place}": each for place, each in enumerate(outputs)}
        return numbers


class Comparison:
    """Compares calls; `compared` counts those that plain PyTorch can differentiate."""

    def __init__(self, engine: OffloadEngine) -> None:
        self.engine = engine
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
            got = call.numbers(self.engine.forward, lambda: on_disk(self.engine) if waits else None)
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
