"""The training tasks: a model and the loss of a step, the same for every contender."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Protocol

import torch

from benchmarks.activations.models import Shape, batch
from benchmarks.gpt import GPT

#: The models of the table, as large as those that were measured before: 69.5M and 320M parameters.
SHAPES = {
    "70M": Shape(768, 8, 12, sequence=256, tied=False),
    "320M": Shape(1024, 24, 16, sequence=256, tied=False),
}
#: To see that everything runs.
TINY = Shape(128, 2, 2, sequence=64, vocabulary=512, tied=False)


class Task(Protocol):
    """A model, and what it learns."""

    def model(self) -> torch.nn.Module:
        """The model with random weights, the same for the same task."""

    def inputs(self, number: int) -> Any:
        """What step `number` is given."""

    def loss(self, forward: Callable[..., Any], inputs: Any) -> torch.Tensor:
        """The loss of a step, through the model or whatever stands in for it."""


@dataclass(frozen=True)
class RandomTokens:
    """GPT-2 on random tokens.

    Args:
        shape: how large.
        size: sequences of a batch.
    """

    shape: Shape
    size: int = 2

    def model(self) -> torch.nn.Module:
        """See `Task`."""
        torch.manual_seed(0)
        return GPT(self.shape)

    def inputs(self, number: int) -> torch.Tensor:
        """See `Task`."""
        return batch(self.size, number, self.shape)["input_ids"]

    def loss(self, forward: Callable[..., Any], inputs: Any) -> torch.Tensor:
        """See `Task`."""
        loss: torch.Tensor = forward(inputs)
        return loss


@dataclass(frozen=True)
class Text:
    """The demo's GPT on the demo's text: the sources of Python's standard library, byte by byte.

    Args:
        layers: of the model.
        width: of the model.
        context: bytes of a sequence.
        size: sequences of a batch.
        steps: batches that there are.
    """

    layers: int
    width: int
    context: int
    size: int
    steps: int

    def model(self) -> torch.nn.Module:
        """See `Task`."""
        from examples.gpt import GPT, GPTConfig

        torch.manual_seed(0)
        config = GPTConfig(self.layers, self.width, max(1, self.width // 64), self.context)
        return GPT(config)

    @cached_property
    def _windows(self) -> Any:
        from examples.corpus import Windows, read_corpus

        return Windows(read_corpus("train"), self.context, self.size * self.steps)

    def inputs(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Task`."""
        first = number * self.size
        pairs = [self._windows[index] for index in range(first, first + self.size)]
        tokens, targets = zip(*pairs, strict=True)
        return torch.stack(tokens), torch.stack(targets)

    def loss(self, forward: Callable[..., Any], inputs: Any) -> torch.Tensor:
        """See `Task`."""
        from examples.gpt import nats_per_byte

        tokens, targets = inputs
        return nats_per_byte(forward(tokens), targets)


def as_options(task: RandomTokens | Text) -> dict[str, Any]:
    """A task as JSON, for `from_options`."""
    return {"kind": type(task).__name__, **asdict(task)}


def from_options(options: dict[str, Any]) -> RandomTokens | Text:
    """A task of what `as_options` made."""
    options = dict(options)
    if options.pop("kind") == "Text":
        return Text(**options)
    return RandomTokens(Shape(**options.pop("shape")), **options)
