"""Checkpoints of Accelerate and of Transformers' `Trainer` with an offloaded optimizer.

`optimizer.bin`, the large file, is written by `offload_strategy.save` and mapped when it is loaded;
format and name stay Accelerate's. Each file is replaced atomically, but not the directory of a
checkpoint (docs/checkpoints.md).

`accelerate.checkpointing` offers no hook for how its files are written, so the two functions by
which it writes and reads are wrapped, for a `save_state` or `load_state` of an `Accelerator` that
offloads.

With data-parallel processes that share states, the `Trainer` asks its optimizer for a state dict
only on the process that saves. All processes call the method in which it does so, and there they
gather the states first.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from offload_strategy.integrations import is_offloaded

if TYPE_CHECKING:
    from accelerate import Accelerator

_TRAINER_METHOD = "_save_optimizer_and_scheduler"
_INSTALLED = "_ssd_offload_installed"
_streaming: ContextVar[bool] = ContextVar("ssd_offload_streaming", default=False)


def install_in(checkpointing: Any) -> None:
    """Wrap how the module `accelerate.checkpointing` writes and reads the files of a checkpoint."""
    wrappers: dict[str, Callable[..., Any]] = {"save": _save, "load": _load}
    for name, ours in wrappers.items():
        if (original := getattr(checkpointing, name, None)) is not None:
            wrapper = functools.partial(ours, original)
            setattr(checkpointing, name, functools.update_wrapper(wrapper, original))


@contextlib.contextmanager
def streaming(accelerator: Accelerator) -> Iterator[None]:
    """Stream the files of optimizers within the context, if all optimizers are offloaded."""
    # A plain optimizer would keep tensors that are mapped from the checkpoint's file.
    inner = [getattr(each, "optimizer", each) for each in accelerator._optimizers]
    before = _streaming.set(all(map(is_offloaded, inner)))
    try:
        yield
    finally:
        _streaming.reset(before)


def _save(original: Callable[..., Any], obj: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
    if not _is_an_optimizers(f):
        return original(obj, f, *args, **kwargs)
    from accelerate.state import PartialState

    from offload_strategy.checkpoints import save

    # As in Accelerate, all processes call this, and one (or one per node) writes.
    state, per_node = PartialState(), kwargs.get("save_on_each_node", False)
    writes = state.is_local_main_process if per_node else state.is_main_process
    return save(obj, f) if writes else None


def _load(original: Callable[..., Any], f: Any, map_location: Any = None, **kwargs: Any) -> Any:
    if _is_an_optimizers(f):
        from offload_strategy.checkpoints.copy_on_write_maps import small_in_memory

        map_location = small_in_memory(map_location)
        kwargs.setdefault("mmap", True)
    return original(f, map_location, **kwargs)


def _is_an_optimizers(file: Any) -> bool:
    """Whether this is the file of an optimizer in a streamed checkpoint."""
    if not _streaming.get() or not isinstance(file, str | os.PathLike):
        return False
    from accelerate.utils import OPTIMIZER_NAME

    return os.path.basename(file).startswith(OPTIMIZER_NAME)


def install_in_trainer(session_of: Callable[[Accelerator], Any]) -> None:
    """Wrap methods of the `Trainer`, which is imported before it makes its `Accelerator`."""
    trainer = getattr(sys.modules.get("transformers.trainer"), "Trainer", None)
    original = getattr(trainer, _TRAINER_METHOD, None)
    if trainer is None or original is None or hasattr(original, _INSTALLED):
        return
    original_train = trainer.train

    @functools.wraps(original_train)
    def train(self: Any, *args: Any, **kwargs: Any) -> Any:
        # It clips gradients, and (from version 5) logs their norm without clipping too: refused
        # there, the first backward pass would have changed weights already.
        reads = hasattr(self, "_get_grad_norm") or self.args.max_grad_norm
        if reads and (session := session_of(self.accelerator)) is not None:
            session.config.check_gradients_untouched("the Trainer of Transformers")
        return original_train(self, *args, **kwargs)

    @functools.wraps(original)
    def save(self: Any, *args: Any, **kwargs: Any) -> Any:
        optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
        if is_offloaded(optimizer):
            optimizer.consolidate_state_dict()
        return original(self, *args, **kwargs)

    setattr(save, _INSTALLED, True)
    setattr(trainer, _TRAINER_METHOD, save)
    trainer.train = train
