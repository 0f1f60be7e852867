"""The one-pass overflow check against PyTorch's own, value by value."""

from __future__ import annotations

import pytest
import torch

from offload_strategy.optimizer.gradients.gradient_backing import has_overflow

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
BITS = {torch.float64: torch.int64, torch.float32: torch.int32}
EXPONENT_BITS = {torch.float64: 11, torch.float32: 8, torch.float16: 5, torch.bfloat16: 8}


def torchs_verdict(tensor: torch.Tensor) -> bool:
    return bool(tensor.isinf().any() | tensor.isnan().any())


def from_bits(bits: int, dtype: torch.dtype) -> torch.Tensor:
    """The value with these bits (a signalling NaN would not survive a conversion)."""
    width = 8 * dtype.itemsize
    signed = bits - (1 << width) if bits >> (width - 1) else bits
    return torch.tensor([signed], dtype=BITS.get(dtype, torch.int16)).view(dtype)


def special_values(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    width = 8 * dtype.itemsize
    mantissa_bits = width - 1 - EXPONENT_BITS[dtype]
    mantissa = (1 << mantissa_bits) - 1
    infinity = ((1 << EXPONENT_BITS[dtype]) - 1) << mantissa_bits
    positive = {
        "zero": 0,
        "smallest subnormal": 1,
        "largest subnormal": mantissa,
        "smallest normal": 1 << mantissa_bits,
        "largest": infinity - 1,
        "infinity": infinity,
        "signalling NaN": infinity | 1,
        "another signalling NaN": infinity | (mantissa >> 1),
        "quiet NaN": infinity | (1 << (mantissa_bits - 1)),
        "NaN with every bit set": infinity | mantissa,
    }
    values = {f"+{name}": from_bits(bits, dtype) for name, bits in positive.items()}
    sign = 1 << (width - 1)
    values |= {f"-{name}": from_bits(bits | sign, dtype) for name, bits in positive.items()}
    # Finite in fp32 and bf16, though its square is not; infinite in fp16.
    values["1e30"] = torch.tensor([1e30]).to(dtype)
    return values


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_special_value_gets_torchs_verdict(dtype: torch.dtype) -> None:
    for name, value in special_values(dtype).items():
        expected = torchs_verdict(value)
        assert expected == ("inf" in name or "NaN" in name or not bool(value.isfinite())), name
        assert has_overflow(value) == expected, name
        crowd = torch.randn(1000).to(dtype)
        crowd[123] = value[0]
        assert has_overflow(crowd) == expected, f"{name} among others"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, 2, 7, 8, 9, 15, 16, 17, 31, 33, 63, 65, 129, 1000])
def test_one_bad_value_is_found_wherever_it_is(dtype: torch.dtype, size: int) -> None:
    values = special_values(dtype)
    bad = [values[name] for name in ("+infinity", "-infinity", "+quiet NaN", "-signalling NaN")]
    clean = torch.randn(size).to(dtype)
    assert not has_overflow(clean)
    for position in range(0, size, max(1, size // 40)):
        for value in bad:
            tensor = clean.clone()
            tensor[position] = value[0]
            assert has_overflow(tensor), f"{value} at {position} of {size}"


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


def test_a_dense_tensor_is_checked_without_a_copy() -> None:
    seen: list[bool] = []
    aminmax = torch.aminmax

    def note(values: torch.Tensor) -> object:
        seen.append(values.is_contiguous())
        return aminmax(values)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "aminmax", note)
        assert not has_overflow(torch.zeros(30, 20, 10).permute(2, 0, 1))
    assert seen == [True]


def test_scalars_and_empty_tensors() -> None:
    assert not has_overflow(torch.tensor(1.0))
    assert has_overflow(torch.tensor(torch.inf))
    assert not has_overflow(torch.zeros(0))
    assert not has_overflow(torch.zeros(3, 0).t())
