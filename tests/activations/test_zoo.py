"""Every model of the zoo: the same to the last bit, and nearly everything that is saved leaves."""

import pytest
import torch
import torch._dynamo
from torch._dynamo.utils import counters

from tests.activations.zoo import ZOO, batch, build, loss_of
from tests.training import (
    activations_only,
    assert_same_history,
    gradients,
    in_turn,
    moved,
    on_disk,
    saved_storages,
    weights,
)

pytest.importorskip("transformers")


#: Micro-batches of a step, and whether all forward passes come first: then backward passes run in
#: the same order in one step and in the reverse order in the next.
ONCE, ACCUMULATED, FORWARDS_FIRST = (1, False), (3, False), (3, True)
ALL, BOTH = (ONCE, ACCUMULATED, FORWARDS_FIRST), (ONCE, FORWARDS_FIRST)


def train(kind, model, schedule, *, engine=None, wait=False, forward=loss_of):
    """Losses and gradients of three steps with AdamW, and the weights after them.

    With an engine the model is attached; `wait`: everything is on the disk before a backward pass.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    count, forwards_first = schedule
    history = []
    for step in range(3):
        numbers, waiting = {}, []
        for index in range(count):
            if engine is not None:
                engine.microbatch(index, last=index == count - 1)
            torch.manual_seed(1000 + count * step + index)
            loss = forward(model, batch(kind, count * step + index))
            numbers[f"loss {index}"] = loss.detach().clone()
            waiting.append(loss / count)
            del loss
            if engine is not None and wait:
                on_disk(engine)
            if not forwards_first:
                waiting.pop().backward()
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


def noting(saved):
    """A forward pass that adds to a list what autograd saves, but for weights."""

    def noted(model, data):
        losses = []
        weights_of = [*model.parameters(), *model.buffers()]
        saved.extend(saved_storages(lambda: losses.append(loss_of(model, data)), weights_of))
        return losses.pop()

    return noted


def same(make, kind, disk, schedules):
    """Train without and with offload, every byte by way of the disk: the same to the last bit."""
    saved = []

    def run(model, **options):
        return [step for schedule in schedules for step in train(kind, model, schedule, **options)]

    expected = run(make(), forward=noting(saved))
    saved_bytes = sum(storage.nbytes() for storage in saved)
    losses = [float(v) for step in expected for name, v in step.items() if name.startswith("loss ")]
    assert len(set(losses)) == len(losses), "the loss does not change"

    model = make()
    with activations_only(disk, budget="100%") as engine:
        engine.attach(model)
        assert_same_history(run(model, engine=engine, wait=True), expected)
        left, read = moved(engine), moved(engine, verb="read")
        assert engine._resources.store.registry.live == 0
    # Whole storages are counted here: a view of a part takes only its part along. What is freed
    # before its turn is never written; a few models save what nobody asks for.
    assert 0.95 * saved_bytes <= left <= saved_bytes
    assert 0.5 * left <= read <= left


#: A model without any checkpointing, and with one of both kinds.
@pytest.mark.parametrize(
    ("kind", "reentrant"), [*in_turn(ZOO, [None]), *in_turn(ZOO, [True, False])]
)
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable:FutureWarning")
def test_training_is_the_same(kind, reentrant, disk):
    same(lambda: build(kind, reentrant), kind, disk, ALL if reentrant is None else BOTH)


# A compiled region saves what its partitioner chose, as a few large tensors, by the same hooks.
# With checkpointing: tests/integrations/test_combinations.py.
def test_a_compiled_model_is_the_same(disk):
    """Numbers are the same, and Dynamo compiles as often without and with offload."""
    graphs = []

    def make():
        graphs.append(counters["stats"]["unique_graphs"])
        torch._dynamo.reset()
        counters.clear()
        return torch.compile(build("GPT-2"), backend="aot_eager")

    try:
        same(make, "GPT-2", disk, BOTH)
        assert counters["stats"]["unique_graphs"] == graphs[-1] > 0
    finally:
        torch._dynamo.reset()


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("GPT-2", {"prefetch": 0, "budget": "60%"}),
        ("LSTM", {"prefetch": 0, "budget": "60%"}),
        ("LSTM", {"budget": "auto"}),
        ("GPT-2", {"host": "64MiB", "budget": "100%"}),
    ],
    ids=str,
)
def test_the_same_without_waiting_for_the_disk(kind, options, disk):
    expected = train(kind, build(kind), FORWARDS_FIRST)
    model = build(kind)
    with activations_only(None if "host" in options else disk, **options) as engine:
        engine.attach(model)
        assert_same_history(train(kind, model, FORWARDS_FIRST, engine=engine), expected)
        figures = engine.metrics()
        prefix = "offload/activations"
        saved, left = (figures[f"{prefix}/step_{what}_bytes"] for what in ("saved", "left"))
        assert 0 <= left <= saved
        if options["budget"] != "auto":
            assert left > 0
            assert (figures[f"{prefix}/kept_bytes"] > 0) == (options["budget"] == "60%")
        assert figures.get("offload/tier/host/used_bytes", 0) == 0
