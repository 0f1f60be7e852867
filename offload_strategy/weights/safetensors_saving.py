"""Saving a streamed model as safetensors shards, a shard's worth in memory at a time.

The files are named and indexed as Transformers does, so `from_pretrained` loads them as they are;
`safetensors.torch.load_model` does where there is one shard.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

import torch
from torch import nn

from offload_strategy.errors import ConfigError, StorageError

_NAME = "model"
_INDEX = f"{_NAME}.safetensors.index.json"
_PARTIAL = ".partial"

Read = Callable[[torch.Tensor], AbstractContextManager[torch.Tensor]]


def named_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """The tensors of a model's state_dict as they are, parameters themselves included."""
    # Not torch.Tensor.detach, which state_dict() calls: that would bring every weight back.
    return {
        name: value
        for name, value in model.state_dict(keep_vars=True).items()
        if isinstance(value, torch.Tensor)
    }


def save_shards(
    tensors: Mapping[str, torch.Tensor], directory: Path, shard_bytes: int, read: Read
) -> list[Path]:
    """Write tensors to a directory; what was there under the same names is replaced.

    Args:
        tensors: by name; the same one twice is written once, as safetensors have it.
        directory: is made if it is not there.
        shard_bytes: of a file at most, if no single tensor is larger.
        read: the values of a tensor, while they are needed.

    Returns:
        The files with tensors.

    Raises:
        ConfigError: safetensors are not installed.
        StorageError: a file cannot be written; whole ones of before are still there.
    """
    try:
        from safetensors.torch import save_file
    except ImportError as error:
        raise ConfigError(
            "save_weights needs the package safetensors. Install it with `pip install safetensors`."
        ) from error
    first, same = _once(tensors)
    shards = list(_shards(first, shard_bytes))
    names = [
        f"{_NAME}.safetensors"
        if len(shards) == 1
        else f"{_NAME}-{number + 1:05}-of-{len(shards):05}.safetensors"
        for number in range(len(shards))
    ]
    partial = [directory / f".{name}{_PARTIAL}" for name in names]
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for file, shard in zip(partial, shards, strict=True):
            with ExitStack() as held:
                values = {
                    name: held.enter_context(read(tensor)).contiguous()
                    for name, tensor in shard.items()
                }
                save_file(values, file, metadata={"format": "pt", **same})
                del values
            _to_disk(file)
        index = {
            "metadata": {"total_size": sum(tensor.nbytes for tensor in first.values())},
            "weight_map": {key: name for name, s in zip(names, shards, strict=True) for key in s},
        }
        for file, name in zip(partial, names, strict=True):
            os.replace(file, directory / name)
        listing = directory / f".{_INDEX}{_PARTIAL}"
        listing.write_text(json.dumps(index, indent=2) + "\n")
        os.replace(listing, directory / _INDEX)
    except OSError as error:
        raise StorageError(
            f"could not save weights to {str(directory)!r}: {error.strerror or error}. Free some "
            f"space, or name another directory."
        ) from error
    finally:
        for file in partial:
            file.unlink(missing_ok=True)
    return [directory / name for name in names]


def _once(
    tensors: Mapping[str, torch.Tensor],
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Each tensor under its first name; and, for its other names, which that is."""
    first: dict[int, str] = {}
    same = {}
    for name, tensor in tensors.items():
        kept = first.setdefault(id(tensor), name)
        if kept != name:
            same[name] = kept
    return {name: tensors[name] for name in first.values()}, same


def _shards(tensors: Mapping[str, torch.Tensor], most: int) -> Iterator[dict[str, torch.Tensor]]:
    shard: dict[str, torch.Tensor] = {}
    size = 0
    for name, tensor in tensors.items():
        if shard and size + tensor.nbytes > most:
            yield shard
            shard, size = {}, 0
        shard[name] = tensor
        size += tensor.nbytes
    if shard:
        yield shard


def _to_disk(file: Path) -> None:
    """Wait until a file is on the disk, and take it out of the page cache."""
    fd = os.open(file, os.O_RDONLY)
    try:
        os.fsync(fd)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)
