from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from offload_strategy.io.regions import extents as extents_module
from offload_strategy.io.regions.extents import Extent, ExtentAllocator
from offload_strategy.units import PAGE_BYTES

PAGES = 24


class ExtentsAgainstAPageMap(RuleBasedStateMachine):
    """The allocator must agree with a list that says of every page whether it is taken."""

    extents = Bundle("extents")
    patch: pytest.MonkeyPatch | None = None

    def __init__(self) -> None:
        super().__init__()
        self.allocator = ExtentAllocator(PAGES * PAGE_BYTES + 17)
        self.taken = [False] * PAGES

    @initialize(pages=st.sampled_from([3, PAGES + 1]))
    def choose_what_is_large(self, pages: int) -> None:
        self.large_pages = pages
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(extents_module, "LARGE_BYTES", pages * PAGE_BYTES)

    def teardown(self) -> None:
        if self.patch is not None:
            self.patch.undo()

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
        holes = [(length, at) for at, length in self.holes() if length >= pages]
        if not holes:
            assert first == self.last_page(), "a hole is left in front of new pages"
        elif pages >= self.large_pages:
            assert first == min(at for _, at in holes), "not the lowest address"
        else:
            assert first == min(holes)[1], "not the best fit"
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
        free = [(first, first + pages) for first, pages in self.holes()]
        free += [(self.last_page(), PAGES)] * (self.last_page() < PAGES)
        assert list(self.allocator._free) == [(a * PAGE_BYTES, b * PAGE_BYTES) for a, b in free]

    def last_page(self) -> int:
        return max((page + 1 for page, taken in enumerate(self.taken) if taken), default=0)

    def holes(self) -> list[tuple[int, int]]:
        """First page and length of the free runs below the last page that is taken."""
        found, begin = [], 0
        for page, taken in enumerate(self.taken[: self.last_page()]):
            if taken:
                if begin < page:
                    found.append((begin, page - begin))
                begin = page + 1
        return found


ExtentsAgainstAPageMap.TestCase.settings = settings(
    max_examples=80, stateful_step_count=40, deadline=None
)
TestExtentsAgainstAPageMap = ExtentsAgainstAPageMap.TestCase


def test_an_extent_that_is_freed_twice_is_noticed():
    allocator = ExtentAllocator(1 << 20)
    extents = [allocator.allocate(1), allocator.allocate(1)]
    for extent in extents:
        assert extent is not None
        allocator.free(extent)
        with pytest.raises(AssertionError, match="freed twice"):
            allocator.free(extent)
