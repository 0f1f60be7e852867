"""Bits: small random models of Transformers, plain and offloaded, on the device.

    python -m benchmarks.gpu.correctness '{"device": "cuda", "dir": "/tmp", "models": ["GPT-2"]}'

Losses of three steps and all weights after them must be the same to the last bit. As a program it
is the short training that sanitizers watch, and prints a line of JSON for each comparison.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from benchmarks.gpu import device
from benchmarks.turns import Deadline
from offload_strategy import OffloadEngine

_STEPS = 3
_SIZES = {
    "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 128,
}  # fmt: skip
_WORDS = {**_SIZES, "vocab_size": 256, "max_position_embeddings": 64}
#: By name: class of the config, class of the model, and what the config is made of.
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "GPT-2": ("GPT2Config", "GPT2LMHeadModel", {
        "vocab_size": 256, "n_positions": 64, "n_embd": 64, "n_layer": 3, "n_head": 4,
        "use_cache": False,
    }),
    "Llama": ("LlamaConfig", "LlamaForCausalLM", {**_WORDS, "use_cache": False}),
    "BERT": ("BertConfig", "BertForMaskedLM", _WORDS),
    "T5": ("T5Config", "T5ForConditionalGeneration", {
        "vocab_size": 256, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4,
        "decoder_start_token_id": 0, "use_cache": False,
    }),
    "ViT": ("ViTConfig", "ViTForImageClassification", {
        **_SIZES, "image_size": 32, "patch_size": 8, "num_labels": 10,
    }),
    "Mixtral": ("MixtralConfig", "MixtralForCausalLM", {
        **_WORDS, "num_key_value_heads": 2, "num_local_experts": 4, "use_cache": False,
    }),
}  # fmt: skip

_EVERYTHING = {"min_size": 1, "budget": "100%"}
_COMMIT, _EAGER = ({"overlap": one, "subgroup_size": 20000} for one in ("commit", "eager"))
_HOST = {"name": "host", "kind": "dram", "capacity": "1GiB"}
SETTINGS: dict[str, dict[str, Any]] = {
    "states and activations to the disk": {"activations": _EVERYTHING, "optimizer": _COMMIT},
    "weights, states and activations to the disk": {
        "activations": _EVERYTHING, "optimizer": _EAGER,
        "parameters": {"enabled": True, "min_size": 1},
    },
    "states and activations to the host, then the disk": {
        "tiers": [_HOST], "activations": {"min_size": 1}, "optimizer": _COMMIT,
    },
}  # fmt: skip


def compare(options: Mapping[str, Any]) -> dict[str, Any]:
    """Compare `models` in every setting until the time is over; a task of `worker`."""
    deadline = Deadline(options["seconds"])
    found: list[dict[str, Any]] = []
    for name in options["models"]:
        if found and deadline.left <= 0:
            break
        with device.repeatable():
            found += _compare(name, options["device"], options["dir"])
    return {"comparisons": found}


def _compare(
    name: str, kind: str, directory: str, most: int | None = None
) -> Iterator[dict[str, Any]]:
    expected = _train(name, kind, None)
    repeats = _train(name, kind, None) == expected
    for setting in list(SETTINGS)[:most]:
        with tempfile.TemporaryDirectory(prefix="benchmarks-gpu-", dir=directory) as place:
            try:
                got = _train(name, kind, SETTINGS[setting], place)
                different = ", ".join(
                    [key for key in expected if got.get(key) != expected[key]][:3]
                )
            except Exception as error:  # the others are of interest all the same
                different = repr(error)
        yield {
            "model": name, "setting": setting, "repeats": repeats, "same": not different,
            "differs": different,
        }  # fmt: skip


def _train(
    name: str, kind: str, sections: Mapping[str, Any] | None, place: str = ""
) -> dict[str, Any]:
    """Losses and weights of a few steps, as bits."""
    import transformers

    config, model_class, sizes = MODELS[name]
    torch.manual_seed(0)
    model = getattr(transformers, model_class)(getattr(transformers, config)(**sizes))
    # What Transformers prefers counts with `torch.histc`, which not every device has for integers.
    if name == "Mixtral" and hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    model = model.to(kind).train()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    engine = None
    if sections is not None:
        disk = {"name": "disk", "kind": "ssd", "path": place}
        tiers = [*sections.get("tiers", ()), disk]
        engine = OffloadEngine({**sections, "tiers": tiers, "memory": {"pinned": "64MiB"}})
        optimizer = engine.attach(model, optimizer)
    found: dict[str, Any] = {}
    for number, inputs in enumerate(_inputs(name, kind)):
        torch.manual_seed(number)
        loss = model(**inputs).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found[f"loss {number}"] = loss.item().hex()
        del loss
    if engine is not None:
        engine.close()
    for key, value in model.state_dict().items():
        found[key] = value.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
    return found


def _inputs(name: str, kind: str) -> Iterator[dict[str, torch.Tensor]]:
    for number in range(_STEPS):
        generator = torch.Generator().manual_seed(number)
        tokens = torch.randint(256, (4, 48), generator=generator).to(kind)
        if name == "ViT":
            images = torch.randn(4, 3, 32, 32, generator=generator).to(kind)
            yield {"pixel_values": images, "labels": tokens[:, 0] % 10}
        else:
            yield {"input_ids": tokens, "labels": tokens}


def main() -> None:
    """Compare the models that are asked for, in the first setting."""
    options = json.loads(sys.argv[1])
    kind = options["device"]
    device.prepare(kind)
    if "delays" in options:  # of the simulation: mean microseconds of a kernel and of a copy
        module = torch.get_device_module(kind)
        module.set_seed(options["seed"])
        module.set_delays(*options["delays"])
    with device.repeatable():
        for name in options["models"]:
            for line in _compare(name, kind, options["dir"], most=1):
                print(json.dumps(line), flush=True)
    torch.accelerator.synchronize()


if __name__ == "__main__":
    main()
