"""The one-pass overflow check against PyTorch's own, value by value."""

from __future__ import annotations

import pytest
import torch

from offload_strategy.optimizer.gradients.gradient_backing import has_overflow

INTEGERS = {8: torch.int64, 4: torch.int32, 2: torch.int16}
EXPONENT_BITS = {torch.float64: 11, torch.float32: 8, torch.float16: 5, torch.bfloat16: 8}


def _special_values(dtype: torch.dtype) -> list[torch.Tensor]:
    """From their bits, as a signalling NaN would not survive a conversion."""
    width = 8 * dtype.itemsize
    mantissa_bits = width - 1 - EXPONENT_BITS[dtype]
    mantissa = (1 << mantissa_bits) - 1
    infinity = ((1 << EXPONENT_BITS[dtype]) - 1) << mantissa_bits
    finite = (0, 1, mantissa, 1 << mantissa_bits, infinity - 1)
    nan = (infinity | 1, infinity | mantissa >> 1, infinity | 1 << (mantissa_bits - 1))
    bits = [*finite, infinity, *nan, infinity | mantissa]
    bits += [each - (1 << (width - 1)) for each in bits]  # the sign bit
    # Finite in fp32 and bf16, though its square is not; infinite in fp16.
    large = torch.tensor([1e30]).to(dtype)
    return [*torch.tensor(bits, dtype=INTEGERS[dtype.itemsize]).view(dtype).split(1), large]


@pytest.mark.parametrize("dtype", EXPONENT_BITS, ids=str)
def test_every_special_value_gets_torchs_verdict_wherever_it_is(dtype: torch.dtype) -> None:
    values = _special_values(dtype)
    verdicts = [bool(value.isinf() | value.isnan()) for value in values]
    assert sum(verdicts) == 10 + (dtype is torch.float16)
    assert not has_overflow(torch.zeros(3, 0, dtype=dtype).t())
    for size in (1, 2, 7, 16, 33, 65, 1000):
        tensor = torch.randn(size).to(dtype)
        assert not has_overflow(tensor)
        for position in range(0, size, max(1, size // 40)):
            before = tensor[position].clone()
            for value, verdict in zip(values, verdicts, strict=True):
                tensor[position] = value[0]
                assert has_overflow(tensor) == verdict, f"{value} at {position} of {size}"
            tensor[position] = before


@pytest.mark.parametrize("layout", ["dense", "permuted", "with gaps"])
def test_any_layout_in_memory_without_a_copy_of_dense_ones(
    layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []
    aminmax = torch.aminmax
    monkeypatch.setattr(torch, "aminmax", lambda v: (seen.append(v.is_contiguous()), aminmax(v))[1])
    # So large that the work is split over threads.
    tensor = torch.randn(303, 50, 67)
    view = {"dense": tensor, "permuted": tensor.permute(2, 0, 1), "with gaps": tensor[:, 1::2]}
    inside = view[layout]
    assert not has_overflow(inside)
    for share in (0.0, 0.3, 0.5, 1.0):
        place = tuple(int(share * (size - 1)) for size in inside.shape)
        before = inside[place].clone()
        inside[place] = torch.nan
        assert has_overflow(inside), place
        inside[place] = before
    assert all(seen) == (layout != "with gaps")
