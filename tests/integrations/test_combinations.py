"""What combines with what, each against the same training without offload, to the last bit.

`SSD_OFFLOAD_COMBINATIONS=docs/combinations.md` in the environment writes the tables in that file
anew, from what was found.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.distributed.ranks import run_ranks
from tests.integrations.accelerate_runs import _fresh_accelerate
from tests.integrations.combination_ways import IN_ONE_PROCESS, ways_of_ranks
from tests.integrations.combinations import Way, verdicts

__all__ = ["_fresh_accelerate"]

DOCUMENT = Path(__file__).parents[2] / "docs" / "combinations.md"
VARIABLE = "SSD_OFFLOAD_COMBINATIONS"
BEGIN, END = "<!-- combinations: begin -->\n", "<!-- combinations: end -->\n"
IN_RANKS = ways_of_ranks(rank=0)
WAYS = {**IN_ONE_PROCESS, **IN_RANKS}


@pytest.fixture(scope="module")
def sections() -> Iterator[dict[str, str]]:
    """Sections of the document, of the ways that were tried; written at the end, if wanted."""
    found: dict[str, str] = {}
    yield found
    if (target := os.environ.get(VARIABLE)) and len(found) == len(WAYS):
        file = Path(target)
        before, rest = file.read_text().split(BEGIN)
        tables = "\n".join(found[name] for name in WAYS)
        file.write_text(before + BEGIN + tables + END + rest.split(END)[1])


def check(way: Way, found: list[str], sections: dict[str, str]) -> None:
    """Fail unless all was as it is to be, and as the document says."""
    lines = [f"## {way.name}", "", way.how, "", f"| {' | '.join(way.axes)} | verdict |"]
    lines.append("|---" * (len(way.axes) + 1) + "|")
    wrong = []
    for one, verdict in zip(way.combinations(), found, strict=True):
        refusal = way.refusal(one)
        expected = "identical" if refusal is None else f"refused: {refusal.summary}"
        if verdict != expected:
            wrong.append((one, verdict))
        values = (getattr(one, axis) for axis in way.axes)
        lines.append(f"| {' | '.join(values)} | {verdict} |")
    assert wrong == []
    sections[way.name] = "\n".join(lines) + "\n"
    if not os.environ.get(VARIABLE):
        assert sections[way.name] in documented()


def documented() -> str:
    return DOCUMENT.read_text().split(BEGIN)[1].split(END)[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", IN_ONE_PROCESS)
def test_in_one_process(name: str, sections: dict[str, str], tmp_path: Path) -> None:
    way = IN_ONE_PROCESS[name]
    check(way, list(verdicts(way, tmp_path).values()), sections)


@pytest.mark.slow
def test_in_two_ranks(sections: dict[str, str], tmp_path: Path) -> None:
    first, second = run_ranks("tests.integrations.combination_ways:in_ranks", tmp_path)
    assert first == second
    for name, way in IN_RANKS.items():
        check(way, first[name], sections)


def test_the_document_has_the_ways_that_are_tried_and_no_others() -> None:
    headings = [line[3:] for line in documented().splitlines() if line.startswith("## ")]
    assert headings == list(WAYS)
