"""Two machines of two ranks each, of which one rank is killed at a random point, again and again.

The machines are two launchers (torchrun's static rendezvous) with a folder each. After a death all
ranks must end, nothing may be left in the folders, and a run that goes on from the last checkpoint
must end with the weights of an unbroken one.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil

from benchmarks.io.results import Context, Result

_MACHINES, _RANKS, _STEPS = 2, 2, 6
_ROOT = Path(__file__).resolve().parents[2]
#: All ranks have to end so soon after a death.
_MOST_SECONDS = 60.0
#: A run that takes longer hangs.
_PATIENCE_SECONDS = 300.0


def machines(context: Context) -> list[Result]:
    """Kill a rank in each of many runs; how long the others lived, and what was different."""
    runs = 2 if context.quick else 20
    chance = random.Random(0)
    unbroken = _fresh(context.directory / "unbroken")
    _wait(_launch(unbroken))
    expected = (unbroken / "digest").read_text()
    seconds, left, unfinished, different, unnamed = [], 0, 0, 0, 0
    for run in range(runs):
        folder = _fresh(context.directory / f"run-{run}")
        launchers = _launch(folder)
        victim = chance.randrange(_MACHINES * _RANKS)
        _kill(folder, launchers, victim, chance)
        died = time.monotonic()
        _wait(launchers)
        seconds.append(time.monotonic() - died)
        said = "".join((folder / f"output-{m}").read_text() for m in range(_MACHINES))
        unnamed += f"rank {victim} (process" not in said and f"rank      : {victim} " not in said
        left += len(_left(folder))
        _wait(_launch(folder))
        ended = (folder / "digest").exists()
        same = ended and (folder / "digest").read_text() == expected
        unfinished += not ended
        different += ended and not same
        if not ended:
            context.say("\n".join(_said(folder)))
        context.say(f"run {run}: rank {victim} killed, all ended after {seconds[-1]:.1f} s")
        if same:
            shutil.rmtree(folder)
    last = max(seconds)
    return [
        Result(
            f"machines: the last rank ends after a death, longest of {runs} runs",
            last,
            _MOST_SECONDS,
            "s",
            last / _MOST_SECONDS,
            1.0,
            at_least=False,
            details={"seconds": seconds},
        ),
        _none("machines: files left on the tiers", left),
        _none("machines: runs that were not resumed to the end", unfinished),
        _none("machines: resumed runs with other weights", different),
        _none("machines: deaths that no message names", unnamed),
    ]


def _none(name: str, count: int) -> Result:
    return Result(name, float(count), 0.0, "", float(count), 0.0, at_least=False)


def _fresh(folder: Path) -> Path:
    folder.mkdir()
    return folder


def _launch(folder: Path) -> list[subprocess.Popen[bytes]]:
    """Start a launcher for each machine; its output goes to a file."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launchers = []
    for machine in range(_MACHINES):
        command = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={_MACHINES}"]
        command += [f"--node-rank={machine}", f"--nproc-per-node={_RANKS}"]
        command += ["--master-addr=127.0.0.1", f"--master-port={port}"]
        command += ["-m", "benchmarks.distributed.machine_rank", str(folder), str(_STEPS)]
        with (folder / f"output-{machine}").open("ab") as output:
            launchers.append(
                subprocess.Popen(
                    command, stdout=output, stderr=output, cwd=_ROOT, start_new_session=True
                )
            )
    return launchers


def _kill(
    folder: Path, launchers: list[subprocess.Popen[bytes]], victim: int, chance: random.Random
) -> None:
    """Kill a rank at a random moment after a random step."""
    step = chance.randrange(_STEPS - 1)
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while not (folder / f"done-{step}").exists():
        if time.monotonic() > deadline or any(each.poll() for each in launchers):
            raise RuntimeError(f"training did not come to step {step}:\n{_said(folder)}")
        time.sleep(0.01)
    time.sleep(chance.random() * 0.3)
    process = int((folder / f"process-{victim}").read_text())
    if psutil.pid_exists(process):
        os.kill(process, signal.SIGKILL)


def _wait(launchers: list[subprocess.Popen[bytes]]) -> None:
    """Wait for launchers and their ranks; those that hang are killed, and it is an error."""
    for launcher in launchers:
        try:
            launcher.wait(_PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            for each in launchers:
                os.killpg(each.pid, signal.SIGKILL)
            raise RuntimeError(f"ranks hang: {launcher.args!r}") from None


def _left(folder: Path) -> list[Path]:
    """Return the files in the folders of the tiers."""
    return [path for tier in folder.glob("machine-*") for path in tier.rglob("*")]


def _said(folder: Path) -> list[str]:
    """Return the end of what the launchers printed."""
    return [(folder / f"output-{machine}").read_text()[-3000:] for machine in range(_MACHINES)]
