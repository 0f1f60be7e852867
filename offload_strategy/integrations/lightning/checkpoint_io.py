"""Streaming of Lightning checkpoints: the same files, without a copy of everything in memory.

Lightning's `TorchCheckpointIO` builds the whole checkpoint in memory before it writes, and reads
all of it before it returns. For local paths this class writes tensor by tensor and maps the file
when it loads; remote paths are left to Lightning.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning.fabric.plugins import TorchCheckpointIO as _TorchCheckpointIO
else:
    # The concrete class has the base of its own family.
    _TorchCheckpointIO = object


class StreamingCheckpointIO(_TorchCheckpointIO):
    """Saves and loads local files through `offload_strategy.save` and `load`."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None
    ) -> None:
        """Save a checkpoint; an existing file is replaced atomically, or intact after an error."""
        from offload_strategy.checkpoints import save

        local = local_path(path)
        if local is None or storage_options is not None:
            super().save_checkpoint(checkpoint, path, storage_options=storage_options)
            return
        os.makedirs(os.path.dirname(local), exist_ok=True)
        save(checkpoint, local)

    def load_checkpoint(
        self,
        path: Any,
        map_location: Any = lambda storage, _: storage,
        weights_only: bool | None = None,
    ) -> Any:
        """Load a checkpoint whose tensors stay in the file until they are read."""
        from offload_strategy.checkpoints import load

        local = local_path(path)
        if local is None or not os.path.isfile(local):
            return super().load_checkpoint(path, map_location, weights_only)
        return load(local, map_location, weights_only)


def local_path(path: Any) -> str | None:
    """Return the local path of a path or URL, or None if it is remote."""
    from fsspec.core import url_to_fs
    from fsspec.implementations.local import LocalFileSystem

    system, stripped = url_to_fs(str(path))
    return stripped if isinstance(system, LocalFileSystem) else None
