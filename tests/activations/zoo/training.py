"""Training a model of the zoo, with and without offload, and counting what autograd saves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from offload_strategy import OffloadEngine
from tests.activations.zoo import Batch, batch, loss_of
from tests.training import (
    Numbers,
    activations_only,
    assert_same_history,
    gradients,
    moved,
    on_disk,
    weights,
)


@dataclass(frozen=True)
class Schedule:
    """The order of the forward and backward passes of a step.

    Args:
        microbatches: how many of each.
        forwards_first: run all forward passes before any backward pass; the backward passes then
            run in the same order in one step and in the reverse order in the next.
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
    """Losses and gradients of each step, and the weights after them.

    Args:
        model: what is trained, with AdamW.
        batch_of: data by number.
        schedule: order of the passes.
        steps: how many.
        forward: computes the loss of a batch; random numbers are seeded before it.
        between: called between forward and backward passes.
        hint: called before each forward pass with its number and whether it is the step's last.
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


class Counter:
    """Counts what autograd saves and asks for again, weights and buffers aside.

    Every storage counts once in every forward pass. It sees what torch's own hooks see.
    """

    def __init__(self) -> None:
        self.saved_bytes = 0
        self.needed_bytes = 0

    def forward(self, model: nn.Module, data: Batch) -> torch.Tensor:
        """The loss of a batch, whose graph is counted."""
        kept_out = {
            tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())
        }
        saved: dict[int, torch.UntypedStorage] = {}  # held, so that no address is used twice
        needed: set[int] = set()

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage._cdata not in kept_out and storage._cdata not in saved:
                saved[storage._cdata] = storage
                self.saved_bytes += storage.nbytes()
            return tensor.detach()

        def unpack(tensor: torch.Tensor) -> torch.Tensor:
            address = tensor.untyped_storage()._cdata
            if address in saved and address not in needed:
                needed.add(address)
                self.needed_bytes += saved[address].nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            return loss_of(model, data)


@dataclass(frozen=True)
class Comparison:
    """What came of training with offload.

    Args:
        saved_bytes: what autograd saved without.
        left_bytes: what was written.
        needed_bytes: what backward passes asked for without.
        read_bytes: what was read again.
    """

    saved_bytes: int
    left_bytes: int
    needed_bytes: int
    read_bytes: int

    def assert_nearly_everything_left(self) -> None:
        """Fail with the figures if too little of the bytes left and came back, or too much."""
        # Whole storages are counted here: a view of a part takes only its part along. What is
        # freed before its turn is never written; a few models save what nobody asks for.
        assert 0.95 * self.saved_bytes <= self.left_bytes <= self.saved_bytes, self
        assert 0.95 * self.needed_bytes <= self.read_bytes <= self.left_bytes, self


def compare(
    make: Callable[[], nn.Module],
    kind: str,
    disk: Path,
    schedules: Sequence[Schedule] = (ONCE,),
    *,
    length_of: Callable[[int], int] = lambda number: 12,
    attach: Callable[[OffloadEngine, Any], None] = OffloadEngine.attach,
) -> Comparison:
    """Train without and with offload, every byte by way of the disk: the same to the last bit.

    Args:
        make: builds the same model every time.
        kind: name in the zoo, for the data.
        disk: directory of the ssd tier.
        schedules: run one after another.
        length_of: length of a text by its number.
        attach: attaches the model to the engine.
    """

    def run(model: nn.Module, **options: Any) -> list[Numbers]:
        def batch_of(number: int) -> Batch:
            return batch(kind, number, length_of(number))

        histories = (train(model, batch_of, schedule, **options) for schedule in schedules)
        return [numbers for history in histories for numbers in history]

    model = make()
    before = weights(model)
    expected = run(model)
    losses = [float(v) for step in expected for name, v in step.items() if name.startswith("loss ")]
    assert len(set(losses)) == len(losses), "the loss does not change"
    model.load_state_dict(before)
    counter = Counter()
    run(model, forward=counter.forward)

    model = make()
    with activations_only(disk, budget="100%") as engine:
        attach(engine, model)
        got = run(
            model,
            between=lambda: on_disk(engine),
            hint=lambda index, last: engine.microbatch(index, last=last),
        )
        result = Comparison(
            counter.saved_bytes, moved(engine), counter.needed_bytes, moved(engine, verb="read")
        )
        assert engine._resources.store.live_tickets == 0
    assert_same_history(got, expected)
    return result
