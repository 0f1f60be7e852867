"""Plain PyTorch while another process does I/O: the overhead of I/O on this machine.

Where the disk is a file of a host, or its driver runs on the cores that compute, I/O costs
computing time, whoever does it. So in each step another process reads and writes as many bytes as
our contender does, in large requests, without a copy or a checksum.
"""

from __future__ import annotations

import json
import mmap
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks.turns import Subject, answers, requests
from offload_strategy.units import MiB, round_up

#: Bytes of a request.
_REQUEST = 8 * MiB
#: Saved tensors below this stay, as with us.
_LEAST = 1 * MiB


class BackgroundIo:
    """Counts what a model saves in its first pass, then does as much I/O during each step.

    Args:
        model: that trains.
        directory: on the disk.
    """

    def __init__(self, model: torch.nn.Module, directory: Path) -> None:
        self._weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        #: Both moments of Adam in float32.
        self._states = sum(8 * p.numel() for p in model.parameters() if p.requires_grad)
        self._file = directory / "moved"
        self._mover: Subject | None = None
        self._moving = False

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Around a forward pass."""
        if self._mover is not None:
            self._mover.tell({})
            self._moving = True
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
        nbytes = round_up(self._states + sum(saved.values()), _REQUEST)
        options = {"file": str(self._file), "nbytes": nbytes}
        self._mover = Subject(
            "benchmarks.optimizer.background_io", "the process that moves", options
        )
        self._mover.answer()

    def step_ended(self) -> None:
        """Wait for the I/O that was begun in this step."""
        if self._mover is not None and self._moving:
            self._moving = False
            self._mover.answer()

    def close(self) -> None:
        """End the process."""
        if self._mover is not None:
            self._mover.end()


def _unchanged(tensor: Any) -> Any:
    return tensor


def main() -> None:
    """Read and write so many bytes for each request."""
    options = json.loads(sys.argv[1])
    nbytes = options["nbytes"]
    buffer = mmap.mmap(-1, _REQUEST, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    buffer.madvise(mmap.MADV_HUGEPAGE)
    view = memoryview(buffer)
    with answers() as answer:
        fd = os.open(options["file"], os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        os.posix_fallocate(fd, 0, nbytes)
        for offset in range(0, nbytes, _REQUEST):
            os.pwritev(fd, [view], offset)
        answer({"ready": True})
        for _ in requests():
            for offset in range(0, nbytes, _REQUEST):
                os.preadv(fd, [view], offset)
                os.pwritev(fd, [view], offset)
            answer({"moved": nbytes})
        os.close(fd)


if __name__ == "__main__":
    main()
