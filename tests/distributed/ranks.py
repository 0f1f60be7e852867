"""Ranks of a gloo group that run one function each, forked from a server that has imported it."""

import atexit
import contextlib
import faulthandler
import gc
import importlib
import itertools
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil

_ROOT = Path(__file__).parents[2]
#: On this signal a rank prints the stacks of its threads.
_TELL = signal.SIGUSR1
_servers: list[subprocess.Popen[str]] = []
_numbers = itertools.count()


def run_ranks(
    where: str,
    directory: Path,
    size: int = 2,
    seconds: float = 240,
    group: bool = True,
    **options: Any,
) -> list[Any]:
    """Run ``module:function(rank, directory, **options)`` on every rank.

    Each rank is a process of its own, with the environment of this one, and ends as Python ends. It
    is forked from one process for all tests, so that imports take their seconds once. With `group`
    they form a process group, and have the variables of torchrun. Options are passed on as JSON,
    and so is what each rank returns.
    """
    request = {
        "where": where,
        "directory": str(directory),
        "size": size,
        "seconds": seconds,
        "store": f"file://{directory}/store-{next(_numbers)}" if group else None,
        "options": options,
        "environment": dict(os.environ),
    }
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    try:
        print(json.dumps(request), file=server.stdin, flush=True)
        reply = server.stdout.readline()
    except BaseException:
        _stop(server)
        raise
    assert reply, f"the server of ranks ended with status {server.wait()}"
    codes = json.loads(reply)
    if codes != [0] * size:
        # Ranks may have started others, which write to folders of their own.
        told = [
            f"--- {file.relative_to(directory)}\n{_shortened(file.read_text())}"
            for file in sorted(directory.rglob("output-*"))
        ]
        raise AssertionError("\n".join([f"exit statuses {codes}", *told]))
    return [json.loads((directory / f"result-{rank}").read_text()) for rank in range(size)]


def _server() -> subprocess.Popen[str]:
    """The process that forks, which is started when it is first needed."""
    if not _servers or _servers[-1].poll() is not None:
        server = subprocess.Popen(
            [sys.executable, "-W", "ignore", __file__],
            cwd=_ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        atexit.register(_stop, server)
        _servers.append(server)
    return _servers[-1]


def _stop(server: subprocess.Popen[str]) -> None:
    """End the server and all ranks that run."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGKILL)
    server.communicate()


def _shortened(text: str) -> str:
    """Both ends: an abort says at its begin why, an exception at its end."""
    return text if len(text) <= 9000 else f"{text[:3000]}\n[...]\n{text[-6000:]}"


# ---------------------------------------------------------------------- in the server
def _main() -> None:
    sys.path[0] = str(_ROOT)
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import torch
    import torch._dynamo  # which DistributedDataParallel imports
    import torch.distributed

    torch.set_num_threads(1)
    faulthandler.register(_TELL, all_threads=True)
    for line in sys.stdin:
        request = json.loads(line)
        module, _, function = request["where"].partition(":")
        work = getattr(importlib.import_module(module), function)
        gc.freeze()
        ranks = {}
        for rank in range(request["size"]):
            process = os.fork()
            if process == 0:
                _be_rank(rank, request, work)
                sys.exit()
            ranks[process] = rank
        print(json.dumps(_wait(ranks, request["seconds"])), file=replies, flush=True)


def _be_rank(rank: int, request: dict[str, Any], work: Any) -> None:
    directory, size = Path(request["directory"]), request["size"]
    output = os.open(directory / f"output-{rank}", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.clear()
    os.environ.update(request["environment"])
    if request["store"] is not None:
        import torch.distributed as dist

        os.environ.update(
            RANK=str(rank), LOCAL_RANK=str(rank), GROUP_RANK="0", WORLD_SIZE=str(size),
            LOCAL_WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT="29999",
            TORCHELASTIC_RUN_ID="here",  # Lightning must not start any processes
        )  # fmt: skip
        dist.init_process_group("gloo", init_method=request["store"], rank=rank, world_size=size)
    result = work(rank, directory, **request["options"])
    (directory / f"result-{rank}").write_text(json.dumps(result))
    if request["store"] is not None:
        dist.barrier()
        dist.destroy_process_group()


def _wait(ranks: dict[int, int], seconds: float) -> list[int]:
    """Exit statuses by rank; when one fails, the others have two seconds more.

    What hangs prints where each of its threads is, and so do the processes that it has started.
    """
    deadline = time.monotonic() + seconds
    codes: dict[int, int] = {}
    while len(codes) < len(ranks):
        if time.monotonic() > deadline:
            left = psutil.Process().children(recursive=True)
            for number in (_TELL, signal.SIGKILL):
                for each in left:
                    with contextlib.suppress(psutil.Error):
                        each.send_signal(number)
                time.sleep(0.5)
            deadline = math.inf
        process, status = os.waitpid(-1, os.WNOHANG)
        if process in ranks:
            codes[ranks[process]] = os.waitstatus_to_exitcode(status)
            if status:
                deadline = min(deadline, time.monotonic() + 2)
        elif process == 0:
            time.sleep(0.02)
    return [codes[rank] for rank in range(len(ranks))]


if __name__ == "__main__":
    _main()
