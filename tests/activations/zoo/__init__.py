"""Small models of every common kind, with their data: what activation offload is tried on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.activations.zoo import own, pretrained

Batch = dict[str, Any]
#: Tokens of a text.
_LENGTH = 12


def _tokens(generator: torch.Generator) -> torch.Tensor:
    return torch.randint(3, pretrained.VOCABULARY, (2, _LENGTH), generator=generator)


def _images(generator: torch.Generator) -> torch.Tensor:
    return torch.randn(2, 3, 16, 16, generator=generator)


def _labels(generator: torch.Generator) -> torch.Tensor:
    return torch.randint(0, 5, (2,), generator=generator)


def _text(generator: torch.Generator) -> Batch:
    tokens = _tokens(generator)
    return {"input_ids": tokens, "labels": tokens}


def _speech(generator: torch.Generator) -> Batch:
    features = torch.randn(2, 8, 16, generator=generator)
    return {"input_features": features, "labels": _tokens(generator)}


def _pictures(name: str) -> Callable[[torch.Generator], Batch]:
    return lambda generator: {name: _images(generator), "labels": _labels(generator)}


def _pairs(generator: torch.Generator) -> Batch:
    return {
        "input_ids": _tokens(generator),
        "pixel_values": _images(generator),
        "return_loss": True,
    }


def _diffusion(generator: torch.Generator) -> Batch:
    return {
        "images": _images(generator),
        "noise": _images(generator),
        "times": torch.rand(2, generator=generator),
    }


#: By name: the model's input from a generator.
ZOO: dict[str, Callable[[torch.Generator], Batch]] = {
    **dict.fromkeys(("GPT-2", "Llama", "Qwen2", "Mixtral", "BERT", "T5"), _text),
    "Whisper": _speech,
    "ViT": _pictures("pixel_values"),
    "CLIP": _pairs,
    "ResNet": _pictures("images"),
    "LSTM": lambda generator: {"tokens": _tokens(generator)},
    "UNet": _diffusion,
}
_OWN: dict[str, Callable[[], nn.Module]] = {
    "ResNet": own.ResNet,
    "LSTM": own.LSTM,
    "UNet": own.UNet,
}


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
