from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from offload_strategy.storage import Extent, ExtentAllocator
from offload_strategy.units import PAGE_BYTES

PAGES = 24


class ExtentsAgainstAPageMap(RuleBasedStateMachine):
    """The allocator must agree with a list that says of every page whether it is taken."""

    extents = Bundle("extents")

    def __init__(self) -> None:
        super().__init__()
        self.allocator = ExtentAllocator(PAGES * PAGE_BYTES + 17)
        self.taken = [False] * PAGES

    @rule(target=extents, nbytes=st.integers(0, 6 * PAGE_BYTES))
    def allocate(self, nbytes: int) -> Extent | None:
        pages = max(1, -(-nbytes // PAGE_BYTES))
        extent = self.allocator.allocate(nbytes)
        if extent is None:
            longest = max(len(run) for run in "".join("x-"[t] for t in self.taken).split("-"))
            assert longest < pages, "refused although a range is long enough"
            return None
        assert extent.nbytes == pages * PAGE_BYTES
        assert extent.offset % PAGE_BYTES == 0
        first = extent.offset // PAGE_BYTES
        assert not any(self.taken[first : first + pages]), "handed out twice"
        assert self.taken[first : first + pages] == [False] * pages, "beyond the capacity"
        assert "x" * pages not in "".join("x-"[t] for t in self.taken[: first + pages - 1])
        self.taken[first : first + pages] = [True] * pages
        return extent

    @rule(extent=consumes(extents))
    def free(self, extent: Extent | None) -> None:
        if extent is None:
            return
        first, pages = extent.offset // PAGE_BYTES, extent.nbytes // PAGE_BYTES
        self.allocator.free(extent)
        self.taken[first : first + pages] = [False] * pages

    @invariant()
    def figures_agree(self) -> None:
        assert self.allocator.used_bytes == sum(self.taken) * PAGE_BYTES
        last = max((page + 1 for page, taken in enumerate(self.taken) if taken), default=0)
        assert self.allocator.high_water == last * PAGE_BYTES
        below = "".join("x-"[t] for t in self.taken[:last])
        assert self.allocator.free_ranges == len([run for run in below.split("-") if run])


ExtentsAgainstAPageMap.TestCase.settings = settings(
    max_examples=40, stateful_step_count=40, deadline=None
)
TestExtentsAgainstAPageMap = ExtentsAgainstAPageMap.TestCase


def test_a_pattern_that_repeats_lands_in_the_same_places() -> None:
    allocator = ExtentAllocator(1 << 30)
    places = []
    for _ in range(3):
        extents = [allocator.allocate(size * 1000) for size in range(1, 50)]
        assert None not in extents
        places.append(extents)
        for extent in extents:
            assert extent is not None
            allocator.free(extent)
    assert places[0] == places[1] == places[2]
    assert allocator.high_water == 0


@pytest.mark.parametrize("others", [[], [1], [0], [0, 2]])
def test_an_extent_that_is_freed_twice_is_noticed(others: list[int]) -> None:
    allocator = ExtentAllocator(1 << 20)
    extents = [allocator.allocate(1), allocator.allocate(1), allocator.allocate(1)]
    victim = next(index for index in (2, 1) if index not in others)
    for index in (*others, victim):
        allocator.free(extents[index])  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match="freed twice"):
        allocator.free(extents[victim])  # type: ignore[arg-type]
