"""Storages that are resized while their bytes leave: whoever still reads these must be done first.

[Note: resized storages]
`storage.resize_` frees memory that a tensor still refers to: Megatron-LM empties the output of a
checkpointed region so, and fills it again before backward. To share memory with other processes, as
a queue of `multiprocessing` does, moves it. No reference keeps that memory, and nothing tells of
it, so these methods are replaced here: they first ask all who move bytes to be done.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch


class ReadsStorages(Protocol):
    """Who may be moving bytes of storages."""

    def let_go(self, storage: torch.UntypedStorage) -> None:
        """Be done with the memory of a storage when this returns."""


_readers: weakref.WeakSet[ReadsStorages] = weakref.WeakSet()


def announce_to(reader: ReadsStorages) -> None:
    """Tell a reader, as long as it lives, of each storage that is about to be resized or shared."""
    _readers.add(reader)
    _replace_methods()


@functools.cache
def _replace_methods() -> None:
    kind: Any = torch.UntypedStorage

    def replace(name: str, moves: Callable[..., bool]) -> None:
        method = getattr(kind, name)

        @functools.wraps(method)
        def replaced(storage: torch.UntypedStorage, *args: Any, **options: Any) -> Any:
            if _readers and moves(storage, *args):
                for reader in tuple(_readers):
                    reader.let_go(storage)
            return method(storage, *args, **options)

        setattr(kind, name, replaced)

    replace("resize_", lambda storage, nbytes: storage.nbytes() != nbytes)
    for name in ("_share_fd_cpu_", "_share_filename_cpu_"):
        replace(name, lambda storage, *_: not storage.is_shared())
