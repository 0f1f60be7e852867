"""Small models of every common kind, with their data: what activation offload is tried on.

Models of transformers have random weights, from their configs: nothing is downloaded. Those of our
own are of kinds that transformers does not have, return their loss, and know
`gradient_checkpointing_enable` as well. Dropout is active wherever the architecture has it.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

Batch = dict[str, Any]
VOCABULARY = 64

# ---------------------------------------------------------------------- models of transformers
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


def pretrained(kind: str) -> nn.Module:
    import transformers

    model_class, config_class, options = CONFIGS[kind]
    model: Any = getattr(transformers, model_class)(getattr(transformers, config_class)(**options))
    if kind == "GPT-2":
        # Not found from this class's name; a warning about that would break the compiled graph.
        model.loss_type = "ForCausalLM"
    return model


# ---------------------------------------------------------------------- models of our own
class Checkpointable(nn.Module):
    """A model that runs its blocks as regions, which checkpointing may recompute."""

    def __init__(self) -> None:
        super().__init__()
        self.use_reentrant: bool | None = None

    def gradient_checkpointing_enable(self, options: dict[str, bool]) -> None:
        self.use_reentrant = options["use_reentrant"]

    def region(self, block: Callable[..., Any], *inputs: torch.Tensor) -> Any:
        if self.use_reentrant is None:
            return block(*inputs)
        return checkpoint(block, *inputs, use_reentrant=self.use_reentrant)


class Residual(nn.Module):
    """Two convolutions with batch norm, in-place activations, and a short cut around them."""

    def __init__(self, width_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width_in, width, 3, stride, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, 1, 1, bias=False),
            nn.BatchNorm2d(width),
        )
        self.short_cut: nn.Module = nn.Identity()
        if stride != 1 or width_in != width:
            self.short_cut = nn.Sequential(
                nn.Conv2d(width_in, width, 1, stride, bias=False), nn.BatchNorm2d(width)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu_(self.body(x) + self.short_cut(x))


class ResNet(Checkpointable):
    """He et al., Deep residual learning: a stem, residual blocks, and a classifier."""

    def __init__(self, width: int = 8, classes: int = 5) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
        )
        self.blocks = nn.ModuleList([Residual(width, width, 1), Residual(width, 2 * width, 2)])
        self.head = nn.Linear(2 * width, classes)

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.stem(pixel_values)
        for block in self.blocks:
            x = self.region(block, x)
        return F.cross_entropy(self.head(x.mean((2, 3))), labels)


class LSTM(Checkpointable):
    """A language model of two recurrent layers, with dropout and the head tied to the embedding."""

    def __init__(self, vocabulary: int = 64, width: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList([nn.LSTM(width, width, batch_first=True) for _ in range(2)])
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embedding(input_ids[:, :-1])
        for layer in self.layers:
            x, _ = self.region(layer, self.dropout(x))
        return F.cross_entropy(self.head(x).flatten(0, 1), labels[:, 1:].flatten())


# ---------------------------------------------------------------------- all of them, and data
OWN: dict[str, Callable[[], nn.Module]] = {"ResNet": ResNet, "LSTM": LSTM}
ZOO = (*CONFIGS, *OWN)


def build(kind: str, reentrant: bool | None = None) -> Any:
    """The same model of the zoo every time; `reentrant` is its kind of checkpointing, if any."""
    torch.manual_seed(0)
    model: Any = (OWN[kind]() if kind in OWN else pretrained(kind)).train()
    if reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    return model


def batch(kind: str, number: int) -> Batch:
    generator = torch.Generator().manual_seed(number)
    if kind in ("ViT", "ResNet"):
        images = torch.randn(2, 3, 16, 16, generator=generator)
        return {"pixel_values": images, "labels": torch.randint(0, 5, (2,), generator=generator)}
    tokens = torch.randint(3, VOCABULARY, (2, 12), generator=generator)
    return {"input_ids": tokens, "labels": tokens}


def loss_of(model: Any, data: Batch) -> torch.Tensor:
    output = model(**data)
    loss: torch.Tensor = output if isinstance(output, torch.Tensor) else output.loss
    return loss
