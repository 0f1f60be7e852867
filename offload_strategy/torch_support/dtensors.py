"""The local shard of a DTensor, and DTensors like another one.

With `fully_shard` (FSDP2) and tensor parallelism, parameters, gradients and states are `DTensor`s.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

try:
    from torch.distributed.tensor import DTensor
except ImportError:  # torch was built without distributed training
    DTensor = None  # type: ignore[assignment,misc]


def is_sharded(tensor: object) -> bool:
    """Whether a tensor is a DTensor."""
    return DTensor is not None and isinstance(tensor, DTensor)


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a DTensor, which shares its memory; any other tensor itself.

    For a lazy module's parameter that has no shape yet, a small tensor stands.
    """
    if is_lazy(tensor):
        return torch.empty(8, 8, dtype=tensor.dtype, device=tensor.device)
    if not is_sharded(tensor):
        return tensor
    local: torch.Tensor = tensor._local_tensor  # type: ignore[attr-defined]
    return local


def shard_like(value: Any, parameter: torch.Tensor) -> Any:
    """A state as the user sees it: a DTensor if it has the shape of a DTensor parameter's shard."""
    if not (is_sharded(parameter) and isinstance(value, torch.Tensor)) or is_sharded(value):
        return value
    if value.dim() == 0 or value.shape != local_tensor(parameter).shape:
        return value
    sharded: Any = parameter
    mesh, placements = sharded.device_mesh, sharded.placements
    return DTensor.from_local(
        value, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
    )


def wrap_like(tensor: torch.Tensor | None, local: torch.Tensor) -> torch.Tensor:
    """`local` as a DTensor with the sharding of `tensor`; `local` itself if that is not sharded."""
    if tensor is None or not is_sharded(tensor):
        return local
    sharded: Any = tensor
    # Not `from_local`, which reads the values.
    return DTensor(local, sharded._spec, requires_grad=False)


def fsdp_groups(module: nn.Module) -> list[Any]:
    """Return FSDP2's parameter groups of a module; there is no public way to them."""
    state = getattr(module, "_get_fsdp_state", lambda: None)()
    if state is None:
        return []
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    return [group for group in groups if group is not None]


def fsdp_param_of(model: nn.Module, parameter: torch.Tensor) -> Any | None:
    """Return FSDP2's FSDPParam of a sharded parameter; None if FSDP2 does not manage it."""
    groups = (group for module in model.modules() for group in fsdp_groups(module))
    managed = (each for group in groups for each in group.fsdp_params)
    return next((each for each in managed if each.sharded_param is parameter), None)


def local_rows(tensor: torch.Tensor) -> tuple[tuple[int, ...], int] | None:
    """Return shape and first row of this rank's shard of a DTensor; None if it is no row range."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    sharded: Any = tensor
    shape, offset = compute_local_shape_and_global_offset(
        sharded.shape, sharded.device_mesh, sharded.placements
    )
    if tuple(shape[1:]) != tuple(sharded.shape[1:]):
        return None
    return tuple(shape), offset[0] if offset else 0
