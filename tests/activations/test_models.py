"""Whole models: losses and gradients are the same to the last bit, and nearly everything left."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.training import (
    activations_only,
    assert_same_history,
    backward_history,
    moved,
    on_disk,
    saved_storages,
)

pytest.importorskip("transformers")

TEXT = torch.arange(3 * 2 * 12).reshape(3, 2, 12) * 7 % 61
SMALL: dict[str, Any] = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2}
HEADS: dict[str, Any] = {"num_attention_heads": 2, "intermediate_size": 32}


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=2, n_head=2)
    )


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**SMALL, **HEADS, num_key_value_heads=1))


def _bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig(**SMALL, **HEADS, max_position_embeddings=16))


def _t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=64, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2,
            decoder_start_token_id=0,
        )
    )  # fmt: skip


def _vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    small = {key: value for key, value in SMALL.items() if key != "vocab_size"}
    return ViTForImageClassification(
        ViTConfig(**small, **HEADS, image_size=16, patch_size=4, num_labels=5)
    )


def _mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(
        MixtralConfig(**SMALL, **HEADS, num_key_value_heads=1, num_local_experts=3)
    )


MODELS: dict[str, Callable[[], nn.Module]] = {
    "GPT-2": _gpt2,
    "Llama": _llama,
    "BERT": _bert,
    "T5": _t5,
    "ViT": _vit,
    "Mixtral": _mixtral,
}


def inputs(kind: str, step: int) -> dict[str, torch.Tensor]:
    if kind == "ViT":
        generator = torch.Generator().manual_seed(step)
        return {
            "pixel_values": torch.randn(2, 3, 16, 16, generator=generator),
            "labels": torch.tensor([step % 5, 1]),
        }
    return {"input_ids": TEXT[step], "labels": TEXT[step]}


def build(kind: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[kind]().train()


@pytest.fixture(params=MODELS)
def kind(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def history(kind: str, model: nn.Module, **options: Any) -> list[dict[str, torch.Tensor]]:
    return backward_history(model, lambda step: model(**inputs(kind, step)).loss, **options)


def test_three_steps_are_the_same_and_nearly_everything_left(kind: str, disk: Path) -> None:
    expected = history(kind, build(kind))
    model = build(kind)
    engine = activations_only(disk)
    engine.attach(model)
    got = history(kind, model, between=lambda: on_disk(engine))
    assert_same_history(got, expected)

    torch.manual_seed(1002)  # the third step once more, counted
    kept_out = [*model.parameters(), *model.buffers()]
    engine.detach_model(model)
    saved = sum(
        storage.nbytes()
        for step in range(3)
        for storage in saved_storages(lambda step=step: model(**inputs(kind, step)), kept_out)
    )
    left = moved(engine)
    assert left <= saved
    assert left / saved > 0.99, f"only {left} of {saved} saved bytes left"
    assert moved(engine, verb="read") > 0.9 * left
    engine.close()


def test_the_same_without_waiting_for_the_disk(kind: str, disk: Path) -> None:
    expected = history(kind, build(kind), steps=2)
    model = build(kind)
    with activations_only(disk, prefetch=0, budget="60%") as engine:
        engine.attach(model)
        assert_same_history(history(kind, model, steps=2), expected)
        assert moved(engine) + moved(engine, verb="forwarded") > 0


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
@pytest.mark.parametrize("kind", ["GPT-2", "Llama", "BERT", "T5"])
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable:FutureWarning")
def test_checkpointing_leaves_only_the_inputs_of_its_regions(
    kind: str, disk: Path, reentrant: bool
) -> None:
    def prepared() -> Any:
        model: Any = build(kind)
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        if reentrant:
            model.enable_input_require_grads()
        return model

    expected = history(kind, prepared())
    model = prepared()
    with activations_only(disk) as engine:
        engine.attach(model)
        assert_same_history(history(kind, model, between=lambda: on_disk(engine)), expected)
        checkpointed = moved(engine)
    plain = build(kind)
    with activations_only(disk) as engine:
        engine.attach(plain)
        history(kind, plain)
        on_disk(engine)
        assert 0 < checkpointed < moved(engine)


@pytest.mark.parametrize("kind", ["GPT-2", "BERT", "Llama"])
def test_autocast_is_the_same_and_casts_of_weights_stay(kind: str, disk: Path) -> None:
    def run(model: nn.Module, **options: Any) -> list[dict[str, torch.Tensor]]:
        def loss_of(step: int) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return model(**inputs(kind, step)).loss

        return backward_history(model, loss_of, **options)

    expected = run(build(kind))
    model = build(kind)
    with activations_only(disk) as engine:
        engine.attach(model)
        assert_same_history(run(model, between=lambda: on_disk(engine)), expected)
        engine.detach_model(model)
        left = moved(engine)
    torch.manual_seed(1002)
    with torch.autocast("cpu", torch.bfloat16):
        saved = [
            storage
            for step in range(3)
            for storage in saved_storages(
                lambda step=step: model(**inputs(kind, step)),
                keep_out=[*model.parameters(), *model.buffers()],
            )
        ]
    # Copies of weights are told by what they hold.
    casts = {bytes(p.detach().to(torch.bfloat16).untyped_storage()) for p in model.parameters()}
    of_weights = [storage for storage in saved if bytes(storage) in casts]
    assert of_weights
    others = sum(storage.nbytes() for storage in saved) - sum(s.nbytes() for s in of_weights)
    assert 0.97 * others < left <= others
