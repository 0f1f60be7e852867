"""The same with two ranks that share a path: one of them has the operation that fails."""

from __future__ import annotations

import faulthandler
import os
import pickle
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch._dynamo  # noqa: F401  # which `DistributedDataParallel` imports, in some seconds
import torch.distributed as dist

from benchmarks.faults import one_point, operations
from benchmarks.faults.one_point import Seen
from benchmarks.faults.operations import Seam
from benchmarks.faults.points import Setting

#: The other rank finds out by the end of a connection; nothing may take longer.
MOST_SECONDS = 30.0


def provoke(setting: Setting, seam: Seam) -> Seen:
    """Train with two ranks, look at what came of it, and continue in one process.

    The ranks are forked from this process, which must not have run a backward pass.
    """
    begin = time.perf_counter()
    victim = seam.number % 2
    with one_point.places() as (place, saves):
        ranks = [_forked(setting, seam, place, saves, rank, victim) for rank in range(2)]
        found = [_result(process, place.parent / f"result-{r}") for r, process in enumerate(ranks)]
        seen = found[victim]
        seen.complaints += [f"the other rank: {text}" for text in found[1 - victim].complaints]
        seen.saved_steps = found[0].saved_steps
        if seen.result == "same numbers" and found[1 - victim].result != seen.result:
            seen.complaints.append(f"the other rank: {found[1 - victim].said}")
        if seen.result in ("hang", "crash"):
            return seen
        left = Seam(raised={"unlink"} if seam.kind in operations.DISK else set())
        seen.complaints += one_point.names_left(left, place, saves)
        if not seam.kind or seen.result != "same numbers" or seen.complaints:
            process = _forked(setting, seam, place, saves, 2, victim, found[0])
            seen.complaints += _result(process, place.parent / "result-2").complaints
    seen.seconds = time.perf_counter() - begin
    return seen


def _forked(
    setting: Setting,
    seam: Seam,
    place: Path,
    saves: Path,
    rank: int,
    victim: int,
    before: Seen | None = None,
) -> int:
    """Start a rank, or, as number 2, the process that continues; returns the process's number."""
    process = os.fork()
    if process:
        return process
    folder = place.parent
    try:
        with (folder / f"output-{rank}").open("w") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
            faulthandler.dump_traceback_later(MOST_SECONDS, exit=True, file=output)
            with operations.installed():
                _do(setting, seam if rank == victim else Seam(), place, saves, rank, before)
            sys.stdout.flush()
    except BaseException:
        (folder / f"output-{rank}").open("a").write(traceback.format_exc())
        os._exit(1)
    os._exit(0)


def _do(
    setting: Setting, seam: Seam, place: Path, saves: Path, rank: int, before: Seen | None
) -> None:
    folder = place.parent
    if before is not None:
        seen = Seen(saved_steps=before.saved_steps, whole_steps=before.whole_steps)
        one_point.resume(setting, place, saves, seen)
    else:
        store = f"file://{folder}/store"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
        seen = one_point.trained(setting, seam, place, saves)
        seen.log = [str(line) for line in seen.log]
    partial = folder / f"partial-{rank}"
    partial.write_bytes(pickle.dumps(seen))
    partial.rename(folder / f"result-{rank}")
    if seen.result == "same numbers" and rank < 2:
        dist.destroy_process_group()


def _result(process: int, file: Path) -> Seen:
    """What a process has seen; one that takes too long is ended."""
    deadline = time.monotonic() + MOST_SECONDS + 5.0
    while os.waitpid(process, os.WNOHANG) == (0, 0):
        if time.monotonic() > deadline:
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
            break
        time.sleep(0.002)
    if file.exists():
        seen: Any = pickle.loads(file.read_bytes())
        return seen
    said = file.with_name(file.name.replace("result", "output")).read_text()
    what = "hang" if "Timeout" in said else "crash"
    return Seen(failed="?", result=what, said=said, complaints=[f"{what}: {said}"])
