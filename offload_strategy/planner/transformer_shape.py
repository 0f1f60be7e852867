"""A transformer in numbers: parameters, FLOPs and saved bytes from its shape; shapes by name.

[Note: what a layer saves]
Counted are the tensors that the backward pass of each operator needs, as fused kernels save them,
and every storage once (the layers of Megatron-LM, on which SSDTrain measures its table III). With
u = batch x sequence x hidden x bytes of an element:

    input of each of two norms        1 u each
    input of "qkv" and of "up"        1 u each
    queries, keys and values          3 u, less with fewer key heads
    result of attention               1 u; it is the input of "projection" as well
    result of "up", and what its activation function gives
                                      4 u each with a feed-forward part of 4 x hidden

That is 16 u. With flash attention scores are computed again in backward. Of a gated feed-forward
part autograd saves gate, the function of it, up, and their product. Dropout is not counted; its
masks would be 1 u more in half precision. Of a layer that several devices share, the part of one is
a shape with fewer heads of the same size and a narrower feed-forward part.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import yaml

from offload_strategy.errors import ConfigError

Kind = Literal["gpt", "bert", "t5", "llama"]

#: Learned relative positions of T5: a row of so many for each head, in encoder and decoder.
_T5_BUCKETS = 32
_BERT_TYPES = 2


@dataclass(frozen=True, slots=True)
class TransformerShape:
    """The shape of a transformer."""

    # "gpt" (learned positions, biases, layer norm), "bert" (likewise, with segments and its heads),
    # "t5" (relative positions, no biases) or "llama" (rotary positions, no biases, RMS norm)
    kind: Kind
    layers: int  # Of encoder and decoder together
    hidden: int  # Width of the residual stream
    heads: int  # Of attention
    vocabulary: int  # Tokens
    kv_heads: int | None = None  # Of keys and values; None for as many as `heads`
    # Width between the two products of the feed-forward part; None for 4 x hidden
    feed_forward: int | None = None
    gated: bool = False  # Whether a third product gates it (SwiGLU)
    tied: bool = True  # Whether embedding and head are one matrix
    max_positions: int = 0  # Learned positions; of "gpt" and "bert" alone
    head_size: int | None = None  # None for hidden / heads
    # Whether queries, keys and values have biases though the kind has none (Qwen2)
    qkv_bias: bool = False
    decoder_layers: int = 0  # How many of `layers` also attend to an encoder ("t5")

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ConfigError(
                f"transformer: kind is {self.kind!r}; give one of {', '.join(get_args(Kind))}"
            )
        sizes = ("layers", "hidden", "heads", "vocabulary", "kv_heads", "feed_forward", "head_size")
        require_positive(self, "transformer: ", *sizes)
        for name in ("max_positions", "decoder_layers"):
            if getattr(self, name) < 0:
                raise ConfigError(f"transformer: {name} is {getattr(self, name)}; give 0 or more")
        if self.head_size is None and self.hidden % self.heads:
            raise ConfigError(
                f"transformer: hidden is {self.hidden}, which {self.heads} heads do not divide; "
                f"change one of them, or give head_size"
            )
        if self.heads % self.keys_heads:
            raise ConfigError(
                f"transformer: {self.keys_heads} kv_heads do not divide {self.heads} heads"
            )
        if self.decoder_layers > self.layers:
            raise ConfigError(
                f"transformer: decoder_layers is {self.decoder_layers}, more than the "
                f"{self.layers} layers of encoder and decoder together"
            )

    @property
    def keys_heads(self) -> int:
        """Heads of keys and values."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def inner(self) -> int:
        """Width of the feed-forward part."""
        return 4 * self.hidden if self.feed_forward is None else self.feed_forward

    @property
    def attention_width(self) -> int:
        """Width of all queries together."""
        return self.heads * (self.head_size or self.hidden // self.heads)

    @property
    def keys_width(self) -> int:
        """Width of all keys together."""
        return self.keys_heads * (self.head_size or self.hidden // self.heads)

    @property
    def has_biases(self) -> bool:
        """Whether products and norms have biases."""
        return self.kind in ("gpt", "bert")

    def layer_matrices(self, index: int) -> list[int]:
        """Elements of each matrix of a layer; those of a decoder attend to an encoder as well."""
        h, q, kv, f = self.hidden, self.attention_width, self.keys_width, self.inner
        attention = [h * q, h * kv, h * kv, q * h]
        feed_forward = (3 if self.gated else 2) * [h * f]
        return (2 if self._crosses(index) else 1) * attention + feed_forward

    @property
    def end_parameters(self) -> int:
        """Parameters of embedding and head; one matrix if they are tied."""
        return (1 if self.tied else 2) * self.vocabulary * self.hidden

    @property
    def layer_parameters(self) -> int:
        """Parameters of the largest layer."""
        return self._layer(self.layers - 1)

    @property
    def parameters(self) -> int:
        """All parameters; BERT with its pooler and the heads that it is trained with."""
        h = self.hidden
        plain = self.layers - self.decoder_layers
        total = plain * self._layer(0) + self.decoder_layers * self._layer(self.layers - 1)
        norm = (2 if self.has_biases else 1) * h
        total += self.end_parameters + norm
        if self.kind == "gpt":
            total += self.max_positions * h
        elif self.kind == "bert":
            total += (self.max_positions + _BERT_TYPES) * h
            pooler, transform = h * h + h, h * h + h + norm
            total += pooler + transform + self.vocabulary + 2 * h + 2
        elif self.kind == "t5":
            stacks = 2 if self.decoder_layers else 1
            total += (stacks - 1) * norm + stacks * _T5_BUCKETS * self.heads
        return total

    def layer_flops(self, batch: int, sequence: int) -> float:
        """FLOP of a layer's forward pass; of all layers divided evenly where they differ.

        Scores of attention are counted for every pair of positions, masked or not, as Megatron-LM
        does.
        """
        h, q, kv = self.hidden, self.attention_width, self.keys_width
        attends = h * (q + 2 * kv) + 2 * sequence * q + q * h
        feeds_forward = (3 if self.gated else 2) * h * self.inner
        attentions = 1 + self.decoder_layers / self.layers
        return 2.0 * batch * sequence * (attentions * attends + feeds_forward)

    def head_flops(self, batch: int, sequence: int) -> float:
        """FLOP of the head's forward pass: the product with the vocabulary."""
        return 2.0 * batch * sequence * self.hidden * self.vocabulary

    def forward_flops(self, batch: int, sequence: int) -> float:
        """FLOP of the whole forward pass."""
        return self.layers * self.layer_flops(batch, sequence) + self.head_flops(batch, sequence)

    def _crosses(self, index: int) -> bool:
        return index >= self.layers - self.decoder_layers

    def _layer(self, index: int) -> int:
        norms = (3 if self._crosses(index) else 2) * (2 if self.has_biases else 1) * self.hidden
        total = sum(self.layer_matrices(index)) + norms
        if self.has_biases:
            total += self.attention_width + 2 * self.keys_width + 2 * self.hidden + self.inner
        elif self.qkv_bias:
            total += self.attention_width + 2 * self.keys_width
        return total


def positive(what: str, value: float) -> None:
    """Raise a ConfigError that names `what` unless its value is above 0."""
    if not value > 0:
        raise ConfigError(f"{what} is {value}; give a number above 0")


def require_positive(of: object, prefix: str, *names: str) -> None:
    """Check attributes as `positive` does, except for those that are None."""
    for name in names:
        if getattr(of, name) is not None:
            positive(f"{prefix}{name}", getattr(of, name))


#: What SSDTrain leaves on the device: tensors of fewer elements (algorithm 1, line 2).
SMALL_ELEMENTS = 2**20
#: Flash attention keeps a float32 for each row of each head.
_STATISTICS_BYTES = 4


@dataclass(frozen=True, slots=True)
class Workload:
    """What is computed in one pass, on one device."""

    batch: int  # Sequences
    sequence: int  # Positions of each
    dtype_bytes: int = 2  # Of an activation

    def __post_init__(self) -> None:
        require_positive(self, "workload: ", "batch", "sequence", "dtype_bytes")

    @property
    def tokens(self) -> int:
        """Positions of the batch."""
        return self.batch * self.sequence


class SavedTensor(NamedTuple):
    """A tensor that waits for the backward pass."""

    name: str
    elements: int
    nbytes: int


def layer_tensors(
    shape: TransformerShape, work: Workload, *, crosses: bool = False
) -> list[SavedTensor]:
    """List what a layer saves; see [Note: what a layer saves].

    With `crosses` the layer attends to an encoder as well, of an equally long sequence.
    """
    stream, queries, keys = shape.hidden, shape.attention_width, shape.keys_width
    widths: dict[str, int] = {}
    for prefix in ("", "cross ") if crosses else ("",):
        widths |= {
            f"{prefix}input of the norm": stream,
            f"{prefix}input of qkv": stream,
            f"{prefix}queries": queries,
            f"{prefix}keys": keys,
            f"{prefix}values": keys,
            f"{prefix}result of attention": queries,
            f"{prefix}statistics": shape.heads,
        }
    widths |= {"input of the second norm": stream, "input of up": stream}
    inner = ("gate", "activated gate", "up") if shape.gated else ("result of up",)
    widths |= dict.fromkeys((*inner, "input of down"), shape.inner)
    tensors = []
    for name, width in widths.items():
        each = _STATISTICS_BYTES if name.endswith("statistics") else work.dtype_bytes
        tensors.append(SavedTensor(name, work.tokens * width, work.tokens * width * each))
    return tensors


def activation_bytes(
    shape: TransformerShape, work: Workload, min_elements: int = SMALL_ELEMENTS
) -> int:
    """Bytes that a forward pass saves in tensors of at least `min_elements`.

    Counted are all layers and the norm after them. The head is left out: its backward pass begins
    at once, so nothing of it leaves the device (SSDTrain, section III-C2).
    """
    tensors = (shape.layers - shape.decoder_layers) * layer_tensors(shape, work)
    tensors += shape.decoder_layers * layer_tensors(shape, work, crosses=True)
    elements = work.tokens * shape.hidden
    tensors.append(SavedTensor("last norm", elements, elements * work.dtype_bytes))
    return sum(tensor.nbytes for tensor in tensors if tensor.elements >= min_elements)


def layer_activation_bytes(shape: TransformerShape, work: Workload) -> int:
    """Bytes that the largest layer saves."""
    tensors = layer_tensors(shape, work, crosses=shape.decoder_layers > 0)
    return sum(tensor.nbytes for tensor in tensors)


_ROWS = yaml.safe_load(Path(__file__).with_name("model_presets.yaml").read_text())
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
        "decoder_layers=num_decoder_layers",
    ),
    "llama": (_BERT_KEYS, "kv_heads=num_key_value_heads head_size=head_dim"),
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


def context_length(file: str | Path) -> int | None:
    """Return the longest sequence that a config.json names in tokens, or None."""
    config = _load(Path(file))[1]
    named = (config.get(key) for key in ("n_positions", "max_position_embeddings"))
    return next((value for value in named if isinstance(value, int) and value > 0), None)


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
