"""Checksums of blocks: what was written is what is read, or the read fails."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import TYPE_CHECKING

from offload_strategy.errors import ConfigError, CorruptDataError
from offload_strategy.io.backends.protocol import BlockRequest
from offload_strategy.units import format_size

if TYPE_CHECKING:
    from offload_strategy.io.queues.path_queue import PathQueue

Checksum = Callable[[memoryview], int]
"""Bytes to a number; called on I/O threads, for one block at a time."""


def create_checksum() -> Checksum:
    """XXH3 with 64 bits, of the package `xxhash`.

    Raises:
        ConfigError: the package is not installed.
    """
    try:
        import xxhash
    except ImportError as error:
        raise ConfigError(
            "io.checksum: true needs the package xxhash. Install it with "
            "`pip install offload-strategy[checksum]`, or set io.checksum to false."
        ) from error
    return xxhash.xxh3_64_intdigest


def check_block(request: BlockRequest, queue: PathQueue, digests: list[int], number: int) -> None:
    """Let a request note the checksum of what it writes, or compare that of what it read.

    Args:
        request: gets a `before` (write) or an `after` (read) that does it.
        queue: of the path, for the function and for messages.
        digests: one for each block of the stripe; changed by a write.
        number: which of them.
    """
    checksum = queue.checksum
    assert checksum is not None
    if request.write:
        wait = request.before

        def note() -> None:
            if wait is not None:
                wait()
            digests[number] = checksum(_view(request))

        request.before = note
        return
    expected = digests[number]

    def compare() -> None:
        if checksum(_view(request)) != expected:
            raise CorruptDataError(
                f"tier {queue.tier!r}: {format_size(request.nbytes)} at offset {request.offset} "
                f"of {queue.path} are not what was written there (checksum). The disk, its cable "
                f"or the memory is failing: nothing of this run after the last checkpoint can be "
                f"trusted to it. Check the system's log, and go on with another path."
            )

    request.after = compare


def _view(request: BlockRequest) -> memoryview:
    return memoryview((ctypes.c_char * request.nbytes).from_address(request.address)).cast("B")
