from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from offload_strategy.store.tiers import STRIPE_BYTES, STRIPE_UNIT, deal
from offload_strategy.units import GiB, MiB

paths = st.lists(st.tuples(st.integers(0, 4 * GiB), st.floats(1e6, 1e10)), min_size=1, max_size=6)


@given(nbytes=st.integers(1, 2 * GiB), paths=paths)
def test_every_byte_is_dealt_once(nbytes, paths):
    parts = deal(nbytes, [live for live, _ in paths], [weight for _, weight in paths])
    assert sum(parts) == nbytes
    assert min(parts) >= 0
    odd = [part for part in parts if part % STRIPE_UNIT]
    assert len(odd) <= 1


@given(paths=st.lists(st.floats(1.0, 100.0), min_size=1, max_size=6), tickets=st.integers(1, 60))
def test_what_is_alive_is_in_proportion_to_bandwidth(paths, tickets):
    live = [0] * len(paths)
    for _ in range(tickets):
        for index, part in enumerate(deal(64 * MiB, live, paths)):
            live[index] += part
    total = sum(live)
    for index, weight in enumerate(paths):
        fair = total * weight / sum(paths)
        assert abs(live[index] - fair) <= 2 * STRIPE_UNIT


@given(paths=st.lists(st.floats(1.0, 100.0), min_size=2, max_size=5))
def test_small_tickets_stay_whole_and_keep_the_proportion(paths):
    live = [0] * len(paths)
    nbytes = STRIPE_BYTES - 1
    for _ in range(200):
        parts = deal(nbytes, live, paths)
        assert sorted(parts)[:-1] == [0] * (len(paths) - 1)
        live[parts.index(nbytes)] += nbytes
    for index, weight in enumerate(paths):
        assert abs(live[index] / nbytes - 200 * weight / sum(paths)) <= len(paths)
