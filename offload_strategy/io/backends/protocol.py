"""The protocol of backends, and their registry: adding one is one file and one entry."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from typing import Protocol

from offload_strategy.errors import ConfigError


@dataclass(slots=True)
class BlockRequest:
    """Move one block between a file and memory.

    Args:
        write: True to write memory to the file, False to read.
        fd: the file.
        offset: byte offset in the file, a multiple of the page size.
        address: where the bytes are in this process's memory; any alignment. Whoever `on_done`
            belongs to keeps the memory alive until it is called.
        nbytes: how many. The file's range is rounded up to the page; for a read it may end beyond
            the end of the file, as long as these bytes are there.
        on_done: called once, on a thread of the backend, with None or the error. Must not raise.
        before: called first, on the backend's thread, for instance to wait until a device copy
            has filled the memory. If it raises, nothing is moved and that is the error.
        whole_pages: a read may also fill what follows in the memory's last page: then bytes that
            are no whole number of pages need not be read apart from the others.
        after: called on the backend's thread when the bytes have moved and before `on_done`, for
            instance to verify them. If it raises, that is the error.
    """

    write: bool
    fd: int
    offset: int
    address: int
    nbytes: int
    on_done: Callable[[BaseException | None], None]
    before: Callable[[], None] | None = field(default=None, repr=False)
    after: Callable[[], None] | None = field(default=None, repr=False)
    whole_pages: bool = False


class Backend(Protocol):
    """Moves blocks; completes them in any order."""

    #: How many requests are worth having under way at once in each direction: reads and writes
    #: have slots of their own.
    depth: int
    #: Largest block that a request may carry, in bytes.
    block_size: int
    #: Whether a request's `address` may be memory of a device.
    device_memory: bool

    def submit(self, request: BlockRequest) -> None:
        """Begin a request; returns at once."""

    def close(self) -> None:
        """Wait for what is under way, then release threads and buffers. Idempotent."""


#: name in the config -> "module:class"; imported on demand so that optional ones cost nothing.
#: Each module has `why_not() -> str | None`: why the backend cannot run here.
_BACKENDS = {
    "posix": "offload_strategy.io.backends.posix:PosixBackend",
    "kvikio": "offload_strategy.io.backends.kvikio:KvikioBackend",
    "deepnvme": "offload_strategy.io.backends.deepnvme:DeepNvmeBackend",
}


def create_backend(name: str, *, threads: int, block_size: int) -> Backend:
    """Make the backend that `io.backend` names.

    Args:
        name: as in the config; ``"auto"`` is kvikio where cuFile has a working driver, else posix.
        threads: requests under way at once in each direction.
        block_size: bytes a request may carry at most, a multiple of the page size.

    Raises:
        ConfigError: there is no such backend, or it cannot run here.
    """
    if name == "auto":
        name = (
            "kvikio"
            if import_module("offload_strategy.io.backends.kvikio").is_direct()
            else "posix"
        )
    target = _BACKENDS.get(name)
    if target is None:
        raise ConfigError(
            f"io.backend: there is no backend {name!r}; choose one of {sorted(_BACKENDS)} or auto"
        )
    module, _, attribute = target.partition(":")
    backend: Backend = getattr(import_module(module), attribute)(
        threads=threads, block_size=block_size
    )
    return backend


def available_backends() -> dict[str, str | None]:
    """The backends by name, each with None if it can run here, else the reason and what to do."""
    return {
        name: import_module(target.partition(":")[0]).why_not()
        for name, target in _BACKENDS.items()
    }
