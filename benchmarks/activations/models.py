"""The models that are trained: sizes of Transformers' own classes, dropout off, and a U-Net."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

MODELS = ("GPT", "BERT", "T5", "UNet")


@dataclass(frozen=True)
class Shape:
    """How large a model is, and what it computes with.

    Args:
        width: of a hidden state.
        layers: in all; those of T5 are encoder and decoder layers, half of each.
        heads: of attention.
        sequence: tokens.
        vocabulary: tokens to choose from.
        dtype: of weights and activations, by torch's name.
        tied: whether the head of GPT has the embedding's weights.
    """

    width: int
    layers: int
    heads: int
    sequence: int = 512
    vocabulary: int = 8192
    dtype: str = "float32"
    tied: bool = True


#: About 100 million parameters.
HUNDRED_MILLION = Shape(768, 13, 12)
#: For comparisons of a dozen processes at once.
THIRTY_MILLION = Shape(512, 8, 8, vocabulary=4096)
#: To see that everything runs.
TINY = Shape(128, 2, 2)


def build(kind: str, shape: Shape, device: str = "cpu") -> Any:
    """A model with random weights, in training mode.

    Args:
        kind: of `MODELS`.
        shape: how large.
        device: where to.
    """
    torch.manual_seed(0)
    dtype, before = getattr(torch, shape.dtype), torch.get_default_dtype()
    torch.set_default_dtype(dtype)  # never larger than it will be
    try:
        with torch.device(device):
            model = _MAKERS[kind](shape)
    finally:
        torch.set_default_dtype(before)
    return model.to(dtype).train()


def _gpt(shape: Shape) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=shape.vocabulary,
            n_positions=shape.sequence,
            n_embd=shape.width,
            n_layer=shape.layers,
            n_head=shape.heads,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            # The same function as the default in one kernel, which saves one tensor instead of
            # five: better for everybody, and most of all for those who keep everything.
            activation_function="gelu_pytorch_tanh",
            use_cache=False,
            tie_word_embeddings=shape.tied,
        )
    )


def _bert(shape: Shape) -> Any:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(
        BertConfig(
            vocab_size=shape.vocabulary,
            hidden_size=shape.width,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            intermediate_size=4 * shape.width,
            max_position_embeddings=shape.sequence,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )


def _t5(shape: Shape) -> Any:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=shape.vocabulary,
            d_model=shape.width,
            d_kv=shape.width // shape.heads,
            d_ff=4 * shape.width,
            num_layers=shape.layers - shape.layers // 2,
            num_decoder_layers=shape.layers // 2,
            num_heads=shape.heads,
            dropout_rate=0.0,
            decoder_start_token_id=0,
            use_cache=False,
        )
    )


def _unet(shape: Shape) -> Any:
    from benchmarks.activations.unet import UNet

    return UNet(shape.vocabulary, shape.width // 16, levels=3)


_MAKERS = {"GPT": _gpt, "BERT": _bert, "T5": _t5, "UNet": _unet}


def batch(size: int, step: int, shape: Shape, device: str = "cpu") -> dict[str, torch.Tensor]:
    """Random tokens, the same for the same step; every token is predicted."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(shape.vocabulary, (size, shape.sequence), generator=generator)
    tokens = tokens.to(device)
    return {"input_ids": tokens, "labels": tokens}
