"""The fastest settings of DeepSpeed for a model: first of its I/O, then of its subgroups."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Sequence
from typing import Any

import psutil
import torch

from benchmarks.io.results import Context, Skipped
from benchmarks.optimizer.contenders import DEEPSPEED, deepspeed_options
from benchmarks.optimizer.deepspeed_peer import Settings, io_candidates, subgroup_candidates
from benchmarks.optimizer.session import start
from benchmarks.optimizer.tasks import RandomTokens
from offload_strategy.units import format_size

#: Of the machine's memory: its buffers are locked in memory, and its other memory must fit as well.
_MOST_BUFFERS = 0.75
#: Of the machine's memory it may take so much in all: the other contenders need memory as well.
_MOST = 0.45


def check_buffers(settings: Settings, task: RandomTokens) -> None:
    """Refuse settings with which the kernel would end it, and maybe others, for want of memory.

    Raises:
        Skipped: its buffers, each for a whole subgroup, would take most of the memory.
    """
    if settings.on_host:
        return
    nbytes = 4 * settings.buffer_count * min(settings.sub_group_size, _parameters(task))
    memory = psutil.virtual_memory().total
    if nbytes > _MOST_BUFFERS * memory:
        raise Skipped(
            f"{settings.buffer_count} buffers of a subgroup would take {format_size(nbytes)} of "
            f"{format_size(memory)}, locked"
        )


def fastest_settings(
    context: Context,
    task: RandomTokens,
    tried: list[dict[str, Any]],
    known: Settings | None = None,
) -> Settings:
    """Search.

    Args:
        context: the directory; with `quick` fewer are tried.
        task: what is trained.
        tried: what was tried is added, and what came of it.
        known: the fastest of another model, whose I/O is taken over; subgroups alone are tried.

    Raises:
        Skipped: DeepSpeed cannot be used here.
    """

    def fastest(candidates: Sequence[Settings]) -> Settings:
        found: list[tuple[float, int]] = []
        for index, settings in enumerate(candidates):
            seconds, why = _try(context, settings, task)
            tried.append({"settings": settings.shown(), "seconds": seconds, "failed": why})
            context.say(f"DeepSpeed, {settings.shown()}: {why or f'{seconds:.3f} s a step'}")
            if seconds is not None:
                found.append((seconds, index))
        if not found:
            raise Skipped(str(tried[-1]["failed"]))
        return candidates[min(found)[1]]

    parameters = _parameters(task)
    if known is not None:
        return fastest(subgroup_candidates(known, parameters)[:2])
    candidates = io_candidates()[: 1 if context.quick else None]
    best = fastest(candidates)
    with_best = [entry for entry in tried if entry["settings"] == best.shown()]
    more = subgroup_candidates(best, parameters)[: 1 if context.quick else None]
    try:
        other = fastest(more)
    except Skipped:
        return best
    seconds = min(e["seconds"] for e in tried if e["settings"] == other.shown())
    return other if seconds < with_best[0]["seconds"] else best


def _try(
    context: Context, settings: Settings, task: RandomTokens
) -> tuple[float | None, str | None]:
    """Seconds of a step, or why there are none."""
    with contextlib.ExitStack() as stack:
        try:
            check_buffers(settings, task)
            options = deepspeed_options(settings)
            subject, _ = start(stack, DEEPSPEED, options, task, context.directory)
            steps = subject.ask({"steps": 4})["steps"][2:]
        except (Skipped, RuntimeError) as why:
            return None, str(why)[-1000:]
    peak = max(step["peak_bytes"] for step in steps)
    if peak > _MOST * psutil.virtual_memory().total:
        return None, f"takes {format_size(peak)}: no room for the other contenders"
    return statistics.fmean(step["seconds"] for step in steps), None


def _parameters(task: RandomTokens) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in task.model().parameters())
