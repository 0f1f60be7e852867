"""What the main job measures while it trains, and the table that it ends with."""

import textwrap
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

Figures = dict[str, Any]

LABEL, COLUMN = 32, 24


class Journal(pl.Callback):
    """Prints how the training goes, and keeps the figures.

    Args:
        steps: Optimizer steps in all.
        run: The file into which an engine's report is written.
    """

    def __init__(self, steps: int, run: Path) -> None:
        self.steps, self.run = steps, run
        self.losses: list[float] = []  # one a micro-batch
        self.validation_losses: list[float] = []
        self.metrics: dict[str, float] = {}
        self._batch_losses: list[float] = []
        self._tokens, self._seconds, self._printed_at = 0, 0.0, 0

    def tokens_per_second(self) -> float:
        """Return the speed of the training alone, without loading of data and validation."""
        return self._tokens / self._seconds if self._seconds else float("nan")

    def on_train_batch_start(self, *_: Any) -> None:
        self._started = time.perf_counter()

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, batch: Any, index: int
    ) -> None:
        self.losses.append(outputs["loss"].item())
        if index > 0:  # the first one warms up
            self._tokens += batch[0].numel()
            self._seconds += time.perf_counter() - self._started
        step = trainer.global_step
        if step > self._printed_at and (step in (1, self.steps) or step % 10 == 0):
            self._printed_at = step
            speed = "" if index == 0 else f"   {self.tokens_per_second():6,.0f} tokens/s"
            print(f"  step {step:4d}/{self.steps}   loss {self.losses[-1]:.3f}{speed}", flush=True)

    def on_validation_batch_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, *_: Any
    ) -> None:
        self._batch_losses.append(outputs.item())

    def on_validation_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.validation_losses.append(sum(self._batch_losses) / len(self._batch_losses))
        self._batch_losses.clear()
        print(f"  validation loss {self.validation_losses[-1]:.3f} nats per byte", flush=True)

    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        engine = getattr(trainer.strategy, "offload_engine", None)
        if engine:
            self.metrics = engine.metrics()
            self.run.parent.mkdir(parents=True, exist_ok=True)
            engine.report().save(self.run)


def print_report(with_offload: Figures, without: Figures) -> None:
    """Print what two runs of the same training took, side by side.

    Args:
        with_offload: What `train` in lightning_gpt.py returned.
        without: The same for the strategy that keeps everything in memory; fewer steps are enough.
    """
    figures = (with_offload, without)
    print()
    row("", *(f'"{run["strategy"]}"' for run in figures))
    row("optimizer steps", *(f"{run['steps']}" for run in figures))
    row("training loss, start → end", *map(training_loss, figures))
    row("validation loss, start → end", *map(validation_loss, figures))
    row("tokens per second", *(f"{run['tokens_per_second']:,.0f}" for run in figures))
    for client in ("activations", "optimizer"):
        row(f"{client}: written / read", *(moved(run, client) for run in figures))
    row("share of transfer time hidden", *map(hidden, figures))
    row("peak memory", *(megabytes(run["peak_bytes"]) for run in figures))
    if with_offload["device_peak_bytes"]:
        row("peak device memory", *(megabytes(run["device_peak_bytes"]) for run in figures))
    print()
    key = "device_peak_bytes" if with_offload["device_peak_bytes"] else "peak_bytes"
    print(f"Peak memory is {1 - with_offload[key] / without[key]:.0%} lower with offload.")
    count = len(without["losses"])
    same = with_offload["losses"][:count] == without["losses"]
    print(f"The first {count} losses are {'' if same else 'NOT '}the same to the last bit.")
    print("Losses are in nats per byte, the last one of the training a mean over 10 batches.")
    print("Peak memory is what each process had resident above the level after its imports, with")
    print(f"{with_offload['allocator']} in both.")
    print(f"\nWhat the model wrote, after {with_offload['steps']} steps:\n")
    printable = "".join(c if c.isprintable() or c == "\n" else "?" for c in with_offload["sample"])
    print(textwrap.indent(printable, "    "))


def row(label: str, *cells: str) -> None:
    """Print one line of the table."""
    print(label.ljust(LABEL) + "".join(cell.rjust(COLUMN) for cell in cells))


def training_loss(run: Figures) -> str:
    """Show the first loss, and the mean of the last ones."""
    last = run["losses"][-10:]
    return f"{run['losses'][0]:.3f} → {sum(last) / len(last):.3f}"


def validation_loss(run: Figures) -> str:
    """Show the losses before and after; a run that was stopped early has none after."""
    first, *rest = run["validation_losses"]
    return f"{first:.3f} → {rest[-1]:.3f}" if rest else f"{first:.3f} → –"


def moved(run: Figures, client: str) -> str:
    """Show the bytes that one client moved."""
    if not run["metrics"]:
        return "–"
    metrics, prefix = run["metrics"], f"offload/{client}"
    written, read = metrics[f"{prefix}/written_bytes"], metrics[f"{prefix}/read_bytes"]
    return f"{megabytes(written)} / {megabytes(read)}"


def hidden(run: Figures) -> str:
    """Show the share of transfer time that training did not wait for."""
    share = run["metrics"].get("offload/transfer/hidden_share")
    return "–" if share is None else f"{share:.1%}"


def megabytes(count: float) -> str:
    """Show bytes in MB (1e6)."""
    return f"{count / 1e6:,.0f} MB"
