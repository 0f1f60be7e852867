"""Small models of every common kind, with their data: what activation offload is tried on."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from tests.activations.zoo import own, pretrained

Batch = dict[str, Any]
#: Tokens of a text.
_LENGTH = 12


def _tokens(generator: torch.Generator) -> torch.Tensor:
    return torch.randint(3, pretrained.VOCABULARY, (2, _LENGTH), generator=generator)


def _text(generator: torch.Generator) -> Batch:
    tokens = _tokens(generator)
    return {"input_ids": tokens, "labels": tokens}


def _pictures(name: str, generator: torch.Generator) -> Batch:
    images = torch.randn(2, 3, 16, 16, generator=generator)
    return {name: images, "labels": torch.randint(0, 5, (2,), generator=generator)}


#: By name: the model's input from a generator.
ZOO: dict[str, Callable[[torch.Generator], Batch]] = {
    **dict.fromkeys(("GPT-2", "Llama", "Mixtral", "BERT", "T5"), _text),
    "ViT": partial(_pictures, "pixel_values"),
    "ResNet": partial(_pictures, "images"),
    "LSTM": lambda generator: {"tokens": _tokens(generator)},
}
_OWN: dict[str, Callable[[], nn.Module]] = {"ResNet": own.ResNet, "LSTM": own.LSTM}


def build(kind: str, reentrant: bool | None = None) -> Any:
    """The same model, with the same random weights, every time.

    Args:
        kind: name in the zoo.
        reentrant: which kind of checkpointing its blocks run under; None for none.
    """
    torch.manual_seed(0)
    model: Any = (_OWN[kind]() if kind in _OWN else pretrained.make(kind)).train()
    if reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    return model


def batch(kind: str, number: int) -> Batch:
    """The same data for the same number, every time."""
    return ZOO[kind](torch.Generator().manual_seed(number))


def loss_of(model: Any, data: Batch) -> torch.Tensor:
    """The loss of a forward pass."""
    output = model(**data)
    loss: torch.Tensor = output if isinstance(output, torch.Tensor) else output.loss
    return loss
