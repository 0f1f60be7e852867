"""The settings with the most tokens in a second, by the analytical model.

Every choice of a finite space is placed (`placement`), those that fit are timed (`placed_steps`),
and the best are kept. Nothing in the space changes what a step computes, but for what the caller
allows and for the batch, which is searched only where it is not given.

[Note: what counts as better]
The batch comes first: of those that reach the most tokens in a second but for a small share
(`Space.tolerance`) the smallest is taken, as a larger one changes training, and gains ever less.
Before that come micro-batches with enough tokens to keep a GPU busy, which the equations do not
see (those of cores do). Among settings for that batch, those within 1 % count as equally fast; of
these the one is taken that moves, writes and recomputes the least.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from offload_strategy.planner.request import Request
from offload_strategy.planner.search.choice import Choice, Placed
from offload_strategy.planner.search.core_steps import core_step
from offload_strategy.planner.search.cores import CpuRequest
from offload_strategy.planner.search.one_memory import place_in_memory
from offload_strategy.planner.search.placed_steps import PlacedStep, placed_step
from offload_strategy.planner.search.placement import place
from offload_strategy.planner.search.search_result import Candidate, Found, Refusal, Space

#: See [Note: what counts as better].
_AS_FAST = 0.01
#: A micro-batch of fewer may not reach what a device sustains: matrices have as many rows.
_BUSY_TOKENS = 4096
#: Shares of the layers that are computed again.
_RECOMPUTED_PARTS = 8
_MICRO_BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
_BLOCKS_IN_FLIGHT = (3, 2)
#: Clients that move: neither, states, states and weights.
_CLIENTS = ((False, False), (True, False), (True, True))


def search(request: Request | CpuRequest, space: Space) -> Found:
    """Find the settings with the most tokens in a second; see [Note: what counts as better].

    Args:
        request: model and machine. Of the work for a GPU all but batch and sequence counts; the
            rate of updates does not, as updates run on the device.
        space: what to search.

    Raises:
        ConfigError: if a figure is not above 0.
    """
    hunt = _Hunt(request, space.tolerance)
    for choice in _choices(request, space):
        hunt.look_at(choice)
    if space.batch is None:
        # Between the batches that were tried a larger one may fit, or a smaller one be as fast.
        for found in list(hunt.best_of_each_kind()):
            for choice in _around(found.choice, space):
                hunt.look_at(choice)
    ranked = hunt.ranked()
    return Found(
        request, space, tuple(ranked[: space.keep]), tuple(hunt.refused.values()), hunt.tried
    )


class _Hunt:
    """The candidates of each kind, and what was refused."""

    def __init__(self, request: Request | CpuRequest, tolerance: float) -> None:
        self.refused: dict[str, Refusal] = {}
        self.tried = 0
        self._request = request
        self._busy_tokens = _BUSY_TOKENS if isinstance(request, Request) else 0
        self._least = 1 - tolerance
        self._kinds: dict[object, list[Candidate]] = {}
        self._fastest: dict[object, float] = {}

    def look_at(self, choice: Choice) -> None:
        """Time it in all orders that matter, or note why it does not fit."""
        for one in _orders(self._request, choice):
            self.tried += 1
            if not one.ok:
                self._refuse(one)
                continue
            found = Candidate(one, _step(self._request, one))
            kind, speed = _kind(found), found.tokens_per_second
            fastest = max(self._fastest.get(kind, 0.0), speed)
            self._fastest[kind] = fastest
            if speed >= fastest * self._least:
                self._kinds.setdefault(kind, []).append(found)

    def best_of_each_kind(self) -> Iterator[Candidate]:
        for kind, found in self._kinds.items():
            yield self._best(found, self._least * self._fastest[kind])

    def ranked(self) -> list[Candidate]:
        """The best of all kinds, then the best of all others, and so on."""
        rest, ranked = dict(self._kinds), list[Candidate]()
        while rest:
            fastest = max(self._fastest[kind] for kind in rest)
            everything = [one for found in rest.values() for one in found]
            best = self._best(everything, self._least * fastest)
            del rest[_kind(best)]
            if not any(_at_least_as_good(better, best) for better in ranked):
                ranked.append(best)
        return ranked

    def _best(self, found: Sequence[Candidate], least: float) -> Candidate:
        """See [Note: what counts as better]; `least` tokens per second are wanted."""
        wanted = [one for one in found if one.tokens_per_second >= least]
        batch = min(map(self._batch_cost, wanted))
        same = [one for one in wanted if self._batch_cost(one) == batch]
        fastest = max(one.tokens_per_second for one in same)
        return min(
            (one for one in same if one.tokens_per_second >= fastest * (1 - _AS_FAST)), key=_cost
        )

    def _batch_cost(self, found: Candidate) -> tuple[bool, int]:
        choice = found.choice
        return choice.tokens // choice.micro_batches < self._busy_tokens, choice.tokens

    def _refuse(self, placed: Placed) -> None:
        fit = next(fit for fit in placed.fits if not fit.ok)
        old = self.refused.get(fit.what)
        nearest = fit.needed_bytes if old is None else min(fit.needed_bytes, old.needed_bytes)
        count = 1 if old is None else old.count + 1
        self.refused[fit.what] = Refusal(fit.what, count, nearest, fit.available_bytes)


def _kind(found: Candidate) -> object:
    choice = found.choice
    return (found.moves, choice.recomputed_layers > 0, choice.overlap, choice.state_dtype)


def _at_least_as_good(one: Candidate, other: Candidate) -> bool:
    """Whether nothing speaks for the other: it moves, recomputes and batches no less."""
    mine, its = one.choice, other.choice
    return (
        one.tokens_per_second >= other.tokens_per_second * (1 - _AS_FAST)
        and set(one.moves) <= set(other.moves)
        and mine.tokens <= its.tokens
        and mine.recomputed_layers <= its.recomputed_layers
        and (mine.overlap == its.overlap or its.overlap != "commit")
        and (mine.state_dtype == its.state_dtype or its.state_dtype != "float32")
    )


def _cost(found: Candidate) -> tuple[float, ...]:
    choice = found.choice
    return (
        len(found.moves),
        found.step.written_bytes,
        choice.recomputed_layers,
        choice.overlap != "commit",
        choice.micro_batches,
        -found.tokens_per_second,
    )


def _place(request: Request | CpuRequest, choice: Choice) -> Placed:
    if isinstance(request, CpuRequest):
        return place_in_memory(request, choice)
    return place(request, choice)


def _step(request: Request | CpuRequest, placed: Placed) -> PlacedStep:
    if isinstance(request, CpuRequest):
        return core_step(request, placed)
    return placed_step(request, placed)


def _choices(request: Request | CpuRequest, space: Space) -> Iterator[Choice]:
    for sequence in space.sequences:
        for batch, micro_batches in _batches(space, sequence):
            yield from _settings(request, space, batch, micro_batches, sequence)


def _settings(
    request: Request | CpuRequest, space: Space, batch: int, micro_batches: int, sequence: int
) -> Iterator[Choice]:
    layers = request.shape.layers
    again = sorted({layers * part // _RECOMPUTED_PARTS for part in range(_RECOMPUTED_PARTS + 1)})
    for recomputed, (optimizer, parameters) in itertools.product(again, _CLIENTS):
        # Where states stay it makes no difference when the update runs.
        for overlap in space.overlaps if optimizer else space.overlaps[:1]:
            for dtype in space.state_dtypes:
                yield Choice(
                    batch,
                    micro_batches,
                    sequence,
                    recomputed,
                    optimizer,
                    parameters,
                    overlap,
                    dtype,
                )


def _batches(space: Space, sequence: int) -> Iterator[tuple[int, int]]:
    """Batches and their micro-batches."""
    if space.batch is not None:
        for micro_batches in _divisors(space.batch):
            yield space.batch, micro_batches
        return
    most = space.most(sequence)
    for micro in _round_numbers(most):
        for times in _MICRO_BATCHES:
            if micro * times <= most:
                yield micro * times, times


def _divisors(number: int) -> list[int]:
    small = [one for one in range(1, math.isqrt(number) + 1) if number % one == 0]
    return sorted({*small, *(number // one for one in small)})


def _round_numbers(most: int) -> Iterator[int]:
    """1 to 8, then four for each doubling, and the largest."""
    number, step = 1, 1
    while number < most:
        yield number
        number += step
        if number > 8 and number & (number - 1) == 0:
            step = number // 4
        elif number == 8:
            step = 2
    if most >= 1:
        yield most


def _around(choice: Choice, space: Space) -> Iterator[Choice]:
    """The same with micro-batches between those that were tried."""
    micro = choice.batch // choice.micro_batches
    most = space.most(choice.sequence)
    tried = sorted(_round_numbers(most))
    most //= choice.micro_batches
    below = max((number for number in tried if number < micro), default=micro)
    above = min((number for number in tried if number > micro), default=micro)
    step = max(1, (above - below) // 32)
    for number in range(below + 1, min(above, most + 1), step):
        if number != micro:
            yield replace(choice, batch=number * choice.micro_batches)


def _orders(request: Request | CpuRequest, choice: Choice) -> Iterator[Placed]:
    """The choice in all orders of host memory that differ, and with blocks that fit."""
    placed = _with_blocks(request, choice)
    yield placed
    if not placed.ok or not any(split.ssd_bytes for split in placed.held.values()):
        return
    kinds = tuple(placed.held)
    if isinstance(request, CpuRequest):
        # Streamed weights get none; what does not leave in this order may in another.
        kinds = tuple(kind for kind in choice.host_first if kind != "weights")
        if not choice.moves_optimizer:
            return
        if choice.overlap != "commit":
            kinds = tuple(kind for kind in kinds if kind != "waiting")
    for order in itertools.permutations(kinds):
        if order != kinds:
            yield _place(request, replace(placed.choice, host_first=order))


def _with_blocks(request: Request | CpuRequest, choice: Choice) -> Placed:
    """With as many blocks in flight as fit.

    The equations see no difference; blocks are uneven, and one more smooths that. Nothing else
    leaves for it.
    """
    if not choice.moves_parameters:
        return _place(request, choice)
    for blocks in _BLOCKS_IN_FLIGHT:
        placed = _place(request, replace(choice, blocks_in_flight=blocks))
        crowded = any(split.ssd_bytes for split in placed.held.values())
        if placed.ok and not placed.split("activations").total_bytes and not crowded:
            break
    return placed
