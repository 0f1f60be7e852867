"""Shapes by name, and from the config.json of a Hugging Face model."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from offload_strategy.errors import ConfigError
from offload_strategy.planner.transformer_shape import TransformerShape


def _gpt3(layers: int, heads: int, hidden: int) -> TransformerShape:
    return TransformerShape("gpt", layers, hidden, heads, vocabulary=50257, max_positions=2048)


def _llama3(
    layers: int, hidden: int, heads: int, inner: int, tied: bool = False
) -> TransformerShape:
    return TransformerShape(
        "llama",
        layers,
        hidden,
        heads,
        vocabulary=128256,
        kv_heads=8,
        feed_forward=inner,
        gated=True,
        tied=tied,
    )


def _qwen25(layers: int, hidden: int, heads: int, kv_heads: int, inner: int) -> TransformerShape:
    return TransformerShape(
        "llama",
        layers,
        hidden,
        heads,
        vocabulary=152064,
        kv_heads=kv_heads,
        feed_forward=inner,
        gated=True,
        tied=False,
        qkv_bias=True,
    )


#: Shapes by name; GPT-3's are those of Fuyou's table 4.
PRESETS: Mapping[str, TransformerShape] = {
    "gpt2": TransformerShape("gpt", 12, 768, 12, 50257, max_positions=1024),
    "gpt2-xl": TransformerShape("gpt", 48, 1600, 25, 50257, max_positions=1024),
    "bert-base": TransformerShape("bert", 12, 768, 12, 30522, max_positions=512),
    "bert-large": TransformerShape("bert", 24, 1024, 16, 30522, max_positions=512),
    "t5-11b": TransformerShape(
        "t5", 48, 1024, 128, 32128, feed_forward=65536, head_size=128, decoder_layers=24
    ),
    "gpt3-13b": _gpt3(40, 40, 5120),
    "gpt3-33b": _gpt3(60, 52, 6656),
    "gpt3-65b": _gpt3(80, 64, 8192),
    "gpt3-135b": _gpt3(88, 88, 11264),
    "gpt3-175b": _gpt3(96, 96, 12288),
    "gpt3-276b": _gpt3(112, 112, 14336),
    "gpt3-412b": _gpt3(128, 128, 16384),
    "gpt3-805b": _gpt3(160, 160, 20480),
    "llama3-8b": _llama3(32, 4096, 32, 14336),
    "llama3-70b": _llama3(80, 8192, 64, 28672),
    "qwen2.5-7b": _qwen25(28, 3584, 28, 4, 18944),
    "qwen2.5-14b": _qwen25(48, 5120, 40, 8, 13824),
    "qwen2.5-32b": _qwen25(64, 5120, 40, 8, 27648),
    "mistral-7b": TransformerShape(
        "llama", 32, 4096, 32, 32000, kv_heads=8, feed_forward=14336, gated=True, tied=False
    ),
}


def preset(name: str) -> TransformerShape:
    """Look up a shape by name.

    Raises:
        ConfigError: if there is none; the message names the nearest ones.
    """
    shape = PRESETS.get(name.lower().replace("llama3.1", "llama3").replace("_", "-"))
    if shape is not None:
        return shape
    near = difflib.get_close_matches(name.lower(), PRESETS, 3, cutoff=0.5) or sorted(PRESETS)
    raise ConfigError(
        f"there is no model {name!r}; the nearest are {', '.join(near)}. Give one of these, a "
        f"config.json, or a kind with layers, hidden and heads"
    )


def from_config(config: Mapping[str, Any] | str | Path) -> TransformerShape:
    """Read the config.json of a Hugging Face model.

    Args:
        config: its contents, its path, or the directory that it is in. GPT-2, BERT, T5, Llama,
            Qwen2 and Mistral are known, and what has the same keys.

    Raises:
        ConfigError: if the file cannot be read, or a key is missing or of the wrong type.
    """
    if not isinstance(config, Mapping):
        where, config = _load(Path(config))
    else:
        where = "config"
    reader = _Keys(config, where)
    kind = str(config.get("model_type", "")).lower()
    if kind == "gpt2" or (not kind and "n_embd" in config):
        return _from_gpt2(reader)
    if kind in ("bert", "roberta"):
        return _from_bert(reader)
    if kind in ("t5", "mt5", "umt5"):
        return _from_t5(reader)
    if kind in ("llama", "mistral", "qwen2") or (not kind and "num_hidden_layers" in config):
        return _from_llama(reader, kind)
    raise ConfigError(
        f"{where}: model_type is {kind or 'missing'}; known are gpt2, bert, roberta, t5, mt5, "
        f"umt5, llama, mistral and qwen2. Set it to the one whose keys these are"
    )


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


class _Keys:
    """A config that says which key is missing or wrong."""

    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        self._config = config
        self._where = where

    def number(self, key: str, default: int | None = None) -> int:
        value = self._config.get(key, default)
        if value is None and key in self._config and default is not None:
            value = default
        if value is None:
            raise ConfigError(f"{self._where} has no key {key!r}; add it, a whole number above 0")
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise ConfigError(f"{self._where}: {key} is {value!r}; give a whole number above 0")
        return value

    def optional(self, key: str) -> int | None:
        return None if self._config.get(key) is None else self.number(key)

    def flag(self, key: str, default: bool) -> bool:
        value = self._config.get(key, default)
        if not isinstance(value, bool):
            raise ConfigError(f"{self._where}: {key} is {value!r}; give true or false")
        return value

    def text(self, key: str, default: str) -> str:
        return str(self._config.get(key, default))


def _from_gpt2(keys: _Keys) -> TransformerShape:
    return TransformerShape(
        "gpt",
        layers=keys.number("n_layer"),
        hidden=keys.number("n_embd"),
        heads=keys.number("n_head"),
        vocabulary=keys.number("vocab_size"),
        feed_forward=keys.optional("n_inner"),
        tied=keys.flag("tie_word_embeddings", True),
        max_positions=keys.number("n_positions"),
    )


def _from_bert(keys: _Keys) -> TransformerShape:
    return TransformerShape(
        "bert",
        layers=keys.number("num_hidden_layers"),
        hidden=keys.number("hidden_size"),
        heads=keys.number("num_attention_heads"),
        vocabulary=keys.number("vocab_size"),
        feed_forward=keys.number("intermediate_size"),
        tied=keys.flag("tie_word_embeddings", True),
        max_positions=keys.number("max_position_embeddings"),
    )


def _from_t5(keys: _Keys) -> TransformerShape:
    encoder = keys.number("num_layers")
    decoder = keys.number("num_decoder_layers", encoder)
    return TransformerShape(
        "t5",
        layers=encoder + decoder,
        hidden=keys.number("d_model"),
        heads=keys.number("num_heads"),
        vocabulary=keys.number("vocab_size"),
        feed_forward=keys.number("d_ff"),
        gated="gated" in keys.text("feed_forward_proj", "relu"),
        tied=keys.flag("tie_word_embeddings", True),
        head_size=keys.number("d_kv"),
        decoder_layers=decoder,
    )


def _from_llama(keys: _Keys, kind: str) -> TransformerShape:
    heads = keys.number("num_attention_heads")
    return TransformerShape(
        "llama",
        layers=keys.number("num_hidden_layers"),
        hidden=keys.number("hidden_size"),
        heads=heads,
        vocabulary=keys.number("vocab_size"),
        kv_heads=keys.number("num_key_value_heads", heads),
        feed_forward=keys.number("intermediate_size"),
        gated=True,
        tied=keys.flag("tie_word_embeddings", False),
        head_size=keys.optional("head_dim"),
        qkv_bias=kind == "qwen2",
    )
