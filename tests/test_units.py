"""Sizes and counts, as text and as numbers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload_strategy.units import (
    PAGE_BYTES,
    GiB,
    KiB,
    MiB,
    exact_size,
    format_size,
    parse_count,
    parse_size,
    round_up,
)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("512MiB", 536_870_912),
        ("512 mib", 536_870_912),
        ("512MB", 512_000_000),
        ("1.5GiB", 1_610_612_736),
        ("1e3 KB", 1_000_000),
        ("2TiB", 2_199_023_255_552),
        ("0.1TB", 100_000_000_000),
        ("4096", 4096),
        ("4096 B", 4096),
        ("1_000", 1000),
        (4096, 4096),
        (4096.0, 4096),
        (0, 0),
    ],
)
def test_a_size_is_read_in_every_notation(text: str | int | float, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("512M", "MiB"),
        ("4g", "GiB"),
        ("12 parsecs", "parsecs"),
        ("-1GiB", "negative"),
        (-1, "negative"),
        ("", "512MiB"),
        ("MiB", "512MiB"),
        ("1..5GiB", "512MiB"),
        ("1.5", "whole number of bytes"),
        (1.5, "whole number of bytes"),
        (float("nan"), "512MiB"),
        (float("inf"), "512MiB"),
        ("1e999999999", "512MiB"),
        (True, "512MiB"),
        (None, "512MiB"),
        ([1], "512MiB"),
    ],
)
def test_what_is_no_size_is_refused_and_the_message_says_what_is(value: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse_size(value)  # type: ignore[arg-type]


@given(st.integers(min_value=0, max_value=2**60))
def test_an_exact_size_reads_back_as_the_same_number(size: int) -> None:
    assert parse_size(exact_size(size)) == size


@given(st.integers(min_value=0, max_value=2**50))
def test_a_size_for_people_is_within_five_percent(size: int) -> None:
    assert parse_size(format_size(size)) == pytest.approx(size, rel=0.05, abs=0.5)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (KiB, "1 KiB"),
        (1536, "1.5 KiB"),
        (512 * MiB, "512 MiB"),
        (MiB - 1, "1 MiB"),
        (3 * GiB // 2, "1.5 GiB"),
        (5000 * GiB, "4.9 TiB"),
        (-2 * MiB, "-2 MiB"),
    ],
)
def test_a_size_is_written_for_people(size: int, text: str) -> None:
    assert format_size(size) == text


@pytest.mark.parametrize(
    ("value", "count"),
    [("100M", 100_000_000), ("1.5B", 1_500_000_000), ("20k", 20_000), (7, 7), ("7", 7)],
)
def test_a_number_of_parameters_is_read(value: str | int, count: int) -> None:
    assert parse_count(value) == count


@pytest.mark.parametrize("value", ["1.5", "100MiB", "many", True, -1])
def test_what_is_no_number_of_parameters_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match=r"parameters|unit|negative"):
        parse_count(value)  # type: ignore[arg-type]


@given(st.integers(min_value=0, max_value=2**50), st.sampled_from([1, 64, PAGE_BYTES, 2 * MiB]))
def test_rounding_up_gives_the_next_multiple(size: int, multiple: int) -> None:
    rounded = round_up(size, multiple)
    assert rounded % multiple == 0
    assert size <= rounded < size + multiple
