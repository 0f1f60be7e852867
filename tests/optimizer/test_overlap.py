"""When updates run during backward, and where weights, states and gradients are between steps."""

from __future__ import annotations

import gc
import weakref
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import AdamW

from offload_strategy.errors import OffloadError
from offload_strategy.optimizer.subgroup_update import Updater
from tests.optimizer.runs import Run, adamw, offloading, snapshot, steps
from tests.training import assert_same_bits


def _spy(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    counts = {"update_ahead": 0, "commit": 0, "drop": 0, "update_in_place": 0}
    for name in counts:
        real = getattr(Updater, name)

        def counted(self: Updater, *args: Any, _name: str = name, _real: Any = real) -> Any:
            counts[_name] += 1
            return _real(self, *args)

        monkeypatch.setattr(Updater, name, counted)
    return counts


class Chain(nn.Module):
    """Layers of a size that each make a subgroup."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(4)))

    def forward(self) -> torch.Tensor:
        return self.layers(torch.ones(2, 8)).pow(2).sum()


def test_updates_run_in_the_last_backward_and_are_committed_at_the_step(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = _spy(monkeypatch)
    # In host memory, so that no update ever waits for its states.
    with offloading(disk, host="1MiB") as engine:
        model = Chain()
        optimizer = engine.attach(None, AdamW(model.parameters()))
        for step in range(1, 4):
            optimizer.zero_grad()
            before = snapshot(model)
            for index in range(2):
                assert counts["update_ahead"] == 4 * (step - 1)
                engine.microbatch(index, last=index == 1)
                model().backward()
            assert counts["update_ahead"] == 4 * step
            after = snapshot(model)
            assert_same_bits({k: after[k] for k in before}, before)
            assert counts["commit"] == 4 * (step - 1)
            optimizer.step()
            assert counts["commit"] == 4 * step
        assert counts["drop"] == counts["update_in_place"] == 0
        assert not optimizer.inner.state


def test_nothing_runs_ahead_with_overlap_off(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = _spy(monkeypatch)
    with offloading(disk, "off") as engine:
        model = Chain()
        optimizer = engine.attach(None, AdamW(model.parameters()))
        model().backward()
        optimizer.step()
        assert all(not p._post_accumulate_grad_hooks for p in model.parameters())
    assert counts == {"update_ahead": 0, "commit": 0, "drop": 0, "update_in_place": 4}


def test_weights_are_written_into_their_own_storage(disk: Path) -> None:
    """Aliases of the weights, like those of an average or of a tied layer, see the update."""
    with offloading(disk) as engine:
        run = Run(adamw, engine)
        aliases = {name: p.detach() for name, p in run.model.named_parameters()}
        addresses = {name: p.data_ptr() for name, p in run.model.named_parameters()}
        before = {name: alias.clone() for name, alias in aliases.items()}
        steps(run, 3)
        for name, parameter in run.model.named_parameters():
            assert parameter.data_ptr() == addresses[name]
            assert torch.equal(aliases[name], parameter)
        assert not torch.equal(aliases["first.weight"], before["first.weight"])


@pytest.mark.parametrize("overlap", ["commit", "off", "eager"])
def test_what_is_in_host_memory_stays_there(overlap: str, disk: Path) -> None:
    """Half of the states never touch the disk, in whatever order updates and commits come."""
    with offloading(disk, overlap, host="1KiB") as engine:  # two layers of four
        model = Chain()
        optimizer = engine.attach(None, AdamW(model.parameters()))
        (host,) = engine._resources.memory_tiers.values()
        written = []
        for _ in range(5):
            optimizer.zero_grad()
            model().backward()
            optimizer.step()
            engine._resources.store.wait_for_writes()
            written.append(engine.metrics()["offload/optimizer/written_bytes"])
            assert host.used_bytes == 2 * 2 * 64 * 4
        per_step = {later - earlier for earlier, later in pairwise(written)}
        assert per_step == {2 * 2 * 64 * 4}


# ---------------------------------------------------------------------- eager
#: `gradients/test_consumed.py` has the operators, that of loss scalers among them.
def test_gradients_that_were_used_are_refused_from_the_first_step(disk: Path) -> None:
    with offloading(disk, "eager") as engine:
        run = Run(adamw, engine)
        run.backward(0)
        assert "consumed" in repr(run.model.first.weight.grad)
        weights = [p.detach().clone() for p in run.model.parameters()]
        with pytest.raises(OffloadError, match=r"optimizer\.overlap: commit"):
            run.backward(1)
        assert all(map(torch.equal, weights, run.model.parameters()))


def test_weights_change_during_backward_and_gradients_are_freed(disk: Path) -> None:
    with offloading(disk, "eager", host="1MiB") as engine:
        run = Run(adamw, engine)
        alive: list[weakref.ref[torch.UntypedStorage]] = []
        parameter = run.model.tied.weight
        before = parameter.detach().clone()
        for each in run.model.parameters():
            if each.requires_grad:
                each.register_hook(lambda g: alive.append(weakref.ref(g)))
        run.backward(0)
        assert not torch.equal(parameter, before)
        # Those of subgroups of which another parameter takes no part in the loss wait for step().
        run.optimizer.step()
        gc.collect()
        assert sum(reference() is not None for reference in alive) == 0


@pytest.mark.parametrize("by", ["optimizer", "next backward", "failure"])
def test_a_backward_without_a_step_is_an_error_and_leaves_no_gradient_behind(
    by: str, disk: Path
) -> None:
    """A loss of another optimizer's, a step that is skipped, a pass that failed."""
    with offloading(disk, "eager") as engine:
        run = Run(adamw, engine)
        if by == "failure":
            handle = run.model.first.weight.register_hook(lambda g: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                run.backward(0)
            handle.remove()
        else:
            run.backward(0)
        if by == "next backward":
            run.model.zero_grad()
        with pytest.raises(OffloadError, match=r"no step\(\) followed.*last checkpoint"):
            run.backward(1) if by == "next backward" else run.optimizer.zero_grad()
        # Raised once: training may go on.
        run.model.zero_grad()
        run.backward(1)
        run.optimizer.step()
        run.optimizer.zero_grad()
        assert all(p.grad is None for p in run.model.parameters())
        engine._resources.store.wait_for_writes()
        assert engine._resources.pool.usage().lent_bytes == 0
