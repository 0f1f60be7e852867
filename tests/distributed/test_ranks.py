"""Several ranks: numbers and checkpoints of plain training; each has its part of the states.

The ranks compare what they come to by themselves. One that dies takes the job down: in time, with a
message that names it, and with no file.
"""

import json

import psutil
import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import save
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from offload_strategy import OffloadEngine
from offload_strategy.cli import main
from offload_strategy.errors import ConfigError
from tests.distributed.ranks import run_ranks
from tests.training import assert_same_bits, moved, settings, weights


@pytest.fixture
def tier(tmp_path):
    """The directory of the ranks' tiers."""
    (tmp_path / "tier").mkdir()
    return tmp_path / "tier"


def test_every_way_gives_what_plain_data_parallel_training_gives(tmp_path):
    run_ranks("tests.distributed.data_parallel_runs:against_plain", tmp_path)


# One test for what the ranks did: pytest-xdist would run them again for others.
def test_sharded_training_gives_what_it_gives_without_offload(tmp_path):
    run_ranks("tests.distributed.sharded_runs:two_ranks", tmp_path)
    # A checkpoint of two ranks goes on with one and with four.
    for size in (1, 4):
        place = tmp_path / str(size)
        place.mkdir()
        where = "tests.distributed.sharded_runs:second_half"
        run_ranks(where, place, size, source=str(tmp_path))


@pytest.mark.parametrize("framework", ["accelerate", "the_trainer", "lightning", "fabric"])
def test_frameworks_give_the_numbers_and_checkpoints_of_plain_training(
    tmp_path, tier, monkeypatch, framework
):
    if framework == "the_trainer":
        pytest.importorskip("peft")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    run_ranks(f"tests.distributed.framework_runs:with_{framework}", tmp_path)
    assert list(tier.iterdir()) == []


def test_checkpoints_of_two_ranks_go_on_as_plain_ones_with_one_rank_and_with_four(tmp_path, tier):
    where = "tests.distributed.data_parallel_runs"
    run_ranks(f"{where}:save_half", tmp_path)
    for size in (1, 4):
        run_ranks(f"{where}:second_half", tmp_path, size)
    assert list(tier.iterdir()) == []


# ---------------------------------------------------------------------- a rank dies
def test_ranks_without_a_launcher_end_by_themselves_and_name_the_one_that_is_gone(tmp_path, disk):
    ways = ["backward", "step", "error"]
    where = "tests.distributed.doomed:by_themselves"
    (found,) = run_ranks(where, tmp_path, size=1, group=False, tier=str(disk), ways=ways)
    for how in ways:
        files = [file for file in (tmp_path / how).iterdir() if file.name != "store"]
        notes = {file.name: file.read_text() for file in files}
        assert "to-the-end" not in notes
        for rank in range(3):
            status, seconds_after = found[how][str(rank)]
            said = notes[f"output-{rank}"]
            assert not psutil.pid_exists(int(notes[f"process-{rank}"]))
            assert float(notes[f"moved-{rank}"]) > 0
            assert seconds_after < 30
            if rank != 2:
                assert f"rank 2 (process {notes['process-2']})" in said, said
            elif how == "error":
                assert "OSError: an update failed" in said
            assert status == (-9 if rank == 2 and how != "error" else 1), said


def test_torchrun_ends_all_ranks_and_starts_others_that_end_as_an_unbroken_job(tmp_path, disk):
    where = "tests.distributed.doomed:restarted"
    run_ranks(where, tmp_path, size=1, group=False, tier=str(disk))
    for rank in range(2):
        assert not psutil.pid_exists(int((tmp_path / f"process-{rank}-0").read_text()))
        found = json.loads((tmp_path / f"found-{rank}").read_text())
        assert (found["restarts"], found["first"], found["differs"]) == (1, 3, [])
        assert found["moved"] > 0


# ---------------------------------------------------------------------- files and machines
def make():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))
    groups = [
        {"params": model[number].parameters(), "lr": 0.01 / (1 + number)} for number in (2, 0)
    ]
    return model, torch.optim.AdamW(groups)


def trained(optimizer, model):
    for x in torch.randn(3, 4, 32, generator=torch.Generator().manual_seed(1)):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_a_folder_becomes_a_file_that_plain_training_loads(tmp_path, disk, capsys):
    folder, file, other_file = (tmp_path / name for name in ("folder", "one.pt", "two.pt"))
    model, plain = make()
    with OffloadEngine(settings(disk)) as engine:
        optimizer = engine.attach(model, plain)
        trained(optimizer, model)
        states = get_optimizer_state_dict(model, optimizer)
        saved = {"model": model.state_dict(), "optimizer": states, "step": 3}
        save(saved, checkpoint_id=folder, no_dist=True)
    assert main(["consolidate", str(folder), str(file)]) == 0
    assert "model, optimizer" in capsys.readouterr().out
    found = torch.load(file)
    assert found["step"] == 3

    other, again = make()
    other.load_state_dict(found["model"])
    again.load_state_dict(found["optimizer"])
    reference, expected = make()
    trained(expected, reference)
    assert again.state_dict()["param_groups"] == expected.state_dict()["param_groups"]
    trained(again, other)
    trained(expected, reference)
    assert_same_bits(weights(other), weights(reference))

    # What is no such checkpoint is refused.
    assert main(["consolidate", str(tmp_path), str(other_file)]) == 2
    assert "not a checkpoint of torch.distributed.checkpoint" in capsys.readouterr().err
    assert not other_file.exists()


def test_on_a_shared_path_each_process_has_a_folder_of_its_own(disk):
    config = settings(disk)
    config["tiers"][0]["shared"] = True
    model, plain = make()
    with OffloadEngine(config) as one, OffloadEngine(settings(disk)):
        (folder,) = disk.iterdir()
        assert "-rank0-" in folder.name
        trained(one.attach(model, plain), model)
        assert moved(one, "optimizer") > 0

    # Host memory is not shared.
    tier = {"name": "host", "kind": "dram", "capacity": "1GiB", "shared": True}
    with pytest.raises(ConfigError, match="remove shared"):
        OffloadEngine({"tiers": [tier]})
