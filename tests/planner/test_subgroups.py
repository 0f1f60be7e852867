"""MLP-Offload's equation 1, and its 2 : 1."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload_strategy.errors import ConfigError
from tests.planner.zero_subgroups import split_subgroups


def test_two_to_one_is_what_three_subgroups_give():
    assert split_subgroups(3, [5.3, 3.6]) == [2, 1]


def test_with_many_subgroups_it_is_less_than_two_to_one():
    nvme, pfs = split_subgroups(1000, [5.3, 3.6])
    assert nvme / pfs == pytest.approx(5.3 / 3.6, rel=0.01)
    assert nvme / pfs == pytest.approx(1.47, abs=0.01)
    # By the rates of reading it would be the 2 : 1 that the paper writes.
    nvme, pfs = split_subgroups(1000, [6.9, 3.6])
    assert nvme / pfs == pytest.approx(2, rel=0.05)


@given(st.integers(0, 500), st.lists(st.floats(0.01, 100), min_size=1, max_size=6))
def test_all_are_dealt_and_each_path_is_within_one_of_its_part(count, rates):
    dealt = split_subgroups(count, rates)
    assert sum(dealt) == count
    for got, rate in zip(dealt, rates, strict=True):
        assert got >= 0
        assert got < count * rate / sum(rates) + 1 + 1e-9


def test_a_path_without_bandwidth_gets_none():
    assert split_subgroups(7, [1, 0, 1]) in ([3, 0, 4], [4, 0, 3])


def test_nonsense_is_refused():
    with pytest.raises(ConfigError, match="there are -1 to deal"):
        split_subgroups(-1, [1])
    with pytest.raises(ConfigError, match="no path to deal them to"):
        split_subgroups(1, [])
    with pytest.raises(ConfigError, match="bandwidth 1 is -2"):
        split_subgroups(1, [1, -2])
    with pytest.raises(ConfigError, match="sum of all bandwidths is 0"):
        split_subgroups(1, [0, 0])
