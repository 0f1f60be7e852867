"""What tests of several ranks share: a net, the loop that trains it, and comparisons."""

import contextlib
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from offload_strategy import OffloadEngine
from tests.optimizer.runs import assert_same_state_dict
from tests.training import on_disk

STEPS = 4


class Net(nn.Module):
    """Tied embeddings, a norm, and matrices large enough to be cut."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(96, 64)
        self.up = nn.Linear(64, 256)
        self.down = nn.Linear(256, 64)
        self.norm = nn.LayerNorm(64)
        self.spare = nn.Linear(64, 64)  # takes no part in even steps
        self.head = nn.Linear(64, 96, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor, spare: bool = True) -> torch.Tensor:
        hidden = self.embedding(tokens)
        hidden = self.norm(hidden + self.down(torch.nn.functional.gelu(self.up(hidden))))
        if spare:
            hidden = hidden + self.spare(hidden)
        return self.head(hidden)


def config(directory: Path, overlap: str, **optimizer: Any) -> dict[str, Any]:
    return {
        "tiers": [{"name": "disk", "kind": "ssd", "path": str(directory), "capacity": "256MiB"}],
        "activations": {"min_size": "1KiB", "budget": "100%"},
        "optimizer": {"overlap": overlap, "subgroup_size": 4096, **optimizer},
    }


def tokens(seed: int, rows: int = 4) -> torch.Tensor:
    return torch.randint(0, 96, (rows, 17), generator=torch.Generator().manual_seed(seed))


def loss_of(net: nn.Module, rows: torch.Tensor, *options: Any) -> torch.Tensor:
    """Of predicting each next token."""
    logits = net(rows[:, :-1], *options).float()
    return nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())


def run_steps(
    model: nn.Module,
    optimizer: Any,
    engine: OffloadEngine | None,
    tokens_of: Callable[[int, int], torch.Tensor],
    steps: Iterable[int] = range(STEPS),
    *,
    accumulation: int = 1,
    clip: float | None = None,
    hints: bool = True,
    unused: bool = False,
    after: Callable[[int], object] = lambda step: None,
) -> dict[str, Any]:
    """Train on the tokens of each step and micro-batch; return losses, norms and metrics."""
    losses, norms = [], []
    for step in steps:
        for micro in range(accumulation):
            last = micro == accumulation - 1
            if engine is not None and hints:
                engine.microbatch(micro, last=last)
            if isinstance(model, FSDPModule):
                model.set_requires_gradient_sync(last)
            no_sync = isinstance(model, DistributedDataParallel) and not last
            with model.no_sync() if no_sync else contextlib.nullcontext():  # type: ignore[operator]
                loss = loss_of(model, tokens_of(step, micro), not unused or step % 2 == 1)
                (loss / accumulation).backward()
            losses.append(loss.item().hex())
            del loss
        if clip is not None:
            norms.append(whole(nn.utils.clip_grad_norm_(model.parameters(), clip)).item().hex())
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 3 != 0)
        if engine is not None:  # what is still being written would be handed back from memory
            on_disk(engine)
        after(step)
    metrics = {} if engine is None else engine.metrics()
    return {"losses": losses, "norms": norms, "metrics": metrics}


def whole(value: Any) -> Any:
    """Nested values with every DTensor brought together."""
    if isinstance(value, DTensor):
        return value.full_tensor().clone()  # on one rank it shares the memory
    if isinstance(value, dict):
        return {key: whole(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [whole(one) for one in value]
    return value


def different(plain: dict[str, Any], ours: dict[str, Any]) -> list[str]:
    """What two runs found that is not the same to the last bit, but for metrics."""
    return [key for key in plain if key != "metrics" and not same(plain[key], ours[key])]


def check(
    case: Any,
    plain: dict[str, Any],
    ours: dict[str, Any],
    *,
    moved: Collection[str] = ("activations", "optimizer"),
) -> None:
    """Fail unless a run is a plain one to the last bit, and these clients have moved bytes."""
    assert different(plain, ours) == [], case
    for client in ("activations", "optimizer", "parameters"):
        # On a busy machine bytes may be needed again before they are written.
        left = [f"offload/{client}/{verb}_bytes" for verb in ("written", "forwarded")]
        has_left = any(ours["metrics"].get(key, 0) > 0 for key in left)
        assert has_left is (client in moved), (case, client)


def same(one: Any, two: Any) -> bool:
    """Whether nested values are the same to the last bit."""
    try:
        assert_same_state_dict(one, two, in_order=False)
    except AssertionError:
        return False
    return True
