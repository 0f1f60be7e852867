"""What handles of saved tensors share: data that is nothing, and autograd's error for changes."""

from __future__ import annotations

import functools

import torch


@functools.cache
def nothing(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor without elements; the same one each time, as nobody changes it."""
    return torch.empty(0, dtype=dtype, device=device)


def changed(alias: torch.Tensor, expected: int, shape: torch.Size, of: str = "") -> RuntimeError:
    """Return what autograd raises for a tensor whose version was another when it was saved."""
    try:
        kind = alias.type()
    except RuntimeError:  # compressed sparse and opaque layouts have no name of that kind
        kind = f"{alias.dtype}, {alias.layout}"
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace "
        f"operation: [{kind} {list(shape)}]{of} is at version {alias._version}; expected version "
        f"{expected} instead. Hint: enable anomaly detection to find the operation that failed to "
        "compute its gradient, with torch.autograd.set_detect_anomaly(True)."
    )
