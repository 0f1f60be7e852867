"""Host buffers: one exact-size pool per class of shapes, and what the pool holds for them."""

from __future__ import annotations

import random

import torch

from benchmarks.io.results import Context, Result
from offload_strategy.host_memory.pool import BufferPool
from offload_strategy.planner.model_presets import preset
from offload_strategy.planner.search.settings import weight_buffers
from offload_strategy.units import PAGE_BYTES, GiB

#: Presets of the planner.
MODELS = ("qwen2.5-7b", "llama3.1-8b", "qwen2.5-14b", "qwen2.5-32b")
#: MemAscend's own figures for Qwen2.5-7B, in GiB.
PUBLISHED = {"qwen2.5-7b": (2.46, 9.14)}
_ALLOCATIONS = 1000
#: Bytes lent at a time in the random run, at most.
_LENT = 2 * GiB


def buffers(context: Context) -> list[Result]:
    """GiB of fp16 buffers with one block in flight: exact sizes compared with one size for all."""
    results = []
    for name in MODELS:
        census = weight_buffers(preset(name))
        results += _compared_with_one_size(name, census)
        context.say(f"{name}: {_ALLOCATIONS} random allocations per class")
        runs = [_random_run([nbytes] * _ALLOCATIONS) for nbytes in census]
        results.append(max((_held(f"{name}, each class", run) for run in runs), key=_ratio))
        mixed = [nbytes for nbytes in census for _ in range(_ALLOCATIONS)]
        results.append(_held(f"{name}, classes mixed", _random_run(mixed), judged=False))
    return results


def _compared_with_one_size(name: str, census: dict[int, int]) -> list[Result]:
    exact = sum(size * count for size, count in census.items()) / GiB
    one_size = max(census) * sum(census.values()) / GiB
    command = "as many buffers, all of the largest weight's size"
    classes = [{"bytes": size, "buffers": count} for size, count in census.items()]
    results = [
        Result(
            name=f"buffers: {name}, exact sizes",
            ours=exact,
            peer=one_size,
            unit="GiB",
            ratio=exact / one_size,
            threshold=1.0,
            at_least=False,
            command=command,
            details={"classes": classes},
            judged=False,
        )
    ]
    if name in PUBLISHED:
        for kind, ours, published in zip(
            ("exact sizes", "one size"), (exact, one_size), PUBLISHED[name], strict=True
        ):
            rounded = round(ours, 2)
            results.append(
                Result(
                    name=f"buffers: {name}, {kind}, as published",
                    ours=rounded,
                    peer=published,
                    unit="GiB",
                    ratio=rounded / published,
                    threshold=1.0,
                    # No more than published for ours, no less for the other.
                    at_least=kind == "one size",
                    command="MemAscend's table",
                )
            )
    return results


def _random_run(sizes: list[int]) -> tuple[float, int, int]:
    """Borrow buffers of these sizes and give them back, at random.

    Returns:
        Bytes lent over bytes asked for, at the worst moment; the most bytes that were held; the
        most that were asked for.
    """
    chance = random.Random(0)
    sizes = chance.sample(sizes, len(sizes))
    pool = BufferPool(_LENT)
    acquired: list[torch.Tensor] = []
    worst, most_requested = 0.0, 0
    try:
        for nbytes in sizes:
            # Tensors rarely end with a page.
            wanted = nbytes - chance.randrange(0, PAGE_BYTES)
            while (buffer := pool.acquire(wanted)) is None:
                acquired.pop(chance.randrange(len(acquired)))
            acquired.append(buffer)
            del buffer
            usage = pool.usage()
            most_requested = max(most_requested, usage.requested_bytes)
            worst = max(worst, usage.lent_bytes / usage.requested_bytes)
            while acquired and chance.random() < 0.5:
                acquired.pop(chance.randrange(len(acquired)))
        return worst, pool.usage().peak_bytes, most_requested
    finally:
        acquired.clear()
        pool.close()


def _held(name: str, run: tuple[float, int, int], *, judged: bool = True) -> Result:
    """Held over requested bytes: at each moment for what is lent, and at the peak for everything.

    Idle memory waits for the next request, so held bytes are compared at their peak.
    """
    worst, held, requested = run
    return Result(
        name=f"buffers: {name}, held / requested",
        ours=held / GiB,
        peer=requested / GiB,
        unit="GiB",
        ratio=max(worst, held / requested),
        threshold=1.01,
        at_least=False,
        command=f"the bytes asked for, in {_ALLOCATIONS} random allocations per class",
        details={"lent_over_requested": worst, "peak_held_over_peak_requested": held / requested},
        judged=judged,
    )


def _ratio(result: Result) -> float:
    return result.ratio
