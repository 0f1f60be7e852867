"""Checksums of blocks: a read returns what was written, or it fails."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

from offload_strategy.errors import ConfigError, CorruptDataError
from offload_strategy.io.backends.protocol import BlockRequest
from offload_strategy.units import format_size

Checksum = Callable[[memoryview], int]
"""Bytes to a number; called on I/O threads, for one block at a time."""


def create_checksum() -> Checksum:
    """Return XXH3 with 64 bits, or raise ConfigError if the package `xxhash` is not installed."""
    try:
        import xxhash
    except ImportError as error:
        raise ConfigError(
            "io.checksum: true needs the package xxhash. Install it with "
            "`pip install offload-strategy[checksum]`, or set io.checksum to false."
        ) from error
    return xxhash.xxh3_64_intdigest


def add_checksum(
    request: BlockRequest, checksum: Checksum, digests: list[int], number: int, where: str
) -> None:
    """Make a request store `digests[number]` of what it writes, or verify what it reads by it."""
    if request.write:

        def store() -> None:
            digests[number] = checksum(_view(request))

        request.before = store
        return
    expected = digests[number]

    def verify() -> None:
        if checksum(_view(request)) != expected:
            raise CorruptDataError(
                f"{where}: {format_size(request.nbytes)} at offset {request.offset} are not what "
                f"was written there (checksum). The disk, its cable or the memory is failing: do "
                f"not trust anything of this run after the last checkpoint. Check the system's "
                f"log, and continue with another path."
            )

    request.after = verify


def _view(request: BlockRequest) -> memoryview:
    return memoryview((ctypes.c_char * request.nbytes).from_address(request.address)).cast("B")
