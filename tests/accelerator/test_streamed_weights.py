"""Streamed weights on an accelerator: the same to the last bit, and made where they are wanted."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.optim import AdamW

from offload_strategy import OffloadEngine
from tests.accelerator.support import DEVICE, HOSTS, STREAMED, make, train
from tests.training import attached, in_turn, same_with_and_without, settings, weights


def streamed(engine, building=False, **options):
    """Five steps, then the weights; with `building`, they leave as soon as they are made."""
    with engine.building() if engine is not None and building else nullcontext():
        model = make(**options)
    optimizer = attached(engine, model, AdamW(model.parameters(), lr=1e-2))
    history = train(model, optimizer, range(5))
    if engine is not None:
        engine.close()
    return [*history, weights(model)]


@pytest.mark.parametrize(
    ("host", "overlap", "recompute", "building"),
    [
        *in_turn(HOSTS, ["commit", "eager", "off"], [True, False], [False]),
        *in_turn(HOSTS, ["eager", "off", "commit"], [False, True], [True, False]),
    ],
)
def test_streamed_weights_are_the_same(disk, host, overlap, recompute, building):
    config = settings(disk, host, parameters=STREAMED, optimizer={"overlap": overlap})
    same_with_and_without(lambda engine: streamed(engine, building, recompute=recompute), config)


def test_a_model_on_the_meta_device_is_made_where_it_is_wanted(disk):
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    with OffloadEngine(settings(disk, parameters=STREAMED)) as engine:
        engine.attach(model, device=torch.device(DEVICE))
        assert {parameter.device.type for parameter in model.parameters()} == {DEVICE}
        model(torch.ones(2, 64, device=DEVICE)).sum().backward()
