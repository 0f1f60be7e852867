"""When things go wrong: every use says so, and no state is lost."""

import os
from contextlib import contextmanager
from itertools import count

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW

from offload_strategy import ConfigError, OffloadEngine, OffloadError, StorageError
from offload_strategy.optimizer import subgroup_update
from offload_strategy.optimizer.states.precision import MASTER_WEIGHT
from offload_strategy.optimizer.user_class import inner_step
from tests.optimizer.runs import OVERLAPS, Run, adamw, offloading, steps
from tests.training import bits, on_disk


@contextmanager
def _update_fails(monkeypatch, call, error):
    """Have one of the calls of the user's class fail, counted from 0."""
    calls, real = count(), inner_step.run_update

    def failing(*args):
        if next(calls) == call:
            raise error
        real(*args)

    with monkeypatch.context() as patch:
        patch.setattr(subgroup_update, "run_update", failing)
        with pytest.raises(type(error), match=str(error)):
            yield


def test_after_closing_every_use_says_so(disk):
    with offloading(disk) as engine:
        run = Run(adamw, engine)
        steps(run, 1)
    optimizer = run.optimizer
    for use in (
        optimizer.step,
        optimizer.state_dict,
        lambda: optimizer.load_state_dict({}),
        lambda: optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]}),
    ):
        with pytest.raises(OffloadError, match="closed"):
            use()
    optimizer.zero_grad()
    run.backward(5)  # nothing listens any more
    assert all(not p._post_accumulate_grad_hooks for p in run.model.parameters())


@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("call", [0, 1])
def test_an_update_that_is_interrupted_loses_no_state(overlap, call, disk, monkeypatch):
    """A checkpoint can be written after Ctrl-C, and training can go on."""
    with offloading(disk, overlap) as engine:
        run = Run(adamw, engine)
        steps(run, 2)
        before = run.optimizer.state_dict()
        with _update_fails(monkeypatch, call, KeyboardInterrupt("stop")):
            run.optimizer.zero_grad()
            run.backward(2)
            run.optimizer.step()
        after = run.optimizer.state_dict()
        assert list(after["state"]) == list(before["state"])
        changed = [
            key
            for key, state in after["state"].items()
            if bits(state["exp_avg"]) != bits(before["state"][key]["exp_avg"])
        ]
        assert (len(changed) > 0) == (overlap == "off" and call == 1)
        run.optimizer.zero_grad()
        steps(run, 2, start=3)


@pytest.mark.parametrize("masters", [True, False])
def test_an_update_that_fails_between_chunks_loses_no_state(masters, disk, monkeypatch):
    monkeypatch.setattr(inner_step, "CHUNK_ELEMENTS", 512)
    dtype, section = torch.float32, {"state_dtype": "bfloat16", "subgroup_size": 10_000}
    if masters:
        dtype, section = torch.bfloat16, {"master_weights": True, "subgroup_size": 10_000}
    parameter = nn.Parameter(torch.ones(64, 64, dtype=dtype))

    def step():
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()

    with offloading(disk, "off", optimizer=section) as engine:
        optimizer = engine.attach(None, AdamW([parameter], 1e-2))
        for _ in range(2):
            step()
        before = optimizer.state[parameter]
        with _update_fails(monkeypatch, 1, LookupError("refused")):
            step()
        kept = optimizer.state[parameter]
        assert kept.keys() == before.keys()
        # The first chunk is updated, the others are as they were.
        for name in ("exp_avg", MASTER_WEIGHT) if masters else ("exp_avg",):
            assert not torch.equal(kept[name][:8], before[name][:8])
            assert torch.equal(kept[name][8:], before[name][8:])
        assert kept["step"] == before["step"]
        step()
        assert optimizer.state[parameter]["step"] == before["step"] + 1
        assert optimizer.state[parameter]["exp_avg"].dtype == torch.float32


def test_a_disk_that_breaks_loses_no_state(disk, monkeypatch):
    plain = Run(adamw)
    steps(plain, 2)
    with offloading(disk, "off") as engine:
        run = Run(adamw, engine)
        steps(run, 1)

        def broken(*args):
            raise OSError(5, "Input/output error")

        on_disk(engine)
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwritev", broken)
            run.optimizer.zero_grad()
            run.backward(1)
            # The write fails some time after it was asked for.
            with pytest.raises(StorageError, match=r"could not write .* of optimizer"):
                all(run.optimizer.step() is None for _ in range(20))
        # Loud from now on, but everything can still be saved.
        with pytest.raises(StorageError):
            run.optimizer.step()
        saved = run.optimizer.state_dict()
        assert len(saved["state"]) == len(plain.optimizer.state_dict()["state"])
        for key, state in plain.optimizer.state_dict()["state"].items():
            assert saved["state"][key].keys() == state.keys()


def test_too_small_a_tier_is_refused_before_training(disk):
    model = nn.Linear(1000, 100)
    tiers = [{"name": "nvme", "kind": "ssd", "path": str(disk), "capacity": "800KiB"}]
    with OffloadEngine({"tiers": tiers, "optimizer": {"overlap": "off"}}) as engine:
        assert engine.attach(model, AdamW(model.parameters())) is not None
    with OffloadEngine({"tiers": tiers, "optimizer": {"overlap": "commit"}}) as engine:
        with pytest.raises(ConfigError) as refused:
            engine.attach(model, AdamW(model.parameters()))
        for part in ("1.9 MiB", "782 KiB of states", "800 KiB", "overlap to off"):
            assert part in str(refused.value)
        # Refused as a whole: the same parameters may be tried again with less.
        assert engine.attach(model, SGD(model.parameters(), 0.1)) is not None
