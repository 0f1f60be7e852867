"""The fastest settings of DeepSpeed for a model: first of its I/O, then of its subgroups."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.io.results import Context, Skipped
from benchmarks.optimizer.contenders import DEEPSPEED, deepspeed_options
from benchmarks.optimizer.deepspeed_peer import Settings, io_candidates, subgroup_candidates
from benchmarks.optimizer.session import start
from benchmarks.optimizer.tasks import RandomTokens


def fastest_settings(context: Context, task: RandomTokens, tried: list[dict[str, Any]]) -> Settings:
    """Search.

    Args:
        context: the directory; with `quick` fewer are tried.
        task: what is trained.
        tried: what was tried is added, and what came of it.

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
            raise Skipped(f"{DEEPSPEED} does not take part: {tried[-1]['failed']}")
        return candidates[min(found)[1]]

    candidates = io_candidates()[: 1 if context.quick else None]
    best = fastest(candidates)
    with_best = [entry for entry in tried if entry["settings"] == best.shown()]
    with torch.device("meta"):
        parameters = sum(parameter.numel() for parameter in task.model().parameters())
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
            options = deepspeed_options(settings)
            subject, _ = start(stack, DEEPSPEED, options, task, context.directory)
            steps = subject.ask({"steps": 4})["steps"][2:]
        except (Skipped, RuntimeError) as why:
            return None, str(why)[-1000:]
    return statistics.fmean(step["seconds"] for step in steps), None
