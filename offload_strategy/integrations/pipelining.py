"""Pipeline schedules of `torch.distributed.pipelining`: which backward is the last of a step.

    stage_module = ...                                     # this rank's part of the model
    optimizer = engine.attach(stage_module, optimizer)
    stage = PipelineStage(stage_module, rank, stages, device)
    schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=loss_fn)
    follow_schedule(engine, schedule)

Activations need no more than `attach`: every call of the stage's module has a record of its own,
and the order in which the schedule runs the backwards is learned from its first steps.

[Note: the last backward]
An engine that is told nothing takes every backward for the last before `step()`. In a schedule
with several micro-batches it is wrong about all but one, notices, and leaves the updates to
`step()` (`eager` has used the first gradients by then, and raises). The schedule tells its stages
which backward is the last of each; so the stages are asked.

[Note: gradients that are divided]
After the last backward a schedule divides the gradients by the number of micro-batches, unless it
was made with ``scale_grads=False``. With ``overlap: commit`` that is learned from the first steps
and foreseen, as loss scaling is. With ``eager`` the weights would have been updated by then with
gradients that are too large, so it is refused.

[Note: several stages in a process]
The last backward of each stage is one of its own. An optimizer for each stage is updated during
that backward; one for all stages sees several before `step()`, in which it is updated with
``commit``, and which ``eager`` cannot tell from a step that was left out.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any

from offload_strategy.errors import ConfigError

if TYPE_CHECKING:
    from offload_strategy.engine.offload_engine import OffloadEngine

__all__ = ["follow_schedule"]

#: What a stage is asked to do with one micro-batch, by the schedule; each takes its number first.
_FORWARD = "forward_one_chunk"
_BACKWARDS = ("backward_one_chunk", "backward_weight_one_chunk")


def follow_schedule(engine: OffloadEngine, schedule: Any) -> None:
    """Have a pipeline schedule tell the engine of its micro-batches.

    Once for each schedule, in every process, before its first step. Harmless to repeat; a schedule
    may be given to another engine.

    Args:
        engine: to which the modules of the schedule's stages are attached.
        schedule: of `torch.distributed.pipelining`.

    Raises:
        ConfigError: it is no such schedule; with ``optimizer.overlap: eager`` it divides gradients
            after the update, or one optimizer has the parameters of several stages.
    """
    stages = _stages_of(schedule)
    if getattr(schedule, "scale_grads", True):
        engine.config.check_gradients_untouched(
            f"{type(schedule).__name__}(scale_grads=True), which divides them by the number of "
            f"micro-batches (with scale_grads=False the loss function has to),"
        )
    if engine.config.optimizer.enabled and engine.config.optimizer.overlap == "eager":
        _check_one_stage_each(engine, stages)
    for stage in stages:
        _follow_stage(weakref.ref(engine), stage)


def _stages_of(schedule: Any) -> list[Any]:
    single = getattr(schedule, "_stage", None)
    stages = getattr(schedule, "_stages", None) if single is None else [single]
    if not stages or not all(hasattr(stage, name) for stage in stages for name in _names()):
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


def _names() -> tuple[str, ...]:
    return (_FORWARD, *_BACKWARDS)


def _follow_stage(engine: weakref.ref[OffloadEngine], stage: Any) -> None:
    for name in _names():
        method = getattr(stage, name)
        # Whoever followed before steps aside.
        setattr(stage, name, _announced(engine, getattr(method, "__wrapped__", method)))


def _announced(
    reference: weakref.ref[OffloadEngine], method: Callable[..., Any]
) -> Callable[..., Any]:
    """A stage's method, of which the engine is told before it runs."""

    @wraps(method)
    def announce(index: int, *args: Any, last_backward: bool | None = None, **kwargs: Any) -> Any:
        engine = reference()
        if engine is not None and not engine.closed:
            # See [Note: the last backward]; forwards are never told.
            engine.microbatch(index, last=bool(last_backward))
        if last_backward is not None:
            kwargs["last_backward"] = last_backward
        return method(index, *args, **kwargs)

    return announce
