"""Compiled models: the same to the last bit as compiled without offload, and as many graphs.

A compiled region saves what its partitioner chose, as a few large tensors, through the same hooks.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
import torch._inductor.config
from torch import nn
from torch._dynamo.utils import counters

from offload_strategy import OffloadEngine
from tests.activations.zoo import ZOO, build
from tests.activations.zoo.training import SCHEDULES, compare

pytest.importorskip("transformers")

BOTH = [SCHEDULES["accumulation 1"], SCHEDULES["three forwards first"]]


@pytest.fixture(scope="module", autouse=True)
def _compiled_code_goes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with (
        pytest.MonkeyPatch.context() as patch,
        torch._inductor.config.patch(compile_threads=1),  # no pool of processes
        torch._dynamo.config.patch(allow_rnn=True),  # else Dynamo makes no graph of an LSTM
    ):
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("compiled")))
        yield
        torch._dynamo.reset()


class Graphs:
    """How many graphs Dynamo has made, model by model."""

    def __init__(self) -> None:
        self._of_earlier: list[int] = []

    def begin(self) -> None:
        """From here on, another model is compiled, afresh."""
        self._of_earlier.append(self._now)
        torch._dynamo.reset()
        counters.clear()

    @property
    def _now(self) -> int:
        return counters["stats"]["unique_graphs"]

    def assert_the_same_without_and_with_offload(self) -> None:
        """Fail if there were none, or if offload made Dynamo compile more or less."""
        _, without = self._of_earlier
        assert without > 0
        assert self._now == without


@pytest.fixture
def graphs() -> Graphs:
    return Graphs()


def compiled(graphs: Graphs, model: nn.Module, backend: str, **options: Any) -> Any:
    graphs.begin()
    return torch.compile(model, backend=backend, **options)


@pytest.mark.parametrize("kind", ZOO)
def test_a_compiled_model_is_the_same(kind: str, disk: Path, graphs: Graphs) -> None:
    result = compare(lambda: compiled(graphs, build(kind), "aot_eager"), kind, disk, BOTH)
    result.assert_nearly_everything_left()
    graphs.assert_the_same_without_and_with_offload()


def _of_one_layer(kind: str) -> Any:
    """A transformer whose second layer, which would be the same kernels again, is left out."""
    model = build(kind)
    (layers,) = (part for part in model.modules() if isinstance(part, nn.ModuleList))
    del layers[1:]
    return model


#: What a compiler of C++ takes long for is as small as can be.
SMALL = {"BERT": lambda: _of_one_layer("BERT"), "ResNet": lambda: build("ResNet")}


@pytest.mark.slow
@pytest.mark.parametrize("kind", SMALL)
def test_generated_kernels_get_the_same_inputs(kind: str, disk: Path, graphs: Graphs) -> None:
    result = compare(lambda: compiled(graphs, SMALL[kind](), "inductor"), kind, disk, BOTH)
    result.assert_nearly_everything_left()
    graphs.assert_the_same_without_and_with_offload()


@pytest.mark.parametrize("kind", ["Llama", "T5", "ViT", "UNet"])
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable:FutureWarning")
def test_a_compiled_model_with_checkpointing_is_the_same(
    kind: str, disk: Path, graphs: Graphs
) -> None:
    def make() -> Any:
        return compiled(graphs, build(kind, reentrant=False), "aot_eager")

    result = compare(make, kind, disk, BOTH)
    result.assert_nearly_everything_left()
    graphs.assert_the_same_without_and_with_offload()


@pytest.mark.slow
def test_texts_of_any_length_share_one_graph(disk: Path, graphs: Graphs) -> None:
    def make() -> Any:
        return compiled(graphs, _of_one_layer("Qwen2"), "inductor", dynamic=True)

    result = compare(make, "Qwen2", disk, BOTH, length_of=lambda number: 5 + 3 * number % 11)
    result.assert_nearly_everything_left()
    graphs.assert_the_same_without_and_with_offload()


@pytest.mark.slow
def test_blocks_that_are_compiled_one_by_one_are_the_same(disk: Path, graphs: Graphs) -> None:
    def make() -> Any:
        graphs.begin()
        model = build("diffusion transformer")
        for block in model.blocks:
            block.compile(backend="inductor")
        return model

    result = compare(make, "diffusion transformer", disk, BOTH)
    result.assert_nearly_everything_left()
    graphs.assert_the_same_without_and_with_offload()


def _compiled_in_place(graphs: Graphs) -> Any:
    graphs.begin()
    model = build("BERT")
    model.compile(backend="aot_eager")
    return model


def test_a_model_may_be_attached_before_it_is_compiled(disk: Path, graphs: Graphs) -> None:
    def attach_inner(engine: OffloadEngine, model: Any) -> None:
        engine.attach(model._orig_mod)

    def make() -> Any:
        return compiled(graphs, build("BERT"), "aot_eager")

    result = compare(make, "BERT", disk, BOTH, attach=attach_inner)
    result.assert_nearly_everything_left()
    graphs.assert_the_same_without_and_with_offload()


def test_a_model_may_be_compiled_in_place(disk: Path, graphs: Graphs) -> None:
    result = compare(lambda: _compiled_in_place(graphs), "BERT", disk, BOTH)
    result.assert_nearly_everything_left()
    graphs.assert_the_same_without_and_with_offload()
