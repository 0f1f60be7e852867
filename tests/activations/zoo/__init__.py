"""Small models of every common kind, with their data: what activation offload is tried on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tests.activations.zoo import own, pretrained

Batch = dict[str, Any]


@dataclass(frozen=True)
class Animal:
    """A model of the zoo.

    Args:
        make: builds it from torch's random state.
        batch: its input, from a generator and, for text, a length.
    """

    make: Callable[[], nn.Module]
    batch: Callable[[torch.Generator, int], Batch]


def _tokens(generator: torch.Generator, length: int) -> torch.Tensor:
    return torch.randint(3, pretrained.VOCABULARY, (2, length), generator=generator)


def _images(generator: torch.Generator) -> torch.Tensor:
    return torch.randn(2, 3, 16, 16, generator=generator)


def _labels(generator: torch.Generator) -> torch.Tensor:
    return torch.randint(0, 5, (2,), generator=generator)


def _text(generator: torch.Generator, length: int) -> Batch:
    tokens = _tokens(generator, length)
    return {"input_ids": tokens, "labels": tokens}


def _speech(generator: torch.Generator, length: int) -> Batch:
    features = torch.randn(2, 8, 16, generator=generator)
    return {"input_features": features, "labels": _tokens(generator, length)}


def _pictures(name: str) -> Callable[[torch.Generator, int], Batch]:
    return lambda generator, _: {name: _images(generator), "labels": _labels(generator)}


def _pairs(generator: torch.Generator, length: int) -> Batch:
    return {
        "input_ids": _tokens(generator, length),
        "pixel_values": _images(generator),
        "return_loss": True,
    }


def _diffusion(generator: torch.Generator, _: int) -> Batch:
    return {
        "images": _images(generator),
        "noise": _images(generator),
        "times": torch.rand(2, generator=generator),
    }


ZOO: dict[str, Animal] = {
    "GPT-2": Animal(pretrained.gpt2, _text),
    "Llama": Animal(pretrained.llama, _text),
    "Mistral": Animal(pretrained.mistral, _text),
    "Qwen2": Animal(pretrained.qwen2, _text),
    "Mixtral": Animal(pretrained.mixtral, _text),
    "BERT": Animal(pretrained.bert, _text),
    "T5": Animal(pretrained.t5, _text),
    "Whisper": Animal(pretrained.whisper, _speech),
    "ViT": Animal(pretrained.vit, _pictures("pixel_values")),
    "CLIP": Animal(pretrained.clip, _pairs),
    "ResNet": Animal(own.ResNet, _pictures("images")),
    "LSTM": Animal(own.LSTM, lambda g, length: {"tokens": _tokens(g, length)}),
    "UNet": Animal(own.UNet, _diffusion),
    "diffusion transformer": Animal(
        own.DiffusionTransformer, lambda g, n: {**_diffusion(g, n), "labels": _labels(g)}
    ),
}


def build(kind: str, reentrant: bool | None = None) -> Any:
    """The same model, with the same random weights, every time.

    Args:
        kind: name in the zoo.
        reentrant: which kind of checkpointing its blocks run under; None for none.
    """
    torch.manual_seed(0)
    model: Any = ZOO[kind].make().train()
    if reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    return model


def batch(kind: str, number: int, length: int = 12) -> Batch:
    """The same data for the same number, every time."""
    return ZOO[kind].batch(torch.Generator().manual_seed(number), length)


def loss_of(model: Any, data: Batch) -> torch.Tensor:
    """The loss of a forward pass."""
    output = model(**data)
    loss: torch.Tensor = output if isinstance(output, torch.Tensor) else output.loss
    return loss
