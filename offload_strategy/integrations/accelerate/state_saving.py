"""`Accelerator.save_state` and `load_state` of an offloaded optimizer: its file streams.

`optimizer.bin` is the large file of such a checkpoint. It is written by `offload_strategy.save` and
mapped when it is loaded; format and name stay Accelerate's. Each file is replaced as a whole, but a
checkpoint of Accelerate's is a folder of several: a process that is killed while it saves into a
folder that has one already can leave files of two steps in it. So save into a new folder each time
(`ProjectConfiguration(automatic_checkpoint_naming=True)` does), as without offload.

`accelerate.checkpointing` offers no hook for how its files are written, so the two functions by
which it writes and reads are wrapped; outside of a `save_state` or `load_state` of an `Accelerator`
that offloads, the wrappers hand on what they are given.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from accelerate import Accelerator

_streaming: ContextVar[bool] = ContextVar("ssd_offload_streaming", default=False)


def install_in(checkpointing: Any) -> None:
    """Wrap how the files of a checkpoint are written and read.

    Args:
        checkpointing: the module `accelerate.checkpointing`.
    """
    for name, wrap in {"save": _save, "load": _load}.items():
        original = getattr(checkpointing, name, None)
        if original is not None:
            setattr(checkpointing, name, wrap(original))


@contextlib.contextmanager
def streaming(accelerator: Accelerator) -> Iterator[None]:
    """Inside, the files of optimizers stream, if all of the Accelerator's are offloaded."""
    from offload_strategy.optimizer.offloaded_optimizer import OffloadedOptimizer

    # A plain optimizer keeps what it is given, which would lie in the checkpoint's file.
    inner = [getattr(each, "optimizer", each) for each in accelerator._optimizers]
    before = _streaming.set(all(isinstance(each, OffloadedOptimizer) for each in inner))
    try:
        yield
    finally:
        _streaming.reset(before)


def _save(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
        if not _is_an_optimizers(f):
            return original(obj, f, *args, **kwargs)
        from accelerate.state import PartialState

        from offload_strategy.checkpoints import save

        # As Accelerate's own: every process comes here, and one writes; or one on each machine.
        state, per_node = PartialState(), kwargs.get("save_on_each_node", False)
        writes = state.is_local_main_process if per_node else state.is_main_process
        return save(obj, f) if writes else None

    return save


def _load(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def load(f: Any, map_location: Any = None, **kwargs: Any) -> Any:
        if _is_an_optimizers(f):
            from offload_strategy.checkpoints import small_in_memory

            map_location = small_in_memory(map_location)
            kwargs.setdefault("mmap", True)
        return original(f, map_location, **kwargs)

    return load


def _is_an_optimizers(file: Any) -> bool:
    """Whether this is the file of an optimizer, in a checkpoint that streams."""
    if not _streaming.get() or not isinstance(file, str | os.PathLike):
        return False
    from accelerate.utils import OPTIMIZER_NAME

    return os.path.basename(file).startswith(OPTIMIZER_NAME)
