"""Small transformers models with random weights, from their configs: nothing is downloaded.

Dropout is active wherever the architecture has it.
"""

from __future__ import annotations

from typing import Any

from torch import nn

VOCABULARY = 64
WIDE: dict[str, Any] = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32,
}  # fmt: skip
DECODER: dict[str, Any] = {**WIDE, "vocab_size": VOCABULARY, "num_key_value_heads": 1}

#: Model, config and its options, by name in the zoo.
CONFIGS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "GPT-2": ("GPT2LMHeadModel", "GPT2Config", {
        "vocab_size": VOCABULARY, "n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 2,
        "bos_token_id": 1, "eos_token_id": 2,
    }),
    "Llama": ("LlamaForCausalLM", "LlamaConfig", {**DECODER, "attention_dropout": 0.1}),
    "Mixtral": ("MixtralForCausalLM", "MixtralConfig", {
        **DECODER, "num_local_experts": 3, "output_router_logits": True, "attention_dropout": 0.1,
    }),
    "BERT": ("BertForMaskedLM", "BertConfig", {
        **WIDE, "vocab_size": VOCABULARY, "max_position_embeddings": 32,
    }),
    "T5": ("T5ForConditionalGeneration", "T5Config", {
        "vocab_size": VOCABULARY, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2,
        "num_heads": 2, "decoder_start_token_id": 0,
    }),
    "ViT": ("ViTForImageClassification", "ViTConfig", {
        **WIDE, "image_size": 16, "patch_size": 4, "num_labels": 5, "hidden_dropout_prob": 0.1,
    }),
}  # fmt: skip


def make(kind: str) -> nn.Module:
    import transformers

    model_class, config_class, options = CONFIGS[kind]
    model: Any = getattr(transformers, model_class)(getattr(transformers, config_class)(**options))
    if kind == "GPT-2":
        # Not found from this class's name; a warning about that would break the compiled graph.
        model.loss_type = "ForCausalLM"
    return model
