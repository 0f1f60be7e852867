"""Training a model of the zoo, with and without offload, and counting what autograd saves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from tests.activations.zoo import Batch, batch, loss_of
from tests.training import (
    Numbers,
    activations_only,
    assert_same_history,
    gradients,
    moved,
    on_disk,
    saved_storages,
    weights,
)


class Schedule(NamedTuple):
    """Forward and backward passes of a step.

    If all forward passes come first, backward passes run in the same order in one step and in the
    reverse order in the next.
    """

    microbatches: int = 1
    forwards_first: bool = False


ONCE = Schedule()
SCHEDULES = {
    "accumulation 1": ONCE,
    "accumulation 3": Schedule(3),
    "three forwards first": Schedule(3, forwards_first=True),
}


def train(
    model: nn.Module,
    batch_of: Callable[[int], Batch],
    schedule: Schedule = ONCE,
    *,
    steps: int = 3,
    forward: Callable[[nn.Module, Batch], torch.Tensor] = loss_of,
    between: Callable[[], None] = lambda: None,
    hint: Callable[[int, bool], None] = lambda index, last: None,
) -> list[Numbers]:
    """Losses and gradients of each step with AdamW, and the weights after them.

    Random numbers are seeded before each `forward`; `between` is called between forward and
    backward passes, and `hint` before a forward pass, with its number and whether it is the last.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    count = schedule.microbatches
    history = []
    for step in range(steps):
        numbers, waiting = {}, []
        for index in range(count):
            hint(index, index == count - 1)
            torch.manual_seed(1000 + count * step + index)
            loss = forward(model, batch_of(count * step + index))
            numbers[f"loss {index}"] = loss.detach().clone()
            waiting.append(loss / count)
            del loss
            if not schedule.forwards_first:
                between()
                waiting.pop().backward()
        if waiting:
            between()
        if step % 2:
            waiting.reverse()
        while waiting:
            waiting.pop(0).backward()
        history.append({**numbers, **gradients(model)})
        optimizer.step()
        optimizer.zero_grad()
    assert all(torch.isfinite(value).all() for step in history for value in step.values())
    history.append(weights(model))
    return history


def compare(
    make: Callable[[], nn.Module], kind: str, disk: Path, schedules: Sequence[Schedule] = (ONCE,)
) -> None:
    """Train without and with offload, every byte by way of the disk: the same to the last bit."""
    saved_bytes = 0

    def counted(model: nn.Module, data: Batch) -> torch.Tensor:
        nonlocal saved_bytes
        losses: list[torch.Tensor] = []
        weights_of = [*model.parameters(), *model.buffers()]
        seen = saved_storages(lambda: losses.append(loss_of(model, data)), weights_of)
        saved_bytes += sum(storage.nbytes() for storage in seen)
        return losses.pop()

    def run(model: nn.Module, **options: Any) -> list[Numbers]:
        histories = (
            train(model, lambda number: batch(kind, number), schedule, **options)
            for schedule in schedules
        )
        return [numbers for history in histories for numbers in history]

    expected = run(make(), forward=counted)
    losses = [float(v) for step in expected for name, v in step.items() if name.startswith("loss ")]
    assert len(set(losses)) == len(losses), "the loss does not change"

    model = make()
    with activations_only(disk, budget="100%") as engine:
        engine.attach(model)
        got = run(
            model,
            between=lambda: on_disk(engine),
            hint=lambda index, last: engine.microbatch(index, last=last),
        )
        left, read = moved(engine), moved(engine, verb="read")
        assert engine._resources.store.live_tickets == 0
    assert_same_history(got, expected)
    # Whole storages are counted here: a view of a part takes only its part along. What is freed
    # before its turn is never written; a few models save what nobody asks for.
    assert 0.95 * saved_bytes <= left <= saved_bytes
    assert 0.5 * left <= read <= left
