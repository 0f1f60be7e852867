"""The profile of a pass, derived from its trace."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from offload_strategy.activations.baseline_memory import BEGIN, BaselineMemory
from offload_strategy.activations.io_overhead import IoOverhead
from offload_strategy.activations.recomputed_blocks import RecomputableBlocks
from offload_strategy.activations.saved_tensor_names import SavedTensorNames
from offload_strategy.activations.tier_load import TierLoad
from offload_strategy.activations.use_order import Trace
from offload_strategy.plan_runtime.profile import Block, PathRates, Profile, TensorLife


def use_event(trace: Trace, place: int) -> int:
    """Return the event of a use (`BaselineMemory`): its place among the uses of such a pass."""
    return hash((trace.signature, place))


def profile_of(
    trace: Trace,
    tier_load: TierLoad,
    names: SavedTensorNames | None = None,
    *,
    busy: Sequence[tuple[float, float]] = (),
    baseline: BaselineMemory | None = None,
    held_until: Mapping[int, float] | None = None,
    ended_at: float | None = None,
    blocks: RecomputableBlocks | None = None,
    io_overhead: IoOverhead | None = None,
) -> Profile | None:
    """Return the profile of a pass without the time in which it waited.

    Args:
        trace: Trace of a pass whose backward has ended.
        tier_load: Load of the tiers.
        names: Names of items.
        busy: Spans in which something else ran on its thread, which do not count.
        baseline: Baseline memory of such a pass.
        held_until: Seconds from the start of the pass until which others reference an item, by the
            prefix of the item.
        ended_at: End of everything that follows its backward (`time.perf_counter`); None for the
            last use.
        blocks: Blocks of its model that may be recomputed.
        io_overhead: Overhead of I/O, which is subtracted from all times.

    Returns:
        The profile; None if no item was used.
    """
    if not trace.uses:
        return None
    start = trace.started_at
    pace = 1.0
    if io_overhead is not None and trace.seconds > 0:
        pace -= io_overhead.seconds(trace) / trace.seconds
    used = {
        number: pace * (at - start - trace.held - waited - _before(at, busy))
        for number, at, waited in trace.uses
    }
    last_use = used[trace.uses[-1][0]]
    step = last_use
    if ended_at is not None:
        whole = ended_at - start - trace.held - trace.waited - _before(ended_at, busy)
        step = max(step, pace * whole)
    forward = max(0.0, min(used.values()))
    tensors, made = [], []
    for number, nbytes in enumerate(trace.sizes):
        saved = max(0.0, pace * (trace.saved_at[number] - start - trace.held_at[number]))
        # An item that backward has not used exists until its end.
        made.append(saved)
        name = None if names is None else names.of(trace.prefixes[number])
        life = (saved, max(saved, used.get(number, last_use)))
        held = pace * (held_until or {}).get(trace.prefixes[number], 0.0)
        tensors.append(TensorLife(name or f"item {number}", nbytes, life, held_until=held))
    others = [] if baseline is None else [(0.0, baseline.after(BEGIN))]
    if baseline is not None:
        saves = zip(made, trace.prefixes, strict=True)
        others += [(at, baseline.after(prefix)) for at, prefix in saves]
        uses = enumerate(used.values())
        others += [(at, baseline.after(use_event(trace, place))) for place, at in uses]
    # A path that was never busy moves at least what is offloaded in a pass.
    known = [tier_load.rate(write=write) for write in (False, True)]
    read, write = (rate or max(1.0, 2 * trace.left_bytes / max(step, 1e-6)) for rate in known)
    return Profile(
        forward_seconds=min(forward, step),
        step_seconds=step,
        tensors=tuple(tensors),
        other_bytes=max((nbytes for _, nbytes in others), default=0),
        others=tuple(sorted(others, key=lambda one: one[0])),
        blocks=() if blocks is None else tuple(_blocks(trace, blocks, pace)),
        paths=(PathRates("tiers", read=read, write=write),),
        io_overhead=0.0 if io_overhead is None else io_overhead.per_byte,
    )


def _before(moment: float, busy: Sequence[tuple[float, float]]) -> float:
    """Return the seconds of spans before a moment."""
    return sum(min(end, moment) - begin for begin, end in busy if begin < moment)


def _blocks(trace: Trace, blocks: RecomputableBlocks, pace: float) -> Iterator[Block]:
    start = trace.started_at
    for call in blocks.allowed(trace.blocks.all):
        if call.first < call.end and call.ends_at is not None:
            begin, end = (max(0.0, at - start) for at in (call.begins_at, call.ends_at))
            yield Block(call.name, call.first, call.end, pace * begin, pace * end, call.input_bytes)
