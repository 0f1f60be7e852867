"""Training processes that end one way or another, forked from one that has all imports."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

from offload_strategy import SSDOffloadPlugin
from tests.integrations.accelerate_runs import prepare
from tests.integrations.lightning_runs import batches, make_module

SIGNALS = {"interrupt": signal.SIGINT, "kill": signal.SIGKILL, "terminate": signal.SIGTERM}
ENDS = {
    "lightning workers": 0,
    "lightning exception": 1,
    "lightning kill": -signal.SIGKILL,
    "accelerate normal": 0,
    "accelerate interrupt": -signal.SIGINT,
    "accelerate terminate": -signal.SIGTERM,
}
"""Exit status by framework and end."""


def open_files(directory: Path, process: int | str = "self") -> list[str]:
    """Files of a process below a directory, deleted ones included."""
    found = []
    for entry in os.scandir(f"/proc/{process}/fd"):
        try:
            target = os.readlink(entry.path)
        except OSError:
            continue
        if target.startswith(f"{directory}/"):
            found.append(target)
    return found


def train_with_lightning(end: str, begun: Path) -> None:
    loader: Any = batches()
    if end == "workers":
        loader = DataLoader(loader.dataset, batch_size=16, num_workers=2)
    module: Any = make_module(pl)
    original = module.training_step

    def training_step(batch: Any, batch_idx: int) -> torch.Tensor:
        if len(module.losses) == 3:
            begun.touch()
            if end == "exception":
                raise RuntimeError("on purpose")
        return original(batch, batch_idx)

    module.training_step = training_step
    trainer = pl.Trainer(
        strategy="ssd_offload",
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        max_epochs=2 if end == "workers" else -1,
    )
    trainer.fit(module, loader)


def train_with_accelerate(end: str, begun: Path) -> None:
    run = prepare(SSDOffloadPlugin()).train(3)
    begun.touch()
    run.train(3 if end == "normal" else 10**9)


def every_end(rank: int, directory: Path) -> dict[str, dict[str, Any]]:
    """What came of each process of `ENDS`, which run at the same time."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    homes = {name: directory / name.replace(" ", "-") for name in ENDS}
    processes = {name: _start(home, name) for name, home in homes.items()}
    return {name: _end(processes[name], home, name) for name, home in homes.items()}


def _start(home: Path, name: str) -> int:
    tier, begun, output = home / "tier", home / "begun", home / "output"
    tier.mkdir(parents=True)
    framework, end = name.split()
    process = os.fork()
    if process == 0:  # as a script: what it raises ends the interpreter
        os.chdir(home)
        os.environ["SSD_OFFLOAD_DIR"] = str(tier)
        os.environ["SSD_OFFLOAD_CONFIG"] = json.dumps(
            {"mode": "always", "activations": {"min_size": "1KiB"}}
        )
        log = os.open(output, os.O_CREAT | os.O_WRONLY)
        os.dup2(log, 1)
        os.dup2(log, 2)
        {"lightning": train_with_lightning, "accelerate": train_with_accelerate}[framework](
            end, begun
        )
        sys.exit()
    return process


def _end(process: int, home: Path, name: str) -> dict[str, Any]:
    tier, begun, output, end = home / "tier", home / "begun", home / "output", name.split()[1]
    in_use: list[str] = []
    while not begun.exists() and not _ended(process):
        time.sleep(0.01)
    if end in SIGNALS:
        in_use = open_files(tier, process)
        time.sleep(0.2)
        os.kill(process, SIGNALS[end])
    pressed_again = time.monotonic() + 10
    while not _ended(process):
        time.sleep(0.01)
        if end in SIGNALS and time.monotonic() > pressed_again:
            # Python drops a KeyboardInterrupt that arrives inside a finalizer: press Ctrl-C again.
            os.kill(process, SIGNALS[end])
            pressed_again = time.monotonic() + 20
    _, status = os.waitpid(process, 0)
    return {
        "status": os.waitstatus_to_exitcode(status),
        "output": output.read_text(),
        "signalled": name.split()[1] in SIGNALS,
        "in_use": len(in_use),
        "left": [path.name for path in tier.iterdir()],
    }


def _ended(process: int) -> bool:
    """Whether it has; its status is kept."""
    return os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
