"""Files read, and as many bytes written to a new one: direct I/O by a few threads, that is all."""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from pathlib import Path
from threading import local

from offload_strategy.units import PAGE_BYTES, MiB, round_up

_THREADS = 4


def read_and_write(
    files: Sequence[Path], directory: Path, block_bytes: int = 32 * MiB
) -> tuple[float, float]:
    """Seconds to read files, and then to write as many bytes to a file that is new.

    Args:
        files: to be read; they should not be in the page cache.
        directory: for the new file.
        block_bytes: moved by a system call.
    """
    buffers = _Buffers(block_bytes)
    with ThreadPoolExecutor(_THREADS) as pool:
        list(pool.map(lambda _: buffers.memory, range(_THREADS)))

        def move(call: Callable[..., int], fd: int, nbytes: int) -> list[Future[int]]:
            return [
                pool.submit(lambda at=at: call(fd, [memoryview(buffers.memory)], at))
                for at in range(0, nbytes, block_bytes)
            ]

        begin = time.perf_counter()
        with ExitStack() as opened:
            moves = []
            for file in files:
                fd = os.open(file, os.O_RDONLY | os.O_DIRECT)
                opened.callback(os.close, fd)
                moves += move(os.preadv, fd, file.stat().st_size)
            wait(moves)
        middle = time.perf_counter()
        nbytes = sum(round_up(file.stat().st_size, block_bytes) for file in files)
        with tempfile.TemporaryDirectory(dir=directory) as place:
            fd = os.open(Path(place, "new"), os.O_RDWR | os.O_CREAT | os.O_DIRECT)
            try:
                os.posix_fallocate(fd, 0, nbytes)
                moves = move(os.pwritev, fd, nbytes)
                wait(moves)
            finally:
                os.close(fd)
            end = time.perf_counter()
        for each in moves:
            each.result()
    return middle - begin, end - middle


class _Buffers(local):
    """Page-aligned memory for each thread."""

    def __init__(self, nbytes: int) -> None:
        self.memory = mmap.mmap(-1, nbytes)
        self.memory.madvise(mmap.MADV_HUGEPAGE)
        self.memory.write(os.urandom(PAGE_BYTES) * (nbytes // PAGE_BYTES))
