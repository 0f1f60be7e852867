"""The numbers of a forward pass, for a plan and for a file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from offload_strategy.activations.baseline_memory import BEGIN, MemoryBeside
from offload_strategy.activations.offload_budget import Traffic
from offload_strategy.activations.recomputed_blocks import RecomputableBlocks
from offload_strategy.activations.tensor_names import ItemNames
from offload_strategy.activations.transfer_overhead import Toll
from offload_strategy.activations.use_order import Trace
from offload_strategy.plan_runtime.profile import Block, PathRates, Profile, TensorLife


def use_event(trace: Trace, place: int) -> int:
    """The event of a use (`MemoryBeside`): its place among those of such a pass."""
    return hash((trace.signature, place))


def profile_of(
    trace: Trace,
    traffic: Traffic,
    names: ItemNames | None = None,
    *,
    busy: Sequence[tuple[float, float]] = (),
    beside: MemoryBeside | None = None,
    held_until: Mapping[int, float] | None = None,
    ended_at: float | None = None,
    blocks: RecomputableBlocks | None = None,
    toll: Toll | None = None,
) -> Profile | None:
    """What a pass made and used, without the times in which it waited.

    Args:
        trace: of a pass whose backward is over.
        traffic: of the tiers.
        names: of items.
        busy: when something else ran on its thread: left out as well.
        beside: what was in memory beside what it saved.
        held_until: seconds from the begin of the pass until which others hold on to items, by what
            it looks like with them.
        ended_at: when all that belongs to it was over (`time.perf_counter`); None for the last use.
        blocks: of its model, that may be computed again.
        toll: what it costs that items move; it is taken out of all times.

    Returns:
        The profile; None if nothing was used.
    """
    if not trace.uses:
        return None
    start = trace.started_at
    pace = 1.0
    if toll is not None and trace.seconds > 0:
        pace -= toll.seconds(trace) / trace.seconds
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
        # What backward has not used lies there until it is over.
        made.append(saved)
        name = None if names is None else names.of(trace.prefixes[number])
        life = (saved, max(saved, used.get(number, last_use)))
        held = pace * (held_until or {}).get(trace.prefixes[number], 0.0)
        tensors.append(TensorLife(name or f"item {number}", nbytes, life, held_until=held))
    others = [] if beside is None else [(0.0, beside.after(BEGIN))]
    if beside is not None:
        saves = zip(made, trace.prefixes, strict=True)
        others += [(at, beside.after(prefix)) for at, prefix in saves]
        uses = enumerate(used.values())
        others += [(at, beside.after(use_event(trace, place))) for place, at in uses]
    # A path that was never busy moves what leaves in a pass, at least.
    known = [traffic.rate(write=write) for write in (False, True)]
    read, write = (rate or max(1.0, 2 * trace.left_bytes / max(step, 1e-6)) for rate in known)
    return Profile(
        forward_seconds=min(forward, step),
        step_seconds=step,
        tensors=tuple(tensors),
        other_bytes=max((nbytes for _, nbytes in others), default=0),
        others=tuple(sorted(others, key=lambda one: one[0])),
        blocks=() if blocks is None else tuple(_blocks(trace, blocks, pace)),
        paths=(PathRates("tiers", read=read, write=write),),
        io_overhead=0.0 if toll is None else toll.per_byte,
    )


def _before(moment: float, busy: Sequence[tuple[float, float]]) -> float:
    """Seconds of spans that lie before a moment."""
    return sum(min(end, moment) - begin for begin, end in busy if begin < moment)


def _blocks(trace: Trace, blocks: RecomputableBlocks, pace: float) -> Iterator[Block]:
    start = trace.started_at
    for call in blocks.allowed(trace.blocks.all):
        if call.first < call.end and call.ends_at is not None:
            begin, end = (max(0.0, at - start) for at in (call.begins_at, call.ends_at))
            yield Block(call.name, call.first, call.end, pace * begin, pace * end, call.input_bytes)
