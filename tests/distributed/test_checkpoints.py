"""Checkpoints of two data-parallel ranks go on with one and with four, with offload or without."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

_SCRIPT = Path(__file__).parent / "resharded.py"
_KINDS = ("loop", "accelerate", "lightning")
_NUMBERS = ("losses", "weights", "states")


def test_checkpoints_of_two_ranks_go_on_as_plain_ones_with_one_rank_and_with_four(
    tmp_path: Path,
) -> None:
    tier = tmp_path / "tier"
    tier.mkdir()
    done = subprocess.run(
        [sys.executable, str(_SCRIPT), str(tmp_path)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    for size, saved in ((2, [None]), (1, [False, True]), (4, [False, True])):
        ranks = [
            json.loads((tmp_path / f"found-{size}-{rank}").read_text()) for rank in range(size)
        ]
        for kind, offload, of in product(_KINDS, (False, True), saved):
            plain = _numbers(ranks, kind, False, None if of is None else False)
            assert _numbers(ranks, kind, offload, of) == plain, (kind, size, offload, of)
            assert len({str(each["weights"]) for each in plain}) == 1
            if offload:
                moved = [each["moved"] for each in _runs(ranks, kind, True, of)]
                assert all(sum(client) > 0 for client in zip(*moved, strict=True))
    assert list(tier.iterdir()) == []


def _runs(ranks: list[Any], kind: str, offload: bool, of: bool | None) -> list[dict[str, Any]]:
    return [rank[json.dumps([kind, offload, of])] for rank in ranks]


def _numbers(ranks: list[Any], kind: str, offload: bool, of: bool | None) -> list[dict[str, Any]]:
    runs = _runs(ranks, kind, offload, of)
    return [{name: run[name] for name in _NUMBERS} for run in runs]
