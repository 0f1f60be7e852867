"""Metrics of an engine as one flat dictionary."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from timeit import default_timer as perf_counter

import psutil
import torch

from offload_strategy.config import OffloadConfig
from offload_strategy.engine.resources import Resources
from offload_strategy.telemetry import CLIENTS, Direction, get_logger
from offload_strategy.torch_support.accelerator import has_memory_statistics, peak_allocated_bytes
from offload_strategy.units import SECONDS_PER_DAY, SECONDS_PER_YEAR, format_size

logger = get_logger(__name__)


class Metrics:
    """Reads the metrics of one engine, and warns of wear of its drives."""

    def __init__(self, config: OffloadConfig, resources: Resources) -> None:
        self._config = config
        self._resources = resources
        self._recorder = resources.recorder
        self._started_at = perf_counter()
        self._warned: set[str] = set()

    def read(
        self,
        device: torch.device,
        activations: Mapping[str, float],
        optimizers: Sequence[Mapping[str, float]],
    ) -> dict[str, float]:
        """Return the metrics, with those of activation offloading and of each optimizer."""
        recorder, resources = self._recorder, self._resources
        _ = resources.store.live_tickets  # also frees tickets that were garbage-collected
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
        for name, value in activations.items():
            metrics[f"offload/activations/{name}"] = value
        for name in ("speculated_steps", "redone_steps"):
            metrics[f"offload/optimizer/{name}"] = sum((each[name] for each in optimizers), 0.0)
        usage = resources.pool.usage()
        on_device = has_memory_statistics(device)
        return metrics | {
            "offload/memory/pinned_bytes": float(usage.held_bytes),
            "offload/memory/pinned_peak_bytes": float(usage.peak_bytes),
            "offload/memory/fragmentation": usage.fragmentation,
            "offload/host/rss_bytes": float(psutil.Process().memory_info().rss),
            "offload/device/peak_bytes": float(peak_allocated_bytes(device) if on_device else 0),
            "offload/transfer/busy_seconds": recorder.busy_seconds(),
            "offload/transfer/hidden_share": recorder.hidden_share(),
            **self._endurance(),
        }

    def warn_about_endurance(self) -> None:
        """Warn once per tier when this run has written much of its drives' rated endurance."""
        for tier in self._config.tiers:
            if tier.endurance_tbw is None or tier.name in self._warned:
                continue
            written = self._recorder.tier_bytes[tier.name, Direction.WRITE]
            rated = tier.endurance_tbw * 1e12
            if written < tier.endurance_share * rated:
                continue
            self._warned.add(tier.name)
            elapsed = perf_counter() - self._started_at
            logger.warning(
                "tier %s: this run has written %s in %.1f h, %.2g of the %.4g TB that its drives "
                "are rated for (tiers[].endurance_share: %g). At this rate they last %.2g years. "
                "A dram tier before it, or a smaller activations.budget, writes less.",
                tier.name,
                format_size(written),
                elapsed / 3600,
                written / rated,
                tier.endurance_tbw,
                tier.endurance_share,
                _years(tier.endurance_tbw, written, elapsed),
            )

    def _endurance(self) -> dict[str, float]:
        elapsed = perf_counter() - self._started_at
        written, years = 0, math.inf
        for tier in self._config.tiers:
            if tier.kind == "ssd":
                tier_written = self._recorder.tier_bytes[tier.name, Direction.WRITE]
                written += tier_written
                if tier.endurance_tbw is not None and tier_written:
                    years = min(years, _years(tier.endurance_tbw, tier_written, elapsed))
        return {
            "offload/endurance/written_bytes": float(written),
            "offload/endurance/written_bytes_per_day": written / elapsed * SECONDS_PER_DAY,
            "offload/endurance/projected_years": years if math.isfinite(years) else math.nan,
        }


def _years(endurance_tbw: float, written: int, seconds: float) -> float:
    """Return the lifetime in years of drives that are written to at this rate."""
    return endurance_tbw * 1e12 / (written / seconds) / SECONDS_PER_YEAR
