"""Host buffers: one exact-size pool per class of shapes, and what the pool holds for them."""

from __future__ import annotations

import random

import torch

from benchmarks.io.results import Context, Result
from offload_strategy.host_memory.pool import BufferPool
from offload_strategy.planner.host_memory_needs import NamedSize, StagingBuffers, staging_buffers
from offload_strategy.units import PAGE_BYTES, GiB


def _qwen2(hidden: int, intermediate: int, layers: int, kv_width: int) -> dict[str, int]:
    return {
        "vocabulary": 152064,
        "hidden": hidden,
        "intermediate": intermediate,
        "layers": layers,
        "kv_width": kv_width,
    }


#: Shapes from the models' published configurations (config.json).
MODELS = {
    "Qwen2.5-7B": _qwen2(3584, 18944, 28, 4 * 128),
    "Llama-3.1-8B": {
        "vocabulary": 128256,
        "hidden": 4096,
        "intermediate": 14336,
        "layers": 32,
        "kv_width": 8 * 128,
    },
    "Qwen2.5-14B": _qwen2(5120, 13824, 48, 8 * 128),
    "Qwen2.5-32B": _qwen2(5120, 27648, 64, 8 * 128),
}
#: MemAscend's own figures for Qwen2.5-7B, in GiB.
PUBLISHED = {"Qwen2.5-7B": (2.46, 9.14)}
_ALLOCATIONS = 1000
#: Bytes lent at a time in the random run, at most.
_LENT = 2 * GiB


def buffers(context: Context) -> list[Result]:
    """GiB of fp16 buffers with one block in flight: exact sizes compared with one size for all."""
    results = []
    for name, shapes in MODELS.items():
        census = staging_buffers(weights(**shapes), blocks_in_flight=1)
        results += _compared_with_one_size(name, census)
        context.say(f"{name}: {_ALLOCATIONS} random allocations per class")
        runs = [_random_run([group.nbytes] * _ALLOCATIONS) for group in census.classes]
        results.append(max((_held(f"{name}, each class", run) for run in runs), key=_ratio))
        mixed = [group.nbytes for group in census.classes for _ in range(_ALLOCATIONS)]
        results.append(_held(f"{name}, classes mixed", _random_run(mixed), judged=False))
    return results


def _compared_with_one_size(name: str, census: StagingBuffers) -> list[Result]:
    exact, one_size = census.exact_bytes / GiB, census.one_size_bytes / GiB
    command = "as many buffers, all of the largest weight's size"
    classes = [
        {"bytes": group.nbytes, "buffers": group.buffers, "example": group.example}
        for group in census.classes
    ]
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


def weights(
    *, vocabulary: int, hidden: int, intermediate: int, layers: int, kv_width: int
) -> list[NamedSize]:
    """The matrices of a decoder with untied embeddings, in fp16."""
    block = {
        "self_attn.q_proj": hidden * hidden,
        "self_attn.k_proj": hidden * kv_width,
        "self_attn.v_proj": hidden * kv_width,
        "self_attn.o_proj": hidden * hidden,
        "mlp.gate_proj": hidden * intermediate,
        "mlp.up_proj": hidden * intermediate,
        "mlp.down_proj": hidden * intermediate,
    }
    sizes = {"model.embed_tokens": vocabulary * hidden, "lm_head": vocabulary * hidden}
    for layer in range(layers):
        sizes |= {f"model.layers.{layer}.{name}": size for name, size in block.items()}
    return [NamedSize(f"{name}.weight", 2 * size) for name, size in sizes.items()]


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

    Idle buffers wait for the next request of their size, so held bytes are compared at their peak.
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
