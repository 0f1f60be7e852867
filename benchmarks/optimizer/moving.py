"""Plain PyTorch beside a process that only moves bytes: what a machine takes for moving them.

Where the disk is a file of a host, or its driver works on the cores that compute, moving bytes
costs computing, whoever moves them. So in each step another process reads and writes as many bytes
as our contender does, in large requests, without a copy or a checksum.
"""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from offload_strategy.units import MiB, round_up

#: Bytes of a request.
_REQUEST = 8 * MiB
#: Saved tensors below this stay, as with us.
_LEAST = 1 * MiB


class Mover:
    """A process that moves bytes when it is told to.

    Args:
        file: to read and write; made here, and removed by `close`.
        nbytes: of each move, in each direction.
    """

    def __init__(self, file: Path, nbytes: int) -> None:
        self._file = file
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.optimizer.moving", str(file), str(nbytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).resolve().parents[2],
        )
        self._moving = False
        self._answer()

    def begin(self) -> None:
        """Begin to read and write."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        self._moving = True

    def wait(self) -> None:
        """Until all has been moved."""
        if self._moving:
            self._moving = False
            self._answer()

    def _answer(self) -> None:
        assert self._process.stdout is not None
        if not self._process.stdout.readline():
            raise RuntimeError(f"the process that moves bytes ended: {self._process.wait(60)}")

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)
        self._file.unlink(missing_ok=True)


class Beside:
    """Counts what a model saves in its first pass, and then moves as much beside each step.

    Args:
        model: that trains.
        directory: on the disk.
    """

    def __init__(self, model: torch.nn.Module, directory: Path) -> None:
        self._weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        #: Both moments of Adam in float32.
        self._states = sum(8 * p.numel() for p in model.parameters() if p.requires_grad)
        self._file = directory / "moved"
        self._mover: Mover | None = None

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Around a forward pass."""
        if self._mover is not None:
            self._mover.begin()
            yield
            return
        saved: dict[int, int] = {}

        def note(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.nbytes() >= _LEAST and storage.data_ptr() not in self._weights:
                saved[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, _unchanged):
            yield
        self._mover = Mover(self._file, self._states + sum(saved.values()))

    def step_over(self) -> None:
        """What was begun belongs to this step."""
        if self._mover is not None:
            self._mover.wait()

    def close(self) -> None:
        """End the process."""
        if self._mover is not None:
            self._mover.close()


def _unchanged(tensor: Any) -> Any:
    return tensor


def main() -> None:
    """Read and write so many bytes for each line of the input."""
    file, nbytes = sys.argv[1], round_up(int(sys.argv[2]), _REQUEST)
    buffer = mmap.mmap(-1, _REQUEST, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    buffer.madvise(mmap.MADV_HUGEPAGE)
    view = memoryview(buffer)
    fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
    os.posix_fallocate(fd, 0, nbytes)
    for offset in range(0, nbytes, _REQUEST):
        os.pwritev(fd, [view], offset)
    print(flush=True)
    for _ in sys.stdin:
        for offset in range(0, nbytes, _REQUEST):
            os.preadv(fd, [view], offset)
            os.pwritev(fd, [view], offset)
        print(flush=True)
    os.close(fd)


if __name__ == "__main__":
    main()
