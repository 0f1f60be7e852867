"""DeepSpeed with the engine on top: the same numbers as DeepSpeed alone, and tiers in its words."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from offload_strategy import ConfigError, OffloadConfig
from offload_strategy.integrations.deepspeed.config_sections import (
    check_nvme,
    derived_sections,
    merge_sections,
)
from offload_strategy.integrations.deepspeed.gathered_weights import GatheredWeights
from offload_strategy.io.backends import deepnvme
from tests.distributed.ranks import run_ranks
from tests.integrations.deepspeed_runs import BATCH, OFFLOAD, STEPS, zero
from tests.integrations.lightning_runs import FAMILIES, in_both_installs, strategy_class
from tests.integrations.support import OURS, tensorboard_scalars
from tests.integrations.test_launch import home, launch, launch_file
from tests.training import left_bytes

__all__ = ["home"]

deepspeed = pytest.importorskip("deepspeed", reason="DeepSpeed cannot be imported here")

STAGES = (1, 2, 3)


# ---------------------------------------------------------------------- numbers


def launched_with(home: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The variables that `accelerate launch` gives to a script, with both sections in its file."""
    config = {**zero(2), "train_micro_batch_size_per_gpu": BATCH}
    (home / "zero.json").write_text(json.dumps(config))
    path = launch_file(
        home,
        "offload.yaml",
        distributed_type="DEEPSPEED",
        use_cpu=False,
        deepspeed_config={"deepspeed_config_file": "zero.json", "zero3_init_flag": False},
        ssd_offload_config=OFFLOAD,
    )
    given: dict[str, str] = {}
    monkeypatch.setattr("torch.distributed.run.run", lambda _: given.update(os.environ))
    launch(monkeypatch, "--config", path.name, "train.py")
    return {name: value for name, value in given.items() if name.startswith(OURS)}


# One test for what one process did: pytest-xdist would run it again for others.
def test_losses_and_weights_are_those_of_deepspeed_alone(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    variables = launched_with(home, monkeypatch)
    where = "tests.integrations.deepspeed_runs:one_device"
    (results,) = run_ranks(where, home, size=1, variables=variables)
    assert results.keys() >= {f"{FAMILIES[1]}-3", f"{FAMILIES[0]}-1", "accelerate-1", "launched-2"}
    for run, ours in results.items():
        framework, _, stage = run.partition("-")
        if framework == "alone":
            continue
        alone = results[f"alone-{stage}"]
        assert len(set(alone["losses"])) == STEPS
        assert ours["losses"] == alone["losses"]
        assert ours["weights"] == alone["weights"]
        assert ours["moved"] >= STEPS * ours["saved"] > 0
        if framework in ("accelerate", "launched"):
            # It is DeepSpeed that trains.
            assert ours["type"] == "DEEPSPEED"
            assert ours["optimizer"] == "DeepSpeedOptimizerWrapper"
        else:
            # ZeRO-3: gathered weights are found again, so that no more leaves than where they stay.
            weights_and_biases = 2 * 3
            assert ours["gathered"] == [STEPS * weights_and_biases if stage == "3" else 0]
            assert ours["saved"] == results[f"{FAMILIES[0]}-2"]["saved"]

    # By DeepSpeed's steps our metrics are due.
    for board in ("given", "launched"):
        scalars = tensorboard_scalars(home / "logs" / board)
        assert left_bytes({name: points[-1][1] for name, points in scalars.items()}) > 0
        assert {step for step, _ in scalars["loss"]} == set(range(STEPS))


def test_two_devices_train_to_the_bits_of_deepspeed_alone(tmp_path: Path) -> None:
    results = run_ranks("tests.integrations.deepspeed_runs:two_devices", tmp_path)
    for result in results:
        assert result["ours"]["losses"] == result["alone"]["losses"]
        assert result["ours"]["weights"] == result["alone"]["weights"]
        assert result["ours"]["moved"] >= STEPS * result["ours"]["saved"] > 0
    first, second = (result["ours"] for result in results)
    assert first["losses"] != second["losses"]  # each had data of its own
    assert first["weights"] == second["weights"]


# ---------------------------------------------------------------------- weights of ZeRO-3


def test_a_saved_weight_is_found_where_it_is_gathered_next() -> None:
    """The weight is taken apart and gathered as DeepSpeed does it."""
    module = nn.Linear(4, 3, bias=False)
    weight: Any = module.weight
    weight.ds_id = 0
    values = weight.detach().clone()
    gathered = 0

    def gather() -> None:
        nonlocal gathered
        gathered += 1
        weight.data, weight.ds_status = values.clone(), SimpleNamespace(name="AVAILABLE")

    def part() -> None:
        weight.data, weight.ds_status = torch.empty(0), SimpleNamespace(name="NOT_AVAILABLE")

    weight.all_gather, weight.partition = gather, part
    weights = GatheredWeights(module)
    gather()
    module(torch.ones(1, 4))
    whole, row = weights.save(weight.detach()), weights.save(weight.detach().t()[1])
    assert whole is not None
    assert row is not None
    assert weights.save(torch.ones(3, 4)) is None
    bytes_of_before = weight.detach()
    part()
    assert weights.save(bytes_of_before) is None, "they belong to nobody"
    # What is apart is gathered for as long as it is copied.
    assert torch.equal(whole.unpack(), values)
    assert gathered == 2
    assert weight.numel() == 0
    gather()
    assert torch.equal(whole.unpack(), values)
    assert whole.unpack().data_ptr() == weight.data_ptr()
    assert torch.equal(row.unpack(), values[:, 1])
    weights.remove()
    assert not module._forward_pre_hooks


# ---------------------------------------------------------------------- sections


def config(tmp_path: Path, **sections: Any) -> OffloadConfig:
    tiers = [{"name": "nvme", "kind": "ssd", "path": str(tmp_path / "nvme")}]
    return OffloadConfig(**{"tiers": tiers, **sections})


def checked(deepspeed_config: dict[str, Any]) -> Any:
    """A config as DeepSpeed's own classes read it; they raise for what they do not know."""
    from deepspeed.runtime.config import DeepSpeedConfig

    with mock.patch.dict(os.environ, RANK="0", WORLD_SIZE="1"):
        return DeepSpeedConfig({"train_batch_size": 1, **deepspeed_config})


def test_the_derived_nvme_sections_pass_deepspeeds_own_check(tmp_path: Path) -> None:
    ours = config(
        tmp_path, optimizer={"enabled": True}, parameters={"enabled": True}, io={"threads": 2}
    )
    theirs: dict[str, Any] = {"zero_optimization": {"stage": 3}}
    sections = derived_sections(theirs, ours, largest_parameter=12345)
    assert theirs == {"zero_optimization": {"stage": 3}}
    merge_sections(theirs, sections)
    read = checked(theirs)
    optimizer, weights = read.zero_config.offload_optimizer, read.zero_config.offload_param
    for name, section in (("offload_optimizer", optimizer), ("offload_param", weights)):
        assert (section.device, section.nvme_path) == ("nvme", tmp_path / "nvme")
        assert section.pin_memory
        # Every key that was derived is one that DeepSpeed read.
        assert set(sections["zero_optimization"][name]) <= set(section.model_dump())
    assert (optimizer.buffer_count, optimizer.pipeline_read, optimizer.pipeline_write) == (16, 1, 1)
    assert weights.buffer_size == 12345
    assert read.zero_config.sub_group_size * 16 * 4 == ours.memory.pinned_bytes()
    assert set(sections["aio"]) <= set(read.aio_config)
    assert read.aio_config["block_size"] == 1 << 20
    assert read.aio_config["intra_op_parallelism"] == 2


@pytest.mark.parametrize("stage", STAGES)
def test_host_memory_becomes_device_cpu(stage: int) -> None:
    ours = OffloadConfig(
        tiers=[{"name": "ram", "kind": "dram", "capacity": "1GiB"}], optimizer={"enabled": True}
    )
    theirs: dict[str, Any] = {"zero_optimization": {"stage": stage}}
    merge_sections(theirs, derived_sections(theirs, ours))
    assert checked(theirs).zero_config.offload_optimizer.device == "cpu"
    assert "aio" not in theirs


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_nvme_is_not_derived_where_deepspeed_would_ignore_it(tmp_path: Path, stage: int) -> None:
    theirs = {"zero_optimization": {"stage": stage}}
    assert derived_sections(theirs, config(tmp_path)) == {}
    with pytest.raises(ConfigError, match=r"Set it to 3, or optimizer\.enabled to false"):
        derived_sections(theirs, config(tmp_path, optimizer={"enabled": True}))
    with pytest.raises(ConfigError, match=rf"needs ZeRO-3 .*\.stage is {stage}"):
        derived_sections(theirs, config(tmp_path, parameters={"enabled": True}))


def test_what_the_user_gave_stands(tmp_path: Path) -> None:
    place = str(tmp_path / "nvme")
    given = {
        "zero_optimization": {
            "stage": 3,
            "sub_group_size": 7,
            "offload_optimizer": {"device": "nvme", "nvme_path": place, "buffer_count": 5},
        },
        "aio": {"queue_depth": 4},
    }
    assert derived_sections(given, config(tmp_path)) == {}
    both = derived_sections(given, config(tmp_path, parameters={"enabled": True}))
    assert set(both) == {"zero_optimization"}
    assert set(both["zero_optimization"]) == {"offload_param"}
    # What says none is as good as none.
    none = {"stage": 3, "offload_optimizer": {"device": "none", "nvme_path": None}}
    theirs: dict[str, Any] = {"zero_optimization": none}
    merge_sections(theirs, derived_sections(theirs, config(tmp_path)))
    assert checked(theirs).zero_config.offload_optimizer.device == "nvme"
    # Our defaults are nobody's wish, and a client that is off has none.
    elsewhere = {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/elsewhere"}}
    assert derived_sections({"zero_optimization": elsewhere}, OffloadConfig()) == {}
    off = config(tmp_path, optimizer={"enabled": False})
    assert derived_sections({"zero_optimization": elsewhere}, off) == {}


CPU, ELSEWHERE = {"device": "cpu"}, {"device": "nvme", "nvme_path": "/elsewhere"}


@pytest.mark.parametrize(
    ("section", "says"), [(CPU, "device: cpu"), (ELSEWHERE, "nvme_path: /elsewhere")]
)
def test_a_conflict_is_named_before_anything_else_happens(
    tmp_path: Path, section: dict[str, Any], says: str
) -> None:
    theirs = {"zero_optimization": {"stage": 3, "offload_optimizer": section}}
    with pytest.raises(ConfigError) as caught:
        derived_sections(theirs, config(tmp_path))
    for part in ("zero_optimization.offload_optimizer", says, str(tmp_path / "nvme"), "Remove"):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    "section",
    [{"state_dtype": "bfloat16"}, {"stochastic_rounding": True}, {"master_weights": True}],
)
def test_settings_of_our_updates_are_refused(tmp_path: Path, section: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="the updates are DeepSpeed's"):
        derived_sections({"zero_optimization": {"stage": 2}}, config(tmp_path, optimizer=section))


def test_encryption_is_refused_where_deepspeed_writes_the_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"io\.encryption: true, and DeepSpeed writes optimizer"):
        derived_sections(
            {"zero_optimization": {"stage": 3}}, config(tmp_path, io={"encryption": True})
        )


def test_nvme_without_its_io_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deepnvme, "unavailable_reason", lambda: "there is no C++ compiler")
    sections = derived_sections({"zero_optimization": {"stage": 3}}, config(tmp_path))
    with pytest.raises(ConfigError, match="here: there is no C\\+\\+ compiler") as caught:
        check_nvme(sections)
    assert str(tmp_path / "nvme") in str(caught.value)
    check_nvme({"zero_optimization": {"offload_optimizer": {"device": "cpu"}}})


# ---------------------------------------------------------------------- the strategy


@in_both_installs
@pytest.mark.parametrize("stage", [None, *STAGES])
def test_the_strategy_is_found_by_name(pl: Any, family: str, stage: int | None) -> None:
    suffix = "" if stage is None else f"_stage_{stage}"
    trainer = pl.Trainer(strategy=f"ssd_offload_deepspeed{suffix}", accelerator="cpu", logger=False)
    assert trainer.strategy.config["zero_optimization"]["stage"] == (stage or 2)
    assert type(trainer.strategy).__name__ == "SSDOffloadDeepSpeedStrategy"


def test_the_strategy_derives_over_lightnings_defaults(family: str, tmp_path: Path) -> None:
    ours = config(tmp_path, optimizer={"enabled": True})
    ours_of = strategy_class(family, "SSDOffloadDeepSpeedStrategy")
    strategy = ours_of(ours, stage=3)
    assert strategy.config["zero_optimization"]["offload_optimizer"]["device"] == "nvme"
    assert strategy.config["zero_optimization"]["sub_group_size"] < 10**9
    assert "intra_op_parallelism" in strategy.config["aio"]
    assert strategy.config["zero_force_ds_cpu_optimizer"] is False
    asked = ours_of(ours, stage=3, sub_group_size=10**6, queue_depth=5)
    assert asked.config["zero_optimization"]["sub_group_size"] == 10**6
    assert asked.config["aio"]["queue_depth"] == 5
    with pytest.raises(ConfigError, match=r"zero_optimization\.offload_optimizer has device: cpu"):
        ours_of(ours, stage=3, offload_optimizer=True)
