"""Fails every operation of a short training in turn, and looks at what comes of it.

    python -m benchmarks.faults.every_operation [--workers N] [--every K] [--json FILE]
    python -m benchmarks.faults.every_operation --only commit-all-ssd:write.17:once

Each operation that the package makes on files, memory, locks and threads is failed once and for
good, in each configuration; `benchmarks.faults.one_point` has what may come of it.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import multiprocessing
import os
import random
import sys
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from benchmarks.disks import why_not
from benchmarks.faults import one_point, operations, two_ranks
from benchmarks.faults.one_point import Seen
from benchmarks.faults.operations import Seam
from benchmarks.faults.points import OTHERS, SETTINGS, Point, Setting, points
from offload_strategy.errors import ConfigError
from offload_strategy.io.queues.encryption import BlockCipher
from offload_strategy.units import PAGE_BYTES

#: No point may take longer.
MOST_SECONDS = 30.0


def provoke(setting: Setting, seam: Seam) -> Seen:
    """Train in one process or with two ranks."""
    return (two_ranks if setting.ranks == 2 else one_point).provoke(setting, seam)


def counted(setting: Setting) -> dict[str, int]:
    """How many operations of each kind a training makes when nothing fails."""
    seen = provoke(setting, Seam())
    assert seen.result == "same numbers", seen
    assert seen.complaints == [], seen
    return seen.counts


def run(point: Point) -> Seen:
    """Train with an operation that fails, and look at what came of it."""
    seen = provoke(point.setting, Seam(point.kind, point.number, point.for_good))
    seen.point, seen.kind, seen.for_good = str(point), point.kind, point.for_good
    return seen


# ---------------------------------------------------------------------- processes
class Worker:
    """A process that runs points; one that hangs or crashes is replaced."""

    def __init__(self, directory: Path, device: str) -> None:
        self._directory = directory
        self._device = device
        self._process: Any = None

    def run(self, point: Point | Setting) -> Any:
        """What was seen of a point, or how many operations a configuration has."""
        if self._process is None or not self._process.is_alive():
            self._start()
        begin = time.perf_counter()
        try:
            self._pipe.send(point)
            return self._pipe.recv()
        except (EOFError, OSError):
            self._process.join()
            seconds = time.perf_counter() - begin
        stacks = self._stacks.read_text()
        what = "hang" if "Timeout" in stacks else "crash"
        if isinstance(point, Setting):
            raise RuntimeError(f"{what} of {point} without a failure:\n{stacks}")
        complaint = f"{what} after {seconds:.0f} s (status {self._process.exitcode}):\n{stacks}"
        return Seen(str(point), point.kind, point.for_good, "?", what, complaints=[complaint])

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._pipe.close()
            self._process.join()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        self._stacks = self._directory / f"stacks-{threading.get_ident()}-{time.time()}"
        self._stacks.touch()
        self._process = context.Process(
            target=_serve, args=(other, self._stacks, self._device), daemon=True
        )
        self._process.start()
        other.close()


def _prepare(device: str) -> None:
    torch.set_num_threads(1)
    os.environ["SSD_OFFLOAD_CACHE"] = ""
    one_point.train_on(device)


def _serve(pipe: Connection, stacks: Path, device: str) -> None:
    """Run points until there are no more."""
    _prepare(device)
    with stacks.open("w") as file, operations.installed():
        faulthandler.enable(file)
        while True:
            try:
                point = pipe.recv()
            except EOFError:
                return
            setting = point if isinstance(point, Setting) else point.setting
            if setting.ranks == 1:  # ranks look after themselves
                faulthandler.dump_traceback_later(MOST_SECONDS, exit=True, file=file)
            answer: Any = counted(point) if isinstance(point, Setting) else run(point)
            faulthandler.cancel_dump_traceback_later()
            pipe.send(answer)


def run_all(
    settings: Sequence[Setting],
    workers: int,
    *,
    every: int = 1,
    seed: int = 0,
    seconds: float = float("inf"),
) -> Iterator[Seen]:
    """Run every `every`-th point of the configurations, in an order that `seed` gives.

    No point begins after so many `seconds`.
    """
    end = time.perf_counter() + seconds
    with (
        tempfile.TemporaryDirectory(prefix="every-operation-stacks-") as folder,
        ThreadPoolExecutor(workers) as pool,
    ):
        own = threading.local()
        made: list[Worker] = []

        def ask(point: Any) -> Any:
            # Ranks are forked from a process that has not trained; a process has one accelerator.
            setting = getattr(point, "setting", point)
            name = f"{setting.ranks} on {setting.device}"
            if not hasattr(own, name):
                made.append(Worker(Path(folder), setting.device))
                setattr(own, name, made[-1])
            return getattr(own, name).run(point)

        counts = dict(zip(settings, pool.map(ask, settings), strict=True))
        chosen = [point for each in settings for point in points(each, counts[each])]
        random.Random(seed).shuffle(chosen)
        chosen = chosen[::every]
        print(
            f"{sum(sum(c.values()) for c in counts.values())} operations in {len(settings)} "
            f"configurations, {len(chosen)} points",
            file=sys.stderr,
            flush=True,
        )
        ahead = deque[Any]()
        for point in chosen:
            if time.perf_counter() < end:
                ahead.append(pool.submit(ask, point))
            while len(ahead) >= 2 * workers:
                yield ahead.popleft().result()
        for one in ahead:
            yield one.result()
        for worker in made:
            worker.close()


# ---------------------------------------------------------------------- tables
_COLUMNS = ("points", "not reached", "same numbers", "ConfigError", "StorageError", "TierFullError")
_COLUMNS += ("OffloadError", "wrong numbers", "unclear errors", "hangs", "left behind")


def outcomes(seen: Seen) -> Iterator[str]:
    """The columns of the table in which a point counts."""
    yield "points"
    yield seen.result if seen.failed else "not reached"
    if seen.result in ("hang", "crash"):
        yield "hangs"
        return
    kinds = {_kind_of(complaint) for complaint in seen.complaints}
    yield from kinds


def _kind_of(complaint: str) -> str:
    if "left behind" in complaint:
        return "left behind"
    numbers = ("weights are", "state dict is", "steps ended", "is saved")
    return "wrong numbers" if any(each in complaint for each in numbers) else "unclear errors"


def table(seen: Iterable[Seen], by: str) -> list[list[str]]:
    """Outcomes by "operation" or by "configuration", with a line for all."""
    rows: dict[str, Counter[str]] = {}
    longest: dict[str, float] = {}
    order = [str(s) for s in (*SETTINGS, *OTHERS)] if by == "configuration" else operations.KINDS
    for one in seen:
        for name in (one.kind if by == "operation" else one.point.partition(":")[0], "all"):
            rows.setdefault(name, Counter()).update(outcomes(one))
            longest[name] = max(longest.get(name, 0.0), one.close_seconds)
    lines = [[by, *_COLUMNS, "longest close, s"]]
    for name in (*order, "all"):
        if name in rows:
            cells = [str(rows[name][column]) for column in _COLUMNS]
            lines.append([name, *cells, f"{longest[name]:.2f}"])
    return lines


def markdown(lines: list[list[str]]) -> str:
    """A table for the documentation."""
    return "\n".join(
        "| " + " | ".join(line) + " |" for line in (lines[0], ["---"] * len(lines[0]), *lines[1:])
    )


def _others() -> list[Setting]:
    """Those of the other configurations that this machine can have."""
    with_root = why_not(throttled=False) is None
    with_cipher = True
    try:
        BlockCipher(PAGE_BYTES)
    except ConfigError:
        with_cipher = False
    return [
        each
        for each in OTHERS
        if (with_root or not each.raw) and (with_cipher or not each.encrypted)
    ]


def main() -> int:
    """Run, print and complain."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.faults.every_operation",
        description=(__doc__ or "").partition("\n")[0],
    )
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) // 2))
    parser.add_argument("--every", type=int, default=1, metavar="K", help="each K-th point only")
    parser.add_argument("--seed", type=int, default=0, help="order of the points")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="end after that time")
    parser.add_argument("--config", type=Setting.parse, action="append", metavar="CONFIG")
    parser.add_argument("--only", type=Point.parse, action="append", metavar="CONFIG:KIND.N:HOW")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every point there")
    options = parser.parse_args()
    if options.only:
        _prepare(options.only[0].setting.device)
        with operations.installed():
            found = [run(point) for point in options.only]
        print(json.dumps([one.as_json() for one in found], indent=1))
        return int(any(one.complaints for one in found))
    begin, found = time.perf_counter(), []
    for one in run_all(
        options.config or [*SETTINGS, *_others()],
        options.workers,
        every=options.every,
        seed=options.seed,
        seconds=60 * options.minutes,
    ):
        found.append(one)
        if one.complaints:
            print(f"{one.point} ({one.failed}): {'; '.join(one.complaints)}", flush=True)
        if len(found) % 100 == 0:
            seconds = time.perf_counter() - begin
            print(f"{len(found)} points, {seconds:.0f} s", file=sys.stderr, flush=True)
    for by in ("operation", "configuration"):
        print("\n" + markdown(table(found, by)))
    print(f"\n{len(found)} points in {time.perf_counter() - begin:.0f} s")
    if options.json is not None:
        options.json.write_text(json.dumps([one.as_json() for one in found], indent=1) + "\n")
    return int(any(one.complaints for one in found))


if __name__ == "__main__":
    sys.exit(main())
