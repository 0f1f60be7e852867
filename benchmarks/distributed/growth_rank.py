"""One of some ranks that train a GPT data-parallel with streamed weights, for `growth`.

    RANK=0 WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 python -m benchmarks.distributed.growth_rank JSON

It prints one line of JSON: bytes written in each step, by what they belong to, seconds of each
step, the peak of its resident memory in bytes, and a digest of the losses and the final weights.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.activations.models import Shape
from benchmarks.gpt import GPT
from benchmarks.machine import status_bytes
from offload_strategy import OffloadEngine

#: 34 million parameters.
SHAPE = Shape(width=512, heads=8, layers=6, sequence=128, vocabulary=14_800)
QUICK_SHAPE = Shape(width=128, heads=4, layers=2, sequence=64, vocabulary=1000)
_BATCH = 2
_CLIENTS = ("optimizer", "parameters")


def train(settings: dict[str, Any]) -> dict[str, Any]:
    """Train; `settings` are directory, store, steps, overlap, offload and quick."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    store = f"file://{settings['store']}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size)
    shape = QUICK_SHAPE if settings["quick"] else SHAPE
    written: list[dict[str, float]] = []
    seconds: list[float] = []
    digest = hashlib.sha256()
    with ExitStack() as undo:
        undo.callback(dist.destroy_process_group)
        torch.manual_seed(0)
        net = GPT(shape)
        model: Any = DistributedDataParallel(net, gradient_as_bucket_view=True)
        optimizer: Any = torch.optim.AdamW(net.parameters(), lr=1e-3)
        engine = None
        if settings["offload"]:
            engine = undo.enter_context(OffloadEngine(_config(settings)))
            optimizer = engine.attach(model, optimizer)
        del net
        for step in range(settings["steps"]):
            before = dict(engine.metrics()) if engine is not None else {}
            begin = time.perf_counter()
            data = torch.Generator().manual_seed(1000 * step + rank)
            tokens = torch.randint(shape.vocabulary, (_BATCH, shape.sequence), generator=data)
            loss = model(tokens)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            digest.update(loss.detach().numpy().tobytes())
            dist.barrier()
            seconds.append(time.perf_counter() - begin)
            if engine is not None:
                engine._resources.store.wait_for_writes()
                after = engine.metrics()
                keys = {client: f"offload/{client}/written_bytes" for client in _CLIENTS}
                written.append({c: after[k] - before.get(k, 0.0) for c, k in keys.items()})
        peak = status_bytes("VmHWM")
        for weight in model.module.state_dict().values():
            digest.update(weight.numpy().tobytes())
        dist.barrier()
    return {"written": written, "seconds": seconds, "peak": peak, "digest": digest.hexdigest()}


def _config(settings: dict[str, Any]) -> dict[str, Any]:
    return {
        "mode": "always",
        "tiers": [{"name": "disk", "kind": "ssd", "path": settings["directory"]}],
        "activations": {"enabled": False},
        "optimizer": {"overlap": settings["overlap"]},
        "parameters": {"enabled": True},
        "memory": {"pinned": "64MiB"},
    }


if __name__ == "__main__":
    print(json.dumps(train(json.loads(sys.argv[1]))))
