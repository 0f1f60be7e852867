"""Claims that the table must confirm, and how far each contender is from the best possible."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from benchmarks.io.results import Result
from benchmarks.optimizer.contender_sets import (
    COMMIT,
    COMMIT_HOST,
    CONCURRENT_IO,
    DEFAULTS,
    EAGER,
    EAGER_HOST,
    EAGER_STATES,
    FIRST,
    OURS,
    THIRD,
)
from benchmarks.optimizer.contenders import (
    DEEPSPEED,
    DEEPSPEED_DEFAULTS,
    DEEPSPEEDS,
    MOVING,
    PLAIN,
)
from benchmarks.optimizer.session import Disk, Outcome, Rows
from offload_strategy.units import MiB

#: What must be reached, and what may be taken.
_FASTER, _STEP_FASTER, _PEAK = 1.8, 20.0, 0.25
_RELATIVE_TO_PLAIN, _PEAK_RELATIVE_TO_PLAIN = 1.03, 0.45
_HOST_CUT = 0.45
#: Sessions in which a contender takes part as a peer of others.
_JUDGED_BEFORE = {EAGER: (DEFAULTS, THIRD, CONCURRENT_IO), COMMIT: (DEFAULTS,)}


def check_losses(rows: Mapping[str, Rows], where: str) -> None:
    """Whoever computes in float32, and not with DeepSpeed's kernel, has plain PyTorch's losses.

    Raises:
        RuntimeError: one differs in a bit.
    """
    plain = rows[PLAIN].losses
    for name, row in rows.items():
        exact = name not in DEEPSPEEDS
        exact &= name not in OURS or OURS[name].state_dtype == "float32"
        if exact and row.losses != plain:
            raise RuntimeError(f"{where}: losses of {name!r} differ from those of {PLAIN}")


def claims_of(model: str, session: str, outcome: Outcome) -> list[Result]:
    """What a session shows."""
    rows, disk = outcome.rows, outcome.disk
    if session not in (FIRST, DEFAULTS):  # contenders take part in several: claims have own names
        model = f"{model}, {session}"
    results: list[Result] = []
    for name, everything in ((EAGER, True), (COMMIT, False), (EAGER_STATES, False)):
        for peer in (DEEPSPEED, DEEPSPEED_DEFAULTS):
            if name in rows and peer in rows:
                results += _relative_to_deepspeed(model, name, peer, rows, everything)
    for name in rows:
        if name in OURS and session not in _JUDGED_BEFORE.get(name, ()):
            results += _relative_to_plain(model, name, rows, disk)
    for name in (EAGER_HOST, COMMIT_HOST):
        if name in rows and EAGER in rows:
            results.append(_host_cut(model, name, rows))
    if MOVING in rows:
        results += [_relative_to_concurrent_io(model, name, rows) for name in rows if name in OURS]
    return results


def _relative_to_deepspeed(
    model: str, name: str, deepspeed: str, rows: Mapping[str, Rows], everything: bool
) -> list[Result]:
    ours, peer = rows[name], rows[deepspeed]
    faster = [
        Result(
            f"{model}: {name}: {what}, relative to {deepspeed}",
            ours.median(key), peer.median(key), "s", peer.ratio(ours, key), least,
        )
        for what, key, least in (
            ("iteration", "seconds", _FASTER),
            ("end of backward to end of step", "step_seconds", _STEP_FASTER),
        )
    ]  # fmt: skip
    return [
        *faster,
        Result(
            f"{model}: {name}: peak memory, relative to {deepspeed}",
            ours.median("peak_bytes") / MiB, peer.median("peak_bytes") / MiB, "MiB",
            ours.ratio(peer, "peak_bytes"), _PEAK, at_least=False, judged=everything,
        ),
    ]  # fmt: skip


def bounds(row: Rows, plain: Rows, disk: Disk) -> list[float]:
    """What each lap could take at best: plain's iteration, or its bytes at the disk's rates."""
    moved = zip(row.values("read_bytes"), row.values("written_bytes"), strict=True)
    return [
        max(seconds, disk.seconds(number, read, written))
        for number, (seconds, (read, written)) in enumerate(
            zip(plain.values("seconds"), moved, strict=True)
        )
    ]


def _relative_to_plain(model: str, name: str, rows: Mapping[str, Rows], disk: Disk) -> list[Result]:
    ours, plain = rows[name], rows[PLAIN]
    best = bounds(ours, plain, disk)
    share = [mine / least for mine, least in zip(ours.values("seconds"), best, strict=True)]
    return [
        Result(
            f"{model}: {name}: iteration, relative to max(plain, its bytes at the disk's rates)",
            ours.median("seconds"), statistics.median(best), "s",
            statistics.median(share), _RELATIVE_TO_PLAIN, at_least=False,
            judged=name in (EAGER, COMMIT),
            details={"plain": plain.values("seconds"), "ours": ours.values("seconds"),
                     "bounds": best},
        ),
        Result(
            f"{model}: {name}: peak memory, relative to plain",
            ours.median("peak_bytes") / MiB, plain.median("peak_bytes") / MiB, "MiB",
            ours.ratio(plain, "peak_bytes"), _PEAK_RELATIVE_TO_PLAIN, at_least=False,
            judged=name == EAGER,
        ),
    ]  # fmt: skip


def _relative_to_concurrent_io(model: str, name: str, rows: Mapping[str, Rows]) -> Result:
    """How much of the distance from plain PyTorch the machine takes for moving bytes at all."""
    ours, peer = rows[name], rows[MOVING]
    return Result(
        f"{model}: {name}: iteration, relative to plain with concurrent I/O",
        ours.median("seconds"), peer.median("seconds"), "s", ours.ratio(peer, "seconds"), 1.0,
        at_least=False, judged=False,
        details={"of plain": peer.ratio(rows[PLAIN], "seconds")},
    )  # fmt: skip


def _host_cut(model: str, name: str, rows: Mapping[str, Rows]) -> Result:
    """What the host tier keeps from the disk, activations aside, which it does not hold."""

    def states(row: Rows) -> float:
        keys = ("offload/optimizer/read_bytes", "offload/optimizer/written_bytes")
        return sum(row.median(key) for key in keys)

    ours, peer = states(rows[name]), states(rows[EAGER])
    return Result(
        f"{model}: {name}: states read and written on the disk, cut",
        ours / MiB, peer / MiB, "MiB", 1 - ours / peer, _HOST_CUT,
        judged=name == EAGER_HOST,
    )  # fmt: skip


def rooflines(session: str, outcome: Outcome) -> list[dict[str, Any]]:
    """How far each of ours is from what its machine could do, and what is between.

    Args:
        session: its name.
        outcome: of it.
    """
    found = []
    for name, row in outcome.rows.items():
        if name not in OURS and not name.startswith("preset"):
            continue
        plain = outcome.rows[PLAIN]
        best = bounds(row, plain, outcome.disk)
        seconds = row.values("seconds")
        distance = statistics.median(a / b for a, b in zip(seconds, best, strict=True))
        clients = ("optimizer", "activations")
        waited = sum(row.median(f"offload/{client}/stall_seconds") for client in clients)
        slower = row.median("seconds") - waited - plain.median("seconds")
        by_disk = statistics.median(best) > 1.01 * plain.median("seconds")
        found.append(
            {
                "name": f"{session}: {name}",
                "seconds": row.median("seconds"),
                "best": statistics.median(best),
                "distance": distance,
                "limit": "the disk" if by_disk else "computing",
                "cause": f"{waited:.2f} s of waiting for the disk; computing and updates take "
                f"{max(0.0, slower):.2f} s more than plain PyTorch's",
            }
        )
    return found
