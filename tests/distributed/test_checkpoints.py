"""Checkpoints of two data-parallel ranks go on with one and with four, with offload or without."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.distributed.ranks import run_ranks
from tests.distributed.resharded_runs import KINDS, kinds_of_runs, same_files

_NUMBERS = ("losses", "weights", "states")


def test_checkpoints_of_two_ranks_go_on_as_plain_ones_with_one_rank_and_with_four(
    tmp_path: Path,
) -> None:
    tier = tmp_path / "tier"
    tier.mkdir()
    where = "tests.distributed.resharded_runs:everything"
    for size, sources in ((2, [None]), (1, [False, True]), (4, [False, True])):
        ranks = run_ranks(where, tmp_path, size, group=size > 1, sources=sources)
        for kind in KINDS:
            runs = kinds_of_runs(size, kind, sources)
            for offload, of in runs:
                plain = _numbers(ranks, kind, *runs[0])
                assert _numbers(ranks, kind, offload, of) == plain, (kind, size, offload, of)
                assert len({str(each["weights"]) for each in plain}) == 1
                if offload:
                    moved = [each["moved"] for each in _runs(ranks, kind, True, of)]
                    assert all(sum(client) > 0 for client in zip(*moved, strict=True))
        assert same_files(tmp_path)
    assert list(tier.iterdir()) == []


def _runs(ranks: list[Any], kind: str, offload: bool, of: bool | None) -> list[dict[str, Any]]:
    return [rank[json.dumps([kind, offload, of])] for rank in ranks]


def _numbers(ranks: list[Any], kind: str, offload: bool, of: bool | None) -> list[dict[str, Any]]:
    runs = _runs(ranks, kind, offload, of)
    return [{name: run[name] for name in _NUMBERS} for run in runs]
