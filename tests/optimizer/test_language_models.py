"""A language model and a GAN train for 25 steps with the same bits as without offload."""

from __future__ import annotations

import itertools
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import Adam, AdamW, Optimizer

from offload_strategy import OffloadEngine
from tests.optimizer.runs import EVERY_OVERLAP
from tests.training import Numbers, assert_same_history, settings

transformers = pytest.importorskip("transformers")

STEPS = 25
VOCABULARY = 97


def _gpt() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=32,
        n_embd=32,
        n_layer=2,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    model: nn.Module = transformers.GPT2LMHeadModel(config)
    return model.train()


def _loss(model: nn.Module, number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(VOCABULARY, (2, 16), generator=generator)
    loss: torch.Tensor = model(input_ids=tokens, labels=tokens).loss
    return loss


def _train(engine: OffloadEngine | None, accumulate: int) -> list[Numbers]:
    model = _gpt()
    optimizer: Optimizer = AdamW(model.parameters(), 1e-3, fused=True)
    if engine is not None:
        optimizer = engine.attach(model, optimizer)
    numbers = itertools.count()
    history = []
    for step in range(STEPS):
        optimizer.zero_grad()
        losses = []
        for index in range(accumulate):
            if engine is not None:
                engine.microbatch(index, last=index == accumulate - 1)
            loss = _loss(model, next(numbers)) / accumulate
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        history.append({"loss": torch.stack(losses)})
        if step % 8 == 0 or step == STEPS - 1:
            history[-1].update((name, p.detach().clone()) for name, p in model.named_parameters())
            for index, state in optimizer.state_dict()["state"].items():
                for name, value in state.items():
                    history[-1][f"{index}.{name}"] = torch.as_tensor(value).clone()
    return history


#: Training without offload, which is the same for every way to overlap.
_plain = cache(partial(_train, None))


@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("overlap", EVERY_OVERLAP)
def test_a_gpt_with_tied_weights(overlap: str, accumulate: int, disk: Path) -> None:
    config = settings(
        disk,
        optimizer={"overlap": overlap, "subgroup_size": 4000},
        activations={"enabled": True, "min_size": "4KiB"},
    )
    with OffloadEngine(config) as engine:
        offloaded = _train(engine, accumulate)
    assert_same_history(offloaded, _plain(accumulate))


@pytest.mark.parametrize("overlap", EVERY_OVERLAP)
def test_two_optimizers_that_alternate(overlap: str, disk: Path) -> None:
    """A generator and a discriminator; backward of one reaches the parameters of the other."""

    def train(engine: OffloadEngine | None) -> list[Numbers]:
        torch.manual_seed(0)
        makes = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 16))
        judges = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))
        first: Optimizer = Adam(makes.parameters(), 1e-3)
        second: Optimizer = AdamW(judges.parameters(), 1e-3, fused=True)
        if engine is not None:
            first = engine.attach(makes, first)
            second = engine.attach(judges, second)
        history = []
        for step in range(STEPS):
            generator = torch.Generator().manual_seed(step)
            noise = torch.randn(4, 8, generator=generator)
            real = torch.randn(4, 16, generator=generator)
            second.zero_grad()
            lost = (judges(makes(noise).detach()) - judges(real)).mean()
            lost.backward()
            second.step()
            first.zero_grad()
            # What the judge learns from this is never used: it must not be updated by it.
            judges.requires_grad_(False)
            won = -judges(makes(noise)).mean()
            won.backward()
            judges.requires_grad_(True)
            first.step()
            weights = [*makes.parameters(), *judges.parameters()]
            numbers = {str(i): p.detach().clone() for i, p in enumerate(weights)}
            history.append({**numbers, "lost": lost.detach(), "won": won.detach()})
        return history

    config = settings(
        disk,
        optimizer={"overlap": overlap, "subgroup_size": 500},
        activations={"enabled": False},
    )
    plain = train(None)
    with OffloadEngine(config) as engine:
        assert_same_history(train(engine), plain)
