"""Checkpoints that load into models whose weights are on tiers, or stay where they are."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import init_empty_weights
from safetensors.torch import load_file, save_file
from torch import nn

from offload_strategy import ConfigError, OffloadEngine, StorageError
from offload_strategy.weights import block_residency as residents
from offload_strategy.weights import checkpoint_loading as loading
from tests.activations.zoo import batch, build, loss_of
from tests.training import assert_same_bits, assert_same_history, bits, moved, settings, weights
from tests.weights.support import adamw, away, nearly_all_left, streaming, train, zoo_loss

WAYS = pytest.mark.parametrize("adopt", [False, True], ids=["copied", "adopted"])


@pytest.fixture(autouse=True)
def no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that tiny models leave, and are read a few tensors at a time, as large ones are."""
    monkeypatch.setattr(residents, "_ACCESSED_BYTES", 0)
    monkeypatch.setattr(loading, "_WINDOW_BYTES", 1)


def saved(kind: str, folder: Path, *, shard: str = "20KB") -> Any:
    """A model, whose checkpoint is in the folder."""
    model = build(kind)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(7)))
    model.save_pretrained(folder, max_shard_size=shard)
    return model


def empty(kind: str) -> Any:
    with init_empty_weights():
        return build(kind)


@pytest.mark.parametrize(
    ("kind", "overlap", "adopt"), [("GPT-2", "eager", True), ("Llama", "commit", False)]
)
def test_an_empty_model_is_loaded_and_trains_as_a_plain_one(
    disk: Path, tmp_path: Path, kind: str, overlap: str, adopt: bool
) -> None:
    plain = saved(kind, tmp_path / "checkpoint")
    model = empty(kind)
    with streaming(disk, optimizer={"overlap": overlap}) as engine:
        engine.load_weights(model, tmp_path / "checkpoint", adopt=adopt)
        assert not any(parameter.is_meta for parameter in model.parameters())
        assert sorted(away(model)) == sorted(n for n, _ in model.named_parameters())
        assert (moved(engine, "parameters") == 0) == adopt
        wrapped = engine.attach(model, adamw(model))
        got = train(model, wrapped, loss_of=zoo_loss(kind))
        engine.close()
        got.append(weights(model))
    expected = train(plain, adamw(plain), loss_of=zoo_loss(kind))
    assert_same_history(got, [*expected, weights(plain)])


@WAYS
def test_an_attached_model_is_loaded_and_what_somebody_else_looks_at_changes_with_it(
    disk: Path, tmp_path: Path, adopt: bool
) -> None:
    plain = saved("GPT-2", tmp_path / "checkpoint")
    with streaming(disk) as engine:
        model = build("GPT-2")
        engine.attach(model)
        loss = loss_of(model, batch("GPT-2", 0))  # some of it is in memory now
        alias = model.transformer.wte.weight.data
        engine.load_weights(model, tmp_path / "checkpoint", adopt=adopt)
        assert bits(alias) == bits(plain.transformer.wte.weight.detach())
        assert bits(model.transformer.wte.weight.detach()) == bits(alias)
        del alias
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()  # of a graph that saved the old weights
        del loss
    assert_same_bits(weights(model), weights(plain))


def test_adopted_weights_that_are_frozen_are_never_written(disk: Path, tmp_path: Path) -> None:
    saved("Llama", tmp_path / "checkpoint")
    model = empty("Llama").requires_grad_(False)
    head = model.lm_head.weight.requires_grad_(True)
    with streaming(disk, optimizer={"overlap": "eager"}) as engine:
        engine.load_weights(model, tmp_path / "checkpoint", adopt=True)
        optimizer = engine.attach(model, torch.optim.SGD([head], lr=0.1))
        train(model, optimizer, loss_of=zoo_loss("Llama"))
        engine._resources.store.wait_for_writes()
        assert moved(engine, "parameters") <= 3 * head.nbytes


def test_adopted_files_may_go_and_be_replaced(disk: Path, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    expected = weights(saved("GPT-2", folder, shard="1GB"))
    model = empty("GPT-2")
    with streaming(disk) as engine:
        engine.load_weights(model, folder, adopt=True)
        engine.attach(model)
        engine.save_weights(model, folder)  # over the file that it is read from
        (folder / "model.safetensors").unlink()
    assert_same_bits(weights(model), expected)


def test_adopted_files_that_are_written_to_are_an_error(disk: Path, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    saved("GPT-2", folder, shard="1GB")
    model = empty("GPT-2")
    engine = streaming(disk)
    engine.load_weights(model, folder, adopt=True)
    engine.attach(model)
    file = folder / "model.safetensors"
    with file.open("r+b") as stream:
        stream.seek(-8, os.SEEK_END)
        stream.write(b"\0" * 8)
    os.utime(file, ns=(1, 1))
    with pytest.raises(StorageError, match=r"model\.safetensors was written to"):
        loss_of(model, batch("GPT-2", 0))
    with pytest.raises(StorageError):
        engine.close()
    engine.close()


@WAYS
def test_values_of_another_dtype_are_converted(disk: Path, tmp_path: Path, adopt: bool) -> None:
    folder = tmp_path / "checkpoint"
    saved("GPT-2", folder, shard="1GB")
    narrow = {n: t.bfloat16() for n, t in load_file(folder / "model.safetensors").items()}
    save_file(narrow, folder / "model.safetensors")
    model = empty("GPT-2")
    with streaming(disk) as engine:
        engine.load_weights(model, folder, adopt=adopt)
        engine.attach(model)
        assert away(model)
    for name, value in weights(model).items():
        assert value.dtype == torch.float32
        if name in narrow:
            assert torch.equal(value, narrow[name].float())


def test_without_streaming_it_is_loaded_all_the_same(disk: Path, tmp_path: Path) -> None:
    expected = weights(saved("BERT", tmp_path / "checkpoint"))
    with OffloadEngine(settings(disk)) as engine:
        for model in (empty("BERT"), build("BERT")):
            engine.load_weights(model, tmp_path / "checkpoint")
            assert_same_bits(weights(model), expected)
        with pytest.raises(ConfigError, match=r"parameters\.enabled"):
            engine.load_weights(build("BERT"), tmp_path / "checkpoint", adopt=True)


def test_buffers_are_loaded(disk: Path, tmp_path: Path) -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))

    plain = make()
    plain(torch.randn(4, 3, 8, 8))
    save_file(plain.state_dict(), tmp_path / "one.safetensors")
    with torch.device("meta"):
        model = make()
    with streaming(disk) as engine:
        engine.load_weights(model, tmp_path / "one.safetensors")
        engine.attach(model)
    assert_same_bits(dict(model.state_dict()), dict(plain.state_dict()))


@pytest.mark.parametrize("kind", ["GPT-2", "ViT"])
def test_from_pretrained_works_within_building(disk: Path, tmp_path: Path, kind: str) -> None:
    plain = saved(kind, tmp_path / "checkpoint")
    with streaming(disk) as engine:
        with engine.building():
            model = type(plain).from_pretrained(tmp_path / "checkpoint")
        assert nearly_all_left(model)
        engine.attach(model)
        loss_of(model, batch(kind, 0)).backward()
    assert_same_bits(weights(model), weights(plain))


class TestRefusals:
    """Nothing has changed when one of these is raised."""

    @pytest.fixture
    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    @pytest.fixture
    def file(self, tmp_path: Path, model: nn.Module) -> Path:
        save_file({n: t + 1 for n, t in model.state_dict().items()}, tmp_path / "a.safetensors")
        return tmp_path / "a.safetensors"

    def refused(self, disk: Path, model: nn.Module, source: Path, match: str) -> None:
        before = weights(model) if not any(p.is_meta for p in model.parameters()) else None
        with streaming(disk) as engine:
            with pytest.raises(ConfigError, match=match):
                engine.load_weights(model, source)
            assert engine._resources.store.live_tickets == 0
        if before is not None:
            assert_same_bits(weights(model), before)

    def test_other_names(self, disk: Path, model: nn.Module, file: Path) -> None:
        tensors = load_file(file)
        tensors["2.weight"] = tensors.pop("1.weight")
        save_file(tensors, file)
        self.refused(
            disk, model, file, r"has no 1\.weight; the model has no 2\.weight\. Pass strict=False"
        )
        other = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        with streaming(disk) as engine:
            found = engine.load_weights(other, file, strict=False)
        assert found.missing == ["1.weight"]
        assert found.unexpected == ["2.weight"]

    def test_other_shapes(self, disk: Path, model: nn.Module, file: Path) -> None:
        save_file({**load_file(file), "0.weight": torch.zeros(4, 5)}, file)
        words = r"0\.weight has shape \[4, 5\] in the checkpoint and \[4, 4\] in the model"
        self.refused(disk, model, file, words)

    def test_names_that_transformers_translates(self, disk: Path, tmp_path: Path) -> None:
        saved("ViT", tmp_path / "checkpoint")
        with streaming(disk) as engine, pytest.raises(ConfigError, match="from_pretrained within"):
            engine.load_weights(empty("ViT"), tmp_path / "checkpoint")

    def test_half_of_a_module(self, disk: Path, file: Path) -> None:
        tensors = load_file(file)
        del tensors["0.bias"]
        save_file(tensors, file)
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        with streaming(disk) as engine, pytest.raises(ConfigError, match=r"'0' \(Linear\).*build"):
            engine.load_weights(model, file, strict=False)

    def test_files_that_are_none_or_too_many(
        self, disk: Path, model: nn.Module, file: Path, tmp_path: Path
    ) -> None:
        self.refused(disk, model, tmp_path / "none", r"cannot load weights from .*none")
        (tmp_path / "b.safetensors").write_bytes(file.read_bytes())
        self.refused(disk, model, tmp_path, r"has a\.safetensors, b\.safetensors: name the one")
        for path in tmp_path.glob("*.safetensors"):
            path.unlink()
        self.refused(disk, model, tmp_path, r"has no \.safetensors file: name the one file")
        index = {"weight_map": {"0.weight": "model-00001-of-00002.safetensors"}}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
        self.refused(
            disk, model, tmp_path, r"names model-00001-of-00002\.safetensors, which is missing"
        )

    def test_damaged_files(self, disk: Path, model: nn.Module, file: Path, tmp_path: Path) -> None:
        whole = file.read_bytes()
        for cut in (0, 4, 100, -1):
            file.write_bytes(whole[:cut])
            self.refused(disk, model, file, r"cannot load weights from .*a\.safetensors")
        for content in ("", "[]", "{}", '{"weight_map": 3}'):
            (tmp_path / "model.safetensors.index.json").write_text(content)
            self.refused(disk, model, tmp_path, "is not a safetensors index")
