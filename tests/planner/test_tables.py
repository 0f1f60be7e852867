"""Devices, drives and models by the names that people write, with the figures of other people."""

import dataclasses
import json

import pytest
import torch

from offload_strategy.errors import ConfigError
from offload_strategy.planner import hardware
from offload_strategy.planner import model_presets as models
from offload_strategy.planner.transformer_shape import TransformerShape


@pytest.mark.parametrize(
    ("find", "written", "name"),
    [
        (hardware.device, "a100-80g", "a100-80g-pcie"),
        (hardware.device, "A100 80GB", "a100-80g-pcie"),
        (hardware.device, "nvidia_a100_40g_sxm", "a100-40g-sxm"),
        (hardware.device, "RTX 4090", "rtx-4090"),
        (hardware.device, "GeForce-RTX-3090", "rtx-3090"),
        (hardware.device, "H200", "h200-141g-sxm"),
        # As their driver calls them.
        (hardware.device_called, "NVIDIA H100 80GB HBM3", "h100-80g-sxm"),
        (hardware.device_called, "NVIDIA H100 PCIe", "h100-80g-pcie"),
        (hardware.device_called, "NVIDIA A100 80GB PCIe", "a100-80g-pcie"),
        (hardware.device_called, "NVIDIA GeForce RTX 4090", "rtx-4090"),
        (hardware.device_called, "Tesla V100-SXM2-32GB", "v100-32g-sxm"),
        (hardware.device_called, "NVIDIA GeForce RTX 4090 Laptop GPU", None),
        (hardware.device_called, "NVIDIA A10", None),
    ],
)
def test_a_device_is_found_however_it_is_written(find, written, name):
    found = find(written)
    assert (found and found.name) == name


@pytest.mark.parametrize(
    ("written", "count", "name", "endurance"),
    [
        # 3.84 TB a day for 5 years, which the maker rounds to 7.0 PB.
        ("4xP5510", 4, "intel-p5510-3.84tb", 7.0e15),
        # 1.6 TB a hundred times a day.
        ("7 x Intel Optane P5800X", 7, "intel-p5800x-1.6tb", 292e15),
        ("wd-sn850x-2tb", 1, "wd-sn850x-2tb", 1.2e15),
        ("12×intel-p5510-7.68tb", 12, "intel-p5510-7.68tb", 14.0e15),
        ("2*990 PRO", 2, "samsung-990-pro-2tb", 1.2e15),
    ],
)
def test_drives_are_found_with_their_count(written, count, name, endurance):
    found = hardware.drive_set(written)
    assert found.name == f"{count} x {name}"
    assert found.capacity_bytes == count * hardware.drive_set(name).capacity_bytes
    assert found.endurance_bytes / count == pytest.approx(endurance, rel=0.01)


@pytest.mark.parametrize("kind", ["device", "drive"])
def test_every_figure_has_a_source_and_makes_sense(kind):
    entries = hardware.table(kind).values()
    assert len({entry.name for entry in entries}) >= 7
    for entry in entries:
        assert all(len(source) > 5 for source in entry.sources.values())
        fields = set(type(entry).__slots__) - {"sources", "name"}
        figures = [getattr(entry, field) for field in fields]
        assert all(figure is None or figure > 0 for figure in figures)
        assert len(entry.sources) >= sum(figure is not None for figure in figures)
    for entry in entries if kind == "device" else ():  # what is measured is below the data sheet
        assert entry.sustained_flops is None or entry.sustained_flops <= entry.flops
        assert entry.measured_link is None or entry.measured_link <= entry.link


# ---------------------------------------------------------------------- models
@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("gpt2", 124_439_808),
        ("gpt2-xl", 1_557_611_200),
        ("bert-base", 110_106_428),  # with the heads of BertForPreTraining
        ("bert-large", 336_226_108),
        ("t5-11b", 11_307_321_344),
        ("llama3-8b", 8_030_261_248),
        ("llama3.1-70b", 70_553_706_496),
        ("qwen2.5-7b", 7_615_616_512),
        ("qwen2.5-14b", 14_770_033_664),
        ("qwen2.5-32b", 32_763_876_352),
        ("mistral-7b", 7_241_732_096),
        *(
            # As many billions as the name says.
            (f"gpt3-{billions}b", pytest.approx(billions * 1e9, rel=0.025))
            for billions in (13, 33, 65, 135, 175, 276, 412)
        ),
    ],
)
def test_a_preset_has_the_parameters_of_the_published_checkpoint(name, parameters):
    assert models.preset(name).parameters == parameters


def test_forward_flops_are_a_quarter_of_megatrons_formula():
    # 96 B s l h^2 (1 + s/6h + V/16lh) counts four forward passes of a GPT; the head's has no
    # recomputation, so it is counted three times there and here.
    b, s, layers, h, v = 8, 1024, 40, 5120, 50257
    shape = TransformerShape("gpt", layers, h, 40, v)
    formula = 96 * b * s * layers * h * h * (1 + s / (6 * h) + v / (16 * layers * h))
    ours = 4 * layers * shape.layer_flops(b, s) + 3 * shape.head_flops(b, s)
    assert ours == pytest.approx(formula, rel=1e-12)


def spelled_out(shape: TransformerShape) -> TransformerShape:
    """With the sizes that follow from others by default."""
    return dataclasses.replace(shape, feed_forward=shape.inner, kv_heads=shape.keys_heads)


def keys(names: str, *values: object) -> dict[str, object]:
    return dict(zip(names.split(), values, strict=True))


_USUAL = "model_type num_hidden_layers hidden_size num_attention_heads intermediate_size vocab_size"
_GROUPED = f"{_USUAL} num_key_value_heads tie_word_embeddings"
LLAMA = keys(_GROUPED, "llama", 32, 4096, 32, 14336, 128256, 8, False)
QWEN2 = keys(_GROUPED, "qwen2", 28, 3584, 28, 18944, 152064, 4, False)
MISTRAL = LLAMA | {"model_type": "mistral", "vocab_size": 32000}
BERT = keys(f"{_USUAL} max_position_embeddings", "bert", 12, 768, 12, 3072, 30522, 512)
GPT2 = keys(
    "model_type n_layer n_embd n_head n_inner n_positions vocab_size",
    *("gpt2", 12, 768, 12, None, 1024, 50257),
)
T5 = keys(
    "model_type num_layers d_model num_heads d_kv d_ff vocab_size",
    *("t5", 24, 1024, 128, 128, 65536, 32128),
)


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (LLAMA, "llama3-8b"),
        (BERT, "bert-base"),
        (GPT2, "gpt2"),
        (T5, "t5-11b"),
        (QWEN2, "qwen2.5-7b"),
        (MISTRAL, "mistral-7b"),
        # Without a type the keys tell which it is.
        ({key: value for key, value in GPT2.items() if key != "model_type"}, "gpt2"),
        ({key: value for key, value in LLAMA.items() if key != "model_type"}, "llama3-8b"),
    ],
)
def test_a_config_of_hugging_face_gives_the_preset(config, name, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config))
    for source in (config, tmp_path, str(tmp_path / "config.json")):
        assert spelled_out(models.from_config(source)) == spelled_out(models.preset(name))


def test_a_config_that_transformers_writes_counts_what_transformers_builds(tmp_path):
    transformers = pytest.importorskip("transformers")
    sizes = QWEN2 | keys(_GROUPED, "qwen2", 3, 64, 4, 96, 211, 2, False)
    config = transformers.Qwen2Config(**sizes)
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = transformers.Qwen2ForCausalLM(config)
    assert models.from_config(tmp_path).parameters == sum(p.numel() for p in model.parameters())


ABOVE_0 = "give a whole number above 0"


def shape(changes):
    good = {"kind": "gpt", "layers": 12, "hidden": 768, "heads": 12, "vocabulary": 100}
    return TransformerShape(**good | changes)


def llama(changes):
    return models.from_config(LLAMA | changes)


@pytest.mark.parametrize(
    ("make", "wrong", "message"),
    [
        # Names come with the nearest ones.
        *(
            (hardware.drive_set, f"{count}xP5510", "whole number from 1 on, as in '4xP5510'")
            for count in ("0", "-1", "2.5")
        ),
        (hardware.device, "a100-90g", r"no device 'a100-90g'.*a100-80g-pcie"),
        (hardware.drive_set, "3xP5511", r"no drive 'P5511'.*intel-p5510-3\.84tb"),
        (hardware.device, "nothing like it", "no device 'nothing like it'.*a100-40g-pcie"),
        (models.preset, "gpt3-14b", "no model 'gpt3-14b'.*gpt3-13b"),
        # Values of a config of Hugging Face.
        (llama, {"vocab_size": None}, "config has no key 'vocab_size'; add it"),
        *(
            (llama, {"hidden_size": value}, f"hidden_size is {value!r}; {ABOVE_0}")
            for value in (-1, 0, "12", 1.5, True)
        ),
        (llama, {"num_key_value_heads": 0}, f"num_key_value_heads is 0; {ABOVE_0}"),
        (llama, {"tie_word_embeddings": 1}, "tie_word_embeddings is 1; give true or false"),
        (llama, {"model_type": "mamba"}, "model_type is mamba; known are gpt2, bert"),
        # Shapes.
        (shape, {"layers": -1}, "layers is -1; give a number above 0"),
        (shape, {"hidden": 0}, "hidden is 0"),
        (shape, {"heads": 7}, "hidden is 768, which 7 heads do not divide"),
        (shape, {"kv_heads": 5}, "5 kv_heads do not divide 12 heads"),
        (shape, {"kind": "rnn"}, "kind is 'rnn'; give one of gpt, bert, t5, llama"),
        (shape, {"max_positions": -1}, "max_positions is -1"),
        (shape, {"decoder_layers": 13}, "decoder_layers is 13, more than the 12 layers"),
    ],
)
def test_a_name_or_value_that_cannot_be_is_refused(make, wrong, message):
    with pytest.raises(ConfigError, match=message):
        make(wrong)


def test_files_that_are_none_are_refused(tmp_path):
    for text, said in ((None, "config.json cannot be read"), ("{", "no JSON"), ("[]", "a list")):
        if text is not None:
            (tmp_path / "config.json").write_text(text)
        with pytest.raises(ConfigError, match=said):
            models.from_config(tmp_path)
