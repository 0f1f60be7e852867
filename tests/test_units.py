"""Sizes and counts, as text and as numbers."""

import pytest
from hypothesis import given, settings
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

SIZES: dict[str | int | float, int] = {
    "512 mib": 536_870_912,
    "512MB": 512_000_000,
    "1.5GiB": 1_610_612_736,
    "1e3 KB": 1_000_000,
    "0.1TB": 100_000_000_000,
    "1_000": 1000,
    "4096 B": 4096,
    4096.0: 4096,
    0: 0,
}

#: What is no size, by what the message says of it.
NO_SIZES = {
    "MiB": ["512M"],
    "GiB": ["4g"],
    "parsecs": ["12 parsecs"],
    "negative": ["-1GiB", -1],
    "whole number of bytes": ["1.5", 1.5],
    "512MiB": ["", "MiB", "1..5GiB", float("nan"), float("inf"), "1e999999999", True, None, [1]],
}


@pytest.mark.parametrize("text", SIZES)
def test_a_size_is_read_in_every_notation(text):
    assert parse_size(text) == SIZES[text]


@pytest.mark.parametrize("words", NO_SIZES)
def test_what_is_no_size_is_refused_and_the_message_says_what_is(words):
    for value in NO_SIZES[words]:
        with pytest.raises(ValueError, match=words):
            parse_size(value)  # type: ignore[arg-type]


@settings(deadline=None)
@given(st.integers(min_value=0, max_value=2**60))
def test_an_exact_size_reads_back_as_the_same_number(size):
    assert parse_size(exact_size(size)) == size


@settings(deadline=None)
@given(st.integers(min_value=0, max_value=2**50))
def test_a_size_for_people_is_within_five_percent(size):
    assert parse_size(format_size(size)) == pytest.approx(size, rel=0.05, abs=0.5)


def test_a_size_is_written_for_people():
    sizes = [0, 1023, KiB, 1536, 512 * MiB, MiB - 1, 3 * GiB // 2, 5000 * GiB, -2 * MiB]
    written = "0 B, 1023 B, 1 KiB, 1.5 KiB, 512 MiB, 1 MiB, 1.5 GiB, 4.9 TiB, -2 MiB"
    assert ", ".join(map(format_size, sizes)) == written


@pytest.mark.parametrize(
    ("value", "count"),
    [("100M", 100_000_000), ("1.5B", 1_500_000_000), ("20k", 20_000), (7, 7), ("7", 7)],
)
def test_a_number_of_parameters_is_read(value, count):
    assert parse_count(value) == count


@pytest.mark.parametrize("value", ["1.5", "100MiB", "many", True, -1])
def test_what_is_no_number_of_parameters_is_refused(value):
    with pytest.raises(ValueError, match=r"parameters|unit|negative"):
        parse_count(value)  # type: ignore[arg-type]


@settings(deadline=None)
@given(st.integers(min_value=0, max_value=2**50), st.sampled_from([1, 64, PAGE_BYTES, 2 * MiB]))
def test_rounding_up_gives_the_next_multiple(size, multiple):
    rounded = round_up(size, multiple)
    assert rounded % multiple == 0
    assert size <= rounded < size + multiple
