"""What of a sharded tensor is on this rank.

With `fully_shard` (FSDP2) and tensor parallelism parameters, gradients and states are `DTensor`s:
this rank has a part of each. An elementwise update of the whole is the same update of every part,
so subgroups, kernels and tiers know local parts alone. What the user sees are DTensors, as plain
optimizers make them: like the parameter.
"""

from __future__ import annotations

from typing import Any

import torch

try:
    from torch.distributed.tensor import DTensor
except ImportError:  # torch was built without distributed training
    DTensor = None  # type: ignore[assignment,misc]


def is_sharded(tensor: object) -> bool:
    """Whether it is a part of something that other ranks have other parts of."""
    return DTensor is not None and isinstance(tensor, DTensor)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """What of a tensor is here: of a DTensor its local one, which shares memory; else all."""
    if not is_sharded(tensor):
        return tensor
    local: torch.Tensor = tensor._local_tensor  # type: ignore[attr-defined]
    return local


def like_parameter(value: Any, parameter: torch.Tensor) -> Any:
    """A state as the user sees it: as large as a sharded parameter's part, it is sharded too."""
    if not (is_sharded(parameter) and isinstance(value, torch.Tensor)) or is_sharded(value):
        return value
    if value.shape != local_part(parameter).shape:
        return value
    sharded: Any = parameter
    return DTensor.from_local(
        value,
        sharded.device_mesh,
        sharded.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def in_place_of(tensor: torch.Tensor | None, local: torch.Tensor) -> torch.Tensor:
    """A local part as what it stands for: sharded like a tensor, if that is.

    Args:
        tensor: whose place it takes.
        local: of the shape of what is here of it.
    """
    if tensor is None or not is_sharded(tensor):
        return local
    sharded: Any = tensor
    # Not `from_local`, which looks at the values.
    return DTensor(local, sharded._spec, requires_grad=False)
