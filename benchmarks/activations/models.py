"""The models that are trained: sizes of Transformers' own classes, dropout off."""

from __future__ import annotations

from typing import Any

import torch

VOCABULARY = 8192
SEQUENCE = 512
MODELS = ("GPT", "BERT")


def build(kind: str, *, small: bool = False) -> Any:
    """About 100 million parameters, fp32.

    Args:
        kind: of `MODELS`.
        small: a tiny one, to see that everything runs.
    """
    torch.manual_seed(0)
    width, layers, heads = (128, 2, 2) if small else (768, 13, 12)
    if kind == "GPT":
        from transformers import GPT2Config, GPT2LMHeadModel

        gpt = GPT2Config(
            vocab_size=VOCABULARY,
            n_positions=SEQUENCE,
            n_embd=width,
            n_layer=layers,
            n_head=heads,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            # The same function as the default in one kernel, which saves one tensor instead of
            # five: better for everybody, and most of all for those who keep everything.
            activation_function="gelu_pytorch_tanh",
            use_cache=False,
        )
        return GPT2LMHeadModel(gpt).train()
    from transformers import BertConfig, BertForMaskedLM

    bert = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=4 * width,
        max_position_embeddings=SEQUENCE,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return BertForMaskedLM(bert).train()


def batch(size: int, step: int) -> dict[str, torch.Tensor]:
    """Random tokens, the same for the same step; every token is predicted."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(VOCABULARY, (size, SEQUENCE), generator=generator)
    return {"input_ids": tokens, "labels": tokens}
