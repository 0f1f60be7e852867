"""The analysis of a run before it starts, as an object, tables and JSON, and what to change first.

The run is that of the search with its batch given: the fastest settings that fit, or those that
lack the least. Changes are tried out on the same model, so advice never promises more than it does:
other drives with the same settings, other batches and memory with the best settings for them.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator
from dataclasses import astuple, dataclass, replace
from functools import cached_property
from typing import Any

from offload_strategy.planner.hardware import Drives
from offload_strategy.planner.request import CpuRequest, Request
from offload_strategy.planner.search.search_result import Candidate, SearchResult, Space, rounded
from offload_strategy.planner.search.settings import Fit, model_sizes
from offload_strategy.planner.search.settings_search import model_of, search
from offload_strategy.planner.step_time import StepTime
from offload_strategy.units import (
    SECONDS_PER_DAY,
    SECONDS_PER_YEAR,
    format_size,
    markdown_list,
    markdown_table,
)

_GB = 1e9
_TERA = 1e12
#: Bytes that can be written for each rated byte: as the manufacturer rates, on which the warranty
#: depends; with large sequential writes instead of the random ones of the rating; and as SSDTrain
#: assumes, sequential writes of data that need not stay readable for years, but for a day.
AS_RATED, SEQUENTIAL, SSDTRAIN = 1.0, 2.5, 2.5 * 86.0
_WEARS = {
    "as rated": AS_RATED,
    "sequential writes (rated at WAF 2.5)": SEQUENTIAL,
    "and data kept for a day (86 times the cycles)": SSDTRAIN,
}
#: A gain below this is not worth a line.
_WORTH = 1.02
#: What limits a smaller share of the step is not worth one either.
_LITTLE = 0.05
#: Steps that are longer by less count as equally fast.
_AS_FAST = 1.01
#: Drives are tried up to so many.
_MOST_DRIVES = 64
#: Drives that last less than this are worth a line.
_WANTED_YEARS = 3.0


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


def analyse(request: Request | CpuRequest, *, batch: int, sequence: int) -> Analysis:
    """Analyse what steps of a batch of sequences need, how long they take, and what to change."""
    return Analysis(request, search(request, Space((sequence,), batch)))


@dataclass(frozen=True)
class Analysis:
    """What a run needs and how fast it is; `str` gives tables in Markdown."""

    request: Request | CpuRequest
    found: SearchResult

    @cached_property
    def run(self) -> Candidate:
        """The settings that were found, and where tensors are with them."""
        if self.found.candidates:
            return self.found.best
        assert self.found.nearest is not None
        return Candidate.of(self.found.model, self.found.nearest.settings)

    @property
    def fits(self) -> tuple[Fit, ...]:
        """Needed and available memory and disk."""
        return self.run.placement.fits

    @property
    def seconds(self) -> float:
        """Seconds of a step."""
        return self.run.step.seconds

    @cached_property
    def activation_bytes(self) -> int:
        """Bytes that the forward passes of a step save if nothing is recomputed."""
        model, settings = self.found.model, self.run.settings
        sizes = model_sizes(model.shape, model.micro_batch(settings))
        return settings.micro_batches * sizes.saved

    @property
    def required_write_rate(self) -> float:
        """Bytes per second that would hide writing all of them (SSDTrain)."""
        return required_write_rate(self.activation_bytes, self.seconds)

    @property
    def tflops(self) -> float:
        """TFLOPS over the step, recomputation included."""
        shape, settings = self.request.shape, self.run.settings
        work = settings.batch, settings.sequence
        recomputed = settings.recomputed_layers * shape.layer_flops(*work)
        return (3 * shape.forward_flops(*work) + recomputed) / self.seconds / _TERA

    @property
    def written_per_day(self) -> float:
        """Bytes that are written to the drives in a day."""
        return self.run.step.written_bytes / self.seconds * SECONDS_PER_DAY

    @cached_property
    def lifespans(self) -> dict[str, float]:
        """Years of the drives by assumption; empty if no rating is known."""
        rated = self.request.drives.endurance_bytes
        if rated is None:
            return {}
        step = self.seconds, self.run.step.written_bytes
        return {
            name: lifespan_seconds(rated, *step, wear) / SECONDS_PER_YEAR
            for name, wear in _WEARS.items()
        }

    @cached_property
    def advice(self) -> tuple[str, ...]:
        """What to change first: what does not fit, then what limits."""
        short = [fit for fit in self.fits if not fit.ok]
        return (*map(self._make_room, short), *self._faster(not short), *self._drive_count())

    def assumptions(self) -> list[str]:
        """Return what the figures rest on, a line each."""
        return [*self.found.assumptions(), "training without a pause, for the lifespan of drives"]

    def as_dict(self) -> dict[str, Any]:
        """Return the figures with units in their names, ready for JSON."""
        request, run = self.request, self.run
        forward, rest = run.step.stages[0], StepTime(run.step.stages[1:])
        settings = run.settings
        return {
            "model": {
                "parameters": request.shape.parameters,
                "layers": request.shape.layers,
                "hidden": request.shape.hidden,
                "batch": settings.batch,
                "sequence": settings.sequence,
            },
            "machine": {
                "device": self.found.model.device_name,
                "drive": request.drives.drive.name,
                "drives": request.drives.count,
            },
            "fits": {
                what: {"needed_bytes": needed, "available_bytes": has, "fits": needed <= has}
                for what, needed, has in map(astuple, self.fits)
            },
            "settings": run.as_dict(),
            "step": {
                "seconds": self.seconds,
                "forward_seconds": forward.times * forward.seconds,
                "backward_seconds": rest.seconds,
                "limits_seconds": run.step.resource_seconds,
                "forward_limit": forward.limit,
                "backward_limit": rest.limit,
                "streams_weights": settings.streams_weights,
                "swapped_bytes": run.placement.split("activations").total_bytes,
                "tokens_per_second": run.tokens_per_second,
                "tflops": self.tflops,
            },
            "activations": {
                "bytes": self.activation_bytes,
                "required_write_GBps": self.required_write_rate / _GB,
            },
            "drives": {
                "written_bytes_per_step": run.step.written_bytes,
                "written_bytes_per_day": self.written_per_day,
                "lifespan_years": {
                    name: years if math.isfinite(years) else None
                    for name, years in self.lifespans.items()
                },
            },
            "advice": list(self.advice),
            "assumptions": self.assumptions(),
        }

    def __str__(self) -> str:
        """Tables in Markdown."""
        settings, step = self.run.settings, self.run.step
        title = (
            f"{self.request.shape.parameters / _GB:.2f} billion parameters, batch "
            f"{settings.batch} of {settings.sequence} tokens, {self.found.model.machine}"
        )
        fits = (
            (what, format_size(needed), format_size(has), "yes" if needed <= has else "no")
            for what, needed, has in map(astuple, self.fits)
        )
        stages = [
            (
                f"{stage.times} x {stage.name}" if stage.times > 1 else stage.name,
                *(f"{stage.times * seconds:.2f}" for seconds in stage.limits.values()),
                f"{stage.times * stage.seconds:.2f}",
                stage.limit,
            )
            for stage in step.stages
            if stage.seconds
        ]
        whole = ("the step", "", "", "", f"{step.seconds:.2f}", step.limit)
        blocks = [
            title,
            markdown_table("memory and disk | needed | available | fits", fits),
            markdown_table("the run | ", self._run_rows()),
            markdown_table(
                " | ".join(["seconds of a step", *step.stages[0].limits, "all", "limits"]),
                [*stages, whole],
            ),
            self.found.places(self.run, "run"),
            markdown_table("drives | ", self._drive_rows()),
            markdown_list("What to change first", self.advice),
            markdown_list("Assumed", self.assumptions()),
        ]
        return "\n\n".join(blocks)

    def _run_rows(self) -> list[tuple[str, str]]:
        run, settings = self.run, self.run.settings
        where = "memory" if self.found.model.on_cpu else "the device"
        return [
            ("throughput", f"{rounded(run.tokens_per_second)} tokens/s, {self.tflops:.3g} TFLOPS"),
            ("micro-batches", f"{settings.micro_batches} of {settings.micro_batch}"),
            (f"leaves {where}", ", ".join(run.offloads) or "nothing"),
            ("recomputed layers", f"{settings.recomputed_layers} of {self.request.shape.layers}"),
            ("update", run.update),
            (
                "all activations",
                f"{format_size(self.activation_bytes)}; hiding them needs "
                f"{self.required_write_rate / _GB:.1f} GB/s of write bandwidth",
            ),
        ]

    def _drive_rows(self) -> list[tuple[str, str]]:
        rows = [
            ("written in a step", f"{self.run.step.written_bytes / _GB:.1f} GB"),
            ("written in a day", f"{self.written_per_day / _TERA:.1f} TB"),
            *(
                (f"lifespan, {name}", f"{years:.2g} years")
                for name, years in self.lifespans.items()
            ),
        ]
        if not self.lifespans:
            rows.append(("lifespan", "the drive's rating is not known"))
        return rows

    # ---------------------------------------------------------------------- advice
    def _make_room(self, fit: Fit) -> str:
        missing = f"{fit.what} is {format_size(fit.needed_bytes - fit.available_bytes)} too small"
        if fit.what == "disk":
            each = self.request.drives.drive.capacity_bytes
            return f"{missing}: take {math.ceil(fit.needed_bytes / each)} of the drives"
        if fit.what == "host memory":
            return f"{missing}: add as much, or take a smaller model"
        # Unless something else is short as well.
        batches = range(1, self.run.settings.batch)
        batch = bisect.bisect_left(
            batches, True, key=lambda batch: not self._with_batch(batch).found.candidates
        )
        if batch:
            return f"{missing}: a batch of {batch} fits"
        return f"{missing} even for a batch of 1: take more of it"

    def _faster(self, fits: bool) -> Iterator[str]:
        """Say what limits the step, and what more of it gives."""
        limited = sorted(self.run.step.limited_seconds.items(), key=lambda one: -one[1])
        shares = {name: seconds / self.seconds for name, seconds in limited}
        for name, share in shares.items():
            if share < _LITTLE:
                continue
            limit = f"{share:.0%} of the step"
            if name == "paths":
                enough = self._enough_drives
                one_more, many = map(self._seconds_with, (self.request.drives.count + 1, enough))
                yield (
                    f"the drives limit {limit}: one more makes it {self.seconds / one_more:.2f}x "
                    f"as fast, {enough} in all {self.seconds / many:.2f}x, and more than that no "
                    f"faster"
                )
                yield from self._more_memory() if fits else ()
            elif name == "link":
                yield (
                    f"the link between host and device limits {limit}: take a wider one, or a "
                    f"smaller model"
                )
            else:
                what = "the cores limit" if self.found.model.on_cpu else "the device limits"
                yield f"{what} {limit}: only a faster one, or several, makes that shorter"
        if fits and shares.get("computation", 0.0) < 1 - _LITTLE:
            yield from self._larger_batch()

    def _more_memory(self) -> Iterator[str]:
        """Propose more memory, which then holds more of what is on the drives."""
        name = "memory_bytes" if self.found.model.on_cpu else "host_memory_bytes"
        twice = 2 * getattr(self.request, name)
        gain = self.seconds / self._with_batch(self.run.settings.batch, **{name: twice}).seconds
        if gain >= _WORTH:
            yield f"twice the {self.fits[-2].what} makes the step {gain:.2f}x as fast"

    def _larger_batch(self) -> Iterator[str]:
        """Propose a batch that hides more of what moves."""
        best = None
        for factor in (2, 4, 8):
            larger = self._with_batch(factor * self.run.settings.batch)
            if not larger.found.candidates:
                break
            gain = larger.run.tokens_per_second / self.run.tokens_per_second
            if gain > _WORTH * (best[1] if best else 1.0):
                best = larger.run.settings.batch, gain
        if best is not None:
            yield (
                f"the batch is too small to hide what moves: one of {best[0]} gives {best[1]:.2f} "
                f"times the tokens per second"
            )

    @cached_property
    def _enough_drives(self) -> int:
        """The fewest drives that are as fast as any number of them, to 1 %."""
        ideal = self._seconds_with(_MOST_DRIVES)
        # More drives are never slower.
        return 1 + bisect.bisect_left(
            range(1, _MOST_DRIVES),
            True,
            key=lambda count: self._seconds_with(count) <= _AS_FAST * ideal,
        )

    def _drive_count(self) -> Iterator[str]:
        """Say whether fewer drives are as fast, and how many last long enough."""
        count, enough = self.request.drives.count, self._enough_drives
        if not self.run.placement.uses_drives:
            yield "nothing is on the drives"
        elif enough < count:
            slower = self._seconds_with(enough) / self.seconds
            yield (
                f"{enough} of the {count} drives are as fast ({slower - 1:+.1%} of the step); the "
                f"others add space and life"
            )
        years = self.lifespans.get("as rated", math.inf)
        if years < _WANTED_YEARS:
            yield (
                f"by their rating the drives last {years:.2g} years of training without a pause: "
                f"for {_WANTED_YEARS:g} years take {math.ceil(count * _WANTED_YEARS / years)} of "
                f"them, or drives that are rated for {_WANTED_YEARS / years:.0f} times the bytes"
            )

    def _with_batch(self, batch: int, **changes: Any) -> Analysis:
        request = replace(self.request, **changes)
        return analyse(request, batch=batch, sequence=self.run.settings.sequence)

    def _seconds_with(self, count: int) -> float:
        """Return the seconds of a step with the same settings and so many drives."""
        drives = Drives(self.request.drives.drive, count)
        model = model_of(replace(self.request, drives=drives))
        return Candidate.of(model, self.run.settings).step.seconds
