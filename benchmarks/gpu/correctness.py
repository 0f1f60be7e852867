"""Bits first: small random models of Transformers, plain and offloaded, on the device.

    python -m benchmarks.gpu.correctness '{"device": "cuda", "dir": "/tmp"}'

Everything leaves that can: activations from one byte on, states, and in the second setting the
weights too. Losses of three steps and all weights after them must be the same to the last bit.
Prints a line of JSON for each model.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch

from offload_strategy import OffloadEngine

_STEPS = 3
_SIZES = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
_WORDS = {"vocab_size": 256, "intermediate_size": 128, "max_position_embeddings": 64}


def _gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=64, n_embd=64, n_layer=3,
                                      n_head=4, use_cache=False))  # fmt: skip


def _llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**_SIZES, **_WORDS, use_cache=False))


def _mixtral() -> Any:
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(
        MixtralConfig(
            **_SIZES, **_WORDS, num_key_value_heads=2, num_local_experts=4, use_cache=False
        )
    )


def _bert() -> Any:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig(**_SIZES, **_WORDS))


def _t5() -> Any:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=256, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4,
            decoder_start_token_id=0, use_cache=False,
        )
    )  # fmt: skip


def _vit() -> Any:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(
        ViTConfig(**_SIZES, intermediate_size=128, image_size=32, patch_size=8, num_labels=10)
    )


MODELS: dict[str, Callable[[], Any]] = {
    "GPT-2": _gpt2, "Llama": _llama, "Mixtral": _mixtral, "BERT": _bert, "T5": _t5, "ViT": _vit,
}  # fmt: skip

SETTINGS: dict[str, dict[str, Any]] = {
    "states and activations": {"optimizer": {"overlap": "commit", "subgroup_size": 20000}},
    "weights, too": {
        "optimizer": {"overlap": "eager", "subgroup_size": 20000},
        "parameters": {"enabled": True, "min_size": 1},
    },
}


def main() -> None:
    """Compare every model in every setting."""
    options = json.loads(sys.argv[1])
    device = options["device"]
    torch.use_deterministic_algorithms(True, warn_only=True)
    for name in MODELS:
        expected = _train(name, device, None)
        again = _train(name, device, None)
        for setting, sections in SETTINGS.items():
            with tempfile.TemporaryDirectory(dir=options["dir"]) as place:
                try:
                    got = _train(name, device, {"tiers": _tiers(place), **sections})
                    outcome = {
                        "same": got == expected,
                        "repeats": again == expected,
                        "differs": _differs(got, expected),
                    }
                except Exception as error:  # the others are of interest all the same
                    outcome = {"same": False, "repeats": True, "differs": repr(error)}
            print(json.dumps({"model": name, "setting": setting, **outcome}), flush=True)


def _tiers(place: str) -> list[dict[str, Any]]:
    return [{"name": "disk", "kind": "ssd", "path": place}]


def _train(name: str, device: str, sections: dict[str, Any] | None) -> dict[str, Any]:
    """Losses and weights of a few steps, as bits."""
    torch.manual_seed(0)
    model = MODELS[name]().to(device).train()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    engine = None
    if sections is not None:
        engine = OffloadEngine(
            {"activations": {"min_size": 1, "budget": "100%"},
             "memory": {"pinned": "64MiB"}, **sections}
        )  # fmt: skip
        optimizer = engine.attach(model, optimizer)
    found: dict[str, Any] = {}
    for number, inputs in enumerate(_inputs(name, device)):
        torch.manual_seed(number)
        loss = model(**inputs).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found[f"loss {number}"] = float(loss).hex()
        del loss
    if engine is not None:
        engine.close()
    for key, value in model.state_dict().items():
        found[key] = value.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
    return found


def _inputs(name: str, device: str) -> Iterator[dict[str, torch.Tensor]]:
    for number in range(_STEPS):
        generator = torch.Generator().manual_seed(number)
        if name == "ViT":
            yield {
                "pixel_values": torch.randn(4, 3, 32, 32, generator=generator).to(device),
                "labels": torch.randint(10, (4,), generator=generator).to(device),
            }
            continue
        tokens = torch.randint(256, (4, 48), generator=generator).to(device)
        yield {"input_ids": tokens, "labels": tokens}


def _differs(got: dict[str, Any], expected: dict[str, Any]) -> str:
    return ", ".join([key for key in expected if got.get(key) != expected[key]][:3])


if __name__ == "__main__":
    main()
