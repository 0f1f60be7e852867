"""What combines with what, each against the same training without offload, to the last bit.

The rows of `docs/combinations.md` are what is tried.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.ranks import run_ranks
from tests.integrations.accelerate_runs import _fresh_accelerate
from tests.integrations.combination_ways import IN_ONE_PROCESS, ways_of_ranks
from tests.integrations.combinations import DOCUMENT, documented, untried_pairs, verdicts

__all__ = ["_fresh_accelerate"]

WAYS = {**IN_ONE_PROCESS, **ways_of_ranks(rank=0)}


@pytest.mark.slow
@pytest.mark.parametrize("name", IN_ONE_PROCESS)
def test_in_one_process(name: str, tmp_path: Path) -> None:
    assert verdicts(name, IN_ONE_PROCESS[name], tmp_path) == documented(name)


@pytest.mark.slow
def test_in_two_ranks(tmp_path: Path) -> None:
    expected = {name: list(documented(name).values()) for name in ways_of_ranks(rank=0)}
    found = run_ranks("tests.integrations.combination_ways:in_ranks", tmp_path)
    assert found == [expected, expected]


@pytest.mark.parametrize("name", WAYS)
def test_every_pair_of_values_and_every_refusal_is_in_the_document(name: str) -> None:
    assert untried_pairs(name, WAYS[name]) == set()
    told = set(documented(name).values()) - {"identical"}
    assert told == {f"refused: {summary}" for summary in WAYS[name].refusals}


def test_the_document_has_no_other_ways() -> None:
    headings = [line[3:] for line in DOCUMENT.read_text().splitlines() if line[:3] == "## "]
    assert headings == list(WAYS)
