"""A transformer in numbers: parameters, FLOPs and bytes from its shape alone."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

from offload_strategy.errors import ConfigError

Kind = Literal["gpt", "bert", "t5", "llama"]

#: Learned relative positions of T5: a row of so many for each head, in encoder and decoder.
_T5_BUCKETS = 32
_BERT_TYPES = 2


@dataclass(frozen=True)
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
    feed_forward: int | None = None  # Width within the feed-forward part; None for 4 x hidden
    gated: bool = False  # Whether a third product gates it (SwiGLU)
    tied: bool = True  # Whether embedding and head are one matrix
    # Longest sequence, if it is known; "gpt" and "bert" have learned positions for it
    max_positions: int = 0
    head_size: int | None = None  # None for hidden / heads
    qkv_bias: bool = False  # Of queries, keys and values, though the kind has none (Qwen2)
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

    def layer_matrices(self, *, crosses: bool = False) -> list[int]:
        """Elements of each matrix of a layer; with `crosses` it attends to an encoder as well."""
        h, q, kv, f = self.hidden, self.attention_width, self.keys_width, self.inner
        attention = [h * q, h * kv, h * kv, q * h]
        return (2 if crosses else 1) * attention + (3 if self.gated else 2) * [h * f]

    @property
    def end_parameters(self) -> int:
        """Parameters of embedding and head; one matrix if they are tied."""
        return (1 if self.tied else 2) * self.vocabulary * self.hidden

    @cached_property
    def layer_parameters(self) -> int:
        """Parameters of the largest layer."""
        return self._layer(crosses=self.decoder_layers > 0)

    @cached_property
    def parameters(self) -> int:
        """All parameters; BERT with its pooler and the heads that it is trained with."""
        h = self.hidden
        plain = self.layers - self.decoder_layers
        total = plain * self._layer() + self.decoder_layers * self.layer_parameters
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

    def _layer(self, *, crosses: bool = False) -> int:
        norms = (3 if crosses else 2) * (2 if self.has_biases else 1) * self.hidden
        total = sum(self.layer_matrices(crosses=crosses)) + norms
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
