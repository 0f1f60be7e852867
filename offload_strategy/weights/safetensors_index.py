"""Folders of safetensors: which tensor lies where in which file.

A file begins with eight bytes, the length of its header; the header is JSON and says of each tensor
its dtype, its shape and where its bytes are, counted from the header's end. `safetensors` itself
reads a file only into memory of its own or of the page cache, so the places are read here, after it
has checked the file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from offload_strategy.errors import ConfigError

_SUFFIX = ".safetensors"
_INDEX = f"{_SUFFIX}.index.json"

#: Names of dtypes in a header. What is not here (sub-byte formats) has no torch dtype of its size.
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
    """A tensor in a file.

    Args:
        file: which has it.
        dtype: of it.
        shape: of it; it is contiguous.
        offset: where in the file its bytes begin.
        nbytes: how many they are.
    """

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    nbytes: int


def read_index(source: str | os.PathLike[str]) -> dict[str, StoredTensor]:
    """What a checkpoint has, by name, in the order of its files' bytes.

    Args:
        source: a file of safetensors, or a directory with one, or with shards and their index.

    Raises:
        ConfigError: there is none, or one is damaged or missing; safetensors are not installed.
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
        raise ConfigError(f"{str(index)!r} is no index of safetensors: {error!r}") from error
    missing = [path.name for path in files if not path.is_file()]
    if missing:
        raise ConfigError(
            f"{str(index)!r} names {', '.join(missing)}, which is not beside it. Fetch it again."
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
            pass  # it checks that the header is sound, and that the file has all of its bytes
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
        raise ConfigError(f"{str(file)!r}: {name} is of dtype {entry['dtype']}, which cannot load.")
    begin, end = entry["data_offsets"]
    return StoredTensor(file, dtype, tuple(entry["shape"]), base + begin, end - begin)
