"""`Accelerator.save_state` and `load_state` with an offloaded optimizer: its file streams."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import checkpointing

import offload_strategy.checkpoints
from offload_strategy import SSDOffloadPlugin
from tests.distributed.data_parallel_runs import same
from tests.integrations.accelerate_runs import _fresh_accelerate, prepare

__all__ = ["_fresh_accelerate"]


@pytest.fixture
def streamed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that were saved through ours, and mapped when they were loaded."""
    names: list[str] = []
    save, load = offload_strategy.checkpoints.save, torch.load

    def note_save(obj: Any, path: Path) -> None:
        names.append(f"saved {Path(path).name}")
        save(obj, path)

    def note_load(f: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("mmap"):
            names.append(f"mapped {Path(f).name}")
        return load(f, *args, **kwargs)

    monkeypatch.setattr(offload_strategy.checkpoints, "save", note_save)
    monkeypatch.setattr(torch, "load", note_load)
    return names


def test_the_file_of_an_offloaded_optimizer_is_streamed_and_no_other(
    tmp_path: Path, streamed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # A tiny model's tensors stay in the file as those of a large one do.
    monkeypatch.setattr(offload_strategy.checkpoints.private_maps, "SMALL_BYTES", 64)
    run = prepare(SSDOffloadPlugin()).train(3)
    run.accelerator.save_state(str(tmp_path / "state"))
    assert streamed == ["saved optimizer.bin"]
    run.accelerator.load_state(str(tmp_path / "state"))
    assert streamed == ["saved optimizer.bin", "mapped optimizer.bin"]
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()


def test_the_file_is_the_one_that_accelerate_writes(tmp_path: Path) -> None:
    files = []
    for plugin in (None, SSDOffloadPlugin()):
        run = prepare(plugin).train(3)
        folder = tmp_path / str(plugin is None)
        run.accelerator.save_state(str(folder))
        files.append(folder)
    plain, ours = (torch.load(folder / "optimizer.bin") for folder in files)
    assert sorted(p.name for p in files[0].iterdir()) == sorted(p.name for p in files[1].iterdir())
    assert same(ours, plain)


def test_a_plain_optimizer_is_left_to_accelerate(tmp_path: Path, streamed: list[str]) -> None:
    only_activations = SSDOffloadPlugin({"optimizer": {"enabled": False}})
    for number, plugin in enumerate((None, only_activations)):
        run = prepare(plugin).train(3)
        run.accelerator.save_state(str(tmp_path / str(number)))
        run.accelerator.load_state(str(tmp_path / str(number)))
    assert streamed == []


def test_accelerates_functions_are_as_they_were_outside_of_it(
    tmp_path: Path, streamed: list[str]
) -> None:
    prepare(SSDOffloadPlugin()).train(1)
    checkpointing.save({"a": torch.ones(3)}, tmp_path / "optimizer.bin")
    assert torch.equal(checkpointing.load(tmp_path / "optimizer.bin")["a"], torch.ones(3))
    assert streamed == []
