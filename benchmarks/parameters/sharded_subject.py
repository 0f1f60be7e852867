"""Ranks of a model that FSDP2 shards, in processes of their own.

    python -m benchmarks.parameters.sharded_subject JSON    (started by `running.run`)

Prints a line of JSON for the start, one for each step and one for the end; bytes are of all ranks.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any


def main(options: dict[str, Any]) -> int:
    """Run every rank; the exit status is 1 if one of them fails, and the others are ended then."""
    size = options["ranks"]
    with tempfile.TemporaryDirectory() as store:
        # Before torch is imported: its memory is charged to each rank once.
        ranks = {}
        for rank in range(size):
            child = os.fork()
            if child == 0:
                os._exit(_rank(rank, options, store))
            ranks[child] = rank
        first = 0
        while ranks:
            child, status = os.wait()
            del ranks[child]
            if status and not first:
                first = status
                for other in ranks:
                    os.kill(other, signal.SIGTERM)
    if os.WIFSIGNALED(first):  # as the system kills it for memory
        os.kill(os.getpid(), os.WTERMSIG(first))
    return int(first != 0)


def _rank(rank: int, options: dict[str, Any], store: str) -> int:
    try:
        for event in train(rank, options, store):
            if rank == 0:
                print(json.dumps(event), flush=True)
    except Exception as error:
        print(f"rank {rank}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return 1
    return 0


def train(rank: int, options: dict[str, Any], store: str) -> Iterator[dict[str, Any]]:
    """Train one rank; what happened, event by event."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from benchmarks.machine import fix_allocator, status_bytes
    from benchmarks.parameters.job import Job
    from benchmarks.parameters.subject import cpu_seconds, moved
    from offload_strategy import OffloadEngine

    job = Job(**options)
    fix_allocator()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // job.ranks))
    os.environ["LOCAL_WORLD_SIZE"] = str(job.ranks)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}/ranks", rank=rank, world_size=job.ranks
    )
    begin = time.perf_counter()
    torch.manual_seed(0)
    model = job.empty()
    mesh = init_device_mesh("cpu", (job.ranks,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    engine = None if job.directory is None else OffloadEngine(job.config())
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    if engine is None:
        model.to_empty(device="cpu")
        for module in model.modules():
            reset = getattr(module, "reset_parameters", None)
            if reset is not None:
                reset()
    else:
        optimizer = engine.attach(model, optimizer, device=torch.device("cpu"))
    count = sum(parameter.numel() for parameter in model.parameters())
    yield {"event": "start", "seconds": time.perf_counter() - begin, "parameters": count}
    tokens = job.tokens()[rank :: job.ranks]
    before = moved(engine)
    for step in range(job.steps):
        dist.barrier()
        begin, cpu = time.perf_counter(), cpu_seconds()
        loss = model(tokens)
        forward = time.perf_counter()
        loss.backward()
        backward = time.perf_counter()
        optimizer.step()
        optimizer.zero_grad()
        dist.barrier()
        end = time.perf_counter()
        now = moved(engine)
        now["cpu_seconds"], before["cpu_seconds"] = cpu_seconds(), cpu
        difference = torch.tensor([now[name] - before[name] for name in now], dtype=torch.float64)
        losses = loss.detach().double()
        dist.all_reduce(difference)
        dist.all_reduce(losses)
        yield {
            "event": "step",
            "step": step,
            "loss": losses.item() / job.ranks,
            "seconds": end - begin,
            "forward": forward - begin,
            "backward": backward - forward,
            "update": end - backward,
            **dict(zip(now, difference.tolist(), strict=True)),
        }
        before = now
        del loss
    peak = torch.tensor(float(status_bytes("VmHWM")))
    dist.all_reduce(peak, op=dist.ReduceOp.MAX)
    if engine is not None:
        engine.close()
    yield {"event": "end", "peak_bytes": int(peak)}
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
