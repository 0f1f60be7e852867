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
    for size in (1, 2, 7, 8, 9, 15, 16, 17, 31, 33, 63, 65, 129, 1000):
        tensor = torch.randn(size).to(dtype)
        assert not has_overflow(tensor)
        for position in range(0, size, max(1, size // 40)):
            before = tensor[position].clone()
            for value, verdict in zip(values, verdicts, strict=True):
                tensor[position] = value[0]
                assert has_overflow(tensor) == verdict, f"{value} at {position} of {size}"
            tensor[position] = before


def test_a_bad_value_is_found_where_the_work_is_split_over_threads() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        tensor = torch.randn(1_000_003)
        assert not has_overflow(tensor)
        for position in (0, 32767, 32768, 500_000, 500_001, 500_002, 1_000_002):
            tensor[position] = torch.nan
            assert has_overflow(tensor), position
            tensor[position] = 0
    finally:
        torch.set_num_threads(threads)


LAYOUTS = {
    "transposed": lambda t: t.t(),
    "channels last": lambda t: t[:600].reshape(2, 3, 10, -1).to(memory_format=torch.channels_last),
    "permuted": lambda t: t[:600].reshape(10, 60, -1).permute(2, 0, 1),
    "with gaps": lambda t: t[:, 1::2],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_in_memory(layout: str) -> None:
    tensor = torch.randn(1000, 700)
    view = LAYOUTS[layout](tensor)
    assert not has_overflow(view)
    last = tuple(size - 1 for size in view.shape)
    for place in (tuple(0 for _ in view.shape), tuple(size // 2 for size in view.shape), last):
        inside = LAYOUTS[layout](tensor.clone())
        inside[place] = torch.nan
        assert has_overflow(inside), place


def test_a_dense_tensor_is_checked_without_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    aminmax = torch.aminmax
    monkeypatch.setattr(torch, "aminmax", lambda v: (seen.append(v.is_contiguous()), aminmax(v))[1])
    assert not has_overflow(torch.zeros(30, 20, 10).permute(2, 0, 1))
    assert seen == [True]


def test_scalars_and_empty_tensors() -> None:
    assert not has_overflow(torch.tensor(1.0))
    assert has_overflow(torch.tensor(torch.inf))
    assert not has_overflow(torch.zeros(0))
    assert not has_overflow(torch.zeros(3, 0).t())
