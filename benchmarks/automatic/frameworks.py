"""The same training through Lightning or Accelerate, with accumulation, clipping and a schedule.

    python -m benchmarks.automatic.frameworks '{"through": "lightning", "steps": 4, "threads": 2}'

Plain unless the environment says otherwise: ``strategy`` in the options for Lightning, a launch
file for Accelerate. Prints the figures of each step as a line of JSON; the last one has a digest of
all weights, too.
"""

from __future__ import annotations

import hashlib
import json
import logging
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR

from benchmarks.activations.models import Shape
from benchmarks.machine import forget_peak, status_bytes
from benchmarks.optimizer.contenders import ADAMW
from benchmarks.optimizer.tasks import RandomTokens

_TASK = RandomTokens(Shape(768, 12, 12, sequence=256, tied=False), size=4)
_MICROBATCHES, _CLIP = 2, 0.5


class Figures:
    """Prints what each step took."""

    def __init__(self, steps: int) -> None:
        self._left, self._begin = steps, 0.0
        self._losses: list[str] = []

    def begin(self) -> None:
        """Begin a step."""
        if not self._losses:
            self._begin = time.perf_counter()

    def add(self, loss: torch.Tensor, model: torch.nn.Module) -> None:
        """Add the loss of a micro-batch; the last of a step ends it."""
        self._losses.append(float(loss.detach()).hex())
        if len(self._losses) < _MICROBATCHES:
            return
        seconds = time.perf_counter() - self._begin
        self._left -= 1
        if not self._left:
            digest = hashlib.sha256()
            for parameter in model.parameters():
                digest.update(parameter.detach().numpy().tobytes())
            self._losses.append(digest.hexdigest())
        figures = {
            "seconds": seconds,
            "loss": " ".join(self._losses),
            "peak_bytes": status_bytes("VmHWM"),
        }
        print(json.dumps(figures), flush=True)
        self._losses.clear()


def _optimizer(model: torch.nn.Module) -> tuple[torch.optim.Optimizer, LambdaLR]:
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    return optimizer, LambdaLR(optimizer, lambda step: 1 / (1 + step))


def _batches(steps: int) -> Iterator[torch.Tensor]:
    for number in range(steps * _MICROBATCHES):
        yield _TASK.inputs(number)


def lightning(options: dict[str, Any]) -> None:
    """Train with Lightning's Trainer."""
    import lightning.pytorch as pl

    figures = Figures(options["steps"])

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = _TASK.model()

        def training_step(self, inputs: torch.Tensor) -> torch.Tensor:
            return _TASK.loss(self.model, inputs)

        def configure_optimizers(self) -> Any:
            optimizer, schedule = _optimizer(self)
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    class Steps(pl.Callback):
        def on_train_start(self, *_: Any) -> None:
            forget_peak()

        def on_train_batch_start(self, *_: Any) -> None:
            figures.begin()

        def on_train_batch_end(self, _: Any, module: Any, outputs: Any, *__: Any) -> None:
            figures.add(outputs["loss"], module)

    trainer = pl.Trainer(
        max_steps=options["steps"],
        accumulate_grad_batches=_MICROBATCHES,
        gradient_clip_val=_CLIP,
        strategy=options.get("strategy", "auto"),
        callbacks=[Steps()],
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    batches = list(_batches(options["steps"]))
    trainer.fit(Module(), torch.utils.data.DataLoader(batches, batch_size=None))


def accelerate(options: dict[str, Any]) -> None:
    """Train with Accelerate; nothing here knows of offload."""
    from accelerate import Accelerator

    figures = Figures(options["steps"])
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=_MICROBATCHES)
    model = _TASK.model()
    model, optimizer, schedule = accelerator.prepare(model, *_optimizer(model))
    forget_peak()
    for inputs in _batches(options["steps"]):
        figures.begin()
        with accelerator.accumulate(model):
            loss = _TASK.loss(model, inputs)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), _CLIP)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        figures.add(loss, model)
        del loss
    accelerator.end_training()


def main() -> None:
    """Train as the options say, which are JSON."""
    options = json.loads(sys.argv[1])
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(options["threads"])
    {"lightning": lightning, "accelerate": accelerate}[options["through"]](options)


if __name__ == "__main__":
    main()
