"""Metrics of an engine as one flat dictionary."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from timeit import default_timer as perf_counter

import torch

from offload_strategy.engine.resources import Resources
from offload_strategy.host_memory.memory_limits import resident_bytes
from offload_strategy.telemetry import CLIENTS, Direction, get_logger
from offload_strategy.torch_support.accelerator import has_memory_statistics, peak_allocated_bytes
from offload_strategy.units import SECONDS_PER_DAY, SECONDS_PER_YEAR, format_size

logger = get_logger(__name__)

#: A budget of writes counts as exceeded by this factor, and of this time at the earliest: until
#: then a run may write what it gives for all of it, such as the first states.
_EXCEEDED, _PATIENCE_SECONDS = 1.05, 3600.0


class Metrics:
    """Reads the metrics of one engine, and warns of wear of its drives."""

    def __init__(self, resources: Resources) -> None:
        self._config = resources.config
        self._resources = resources
        self._recorder = resources.recorder
        self._started_at = perf_counter()
        self._warned: set[tuple[str, str]] = set()

    def read(
        self,
        device: torch.device,
        activations: Mapping[str, float],
        optimizers: Sequence[Mapping[str, float]],
    ) -> dict[str, float]:
        """Return the metrics, with those of activation offloading and of each optimizer."""
        recorder, resources = self._recorder, self._resources
        _ = resources.store.registry.live  # also frees tickets that were garbage-collected
        metrics: dict[str, float] = {}
        for client in CLIENTS:
            prefix = f"offload/{client}"
            for verb in ("written", "read", "forwarded"):
                metrics[f"{prefix}/{verb}_bytes"] = float(recorder.client_bytes[client, verb])
            metrics[f"{prefix}/stall_seconds"] = recorder.stall_seconds[client]
        for name, used_bytes in resources.tier_used_bytes().items():
            prefix = f"offload/tier/{name}"
            metrics[f"{prefix}/used_bytes"] = float(used_bytes)
            metrics[f"{prefix}/read_GBps"] = recorder.bandwidth_GBps(name, Direction.READ)
            metrics[f"{prefix}/write_GBps"] = recorder.bandwidth_GBps(name, Direction.WRITE)
            metrics[f"{prefix}/queued_seconds"] = recorder.queue_seconds[name]
        metrics |= {f"offload/activations/{name}": value for name, value in activations.items()}
        for name in ("speculated_steps", "redone_steps"):
            metrics[f"offload/optimizer/{name}"] = sum((each[name] for each in optimizers), 0.0)
        elapsed = max(1e-9, perf_counter() - self._started_at)  # a clock may stand still
        written, years = 0, math.inf
        for tier in self._config.tiers:
            tier_written = recorder.tier_bytes[tier.name, Direction.WRITE]
            written += tier_written
            if tier.endurance_tbw is not None and tier_written:
                years = min(years, _years(tier.endurance_tbw * 1e12, tier_written, elapsed))
        usage = resources.pool.usage()
        on_device = has_memory_statistics(device)
        return metrics | {
            "offload/memory/pinned_bytes": float(usage.held_bytes),
            "offload/memory/pinned_peak_bytes": float(usage.peak_bytes),
            "offload/memory/fragmentation": usage.fragmentation,
            "offload/host/rss_bytes": float(resident_bytes()),
            "offload/device/peak_bytes": float(peak_allocated_bytes(device) if on_device else 0),
            "offload/transfer/busy_seconds": recorder.busy_seconds(),
            "offload/transfer/hidden_share": recorder.hidden_share(),
            "offload/endurance/written_bytes": float(written),
            "offload/endurance/written_bytes_per_day": written / elapsed * SECONDS_PER_DAY,
            "offload/endurance/projected_years": years if math.isfinite(years) else math.nan,
        }

    def warn_about_wear(self) -> None:
        """Warn once per tier of much of its drives' endurance, and of a budget that is not kept."""
        elapsed = perf_counter() - self._started_at
        for tier in self._config.tiers:
            written = self._recorder.tier_bytes[tier.name, Direction.WRITE]
            budget, rated = tier.writes_per_day, (tier.endurance_tbw or math.inf) * 1e12
            days = max(elapsed, _PATIENCE_SECONDS) / SECONDS_PER_DAY
            if budget is not None and written > _EXCEEDED * budget * days:
                moved = self._recorder.client_bytes
                parts = [f"{name} {format_size(moved[name, 'written'])}" for name in CLIENTS]
                self._warn(
                    ("budget", tier.name),
                    f"{written / budget / days:.3g} times what tiers[].writes_per_day allows it "
                    f"({format_size(budget)}) until now. It cannot be kept: activations "
                    f"leave only where memory has no room for them, and the rest must move "
                    f"(so far {', '.join(parts)}). More memory, a dram tier before it, larger "
                    f"steps (accumulation) or optimizer.overlap: off write less.",
                )
            if written >= tier.endurance_share * rated:
                self._warn(
                    ("rating", tier.name),
                    f"{written / rated:.2g} of the {tier.endurance_tbw:.4g} TB that are its part "
                    f"of what the drives are rated for (tiers[].endurance_share: "
                    f"{tier.endurance_share:g}). At this rate they last "
                    f"{_years(rated, written, elapsed):.2g} years. A dram tier before "
                    f"it, or a smaller activations.budget, writes less.",
                )

    def _warn(self, what: tuple[str, str], text: str) -> None:
        if what not in self._warned:
            self._warned.add(what)
            written = format_size(self._recorder.tier_bytes[what[1], Direction.WRITE])
            hours = (perf_counter() - self._started_at) / 3600
            logger.warning(
                "tier %s: this process has written %s in %.1f h, %s", what[1], written, hours, text
            )


def _years(rated: float, written: int, seconds: float) -> float:
    """Return the lifetime in years of drives that are rated for so many bytes, at this rate."""
    return rated / (written / seconds) / SECONDS_PER_YEAR
