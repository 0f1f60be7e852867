"""The section of one tier: what each kind needs, and what it cannot have."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from offload_strategy.config.directories import expand_path
from offload_strategy.config.value_types import PositiveSize

_NOT_FOR_MEMORY = {
    "path": "cannot have a path",
    "endurance_tbw": "does not wear out",
    "writes_per_day": "does not wear out",
    "shared": "no other machine uses",
    "overwrite": "carries nothing",
}


class Section(BaseModel):
    """A section of the config: unknown keys are errors, and values cannot be changed."""

    # use_attribute_docstrings: the text under a field is its description in the JSON schema too.
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class TierConfig(Section):
    """One place for offloaded tensors. Tiers are listed fastest first."""

    name: str = Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_.-]+$")
    """Name of the tier, used in the sections below and in metric keys."""
    kind: Literal["device", "dram", "ssd"]
    """'device' is memory of the device that trains, for optimizer states that need not move, 'dram'
    host memory, 'ssd' a directory on any disk or file system, or a block device."""
    path: Path | list[Path] | None = None
    """Directory or raw block device of an ssd tier, or a list of them that works as one tier:
    tensors are distributed in proportion to bandwidth. '~' and '$VARIABLES' are expanded. Tiers of
    memory have no path. A block device belongs to one process: use $LOCAL_RANK in its name."""
    capacity: PositiveSize | None = None
    """Maximum bytes on all paths together and for all processes of a job on a machine together.
    Required for device and dram tiers; for an ssd tier null means the free space of the file
    systems. With overlap: commit, new optimizer states in a dram tier may exceed it until step()
    frees the old ones."""
    endurance_tbw: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Rated endurance in terabytes written (10^12 bytes), for the drive's projected lifetime."""
    endurance_share: float = Field(default=0.05, gt=0, le=1)
    """Share of the rated endurance after which a run warns about what it has written."""
    writes_per_day: PositiveSize | None = None
    """Bytes that all processes of a run on this machine may write to the tier in a day, in the mean
    over the run. Activations that would exceed it stay in memory, as far as there is room; what
    must move nevertheless goes on, with a warning after the first hour. null means no limit."""
    shared: bool = False
    """Whether other machines use the directories too (a parallel or network file system). Each
    process then uses its own subdirectory, named after its host and rank."""
    overwrite: bool = False
    """Whether a block device is used even though it carries a file system or other data, which is
    then lost. A mounted device is always refused."""

    @field_validator("path", mode="before")
    @classmethod
    def _expand(cls, path: Any) -> Any:
        if path is None:
            return None
        paths = []
        for one in path if isinstance(path, list | tuple) else [path]:
            if not isinstance(one, str | os.PathLike):
                raise ValueError("must be the path of a directory, or a list of them")
            paths.append(expand_path(os.fspath(one)))
            if paths.count(paths[-1]) > 1:
                raise ValueError(f"{paths[-1]!r} is named twice")
        if not paths:
            raise ValueError("the list is empty: name at least one directory")
        return paths if isinstance(path, list | tuple) else paths[0]

    @property
    def paths(self) -> list[Path]:
        """The directories of an ssd tier; none for tiers of memory."""
        if self.path is None:
            return []
        return self.path if isinstance(self.path, list) else [self.path]

    @model_validator(mode="after")
    def _belongs_together(self) -> Self:
        if self.kind == "ssd" and self.path is None:
            raise ValueError(
                f"tier {self.name!r} (kind: ssd) needs a path, such as path: /mnt/nvme0"
            )
        if self.kind != "ssd":
            memory = "host memory" if self.kind == "dram" else "memory of the device"
            for key, reason in _NOT_FOR_MEMORY.items():
                if getattr(self, key):
                    raise ValueError(
                        f"tier {self.name!r} is {memory} (kind: {self.kind}), which {reason}: "
                        f"remove {key}, or set kind: ssd"
                    )
            if self.capacity is None:
                raise ValueError(
                    f"tier {self.name!r} (kind: {self.kind}) needs a capacity, such as "
                    f"capacity: 16GiB"
                )
        return self
