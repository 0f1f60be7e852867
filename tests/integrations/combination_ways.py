"""The ways to train that the table of `docs/combinations.md` has."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch import nn
from torch.utils.data import DataLoader

from offload_strategy import SSDOffloadPlugin
from offload_strategy.integrations.accelerate.plugin import session_of
from tests.integrations.combinations import (
    AXES,
    SCALED,
    SCALED_AND_EAGER,
    STREAMED_IN_RANKS,
    Combination,
    Outcome,
    Refusal,
    Way,
    batches,
    compiled,
    make_model,
    moved_bytes,
    plain_loop,
    verdicts,
    weights_of,
)
from tests.integrations.lightning_features import FAMILY, quiet
from tests.integrations.lightning_runs import import_family, make_trainer, strategy_class

Config = Mapping[str, Any] | None

_WITH_SCALER = {**AXES, "precision": (*AXES["precision"], SCALED)}


def _loop(combination: Combination, sections: Config) -> Outcome:
    return plain_loop(combination, sections, compiled(make_model(combination), combination))


# ---------------------------------------------------------------------- frameworks


def _lightning(combination: Combination, sections: Config) -> Outcome:
    pl = import_family(FAMILY)
    losses = []

    class Module(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = compiled(make_model(combination), combination)

        def training_step(self, tokens: torch.Tensor, batch_idx: int) -> torch.Tensor:
            loss: torch.Tensor = self.net(tokens)
            losses.append(loss.item().hex())
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    strategy = "auto" if sections is None else strategy_class(FAMILY)(config=sections)
    options: dict[str, Any] = {"precision": {"32": "32-true"}.get(combination.precision)}
    options["precision"] = options["precision"] or combination.precision
    if combination.precision == SCALED:
        # For the CPU the Trainer takes bf16-mixed instead, unless it is given the plugin itself.
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        options = {"plugins": [pl.plugins.MixedPrecision(SCALED, "cpu", scaler=scaler)]}
    module = Module()
    torch.manual_seed(1)
    with quiet(), tempfile.TemporaryDirectory() as root:
        trainer = make_trainer(pl, Path(root), strategy, max_steps=len(batches()), **options)
        trainer.fit(module, DataLoader(list(batches()), batch_size=None))
    moved = {} if sections is None else moved_bytes(trainer.strategy.offload_engine)
    return Outcome(losses, weights_of(module), moved)


def _accelerate(combination: Combination, sections: Config) -> Outcome:
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    accelerator = Accelerator(
        cpu=True,
        mixed_precision="bf16" if combination.precision == "bf16-mixed" else "no",
        dynamo_backend="no" if combination.compiles_blocks else combination.compile,
        kwargs_handlers=None if sections is None else [SSDOffloadPlugin(config=sections)],
    )
    net = make_model(combination)
    if combination.compiles_blocks:
        compiled(net, combination)
    loader = DataLoader(list(batches()), batch_size=None)
    model, optimizer, loader = accelerator.prepare(
        net, torch.optim.AdamW(net.parameters(), lr=1e-2), loader
    )
    torch.manual_seed(1)
    losses = []
    for tokens in loader:
        loss = model(tokens)
        accelerator.backward(loss)
        losses.append(loss.item().hex())
        del loss
        optimizer.step()
        optimizer.zero_grad()
    session = session_of(accelerator)
    moved = {} if session is None else moved_bytes(session.engine)
    if session is not None:
        session.close()
    return Outcome(losses, weights_of(net), moved)


IN_ONE_PROCESS = {
    way.name: way
    for way in (
        Way(
            "Loop of one's own",
            "Autocast for mixed precision, with `GradScaler` for 16-mixed; `torch.compile(model)`.",
            _loop,
            [
                Refusal(
                    SCALED_AND_EAGER,
                    r"overlap: commit",
                    "gradients are used before the scaler sees them (first step)",
                    "OffloadError",
                )
            ],
            _WITH_SCALER,
        ),
        Way(
            "Lightning, one device",
            '`Trainer(strategy="ssd_offload", precision=...)`; the module holds '
            "`torch.compile(model)`.",
            _lightning,
            [
                Refusal(
                    SCALED_AND_EAGER,
                    r"loss scaling.*overlap: commit",
                    "gradients are used before the scaler sees them",
                    "ConfigError",
                )
            ],
            _WITH_SCALER,
        ),
        Way(
            "Accelerate, one process",
            "`Accelerator(mixed_precision=..., dynamo_backend=...)`. Without a GPU Accelerate has "
            "no 16-mixed.",
            _accelerate,
        ),
    )
}


# ---------------------------------------------------------------------- two ranks


def _data_parallel(rank: int, combination: Combination, sections: Config) -> Outcome:
    model = nn.parallel.DistributedDataParallel(make_model(combination))
    return plain_loop(combination, sections, compiled(model, combination), rank)


def _sharded(rank: int, combination: Combination, sections: Config) -> Outcome:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = make_model(combination)
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    policy = MixedPrecisionPolicy()
    if combination.precision == "bf16-mixed":
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for block in model.blocks:
        if combination.compile != "no":
            block.compile(backend=combination.compile)
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)

    def as_it_is(combination: Combination) -> AbstractContextManager[Any]:
        return nullcontext()

    return plain_loop(combination, sections, model, rank, as_it_is)


def ways_of_ranks(rank: int) -> dict[str, Way]:
    """The ways of several processes, by name, for one of them."""
    ways = (
        Way(
            "DistributedDataParallel, two ranks",
            "Autocast for mixed precision; `torch.compile(DistributedDataParallel(model))`.",
            functools.partial(_data_parallel, rank),
            [STREAMED_IN_RANKS],
        ),
        Way(
            "FSDP2 (`fully_shard`), two ranks",
            "`MixedPrecisionPolicy` for mixed precision; each block is compiled, then sharded.",
            functools.partial(_sharded, rank),
            [STREAMED_IN_RANKS],
        ),
    )
    return {way.name: way for way in ways}


def in_ranks(rank: int, directory: Path) -> dict[str, list[str]]:
    """What each rank does, for `run_ranks`: the verdicts of its ways, in order."""
    return {
        name: list(verdicts(way, directory).values()) for name, way in ways_of_ranks(rank).items()
    }
