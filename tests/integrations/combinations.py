"""What combines with what: the tables of `docs/combinations.md`, and the runs that prove them.

Not every product of values is run: for each way to train, every pair of values occurs in some row.
What is refused is run by itself, with the first values of everything else.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from offload_strategy import OffloadEngine, OffloadError
from tests.distributed.data_parallel_runs import same
from tests.training import Block, attached, left_bytes

DOCUMENT = Path(__file__).parents[2] / "docs" / "combinations.md"
STEPS = 3
BATCH, LENGTH, VOCABULARY, WIDTH = 4, 16, 64, 32

STREAMED = "all, streamed weights too"

CLIENTS: dict[str, dict[str, Any]] = {
    "activations": {"optimizer": {"enabled": False}},
    **{
        f"optimizer: {overlap}": {
            "activations": {"enabled": False},
            "optimizer": {"overlap": overlap},
        }
        for overlap in ("commit", "eager", "off")
    },
    STREAMED: {"parameters": {"enabled": True, "min_size": 1}},
}
"""Sections of the config by client; what is not said is on, as in the defaults."""

AXES: dict[str, tuple[str, ...]] = {
    "precision": ("32", "bf16-mixed", "bf16-true"),
    "checkpointing": ("none", "non-reentrant", "reentrant"),
    "compile": ("no", "aot_eager"),
    "client": tuple(CLIENTS),
}
"""Values of each property; the first one is what everybody begins with."""

SCALED = "16-mixed"


@dataclass(frozen=True)
class Combination:
    """One value of each axis."""

    precision: str
    checkpointing: str
    compile: str
    client: str

    @property
    def training(self) -> Combination:
        """What training without offload depends on; the client only by what is compiled."""
        client = self.client if self.compiles_blocks else ""
        return Combination(self.precision, self.checkpointing, self.compile, client)

    @property
    def compiles_blocks(self) -> bool:
        """Whether each block is compiled, and not the model.

        Blocks that are streamed would break the model's graph, and graphs that are cut elsewhere
        may round elsewhere: in bfloat16 they do, with streaming or without.
        """
        return self.compile != "no" and self.client == STREAMED

    def pairs(self) -> set[frozenset[tuple[str, str]]]:
        """Every two values of it, with their axes."""
        return {frozenset(pair) for pair in itertools.combinations(asdict(self).items(), 2)}


@dataclass(frozen=True)
class Refusal:
    """Values that cannot be had together."""

    values: Mapping[str, str]  # By axis
    error: str  # A pattern that the error's class and message match


REFUSED_IN_RANKS = {
    "weights are streamed in one process, or sharded": Refusal(
        {"client": STREAMED}, r"^ConfigError: .*parameters\.enabled.*train in one process"
    )
}
SCALED_AND_EAGER = {"client": "optimizer: eager", "precision": SCALED}


@dataclass(frozen=True)
class Outcome:
    """What two runs are compared by, and the bytes that left by part of the engine."""

    losses: list[float]
    weights: dict[str, torch.Tensor]
    moved: dict[str, float]


Train = Callable[[Combination, Mapping[str, Any] | None], Outcome]


@dataclass(frozen=True)
class Way:
    """A way to train."""

    train: Train  # With a config, or without offload
    refusals: Mapping[str, Refusal]  # By what the table says of them
    precisions: Sequence[str] = AXES["precision"]


def documented(name: str) -> dict[Combination, str]:
    """The combinations of a way with their verdicts, from its table."""
    section = DOCUMENT.read_text().partition(f"\n## {name}\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    head, *rows = (line.strip("| ").split(" | ") for line in lines)
    assert head == [*AXES, "verdict"], name
    return {Combination(*values): verdict for *values, verdict in rows}


def untried_pairs(name: str, way: Way) -> set[frozenset[tuple[str, str]]]:
    """Pairs of values that are in no row, and are not refused; what is refused has no others."""
    identical = [one for one, verdict in documented(name).items() if verdict == "identical"]
    axes = {**AXES, "precision": way.precisions}
    every = (Combination(*values) for values in itertools.product(*axes.values()))
    pairs = set().union(*(one.pairs() for one in every))
    pairs -= set().union(*(one.pairs() for one in identical))
    refused = [refusal.values.items() for refusal in way.refusals.values()]
    return {pair for pair in pairs if not any(values <= pair for values in refused)}


def verdicts(name: str, way: Way, directory: Path) -> dict[Combination, str]:
    """Train every combination of a way with offload and without.

    The verdict is "identical", "refused: why", or what else was found.
    """
    plain: dict[Combination, Outcome] = {}
    found = {}
    for one, expected in documented(name).items():
        if expected == "identical" and one.training not in plain:
            torch._dynamo.reset()  # what was compiled for it is used again with offload
            plain[one.training] = way.train(one, None)
        try:
            outcome = way.train(one, config(directory, one.client))
        except OffloadError as error:
            found[one] = _refused(error, way)
            # A backward that failed leaves nodes in autograd's queue, which the next one drops.
            torch.ones(1, requires_grad=True).sum().backward()
            continue
        if expected != "identical":
            found[one] = "trained, and should be refused"
            continue
        both = outcome, plain[one.training]
        differs = [] if same(*(each.losses for each in both)) else ["losses"]
        differs += [] if same(*(each.weights for each in both)) else ["weights"]
        parts = [*outcome.moved] if one.client == STREAMED else [one.client.partition(":")[0]]
        still = [part for part in parts if not outcome.moved[part] > 0]
        found[one] = "identical"
        if differs or still:
            found[one] = f"differs: {differs}; not moved: {still}"
    torch._dynamo.reset()
    return found


def _refused(error: OffloadError, way: Way) -> str:
    said = f"{type(error).__name__}: {error}"
    matching = (text for text, it in way.refusals.items() if re.search(it.error, said, re.DOTALL))
    return next((f"refused: {summary}" for summary in matching), f"fails: {said}")


def config(directory: Path, client: str) -> dict[str, Any]:
    """A config with which nearly everything of a tiny model leaves."""
    sections: dict[str, Any] = {
        "tiers": [{"name": "disk", "kind": "ssd", "path": str(directory), "capacity": "256MiB"}],
        "activations": {"min_size": "1KiB", "budget": "100%"},
        "optimizer": {"subgroup_size": 4096},  # small pieces, of which every rank has some
        "memory": {"pinned": "64MiB"},
    }
    for name, options in CLIENTS[client].items():
        sections[name] = {**sections.get(name, {}), **options}
    return sections


def moved_bytes(engine: OffloadEngine) -> dict[str, float]:
    """Bytes that left by part of the engine."""
    metrics = engine.metrics()
    return {part: left_bytes(metrics, part) for part in ("activations", "optimizer", "parameters")}


# ---------------------------------------------------------------------- what is trained


class Model(nn.Module):
    """A tiny GPT with tied embeddings and dropout, whose output is its loss."""

    def __init__(self, checkpointing: str) -> None:
        super().__init__()
        self.checkpointing = checkpointing
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            if self.checkpointing == "none":
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.checkpointing == "reentrant")
        logits = self.head(x)[:, :-1].float()
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def make_model(combination: Combination) -> Model:
    """Always the same weights."""
    torch.manual_seed(0)
    model = Model(combination.checkpointing)
    return model.to(torch.bfloat16) if combination.precision == "bf16-true" else model


def batches(rank: int = 0) -> torch.Tensor:
    """A batch of tokens for each step."""
    generator = torch.Generator().manual_seed(1 + rank)
    return torch.randint(0, VOCABULARY, (STEPS, BATCH, LENGTH), generator=generator)


def autocast(combination: Combination) -> AbstractContextManager[Any]:
    """The precision of a forward."""
    low = {"bf16-mixed": torch.bfloat16, SCALED: torch.float16}.get(combination.precision)
    return nullcontext() if low is None else torch.autocast("cpu", low)


def plain_loop(
    combination: Combination,
    sections: Mapping[str, Any] | None,
    model: nn.Module,
    rank: int = 0,
    forward: Callable[[Combination], AbstractContextManager[Any]] = autocast,
) -> Outcome:
    """Train a model, which may be wrapped or sharded, in a loop of one's own."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler(
        "cpu", enabled=combination.precision == SCALED, init_scale=2.0**10
    )
    torch.manual_seed(1 + rank)  # of dropout
    losses = []
    engine = None if sections is None else OffloadEngine(sections)
    with nullcontext() if engine is None else engine:
        used = attached(engine, model, optimizer)
        for tokens in batches(rank):
            with forward(combination):
                loss = model(tokens)
            scaler.scale(loss).backward()
            losses.append(loss.item())
            del loss
            scaler.step(used)
            scaler.update()
            used.zero_grad()
        moved = {} if engine is None else moved_bytes(engine)
    return Outcome(losses, weights_of(model), moved)


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of the weights by name; shards are brought together."""
    return {
        name: getattr(parameter, "full_tensor", parameter.clone)().detach()
        for name, parameter in model.named_parameters()
    }


def compiled(model: nn.Module, combination: Combination) -> Any:
    """The model, compiled if it is to be."""
    if combination.compiles_blocks:
        for block in model.blocks:
            block.compile(backend=combination.compile)
        return model
    return model if combination.compile == "no" else torch.compile(model, backend="aot_eager")
