"""Training processes that end one way or another, through Lightning and Accelerate."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

from offload_strategy import SSDOffloadPlugin
from tests.ends import outcomes
from tests.integrations.accelerate_runs import prepare
from tests.integrations.lightning_runs import batches, make_module, make_trainer

ENDS = {
    "lightning workers": 0,
    "lightning exception": 1,
    "lightning kill": -signal.SIGKILL,
    "accelerate normal": 0,
    "accelerate interrupt": -signal.SIGINT,
    "accelerate terminate": -signal.SIGTERM,
}
"""Exit status by framework and end; what is negative is the signal that each is sent."""


def train_with_lightning(end: str) -> None:
    loader: Any = batches()
    if end == "workers":
        loader = DataLoader(loader.dataset, batch_size=16, num_workers=2)
    module: Any = make_module(pl)
    original = module.training_step

    def training_step(batch: Any, batch_idx: int) -> torch.Tensor:
        if len(module.losses) == 3:
            print("ready", flush=True)
            if end == "exception":
                raise RuntimeError("on purpose")
        return original(batch, batch_idx)

    module.training_step = training_step
    epochs = 2 if end == "workers" else -1
    make_trainer(pl, Path(), "ssd_offload", max_steps=-1, max_epochs=epochs).fit(module, loader)


def train_with_accelerate(end: str) -> None:
    run = prepare(SSDOffloadPlugin()).train(3)
    print("ready", flush=True)
    run.train(3 if end == "normal" else 10**9)


def every_end(rank: int, directory: Path) -> list[dict[str, Any]]:
    """What came of each process of `ENDS`."""
    scripts = {}
    for name, status in ENDS.items():
        framework, end = name.split()
        code = f"import {__name__} as ends; ends.train_with_{framework}({end!r})"
        scripts[name] = (code, max(0, -status))
    return outcomes(rank, directory, scripts)
