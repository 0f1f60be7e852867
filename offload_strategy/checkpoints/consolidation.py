"""One plain file of a checkpoint that several ranks saved in parts.

`torch.distributed.checkpoint` saves a folder, in which states of an optimizer go by the names of
parameters. What a plain `optimizer.load_state_dict` takes, and what a Trainer with one device
loads, is one file in which they go by number.
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

#: What Lightning adds to such a folder: everything but weights and states.
_LIGHTNING_FILE = "meta.pt"
_LIGHTNING_OPTIMIZER = "optimizer_"


def consolidate(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> list[str]:
    """Write one file that `torch.load` reads, of a folder of torch.distributed.checkpoint.

    A folder of Lightning's becomes a checkpoint as Lightning saves it with one device. Needs as
    much host memory as the checkpoint is large, and for a while twice its room on the disk.

    Args:
        source: the folder.
        target: the file; it is replaced when the new one is complete.

    Returns:
        The keys at its top.

    Raises:
        ConfigError: the folder is not such a checkpoint.
        StorageError: it cannot be read, or the file not be written.
    """
    folder, file = Path(source), Path(target)
    if not (folder / ".metadata").is_file():
        raise ConfigError(
            f"{folder}: not a checkpoint of torch.distributed.checkpoint, which is a folder with a "
            f"file .metadata. Name the folder that was given as checkpoint_id, or that Lightning "
            f"made."
        )
    if file.is_dir():
        raise ConfigError(f"{file}: is a directory; name the file that is to be written")
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    try:
        # Beside the file: there has to be room for it in any case.
        with tempfile.TemporaryDirectory(dir=file.parent, prefix=f".{file.name}.") as between:
            whole = Path(between) / "whole.pt"
            dcp_to_torch_save(folder, whole)
            content: dict[str, Any] = torch.load(whole, mmap=True, weights_only=False)
            if (folder / _LIGHTNING_FILE).is_file():
                content = _as_lightning(content, folder / _LIGHTNING_FILE)
            plain = {key: _by_number(value) for key, value in content.items()}
            save(plain, file)
    except (OSError, RuntimeError) as error:
        raise StorageError(f"{folder} could not be consolidated into {file}: {error}") from error
    return list(plain)


def _as_lightning(content: dict[str, Any], rest: Path) -> dict[str, Any]:
    checkpoint: dict[str, Any] = torch.load(rest, weights_only=False)
    optimizers = [key for key in content if key.startswith(_LIGHTNING_OPTIMIZER)]
    optimizers.sort(key=lambda key: int(key.removeprefix(_LIGHTNING_OPTIMIZER)))
    checkpoint["state_dict"] = content["state_dict"]
    checkpoint["optimizer_states"] = [_by_number(content[key]) for key in optimizers]
    return checkpoint


def _by_number(value: Any) -> Any:
    """An optimizer's state dict with numbers for the names of parameters; all else as it is."""
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
