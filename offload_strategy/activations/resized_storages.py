"""Storages that are resized while their bytes leave: whoever still reads these must be done first.

[Note: resized storages]
`storage.resize_` frees memory that a tensor still refers to: Megatron-LM empties the output of a
checkpointed region so, and fills it again before backward. No reference keeps that memory, and
nothing tells of it, so the method is replaced here: it first asks all who move bytes to be done.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any, Protocol

import torch


class ReadsStorages(Protocol):
    """Who may be moving bytes of storages."""

    def let_go(self, storage: torch.UntypedStorage) -> None:
        """Be done with the memory of a storage when this returns."""


_readers: weakref.WeakSet[ReadsStorages] = weakref.WeakSet()


def announce_to(reader: ReadsStorages) -> None:
    """Let a reader know, as long as it lives, of each storage that is about to be resized."""
    _readers.add(reader)
    _replace_method()


@functools.cache
def _replace_method() -> None:
    kind: Any = torch.UntypedStorage
    resize = kind.resize_

    @functools.wraps(resize)
    def resize_(storage: torch.UntypedStorage, nbytes: int) -> torch.UntypedStorage:
        if _readers and storage.nbytes() != nbytes:
            for reader in tuple(_readers):
                reader.let_go(storage)
        resized: torch.UntypedStorage = resize(storage, nbytes)
        return resized

    kind.resize_ = resize_
