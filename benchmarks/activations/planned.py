"""A plan for a limit of memory, compared with fixed amounts that leave."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.activations.contenders import KEEP, OFFLOAD_DISK
from benchmarks.activations.session import Rows, Setting, run
from benchmarks.disks import loop_disk, throttle, why_not
from benchmarks.io.results import Result, Skipped
from benchmarks.machine import say
from offload_strategy.units import GiB, MiB

_RATE = 150_000_000
_DISK_BYTES = 48 * GiB
_PLAN, _TIGHT = "plan", "plan, greedy's peak"
#: All of it leaves as soon as it is saved, whatever the path takes.
_GREEDY = "100%"
#: Fixed policies: shares of what is saved that leave, spread evenly over the forward pass.
_SHARES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
#: The limit lies so far between everything leaving and everything staying.
_BETWEEN = 0.5
#: Steps of the plan's process before its first turn: in them the plan is made.
_SETTLE = 14
#: Of the best fixed policy's speed, and of greedy's.
_SPEED, _SPEED_OF_GREEDY = 0.98, 1.15
#: Peaks of the same process differ by so much from step to step.
_SAME_PEAK = 1.02


def planned(
    directory: Path, model: str, batch: int, repeats: int, setting: Setting
) -> tuple[str, list[Result]]:
    """Train with `planning.device_memory`, and with ten fixed amounts, on a path of 150 MB/s.

    The limit lies midway between the peaks of a process that keeps all and of one that gives all
    away. A fixed amount counts if it stays below. Another plan gets no more than the peak of the
    one that gives all away at once (greedy), and must be faster.

    Returns:
        The table, and the claims.
    """
    reason = why_not()
    if reason is not None:
        raise Skipped(reason)
    setting = replace(setting, memory={"pinned": "256MiB"})
    options = setting.options(model, batch)
    keep = {**options, "contender": KEEP}
    ours = {**options, "contender": OFFLOAD_DISK}
    fixed = {
        f"{share:.0%}": {**ours, "activations": {"budget": f"{share:.0%}"}} for share in _SHARES
    }
    with _slow_disk(directory) as disk:
        limit, least = _limit(keep, fixed[_GREEDY], disk)
        plans = {
            name: {**ours, "planning": {"device_memory": nbytes}, "settle": _SETTLE}
            for name, nbytes in ((_PLAN, limit), (_TIGHT, int(_SAME_PEAK * least)))
        }
        rows = run({KEEP: keep, **plans, **fixed}, repeats, disk)
    return _table(rows, limit), _claims(model, rows, limit)


@contextlib.contextmanager
def _slow_disk(directory: Path) -> Iterator[Path]:
    """Yield a directory on a disk of 150 MB/s in each direction."""
    with (
        tempfile.TemporaryDirectory(dir=directory) as folder,
        loop_disk(Path(folder), _DISK_BYTES) as disk,
        throttle() as limits,
    ):
        limits.limit(disk, read=_RATE, write=_RATE)
        with limits.entered():
            yield disk.directory


def _limit(keep: dict[str, Any], greedy: dict[str, Any], disk: Path) -> tuple[int, float]:
    """Return a limit between the peaks of keeping and of offloading all, and the latter."""
    say("peaks of keeping and of offloading everything")
    ends = run({KEEP: keep, _GREEDY: {**greedy, "settle": 0}}, 2, disk)
    most, least = (ends[name].median("process_peak_bytes") for name in (KEEP, _GREEDY))
    limit = int(least + _BETWEEN * (most - least))
    say(f"alternating, within {limit / MiB:.0f} MiB")
    return limit, least


def _claims(model: str, rows: dict[str, Rows], limit: int) -> list[Result]:
    plan = rows[_PLAN]
    below = [
        row
        for name, row in rows.items()
        if name not in (KEEP, _PLAN, _TIGHT) and row.median("process_peak_bytes") <= limit
    ]
    peak = plan.median("process_peak_bytes")
    claims = [
        Result(
            f"{model}: peak of the plan relative to its limit",
            peak / MiB, limit / MiB, "MiB", peak / limit, 1.0, at_least=False,
        ),
    ]  # fmt: skip
    if below:
        best = min(below, key=lambda row: row.median("seconds"))
        claims.append(
            Result(
                f"{model}: speed of the plan relative to the best fixed amount ({best.name})",
                1 / plan.median("seconds"), 1 / best.median("seconds"), "steps/s",
                best.ratio(plan, "seconds"), _SPEED,
            )
        )  # fmt: skip
    tight, greedy = rows[_TIGHT], rows[_GREEDY]
    peaks = [row.median("process_peak_bytes") for row in (tight, greedy)]
    claims += [
        Result(
            f"{model}: speed of a plan within greedy's peak relative to greedy",
            1 / tight.median("seconds"), 1 / greedy.median("seconds"), "steps/s",
            greedy.ratio(tight, "seconds"), _SPEED_OF_GREEDY,
        ),
        Result(
            f"{model}: its peak relative to greedy's",
            peaks[0] / MiB, peaks[1] / MiB, "MiB", peaks[0] / peaks[1], _SAME_PEAK, at_least=False,
        ),
    ]  # fmt: skip
    return claims


def _table(rows: dict[str, Rows], limit: int) -> str:
    keep = rows[KEEP]
    lines = [
        f"the limit is {limit / MiB:.0f} MiB",
        "",
        "| policy | left, MiB | step, s | of keep's speed | peak of the process, MiB | stall, s |",
        "|---|---|---|---|---|---|",
    ]
    for name, row in rows.items():
        left = 0.0 if name == KEEP else row.moved("read")
        lines.append(
            f"| {name} | {left / MiB:.0f} | {row.median('seconds'):.3f} "
            f"| {keep.ratio(row, 'seconds'):.3f} | {row.median('process_peak_bytes') / MiB:.0f} "
            f"| {row.stalled():.2f} |"
        )
    return "\n".join(lines)
