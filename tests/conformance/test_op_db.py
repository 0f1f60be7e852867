"""torch's own samples of every operator that has a derivative, under activation offload."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db

from offload_strategy import OffloadEngine
from tests.conformance.saved_tensors import Call, Comparison, engine, enlarged, fits, slow_engine
from tests.conformance.selection import selected

__all__ = ["engine", "slow_engine"]

OPERATORS = {
    op.full_name: op
    for op in op_db
    # The solutions of plain PyTorch's `lstsq` differ from call to call.
    if op.supports_autograd and not op.full_name.startswith("linalg.lstsq")
}
#: They make a tensor of every row, or of a few.
OF_ROWS = {"unbind", "unbind_copy", "nn.functional.linear_cross_entropy.chunked"}


def dtypes(op: Any) -> list[torch.dtype]:
    """float32, and one more for what is different there: lazy conjugates, other kernels."""
    backward = op.supported_backward_dtypes("cpu")
    others = [d for d in (torch.complex64, torch.bfloat16, torch.float64) if d in backward]
    return [d for d in (torch.float32, *others[:1]) if d in backward]


def add(comparison: Comparison, label: str, op: Any, args: Any, kwargs: Any, twice: bool) -> None:
    """Compare a call, and one of the operator's form that changes its input in place."""
    comparison.add(label, Call(lambda: op(*args, **kwargs), (args, kwargs), twice))
    in_place = op.inplace_variant
    if in_place is not None and isinstance(args[0], torch.Tensor):
        call = Call(lambda: in_place(args[0].clone(), *args[1:], **kwargs), (args, kwargs), twice)
        comparison.add(f"{label} in place", call)


@pytest.mark.parametrize("name", selected(OPERATORS))
def test_every_sample_of_an_operator_is_the_same(name: str, engine: OffloadEngine) -> None:
    op, comparison = OPERATORS[name], Comparison(engine)
    for dtype in dtypes(op):
        for number, sample in enumerate(op.sample_inputs("cpu", dtype, requires_grad=True)):
            label, args = f"{dtype}, sample {number}", (sample.input, *sample.args)
            add(comparison, label, op, args, sample.kwargs, op.supports_gradgrad and number < 3)
    assert comparison.different == []


@pytest.mark.parametrize("name", selected(sorted(OPERATORS.keys() - OF_ROWS)))
def test_an_operator_on_large_inputs_is_the_same(name: str, slow_engine: OffloadEngine) -> None:
    """On a slow path, whose writes begin late and whose reads end late."""
    op, comparison = OPERATORS[name], Comparison(slow_engine)
    for number, sample in enumerate(op.sample_inputs("cpu", torch.float32, requires_grad=True)):
        large = enlarged((sample.input, *sample.args), sample.kwargs)
        if large is not None and fits(op, *large):
            add(comparison, f"sample {number}", op, *large, twice=False)
        if comparison.compared >= 4:
            break
    assert comparison.different == []
