"""Every code block of the pages in Start and Tutorials runs, in the order of its page."""

from importlib.util import find_spec

import pytest

from tests.docs.reader import Reader, blocks_of, missing
from tests.module_map import ROOT

DOCS = ROOT / "docs"
PAGES = [DOCS / "index.md", DOCS / "start.md", *sorted((DOCS / "tutorials").glob("*.md"))]
NEEDED = ("accelerate", "lightning", "transformers")

pytestmark = pytest.mark.skipif(not DOCS.is_dir(), reason="needs the source tree")


@pytest.mark.slow
@pytest.mark.timeout(1200)  # a minute of work, most of it imports, where others use the machine
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_reader_can_follow_the_page(page, tmp_path, record_property):
    for package in NEEDED:  # not imported, as the reader's processes are the ones that need them
        if find_spec(package) is None:
            pytest.skip(f"needs {package}")
    reader = Reader(tmp_path, tmp_path / "mnt")
    for block in blocks_of(page):
        reader.follow(block)
    assert reader.followed > 0 or page.stem == "index"
    assert reader.unused() == set(), "files that a reader saves and never uses"
    opened = [line for line in page.read_text().splitlines() if line.strip().startswith("```")]
    assert 2 * reader.followed == len(opened), "blocks that were not run"
    record_property("executed_blocks", reader.followed)


def test_what_a_page_shows_is_compared_without_figures_and_in_order():
    printed = "step 0  loss 1.25\nstep 1  loss 0.5\nread 3.5 GiB in 2 s\n"
    assert missing(["step 0  loss 9.0", "...", "read 12 MiB in 10 ms"], printed) == []
    assert missing(["read 1 GiB in 1 s", "step 0  loss 1"], printed) == ["step 0  loss 1"]
    assert missing(["step 0...", "read 3 GiB..."], printed) == []
    assert missing(["step 0  accuracy 1"], printed) == ["step 0  accuracy 1"]
