"""Consolidating a sharded checkpoint of several ranks into one plain file.

`torch.distributed.checkpoint` saves a directory in which optimizer states are keyed by parameter
names. A plain `optimizer.load_state_dict` and a Trainer with one device expect one file in which
they are keyed by parameter indices.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from offload_strategy.checkpoints.streaming_files import save
from offload_strategy.errors import ConfigError, StorageError

#: The file that Lightning adds to the directory, with everything but weights and states.
_LIGHTNING_FILE = "meta.pt"
_LIGHTNING_OPTIMIZER = "optimizer_"


def consolidate(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> list[str]:
    """Convert a torch.distributed.checkpoint directory into one file for `torch.load`.

    Lightning's directories become checkpoints as Lightning saves them with one device. This needs
    host memory for the whole checkpoint, and temporarily twice its size on disk. The directories
    have pickles, which may run code when they are read: convert only what you trust. `target` is
    replaced atomically. Returns the top-level keys of the file.

    Raises:
        ConfigError: `source` is not a sharded checkpoint.
        StorageError: `source` cannot be read, or `target` cannot be written.
    """
    folder, file = Path(source), Path(target)
    if not (folder / ".metadata").is_file():
        raise ConfigError(
            f"{folder}: not a checkpoint of torch.distributed.checkpoint, which is a directory "
            f"with a file .metadata. Pass the directory that was given as checkpoint_id, or that "
            f"Lightning created."
        )
    if file.is_dir():
        raise ConfigError(f"{file}: is a directory; pass the path of the file to write")
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    try:
        # In the target's directory, which needs the room in any case.
        with tempfile.TemporaryDirectory(dir=file.parent, prefix=f".{file.name}.") as between:
            whole = Path(between) / "whole.pt"
            dcp_to_torch_save(folder, whole)
            content: dict[str, Any] = torch.load(whole, mmap=True, weights_only=False)
            if (folder / _LIGHTNING_FILE).is_file():
                optimizers = [key for key in content if key.startswith(_LIGHTNING_OPTIMIZER)]
                optimizers.sort(key=lambda key: int(key.removeprefix(_LIGHTNING_OPTIMIZER)))
                plain = torch.load(folder / _LIGHTNING_FILE, weights_only=False)
                plain["state_dict"] = content["state_dict"]
                plain["optimizer_states"] = [_by_number(content[key]) for key in optimizers]
            else:
                plain = {key: _by_number(value) for key, value in content.items()}
            save(plain, file)
    except (OSError, RuntimeError) as error:
        raise StorageError(f"{folder} could not be consolidated into {file}: {error}") from error
    return list(plain)


def _by_number(value: Any) -> Any:
    """Replace parameter names by indices in an optimizer's state dict."""
    if not isinstance(value, Mapping) or not value.keys() >= {"state", "param_groups"}:
        return value
    groups = value["param_groups"]
    names = [name for group in groups for name in group["params"]]
    if not all(isinstance(name, str) for name in names):
        return value
    numbers = {name: number for number, name in enumerate(names)}
    return {
        **value,
        "state": {numbers[name]: state for name, state in value["state"].items()},
        "param_groups": [
            {**group, "params": [numbers[name] for name in group["params"]]} for group in groups
        ],
    }
