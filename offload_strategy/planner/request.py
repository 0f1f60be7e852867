"""A run to analyse: a model, its work and a machine."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from offload_strategy.errors import ConfigError
from offload_strategy.planner.endurance import SECONDS_PER_YEAR
from offload_strategy.planner.hardware import Device, Drives, Host
from offload_strategy.planner.hardware import device as named_device
from offload_strategy.planner.hardware import host as named_host
from offload_strategy.planner.saved_tensor_bytes import Workload
from offload_strategy.planner.step_estimate import Machine, Swap
from offload_strategy.planner.step_time import Rates
from offload_strategy.planner.transformer_shape import TransformerShape, positive

_MILLION = 1e6
_TERA = 1e12
_GB = 1e9
#: The device whose sustained share of its peak is assumed for devices without a measurement.
_YARDSTICK = "a100-80g-pcie"
#: The host whose rate of updates is assumed if none is given.
_USUAL_HOST = "fuyou"


@dataclass(frozen=True, slots=True)
class Prices:
    """Prices of the machine in US dollars.

    Args:
        device: Price of the device; None if unknown.
        drive: Price of each drive; None if unknown.
        host: Price of the rest; None if unknown.
        years: Depreciation period of device and host. A drive is depreciated over as many years,
            or over its rated life if that is shorter.
    """

    device: float | None = None
    drive: float | None = None
    host: float | None = None
    years: float = 3.0

    def __post_init__(self) -> None:
        for name in ("device", "drive", "host"):
            if getattr(self, name) is not None:
                positive(f"prices: {name}", getattr(self, name))
        positive("prices: years", self.years)

    @property
    def complete(self) -> bool:
        """Whether all prices are known."""
        return None not in (self.device, self.drive, self.host)


@dataclass(frozen=True, slots=True)
class Request:
    """A run to analyse.

    Args:
        shape: Shape of the model.
        work: Work of one step on one device.
        device: The device.
        drives: The drives.
        host_memory_bytes: Host memory of the machine.
        sustained_flops: FLOP/s of the device; None for the figure of the hardware table.
        update_rate: Parameters that the host updates in a second; None for Fuyou's host.
        prices: Prices for the cost of tokens.

    Raises:
        ConfigError: If a number is not above 0, or the work is that of several devices.
    """

    shape: TransformerShape
    work: Workload
    device: Device
    drives: Drives
    host_memory_bytes: int
    sustained_flops: float | None = None
    update_rate: float | None = None
    prices: Prices = dataclasses.field(default_factory=Prices)

    def __post_init__(self) -> None:
        positive("host_memory_bytes", self.host_memory_bytes)
        if self.work.tensor_parallel != 1:
            raise ConfigError(
                f"request: tensor_parallel is {self.work.tensor_parallel}, but the analysis is for "
                f"one device: give 1, and the shape of one device's part"
            )
        for name in ("sustained_flops", "update_rate"):
            if getattr(self, name) is not None:
                positive(name, getattr(self, name))

    @property
    def flops(self) -> float:
        """FLOP/s of the device in a transformer block."""
        if self.sustained_flops is not None:
            return self.sustained_flops
        if self.device.sustained_flops is not None:
            return self.device.sustained_flops
        return self.device.flops * _sustained_share()

    @property
    def updates(self) -> float:
        """Parameters that the host updates in a second."""
        return self.update_rate if self.update_rate is not None else _usual_updates()

    @property
    def link(self) -> float:
        """Bytes per second between host and device, in each direction."""
        return self.device.measured_link or self.device.link

    def machine(self) -> Machine:
        """Return the machine in the terms of the equations."""
        drive = self.drives.drive
        rates = Rates(drive.read, drive.write, self.drives.count, self.link)
        return Machine(self.flops, self.updates, rates)

    def dollars_per_million_tokens(self, swap: Swap) -> float | None:
        """Return the cost of training on a million tokens, or None if a price is missing."""
        prices = self.prices
        if not prices.complete:
            return None
        assert prices.device is not None
        assert prices.drive is not None
        assert prices.host is not None
        seconds = prices.years * SECONDS_PER_YEAR
        rated = self.drives.endurance_bytes
        worn = seconds
        if rated is not None:
            worn = min(seconds, rated * swap.time.seconds / swap.written_bytes)
        a_second = (prices.device + prices.host) / seconds
        a_second += self.drives.count * prices.drive / worn
        return a_second * swap.time.seconds / self.work.tokens * _MILLION

    def assumptions(self) -> list[str]:
        """Return the assumptions, a sentence each."""
        device, drive = self.device, self.drives.drive
        lines = [
            f"device: {self.flops / _TERA:.0f} TFLOPS in a transformer block ({self._of_flops()})",
            f"link: {self.link / _GB:.0f} GB/s in each direction "
            f"({device.sources['measured_link_GBps' if device.measured_link else 'link_GBps']})",
            f"drive: {drive.read / _GB:.1f} GB/s read, {drive.write / _GB:.1f} GB/s written, one "
            f"at a time ({drive.sources['read_GBps']})",
            f"host: {self.updates / _GB:.2g} billion parameters updated in a second "
            f"({self._of_updates()})",
            "everything overlaps as well as it can; measured steps are longer",
            "states of 12 bytes a parameter; weights, gradients and activations of 2 bytes; the "
            "update runs within the backward pass",
            "training without a pause, for lifespan and cost",
        ]
        if self.prices.complete:
            lines.append(f"device and host earn their price in {self.prices.years:g} years")
        return lines

    def _of_flops(self) -> str:
        if self.sustained_flops is not None:
            return "given"
        if self.device.sustained_flops is not None:
            return self.device.sources["sustained_tflops"]
        return (
            f"{_sustained_share():.0%} of its peak, the share that {_YARDSTICK} sustains; "
            f"{self.device.sources['tflops']}"
        )

    def _of_updates(self) -> str:
        if self.update_rate is not None:
            return "given"
        return _usual_host().sources["update_parameters_per_second"]


def _sustained_share() -> float:
    yardstick = named_device(_YARDSTICK)
    assert yardstick.sustained_flops is not None
    return yardstick.sustained_flops / yardstick.flops


def _usual_host() -> Host:
    return named_host(_USUAL_HOST)


def _usual_updates() -> float:
    rate = _usual_host().update_rate
    assert rate is not None
    return rate
