"""Parameters and FLOPs against those of the models themselves and of other people's formulas."""

from __future__ import annotations

import dataclasses
import json

import pytest

from offload_strategy.errors import ConfigError
from offload_strategy.planner import model_presets as models
from offload_strategy.planner.transformer_shape import TransformerShape


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
    ],
)
def test_a_preset_has_the_parameters_of_the_published_checkpoint(name, parameters):
    assert models.preset(name).parameters == parameters


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("13b", 13),
        ("33b", 33),
        ("65b", 65),
        ("135b", 135),
        ("175b", 175),
        ("276b", 276),
        ("412b", 412),
    ],
)
def test_gpt3_has_as_many_billions_as_its_name_says(name, billions):
    assert models.preset(f"gpt3-{name}").parameters == pytest.approx(billions * 1e9, rel=0.025)


def test_forward_flops_are_a_quarter_of_megatrons_formula():
    # 96 B s l h^2 (1 + s/6h + V/16lh) counts four forward passes of a GPT; the head's has no
    # recomputation, so it is counted three times there and here.
    b, s, layers, h, v = 8, 1024, 40, 5120, 50257
    shape = TransformerShape("gpt", layers, h, 40, v)
    formula = 96 * b * s * layers * h * h * (1 + s / (6 * h) + v / (16 * layers * h))
    ours = 4 * layers * shape.layer_flops(b, s) + 3 * shape.head_flops(b, s)
    assert ours == pytest.approx(formula, rel=1e-12)


def test_swap_benefit_has_the_ratios_of_fuyous_table_2():
    parts = {part.name: part for part in models.preset("gpt3-13b").parts(32, 1024)}
    unit = parts["projection"].flops_per_byte
    ratios = {name: part.flops_per_byte / unit for name, part in parts.items()}
    assert ratios.pop("attention") < 1
    assert ratios == pytest.approx({"qkv": 1, "projection": 1, "up": 1, "down": 4})


def spelled_out(shape: TransformerShape) -> TransformerShape:
    """With the width that is 4 x hidden by default."""
    return dataclasses.replace(shape, feed_forward=shape.inner, kv_heads=shape.keys_heads)


LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
}
BERT = {
    "model_type": "bert",
    "num_hidden_layers": 12,
    "hidden_size": 768,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "vocab_size": 30522,
    "max_position_embeddings": 512,
}
GPT2 = {
    "model_type": "gpt2",
    "n_layer": 12,
    "n_embd": 768,
    "n_head": 12,
    "n_inner": None,
    "n_positions": 1024,
    "vocab_size": 50257,
}
T5 = {
    "model_type": "t5",
    "num_layers": 24,
    "d_model": 1024,
    "num_heads": 128,
    "d_kv": 128,
    "d_ff": 65536,
    "vocab_size": 32128,
}
QWEN2 = {
    "model_type": "qwen2",
    "num_hidden_layers": 28,
    "hidden_size": 3584,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "intermediate_size": 18944,
    "vocab_size": 152064,
    "tie_word_embeddings": False,
}
MISTRAL = LLAMA | {"model_type": "mistral", "vocab_size": 32000}


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (LLAMA, "llama3-8b"),
        (BERT, "bert-base"),
        (GPT2, "gpt2"),
        (T5, "t5-11b"),
        (QWEN2, "qwen2.5-7b"),
        (MISTRAL, "mistral-7b"),
    ],
)
def test_a_config_of_hugging_face_gives_the_preset(config, name, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config))
    for source in (config, tmp_path, str(tmp_path / "config.json")):
        assert spelled_out(models.from_config(source)) == spelled_out(models.preset(name))


def test_a_config_that_transformers_writes_counts_what_transformers_builds(tmp_path):
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    config = transformers.Qwen2Config(
        num_hidden_layers=3,
        hidden_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=96,
        vocab_size=211,
        tie_word_embeddings=False,
    )
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = transformers.Qwen2ForCausalLM(config)
    assert models.from_config(tmp_path).parameters == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    "key", ["num_hidden_layers", "hidden_size", "vocab_size", "intermediate_size"]
)
def test_a_missing_key_is_named(key):
    with pytest.raises(ConfigError, match=f"config has no key '{key}'; add it"):
        models.from_config({k: v for k, v in LLAMA.items() if k != key})


@pytest.mark.parametrize("value", [-1, 0, "12", 1.5, True])
def test_a_wrong_value_is_named(value):
    with pytest.raises(ConfigError, match=f"num_hidden_layers is {value!r}; give a whole number"):
        models.from_config(LLAMA | {"num_hidden_layers": value})


def test_files_that_are_none_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"config\.json cannot be read"):
        models.from_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="is no JSON"):
        models.from_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="holds a list"):
        models.from_config(tmp_path)
    with pytest.raises(ConfigError, match=r"model_type is mamba; known are gpt2, bert"):
        models.from_config({"model_type": "mamba"})


def test_an_unknown_preset_gets_the_nearest_ones():
    with pytest.raises(ConfigError, match=r"no model 'gpt3-14b'.*gpt3-13b"):
        models.preset("gpt3-14b")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": -1}, "layers is -1; give a number above 0"),
        ({"hidden": 0}, "hidden is 0"),
        ({"heads": 7}, "hidden is 768, which 7 heads do not divide"),
        ({"kv_heads": 5}, "5 kv_heads do not divide 12 heads"),
        ({"kind": "rnn"}, "kind is 'rnn'; give one of gpt, bert, t5, llama"),
        ({"max_positions": -1}, "max_positions is -1"),
        ({"decoder_layers": 13}, "decoder_layers is 13, more than the 12 layers"),
    ],
)
def test_a_shape_that_cannot_be_is_refused(change, message):
    good = {"kind": "gpt", "layers": 12, "hidden": 768, "heads": 12, "vocabulary": 100}
    with pytest.raises(ConfigError, match=message):
        TransformerShape(**good | change)
