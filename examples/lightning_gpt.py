"""Trains a small GPT out of core with Lightning, and measures what that costs and saves.

    python examples/lightning_gpt.py

The model learns to write Python from the sources of the standard library. Two things here are about
offloading: `strategy="ssd_offload"`, and the callback that sends measurements to the logger. At the
end the first steps are trained once more with `strategy="auto"`, in a process of their own: the
losses must be the same to the last bit, and the peaks of memory are compared.
"""

import argparse
import hashlib
import importlib.util
import json
import logging
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torch import Tensor

from offload_strategy import OffloadConfig
from offload_strategy.callbacks import OffloadMonitor
from offload_strategy.examples.gpt import nats_per_byte
from offload_strategy.examples.memory import PeakMemory, give_freed_memory_back
from offload_strategy.examples.recipe import (
    make_loaders,
    make_model,
    make_optimizer,
    options_parser,
)
from offload_strategy.examples.report import Figures, Journal, print_report

HAS_TENSORBOARD = importlib.util.find_spec("tensorboard") is not None
# All that may leave does, although it would fit into memory. What is on its way to and from the
# disk may take 64 MiB: the default (an eighth of the free memory, at most 512 MiB on the CPU) is
# more than this small model needs in all, and with a slow disk everything would stay in memory.
CONFIG = os.environ.get("SSD_OFFLOAD_CONFIG") or '{"mode": "always", "memory": {"pinned": "64MiB"}}'
COMPARED_STEPS = 15
SHAPE_OPTIONS = ["steps", "layers", "width", "context", "batch"]
REPEATED_OPTIONS = [*SHAPE_OPTIONS, "accumulate", "clip", "seed", "logdir"]
PROMPT = b"class "


class LitGPT(pl.LightningModule):
    """How the model is trained: the same for every strategy."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        self.options = options
        self.model = make_model(options)

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        tokens, targets = batch
        loss = nats_per_byte(self.model(tokens), targets)
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch: list[Tensor], index: int) -> Tensor:
        tokens, targets = batch
        loss = nats_per_byte(self.model(tokens), targets)
        self.log("validation/loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer, schedule = make_optimizer(self.model, self.options)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def train(options: argparse.Namespace) -> Figures:
    """Train a model in this process, and return every figure."""
    allocator = give_freed_memory_back()
    import_the_rest()
    peak = PeakMemory()
    module = LitGPT(options)
    training, validation = make_loaders(options)
    steps = options.stop_after or options.steps
    journal = Journal(steps, Path(options.logdir, "run.json"))
    monitor = [OffloadMonitor()] if options.strategy == "ssd_offload" else []
    logger_class = TensorBoardLogger if HAS_TENSORBOARD else CSVLogger
    trainer = pl.Trainer(
        strategy=options.strategy,
        devices=1,
        max_epochs=1,
        max_steps=steps,
        accumulate_grad_batches=options.accumulate,
        gradient_clip_val=options.clip or None,
        callbacks=[journal, *monitor],
        logger=logger_class(options.logdir, name="lightning_gpt"),
        log_every_n_steps=1,
        num_sanity_val_steps=-1,  # all of the validation, before the training
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    device = trainer.strategy.root_device
    print(f'Training with strategy "{options.strategy}" on {device}', flush=True)
    if options.strategy == "ssd_offload":
        config = OffloadConfig.load(options.config)
        places = ", ".join(str(tier.path or tier.kind) for tier in config.tiers)
        print(f"  tensors go to {places}; config {options.config}", flush=True)

    trainer.fit(module, training, validation)

    return {
        "strategy": options.strategy,
        "steps": trainer.global_step,
        "parameters": sum(parameter.numel() for parameter in module.parameters()),
        "allocator": allocator,
        "config": options.config,
        "peak_bytes": peak.bytes(),
        "device_peak_bytes": torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0,
        "tokens_per_second": journal.tokens_per_second(),
        "losses": journal.losses,
        "validation_losses": journal.validation_losses,
        "parameters_sha256": sha256(module),
        "metrics": journal.metrics,
        "sample": (PROMPT + module.model.generate(PROMPT, 300)).decode(errors="replace"),
    }


def import_the_rest() -> None:
    """Import what an optimizer's first call would, so that it does not count as training."""
    torch.optim.SGD([torch.zeros(1)]).zero_grad()


def sha256(module: torch.nn.Module) -> str:
    """Return a checksum of all parameters."""
    digest = hashlib.sha256()
    for parameter in module.parameters():
        digest.update(parameter.detach().cpu().numpy().tobytes())
    return digest.hexdigest()


def train_elsewhere(options: argparse.Namespace) -> Figures:
    """Train the first steps without offload, in a process of its own; return its figures."""
    file = Path(options.logdir, "without_offload.json")
    arguments = [f"--{name}={getattr(options, name)}" for name in REPEATED_OPTIONS]
    arguments += ["--strategy=auto", f"--stop-after={min(COMPARED_STEPS, options.steps)}"]
    arguments += ["--no-compare", f"--json={file}"]
    subprocess.run([sys.executable, __file__, *arguments], check=True)
    figures: Figures = json.loads(file.read_text())
    return figures


def parse_options() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = options_parser("Train a small GPT with Lightning, out of core.", steps=70)
    parser.add_argument("--strategy", default="ssd_offload", help="of the Trainer")
    parser.add_argument("--config", default=CONFIG, help="of the engine: a preset, a file or JSON")
    parser.add_argument("--no-compare", action="store_true", help="leave the comparison out")
    parser.add_argument("--stop-after", type=int, default=0, help="stop early, 0 for not at all")
    parser.add_argument("--json", type=Path, help="file for all figures")
    return parser.parse_args()


def main() -> None:
    """Train, compare, and print a table."""
    options = parse_options()
    quieten_lightning()
    os.environ["SSD_OFFLOAD_CONFIG"] = options.config  # the default config everywhere

    figures = train(options)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2))
    if not options.no_compare:
        print("\nOnce more, from the start, in a process of its own", flush=True)
        print_report(figures, train_elsewhere(options))
    if HAS_TENSORBOARD and not options.stop_after:
        print(f"\nCurves: {sys.executable} -m tensorboard.main --logdir {options.logdir}")
    if options.strategy == "ssd_offload":
        print(f"The run as a page: ssd-offload report {Path(options.logdir, 'run.json')}")


def quieten_lightning() -> None:
    """Leave out hints that do not fit a demonstration."""
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", message=".*does not have many workers")
    warnings.filterwarnings("ignore", message=".*LeafSpec")


if __name__ == "__main__":
    main()
