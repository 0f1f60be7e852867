"""The analysis of a run before it starts, as an object, tables and JSON."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from offload_strategy.planner import advice, memory_needs
from offload_strategy.planner.endurance import (
    AS_RATED,
    SECONDS_PER_YEAR,
    SEQUENTIAL,
    SSDTRAIN,
    bytes_per_day,
    lifespan_seconds,
    required_write_rate,
)
from offload_strategy.planner.host_memory_needs import HostMemory, System, host_memory
from offload_strategy.planner.memory_needs import Fit
from offload_strategy.planner.request import Request
from offload_strategy.planner.saved_tensor_bytes import activation_bytes
from offload_strategy.planner.step_estimate import Swap
from offload_strategy.units import format_size

_GB = 1e9
_TERA = 1e12
_SYSTEMS: tuple[System, ...] = ("streamed", "memascend", "zero-infinity")
_WEARS = (
    ("as rated", AS_RATED),
    ("sequential writes (rated at WAF 2.5)", SEQUENTIAL),
    ("and data kept for a day (86 times the cycles)", SSDTRAIN),
)


@dataclass(frozen=True, slots=True)
class Analysis:
    """What a run needs and how fast it is; `str` gives tables in Markdown.

    Args:
        request: The run.
        fits: Needed and available memory and disk.
        streams_weights: Whether weights are streamed because they do not fit on the device.
        swap: What is offloaded, and the time of a step by part.
        activation_bytes: Bytes that a forward pass saves.
        required_write_rate: Bytes per second that would hide writing all of them (SSDTrain).
        host: Peak host memory by system.
        lifespans: Years of the drives by assumption; empty if no rating is known.
        dollars_per_million_tokens: Cost of training; None if a price is missing.
        advice: What to change first.
    """

    request: Request
    fits: tuple[Fit, ...]
    streams_weights: bool
    swap: Swap
    activation_bytes: int
    required_write_rate: float
    host: dict[System, HostMemory]
    lifespans: dict[str, float]
    dollars_per_million_tokens: float | None
    advice: tuple[str, ...]

    @property
    def tokens_per_second(self) -> float:
        """Throughput in tokens per second."""
        return self.request.work.tokens / self.swap.time.seconds

    @property
    def written_per_day(self) -> float:
        """Bytes that are written to the drives in a day."""
        return bytes_per_day(self.swap.written_bytes, self.swap.time.seconds)

    def as_dict(self) -> dict[str, Any]:
        """Return the figures with units in their names, ready for JSON."""
        time = self.swap.time
        return {
            "model": {
                "parameters": self.request.shape.parameters,
                "layers": self.request.shape.layers,
                "hidden": self.request.shape.hidden,
                "batch": self.request.work.batch,
                "sequence": self.request.work.sequence,
            },
            "machine": {
                "device": self.request.device.name,
                "drive": self.request.drives.drive.name,
                "drives": self.request.drives.count,
            },
            "fits": {
                fit.what: {
                    "needed_bytes": fit.needed_bytes,
                    "available_bytes": fit.available_bytes,
                    "fits": fit.ok,
                }
                for fit in self.fits
            },
            "step": {
                "seconds": time.seconds,
                "forward_seconds": time.stage("forward").seconds,
                "backward_seconds": time.stage("backward").seconds,
                "limits_seconds": dict(time.resource_seconds),
                "forward_limit": self.swap.limit("forward"),
                "backward_limit": self.swap.limit("backward"),
                "streams_weights": self.streams_weights,
                "swapped_bytes": self.swap.moved_bytes,
                "swap_coefficient": self.swap.coefficient,
                "tokens_per_second": self.tokens_per_second,
                "tflops": self.swap.flops / time.seconds / _TERA,
            },
            "activations": {
                "bytes": self.activation_bytes,
                "required_write_GBps": self.required_write_rate / _GB,
            },
            "host_memory_bytes": {name: found.peak_bytes for name, found in self.host.items()},
            "drives": {
                "written_bytes_per_step": self.swap.written_bytes,
                "written_bytes_per_day": self.written_per_day,
                "lifespan_years": {
                    name: years if math.isfinite(years) else None
                    for name, years in self.lifespans.items()
                },
            },
            "dollars_per_million_tokens": self.dollars_per_million_tokens,
            "advice": list(self.advice),
            "assumptions": self.request.assumptions(),
        }

    def __str__(self) -> str:
        """Tables in Markdown."""
        blocks = [
            self._title(),
            self._fits(),
            self._step(),
            self._host(),
            self._drives(),
            "What to change first:\n\n" + "\n".join(f"- {line}" for line in self.advice),
            "Assumed:\n\n" + "\n".join(f"- {line}" for line in self.request.assumptions()),
        ]
        return "\n\n".join(blocks)

    def _title(self) -> str:
        shape, work = self.request.shape, self.request.work
        return (
            f"{shape.parameters / _GB:.2f} billion parameters, batch {work.batch} of "
            f"{work.sequence} tokens, on {self.request.device.name} with {self.request.drives}"
        )

    def _fits(self) -> str:
        lines = ["| memory and disk | needed | available | fits |", "|---|---|---|---|"]
        for fit in self.fits:
            verdict = "yes" if fit.ok else "no"
            lines.append(
                f"| {fit.what} | {format_size(fit.needed_bytes)} | "
                f"{format_size(fit.available_bytes)} | {verdict} |"
            )
        return "\n".join(lines)

    def _step(self) -> str:
        time = self.swap.time
        limits = {self.swap.limit("forward"), self.swap.limit("backward")}
        lines = ["| a step | seconds | |", "|---|---|---|"]
        for name, seconds in time.resource_seconds.items():
            lines.append(f"| {name} | {seconds:.2f} | {'limits' if name in limits else ''} |")
        lines += [
            f"| forward | {time.stage('forward').seconds:.2f} | |",
            f"| backward and update | {time.stage('backward').seconds:.2f} | |",
            f"| the step | {time.seconds:.2f} | {self.tokens_per_second:.0f} tokens/s, "
            f"{self.swap.flops / time.seconds / _TERA:.0f} TFLOPS |",
            f"| offloaded activations | | {format_size(self.swap.moved_bytes)}, "
            f"{self.swap.coefficient:.0%} of the results inside layers |",
            f"| all activations | | {format_size(self.activation_bytes)}; hiding them needs "
            f"{self.required_write_rate / _GB:.1f} GB/s of write bandwidth |",
        ]
        return "\n".join(lines)

    def _host(self) -> str:
        names = list(dict.fromkeys(name for found in self.host.values() for name in found.parts))
        lines = [
            "| host memory | " + " | ".join(self.host) + " |",
            "|---" * (len(self.host) + 1) + "|",
        ]
        for name in names:
            sizes = [found.parts.get(name) for found in self.host.values()]
            cells = ["" if size is None else format_size(size) for size in sizes]
            lines.append(f"| {name} | " + " | ".join(cells) + " |")
        peaks = [format_size(found.peak_bytes) for found in self.host.values()]
        lines.append("| peak | " + " | ".join(peaks) + " |")
        return "\n".join(lines)

    def _drives(self) -> str:
        lines = [
            "| drives | |",
            "|---|---|",
            f"| written in a step | {self.swap.written_bytes / _GB:.1f} GB |",
            f"| written in a day | {self.written_per_day / _TERA:.1f} TB |",
        ]
        for name, years in self.lifespans.items():
            lines.append(f"| lifespan, {name} | {years:.2g} years |")
        if not self.lifespans:
            lines.append("| lifespan | the drive's rating is not known |")
        if self.dollars_per_million_tokens is not None:
            lines.append(
                f"| cost of a million tokens | {self.dollars_per_million_tokens:.4f} dollars |"
            )
        return "\n".join(lines)


def analyse(request: Request) -> Analysis:
    """Analyse what a run needs, how long its steps take, and what to change first.

    Args:
        request: The model, the work and the machine.

    Raises:
        ConfigError: If a figure is not above 0.
    """
    streams = memory_needs.streams_weights(request)
    swap = memory_needs.planned_swap(request, streams=streams)
    saved = activation_bytes(request.shape, request.work)
    rated = request.drives.endurance_bytes
    lifespans = {}
    if rated is not None:
        for name, wear in _WEARS:
            seconds = lifespan_seconds(rated, swap.time.seconds, swap.written_bytes, wear)
            lifespans[name] = seconds / SECONDS_PER_YEAR
    fits = memory_needs.fits(request, swap, streams)
    return Analysis(
        request=request,
        fits=fits,
        streams_weights=streams,
        swap=swap,
        activation_bytes=saved,
        required_write_rate=required_write_rate(saved, swap.time.seconds),
        host={system: host_memory(request.shape, system) for system in _SYSTEMS},
        lifespans=lifespans,
        dollars_per_million_tokens=request.dollars_per_million_tokens(swap),
        advice=tuple(advice.advise(request, swap, streams, fits, lifespans)),
    )
