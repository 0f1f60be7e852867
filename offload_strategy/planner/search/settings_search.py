"""A search for the settings with the highest throughput, by the analytical model.

All settings of a finite space are placed (`memory_model`) and, if they fit, timed (`search_model`);
the best are kept. Nothing in the space changes what a step computes, except what the caller allows
and the batch, which is searched only if it is not given (docs/planning.md tells what is taken).
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace

from offload_strategy.planner.request import CpuRequest, Request
from offload_strategy.planner.search.memory_model import CpuModel, GpuModel
from offload_strategy.planner.search.search_result import Candidate, SearchResult, Space
from offload_strategy.planner.search.settings import Placement, Settings
from offload_strategy.telemetry import Progress

Model = GpuModel | CpuModel

_AS_FAST = 0.01
#: Recomputed layers are tried in multiples of one part in so many of all layers.
_RECOMPUTED_PARTS = 8
#: Candidates that the result has, each of another kind.
_KEPT = 5
_MICRO_BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
_BLOCKS_IN_FLIGHT = (3, 2)
#: Whether states are offloaded and weights streamed.
_OFFLOADS = ((False, False), (True, False), (True, True))


def search(request: Request | CpuRequest, space: Space) -> SearchResult:
    """Find the settings with the highest throughput."""
    model: Model = CpuModel(request) if isinstance(request, CpuRequest) else GpuModel(request)
    kinds: dict[object, list[Candidate]] = defaultdict(list)
    refused: list[Placement] = []

    def try_settings(settings: Settings) -> None:
        """Time settings with every order of host memory, or note that they do not fit."""
        for placement in _orders(model, settings):
            if placement.ok:
                candidate = Candidate(placement, model.step_time(placement), request)
                kinds[_kind(candidate)].append(candidate)
            else:
                refused.append(placement)

    for settings in Progress("search", unit=" settings", iterable=[*_choices(model, space)]):
        try_settings(settings)
    if space.batch is None:
        # Between the batches that were tried, a larger one may fit or a smaller one be as fast.
        for best in [_best(model, space, found) for found in kinds.values()]:
            for settings in _around(best.settings, space):
                try_settings(settings)
    tried = len(refused) + sum(map(len, kinds.values()))
    # The best of all kinds, then the best of the other kinds, and so on.
    ranked: list[Candidate] = []
    while kinds and len(ranked) < _KEPT:
        best = _best(model, space, itertools.chain.from_iterable(kinds.values()))
        del kinds[_kind(best)]
        if not any(_at_least_as_good(better, best) for better in ranked):
            ranked.append(best)
    return SearchResult(request, space, tuple(ranked), tuple(refused), tried)


def _best(model: Model, space: Space, candidates: Iterable[Candidate]) -> Candidate:
    """Return the best: by its batch, then by its speed, then by how little it moves."""

    def batch_cost(one: Candidate) -> tuple[bool, int]:
        tokens = one.settings.tokens
        return tokens // one.settings.micro_batches < model.busy_tokens, tokens

    found = list(candidates)
    least = (1 - space.tolerance) * max(one.tokens_per_second for one in found)
    found = [one for one in found if one.tokens_per_second >= least]
    batch = min(map(batch_cost, found))
    found = [one for one in found if batch_cost(one) == batch]
    fast = (1 - _AS_FAST) * max(one.tokens_per_second for one in found)
    return min((one for one in found if one.tokens_per_second >= fast), key=_cost)


def _kind(found: Candidate) -> object:
    settings = found.settings
    return (found.offloads, settings.recomputed_layers > 0, settings.overlap, settings.state_dtype)


def _at_least_as_good(one: Candidate, other: Candidate) -> bool:
    """Return whether the other has no advantage: it offloads, recomputes and batches no less."""
    mine, its = one.settings, other.settings
    return (
        one.tokens_per_second >= other.tokens_per_second * (1 - _AS_FAST)
        and set(one.offloads) <= set(other.offloads)
        and mine.tokens <= its.tokens
        and mine.recomputed_layers <= its.recomputed_layers
        and (mine.overlap == its.overlap or its.overlap != "commit")
        and (mine.state_dtype == its.state_dtype or its.state_dtype != "float32")
    )


def _cost(found: Candidate) -> tuple[float, ...]:
    settings, written = found.settings, found.step.moved_bytes("written")
    others = (settings.recomputed_layers, settings.overlap != "commit", settings.micro_batches)
    return (len(found.offloads), written, *others, -found.tokens_per_second)


def _choices(model: Model, space: Space) -> Iterator[Settings]:
    layers = model.shape.layers
    again = sorted({layers * part // _RECOMPUTED_PARTS for part in range(_RECOMPUTED_PARTS + 1)})
    for sequence in space.sequences:
        for batches in _batches(space, sequence):
            for recomputed, offloads in itertools.product(again, _OFFLOADS):
                # If states stay, it makes no difference when the update runs.
                overlaps = space.overlaps if offloads[0] else space.overlaps[:1]
                for overlap, dtype in itertools.product(overlaps, space.state_dtypes):
                    yield Settings(*batches, sequence, recomputed, *offloads, overlap, dtype)


def _batches(space: Space, sequence: int) -> list[tuple[int, int]]:
    """Return batches with their numbers of micro-batches."""
    if (batch := space.batch) is not None:
        return [(batch, times) for times in range(1, batch + 1) if batch % times == 0]
    most = space.most(sequence)
    tried = itertools.product(_round_numbers(most), _MICRO_BATCHES)
    return [(micro * times, times) for micro, times in tried if micro * times <= most]


def _round_numbers(most: int) -> Iterator[int]:
    """Yield 1 to 8, then four numbers for each doubling, and the largest."""
    doublings = (lead << k for k in itertools.count() for lead in range(4, 8))
    yield from itertools.takewhile(lambda one: one < most, itertools.chain((1, 2, 3), doublings))
    if most >= 1:
        yield most


def _around(settings: Settings, space: Space) -> Iterator[Settings]:
    """Yield the same settings with micro-batches between those that were tried."""
    micro, most = settings.micro_batch, space.most(settings.sequence)
    tried = sorted(_round_numbers(most))
    most //= settings.micro_batches
    place = tried.index(micro)
    below, above = tried[max(0, place - 1)], tried[min(place + 1, len(tried) - 1)]
    for number in range(below + 1, min(above, most + 1), max(1, (above - below) // 32)):
        if number != micro:
            yield replace(settings, batch=number * settings.micro_batches)


def _orders(model: Model, settings: Settings) -> Iterator[Placement]:
    """Yield placements with every order of host memory that differs, with blocks that fit."""
    placement = _with_blocks(model, settings)
    yield placement
    kinds = model.competing(placement) if placement.ok else ()
    for order in itertools.islice(itertools.permutations(kinds), 1, None):
        yield model.place(replace(placement.settings, host_priority=order))


def _with_blocks(model: Model, settings: Settings) -> Placement:
    """Return the placement with as many blocks in flight as fit without offloading more.

    The equations see no difference, but blocks are uneven, and one more smooths that.
    """
    if not settings.streams_weights:
        return model.place(settings)
    for blocks in _BLOCKS_IN_FLIGHT:
        placement = model.place(replace(settings, blocks_in_flight=blocks))
        offloads_more = placement.uses_drives or placement.split("activations").total_bytes
        if placement.ok and not offloads_more:
            break
    return placement
