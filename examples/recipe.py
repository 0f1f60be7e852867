"""What the examples share: their options, and the model, data and optimizer made from these."""

import argparse
import math
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from offload_strategy.examples.corpus import Windows, read_corpus
from offload_strategy.examples.gpt import GPT, GPTConfig, nats_per_byte

Loader = DataLoader[tuple[Tensor, Tensor]]

LEARNING_RATE = 2e-3
WARMUP_SHARE = 0.1
VALIDATION_WINDOWS = 128


def options_parser(description: str, steps: int) -> argparse.ArgumentParser:
    """Return the options that every example has."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=steps, help="optimizer steps")
    parser.add_argument("--layers", type=int, default=4, help="transformer blocks")
    parser.add_argument("--width", type=int, default=256, help="features per token")
    parser.add_argument("--context", type=int, default=128, help="bytes per sequence")
    parser.add_argument("--batch", type=int, default=32, help="sequences per micro-batch")
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches per step")
    parser.add_argument("--clip", type=float, default=0.0, help="gradient norm, 0 for no clipping")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the batches")
    parser.add_argument("--logdir", default="logs", help="directory for the logger")
    return parser


def make_model(options: argparse.Namespace) -> GPT:
    """Return an untrained model; its weights depend on the seed alone."""
    torch.manual_seed(options.seed)
    return GPT(GPTConfig(layers=options.layers, width=options.width, context=options.context))


def make_loaders(options: argparse.Namespace) -> tuple[Loader, Loader]:
    """Return the training data, exactly as many batches as are needed, and the validation data."""
    windows = options.steps * options.accumulate * options.batch
    training = Windows(read_corpus("train"), options.context, windows, options.seed)
    validation = Windows(read_corpus("validation"), options.context, VALIDATION_WINDOWS)
    return DataLoader(training, options.batch), DataLoader(validation, options.batch)


def make_optimizer(model: torch.nn.Module, options: argparse.Namespace) -> tuple[AdamW, LambdaLR]:
    """Return AdamW, and a schedule that is stepped with it: linear warm-up, then a cosine to 0."""
    optimizer = AdamW(model.parameters(), LEARNING_RATE, (0.9, 0.95), weight_decay=0.1, fused=True)
    steps: int = options.steps
    warmup = max(1, round(WARMUP_SHARE * steps))

    def rate(step: int) -> float:
        return min((step + 1) / warmup, 0.5 + 0.5 * math.cos(math.pi * step / steps))

    return optimizer, LambdaLR(optimizer, rate)


@torch.no_grad()
def validate(model: torch.nn.Module, batches: Iterable[tuple[Tensor, Tensor]]) -> float:
    """Return the mean loss of a model, in nats per byte."""
    losses = [float(nats_per_byte(model(tokens), targets)) for tokens, targets in batches]
    return sum(losses) / len(losses)


def show(loss: Tensor, to_the_last_bit: bool) -> str:
    """Write a loss as Python does, or in hexadecimal."""
    value = float(loss.detach())
    return value.hex() if to_the_last_bit else repr(value)
