"""Every model of the zoo: the same to the last bit, and nearly everything that is saved leaves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import nn
from torch._dynamo.utils import counters

from offload_strategy import OffloadEngine
from tests.activations.zoo import ZOO, Batch, batch, build, loss_of
from tests.activations.zoo.training import SCHEDULES, compare, train
from tests.training import (
    Numbers,
    activations_only,
    assert_same_history,
    in_turn,
    moved,
    on_disk,
    saved_storages,
    settings,
)

pytest.importorskip("transformers")

ALL, BOTH = list(SCHEDULES.values()), [*SCHEDULES.values()][::2]
#: Which kind of checkpointing, by model; every model is trained without any as well.
CHECKPOINTING = in_turn(ZOO, [True, False])


def run(kind: str, model: nn.Module, **options: Any) -> list[Numbers]:
    return train(model, lambda number: batch(kind, number), **options)


@pytest.mark.parametrize(("kind", "reentrant"), [*in_turn(ZOO, [None]), *CHECKPOINTING])
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable:FutureWarning")
def test_training_is_the_same(kind: str, reentrant: bool | None, disk: Path) -> None:
    compare(lambda: build(kind, reentrant), kind, disk, ALL if reentrant is None else BOTH)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("GPT-2", {"prefetch": 0, "budget": "60%"}),
        ("LSTM", {"prefetch": 0, "budget": "60%"}),
        ("GPT-2", {"host": "64MiB", "budget": "100%"}),
    ],
    ids=str,
)
def test_the_same_without_waiting_for_the_disk(
    kind: str, options: dict[str, Any], disk: Path
) -> None:
    schedule = SCHEDULES["three forwards first"]
    expected = run(kind, build(kind), schedule=schedule)
    model = build(kind)
    with activations_only(None if "host" in options else disk, **options) as engine:
        engine.attach(model)
        left: list[float] = []

        def between() -> None:
            used = engine.metrics().get("offload/tier/host/used_bytes", 0)
            left.append(used + moved(engine) + moved(engine, verb="forwarded"))

        assert_same_history(run(kind, model, schedule=schedule, between=between), expected)
        assert left[-1] > 0
        assert engine.metrics().get("offload/tier/host/used_bytes", 0) == 0


@pytest.mark.parametrize("kind", ["GPT-2", "Mixtral", "T5", "ResNet", "LSTM"])
def test_the_same_with_a_plan(kind: str, disk: Path) -> None:
    """The passes before the plan offload everything, those after it keep what fits: all of it."""
    expected = run(kind, build(kind), steps=6)
    config = settings(disk, optimizer={"enabled": False}, planning={"device_memory": "auto"})
    config["activations"] = {"min_size": 1}
    with OffloadEngine(config) as engine:
        model = build(kind)
        engine.attach(model)
        assert_same_history(run(kind, model, steps=6), expected)
        assert engine.metrics()["offload/activations/step_left_bytes"] == 0


def _in_bfloat16(model: nn.Module, data: Batch) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return loss_of(model, data)


@pytest.mark.parametrize("kind", ["GPT-2", "Mixtral", "T5", "ResNet", "LSTM"])
def test_autocast_is_the_same_and_casts_of_weights_stay(kind: str, disk: Path) -> None:
    try:
        expected = run(kind, build(kind), steps=1, forward=_in_bfloat16)
    except RuntimeError as error:  # plain PyTorch, without this package
        if "could not create a primitive" not in str(error):
            raise
        pytest.skip(f"oneDNN has no bfloat16 kernel for {kind} on this processor")
    model = build(kind)
    with activations_only(disk, budget="100%") as engine:
        engine.attach(model)
        got = run(kind, model, steps=1, forward=_in_bfloat16, between=lambda: on_disk(engine))
        assert_same_history(got, expected)
        left = moved(engine)

    model = build(kind)
    # Copies of weights are told by what they hold.
    casts = {bytes(p.detach().to(torch.bfloat16).untyped_storage()) for p in model.parameters()}
    torch.manual_seed(1000)
    saved = saved_storages(
        lambda: _in_bfloat16(model, batch(kind, 0)), [*model.parameters(), *model.buffers()]
    )
    of_weights = [storage for storage in saved if bytes(storage) in casts]
    assert of_weights
    others = sum(storage.nbytes() for storage in saved if storage not in of_weights)
    assert 0.97 * others < left <= others


# ---------------------------------------------------------------------- compiled
# A compiled region saves what its partitioner chose, as a few large tensors, by the same hooks.
# With checkpointing: tests/integrations/combinations.py.
def test_a_compiled_model_is_the_same(disk: Path) -> None:
    """Numbers are the same, and Dynamo compiles as often without and with offload."""
    graphs: list[int] = []

    def make() -> Any:
        graphs.append(counters["stats"]["unique_graphs"])
        torch._dynamo.reset()
        counters.clear()
        return torch.compile(build("GPT-2"), backend="aot_eager")

    try:
        compare(make, "GPT-2", disk, BOTH)
        assert counters["stats"]["unique_graphs"] == graphs[-1] > 0
    finally:
        torch._dynamo.reset()
