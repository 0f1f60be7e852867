"""fio, the yardstick for the disk itself."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from benchmarks.io.results import Skipped
from offload_strategy.units import MiB

ENGINES = ("io_uring", "libaio")


@dataclass(frozen=True)
class FioSettings:
    """How fio moves bytes."""

    engine: str
    block: int
    depth: int


@dataclass(frozen=True)
class FioRun:
    """What a run of fio took: its own clock, without its start and its end."""

    seconds: float
    cpu_seconds: float


def command(file: Path, direction: str, nbytes: int, settings: FioSettings) -> list[str]:
    """The command line: direct I/O, one job, over an existing file."""
    return [
        "fio",
        "--name=peer",
        f"--filename={file}",
        f"--rw={direction}",
        f"--size={nbytes}",
        f"--ioengine={settings.engine}",
        f"--bs={settings.block // MiB}M",
        f"--iodepth={settings.depth}",
        "--direct=1",
        "--overwrite=1",
        "--fallocate=none",
        "--output-format=json",
    ]


def shown(direction: str, nbytes: int, settings: FioSettings) -> str:
    """The command line as people type it."""
    return shlex.join(command(Path("FILE"), direction, nbytes, settings))


def run(file: Path, direction: str, nbytes: int, settings: FioSettings) -> FioRun:
    """Run fio once.

    Raises:
        Skipped: fio is not installed, or not able to use this engine.
    """
    process = start(file, direction, nbytes, settings)
    return finish(process, direction)


def start(file: Path, direction: str, nbytes: int, settings: FioSettings) -> subprocess.Popen[str]:
    """Start fio; `finish` waits for it."""
    if shutil.which("fio") is None:
        raise Skipped("fio is not installed")
    return subprocess.Popen(
        command(file, direction, nbytes, settings),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str], direction: str) -> FioRun:
    """Wait for fio and read its report."""
    try:
        out, error = process.communicate(timeout=600)
    except BaseException:
        process.kill()
        process.wait()
        raise
    if process.returncode != 0:
        raise Skipped(f"{shlex.join(map(str, process.args))}: {error.strip() or out.strip()}")  # type: ignore[arg-type]
    job = json.loads(out[out.index("{") :])["jobs"][0]
    took = job[direction]["runtime"] / 1000
    # `runtime` is in whole milliseconds; bytes per second are exact where they are given.
    bytes_per_second = job[direction].get("bw_bytes")
    if bytes_per_second:
        took = job[direction]["io_bytes"] / bytes_per_second
    cpu = (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1000
    return FioRun(took, cpu)
