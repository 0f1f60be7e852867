"""Small transformers models with random weights, from their configs: nothing is downloaded.

Dropout is active wherever the architecture has it, but for Mistral and Qwen2, which show the
attention kernels without it.
"""

from __future__ import annotations

from typing import Any

from torch import nn

VOCABULARY = 64
LAYERS: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
WIDE: dict[str, Any] = {**LAYERS, "intermediate_size": 32}
DECODER: dict[str, Any] = {**WIDE, "vocab_size": VOCABULARY, "num_key_value_heads": 1}


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY, n_positions=32, n_embd=16, n_layer=2, n_head=2,
            bos_token_id=1, eos_token_id=2,
        )
    )  # fmt: skip
    # Not found from this class's name; a warning about that would break the compiled graph.
    model.loss_type = "ForCausalLM"
    return model


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**DECODER, attention_dropout=0.1))


def mistral() -> nn.Module:
    from transformers import MistralConfig, MistralForCausalLM

    return MistralForCausalLM(MistralConfig(**DECODER, sliding_window=4))


def qwen2() -> nn.Module:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    return Qwen2ForCausalLM(Qwen2Config(**DECODER, tie_word_embeddings=True))


def mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(
        MixtralConfig(
            **DECODER, num_local_experts=3, output_router_logits=True, attention_dropout=0.1
        )
    )


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig(**WIDE, vocab_size=VOCABULARY, max_position_embeddings=32))


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=VOCABULARY, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2,
            decoder_start_token_id=0,
        )
    )  # fmt: skip


def whisper() -> nn.Module:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    return WhisperForConditionalGeneration(
        WhisperConfig(
            vocab_size=VOCABULARY, num_mel_bins=8, d_model=16, dropout=0.1,
            encoder_layers=2, encoder_attention_heads=2, encoder_ffn_dim=32,
            decoder_layers=2, decoder_attention_heads=2, decoder_ffn_dim=32,
            max_source_positions=8, max_target_positions=32,
            pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
        )
    )  # fmt: skip


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(
        ViTConfig(**WIDE, image_size=16, patch_size=4, num_labels=5, hidden_dropout_prob=0.1)
    )


def clip() -> nn.Module:
    from transformers import CLIPConfig, CLIPModel

    return CLIPModel(
        CLIPConfig(
            text_config={
                **WIDE, "vocab_size": VOCABULARY, "max_position_embeddings": 32,
                "bos_token_id": 1, "eos_token_id": 2, "attention_dropout": 0.1,
            },
            vision_config={**WIDE, "image_size": 16, "patch_size": 4, "attention_dropout": 0.1},
            projection_dim=8,
        )
    )  # fmt: skip
