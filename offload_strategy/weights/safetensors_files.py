"""Safetensors files: where each tensor lies in a checkpoint, and saving a model shard by shard.

A file begins with eight bytes, the length of its header. The header is JSON and gives for each
tensor its dtype, its shape and its byte range relative to the header's end. The `safetensors`
library reads a file only into its own memory or the page cache and does not tell the byte ranges,
so they are read here after the library has checked the file. Saved files are named and indexed as
Transformers names them, so `from_pretrained` loads them.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from offload_strategy.checkpoints.streaming_files import sync_directory
from offload_strategy.errors import ConfigError, StorageError
from offload_strategy.io.backends.posix import drop_from_cache
from offload_strategy.telemetry import Progress

_SUFFIX = ".safetensors"
_INDEX = f"{_SUFFIX}.index.json"
_NAME = "model"
_PARTIAL = ".model.partial"
#: Names that this module and Transformers give to files with tensors.
_SAVED = re.compile(rf"{_NAME}((-\d+)?-\d{{5}}-of-\d{{5}})?{re.escape(_SUFFIX)}")

Resident = Callable[[Iterable[torch.Tensor]], AbstractContextManager[None]]


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Location of a contiguous tensor in a file; offset and size in bytes."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    nbytes: int

    def rows(self, shape: tuple[int, ...], first: int) -> StoredTensor:
        """Return the location of rows of it, of a whole shape, from the first one on."""
        row = self.nbytes // max(1, self.shape[0]) if self.shape else self.nbytes
        nbytes = row * shape[0] if shape else row
        return replace(self, shape=shape, offset=self.offset + row * first, nbytes=nbytes)


def read_index(source: str | os.PathLike[str]) -> dict[str, StoredTensor]:
    """Return the tensors of a checkpoint by name, in the order of the files' bytes.

    The source is a safetensors file, or a directory with one file or with shards and an index.
    """
    return {name: stored for file in _files(Path(source)) for name, stored in _header(file).items()}


def _files(source: Path) -> list[Path]:
    if not source.is_dir():
        return [source]
    indexes = sorted(source.glob(f"*{_INDEX}"))
    files = sorted(source.glob(f"*{_SUFFIX}"))
    if len(indexes) == 1:
        try:
            names = set(json.loads(indexes[0].read_text())["weight_map"].values())
            files = sorted(source / str(name) for name in names)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"{str(indexes[0])!r} is not a safetensors index: {error!r}"
            ) from error
        missing = [path.name for path in files if not path.is_file()]
        if missing:
            raise ConfigError(
                f"{str(indexes[0])!r} names {', '.join(missing)}, which is missing there. "
                f"Download it again."
            )
    elif len(files) != 1:
        found = ", ".join(path.name for path in [*indexes, *files]) or f"no {_SUFFIX} file"
        raise ConfigError(
            f"{str(source)!r} has {found}: name the one file, or a directory with one file or one "
            f"index (*{_INDEX})."
        )
    return files


def _header(file: Path) -> dict[str, StoredTensor]:
    safetensors = _library("load_weights")
    try:
        with safetensors.safe_open(file, framework="pt"):
            pass  # validates the header and the file's size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            entries = json.loads(stream.read(length))
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        raise ConfigError(f"cannot load weights from {str(file)!r}: {error}") from error
    entries.pop("__metadata__", None)
    tensors = {}
    for name, entry in sorted(entries.items(), key=lambda item: item[1]["data_offsets"]):
        # Formats below a byte have no torch dtype of that size.
        dtype = safetensors.torch._TYPES.get(entry["dtype"])
        if dtype is None:
            raise ConfigError(f"{str(file)!r}: {name} has the unsupported dtype {entry['dtype']}.")
        begin, end = entry["data_offsets"]
        shape = tuple(entry["shape"])
        tensors[name] = StoredTensor(file, dtype, shape, 8 + length + begin, end - begin)
    return tensors


def _library(method: str) -> Any:
    try:
        import safetensors.torch
    except ImportError as error:
        raise ConfigError(
            f"{method} needs the package safetensors. Install it with `pip install safetensors`."
        ) from error
    return safetensors


def refuse_extra_state(model: nn.Module) -> None:
    """Raise a ConfigError if modules have state that safetensors files cannot hold."""
    found = [
        name or type(module).__name__
        for name, module in model.named_modules()
        if type(module).get_extra_state is not nn.Module.get_extra_state
        and module.get_extra_state() is not None
    ]
    if found:
        raise ConfigError(
            f"save_weights: {', '.join(found[:5])} has extra state (get_extra_state()), which "
            f"safetensors files do not hold. Save the model's state_dict() with torch.save."
        )


def named_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors of a model's state_dict without detaching parameters."""
    # Detaching, as state_dict() does by default, would load every streamed weight.
    values = model.state_dict(keep_vars=True).items()
    return {name: value for name, value in values if isinstance(value, torch.Tensor)}


def save_shards(
    tensors: Mapping[str, torch.Tensor], directory: Path, shard_bytes: int, resident: Resident
) -> list[Path]:
    """Write tensors to a directory, replacing what was saved there before; return the files.

    `resident` keeps tensors in memory within the context that it returns.
    The index is replaced last, and names no file of an earlier save, so an interrupted save leaves
    the earlier one whole. A tensor with several names is written once. Only a single tensor may
    exceed `shard_bytes`.
    """
    library = _library("save_weights")
    first: dict[int, str] = {}
    names = {name: first.setdefault(id(tensor), name) for name, tensor in tensors.items()}
    same = {name: kept for name, kept in names.items() if kept != name}
    shards: list[dict[str, torch.Tensor]] = [{}]
    size = 0
    for name in first.values():
        if size + tensors[name].nbytes > shard_bytes and shards[-1]:
            shards.append({})
            size = 0
        shards[-1][name] = tensors[name]
        size += tensors[name].nbytes
    written = sum(tensors[name].nbytes for name in first.values())
    partial, bar = directory / _PARTIAL, Progress("saving weights", written)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        files = dict(zip(_new_names(directory, len(shards)), shards, strict=True))
        shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed
        partial.mkdir()
        for file, shard in files.items():
            with resident(shard.values()):
                values = {name: tensor.detach().contiguous() for name, tensor in shard.items()}
                metadata = {"format": "pt", **same}
                library.torch.save_file(values, partial / file, metadata=metadata)
                del values
            _sync(partial / file)
            bar.update(sum(tensor.nbytes for tensor in shard.values()))
        index = {
            "metadata": {"total_size": written},
            "weight_map": {name: file for file, shard in files.items() for name in shard},
        }
        (partial / f"{_NAME}{_INDEX}").write_text(json.dumps(index, indent=2) + "\n")
        _sync(partial / f"{_NAME}{_INDEX}")
        _move(files, partial, directory)
        _move([f"{_NAME}{_INDEX}"], partial, directory)
        # Transformers would read a single file of an earlier save rather than the index.
        for path in directory.iterdir():
            if _SAVED.fullmatch(path.name) and path.name not in files:
                path.unlink()
    except (OSError, library.SafetensorError) as error:  # the library's own: a full disk
        reason = getattr(error, "strerror", None) or error
        raise StorageError(
            f"could not save weights to {str(directory)!r}: {reason}. Free some space, or choose "
            f"another directory."
        ) from error
    finally:
        bar.close()
        shutil.rmtree(partial, ignore_errors=True)
    return [directory / file for file in files]


def _new_names(directory: Path, count: int) -> list[str]:
    """Return names for the files of a save; those of several shards are not in use."""
    if count == 1:
        return [f"{_NAME}{_SUFFIX}"]
    for save in itertools.count(1):
        prefix = _NAME if save == 1 else f"{_NAME}-{save}"
        names = [f"{prefix}-{n:05}-of-{count:05}{_SUFFIX}" for n in range(1, count + 1)]
        if not any(os.path.lexists(directory / name) for name in names):
            break
    return names


def _sync(file: Path) -> None:
    """Bring a file onto the disk and out of the page cache."""
    with file.open("rb") as stream:
        os.fsync(stream.fileno())
        drop_from_cache(stream.fileno())


def _move(names: Iterable[str], source: Path, target: Path) -> None:
    """Move files to another directory, and wait until its entries are on the disk."""
    for name in names:
        os.replace(source / name, target / name)
    sync_directory(target)
