"""TensorNVMe as a contender: states on the disk, in the loop that its documents show.

It keeps tensors in a file by libaio or io_uring, and comes without an optimizer; ColossalAI's goes
through the parameters one by one, as here: the next one's states are read while one is updated, and
those before it are written. `pip install tensornvme` wants torch, cmake and the headers of libaio.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import torch

from benchmarks.optimizer.deepspeed_peer import Unavailable

_DEPTH = 16


class TensorNVMe:
    """A contender; see `contenders.Trainer`.

    Args:
        model: to train.
        adamw: options of `torch.optim.AdamW`.
        directory: where its file goes.

    Raises:
        Unavailable: it is not installed, or cannot be used.
    """

    def __init__(self, model: torch.nn.Module, adamw: dict[str, Any], directory: Path) -> None:
        try:
            from tensornvme import DiskOffloader

            self._disk = DiskOffloader(str(directory), _DEPTH, "aio")
        except (ImportError, AssertionError, RuntimeError) as error:
            raise Unavailable(f"TensorNVMe cannot be used here: {error}") from error
        self.forward = model
        self._parameters = list(model.parameters())
        self._optimizers = [
            torch.optim.AdamW([parameter], fused=True, **adamw) for parameter in self._parameters
        ]
        self._gone: set[int] = set()

    def backward(self, loss: torch.Tensor) -> None:
        """See `contenders.Trainer`."""
        loss.backward()

    def clip(self, limit: float) -> float:
        """See `contenders.Trainer`."""
        return float(torch.nn.utils.clip_grad_norm_(self._parameters, limit))

    def step(self) -> None:
        """Update one parameter after the other."""
        self._read(0)
        for number, optimizer in enumerate(self._optimizers):
            self._disk.sync_read_events()
            self._read(number + 1)
            optimizer.step()
            self._disk.sync_write_events()
            self._disk.async_writev(self._states(number))
            self._gone.add(number)
        self._disk.synchronize()

    def _read(self, number: int) -> None:
        if number in self._gone:
            self._disk.async_readv(self._states(number))
            self._gone.discard(number)

    def _states(self, number: int) -> list[torch.Tensor]:
        state = self._optimizers[number].state[self._parameters[number]]
        return [state["exp_avg"], state["exp_avg_sq"]]

    def zero_grad(self) -> None:
        """See `contenders.Trainer`."""
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none=True)

    def metrics(self) -> dict[str, float]:
        """None of ours."""
        return {}

    def close(self) -> None:
        """End it."""
        with contextlib.suppress(RuntimeError):
            self._disk.synchronize()
