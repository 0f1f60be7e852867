"""Data-parallel training of which rank 2 comes to an end: `doomed.py TIER NOTES HOW...`.

As a rank of torchrun, or else by itself: then it forks ranks for each HOW, which no launcher looks
after, and says with which statuses they ended. HOW is "backward" or "step", in the middle of which
the rank is killed, or "error", which an update of its own raises.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # which DistributedDataParallel imports: before the ranks are forked
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parents[2]))

from offload_strategy import OffloadEngine
from tests.distributed.data_parallel_runs import Net, config

RANKS = 4
VICTIM = 2


def train(how: str, tier: Path, notes: Path, rank: int) -> None:
    """Train until rank 2 is gone; a loop that goes on says so."""
    torch.set_num_threads(1)
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
            logits = model(tokens[:, :-1])
            nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
            del logits
            optimizer.step()
            optimizer.zero_grad()
            trained += 1
            (notes / f"moved-{rank}").write_text(
                str(engine.metrics()["offload/optimizer/written_bytes"])
            )
    print("trained to the end")


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
            train(how, tier, notes, rank)
            sys.exit()
        ranks[process] = rank
    return ranks


def main() -> None:
    """Be a rank, or have several."""
    tier, notes, kinds = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]
    if "RANK" in os.environ:
        train(kinds[0], tier, notes, int(os.environ["RANK"]))
        return
    ranks = {
        process: (how, rank)
        for how in kinds
        for process, rank in fork(how, tier, notes / how).items()
    }
    found: dict[str, dict[int, list[float]]] = {how: {} for how in kinds}
    while ranks:
        process, status = os.wait()
        how, rank = ranks.pop(process)
        after = time.time() - float((notes / how / "died").read_text())
        found[how][rank] = [os.waitstatus_to_exitcode(status), after]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
