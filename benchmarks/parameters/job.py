"""What a process shall train, whoever trains it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.activations.models import Shape
from benchmarks.gpt import GPT


@dataclass(frozen=True)
class Job:
    """What to train.

    Args:
        width: of the GPT.
        layers: likewise.
        vocabulary: likewise.
        sequence: tokens of a sequence.
        batch: sequences of a step.
        steps: of training.
        directory: of the tier; None for plain PyTorch.
        saved: where the weights go in the end; None for nowhere.
        overlap: of the optimizer.
        state_dtype: likewise.
        pinned: ``memory.pinned``.
        blocks_in_flight: of the parameters.
        ranks: processes that shard the model (FSDP2); 1 for one process without.
    """

    width: int
    layers: int
    vocabulary: int = 8192
    sequence: int = 256
    batch: int = 2
    steps: int = 10
    directory: str | None = None
    saved: str | None = None
    overlap: str = "eager"
    state_dtype: str = "float32"
    pinned: str = "1GiB"
    blocks_in_flight: int = 2
    ranks: int = 1

    @property
    def shape(self) -> Shape:
        """Of the model."""
        return Shape(
            width=self.width,
            layers=self.layers,
            heads=max(1, self.width // 64),
            vocabulary=self.vocabulary,
            sequence=self.sequence,
        )

    @property
    def parameters(self) -> int:
        """How many the model has."""
        return sum(parameter.numel() for parameter in self.empty().parameters())

    @property
    def block_bytes(self) -> int:
        """Of the parameters of its largest layer."""
        return max(
            sum(parameter.nbytes for parameter in layer.parameters())
            for layer in self.empty().blocks
        )

    def empty(self) -> GPT:
        """The model on the meta device."""
        with torch.device("meta"):
            return GPT(self.shape)

    def tokens(self) -> torch.Tensor:
        """Of every step: a falling loss then says that the updates arrive."""
        generator = torch.Generator().manual_seed(1)
        return torch.randint(self.vocabulary, (self.batch, self.sequence), generator=generator)

    def config(self) -> dict[str, Any]:
        """Everything streamed."""
        return {
            "tiers": [{"name": "disk", "kind": "ssd", "path": self.directory}],
            "parameters": {"enabled": True, "blocks_in_flight": self.blocks_in_flight},
            "optimizer": {"overlap": self.overlap, "state_dtype": self.state_dtype},
            "memory": {"pinned": self.pinned},
        }
