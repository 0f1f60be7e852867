"""The interface of all backends and their registry: adding one is one module and one entry."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Literal

from offload_strategy.io.backends.thread_pool import ThreadPool

Done = Callable[[BaseException | None], None]
"""What is called at the end of a request, with its error if there was one."""


@dataclass(slots=True)
class BlockRequest:
    """Move one block between a file and memory.

    `offset` is a multiple of the page size; `address` may have any alignment, and the caller keeps
    its memory alive until `on_done` is called, once, on a thread of the backend, with None or the
    error. The file's range is rounded up to the page; a read may end beyond the end of the file as
    long as its `nbytes` exist. `before` and `after` run on the backend's thread around the
    transfer; what they raise is the request's error, and after a failed `before` nothing moves.
    If the memory `is_buffer`, it is whole pages that nobody else uses meanwhile: a read may fill
    the last page, and what is written does not change. `before` may set `address` to memory of its
    own, from which or to which the bytes move. What was read is `verified` if `after` notices each
    wrong byte. A file that is open for `direct` I/O leaves nothing in the page cache.
    """

    write: bool
    fd: int
    offset: int
    address: int
    nbytes: int
    on_done: Done
    before: Callable[[], None] | None = field(default=None, repr=False)
    after: Callable[[], None] | None = field(default=None, repr=False)
    is_buffer: bool = False
    verified: bool = False
    direct: bool = False


class Backend(ABC):
    """Moves blocks between files and memory; requests complete in any order."""

    #: Whether `BlockRequest.address` may be device memory.
    device_memory: bool = False
    #: What `io.checksum: auto` stands for.
    default_checksum: Literal["full", "sampled", "off"] = "sampled"
    #: How many requests `submit` takes at most.
    max_adjacent: int = 1

    def __init__(self, *, threads: int, block_size: int) -> None:
        #: How many requests are worth having in flight in each direction.
        self.depth = threads
        #: Bytes that one request may carry at most.
        self.block_size = block_size
        # One pool for both directions: a caller that submits at most `depth` requests of each, or
        # twice as many small ones, finds a thread for a read even when every write is stuck.
        self.threads = ThreadPool("ssd-offload-io", 4 * threads)

    @abstractmethod
    def submit(self, requests: Sequence[BlockRequest]) -> None:
        """Begin requests whose pages follow each other in one file; each ends by itself."""

    def close(self) -> None:
        """Wait for requests in flight, then release threads and buffers. Idempotent."""
        self.threads.close()


#: Name in the config, which is that of a module -> its class. Modules are imported on demand: an
#: optional backend that is not used costs nothing. Each has `unavailable_reason() -> str | None`.
_BACKENDS = {"posix": "PosixBackend", "kvikio": "KvikioBackend", "deepnvme": "DeepNvmeBackend"}


def _module(name: str) -> Any:
    return import_module(f"offload_strategy.io.backends.{name}")


def create_backend(name: str, *, threads: int, block_size: int) -> Backend:
    """Create the backend that `io.backend` names, with `threads` requests in flight per direction.

    ``"auto"`` is posix. `block_size` (bytes that a request may carry) is a multiple of the page
    size. Raises ConfigError if it cannot run here.
    """
    name = "posix" if name == "auto" else name
    create: Callable[..., Backend] = getattr(_module(name), _BACKENDS[name])
    return create(threads=threads, block_size=block_size)


def available_backends() -> dict[str, str | None]:
    """Map each backend's name to None if it can run here, else to the reason and what to do."""
    return {name: _module(name).unavailable_reason() for name in _BACKENDS}
