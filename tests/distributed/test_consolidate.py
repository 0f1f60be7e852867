"""One plain file of a checkpoint that ranks saved in parts, and tiers that machines share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import save
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from offload_strategy import OffloadEngine
from offload_strategy.cli import main
from offload_strategy.errors import ConfigError
from tests.training import moved, settings


def trained(optimizer: Any, model: nn.Module) -> None:
    for x in torch.randn(3, 4, 32, generator=torch.Generator().manual_seed(1)):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))
    groups = [
        {"params": model[number].parameters(), "lr": 0.01 / (1 + number)} for number in (2, 0)
    ]
    return model, torch.optim.AdamW(groups)


def test_a_folder_becomes_a_file_that_plain_training_loads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, plain = make()
    with OffloadEngine(settings(tmp_path)) as engine:
        optimizer = engine.attach(model, plain)
        trained(optimizer, model)
        states = {
            "model": model.state_dict(),
            "optimizer": get_optimizer_state_dict(model, optimizer),
            "step": 3,
        }
        save(states, checkpoint_id=tmp_path / "folder", no_dist=True)
    assert main(["consolidate", str(tmp_path / "folder"), str(tmp_path / "one.pt")]) == 0
    assert "model, optimizer" in capsys.readouterr().out
    found = torch.load(tmp_path / "one.pt")
    assert found["step"] == 3

    other, again = make()
    other.load_state_dict(found["model"])
    again.load_state_dict(found["optimizer"])
    reference, expected = make()
    trained(expected, reference)
    assert again.state_dict()["param_groups"] == expected.state_dict()["param_groups"]
    trained(again, other)
    trained(expected, reference)
    for mine, theirs in zip(other.parameters(), reference.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "one.pt"]

    # What is no such checkpoint is refused.
    assert main(["consolidate", str(tmp_path), str(tmp_path / "two.pt")]) == 2
    assert "not a checkpoint of torch.distributed.checkpoint" in capsys.readouterr().err
    assert not (tmp_path / "two.pt").exists()


def test_on_a_shared_path_each_process_has_a_folder_of_its_own(tmp_path: Path) -> None:
    config = settings(tmp_path)
    config["tiers"][0]["shared"] = True
    model, plain = make()
    with OffloadEngine(config) as one, OffloadEngine(settings(tmp_path)):
        (folder,) = tmp_path.iterdir()
        assert "-rank0-" in folder.name
        trained(one.attach(model, plain), model)
        assert moved(one, "optimizer") > 0
    assert list(tmp_path.iterdir()) == []

    # Host memory is not shared.
    tier = {"name": "host", "kind": "dram", "capacity": "1GiB", "shared": True}
    with pytest.raises(ConfigError, match="remove shared"):
        OffloadEngine({"tiers": [tier]})
