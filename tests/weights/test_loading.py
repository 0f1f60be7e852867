"""Models that are made, loaded and saved while their weights are on tiers, or stay in files."""

import gc
import json
import os
import resource
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch
from accelerate import init_empty_weights
from safetensors.torch import load_file, save_file
from torch import nn

from offload_strategy import ConfigError, OffloadEngine, StorageError
from offload_strategy.weights import checkpoint_loading
from tests.activations.zoo import batch, build, loss_of
from tests.training import assert_same_bits, assert_same_history, bits, moved, settings, weights
from tests.weights.nets import adamw, train, zoo_loss
from tests.weights.support import all_plain, away, nearly_all_left

WAYS = pytest.mark.parametrize("adopt", [False, True], ids=["copied", "adopted"])


@pytest.fixture(autouse=True)
def few_at_a_time(monkeypatch, no_room):
    """So that tiny models leave, and are read a few tensors at a time, as large ones are."""
    monkeypatch.setattr(checkpoint_loading, "_WINDOW_BYTES", 1)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "checkpoint"


def saved(kind, folder, *, shard="20KB"):
    """A model, whose checkpoint is in the folder."""
    model = build(kind)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(7)))
    model.save_pretrained(folder, max_shard_size=shard)
    return model


def empty(kind):
    with init_empty_weights():
        return build(kind)


def layers(width=4):
    return nn.Sequential(nn.Linear(width, width), nn.Linear(width, width))


# ---------------------------------------------------------------------- made
@pytest.mark.parametrize("kind", ["GPT-2", "T5", "ViT", "Mixtral"])
@pytest.mark.parametrize("pretrained", [False, True], ids=["built", "from_pretrained"])
def test_a_model_made_within_building_is_as_a_plain_one(engine, accessed, folder, kind, pretrained):
    plain = saved(kind, folder) if pretrained else build(kind)
    with engine.building():
        model = type(plain).from_pretrained(folder) if pretrained else build(kind)
    assert nearly_all_left(model)
    engine.save_weights(model, folder / "saved before it is attached")
    assert nearly_all_left(model)
    engine.attach(model)
    accessed.clear()
    loss_of(model, batch(kind, 0)).backward()
    assert pretrained or not accessed, "its blocks do not bring them"
    engine.close()
    assert_same_bits(weights(model), weights(plain))


@pytest.mark.parametrize("overlap", ["eager"])
def test_a_model_on_the_meta_device_is_filled_module_by_module(engine):
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Sequential(layers(8), nn.LayerNorm(8)) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters())
    engine.attach(model, optimizer)  # nobody keeps what it returns
    assert away(model)
    assert not any(parameter.is_meta for parameter in model.parameters())
    model(torch.randn(2, 8)).sum().backward()
    gc.collect()
    engine.close()
    optimizer.zero_grad()
    optimizer.step()  # may be used again
    assert all(bool(value.isfinite().all()) for value in weights(model).values())


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4096))


class Gained(nn.Linear):
    def __init__(self):
        super().__init__(4, 4)
        self.gain = nn.Parameter(torch.ones(4))


@pytest.mark.parametrize(
    ("kind", "message"),
    [(Scale, r"1 \(Scale\).*building"), (Gained, r"1\.gain is a parameter on the meta device")],
)
def test_a_module_or_a_parameter_that_no_reset_fills_is_named(engine, kind, message):
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), kind())
    with pytest.raises(ConfigError, match=message):
        engine.attach(model, device=torch.device("cpu"))


def test_what_was_hung_on_a_meta_parameter_stays_and_hooks_are_refused(engine):
    with torch.device("meta"):
        model, other = nn.Linear(4, 4), nn.Linear(4, 4)
    model.weight.tag = "kept"
    engine.attach(model, device=torch.device("cpu"))
    assert model.weight.tag == "kept"
    other.bias.register_hook(lambda gradient: gradient * 0)
    with pytest.raises(ConfigError, match="bias is on the meta device and has hooks"):
        engine.attach(other, device=torch.device("cpu"))
    assert other.weight.is_meta


@pytest.mark.parametrize("doing", ["attach", "load_weights"])
def test_too_small_tiers_are_refused_before_anything_moves(disk, tmp_path, doing, sections):
    config = settings(disk, **sections)
    config["tiers"][0]["capacity"] = "64KiB"
    model = layers(100)
    save_file(dict(model.state_dict()), tmp_path / "a.safetensors")
    with OffloadEngine(config) as engine:
        arguments = [tmp_path / "a.safetensors"] if doing == "load_weights" else []
        with pytest.raises(ConfigError, match=rf"{doing}: the weights need 78\.9 KiB.*too little"):
            getattr(engine, doing)(model, *arguments)
        assert all_plain(model)
        assert engine._resources.store.registry.live == 0


# ---------------------------------------------------------------------- saved
@pytest.mark.parametrize(
    ("kind", "shard_bytes"), [("GPT-2", 1), ("Llama", 4096), ("T5", 4096), ("GPT-2", 1 << 30)]
)
def test_saved_weights_load_into_transformers(engine, folder, kind, shard_bytes):
    killed = folder / ".model.partial"
    killed.mkdir(parents=True)
    (killed / "half").touch()
    model = build(kind)
    engine.attach(model)
    files = engine.save_weights(model, folder, shard_bytes)
    assert away(model)
    model.config.save_pretrained(folder)
    assert_same_bits(weights(type(model).from_pretrained(folder)), weights(build(kind)))
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {file.name for file in files}
    assert not killed.exists()


def changed(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    return weights(model)


@pytest.mark.parametrize(
    "sizes", [(1 << 40, 20_000), (20_000, 1 << 40), (20_000, 20_000), (20_000, 9_000)], ids=str
)
def test_a_save_takes_the_place_of_an_earlier_one(engine, folder, sizes):
    model = build("GPT-2")
    model.config.save_pretrained(folder)
    other = folder / "model-ema.safetensors"
    other.write_bytes(b"not ours")
    for size in sizes:
        expected = changed(model)
        files = engine.save_weights(model, folder, size)
    other.unlink()
    assert sorted(files) == sorted(folder.glob("*.safetensors"))
    assert_same_bits(weights(type(model).from_pretrained(folder)), expected)
    engine.load_weights(twin := build("GPT-2"), folder)
    assert_same_bits(weights(twin), expected)


@pytest.mark.parametrize("at", ["first", "last"])
def test_an_interrupted_save_leaves_the_earlier_one_whole(engine, folder, monkeypatch, at):
    model, move = build("GPT-2"), os.replace

    def interrupted(source, target):
        move(source, target)
        if at == "first" or ".index" in str(target):
            raise KeyboardInterrupt

    old = changed(model)
    model.config.save_pretrained(folder)
    engine.save_weights(model, folder, 20_000)
    new = changed(model)
    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.save_weights(model, folder, 20_000)
    monkeypatch.setattr(os, "replace", move)
    found = weights(type(model).from_pretrained(folder))
    assert_same_bits(found, old if at == "first" else new)
    files = engine.save_weights(model, folder, 20_000)
    assert sorted(files) == sorted(folder.glob("*.safetensors")), "what was left is gone"


def test_extra_state_is_refused_before_anything_is_written(engine, folder):
    class Counts(nn.Linear):
        def get_extra_state(self):
            return {"calls": 3}

    with pytest.raises(ConfigError, match="1 has extra state"):
        engine.save_weights(nn.Sequential(nn.Linear(2, 2), Counts(2, 2)), folder)
    assert not folder.exists()


# ---------------------------------------------------------------------- loaded
@pytest.mark.parametrize(
    ("kind", "overlap", "adopt"), [("GPT-2", "eager", True), ("Llama", "commit", False)]
)
def test_an_empty_model_is_loaded_and_trains_as_a_plain_one(engine, folder, kind, adopt):
    plain, model = saved(kind, folder), empty(kind)
    engine.load_weights(model, folder, adopt=adopt)
    assert not any(parameter.is_meta for parameter in model.parameters())
    assert sorted(away(model)) == sorted(n for n, _ in model.named_parameters())
    assert (moved(engine, "parameters") == 0) == adopt
    got = train(model, engine.attach(model, adamw(model)), loss_of=zoo_loss(kind))
    engine.close()
    expected = train(plain, adamw(plain), loss_of=zoo_loss(kind))
    assert_same_history([*got, weights(model)], [*expected, weights(plain)])


@WAYS
def test_an_attached_model_is_loaded_and_its_aliases_change_with_it(engine, folder, adopt):
    plain, model = saved("GPT-2", folder), build("GPT-2")
    engine.attach(model)
    loss = loss_of(model, batch("GPT-2", 0))  # some of it is in memory now
    alias = model.transformer.wte.weight.data
    engine.load_weights(model, folder, adopt=adopt)
    assert bits(alias) == bits(plain.transformer.wte.weight)
    assert bits(model.transformer.wte.weight) == bits(alias)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()  # of a graph that saved the old weights
    del alias, loss
    engine.close()
    assert_same_bits(weights(model), weights(plain))


@WAYS
@pytest.mark.parametrize("in_graph", [False, True], ids=["free", "saved by a graph"])
def test_weights_that_are_not_contiguous_any_more_are_loaded(engine, tmp_path, adopt, in_graph):
    def made():
        return nn.Sequential(nn.Conv2d(4, 4, 3), nn.Conv2d(4, 8, 3), nn.Flatten(), nn.Linear(8, 8))

    plain, model = made(), made()
    save_file(plain.state_dict(), tmp_path / "model.safetensors")
    engine.attach(model)
    with torch.no_grad() if not in_graph else nullcontext():
        kept = model(torch.ones(1, 4, 5, 5))
    model.to(memory_format=torch.channels_last)
    model[3].weight.data = model[3].weight.data.t()
    engine.load_weights(model, tmp_path, adopt=adopt)
    del kept
    assert model[1].weight.is_contiguous(memory_format=torch.channels_last)
    assert_same_bits(model.state_dict(), plain.state_dict())


@pytest.mark.parametrize("overlap", ["eager"])
def test_adopted_weights_that_are_frozen_are_never_written(engine, folder):
    saved("Llama", folder)
    model = empty("Llama").requires_grad_(False)
    head = model.lm_head.weight.requires_grad_(True)
    engine.load_weights(model, folder, adopt=True)
    optimizer = engine.attach(model, torch.optim.SGD([head], lr=0.1))
    train(model, optimizer, loss_of=zoo_loss("Llama"))
    engine._resources.store.wait_for_writes()
    assert moved(engine, "parameters") <= 3 * head.nbytes


def test_adopted_files_may_go_and_be_replaced(engine, folder):
    expected = weights(saved("GPT-2", folder, shard="1GB"))
    model = empty("GPT-2")
    engine.load_weights(model, folder, adopt=True)
    engine.attach(model)
    engine.save_weights(model, folder)  # over the file that it is read from
    (folder / "model.safetensors").unlink()
    engine.close()
    assert_same_bits(weights(model), expected)


def test_weights_that_no_file_can_hold_are_an_error_of_ours(engine, tmp_path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with pytest.raises(StorageError, match=r"could not save weights to .*File too large"):
            engine.save_weights(build("GPT-2"), tmp_path / "saved")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not any((tmp_path / "saved").iterdir())


def test_adopted_files_that_are_written_to_are_an_error(engine, folder):
    saved("GPT-2", folder, shard="1GB")
    model = empty("GPT-2")
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


@WAYS
def test_values_of_another_dtype_are_converted(engine, folder, adopt):
    saved("GPT-2", folder, shard="1GB")
    narrow = {n: t.bfloat16() for n, t in load_file(folder / "model.safetensors").items()}
    save_file(narrow, folder / "model.safetensors")
    model = empty("GPT-2")
    engine.load_weights(model, folder, adopt=adopt)
    engine.attach(model)
    assert away(model)
    engine.close()
    got = weights(model)
    assert_same_bits({n: got[n] for n in narrow}, {n: t.float() for n, t in narrow.items()})
    assert all(value.dtype == torch.float32 for value in got.values())


def test_without_streaming_it_is_loaded_all_the_same(disk, folder):
    expected = weights(saved("BERT", folder))
    with OffloadEngine(settings(disk)) as engine:
        for model in (empty("BERT"), build("BERT")):
            engine.load_weights(model, folder)
            assert_same_bits(weights(model), expected)
        with pytest.raises(ConfigError, match=r"parameters\.enabled"):
            engine.load_weights(build("BERT"), folder, adopt=True)


def test_buffers_are_loaded(engine, tmp_path):
    def make():
        return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))

    plain = make()
    plain(torch.randn(4, 3, 8, 8))
    save_file(plain.state_dict(), tmp_path / "one.safetensors")
    with torch.device("meta"):
        model = make()
    engine.load_weights(model, tmp_path / "one.safetensors")
    engine.attach(model)
    engine.close()
    assert_same_bits(weights(model), weights(plain))


# ---------------------------------------------------------------------- refused
@pytest.fixture
def file(tmp_path):
    """With other values for `layers`."""
    file = tmp_path / "a.safetensors"
    save_file(layers().state_dict(), file)
    return file


def _rename(file):
    tensors = load_file(file)
    tensors["2.weight"] = tensors.pop("1.weight")
    save_file(tensors, file)


def _copy(file):
    file.with_name("b.safetensors").write_bytes(file.read_bytes())


def _cut(at, file):
    file.write_bytes(file.read_bytes()[:at])


def _write_index(content, file):
    file.unlink()
    file.with_name("model.safetensors.index.json").write_text(content)


_LOST = '{"weight_map": {"0.weight": "model-00001-of-00002.safetensors"}}'
_DAMAGED = r"cannot load weights from .*a\.safetensors"

#: What is done to the file, whether it is named or its folder, and the message.
REFUSED = [
    (_rename, True, r"has no 1\.weight; the model has no 2\.weight\. Pass strict=False"),
    (
        lambda file: save_file({**load_file(file), "0.weight": torch.zeros(4, 5)}, file),
        True,
        r"0\.weight has shape \[4, 5\] in the checkpoint and \[4, 4\] in the model",
    ),
    (Path.unlink, True, _DAMAGED),
    (Path.unlink, False, r"has no \.safetensors file: name the one file"),
    (_copy, False, r"has a\.safetensors, b\.safetensors: name the one"),
    (partial(_write_index, _LOST), False, r"names model-00001-of-00002\.\w+, which is missing"),
    *((partial(_cut, at), True, _DAMAGED) for at in (0, 4, 100, -1)),
    *(
        (partial(_write_index, content), False, "is not a safetensors index")
        for content in ("", "[]", "{}", '{"weight_map": 3}')
    ),
]


@pytest.mark.parametrize(("change", "named", "message"), REFUSED)
def test_a_file_that_is_refused_changes_nothing(engine, file, change, named, message):
    change(file)
    model = layers()
    before = weights(model)
    with pytest.raises(ConfigError, match=message):
        engine.load_weights(model, file if named else file.parent)
    assert engine._resources.store.registry.live == 0
    assert_same_bits(weights(model), before)


def test_other_names_may_be_allowed(engine, file):
    _rename(file)
    model = layers()
    found = engine.load_weights(model, file, strict=False)
    assert (found.missing, found.unexpected) == (["1.weight"], ["2.weight"])
    with torch.device("meta"):
        empty = layers()
    with pytest.raises(ConfigError, match=r"'1' \(Linear\).*build"):  # half of it is there
        engine.load_weights(empty, file, strict=False)
    engine.close()
    assert all_plain(model)


def test_names_that_transformers_translates_are_refused(engine, folder):
    saved("ViT", folder)
    with pytest.raises(ConfigError, match="from_pretrained within"):
        engine.load_weights(empty("ViT"), folder)
