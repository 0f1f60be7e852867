"""Lightning checkpoints that stream: the same files, without a copy of everything in memory.

Lightning's own `TorchCheckpointIO` puts the whole checkpoint together in memory before it writes
the first byte, and reads all of it before it hands it on. For a local path this one writes tensor
by tensor and maps the file when it loads; remote paths are left to Lightning.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning.fabric.plugins import TorchCheckpointIO as _TorchCheckpointIO
else:
    # The class that is mixed in with brings the base of its own install.
    _TorchCheckpointIO = object


class StreamingCheckpointIO(_TorchCheckpointIO):
    """Saves and loads local files through `offload_strategy.save` and `load`."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None
    ) -> None:
        """Save a checkpoint; a file that is there already is replaced as a whole.

        Args:
            checkpoint: what the Trainer collected.
            path: of the file; directories above it are made.
            storage_options: refused, as by Lightning.

        Raises:
            StorageError: the file cannot be written; the previous one is untouched.
        """
        from offload_strategy.checkpoints import save

        local = local_path(path)
        if local is None or storage_options is not None:
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        os.makedirs(os.path.dirname(local), exist_ok=True)
        save(checkpoint, local)

    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> Any:
        """Load a checkpoint, with tensors that lie in the file until they are read.

        Args:
            path: of the file.
            args: as for Lightning's own: map_location, weights_only.
            kwargs: the same by name.

        Raises:
            FileNotFoundError: there is no such file.
        """
        local = local_path(path)
        if local is None or not os.path.isfile(local):
            return super().load_checkpoint(path, *args, **kwargs)
        return self._load(local, *args, **kwargs)

    @staticmethod
    def _load(
        local: str, map_location: Any = lambda storage, _: storage, weights_only: bool | None = None
    ) -> Any:
        from offload_strategy.checkpoints import load

        return load(local, map_location, weights_only)


def local_path(path: Any) -> str | None:
    """Where a path or URL of the user's lies on this machine's file systems; None if elsewhere."""
    from fsspec.core import url_to_fs
    from fsspec.implementations.local import LocalFileSystem

    system, stripped = url_to_fs(str(path))
    return stripped if isinstance(system, LocalFileSystem) else None
