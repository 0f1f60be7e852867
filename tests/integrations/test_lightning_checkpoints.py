"""Checkpoints of `Trainer(strategy="ssd_offload")`: Lightning's files, streamed."""

import importlib
from pathlib import Path
from unittest import mock

import pytest
import torch

import offload_strategy.checkpoints
from tests.distributed.loops import same
from tests.integrations import lightning_runs
from tests.integrations.lightning_runs import assert_same, fit, make_trainer, strategy_class


@pytest.fixture(autouse=True)
def _nearly_everything_is_large(monkeypatch):
    """A tiny model's tensors stay in the file as those of a large one do."""
    monkeypatch.setattr(offload_strategy.checkpoints.copy_on_write_maps, "SMALL_BYTES", 64)


@pytest.fixture
def lightnings_io(family):
    name = "lightning.fabric" if family == "lightning.pytorch" else "lightning_fabric"
    return importlib.import_module(f"{name}.plugins").TorchCheckpointIO


def mapped(path):
    return str(path) in Path("/proc/self/maps").read_text()


def test_a_checkpoint_is_the_one_that_lightning_writes_and_never_put_together_in_memory(
    pl, family, tmp_path, monkeypatch, lightnings_io
):
    ours, theirs = tmp_path / "deep" / "down" / "ours.ckpt", tmp_path / "theirs.ckpt"
    run = fit(pl, tmp_path, "ssd_offload", max_steps=5)
    strategy = run.trainer.strategy
    streaming, strategy.checkpoint_io = strategy.checkpoint_io, lightnings_io()
    run.trainer.save_checkpoint(theirs)
    strategy.checkpoint_io = streaming
    assert type(streaming) is strategy_class(family, "OffloadCheckpointIO")
    with pytest.raises(FileNotFoundError, match="Checkpoint file not found"):
        strategy.load_checkpoint(tmp_path / "nowhere.ckpt")

    save = mock.Mock()
    monkeypatch.setattr(lightnings_io, "save_checkpoint", save)
    monkeypatch.setattr(lightnings_io, "load_checkpoint", mock.Mock(side_effect=AssertionError))
    run.trainer.save_checkpoint(ours)
    assert [file.name for file in ours.parent.iterdir()] == [ours.name]
    checkpoint = strategy.load_checkpoint(ours, weights_only=True)
    assert mapped(ours)
    expected = torch.load(theirs, weights_only=True)
    assert list(checkpoint) == list(expected)
    assert same(checkpoint, expected)
    del checkpoint
    assert not mapped(ours)

    # What is for Lightning's plugin gets there.
    save.assert_not_called()
    run.trainer.save_checkpoint(ours, storage_options="options")
    assert save.call_args.kwargs == {"storage_options": "options"}


@lightning_runs.in_both_installs
def test_a_resumed_run_leaves_the_file(pl, family, tmp_path):
    # States leave with the one install, and stay with the other.
    enabled = family == "lightning.pytorch"
    config = {"optimizer": {"enabled": enabled}, "activations": {"min_size": "1KiB"}}
    files = {offload: tmp_path / f"{offload}.ckpt" for offload in (False, True)}
    in_file = []

    def note(*_):
        in_file.extend(map(mapped, files.values()))

    def run(offload, source=None, **options):
        strategy = strategy_class(family)(config=config) if offload else "auto"
        path = None if source is None else files[source]
        return fit(pl, tmp_path, strategy, ckpt_path=path, **options)

    begun = {offload: run(offload, max_steps=10) for offload in files}
    for offload, path in files.items():
        begun[offload].trainer.save_checkpoint(path)
    assert_same(begun[True], begun[False])
    ended = run(False, False, max_steps=20)
    for offload, source in ((False, True), (True, False), (True, True)):
        look = pl.callbacks.LambdaCallback(on_train_batch_start=note)
        watched = {"callbacks": [look]} if offload else {}
        assert_same(run(offload, source, max_steps=20, **watched), ended)
    assert in_file == 2 * 2 * 10 * [False]


def test_a_plugin_of_the_users_own_is_left_alone_and_one_around_another_is_around_ours(
    pl, family, tmp_path, lightnings_io
):
    own = type("Own", (lightnings_io,), {})()
    for trainer in (
        make_trainer(pl, tmp_path, "ssd_offload", plugins=[own]),
        make_trainer(pl, tmp_path, strategy_class(family)(checkpoint_io=own)),
    ):
        assert trainer.strategy.checkpoint_io is own

    plugin = pl.plugins.AsyncCheckpointIO()
    run = fit(pl, tmp_path, "ssd_offload", max_steps=5, plugins=[plugin])
    run.trainer.save_checkpoint(tmp_path / "end.ckpt")
    run.trainer.strategy.checkpoint_io.teardown()
    assert run.trainer.strategy.checkpoint_io is plugin
    assert type(plugin.checkpoint_io) is strategy_class(family, "OffloadCheckpointIO")
    assert len(fit(pl, tmp_path, max_steps=10, ckpt_path=tmp_path / "end.ckpt").losses) == 5


def test_a_remote_path_is_left_to_lightning(pl, tmp_path):
    run = fit(pl, tmp_path, "ssd_offload", max_steps=5)
    resumed = []
    for url in ("memory://checkpoints/end.ckpt", f"file://{tmp_path}/end.ckpt"):
        run.trainer.save_checkpoint(url)
        resumed.append(fit(pl, tmp_path, "ssd_offload", max_steps=10, ckpt_path=url))
    assert_same(*resumed)
