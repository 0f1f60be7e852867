"""What `test_deaths` runs: data-parallel training of which a rank comes to an end.

HOW is "backward" or "step", in the middle of which the rank is killed, or "error", which an update
of its own raises.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.nn.parallel import DistributedDataParallel

from offload_strategy import OffloadEngine
from tests.distributed.data_parallel_runs import Net, config, loss_of

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
