"""What to change first: each line says what limits, and what a change would give.

Changes are tried out on the same equations, so a line never promises more than they do.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

from offload_strategy.planner.hardware import Drives
from offload_strategy.planner.memory_needs import (
    Fit,
    device_bytes,
    planned_swap,
    streams_weights,
)
from offload_strategy.planner.request import Request
from offload_strategy.planner.step_estimate import Swap
from offload_strategy.units import format_size

#: A gain below this is not worth a line.
_WORTH = 1.02
#: Steps that are longer by less count as equally fast.
_AS_FAST = 1.01
#: Drives are tried up to so many.
_MOST_DRIVES = 64
#: Drives that last less than this are worth a line.
_WANTED_YEARS = 3.0


def advise(
    request: Request,
    swap: Swap,
    streams: bool,
    fits: Sequence[Fit],
    lifespans: Mapping[str, float],
) -> Iterator[str]:
    """Say what to change, what does not fit first.

    Args:
        request: the run.
        swap: its best step.
        streams: whether weights pass through the device.
        fits: what fits.
        lifespans: years of the drives, the maker's rating first.
    """
    for fit in fits:
        if not fit.ok:
            yield _make_room(request, fit)
    yield from _hide(request, swap)
    yield from _device(request, swap)
    yield from _spare_drives(request, swap)
    yield from _lifespan(request, lifespans)


def _make_room(request: Request, fit: Fit) -> str:
    missing = format_size(fit.needed_bytes - fit.available_bytes)
    if fit.what == "disk":
        each = request.drives.drive.capacity_bytes
        return (
            f"disk is {missing} too small: take {math.ceil(fit.needed_bytes / each)} of the drives"
        )
    if fit.what == "host memory":
        return f"host memory is {missing} too small: add as much, or take a smaller vocabulary"
    batch = _largest_batch(request)
    if batch:
        return f"device memory is {missing} too small: a batch of {batch} fits"
    return f"device memory is {missing} too small even for a batch of 1: take a larger device"


def _largest_batch(request: Request) -> int:
    """The largest batch that the device has memory for, at most the one asked for."""
    fitting, too_many = 0, request.work.batch
    while too_many - fitting > 1:
        middle = (fitting + too_many) // 2
        smaller = _with_batch(request, middle)
        if device_bytes(smaller, streams=True) <= request.device.memory_bytes:
            fitting = middle
        else:
            too_many = middle
    return fitting


def _hide(request: Request, swap: Swap) -> Iterator[str]:
    """Advice for the stage that is not limited by computation on the device."""
    backward, forward = swap.limit("backward"), swap.limit("forward")
    limits = swap.time.resource_seconds
    if backward == "update":
        over = _over(limits, "update", "backward")
        yield (
            f"the update on the host limits the backward pass by {over:.2f}x: faster or more cores "
            f"({_gain(request, swap, _twice_the_updates)} with twice the rate)"
        )
    slow = [
        f"the {stage} pass by {_over(limits, name, stage):.2f}x"
        for name, stage in ((backward, "backward"), (forward, "forward"))
        if name.endswith("paths")
    ]
    if slow:
        yield f"the drives limit {' and '.join(slow)}: {_more_drives(request, swap)}"
    for name in (backward, forward):
        if name.endswith("link"):
            yield (
                f"the link between host and device limits the step ({name} {limits[name]:.1f} s): "
                f"a wider one, or a smaller model"
            )
    if not backward.endswith("computation"):
        yield from _larger_batch(request, swap)


def _over(limits: Mapping[str, float], name: str, stage: str) -> float:
    """By how much something takes longer than the next slowest of its stage."""
    others = [
        seconds
        for other, seconds in limits.items()
        if other != name and other.startswith("forward") == (stage == "forward")
    ]
    return limits[name] / max(others)


def _device(request: Request, swap: Swap) -> Iterator[str]:
    if swap.limit("backward").endswith("computation"):
        yield (
            "the device limits the step, "
            f"{swap.flops / swap.time.seconds / request.flops:.0%} busy: only a faster one, or "
            "several, makes it shorter"
        )


def _larger_batch(request: Request, swap: Swap) -> Iterator[str]:
    """A batch that hides states behind computation, if the device has memory for one."""
    speed = request.work.tokens / swap.time.seconds
    best = None
    for factor in (2, 4, 8):
        larger = _with_batch(request, factor * request.work.batch)
        streams = streams_weights(larger)
        if device_bytes(larger, streams=streams) > request.device.memory_bytes:
            break
        step = planned_swap(larger, streams=streams).time.seconds
        gain = larger.work.tokens / step / speed
        if best is None or gain > best[1] * _WORTH:
            best = larger.work.batch, gain
    if best is not None and best[1] >= _WORTH:
        yield (
            f"the batch is too small to hide the states: one of {best[0]} gives {best[1]:.2f} "
            f"times the tokens per second"
        )


def _more_drives(request: Request, swap: Swap) -> str:
    one_more = _gain(request, swap, lambda run: _with_drives(run, run.drives.count + 1))
    enough = _enough_drives(request)
    many = _gain(request, swap, lambda run: _with_drives(run, enough))
    return (
        f"one more makes the step {one_more} as fast, {enough} in all {many}, and more than that "
        f"no faster"
    )


def _enough_drives(request: Request) -> int:
    """The fewest drives that are as fast as any number of them, to 1 %."""
    ideal = _step(_with_drives(request, _MOST_DRIVES))
    # More drives are never slower.
    return 1 + bisect.bisect_left(
        range(1, _MOST_DRIVES),
        True,
        key=lambda count: _step(_with_drives(request, count)) <= _AS_FAST * ideal,
    )


def _spare_drives(request: Request, swap: Swap) -> Iterator[str]:
    enough = _enough_drives(request)
    if enough < request.drives.count:
        slower = _step(_with_drives(request, enough)) / swap.time.seconds
        yield (
            f"{enough} of the {request.drives.count} drives are as fast ({slower - 1:+.1%} of the "
            f"step); the others add space and life"
        )


def _lifespan(request: Request, lifespans: Mapping[str, float]) -> Iterator[str]:
    if not lifespans:
        return
    years = next(iter(lifespans.values()))
    if years < _WANTED_YEARS:
        count = math.ceil(request.drives.count * _WANTED_YEARS / years)
        yield (
            f"by their rating the drives last {years:.2g} years of training without a pause: for "
            f"{_WANTED_YEARS:g} years take {count} of them, or drives that are rated for "
            f"{_WANTED_YEARS / years:.0f} times the bytes"
        )


def _gain(request: Request, swap: Swap, change: Callable[[Request], Request]) -> str:
    return f"{swap.time.seconds / _step(change(request)):.2f}x"


def _step(request: Request) -> float:
    return planned_swap(request, streams=streams_weights(request)).time.seconds


def _twice_the_updates(request: Request) -> Request:
    return dataclasses.replace(request, update_rate=2 * request.updates)


def _with_drives(request: Request, count: int) -> Request:
    return dataclasses.replace(request, drives=Drives(request.drives.drive, count))


def _with_batch(request: Request, batch: int) -> Request:
    return dataclasses.replace(request, work=dataclasses.replace(request.work, batch=batch))
