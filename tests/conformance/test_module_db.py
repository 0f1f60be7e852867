"""torch's own samples of every module, under activation offload."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.parameter import is_lazy
from torch.testing._internal.common_modules import module_db

from offload_strategy import OffloadEngine
from tests.conformance.saved_tensors import Call, Comparison, engine, enlarged, fits, slow_engine
from tests.conformance.selection import selected

__all__ = ["engine", "slow_engine"]

MODULES = {info.name: info for info in module_db}


def each(name: str, dtype: torch.dtype, call: Callable[[str, Any, Any], None]) -> None:
    """Call with every sample of a module: what it is named, the module, and its inputs."""
    info = MODULES[name]
    samples = info.module_inputs_func(
        info, device="cpu", dtype=dtype, requires_grad=True, training=True
    )
    for number, sample in enumerate(samples):
        made, given = sample.constructor_input, sample.forward_input
        if given is None:
            continue
        torch.manual_seed(0)
        module = info.module_cls(*made.args, **made.kwargs).to(dtype).train()
        if any(map(is_lazy, (*module.parameters(), *module.buffers()))):
            with torch.no_grad():
                module(*given.args, **given.kwargs)
        call(f"{dtype}, sample {number}", module, (given.args, given.kwargs))


def add(comparison: Comparison, label: str, module: Any, inputs: Any) -> None:
    """Compare a call of a module."""
    args, kwargs = inputs
    before = {key: value.clone() for key, value in module.state_dict().items()}

    def call() -> Any:
        module.load_state_dict(before)  # running statistics
        return module(*args, **kwargs)

    comparison.add(label, Call(call, (inputs, list(module.parameters()))))


@pytest.mark.parametrize("name", selected(MODULES))
def test_every_sample_of_a_module_is_the_same(name: str, engine: OffloadEngine) -> None:
    comparison = Comparison(engine)
    for dtype in (torch.float32, torch.float64):
        each(name, dtype, lambda *sample: add(comparison, *sample))
    assert comparison.different == []


@pytest.mark.parametrize("name", selected(MODULES))
def test_a_module_on_large_inputs_is_the_same(name: str, slow_engine: OffloadEngine) -> None:
    """On a slow path, whose writes begin late and whose reads end late."""
    comparison = Comparison(slow_engine)

    def add_large(label: str, module: Any, inputs: Any) -> None:
        # Recurrent modules would take long for long sequences: their batch is large.
        recurrent = isinstance(module, torch.nn.RNNBase)
        if recurrent and inputs[0][0].ndim < 3:
            return
        large = enlarged(*inputs, dim=int(recurrent and not module.batch_first))
        if large is not None and comparison.compared < 6 and (recurrent or fits(module, *large)):
            add(comparison, label, module, large)

    each(name, torch.float32, add_large)
    assert comparison.different == []
