"""A run on a machine with a GPU: a model, and the figures of the machine."""

from __future__ import annotations

from dataclasses import dataclass

from offload_strategy.planner.hardware import Device, Drives
from offload_strategy.planner.hardware import device as named_device
from offload_strategy.planner.step_time import Rates
from offload_strategy.planner.transformer_shape import (
    TransformerShape,
    positive,
    require_positive,
)

_TERA = 1e12
_GB = 1e9
#: The device whose sustained share of its peak is assumed for devices without a measurement.
_YARDSTICK = "a100-80g-pcie"


@dataclass(frozen=True, slots=True)
class Request:
    """A model and a machine with a GPU."""

    shape: TransformerShape
    device: Device
    drives: Drives
    host_memory_bytes: int
    # FLOP/s of the device; None for the figure of the hardware table
    sustained_flops: float | None = None

    def __post_init__(self) -> None:
        require_positive(self, "", "host_memory_bytes", "sustained_flops")
        positive("machine: flops", self.flops)
        require_positive(self.rates, "machine: rates.", "read", "write", "link", "paths")

    @property
    def flops(self) -> float:
        """FLOP/s of the device in a transformer block."""
        given = self.sustained_flops or self.device.sustained_flops
        return self.device.flops * _sustained_share() if given is None else given

    @property
    def rates(self) -> Rates:
        """What drives and link move, the link as measured if that is known."""
        drive, device = self.drives.drive, self.device
        link = device.measured_link or device.link
        return Rates(drive.read, drive.write, self.drives.count, link)

    def assumptions(self) -> list[str]:
        """Return the figures of device, link and drives with their sources, a line each."""
        device, rates, sources = self.device, self.rates, self.device.sources
        if self.sustained_flops is not None:
            measured = "given"
        elif device.sustained_flops is not None:
            measured = sources["sustained_tflops"]
        else:
            measured = (
                f"{_sustained_share():.0%} of its peak, the share that {_YARDSTICK} sustains; "
                f"{sources['tflops']}"
            )
        link = sources["measured_link_GBps" if device.measured_link else "link_GBps"]
        return [
            f"device: {self.flops / _TERA:.0f} TFLOPS in a transformer block ({measured})",
            f"link: {rates.link / _GB:.0f} GB/s in each direction ({link})",
            f"drive: {rates.read / _GB:.1f} GB/s read, {rates.write / _GB:.1f} GB/s written, one "
            f"at a time ({self.drives.drive.sources['read_GBps']})",
        ]


def _sustained_share() -> float:
    yardstick = named_device(_YARDSTICK)
    assert yardstick.sustained_flops is not None
    return yardstick.sustained_flops / yardstick.flops
