"""Large transfers: at least as fast as the best of fio and DeepNVMe."""

from __future__ import annotations

import statistics

from benchmarks.io.results import Context, Result, Skipped, median_ratio
from benchmarks.io.tuned_peers import DIRECTIONS, OURS, contest


def bulk(context: Context) -> list[Result]:
    """2 GiB of 64 MiB tickets, written and read, compared with each peer with its best settings.

    Ours are `TensorStore.put` of every buffer, until the last byte is on the path, and
    `TensorStore.get` of every ticket in order with three more on their way. All overwrite files.
    """
    held = contest(context)
    if not held.peers:
        raise Skipped("; ".join(f"{peer}: {why}" for peer, why in held.missing.items()))
    results = []
    for direction in DIRECTIONS:
        ours = held.seconds[OURS, direction]
        for peer in held.peers:
            theirs = held.seconds[peer, direction]
            results.append(
                Result(
                    name=f"bulk: {direction}, relative to {peer}",
                    ours=held.nbytes / statistics.median(ours) / 1e9,
                    peer=held.nbytes / statistics.median(theirs) / 1e9,
                    unit="GB/s",
                    ratio=median_ratio(theirs, ours),
                    threshold=1.0,
                    command=held.commands[peer, direction],
                    details={
                        "bytes": held.nbytes,
                        "our_seconds": ours,
                        "peer_seconds": theirs,
                        "peer_settings_tried": held.tried[f"{peer} {direction}"],
                        "peers_missing": held.missing,
                    },
                )
            )
    return results
