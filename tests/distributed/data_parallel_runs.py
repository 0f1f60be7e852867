"""What the ranks of `test_ranks` do."""

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from offload_strategy import OffloadEngine, load, save
from offload_strategy.optimizer.overlap.backward_overlap import BackwardOverlap
from offload_strategy.optimizer.ranks.gradient_reductions import GradientReductions
from tests.optimizer import custom_optimizers
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


def loss_of(net: nn.Module, tokens: torch.Tensor, *options: Any) -> torch.Tensor:
    """Of predicting each next token."""
    logits = net(tokens[:, :-1], *options).float()
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


@contextlib.contextmanager
def early_gradients() -> Iterator[list[torch.Tensor]]:
    """Yield the parameters whose gradients are used as soon as reduced, while backward runs.

    Only one reduction is under way at a time: a rank may be ahead of the others for a whole run,
    and would find none that is over by then.
    """
    used: list[torch.Tensor] = []
    begun: list[torch.futures.Future[Any]] = []
    take, add = BackwardOverlap.gradient_reduced, GradientReductions.add

    def taken(overlap: Any, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        used.append(parameter)
        take(overlap, parameter, gradient)

    def added(backward: Any, future: Any, *args: Any) -> None:
        while begun:
            begun.pop().wait()
        begun.append(future)
        add(backward, future, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BackwardOverlap, "gradient_reduced", taken)
        patch.setattr(GradientReductions, "add", added)
        yield used


class Recomputed(nn.Module):
    """Blocks with reentrant checkpoints; if it has `ends`, between layers that have none."""

    def __init__(self, ends: bool) -> None:
        super().__init__()
        self.first = nn.Linear(96, 96) if ends else nn.Identity()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(96, 96), nn.GELU(), nn.Linear(96, 96)) for _ in range(3)
        )
        self.last = nn.Linear(96, 96) if ends else nn.Identity()

    def forward(self, tokens: torch.Tensor, *_: bool) -> torch.Tensor:
        hidden = self.first(nn.functional.one_hot(tokens, 96).float().requires_grad_())
        for block in self.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=True)
        return self.last(hidden)


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
    """Train on the tokens of each step and micro-batch.

    Returns:
        Losses, norms, and the engine's metrics.
    """
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


def train(
    rank: int,
    engine: OffloadEngine | None,
    *,
    optimizer: str = "AdamW",
    blocks: str | None = None,
    steps: Iterable[int] = range(STEPS),
    states: dict[str, Any] | None = None,
    order: str = "together",
    after: Callable[[int, nn.Module, Any], object] = lambda step, net, optimizer: None,
    loop: dict[str, Any] | None = None,
    on_first: bool = False,
    **ddp: Any,
) -> dict[str, Any]:
    """Train a net over all ranks: `Net`, or `Recomputed` with "blocks" or "ends".

    `loop` has options of `run_steps`; with `on_first`, rank 0 alone is asked for all states; all
    other options are those of `DistributedDataParallel`.

    Returns:
        What `run_steps` does, weights, and the state dict.
    """
    torch.manual_seed(0)
    net = Net() if blocks is None else Recomputed(blocks == "with ends")
    kinds = torch.optim if hasattr(torch.optim, optimizer) else custom_optimizers
    made = getattr(kinds, optimizer)(net.parameters(), lr=1e-2)
    used: Any = made
    if engine is not None and order != "together":
        used = engine.attach(None, made)
        used.load_state_dict(used.state_dict())  # as Accelerate does
    model = DistributedDataParallel(net, bucket_cap_mb=0.02, **ddp)
    if engine is not None and order == "optimizer first":
        engine.attach(model)
    elif engine is not None and order == "together":
        used = engine.attach(model, made)
    if states is not None:
        used.load_state_dict(states["optimizer"])
        net.load_state_dict(states["model"])

    def tokens_of(step: int, micro: int) -> torch.Tensor:
        data = torch.Generator().manual_seed(1000 * rank + 10 * step + micro)
        return torch.randint(0, 96, (4, 17), generator=data)

    found = run_steps(
        model, used, engine, tokens_of, steps,
        after=lambda step: after(step, net, used), **loop or {},
    )  # fmt: skip
    if on_first and engine is not None:
        used.consolidate_state_dict()
    return {
        **found,
        "weights": {name: value.clone() for name, value in net.state_dict().items()},
        "states": used.state_dict() if rank == 0 or not on_first else {},
    }


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
        written = ours["metrics"].get(f"offload/{client}/written_bytes", 0) > 0
        assert written is (client in moved), (case, client)


def same(one: Any, two: Any) -> bool:
    """Whether nested values are the same to the last bit."""
    try:
        assert_same_state_dict(one, two, in_order=False)
    except AssertionError:
        return False
    return True


#: What is trained, and the overlaps with which; the first ones without sharing the states as well.
CASES: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({}, ("commit", "eager", "off")),
    ({"loop": {"accumulation": 3, "clip": 0.5}}, ("commit",)),
    ({"loop": {"accumulation": 3, "clip": 0.5, "hints": False}}, ("commit",)),
    ({"find_unused_parameters": True, "loop": {"unused": True, "clip": 0.5}}, ("commit",)),
    ({"find_unused_parameters": True, "loop": {"unused": True}}, ("eager",)),
    ({"gradient_as_bucket_view": True, "loop": {"clip": 0.5}}, ("commit",)),
    ({"gradient_as_bucket_view": True, "loop": {"accumulation": 3}}, ("eager",)),
    ({"static_graph": True}, ("commit", "eager")),
    ({"order": "optimizer first", "loop": {"clip": 0.5}}, ("commit",)),
    ({"order": "optimizer alone", "loop": {"accumulation": 3}}, ("commit",)),
    ({"optimizer": "SGD"}, ("commit",)),
    ({"optimizer": "QuantizedMomentum"}, ("commit",)),
    ({"optimizer": "RAdam", "loop": {"accumulation": 3}}, ("off",)),
    # They run backward passes within the pass.
    ({"blocks": "with ends"}, ("commit", "eager", "off")),
    ({"blocks": "alone", "static_graph": True}, ("commit",)),
    ({"blocks": "alone", "gradient_as_bucket_view": True}, ("eager",)),
]


def against_plain(rank: int, directory: Path) -> None:
    """Every case beside plain training."""
    for number, (case, overlaps) in enumerate(CASES):
        plain = train(rank, None, **case)
        for overlap in overlaps:
            used = []  # bytes that were written and read, with shared states and without
            for sharding in (True, False)[: 2 if number < 2 else 1]:
                settings = config(directory, overlap, sharding=sharding)
                with early_gradients() as early, OffloadEngine(settings) as engine:
                    ours = train(rank, engine, **case)
                moved = {"activations", "optimizer"}
                moved -= {"activations"} if case.get("order") == "optimizer alone" else set()
                moved -= {"optimizer"} if case.get("optimizer") == "SGD" else set()
                check((case, overlap, sharding), plain, ours, moved=moved)
                whole_pass = {"find_unused_parameters", "static_graph"} & case.keys()
                if "blocks" not in case:
                    # Gradients are used as soon as their bucket is reduced, where it can be known.
                    expected = not whole_pass and overlap != "off"
                    assert bool(early) is expected, (case, overlap, len(early))
                verbs = ("written", "read")
                used.append([ours["metrics"][f"offload/optimizer/{verb}_bytes"] for verb in verbs])
                del ours
            # With accumulation, what ran ahead in vain was written as far as the disk got.
            if len(used) == 2 and "loop" not in case:
                shares = [share / whole for share, whole in zip(*used, strict=True)]
                assert all(0.45 < share < 0.55 for share in shares), (case, overlap, shares)
    dist.barrier()


# ---------------------------------------------------------------------- other numbers of ranks
def maybe_offloading(directory: Path, offload: bool) -> AbstractContextManager[Any]:
    """An engine, if anything is to be offloaded."""
    return OffloadEngine(config(directory, "commit")) if offload else contextlib.nullcontext()


def save_half(rank: int, directory: Path) -> None:
    """Train and save without offload and with it; the files have the same."""
    files = {offload: directory / f"{offload}.ckpt" for offload in (False, True)}
    for offload, file in files.items():
        with maybe_offloading(directory / "tier", offload) as engine:
            found = train(rank, engine, on_first=True)
            if rank == 0:
                saved = {"model": found["weights"], "optimizer": found["states"]}
                (save if offload else torch.save)(saved, file)
    dist.barrier()
    assert same(*map(torch.load, files.values()))


def second_half(rank: int, directory: Path) -> None:
    """Load what two ranks saved, with and without offload, and go on with any number of them."""
    runs = []
    for offload, saved in ((False, False), (False, True), (True, False)):
        source = directory / f"{saved}.ckpt"
        states = load(source) if offload else torch.load(source)
        with maybe_offloading(directory / "tier", offload) as engine:
            runs.append(train(rank, engine, states=states))
    check("from ours", runs[0], runs[1], moved=())
    check("offloaded", runs[0], runs[2])
