"""The shape census against MemAscend's own table, on the shapes of real models."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

from offload_strategy.planner.host_memory_needs import NamedSize, staging_buffers
from offload_strategy.units import GiB


def sizes_in_half_precision(config) -> list[NamedSize]:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return [NamedSize(name, 2 * p.numel()) for name, p in model.named_parameters()]


QWEN_7B = Qwen2Config(
    vocab_size=152064,
    hidden_size=3584,
    intermediate_size=18944,
    num_hidden_layers=28,
    num_attention_heads=28,
    num_key_value_heads=4,
    tie_word_embeddings=False,
)


def test_qwen_7b_needs_what_the_paper_says():
    census = staging_buffers(sizes_in_half_precision(QWEN_7B), blocks_in_flight=1)
    assert census.exact_bytes / GiB == pytest.approx(2.46, abs=0.005)
    assert census.one_size_bytes / GiB == pytest.approx(9.14, abs=0.005)
    # Embedding and head; gate, up and down; query and output; key and value.
    assert [group.buffers for group in census.classes] == [2, 3, 2, 2]


def test_more_blocks_in_flight_need_more_of_the_blocks_buffers_only():
    shapes = sizes_in_half_precision(QWEN_7B)
    one, three = staging_buffers(shapes, 1), staging_buffers(shapes, 3)
    assert [group.buffers for group in three.classes] == [2, 9, 6, 6]
    assert three.classes[0] == one.classes[0]


def test_a_model_never_needs_more_buffers_than_it_has_blocks():
    config = LlamaConfig(
        vocab_size=1024, hidden_size=1024, intermediate_size=2048, num_hidden_layers=2
    )
    census = staging_buffers(sizes_in_half_precision(config), blocks_in_flight=8)
    assert census.exact_bytes == sum(
        s.nbytes for s in sizes_in_half_precision(config) if s.nbytes >= 1 << 20
    )


def test_small_parameters_and_empty_models_need_no_buffers():
    assert staging_buffers([NamedSize("norm.weight", 4096)]).exact_bytes == 0
    assert staging_buffers([]).one_size_bytes == 0


def test_blocks_that_differ_take_the_largest_need():
    shapes = [
        NamedSize("layers.0.a", 4 << 20),
        NamedSize("layers.1.a", 4 << 20),
        NamedSize("layers.1.b", 4 << 20),
    ]
    assert staging_buffers(shapes, 1).classes[0].buffers == 2
