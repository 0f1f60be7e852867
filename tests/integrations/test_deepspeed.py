"""DeepSpeed with the engine on top: the same numbers as DeepSpeed alone, and tiers in its words.

Each run, in ranks that are forked, has its losses, a hash of its weights, and what moved.
"""

import copy
import hashlib
import importlib
import json
import os
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from accelerate import Accelerator, DeepSpeedPlugin
from accelerate.state import PartialState
from torch import nn
from torch.utils.data import DataLoader, Subset

from offload_strategy import ConfigError, OffloadConfig, SSDOffloadPlugin
from offload_strategy.integrations.accelerate.plugin import session_of
from offload_strategy.integrations.deepspeed import config_sections
from offload_strategy.integrations.deepspeed.gathered_weights import GatheredWeights
from offload_strategy.io.backends import deepnvme
from tests.distributed.ranks import run_ranks
from tests.integrations import lightning_runs
from tests.integrations.accelerate_runs import forget_accelerator
from tests.integrations.support import OURS, tensorboard_scalars
from tests.integrations.test_unmodified_scripts import launch, launch_file
from tests.training import left_bytes

deepspeed = pytest.importorskip("deepspeed", reason="DeepSpeed cannot be imported here")
# Communication over shared memory would be compiled first.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
deepspeed.utils.logging.logger.setLevel("ERROR")

STAGES = (1, 2, 3)
STEPS = 6
BATCH = 16
OFFLOAD = {"activations": {"min_size": "1KiB", "budget": "100%"}, "optimizer": {"enabled": False}}


def zero(stage):
    """DeepSpeed's config; with ZeRO-3, small parameters are taken apart as well."""
    section = {"stage": stage, "reduce_bucket_size": 100_000}
    if stage == 3:
        section["stage3_param_persistence_threshold"] = 0
    return {"zero_optimization": section, "zero_allow_untested_optimizer": True}


def alone(stage, loader):
    """DeepSpeed itself, with a loop of one's own."""
    model, optimizer = fresh()
    config = {**zero(stage), "train_micro_batch_size_per_gpu": BATCH}
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    result = outcome(list(train(engine, loader, engine.backward, engine.step)), model)
    engine.destroy()
    return result


def lightning(family, stage, devices=1):
    """The same through `Trainer(strategy=...)` of an install."""
    pl = importlib.import_module(family)
    ours = lightning_runs.strategy_class(family, "SSDOffloadDeepSpeedStrategy")
    strategy = ours(OFFLOAD, config=zero(stage))
    module = lightning_runs.make_module(pl)
    options = {"max_steps": STEPS, "devices": devices, "use_distributed_sampler": False}
    trainer = lightning_runs.make_trainer(pl, Path.cwd(), strategy, **options)
    trainer.fit(module, part_of_data(int(os.environ.get("LOCAL_RANK", "0")), devices))
    result = outcome(module.losses, module, strategy.offload_engine.metrics())
    strategy._close_engine()
    return result


def accelerate(stage, directory):
    """The same through `Accelerator.prepare`.

    Unless `accelerate launch` has put everything into the environment, it is given the plugins.
    """
    PartialState.destroy_process_group = lambda *_: None  # others go on with it
    plugins = {}
    if "ACCELERATE_USE_SSD_OFFLOAD" not in os.environ:
        theirs = {**zero(stage), "train_micro_batch_size_per_gpu": BATCH}
        plugins["deepspeed_plugin"] = DeepSpeedPlugin(hf_ds_config=theirs)
        plugins["kwargs_handlers"] = [SSDOffloadPlugin(OFFLOAD, metrics_every=1)]
    board = {"log_with": "tensorboard", "project_dir": directory / "logs"}
    accelerator = Accelerator(**plugins, **board)
    accelerator.init_trackers("given" if plugins else "launched")
    model, plain = fresh()
    engine, optimizer, loader = accelerator.prepare(model, plain, part_of_data(0, 1))
    losses = []
    steps = optimizer.step, optimizer.zero_grad
    for step, loss in enumerate(train(engine, loader, accelerator.backward, *steps)):
        losses.append(loss)
        accelerator.log({"loss": loss}, step=step)
    result = outcome(losses, model, session_of(accelerator).engine.metrics())
    result["type"] = accelerator.distributed_type.value
    result["optimizer"] = type(optimizer).__name__
    accelerator.end_training()
    accelerator.free_memory()
    engine.destroy()
    forget_accelerator()
    return result


def part_of_data(rank, ranks):
    whole = lightning_runs.batches(2 * STEPS, BATCH).dataset
    return DataLoader(Subset(whole, range(rank, len(whole), ranks)), batch_size=BATCH)


def fresh():
    torch.manual_seed(0)
    model = lightning_runs.tiny_model()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(model, loader, backward, *steps):
    for x, y in islice(loader, STEPS):
        loss = nn.functional.mse_loss(model(x), y)
        backward(loss)
        for step in steps:
            step()
        yield loss.item()


def outcome(losses, model, metrics=None):
    parameters = list(model.parameters())
    apart = [parameter for parameter in parameters if hasattr(parameter, "ds_id")]
    with deepspeed.zero.GatheredParameters(apart):
        weights = b"".join(parameter.detach().numpy().tobytes() for parameter in parameters)
    return {
        "losses": [loss.hex() for loss in losses],
        "weights": hashlib.sha256(weights).hexdigest(),
        "moved": 0.0 if metrics is None else left_bytes(metrics),
        "saved": 0.0 if metrics is None else metrics["offload/activations/step_saved_bytes"],
    }


def one_device(rank, directory, variables):
    """Every stage, everywhere. ZeRO-3 comes last: it replaces `torch.nn.functional.linear`."""
    os.chdir(directory)
    results = {}
    for stage in STAGES:
        deepspeed.init_distributed("gloo")
        results[f"alone-{stage}"] = alone(stage, part_of_data(0, 1))
        results[f"accelerate-{stage}"] = accelerate(stage, directory)
        for family in lightning_runs.FAMILIES[: 2 if stage == 3 else 1]:
            results[f"{family}-{stage}"] = lightning(family, stage)
        if stage == 2:
            with mock.patch.dict(os.environ, variables):
                results["launched-2"] = accelerate(stage, directory)
    return results


def two_devices(rank, directory):
    """ZeRO-3 through Lightning; then alone in the same two processes."""
    os.chdir(directory)
    ours = lightning("lightning.pytorch", 3, devices=2)
    return {"ours": ours, "alone": alone(3, part_of_data(rank, 2))}


def launched_with(home, monkeypatch):
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
    given = {}
    monkeypatch.setattr("torch.distributed.run.run", lambda _: given.update(os.environ))
    launch(monkeypatch, "--config", path.name, "train.py")
    return {name: value for name, value in given.items() if name.startswith(OURS)}


def check(ours, alone):
    """The numbers are the same in each of the steps, and all that was saved has left."""
    assert len(set(alone["losses"])) == STEPS
    assert ours["losses"] == alone["losses"]
    assert ours["weights"] == alone["weights"]
    assert ours["moved"] >= STEPS * ours["saved"] > 0


# One test for what one process did: pytest-xdist would run it again for others.
def test_numbers_are_those_of_deepspeed_alone(home, monkeypatch):
    variables = launched_with(home, monkeypatch)
    (results,) = run_ranks(f"{__name__}:one_device", home, size=1, variables=variables)
    first, second = lightning_runs.FAMILIES
    assert results.keys() >= {f"{second}-3", f"{first}-1", "accelerate-1", "launched-2"}
    for run, ours in results.items():
        framework, _, stage = run.partition("-")
        if framework == "alone":
            continue
        check(ours, results[f"alone-{stage}"])
        if framework in ("accelerate", "launched"):
            # It is DeepSpeed that trains.
            assert (ours["type"], ours["optimizer"]) == ("DEEPSPEED", "DeepSpeedOptimizerWrapper")
        else:
            # ZeRO-3: gathered weights are found again, so that no more leaves than where they stay.
            assert ours["saved"] == results[f"{first}-2"]["saved"]

    # By DeepSpeed's steps our metrics are due.
    for board in ("given", "launched"):
        scalars = tensorboard_scalars(home / "logs" / board)
        assert left_bytes({name: points[-1][1] for name, points in scalars.items()}) > 0
        assert {step for step, _ in scalars["loss"]} == set(range(STEPS))


def test_two_devices_train_to_the_bits_of_deepspeed_alone(tmp_path):
    results = run_ranks(f"{__name__}:two_devices", tmp_path)
    for result in results:
        check(result["ours"], result["alone"])
    first, second = (result["ours"] for result in results)
    assert first["losses"] != second["losses"]  # each had data of its own
    assert first["weights"] == second["weights"]


def test_a_saved_weight_is_found_where_it_is_gathered_next():
    """The weight is taken apart and gathered as DeepSpeed does it."""
    module = nn.Linear(4, 3, bias=False)
    weight = module.weight
    weight.ds_id = 0
    values = weight.detach().clone()

    def gather():
        weight.data, weight.ds_status = values.clone(), SimpleNamespace(name="AVAILABLE")

    def part():
        weight.data, weight.ds_status = torch.empty(0), SimpleNamespace(name="NOT_AVAILABLE")

    weight.all_gather, weight.partition = mock.Mock(side_effect=gather), part
    weights = GatheredWeights(module)
    gather()
    module(torch.ones(1, 4))
    whole, row = weights.save(weight.detach()), weights.save(weight.detach().t()[1])
    assert weights.save(torch.ones(3, 4)) is None
    bytes_of_before = weight.detach()
    part()
    assert weights.save(bytes_of_before) is None, "they belong to nobody"
    # What is apart is gathered for as long as it is copied.
    assert torch.equal(whole.unpack(), values)
    weight.all_gather.assert_called_once()
    assert weight.numel() == 0
    gather()
    assert torch.equal(whole.unpack(), values)
    assert whole.unpack().data_ptr() == weight.data_ptr()
    assert torch.equal(row.unpack(), values[:, 1])
    weights.remove()
    assert not module._forward_pre_hooks


def config(tmp_path, **sections):
    tiers = [{"name": "nvme", "kind": "ssd", "path": str(tmp_path / "nvme")}]
    return OffloadConfig(**{"tiers": tiers, **sections})


def zero_section(stage=3, **options):
    return {"zero_optimization": {"stage": stage, **options}}


def merged(theirs, sections):
    """Put sections into a config, and return it as DeepSpeed's own classes read it.

    They raise for what they do not know.
    """
    from deepspeed.runtime.config import DeepSpeedConfig

    config_sections.merge_sections(theirs, sections)
    with mock.patch.dict(os.environ, RANK="0", WORLD_SIZE="1"):
        return DeepSpeedConfig({"train_batch_size": 1, **theirs})


def test_the_derived_nvme_sections_pass_deepspeeds_own_check(tmp_path):
    on = {"enabled": True}
    ours = config(tmp_path, optimizer=on, parameters=on, io={"threads": 2})
    theirs = zero_section()
    sections = config_sections.derived_sections(theirs, ours, largest_parameter=12345)
    assert theirs == zero_section()
    read = merged(theirs, sections)
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
    assert (read.aio_config["block_size"], read.aio_config["intra_op_parallelism"]) == (1 << 20, 2)


MEMORY = {"tiers": [{"name": "ram", "kind": "dram", "capacity": "1GiB"}]}
DEVICE = {
    "tiers": [{"name": "gpu", "kind": "device", "capacity": "1GiB"}],
    "activations": {"enabled": False},
}
STATES, WEIGHTS = {"optimizer": {"enabled": True}}, {"parameters": {"enabled": True}}
CPU, ELSEWHERE = {"device": "cpu"}, {"device": "nvme", "nvme_path": "/elsewhere"}
BELOW_3 = range(3)


@pytest.mark.parametrize(
    ("theirs", "sections", "devices"),
    [
        *((zero_section(stage), {**MEMORY, **STATES}, ["cpu"]) for stage in STAGES),
        (zero_section(), {**DEVICE, **STATES}, []),
        # It is not derived where DeepSpeed would ignore it.
        *((zero_section(stage), {}, []) for stage in BELOW_3),
        # What the user gave stands.
        (zero_section(offload_optimizer=CPU), {**MEMORY, **STATES}, []),
        (zero_section(offload_optimizer=CPU), {**MEMORY, **WEIGHTS}, ["cpu"]),
        ({**zero_section(sub_group_size=7), "aio": {"queue_depth": 4}}, STATES, ["nvme"]),
        # What says none is as good as none.
        (zero_section(offload_optimizer={"device": "none", "nvme_path": None}), {}, ["nvme"]),
        # Our defaults are nobody's wish, and a client that is off has none.
        (zero_section(offload_optimizer=ELSEWHERE), {"optimizer": {"enabled": False}}, []),
        (zero_section(offload_optimizer=ELSEWHERE), None, []),
    ],
    ids=str,
)
def test_what_is_missing_and_wished_for_is_derived(tmp_path, theirs, sections, devices):
    ours = OffloadConfig() if sections is None else config(tmp_path, **sections)
    derived = config_sections.derived_sections(theirs, ours)
    zero = derived.get("zero_optimization", {})
    assert [zero[name]["device"] for name in zero if name.startswith("offload_")] == devices
    assert ("aio" in derived) == (devices == ["nvme"] and "aio" not in theirs)
    assert "sub_group_size" not in zero or "sub_group_size" not in theirs["zero_optimization"]
    merged(copy.deepcopy(theirs), derived)


@pytest.mark.parametrize(
    ("theirs", "sections", "says"),
    [
        *((zero_section(n), STATES, r"to 3, or optimizer\.enabled to false") for n in BELOW_3),
        *((zero_section(n), WEIGHTS, rf"needs ZeRO-3 .*\.stage is {n}") for n in BELOW_3),
        (zero_section(offload_optimizer=CPU), {}, "offload_optimizer has device: cpu"),
        (zero_section(offload_optimizer=ELSEWHERE), {}, r"path: /elsewhere.*/nvme\)\. Remove"),
        (zero_section(2), {"optimizer": {"state_dtype": "bfloat16"}}, "updates are DeepSpeed's"),
        (zero_section(2), {"optimizer": {"stochastic_rounding": True}}, "updates are DeepSpeed's"),
        (zero_section(2), {"optimizer": {"master_weights": True}}, "updates are DeepSpeed's"),
        (zero_section(), {"io": {"encryption": True}}, "encryption: true, and DeepSpeed writes"),
    ],
    ids=str,
)
def test_what_contradicts_or_cannot_be_had_is_refused(tmp_path, theirs, sections, says):
    with pytest.raises(ConfigError, match=says):
        config_sections.derived_sections(theirs, config(tmp_path, **sections))


def test_nvme_without_its_io_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(deepnvme, "unavailable_reason", lambda: "there is no C++ compiler")
    derived = config_sections.derived_sections(zero_section(), config(tmp_path))
    with pytest.raises(ConfigError, match="here: there is no C\\+\\+ compiler") as caught:
        config_sections.check_nvme(derived)
    assert str(tmp_path / "nvme") in str(caught.value)
    config_sections.check_nvme(zero_section(offload_optimizer=CPU))


@lightning_runs.in_both_installs
@pytest.mark.parametrize("stage", [None, *STAGES])
def test_the_strategy_is_found_by_name(pl, family, stage):
    suffix = "" if stage is None else f"_stage_{stage}"
    trainer = pl.Trainer(strategy=f"ssd_offload_deepspeed{suffix}", accelerator="cpu", logger=False)
    assert trainer.strategy.config["zero_optimization"]["stage"] == (stage or 2)
    assert type(trainer.strategy).__name__ == "SSDOffloadDeepSpeedStrategy"


def test_the_strategy_derives_over_lightnings_defaults(family, tmp_path):
    ours = config(tmp_path, optimizer={"enabled": True})
    ours_of = lightning_runs.strategy_class(family, "SSDOffloadDeepSpeedStrategy")
    derived = ours_of(ours, stage=3).config
    assert derived["zero_optimization"]["offload_optimizer"]["device"] == "nvme"
    assert derived["zero_optimization"]["sub_group_size"] < 10**9
    assert "intra_op_parallelism" in derived["aio"]
    assert derived["zero_force_ds_cpu_optimizer"] is False
    asked = ours_of(ours, stage=3, sub_group_size=10**6, queue_depth=5).config
    assert asked["zero_optimization"]["sub_group_size"] == 10**6
    assert asked["aio"]["queue_depth"] == 5
    with pytest.raises(ConfigError, match=r"zero_optimization\.offload_optimizer has device: cpu"):
        ours_of(ours, stage=3, offload_optimizer=True)
