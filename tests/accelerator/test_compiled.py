"""Compiled models are the same; what captures a CUDA graph is refused with what to do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from offload_strategy import OffloadEngine
from offload_strategy.errors import OffloadError
from tests.accelerator.support import DEVICE, batch, loss_of, make, needs_cuda
from tests.training import (
    Numbers,
    activations_only,
    backward_history,
    same_with_and_without,
    settings,
)

pytestmark = needs_cuda


def each_block(model: Any) -> Any:
    for block in model.blocks:
        block.compile()
    return model


WAYS: dict[str, Callable[[nn.Module], Any]] = {"whole": torch.compile, "each block": each_block}


@pytest.mark.parametrize("way", WAYS)
def test_a_compiled_model_is_the_same(disk: Path, way: str) -> None:
    pytest.importorskip("triton", reason="torch.compile needs it on CUDA")

    def run(engine: OffloadEngine | None) -> list[Numbers]:
        torch.compiler.reset()
        base = make(dropout=False)
        compiled = WAYS[way](base)
        if engine is not None:
            engine.attach(compiled)
        return backward_history(base, lambda step: loss_of(compiled, step))

    figures = same_with_and_without(run, settings(disk, optimizer={"enabled": False}))
    assert figures["offload/activations/written_bytes"] > 0
    torch.compiler.reset()


def on_another_stream(run: Callable[[], Any]) -> None:
    """What CUDA wants before a graph is captured."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)


def test_a_cuda_graph_of_a_step_is_refused(disk: Path) -> None:
    with activations_only(disk) as engine:
        model = make(engine=engine)
        inputs = batch(0)
        on_another_stream(lambda: model(inputs).sum().backward())
        torch.accelerator.synchronize()
        graph = torch.cuda.CUDAGraph()
        with (
            pytest.raises(OffloadError, match="CUDA graph"),
            torch.cuda.graph(graph),
        ):
            model(inputs)
        torch.accelerator.synchronize()
        loss_of(model, 1).backward()  # it goes on without


def test_a_cuda_graph_without_gradients_is_no_concern(disk: Path) -> None:
    with activations_only(disk) as engine:
        model = make(engine=engine).eval()
        inputs = torch.zeros_like(batch(0))
        with torch.no_grad():
            on_another_stream(lambda: model(inputs))
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                output = model(inputs)
            inputs.copy_(batch(3))
            graph.replay()
            torch.accelerator.synchronize()
            assert torch.equal(output, model(batch(3)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_model_in_half_precision_is_the_same(disk: Path, dtype: torch.dtype) -> None:
    def run(engine: OffloadEngine | None) -> list[Numbers]:
        model = make().to(dtype)
        if engine is not None:
            engine.attach(model)
        return backward_history(
            model, lambda step: model(batch(step).to(dtype)).float().pow(2).mean()
        )

    assert next(make().parameters()).device.type == DEVICE
    same_with_and_without(run, settings(disk, optimizer={"enabled": False}))
