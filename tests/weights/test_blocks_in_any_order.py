"""Several models, blocks in any order, and regions that are computed again."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.activations.support import noise
from tests.activations.test_recompute import WAYS
from tests.training import Numbers, assert_same_history, in_turn, weights
from tests.weights.support import (
    OVERLAPS,
    Block,
    Net,
    Regions,
    adamw,
    compare,
    loss,
    net,
    overlapping,
    same,
    streaming,
    train,
)


# ---------------------------------------------------------------------- several models
@pytest.mark.parametrize(
    ("overlap", "toggle"),
    # With eager updates the generator's loss would train the critic: that is an error.
    [("eager", True), ("off", True), ("commit", False)],
)
def test_two_models_against_each_other(disk: Path, overlap: str, toggle: bool) -> None:
    def fight(attach: Callable[..., Any]) -> list[Numbers]:
        generator, critic = net(), net()
        makers, judges = attach(generator, adamw(generator)), attach(critic, adamw(critic))
        history = []
        for number in range(3):
            critic.requires_grad_(True)
            judges.zero_grad()
            made = generator(noise(4, 8, seed=number)).detach()
            judged = critic(made).mean() - critic(noise(4, 8, seed=50 + number)).mean()
            judged.backward()
            judges.step()
            if toggle:
                critic.requires_grad_(False)
            makers.zero_grad()
            value = -critic(generator(noise(4, 8, seed=number))).mean()
            value.backward()
            makers.step()
            history.append({"judged": judged.detach().clone(), "made": value.detach().clone()})
        judges.zero_grad()
        return [*history, weights(generator), weights(critic)]

    same(disk, fight, **overlapping(overlap))


@pytest.mark.parametrize("overlap", ["commit", "eager"])
def test_two_models_that_share_a_part(disk: Path, overlap: str) -> None:
    def share(attach: Callable[..., Any]) -> list[Numbers]:
        first, second = net(), net()
        second.blocks[0] = first.blocks[0]
        second.head.weight = first.head.weight
        both = nn.ModuleList([first, second])
        optimizer = adamw(both)
        attach(first)
        attach(second)
        optimizer = attach(None, optimizer)

        def loss_of(_: Any, number: int) -> torch.Tensor:
            return loss(first, number) + loss(second, number)

        return [*train(both, optimizer, loss_of=loss_of), weights(both)]

    same(disk, share, **overlapping(overlap))


def test_one_of_two_models_that_share_a_part_is_detached(disk: Path) -> None:
    first, second = net(), net()
    second.blocks[0] = first.blocks[0]
    expected = [weights(first), weights(second), {"loss": loss(second).detach().clone()}]
    with streaming(disk) as engine:
        engine.attach(first)
        engine.attach(second)
        engine.detach_model(first)
        got = {"loss": loss(second).detach().clone()}
        assert all(bool(torch.isfinite(p).all()) for p in first.parameters())
        loss(second).backward()
    assert_same_history([weights(first), weights(second), got], expected)


# ---------------------------------------------------------------------- the order of blocks
class Ordered(Net):
    """Calls its blocks as it is told to."""

    order: Callable[[], list[int]] = staticmethod(lambda: [0, 1, 2])

    def features(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for number in self.order():
            x = self.blocks[number](x)
        return x


def _at_random() -> list[int]:
    # Seeded by torch's numbers, which every loss seeds anew.
    return random.Random(int(torch.randint(1000, ()))).choices(range(3), k=4)


ORDERS: dict[str, Callable[[], list[int]]] = {
    "a block twice": lambda: [0, 1, 1, 2],
    "a block twice, apart": lambda: [0, 1, 2, 0],
    "one block always": lambda: [1, 1, 1, 1],
    "a block never": lambda: [0, 2],
    "none": lambda: [],
    "backwards": lambda: [2, 1, 0],
    "at random": _at_random,
}


@pytest.mark.parametrize(("order", "overlap", "in_flight"), in_turn(ORDERS, OVERLAPS, [1, 2, 3, 2]))
def test_blocks_in_any_order(disk: Path, order: str, overlap: str, in_flight: int) -> None:
    def make() -> Any:
        model = net(Ordered)
        model.order = ORDERS[order]
        return model

    parameters = {"enabled": True, "min_size": 1, "blocks_in_flight": in_flight}
    compare(
        disk,
        lambda model, optimizer: train(model, optimizer, 4),
        make,
        parameters=parameters,
        **overlapping(overlap),
    )


class Deep(Block):
    """Calls itself."""

    depth = 3

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.depth:
            self.depth -= 1
            x = self(x)
            self.depth += 1
        return super().forward(x)


def _in_two_places() -> Any:
    model = net()
    model.blocks.append(model.blocks[0])
    model.tail = model.blocks[1]
    return model


@pytest.mark.parametrize("make", [lambda: net(lambda: Net(Deep)), _in_two_places])
def test_a_block_within_itself_or_in_two_places(disk: Path, make: Callable[[], Any]) -> None:
    compare(disk, train, make)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True:UserWarning")
@pytest.mark.parametrize(
    ("way", "overlap", "activations"), in_turn([*WAYS] * 2, OVERLAPS, [True, False])
)
def test_regions_that_are_computed_again(
    disk: Path, way: str, overlap: str, activations: bool
) -> None:
    sections = {**overlapping(overlap), "activations": {"enabled": activations}}
    compare(disk, train, lambda: net(lambda: Regions(WAYS[way])), **sections)
