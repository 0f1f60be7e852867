"""Process entry: one training for the whole time, and others beside it, with samples of it all.

Every ten seconds a line of JSON is added to a file: memory, open files, threads, disk, objects and
the time of a step. In turn with it the same is trained by plain PyTorch, with which its losses must
agree, and by a young process (`young`), which goes on from its checkpoint and is replaced every few
minutes: what changes the time of a step in both is the machine's. Between their steps, engines are
opened over other models, train a few steps with what goes wrong, and are closed; the same few runs
come again and again, so that whatever is kept of one of them adds up.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import functools
import gc
import json
import operator
import os
import signal
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from benchmarks.soak.report import SAMPLE_SECONDS, SERIES
from benchmarks.soak.runs import WITHIN_A_PROCESS, Run, drawn
from benchmarks.soak.training import Training, train
from benchmarks.soak.young import YoungProcess, prepare, timed_step

#: Seconds of rest for each second of CPU time, so that other work on the machine goes on.
_REST = 2.0
#: Seconds between two runs beside the training, and how many different ones there are.
_ASIDE_SECONDS, _ASIDES = 8.0, 20
#: Steps between two checkpoints, each of which replaces the one before.
_EVERY = 40
#: Seconds after which, at the next checkpoint, another young process begins.
_YOUNG_SECONDS = 200.0

#: How long a sample waits at most for threads that end by themselves.
_THREADS_END_SECONDS = 5.0

#: A GPT-2 of 5.8 million parameters: everything of it leaves.
MAIN = Run(
    seed=0,
    model="GPT-2",
    sizes={"vocab_size": 4096, "n_positions": 128, "n_embd": 256, "n_layer": 6, "n_head": 8,
           "use_cache": False, "bos_token_id": 1, "eos_token_id": 2},
    batch=(2, 64),
    optimizer="AdamW, fused",
    tiers="ssd",
    sections={
        "activations": {"enabled": True, "min_size": "64KiB", "budget": "100%"},
        "optimizer": {"enabled": True, "overlap": "commit", "subgroup_size": 500_000},
        "parameters": {"enabled": True, "min_size": "64KiB"},
    },
    limit=None, micro_batches=1, hints=True, clip=None, autocast=False, schedule=False,
    frozen=False, checkpointing=False, hostility="none", same_process=True, before_attach=True,
    steps=0, every=_EVERY,
)  # fmt: skip


def aside(number: int) -> Run:
    """A run beside the training: few steps, nothing that ends the process."""
    hostility = WITHIN_A_PROCESS[number % len(WITHIN_A_PROCESS)]
    return replace(drawn(1_000_000 + number, hostility, longest=7), same_process=True)


def main() -> None:
    """Train until the time is over or the parent has ended; options are JSON."""
    options = json.loads(sys.argv[1])
    prepare()
    faulthandler.register(signal.SIGUSR1)
    parent = os.getppid()
    with tempfile.TemporaryDirectory(prefix="soak-long-", dir=options["directory"]) as place:
        maps = Path(options["maps"]) if options["maps"] else None
        process = _LongProcess(Path(place), Path(options["file"]), maps)
        while time.time() < options["until"] and os.getppid() == parent:
            process.turn()
        process.end()


class _LongProcess:
    """The training and what is beside it."""

    def __init__(self, place: Path, file: Path, maps: Path | None) -> None:
        self._place, self._file, self._maps = place, file, maps
        self._tier, self._folder = place / "tier", place / "checkpoints"
        for each in (self._tier, self._folder):
            each.mkdir(mode=0o700)
        self._training = Training(MAIN, [self._tier], self._folder)
        self._twin = Training(MAIN)
        self._number = self._asides = 0
        self._training.save()
        self._young = YoungProcess(MAIN, self._folder, place.parent)
        self._young_since = time.monotonic()
        #: Seconds by the clock and of the processor, of steps of the training and the young one.
        self._seconds: list[tuple[tuple[float, float], tuple[float, float]]] = []
        self._sampled = self._aside_at = time.monotonic()
        self._plain: dict[int, dict[str, Any]] = {}
        self._process = psutil.Process()

    def turn(self) -> None:
        """One step of all three, and what is due after it."""
        begin = time.process_time()
        steps: dict[str, Callable[[int], Any]] = {
            "young": self._young.step,
            "plain": self._twin.step,
            "ours": functools.partial(timed_step, self._training),
        }
        order = list(steps)[:: -1 if self._number % 2 else 1]
        done = {name: steps[name](self._number) for name in order}
        young, loss = done["young"]
        self._seconds.append((done["ours"], young))
        assert self._training.losses == self._twin.losses, f"step {self._number}: another loss"
        assert self._training.losses[-1] == loss, f"step {self._number}: the young process differs"
        self._number += 1
        if self._number % _EVERY == 0:
            self._training.save()
            self._training.losses.clear()
            self._twin.losses.clear()
            if time.monotonic() - self._young_since > _YOUNG_SECONDS:
                self._young.end()
                self._young = YoungProcess(MAIN, self._folder, self._place.parent)
                self._young_since = time.monotonic()
        time.sleep(_REST * (time.process_time() - begin + young[1]))
        if time.monotonic() - self._aside_at > _ASIDE_SECONDS:
            self._run_aside()
            self._aside_at = time.monotonic()
        if time.monotonic() - self._sampled > SAMPLE_SECONDS:
            self._sampled = time.monotonic()
            self._write({"samples": self._sample()})
            self._seconds.clear()

    def end(self) -> None:
        """Close, and look whether anything is left."""
        self._young.end()
        self._training.end()
        left = [str(path) for path in self._tier.rglob("*")]
        self._write({"ended": time.time(), "steps": self._number, "left": left})

    def _run_aside(self) -> None:
        run = aside(self._asides % _ASIDES)
        first = self._asides < _ASIDES
        self._asides += 1
        begin = time.process_time()
        with tempfile.TemporaryDirectory(prefix="aside-", dir=self._place) as place:
            directories = [Path(place, f"path{number}") for number in range(3)]
            folder = Path(place, "checkpoints")
            for each in (folder, *directories):
                each.mkdir(mode=0o700)
            line: dict[str, Any] = {"seed": run.seed, "factors": run.factors}
            try:
                if first:
                    self._plain[run.seed] = _figures(train(run, None, folder, _silent))
                found = train(run, directories, folder, _silent)
                same = _figures(found) == self._plain[run.seed]
                refused = "refused" in found
                line["verdict"] = "refused" if refused else "same" if same else "different"
                line |= {"left": found["left"], "happened": found["happened"]}
                line["left"] += [str(p) for each in directories for p in each.rglob("*")]
            except Exception:
                line |= {"verdict": "error", "error": traceback.format_exc()[-6000:]}
        # Traces are kept for a few seconds at most; the next sample must not see them.
        sys.last_exc = None  # type: ignore[assignment]
        self._write({"aside": line})
        time.sleep(_REST * (time.process_time() - begin))

    def _sample(self) -> dict[str, float]:
        engine = self._training.engine
        assert engine is not None
        gc.collect()
        # What was freed and is kept for the next use, by the engine or the C library, is no leak,
        # and neither are threads that end by themselves when they have had no work for a second.
        engine._resources.store.trim()
        deadline = time.monotonic() + _THREADS_END_SECONDS
        while self._process.num_threads() > 1 and time.monotonic() < deadline:
            time.sleep(0.1)
        ctypes.CDLL(None).malloc_trim(0)
        unnamed = _unnamed_bytes()
        named = sum(p.lstat().st_blocks * 512 for p in self._place.rglob("*") if p.is_file())
        metrics = engine.metrics()
        used = metrics["offload/tier/disk/used_bytes"]
        if self._maps is not None:
            self._keep_map(self._maps / f"{time.time():.0f}", metrics)
        mib = 2.0**20
        ours, young = (zip(*each, strict=True) for each in zip(*self._seconds, strict=True))
        (wall, cpu), (young_wall, young_cpu) = ours, young
        relative = ((wall, young_wall), (cpu, young_cpu))
        values = (
            self._process.memory_info().rss / mib,
            _anonymous_bytes() / mib,
            self._process.num_fds(),
            self._process.num_threads(),
            unnamed / mib,
            named / mib,
            used / mib,
            len(gc.get_objects()),
            *(1e3 * statistics.median(each) for each in (wall, young_wall, cpu, young_cpu)),
            *(statistics.median(map(operator.truediv, *pair)) for pair in relative),
        )
        return dict(zip(SERIES, values, strict=True))

    def _keep_map(self, file: Path, metrics: Mapping[str, float]) -> None:
        """Keep what is in memory where, to be compared over a step of the series."""
        file.parent.mkdir(parents=True, exist_ok=True)
        held = {name: value for name, value in metrics.items() if name.endswith("bytes")}
        file.write_text(Path("/proc/self/smaps").read_text() + json.dumps(held) + "\n")

    def _write(self, line: dict[str, Any]) -> None:
        with open(self._file, "a") as file:
            file.write(json.dumps({"time": time.time(), "process": os.getpid(), **line}) + "\n")


def _figures(found: dict[str, Any]) -> dict[str, Any]:
    return {key: found.get(key) for key in ("losses", "weights", "states")}


def _silent(what: str, value: Any) -> None:
    """Nobody asks."""


def _anonymous_bytes() -> int:
    """Memory of no file: pages of libraries come and go with what other processes do."""
    rollup = Path("/proc/self/smaps_rollup").read_text()
    return 1024 * int(rollup.partition("Anonymous:")[2].split()[0])


def _unnamed_bytes() -> int:
    """Disk space of files that this process has open and that have no name."""
    found = {}
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            about = os.stat(f"/proc/self/fd/{entry}")
            if about.st_nlink == 0:
                found[about.st_dev, about.st_ino] = about.st_blocks * 512
    return sum(found.values())


if __name__ == "__main__":
    main()
