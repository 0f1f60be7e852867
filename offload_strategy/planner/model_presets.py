"""Shapes by name, and from the config.json of a Hugging Face model."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from offload_strategy.errors import ConfigError
from offload_strategy.planner.transformer_shape import Kind, TransformerShape

_ROWS = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
PRESETS: Mapping[str, TransformerShape] = {n: TransformerShape(**row) for n, row in _ROWS.items()}

#: Kinds by model_type of a config.json.
_KINDS: Mapping[str, Kind] = {
    "gpt2": "gpt",
    **dict.fromkeys(("bert", "roberta"), "bert"),
    **dict.fromkeys(("t5", "mt5", "umt5"), "t5"),
    **dict.fromkeys(("llama", "mistral", "qwen2"), "llama"),
}
_BERT_KEYS = (
    "layers=num_hidden_layers hidden=hidden_size heads=num_attention_heads "
    "vocabulary=vocab_size feed_forward=intermediate_size"
)
#: By kind the keys of numbers that a config.json must have, then those that may be missing or null,
#: each after the argument of the shape.
_KEYS: Mapping[Kind, tuple[str, str]] = {
    "gpt": (
        "layers=n_layer hidden=n_embd heads=n_head vocabulary=vocab_size max_positions=n_positions",
        "feed_forward=n_inner",
    ),
    "bert": (f"{_BERT_KEYS} max_positions=max_position_embeddings", ""),
    "t5": (
        "layers=num_layers hidden=d_model heads=num_heads vocabulary=vocab_size feed_forward=d_ff "
        "head_size=d_kv",
        "decoder_layers=num_decoder_layers max_positions=n_positions",
    ),
    "llama": (
        _BERT_KEYS,
        "kv_heads=num_key_value_heads head_size=head_dim max_positions=max_position_embeddings",
    ),
}


def preset(name: str) -> TransformerShape:
    """Look up a shape by name, or raise a ConfigError that names the nearest ones."""
    shape = PRESETS.get(name.lower().replace("llama3.1", "llama3").replace("_", "-"))
    if shape is not None:
        return shape
    near = difflib.get_close_matches(name.lower(), PRESETS, 3, cutoff=0.5) or sorted(PRESETS)
    raise ConfigError(
        f"there is no model {name!r}; the nearest are {', '.join(near)}. Give one of these, a "
        f"config.json, or a kind with layers, hidden and heads"
    )


def from_config(config: Mapping[str, Any] | str | Path) -> TransformerShape:
    """Read the config.json of a Hugging Face model: its contents, path, or directory.

    GPT-2, BERT, T5, Llama, Qwen2 and Mistral are known, and what has the same keys. Raises a
    ConfigError if the file cannot be read, or a key is missing or of the wrong type.
    """
    where = "config"
    if not isinstance(config, Mapping):
        where, config = _load(Path(config))
    named = str(config.get("model_type", "")).lower()
    usual = "gpt2" if "n_embd" in config else "llama" if "num_hidden_layers" in config else ""
    if (kind := _KINDS.get(named or usual)) is None:
        raise ConfigError(
            f"{where}: model_type is {named or 'missing'}; known are gpt2, bert, roberta, t5, mt5, "
            f"umt5, llama, mistral and qwen2. Set it to the one whose keys these are"
        )
    needed, optional = ([pair.split("=") for pair in keys.split()] for keys in _KEYS[kind])
    named_too = [(name, key) for name, key in optional if config.get(key) is not None]
    sizes = {name: _number(config, key, where) for name, key in (*needed, *named_too)}
    if kind == "t5":
        sizes["layers"] += sizes.setdefault("decoder_layers", sizes["layers"])
    tied = config.get("tie_word_embeddings", kind != "llama")
    if not isinstance(tied, bool):
        raise ConfigError(f"{where}: tie_word_embeddings is {tied!r}; give true or false")
    gated = kind == "llama" or "gated" in str(config.get("feed_forward_proj", ""))
    return TransformerShape(kind, **sizes, tied=tied, gated=gated, qkv_bias=named == "qwen2")


def _load(path: Path) -> tuple[str, Mapping[str, Any]]:
    file = path / "config.json" if path.is_dir() else path
    try:
        loaded = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise ConfigError(f"{file} is no JSON: {error}") from error
    if not isinstance(loaded, Mapping):
        raise ConfigError(f"{file} holds a {type(loaded).__name__}, not the object of a config")
    return str(file), loaded


def _number(config: Mapping[str, Any], key: str, where: str) -> int:
    if (value := config.get(key)) is None:
        raise ConfigError(f"{where} has no key {key!r}; add it, a whole number above 0")
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise ConfigError(f"{where}: {key} is {value!r}; give a whole number above 0")
    return value
