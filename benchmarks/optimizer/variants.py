"""The engine without one of its parts, for the ablation.

The engine has no switches for these: a part is taken out by replacing a function within the
process of the contender. What takes its place does what systems without the part do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from offload_strategy import OffloadEngine
from offload_strategy.host_memory.pool import BufferPool
from offload_strategy.io.queues.path_lock import PathLock
from offload_strategy.optimizer.user_class import inner_step as kernel
from offload_strategy.store.tensor_store import TensorStore
from offload_strategy.store.ticket import Ticket
from offload_strategy.units import KiB

GRADIENTS, EXACT_BUFFERS, PATH_LOCK = "gradients in memory", "exact buffers", "process locks"
#: What takes the place of each part.
MEANING = {
    GRADIENTS: "every gradient in fp32 is written to the disk when it is complete and read back "
    "before its update, as ZeRO-Infinity does; reads are begun ahead, and one whose write still "
    "waits is served from memory",
    EXACT_BUFFERS: "every staging buffer has the size that the states of the largest tensor need",
    PATH_LOCK: "processes read and write the path whenever they want to",
}
#: Smaller tensors stay in memory, as they do with DeepSpeed.
_SMALL_BYTES = 64 * KiB
#: Gradients whose reads are begun ahead of the one that is needed.
_AHEAD = 4


class Part(Protocol):
    """Takes a part out: made before the engine is, told when it is there."""

    def attached(self, engine: OffloadEngine) -> None:
        """The engine is there, with the optimizer attached."""


class _OneSizeBuffers:
    """Staging buffers as ZeRO-Infinity's: all of the largest tensor's size."""

    def __init__(self, model: torch.nn.Module) -> None:
        both_moments = 2
        largest = both_moments * max(p.numel() * p.element_size() for p in model.parameters())
        exact = BufferPool.acquire

        def acquire(pool: BufferPool, nbytes: int, **how: Any) -> torch.Tensor | None:
            if nbytes < _SMALL_BYTES:
                return exact(pool, nbytes, **how)
            buffer = exact(pool, max(nbytes, largest), **how)
            return None if buffer is None else buffer[:nbytes]

        setattr(BufferPool, "acquire", acquire)  # noqa: B010

    def attached(self, engine: OffloadEngine) -> None:
        """See `Part`."""


class _NoPathLock:
    """Nobody knows of other processes on a path."""

    def __init__(self, model: torch.nn.Module) -> None:
        setattr(PathLock, "others", lambda lock: 0)  # noqa: B010

    def attached(self, engine: OffloadEngine) -> None:
        """See `Part`."""


class _GradientsThroughDisk:
    """Gradients go to the disk and come back; their memory is not given up meanwhile.

    The update finds its gradients where they were: what is measured is the time and the bytes.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._store: TensorStore | None = None
        # By the id of a parameter, in the order of completion.
        self._written: dict[int, tuple[torch.Tensor, Ticket]] = {}
        for parameter in model.parameters():
            if parameter.numel() * parameter.element_size() >= _SMALL_BYTES:
                # Before the engine's own hooks, which may begin to update.
                parameter.register_post_accumulate_grad_hook(self._write)
        step_of = kernel.unhooked_step

        def unhooked_step(kind: type[torch.optim.Optimizer]) -> Callable[..., Any]:
            step = step_of(kind)

            def step_with_gradients(optimizer: torch.optim.Optimizer) -> Any:
                for group in optimizer.param_groups:
                    for parameter in group["params"]:
                        if parameter.grad is not None:
                            self._read(parameter.grad)
                return step(optimizer)

            return step_with_gradients

        kernel.unhooked_step = unhooked_step

    def attached(self, engine: OffloadEngine) -> None:
        """See `Part`."""
        self._store = engine._resources.store
        tiers = engine._resources.clients["optimizer"]
        self._tiers = [tier for tier in tiers if not tier.is_host_memory]

    @torch.no_grad()
    def _write(self, parameter: torch.Tensor) -> None:
        store, gradient = self._store, parameter.grad
        assert store is not None
        assert gradient is not None
        if id(parameter) in self._written:
            raise RuntimeError("an update did not ask for a gradient that was written to the disk")
        payload = store.borrow("optimizer", gradient.numel() * gradient.element_size())
        payload.view(gradient.dtype).copy_(gradient.reshape(-1))
        self._written[id(parameter)] = (gradient, store.put(payload, "optimizer", self._tiers))

    @torch.no_grad()
    def _read(self, piece: torch.Tensor) -> None:
        """Read the gradient that a piece belongs to, if it was not read yet."""
        home = next((key for key, entry in self._written.items() if _holds(entry[0], piece)), None)
        if home is None:
            return
        assert self._store is not None
        gradient, ticket = self._written.pop(home)
        for _, following in list(self._written.values())[:_AHEAD]:
            self._store.prefetch(following)
        gradient.detach().reshape(-1).view(torch.uint8).copy_(self._store.take(ticket))


def _holds(whole: torch.Tensor, piece: torch.Tensor) -> bool:
    """Whether a tensor begins in another's memory."""
    nbytes = whole.numel() * whole.element_size()
    return whole.data_ptr() <= piece.data_ptr() < whole.data_ptr() + nbytes


WITHOUT: dict[str, Callable[[torch.nn.Module], Part]] = {
    GRADIENTS: _GradientsThroughDisk,
    EXACT_BUFFERS: _OneSizeBuffers,
    PATH_LOCK: _NoPathLock,
}
