"""Storages that are resized while their bytes leave: whoever still reads these must be done first.

[Note: resized storages]
`storage.resize_` frees memory that a tensor still refers to: Megatron-LM empties the output of a
checkpointed region so, and fills it again before backward. `tensor.resize_` to a larger size moves
it, and so does sharing it with other processes, as a queue of `multiprocessing` does. No reference
keeps that memory, so these methods are replaced here: they first ask all who move bytes to be done.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch

_readers: weakref.WeakSet[Any] = weakref.WeakSet()


def announce_to(reader: Any) -> None:
    """Tell a reader, as long as it lives, of each storage that is about to be resized or shared.

    Its `let_go` returns when it is done with the memory of that storage.
    """
    _readers.add(reader)
    _replace_methods()


@functools.cache
def _replace_methods() -> None:
    def replace(kind: Any, name: str, moved: Callable[..., torch.UntypedStorage | None]) -> None:
        method = getattr(kind, name)

        @functools.wraps(method)
        def replaced(self: Any, *args: Any, **options: Any) -> Any:
            if _readers and (storage := moved(self, *args)) is not None:
                for reader in tuple(_readers):
                    reader.let_go(storage)
            return method(self, *args, **options)

        setattr(kind, name, replaced)

    kind, has = torch.UntypedStorage, torch._C._has_storage
    replace(kind, "resize_", lambda self, nbytes: self if self.nbytes() != nbytes else None)
    for name in ("_share_fd_cpu_", "_share_filename_cpu_"):
        replace(kind, name, lambda self, *_: None if self.is_shared() else self)
    for name in ("resize_", "resize_as_"):
        replace(torch.Tensor, name, lambda self, *_: self.untyped_storage() if has(self) else None)
