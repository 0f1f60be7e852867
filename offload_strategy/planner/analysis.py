"""The analysis of a run before it starts, as an object, tables and JSON, and what to change first.

Changes are tried out on the same equations, so advice never promises more than they do.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Iterator
from functools import cached_property
from typing import Any

from offload_strategy.planner.hardware import Drives
from offload_strategy.planner.host_memory_needs import System, host_memory
from offload_strategy.planner.request import SECONDS_PER_YEAR, Request
from offload_strategy.planner.saved_tensor_bytes import activation_bytes
from offload_strategy.planner.step_estimate import Fit, StepEstimate
from offload_strategy.units import format_size, markdown_list, markdown_table

_GB = 1e9
_TERA = 1e12
_SECONDS_PER_DAY = 86400.0
#: Bytes that can be written for each rated byte: as the manufacturer rates, on which the warranty
#: depends; with large sequential writes instead of the random ones of the rating; and as SSDTrain
#: assumes, sequential writes of data that need not stay readable for years, but for a day.
AS_RATED, SEQUENTIAL, SSDTRAIN = 1.0, 2.5, 2.5 * 86.0
_SYSTEMS: tuple[System, ...] = ("streamed", "memascend", "zero-infinity")
_WEARS = {
    "as rated": AS_RATED,
    "sequential writes (rated at WAF 2.5)": SEQUENTIAL,
    "and data kept for a day (86 times the cycles)": SSDTRAIN,
}


def required_write_rate(activation_bytes: float, step_seconds: float) -> float:
    """Return the bytes per second at which a device must write to hide its activations.

    They are written during the forward pass, which is assumed to be half of the step (SSDTrain,
    section III-D).
    """
    return activation_bytes / (step_seconds / 2)


def lifespan_seconds(
    endurance_bytes: float, step_seconds: float, written_bytes: float, wear: float = AS_RATED
) -> float:
    """Return the seconds of training until all drives together reach their rated endurance.

    Infinite if a step writes nothing (SSDTrain, section III-D).
    """
    if written_bytes <= 0:
        return math.inf
    return endurance_bytes * wear * step_seconds / written_bytes


class Analysis(StepEstimate):
    """What a run needs and how fast it is; `str` gives tables in Markdown."""

    @cached_property
    def activation_bytes(self) -> int:
        """Bytes that a forward pass saves."""
        return activation_bytes(self.request.shape, self.request.work)

    @property
    def required_write_rate(self) -> float:
        """Bytes per second that would hide writing all of them (SSDTrain)."""
        return required_write_rate(self.activation_bytes, self.seconds)

    @cached_property
    def host(self) -> dict[System, dict[str, int]]:
        """Host memory by system and use, with the peak as the last use."""
        found = {}
        for system in _SYSTEMS:
            parts = host_memory(self.request.shape, system)
            found[system] = {**parts, "peak": sum(parts.values())}
        return found

    @property
    def written_bytes(self) -> float:
        """Bytes that a step writes to the drives."""
        return self.swap.time.written_bytes

    @property
    def written_per_day(self) -> float:
        """Bytes that are written to the drives in a day."""
        return self.written_bytes / self.seconds * _SECONDS_PER_DAY

    @cached_property
    def lifespans(self) -> dict[str, float]:
        """Years of the drives by assumption; empty if no rating is known."""
        rated = self.request.drives.endurance_bytes
        if rated is None:
            return {}
        return {
            name: lifespan_seconds(rated, self.seconds, self.written_bytes, wear) / SECONDS_PER_YEAR
            for name, wear in _WEARS.items()
        }

    @cached_property
    def advice(self) -> tuple[str, ...]:
        """What to change first."""
        return tuple(advise(self, self.lifespans.get("as rated")))

    @property
    def tflops(self) -> float:
        """TFLOPS of the device over the step, recomputation included."""
        return self.swap.flops / self.seconds / _TERA

    def as_dict(self) -> dict[str, Any]:
        """Return the figures with units in their names, ready for JSON."""
        request, time = self.request, self.swap.time
        return {
            "model": {
                "parameters": request.shape.parameters,
                "layers": request.shape.layers,
                "hidden": request.shape.hidden,
                "batch": request.work.batch,
                "sequence": request.work.sequence,
            },
            "machine": {
                "device": request.device.name,
                "drive": request.drives.drive.name,
                "drives": request.drives.count,
            },
            "fits": {
                what: {"needed_bytes": needed, "available_bytes": has, "fits": needed <= has}
                for what, needed, has in map(dataclasses.astuple, self.fits)
            },
            "step": {
                "seconds": time.seconds,
                "forward_seconds": time.stage("forward").seconds,
                "backward_seconds": time.stage("backward").seconds,
                "limits_seconds": time.resource_seconds,
                "forward_limit": self.swap.limit("forward"),
                "backward_limit": self.swap.limit("backward"),
                "streams_weights": self.streams_weights,
                "swapped_bytes": self.swap.moved_bytes,
                "swap_coefficient": self.swap.coefficient,
                "tokens_per_second": self.tokens_per_second,
                "tflops": self.tflops,
            },
            "activations": {
                "bytes": self.activation_bytes,
                "required_write_GBps": self.required_write_rate / _GB,
            },
            "host_memory_bytes": {name: parts["peak"] for name, parts in self.host.items()},
            "drives": {
                "written_bytes_per_step": self.written_bytes,
                "written_bytes_per_day": self.written_per_day,
                "lifespan_years": {
                    name: years if math.isfinite(years) else None
                    for name, years in self.lifespans.items()
                },
            },
            "advice": list(self.advice),
            "assumptions": request.assumptions(),
        }

    def __str__(self) -> str:
        """Tables in Markdown."""
        request, work = self.request, self.request.work
        title = (
            f"{request.shape.parameters / _GB:.2f} billion parameters, batch {work.batch} of "
            f"{work.sequence} tokens, on {request.device.name} with {request.drives}"
        )
        fits = (
            (what, format_size(needed), format_size(has), "yes" if needed <= has else "no")
            for what, needed, has in map(dataclasses.astuple, self.fits)
        )
        uses = dict.fromkeys(use for parts in self.host.values() for use in parts if use != "peak")
        host = (
            (
                use,
                *(format_size(parts[use]) if use in parts else "" for parts in self.host.values()),
            )
            for use in (*uses, "peak")
        )
        blocks = [
            title,
            markdown_table("memory and disk | needed | available | fits", fits),
            markdown_table("a step | seconds | ", self._step_rows()),
            markdown_table(" | ".join(["host memory", *self.host]), host),
            markdown_table("drives | ", self._drive_rows()),
            markdown_list("What to change first", self.advice),
            markdown_list("Assumed", request.assumptions()),
        ]
        return "\n\n".join(blocks)

    def _step_rows(self) -> list[tuple[str, str, str]]:
        time, swap = self.swap.time, self.swap
        limits = {swap.limit("forward"), swap.limit("backward")}
        return [
            *(
                (name, f"{seconds:.2f}", "limits" if name in limits else "")
                for name, seconds in time.resource_seconds.items()
            ),
            ("forward", f"{time.stage('forward').seconds:.2f}", ""),
            ("backward and update", f"{time.stage('backward').seconds:.2f}", ""),
            (
                "the step",
                f"{time.seconds:.2f}",
                f"{self.tokens_per_second:.0f} tokens/s, {self.tflops:.0f} TFLOPS",
            ),
            (
                "offloaded activations",
                "",
                f"{format_size(swap.moved_bytes)}, {swap.coefficient:.0%} of the results inside "
                f"layers",
            ),
            (
                "all activations",
                "",
                f"{format_size(self.activation_bytes)}; hiding them needs "
                f"{self.required_write_rate / _GB:.1f} GB/s of write bandwidth",
            ),
        ]

    def _drive_rows(self) -> list[tuple[str, str]]:
        rows = [
            ("written in a step", f"{self.written_bytes / _GB:.1f} GB"),
            ("written in a day", f"{self.written_per_day / _TERA:.1f} TB"),
            *(
                (f"lifespan, {name}", f"{years:.2g} years")
                for name, years in self.lifespans.items()
            ),
        ]
        if not self.lifespans:
            rows.append(("lifespan", "the drive's rating is not known"))
        return rows


def analyse(request: Request) -> Analysis:
    """Analyse what a run needs, how long its steps take, and what to change first."""
    return Analysis(request)


# ---------------------------------------------------------------------- advice
#: A gain below this is not worth a line.
_WORTH = 1.02
#: Steps that are longer by less count as equally fast.
_AS_FAST = 1.01
#: Drives are tried up to so many.
_MOST_DRIVES = 64
#: Drives that last less than this are worth a line.
_WANTED_YEARS = 3.0


def advise(run: StepEstimate, rated_years: float | None) -> Iterator[str]:
    """Say what to change, what does not fit first.

    `rated_years` is the life of the drives by their maker's rating, None if it is not known.
    """
    for fit in run.fits:
        if not fit.ok:
            yield _make_room(run, fit)
    backward, forward = run.swap.limit("backward"), run.swap.limit("forward")
    limits = run.swap.time.resource_seconds
    if backward == "update":
        twice = _with(run, update_rate=2 * run.request.updates)
        yield (
            f"the update on the host limits the backward pass by "
            f"{_over(limits, 'update', 'backward'):.2f}x: faster or more cores "
            f"({run.seconds / twice.seconds:.2f}x with twice the rate)"
        )
    enough = _enough_drives(run)
    slow = [
        f"the {stage} pass by {_over(limits, name, stage):.2f}x"
        for name, stage in ((backward, "backward"), (forward, "forward"))
        if name.endswith("paths")
    ]
    if slow:
        count = run.request.drives.count
        one_more, many = (_with_drives(run, number).seconds for number in (count + 1, enough))
        yield (
            f"the drives limit {' and '.join(slow)}: one more makes the step "
            f"{run.seconds / one_more:.2f}x as fast, {enough} in all {run.seconds / many:.2f}x, "
            f"and more than that no faster"
        )
    for name in (backward, forward):
        if name.endswith("link"):
            yield (
                f"the link between host and device limits the step ({name} {limits[name]:.1f} s): "
                f"a wider one, or a smaller model"
            )
    if backward.endswith("computation"):
        yield (
            "the device limits the step, "
            f"{run.swap.flops / run.seconds / run.request.flops:.0%} busy: only a faster one, or "
            "several, makes it shorter"
        )
    else:
        yield from _larger_batch(run)
    yield from _drive_count(run, enough, rated_years)


def _make_room(run: StepEstimate, fit: Fit) -> str:
    missing = format_size(fit.needed_bytes - fit.available_bytes)
    if fit.what == "disk":
        each = run.request.drives.drive.capacity_bytes
        return (
            f"disk is {missing} too small: take {math.ceil(fit.needed_bytes / each)} of the drives"
        )
    if fit.what == "host memory":
        return f"host memory is {missing} too small: add as much, or take a smaller vocabulary"
    batch = _largest_batch(run)
    if batch:
        return f"device memory is {missing} too small: a batch of {batch} fits"
    return f"device memory is {missing} too small even for a batch of 1: take a larger device"


def _largest_batch(run: StepEstimate) -> int:
    """Return the largest batch below the one asked for that fits on the device, or 0."""
    memory = run.request.device.memory_bytes
    batches = range(1, run.request.work.batch)
    return bisect.bisect_right(
        batches, memory, key=lambda batch: _with_batch(run, batch).device_bytes(streams=True)
    )


def _over(limits: dict[str, float], name: str, stage: str) -> float:
    """Return by how much something takes longer than the next slowest of its stage."""
    others = [
        seconds
        for other, seconds in limits.items()
        if other != name and other.startswith("forward") == (stage == "forward")
    ]
    return limits[name] / max(others)


def _larger_batch(run: StepEstimate) -> Iterator[str]:
    """Propose a batch that hides states behind computation, if the device has memory for one."""
    best = None
    for factor in (2, 4, 8):
        larger = _with_batch(run, factor * run.request.work.batch)
        if not larger.fits[0].ok:
            break
        gain = larger.tokens_per_second / run.tokens_per_second
        if best is None or gain > best[1] * _WORTH:
            best = larger.request.work.batch, gain
    if best is not None and best[1] >= _WORTH:
        yield (
            f"the batch is too small to hide the states: one of {best[0]} gives {best[1]:.2f} "
            f"times the tokens per second"
        )


def _enough_drives(run: StepEstimate) -> int:
    """Return the fewest drives that are as fast as any number of them, to 1 %."""
    ideal = _with_drives(run, _MOST_DRIVES).seconds
    # More drives are never slower.
    return 1 + bisect.bisect_left(
        range(1, _MOST_DRIVES),
        True,
        key=lambda count: _with_drives(run, count).seconds <= _AS_FAST * ideal,
    )


def _drive_count(run: StepEstimate, enough: int, rated_years: float | None) -> Iterator[str]:
    """Say whether fewer drives are as fast, and how many last long enough."""
    count = run.request.drives.count
    if enough < count:
        slower = _with_drives(run, enough).seconds / run.seconds
        yield (
            f"{enough} of the {count} drives are as fast ({slower - 1:+.1%} of the step); the "
            f"others add space and life"
        )
    if rated_years is not None and rated_years < _WANTED_YEARS:
        yield (
            f"by their rating the drives last {rated_years:.2g} years of training without a pause: "
            f"for {_WANTED_YEARS:g} years take {math.ceil(count * _WANTED_YEARS / rated_years)} of "
            f"them, or drives that are rated for {_WANTED_YEARS / rated_years:.0f} times the bytes"
        )


def _with(run: StepEstimate, **changes: Any) -> StepEstimate:
    return StepEstimate(dataclasses.replace(run.request, **changes))


def _with_drives(run: StepEstimate, count: int) -> StepEstimate:
    return _with(run, drives=Drives(run.request.drives.drive, count))


def _with_batch(run: StepEstimate, batch: int) -> StepEstimate:
    return _with(run, work=dataclasses.replace(run.request.work, batch=batch))
