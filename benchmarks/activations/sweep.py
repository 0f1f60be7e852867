"""`budget: auto` on a slow path, relative to every fixed amount."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.activations.contenders import KEEP, OFFLOAD_DISK
from benchmarks.activations.session import Rows, Setting, run
from benchmarks.disks import loop_disk, throttle, why_not
from benchmarks.io.results import Result, Skipped
from benchmarks.machine import say
from offload_strategy.units import GiB, MiB

_RATE = 200_000_000
#: Each contender has a space of its own; the image is sparse.
_DISK_BYTES = 48 * GiB
_AUTO = "auto"
#: Fixed amounts, as shares of what is saved: spread evenly over the forward pass.
_SHARES = (0.3, 0.4, 0.45, 0.5, 0.55, 0.6, 0.7, 1.0)
_THROUGHPUT = 0.95


def sweep(directory: Path, batch: int, repeats: int, setting: Setting) -> tuple[str, list[Result]]:
    """Train GPT with `budget: auto` and with fixed amounts, on a path throttled to 200 MB/s.

    What waits to be written is bounded (64 MiB) for all, so that an amount is what leaves, not what
    would like to.

    Returns:
        The table, and the claims.
    """
    reason = why_not()
    if reason is not None:
        raise Skipped(reason)
    setting = replace(setting, memory={"pinned": "64MiB"})
    options = setting.options("GPT", batch)
    keep = {**options, "contender": KEEP}
    ours = {**options, "contender": OFFLOAD_DISK}
    with (
        tempfile.TemporaryDirectory(dir=directory) as folder,
        loop_disk(Path(folder), _DISK_BYTES) as disk,
        throttle() as limits,
    ):
        say("how much there is to save")
        every = run({_AUTO: {**ours, "activations": {"budget": "100%"}}}, 1, disk.directory)
        total = int(every[_AUTO].moved("written"))
        limits.limit(disk, read=_RATE, write=_RATE)
        contenders = {KEEP: keep, _AUTO: ours}
        for share in _SHARES:
            name = f"{share:.0%}"
            contenders[name] = {**ours, "activations": {"budget": name}}
        with limits.entered():
            say("alternating")
            rows = run(contenders, repeats, disk.directory)
    return _table(rows, total), _claims(rows, total)


def _left(row: Rows) -> float:
    """Bytes of a step that really left, and so were read again."""
    return row.moved("read")


def _claims(rows: dict[str, Rows], total: int) -> list[Result]:
    keep, auto = rows[KEEP], rows[_AUTO]
    fixed = [row for name, row in rows.items() if name not in (KEEP, _AUTO)]
    best = _best_amount(fixed, keep)
    auto_left = _left(auto)
    return [
        Result(
            "budget: auto at 200 MB/s: tokens/s relative to keep",
            1 / auto.median("seconds"), 1 / keep.median("seconds"), "steps/s",
            keep.ratio(auto, "seconds"), _THROUGHPUT,
        ),
        Result(
            "budget: auto: amount relative to the best fixed one, not below",
            auto_left / MiB, best / MiB, "MiB", auto_left / best, 0.85,
        ),
        Result(
            "budget: auto: amount relative to the best fixed one, not above",
            auto_left / MiB, best / MiB, "MiB", auto_left / best, 1.15, at_least=False,
        ),
    ]  # fmt: skip


def _best_amount(fixed: Sequence[Rows], keep: Rows) -> float:
    """The largest amount at 0.95 of keep's throughput, interpolated to the next one."""
    return largest_amount([(_left(row), keep.ratio(row, "seconds")) for row in fixed])


def largest_amount(amounts: Sequence[tuple[float, float]]) -> float:
    """Where throughput falls below what it must be.

    Args:
        amounts: (bytes, share of keep's throughput), in the order of bytes.
    """
    enough = [place for place, (_, speed) in enumerate(amounts) if speed >= _THROUGHPUT]
    if not enough:
        return amounts[0][0]
    amount, speed = amounts[enough[-1]]
    if enough[-1] + 1 == len(amounts):
        return amount
    more, slower = amounts[enough[-1] + 1]
    return amount + (more - amount) * (speed - _THROUGHPUT) / (speed - slower)


def _table(rows: dict[str, Rows], total: int) -> str:
    keep = rows[KEEP]
    lines = [
        f"of {total / MiB:.0f} MiB that are saved in a step",
        "",
        "| budget | left, MiB | of keep's tokens/s | activation peak, MiB | of keep's | stall, s |",
        "|---|---|---|---|---|---|",
    ]
    for name, row in rows.items():
        left = 0.0 if name == KEEP else _left(row)
        lines.append(
            f"| {name} | {left / MiB:.0f} | {keep.ratio(row, 'seconds'):.3f} "
            f"| {row.median('peak_bytes') / MiB:.0f} | {row.ratio(keep, 'peak_bytes'):.3f} "
            f"| {row.stalled():.2f} |"
        )
    return "\n".join(lines)
