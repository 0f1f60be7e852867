"""Checkpointed regions: their inputs leave, and what is computed again does not."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils import checkpoint as checkpointing
from torch.utils.checkpoint import checkpoint

from tests.activations.support import noise, written
from tests.training import assert_same_bits, gradients, moved, on_disk, saved_storages

reentrant = partial(checkpoint, use_reentrant=True)
non_reentrant = partial(checkpoint, use_reentrant=False)


def selective(*saved):
    """A region that computes again all but the results of a few operations."""

    def decide(context, op, *args, **options):
        policy = checkpointing.CheckpointPolicy
        return policy.MUST_SAVE if op in saved else policy.PREFER_RECOMPUTE

    contexts = partial(checkpointing.create_selective_checkpoint_contexts, decide)
    return partial(checkpoint, use_reentrant=False, context_fn=contexts)


def _without_early_stop(region, x):
    with checkpointing.set_checkpoint_early_stop(False):
        return non_reentrant(region, x)


def _nested(outer, inner):
    return lambda region, x: outer(lambda y: inner(region, y.tanh()).sin(), x)


WAYS = {
    "reentrant": reentrant,
    "non-reentrant": non_reentrant,
    "without early stop": _without_early_stop,
    "selective, products saved": selective(torch.ops.aten.addmm.default),
    "selective, more saved": selective(torch.ops.aten.addmm.default, torch.ops.aten.gelu.default),
    "selective, nothing saved": selective(),
    "two non-reentrant": _nested(non_reentrant, non_reentrant),
    "two reentrant": _nested(reentrant, reentrant),
    "non-reentrant in reentrant": _nested(reentrant, non_reentrant),
    "reentrant in non-reentrant": _nested(non_reentrant, reentrant),
    "selective in non-reentrant": _nested(non_reentrant, selective(torch.ops.aten.addmm.default)),
    "three": _nested(non_reentrant, _nested(non_reentrant, non_reentrant)),
}


class Model(nn.Module):
    """Two regions with something between them."""

    def __init__(self, around):
        super().__init__()
        torch.manual_seed(0)
        self.region = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Dropout(0.3), nn.Linear(32, 8))
        self.out = nn.Linear(8, 8)
        self.around = around

    def forward(self, x):
        x = self.around(self.region, x)
        return self.around(self.region, F.relu(self.out(x))).sum()


class Step:
    """A step of a model with two regions; it and its input have the gradients of a plain step."""

    def __init__(self, way):
        self.model, self.x = Model(WAYS[way]), noise(4, 8).requires_grad_()
        self.expected = self()

    def __call__(self, between=lambda: None):
        torch.manual_seed(3)
        self.model.zero_grad()
        self.x.grad = None
        loss = self.model(self.x)
        between()
        loss.backward()
        return {"loss": loss.detach(), "x": self.x.grad, **gradients(self.model)}


# Inside of a reentrant region the first pass computes no gradients, which the inner one remarks on.
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True:UserWarning")
@pytest.mark.parametrize("way", WAYS)
def test_regions_are_computed_again_and_only_their_inputs_leave(engine, way):
    step = Step(way)
    model, left = step.model, []
    seen = saved_storages(lambda: model(step.x), [*model.parameters(), *model.buffers()])
    engine.attach(model)

    def forward_is_over():
        on_disk(engine)
        left.append(moved(engine))
        if len(left) == 1:
            assert written(engine) == sorted(storage.nbytes() for storage in seen)

    for scope in (nullcontext, nullcontext, engine.forward):  # around the backward pass, too
        with scope():
            assert_same_bits(step(forward_is_over), step.expected)
        on_disk(engine)
        assert moved(engine) == left[-1], "nothing leaves in backward"
    assert left[0] < 8 * 4 * 8 * 4, "nothing as wide as the regions are inside"
    assert_same_bits(step(), step.expected)  # without waiting for the disk


@pytest.mark.parametrize("way", ["reentrant", "non-reentrant", "selective, products saved"])
@pytest.mark.parametrize("part", ["the region", "part of it"])
def test_a_model_may_be_attached_inside_of_a_region(engine, way, part):
    """Its calls are inside of the region's, in forward and again in backward."""
    step = Step(way)
    engine.attach(step.model.region if part == "the region" else step.model.region[0])
    for _ in range(2):
        assert_same_bits(step(), step.expected)
    on_disk(engine)
    assert moved(engine) == 0  # its inputs belong to whoever calls it, the rest is made again
    # Scopes of two calls in two steps; a reentrant region's first pass computes no gradients.
    assert engine._log.passes == (0 if way == "reentrant" else 4)
