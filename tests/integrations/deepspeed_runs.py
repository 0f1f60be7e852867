"""Short runs through DeepSpeed, alone and with the engine, in ranks that are forked.

Each run has its losses, a hash of its weights at the end, and what moved.
"""

from __future__ import annotations

import hashlib
import importlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.utils.data import DataLoader, Subset

from tests.integrations.accelerate_runs import forget_accelerator
from tests.integrations.lightning_runs import (
    FAMILIES,
    batches,
    make_module,
    make_trainer,
    strategy_class,
    tiny_model,
)
from tests.training import left_bytes

STEPS = 6
BATCH = 16
OFFLOAD: dict[str, Any] = {
    "activations": {"min_size": "1KiB", "budget": "100%"},
    "optimizer": {"enabled": False},
}


def zero(stage: int) -> dict[str, Any]:
    """DeepSpeed's config; with ZeRO-3, small parameters are taken apart as well."""
    section: dict[str, Any] = {"stage": stage, "reduce_bucket_size": 100_000}
    if stage == 3:
        section["stage3_param_persistence_threshold"] = 0
    return {"zero_optimization": section, "zero_allow_untested_optimizer": True}


def import_deepspeed() -> Any:
    """DeepSpeed, without the communication over shared memory, which it would compile first."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.utils.logging.logger.setLevel("ERROR")
    return deepspeed


# ---------------------------------------------------------------------- one run each


def alone(stage: int, loader: Iterable[Any]) -> dict[str, Any]:
    """DeepSpeed itself, with a loop of one's own."""
    model, optimizer = fresh()
    config = {**zero(stage), "train_micro_batch_size_per_gpu": BATCH}
    engine, *_ = import_deepspeed().initialize(model=model, optimizer=optimizer, config=config)
    losses = list(train(engine, loader, engine.backward, engine.step))
    result = outcome(losses, model)
    engine.destroy()
    return result


def lightning(family: str, stage: int, devices: int = 1) -> dict[str, Any]:
    """The same through `Trainer(strategy=...)` of an install."""
    import_deepspeed()
    pl = importlib.import_module(family)
    ours = strategy_class(family, "SSDOffloadDeepSpeedStrategy")
    strategy = ours(OFFLOAD, config=zero(stage))
    module = make_module(pl)
    trainer = make_trainer(
        pl, Path.cwd(), strategy, max_steps=STEPS, devices=devices, use_distributed_sampler=False
    )
    trainer.fit(module, part_of_data(int(os.environ.get("LOCAL_RANK", "0")), devices))
    result = outcome(module.losses, module, strategy.offload_engine.metrics())
    strategy._close_engine()
    return result


def accelerate(stage: int, directory: Path) -> dict[str, Any]:
    """The same through `Accelerator.prepare`.

    Unless `accelerate launch` has put everything into the environment, it is given the plugins.
    """
    from accelerate import Accelerator, DeepSpeedPlugin
    from accelerate.state import PartialState

    from offload_strategy import SSDOffloadPlugin
    from offload_strategy.integrations.accelerate.plugin import session_of

    PartialState.destroy_process_group = lambda *_: None  # others go on with it
    plugins: dict[str, Any] = {}
    if "ACCELERATE_USE_SSD_OFFLOAD" not in os.environ:
        theirs = {**zero(stage), "train_micro_batch_size_per_gpu": BATCH}
        plugins["deepspeed_plugin"] = DeepSpeedPlugin(hf_ds_config=theirs)
        plugins["kwargs_handlers"] = [SSDOffloadPlugin(OFFLOAD, metrics_every=1)]
    board = {"log_with": "tensorboard", "project_dir": directory / "logs"}
    accelerator = Accelerator(**plugins, **board)
    accelerator.init_trackers("given" if plugins else "launched")
    model, plain = fresh()
    engine, optimizer, loader = accelerator.prepare(model, plain, part_of_data(0, 1))
    losses = []
    steps = optimizer.step, optimizer.zero_grad
    for step, loss in enumerate(train(engine, loader, accelerator.backward, *steps)):
        losses.append(loss)
        accelerator.log({"loss": loss}, step=step)
    session = session_of(accelerator)
    assert session is not None
    result = outcome(losses, model, session.engine.metrics())
    result["type"] = accelerator.distributed_type.value
    result["optimizer"] = type(optimizer).__name__
    accelerator.end_training()
    accelerator.free_memory()
    engine.destroy()
    forget_accelerator()
    return result


def part_of_data(rank: int, ranks: int) -> DataLoader[Any]:
    whole: Any = batches(2 * STEPS, BATCH).dataset
    return DataLoader(Subset(whole, range(rank, len(whole), ranks)), batch_size=BATCH)


def fresh() -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model and its optimizer, always the same."""
    torch.manual_seed(0)
    model = tiny_model()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(
    model: nn.Module,
    loader: Iterable[Any],
    backward: Callable[[torch.Tensor], Any],
    *steps: Callable[[], Any],
) -> Iterator[float]:
    """Yield the loss of each step."""
    for x, y in islice(loader, STEPS):
        loss = nn.functional.mse_loss(model(x), y)
        backward(loss)
        for step in steps:
            step()
        yield loss.item()


def outcome(
    losses: list[float], model: nn.Module, metrics: dict[str, float] | None = None
) -> dict[str, Any]:
    import deepspeed

    digest = hashlib.sha256()
    parameters = list(model.parameters())
    apart = [parameter for parameter in parameters if hasattr(parameter, "ds_id")]
    with deepspeed.zero.GatheredParameters(apart):
        for parameter in parameters:
            digest.update(parameter.detach().numpy().tobytes())
    return {
        "losses": [loss.hex() for loss in losses],
        "weights": digest.hexdigest(),
        "moved": 0.0 if metrics is None else left_bytes(metrics),
        "saved": 0.0 if metrics is None else metrics["offload/activations/step_saved_bytes"],
    }


# ---------------------------------------------------------------------- what a process does


def one_device(rank: int, directory: Path, variables: Mapping[str, str]) -> dict[str, Any]:
    """Every stage, everywhere. ZeRO-3 comes last: it replaces `torch.nn.functional.linear`."""
    os.chdir(directory)
    deepspeed = import_deepspeed()
    results: dict[str, Any] = {}
    for stage in (1, 2, 3):
        deepspeed.init_distributed("gloo")
        results[f"alone-{stage}"] = alone(stage, part_of_data(0, 1))
        results[f"accelerate-{stage}"] = accelerate(stage, directory)
        for family in FAMILIES[: 2 if stage == 3 else 1]:
            with counted_weights() as counts:
                results[f"{family}-{stage}"] = {**lightning(family, stage), "gathered": counts}
        if stage == 2:
            with mock.patch.dict(os.environ, variables):
                results["launched-2"] = accelerate(stage, directory)
    return results


def two_devices(rank: int, directory: Path) -> dict[str, Any]:
    """ZeRO-3 through Lightning; then alone in the same two processes."""
    os.chdir(directory)
    ours = lightning("lightning.pytorch", 3, devices=2)
    return {"ours": ours, "alone": alone(3, part_of_data(rank, 2))}


@contextmanager
def counted_weights() -> Iterator[list[int]]:
    """How many saved tensors were told to be weights that are gathered."""
    from offload_strategy.integrations.deepspeed.gathered_weights import GatheredWeights

    original, counts = GatheredWeights.save, [0]

    def save(self: Any, tensor: torch.Tensor) -> Any:
        found = original(self, tensor)
        counts[0] += found is not None
        return found

    with mock.patch.object(GatheredWeights, "save", save):
        yield counts
