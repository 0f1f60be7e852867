"""Pipeline schedules of `torch.distributed.pipelining`: which backward is the last of a step.

[Note: the last backward]
Without hints an engine assumes that every backward is the last before `step()`. A schedule tells
each stage which backward is its last, so methods of the stages are wrapped.

[Note: gradients that are divided]
After the last backward a schedule divides the gradients by the number of micro-batches, unless it
was created with ``scale_grads=False``. With ``overlap: commit`` this is learned from the first
steps and predicted, like loss scaling. With ``eager`` the weights would have been updated with
undivided gradients by then, so it is refused.

[Note: several stages in a process]
A stage's own optimizer is updated during the stage's last backward. A shared one sees several of
them before `step()`: ``commit`` updates it there, ``eager`` cannot tell this from a skipped step.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import wraps
from itertools import product
from typing import TYPE_CHECKING, Any

from offload_strategy.errors import ConfigError

if TYPE_CHECKING:
    from offload_strategy.engine.offload_engine import OffloadEngine

#: Methods of a stage that process one micro-batch; the first argument is its index.
_METHODS = ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk")


def follow_schedule(engine: OffloadEngine, schedule: Any) -> None:
    """Give the engine hints about the micro-batches of a pipeline schedule.

    Call it once per schedule and process, before the first step. Idempotent; a schedule may be
    passed to another engine later.

    Args:
        engine: the engine to which the modules of the stages are attached.
        schedule: a schedule of `torch.distributed.pipelining`.

    Raises:
        ConfigError: it is not such a schedule; or with ``optimizer.overlap: eager`` it divides
            gradients after the update, or one optimizer has parameters of several stages.
    """
    stages = _stages_of(schedule)
    if getattr(schedule, "scale_grads", True):
        engine.config.check_gradients_untouched(
            f"{type(schedule).__name__}(scale_grads=True), which divides them by the number of "
            f"micro-batches (with scale_grads=False the loss function has to),"
        )
    if engine.config.optimizer.enabled and engine.config.optimizer.overlap == "eager":
        _check_one_stage_each(engine, stages)
    for stage, name in product(stages, _METHODS):
        method = getattr(stage, name)
        # Replace the wrapper of an earlier engine.
        original = getattr(method, "__wrapped__", method)
        setattr(stage, name, _announced(weakref.ref(engine), original))


def _stages_of(schedule: Any) -> list[Any]:
    stages = getattr(schedule, "_stages", None) or [getattr(schedule, "_stage", None)]
    if not all(hasattr(stage, name) for stage in stages for name in _METHODS):
        raise ConfigError(
            f"follow_schedule: expected a schedule of torch.distributed.pipelining, such as "
            f"Schedule1F1B(stage, ...), got {type(schedule).__name__}."
        )
    return list(stages)


def _check_one_stage_each(engine: OffloadEngine, stages: list[Any]) -> None:
    """See [Note: several stages in a process]."""
    of_stages = [{id(p) for p in stage.submod.parameters()} for stage in stages]
    for optimizer in engine._optimizers:
        own = {id(p) for p in optimizer.parameters()}
        concerned = [s.stage_index for s, of in zip(stages, of_stages, strict=True) if of & own]
        if len(concerned) > 1:
            raise ConfigError(
                f"one {type(optimizer.inner).__name__} has the parameters of stages "
                f"{', '.join(map(str, concerned))}, whose last backwards are not the same, and "
                f"optimizer.overlap: eager needs one last backward before each step(). Make an "
                f"optimizer for each stage, or set optimizer.overlap: commit."
            )


def _announced(
    reference: weakref.ref[OffloadEngine], method: Callable[..., Any]
) -> Callable[..., Any]:
    """Wrap a method of a stage so that the engine gets a hint before it runs."""

    @wraps(method)
    def announce(index: int, *args: Any, **kwargs: Any) -> Any:
        engine = reference()
        if engine is not None and not engine.closed:
            # See [Note: the last backward]; forward methods have no such argument.
            engine.microbatch(index, last=kwargs.get("last_backward", False))
        return method(index, *args, **kwargs)

    return announce
