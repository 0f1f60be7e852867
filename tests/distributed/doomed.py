"""What `test_deaths` runs: data-parallel training of which a rank comes to an end.

HOW is "backward" or "step", in the middle of which the rank is killed, or "error", which an update
of its own raises. torchrun may start the ranks again.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.nn.parallel import DistributedDataParallel

from offload_strategy import OffloadEngine, load, save
from tests.distributed import data_parallel_runs
from tests.distributed.data_parallel_runs import Net, config, different, loss_of

RANKS = 3
VICTIM = 2


def train(how: str, tier: Path, notes: Path) -> None:
    """Train until rank 2 is gone; a loop that goes on says so."""
    rank = int(os.environ["RANK"])
    (notes / f"process-{rank}").write_text(str(os.getpid()))
    init = None if "MASTER_PORT" in os.environ else f"file://{notes}/store"
    dist.init_process_group("gloo", init_method=init, rank=rank, world_size=RANKS)
    doomed = rank == VICTIM
    trained = 0

    def end() -> None:
        (notes / "died").write_text(str(time.time()))
        if how == "error":
            raise OSError("an update failed")
        os.kill(os.getpid(), signal.SIGKILL)

    class Adam(torch.optim.AdamW):
        def step(self, closure: Any = None) -> Any:
            if doomed and trained == 2 and how != "backward":
                end()
            return super().step(closure)

    def gradient(_: torch.Tensor) -> None:
        if doomed and trained == 2 and how == "backward":
            end()

    torch.manual_seed(0)
    net = Net()
    net.up.weight.register_hook(gradient)
    model = DistributedDataParallel(net, bucket_cap_mb=0.02)
    with OffloadEngine(config(tier, "off")) as engine:
        optimizer = engine.attach(model, Adam(net.parameters(), lr=1e-2))
        while trained < 1000:
            tokens = torch.randint(0, 96, (4, 17))
            loss_of(model, tokens).backward()
            optimizer.step()
            optimizer.zero_grad()
            trained += 1
            (notes / f"moved-{rank}").write_text(
                str(engine.metrics()["offload/optimizer/written_bytes"])
            )
    (notes / "to-the-end").touch()


def fork(how: str, tier: Path, notes: Path) -> dict[int, int]:
    """Start ranks, whose output goes to files; their numbers by process."""
    notes.mkdir()
    ranks = {}
    for rank in range(RANKS):
        process = os.fork()
        if process == 0:
            os.environ["RANK"] = str(rank)  # torch's errors begin with it
            output = os.open(notes / f"output-{rank}", os.O_CREAT | os.O_WRONLY)
            os.dup2(output, 1)
            os.dup2(output, 2)
            train(how, tier, notes)
            sys.exit()
        ranks[process] = rank
    return ranks


def by_themselves(
    rank: int, directory: Path, tier: str, ways: list[str]
) -> dict[str, dict[int, list[float]]]:
    """Ranks that no launcher looks after; their exit statuses, and the seconds until then."""
    ranks = {
        process: (how, rank)
        for how in ways
        for process, rank in fork(how, Path(tier), directory / how).items()
    }
    found: dict[str, dict[int, list[float]]] = {how: {} for how in ways}
    while ranks:
        process, status = os.wait()
        how, rank = ranks.pop(process)
        after = time.time() - float((directory / how / "died").read_text())
        found[how][rank] = [os.waitstatus_to_exitcode(status), after]
    return found


def launch(size: int, restarts: int, function: Callable[..., None], *arguments: Any) -> None:
    """As torchrun does, but with ranks that are forked."""
    # From the launcher's own store ranks that are started again may read where the old ones
    # listened (torch 2.13, with or without offload).
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    launched = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=size,
        run_id="here",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=restarts,
        monitor_interval=0.1,
        start_method="fork",
    )
    elastic_launch(launched, function)(*arguments)


def by_the_launcher(rank: int, directory: Path, tier: str) -> list[Any]:
    """What torchrun says of ranks of which one is killed, and how long after."""
    try:
        launch(RANKS, 0, train, "step", Path(tier), directory)
    except ChildFailedError as error:
        return [str(error), time.time() - float((directory / "died").read_text())]
    return ["they ended well", 0.0]


# ---------------------------------------------------------------------- started again
STEPS, EVERY, KILLED_AFTER = 8, 3, 4


def train_on(engine: OffloadEngine | None, checkpoint: Path, doomed: bool) -> dict[str, Any]:
    """Train to the end, from the checkpoint if there is one.

    A rank is killed between two checkpoints; the ranks that torchrun starts again go on from the
    last one.
    """
    rank = dist.get_rank()
    saved = load(checkpoint) if checkpoint.exists() else None
    first = 0 if saved is None else saved["step"]

    def after(step: int, net: nn.Module, optimizer: Any) -> None:
        if doomed and step == KILLED_AFTER:
            os.kill(os.getpid(), signal.SIGKILL)
        if engine is not None and (step + 1) % EVERY == 0:
            states = optimizer.state_dict()
            if rank == 0:
                state = {"step": step + 1, "model": net.state_dict(), "optimizer": states}
                save(state, checkpoint)
            dist.barrier()

    steps = range(first, STEPS)
    return {
        **data_parallel_runs.train(rank, engine, states=saved, steps=steps, after=after),
        "first": first,
    }


def restarted(rank: int, directory: Path, tier: str) -> None:
    """Start two ranks, and again after one was killed."""
    launch(2, 1, train_and_compare, Path(tier), directory)


def train_and_compare(tier: Path, notes: Path) -> None:
    """Train, be killed, train again, and compare with training that nothing interrupts."""
    dist.init_process_group("gloo")
    rank, restarts = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    with OffloadEngine(config(tier, "commit")) as engine:
        ours = train_on(engine, notes / "last.ckpt", doomed=rank == 1 and restarts == 0)
        moved = engine.metrics()["offload/optimizer/written_bytes"]
    plain = train_on(None, notes / "none", doomed=False)
    first = ours["first"]
    plain["losses"] = plain["losses"][first:]
    differs = [key for key in different(plain, ours) if key != "first"]
    found = {"restarts": restarts, "first": first, "moved": moved, "differs": differs}
    (notes / f"found-{rank}").write_text(json.dumps(found))
    dist.destroy_process_group()
