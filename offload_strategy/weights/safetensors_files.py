"""Safetensors files: where each tensor lies in a checkpoint, and saving a model shard by shard.

A file begins with eight bytes, the length of its header. The header is JSON and gives for each
tensor its dtype, its shape and its byte range relative to the header's end. The `safetensors`
library reads a file only into its own memory or the page cache and does not tell the byte ranges,
so they are read here after the library has checked the file. Saved files are named and indexed as
Transformers names them, so `from_pretrained` loads them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from offload_strategy.errors import ConfigError, StorageError

_SUFFIX = ".safetensors"
_INDEX = f"{_SUFFIX}.index.json"

#: dtypes by their name in a header; sub-byte formats have no torch dtype of that size.
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Location of a contiguous tensor in a file.

    Args:
        file: the file that holds it.
        dtype: its dtype.
        shape: its shape.
        offset: byte offset in the file.
        nbytes: size in bytes.
    """

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    nbytes: int


def read_index(source: str | os.PathLike[str]) -> dict[str, StoredTensor]:
    """Return the tensors of a checkpoint by name, in the order of the files' bytes.

    Args:
        source: a safetensors file, or a directory with one file or with shards and an index.

    Raises:
        ConfigError: a file is missing or damaged, or safetensors is not installed.
    """
    found: dict[str, StoredTensor] = {}
    for file in _files(Path(source)):
        found.update(_header(file))
    return found


def _files(source: Path) -> list[Path]:
    if not source.is_dir():
        return [source]
    indexes = sorted(source.glob(f"*{_INDEX}"))
    if len(indexes) == 1:
        return _indexed(indexes[0])
    files = sorted(source.glob(f"*{_SUFFIX}"))
    if len(files) == 1:
        return files
    found = ", ".join(path.name for path in [*indexes, *files]) or f"no {_SUFFIX} file"
    raise ConfigError(
        f"{str(source)!r} has {found}: name the one file, or a directory with one file or one "
        f"index (*{_INDEX})."
    )


def _indexed(index: Path) -> list[Path]:
    try:
        names: Iterable[Any] = json.loads(index.read_text())["weight_map"].values()
        files = sorted({index.parent / str(name) for name in names})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{str(index)!r} is not a safetensors index: {error!r}") from error
    missing = [path.name for path in files if not path.is_file()]
    if missing:
        raise ConfigError(
            f"{str(index)!r} names {', '.join(missing)}, which is missing there. Download it again."
        )
    return files


def _header(file: Path) -> dict[str, StoredTensor]:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise ConfigError(
            "load_weights needs the package safetensors. Install it with `pip install safetensors`."
        ) from error
    try:
        with safe_open(file, framework="pt"):
            pass  # validates the header and the file's size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            entries = json.loads(stream.read(length))
    except (OSError, ValueError, SafetensorError) as error:
        raise ConfigError(f"cannot load weights from {str(file)!r}: {error}") from error
    entries.pop("__metadata__", None)
    tensors = {name: _stored(file, name, 8 + length, entry) for name, entry in entries.items()}
    return dict(sorted(tensors.items(), key=lambda item: item[1].offset))


def _stored(file: Path, name: str, base: int, entry: dict[str, Any]) -> StoredTensor:
    dtype = _DTYPES.get(entry["dtype"])
    if dtype is None:
        raise ConfigError(f"{str(file)!r}: {name} has the unsupported dtype {entry['dtype']}.")
    begin, end = entry["data_offsets"]
    return StoredTensor(file, dtype, tuple(entry["shape"]), base + begin, end - begin)


_NAME = "model"
_INDEX_NAME = f"{_NAME}{_INDEX}"
_PARTIAL = ".partial"

Read = Callable[[torch.Tensor], AbstractContextManager[torch.Tensor]]


def named_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors of a model's state_dict without detaching parameters."""
    # Detaching, as state_dict() does by default, would load every streamed weight.
    return {
        name: value
        for name, value in model.state_dict(keep_vars=True).items()
        if isinstance(value, torch.Tensor)
    }


def save_shards(
    tensors: Mapping[str, torch.Tensor], directory: Path, shard_bytes: int, read: Read
) -> list[Path]:
    """Write tensors to a directory, replacing files of the same names.

    Args:
        tensors: tensors by name; a tensor with several names is written once.
        directory: the target directory; it is created if it does not exist.
        shard_bytes: maximum bytes of a file, unless a single tensor is larger.
        read: context that yields the values of a tensor.

    Returns:
        The files that hold tensors.

    Raises:
        ConfigError: safetensors is not installed.
        StorageError: a file cannot be written; earlier complete files remain.
    """
    try:
        from safetensors.torch import save_file
    except ImportError as error:
        raise ConfigError(
            "save_weights needs the package safetensors. Install it with `pip install safetensors`."
        ) from error
    first, same = _unique_tensors(tensors)
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
            _flush_to_disk(file)
        index = {
            "metadata": {"total_size": sum(tensor.nbytes for tensor in first.values())},
            "weight_map": {key: name for name, s in zip(names, shards, strict=True) for key in s},
        }
        for file, name in zip(partial, names, strict=True):
            os.replace(file, directory / name)
        listing = directory / f".{_INDEX_NAME}{_PARTIAL}"
        listing.write_text(json.dumps(index, indent=2) + "\n")
        os.replace(listing, directory / _INDEX_NAME)
    except OSError as error:
        raise StorageError(
            f"could not save weights to {str(directory)!r}: {error.strerror or error}. Free some "
            f"space, or choose another directory."
        ) from error
    finally:
        for file in partial:
            file.unlink(missing_ok=True)
    return [directory / name for name in names]


def _unique_tensors(
    tensors: Mapping[str, torch.Tensor],
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return each tensor under its first name, and the first name of every alias."""
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


def _flush_to_disk(file: Path) -> None:
    """Flush a file to disk and drop it from the page cache."""
    fd = os.open(file, os.O_RDONLY)
    try:
        os.fsync(fd)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)
