"""The ways to train that the table of `docs/combinations.md` has."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader

from offload_strategy import SSDOffloadPlugin
from offload_strategy.integrations.accelerate.plugin import session_of
from tests.integrations.accelerate_runs import forget_accelerator
from tests.integrations.combinations import (
    AXES,
    REFUSED_IN_RANKS,
    SCALED,
    SCALED_AND_EAGER,
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
from tests.integrations.lightning_runs import make_module, make_trainer, strategy_class

Config = Mapping[str, Any] | None


def _loop(combination: Combination, sections: Config) -> Outcome:
    return plain_loop(combination, sections, compiled(make_model(combination), combination))


# ---------------------------------------------------------------------- frameworks


def _lightning(combination: Combination, sections: Config) -> Outcome:
    pl = pytest.importorskip(FAMILY)
    strategy = "auto" if sections is None else strategy_class(FAMILY)(config=sections)
    options: dict[str, Any] = {"precision": combination.precision.replace("32", "32-true")}
    if combination.precision == SCALED:
        # For the CPU the Trainer takes bf16-mixed instead, unless it is given the plugin itself.
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        options = {"plugins": [pl.plugins.MixedPrecision(SCALED, "cpu", scaler=scaler)]}
    module = make_module(pl)
    module.net = compiled(make_model(combination), combination)
    module.loss = lambda tokens: module.net(tokens)
    torch.manual_seed(1)
    with quiet(), tempfile.TemporaryDirectory() as root:
        trainer = make_trainer(pl, Path(root), strategy, max_steps=len(batches()), **options)
        trainer.fit(module, DataLoader(list(batches()), batch_size=None))
    moved = {} if sections is None else moved_bytes(trainer.strategy.offload_engine)
    return Outcome(module.losses, weights_of(module), moved)


def _accelerate(combination: Combination, sections: Config) -> Outcome:
    forget_accelerator()
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
        losses.append(loss.item())
        del loss
        optimizer.step()
        optimizer.zero_grad()
    session = session_of(accelerator)
    moved = {} if session is None else moved_bytes(session.engine)
    if session is not None:
        session.close()
    return Outcome(losses, weights_of(net), moved)


_OWN_LOOP = Refusal(SCALED_AND_EAGER, r"^OffloadError: .*overlap: commit")
_TRAINER = Refusal(SCALED_AND_EAGER, r"^ConfigError: .*loss scaling.*overlap: commit")
_EARLY = "gradients are used before the scaler sees them"
_WITH_SCALER = (*AXES["precision"], SCALED)

IN_ONE_PROCESS = {
    "Loop of one's own": Way(_loop, {f"{_EARLY} (first step)": _OWN_LOOP}, _WITH_SCALER),
    "Lightning, one device": Way(_lightning, {_EARLY: _TRAINER}, _WITH_SCALER),
    "Accelerate, one process": Way(_accelerate, {}),
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

    return plain_loop(combination, sections, model, rank, lambda _: nullcontext())


def ways_of_ranks(rank: int) -> dict[str, Way]:
    """The ways of several processes, by name, for one of them."""
    return {
        "DistributedDataParallel, two ranks": Way(partial(_data_parallel, rank), REFUSED_IN_RANKS),
        "FSDP2 (`fully_shard`), two ranks": Way(partial(_sharded, rank), {}),
    }


def in_ranks(rank: int, directory: Path) -> dict[str, list[str]]:
    """What each rank does, for `run_ranks`: the verdicts of its ways, in order."""
    ways = ways_of_ranks(rank)
    return {name: list(verdicts(name, way, directory).values()) for name, way in ways.items()}
