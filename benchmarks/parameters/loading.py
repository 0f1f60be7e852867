"""Loading a checkpoint into a model that need not fit: its seconds, and what memory it takes."""

from __future__ import annotations

import math
import os
import shutil
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.io.results import Result, Skipped, median_ratio
from benchmarks.parameters.loading_subject import ADOPT, COPY, SAVE, LoadJob
from benchmarks.parameters.plain_copy import read_and_write
from benchmarks.parameters.running import Ran, bandwidth, run
from offload_strategy.units import GiB, MiB, format_size

_SUBJECT = "benchmarks.parameters.loading_subject"
#: Of a parameter: in the shards, on the tiers, and two moments.
_DISK_BYTES = 16
_MARGIN = 1.15
_MOST_BLOCKS = 2.0
_TIMES_PATH = 1.2


@dataclass
class _Rounds:
    """What the rounds gave.

    Args:
        path: seconds of reading the files and writing as many bytes to a new one.
        probed: the same by the path's bandwidth, measured on what was just written.
        loads: what each variant said, in the order of the rounds.
        losses: by phase.
    """

    path: list[float] = field(default_factory=list)
    probed: list[float] = field(default_factory=list)
    loads: dict[str, list[dict[str, Any]]] = field(default_factory=lambda: {COPY: [], ADOPT: []})
    losses: dict[str, list[float]] = field(default_factory=dict)

    def values(self, phase: str, name: str) -> list[float]:
        """A figure of a variant."""
        return [float(load[name]) for load in self.loads[phase]]


def loading(job: LoadJob, directory: Path, rounds: int, say: Callable[[str], None]) -> list[Result]:
    """Save a checkpoint, load it in turns with measurements of the path, and print the rounds.

    Args:
        job: the model; its phase and directories are set here.
        directory: on the disk.
        rounds: how many.
        say: tells what is going on.

    Raises:
        Skipped: the disk has not enough room.
    """
    need = int(_MARGIN * _DISK_BYTES * job.parameters)
    free = shutil.disk_usage(directory).free
    if need > free:
        raise Skipped(f"{format_size(need)} of disk are needed, {format_size(free)} are free")
    with tempfile.TemporaryDirectory(prefix="benchmarks-load-", dir=directory) as place:
        shards = Path(place, "checkpoint")
        job = replace(job, directory=place, checkpoint=str(shards))
        saved = _done(run(replace(job, phase=SAVE), say, module=_SUBJECT))
        nbytes = int(saved.must("saved")["nbytes"])
        found = _Rounds()
        found.losses[SAVE] = saved.must("losses")["losses"]
        for number in range(rounds):
            _forget_cached(shards)
            files = sorted(shards.glob("*.safetensors"))
            found.path.append(sum(read_and_write(files, directory)))
            path = bandwidth(directory)
            found.probed.append(sum(nbytes / rate.rate for rate in path.values()))
            for phase in (COPY, ADOPT):
                _forget_cached(shards)
                last = number == rounds - 1
                ran = _done(run(replace(job, phase=phase, train=last), say, module=_SUBJECT))
                found.loads[phase].append(ran.must("loaded"))
                if last:
                    found.losses[phase] = ran.must("losses")["losses"]
    _table(found, nbytes, job.block_bytes)
    return _claims(found, nbytes, job.block_bytes)


def _table(found: _Rounds, nbytes: int, block: int) -> None:
    """Print a row a round."""
    print(
        f"\na checkpoint of {nbytes / GiB:.2f} GiB, the largest block {format_size(block)}\n\n"
        "| round | read and written by hand, s | by the probe, s | copied, s | peak, MiB "
        "| adopted, s | peak, MiB | written, MiB |\n"
        "|---|---|---|---|---|---|---|---|"
    )
    for number, path in enumerate(found.path):
        copied, adopted = found.loads[COPY][number], found.loads[ADOPT][number]
        print(
            f"| {number} | {path:.2f} | {found.probed[number]:.2f} | {copied['seconds']:.2f} "
            f"| {copied['rise_bytes'] / MiB:.0f} | {adopted['seconds']:.2f} "
            f"| {adopted['rise_bytes'] / MiB:.0f} | {adopted['written_bytes'] / MiB:.0f} |"
        )
    print()


def _claims(found: _Rounds, nbytes: int, block: int) -> list[Result]:
    results = []
    for phase, name, judged in ((COPY, "copied", True), (ADOPT, "adopted", False)):
        seconds = found.values(phase, "seconds")
        results.append(
            Result(
                f"load: {name}, relative to reading and writing as much",
                statistics.median(seconds),
                statistics.median(found.path),
                "s",
                median_ratio(seconds, found.path),
                _TIMES_PATH,
                at_least=False,
                judged=judged,
            )
        )
        rise = max(found.values(phase, "rise_bytes"))
        results.append(
            Result(
                f"load: {name}, rise of the peak relative to a block",
                rise / MiB,
                block / MiB,
                "MiB",
                rise / block,
                _MOST_BLOCKS,
                at_least=False,
            )
        )
    written = max(found.values(ADOPT, "written_bytes"))
    results.append(
        Result(
            "load: adopted, written in addition to the checkpoint",
            written / MiB,
            nbytes / MiB,
            "MiB",
            written / nbytes,
            0,
            at_least=False,
        )
    )
    copied, adopted = found.losses[COPY], found.losses[ADOPT]
    same = copied == adopted and copied[:1] == found.losses[SAVE]
    right = float(same and all(math.isfinite(loss) for loss in copied))
    results.append(
        Result(
            "load: losses as of the saved model, in both, before and after a step",
            right,
            1,
            "runs",
            right,
            1,
            details={"losses": found.losses},
        )
    )
    return results


def _forget_cached(shards: Path) -> None:
    """Take shards out of the page cache."""
    for file in shards.iterdir():
        fd = os.open(file, os.O_RDONLY)
        try:
            os.fsync(fd)  # what is not on the disk yet would stay
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def _done(ran: Ran) -> Ran:
    if ran.status != 0:
        raise RuntimeError(f"loading: {ran.end}")
    return ran
