"""Several processes that run one function each, as ranks of a gloo group on this machine."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[2]


def run_ranks(
    where: str, directory: Path, size: int = 2, seconds: float = 240, **options: Any
) -> list[Any]:
    """Run ``module:function(rank, directory, **options)`` on every rank.

    Args:
        where: the function, as module:function; it returns what JSON can say.
        directory: an empty one, which all ranks are given.
        size: processes.
        seconds: that they may take.
        options: passed on as JSON.

    Returns:
        What each rank returned.
    """
    processes = []
    for rank in range(size):
        environment = {
            **os.environ,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(size),
            "LOCAL_WORLD_SIZE": str(size),
            "OMP_NUM_THREADS": "1",
            "PYTHONFAULTHANDLER": "1",
        }
        with (directory / f"output-{rank}").open("wb") as output:
            processes.append(
                subprocess.Popen(
                    [sys.executable, __file__, where, str(directory), json.dumps(options)],
                    cwd=_ROOT,
                    env=environment,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
            )
    deadline = time.monotonic() + seconds
    try:
        while any(process.poll() is None for process in processes):
            if time.monotonic() > deadline or any(process.poll() for process in processes):
                time.sleep(2)  # the others may have something to say as well
                break
            time.sleep(0.05)
    finally:
        codes = [process.poll() for process in processes]
        for process in processes:
            process.kill()
            process.wait()
    outputs = [_shortened((directory / f"output-{rank}").read_text()) for rank in range(size)]
    assert codes == [0] * size, "\n".join(
        f"--- rank {rank}, exit status {code}\n{output}"
        for rank, (code, output) in enumerate(zip(codes, outputs, strict=True))
    )
    return [json.loads((directory / f"result-{rank}").read_text()) for rank in range(size)]


def _shortened(text: str, head: int = 3000, tail: int = 6000) -> str:
    """Both ends: an abort says at its begin why, an exception at its end."""
    left_out = len(text) - head - tail
    if left_out <= 0:
        return text
    return f"{text[:head]}\n... {left_out} characters ...\n{text[-tail:]}"


def _main() -> None:
    where, directory, options = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
    sys.path.insert(0, str(_ROOT))
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(
        "gloo", init_method=f"file://{directory}/store", rank=rank, world_size=size
    )
    module, _, function = where.partition(":")
    result = getattr(importlib.import_module(module), function)(rank, directory, **options)
    (directory / f"result-{rank}").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    _main()
