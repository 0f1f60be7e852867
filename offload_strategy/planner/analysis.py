"""The analysis of a run before it starts, as an object, tables and JSON."""

from __future__ import annotations

import dataclasses
import math
from functools import cached_property
from typing import Any

from offload_strategy.planner.advice import advise
from offload_strategy.planner.costs import (
    AS_RATED,
    SECONDS_PER_DAY,
    SECONDS_PER_YEAR,
    SEQUENTIAL,
    SSDTRAIN,
    lifespan_seconds,
    required_write_rate,
)
from offload_strategy.planner.host_memory_needs import System, host_memory
from offload_strategy.planner.request import Request
from offload_strategy.planner.saved_tensor_bytes import activation_bytes
from offload_strategy.planner.step_estimate import StepEstimate
from offload_strategy.units import format_size, markdown_list, markdown_table

_GB = 1e9
_TERA = 1e12
_SYSTEMS: tuple[System, ...] = ("streamed", "memascend", "zero-infinity")
_WEARS = {
    "as rated": AS_RATED,
    "sequential writes (rated at WAF 2.5)": SEQUENTIAL,
    "and data kept for a day (86 times the cycles)": SSDTRAIN,
}


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
        return self.written_bytes / self.seconds * SECONDS_PER_DAY

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

    @property
    def dollars_per_million_tokens(self) -> float | None:
        """Cost of training; None if a price is missing."""
        request, rated = self.request, self.request.drives.endurance_bytes
        life = math.inf
        if rated is not None:
            life = lifespan_seconds(rated, self.seconds, self.written_bytes)
        a_second = request.prices.dollars_per_second(request.drives.count, life)
        return None if a_second is None else a_second * self.seconds / request.work.tokens * 1e6

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
            "dollars_per_million_tokens": self.dollars_per_million_tokens,
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
        if self.dollars_per_million_tokens is not None:
            cost = f"{self.dollars_per_million_tokens:.4f} dollars"
            rows.append(("cost of a million tokens", cost))
        return rows


def analyse(request: Request) -> Analysis:
    """Analyse what a run needs, how long its steps take, and what to change first."""
    return Analysis(request)
