"""A run on a machine with a GPU: a model, its work, and the figures of the machine."""

from __future__ import annotations

from dataclasses import dataclass

from offload_strategy.planner.hardware import Device, Drives
from offload_strategy.planner.hardware import device as named_device
from offload_strategy.planner.saved_tensor_bytes import Workload
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
#: Parameters that a host updates in a second if no rate is given, and where that is from.
USUAL_UPDATES = 6.8e8
_UPDATES_SOURCE = (
    "Worked out, not measured: Fuyou's authors publish 42.8 TFLOPS for GPT-3 13B at batch 8 on "
    "table 3's machine with an RTX 4090 (evaluation data of Ratel, the later name); what the "
    "forward pass leaves of that step is the update; two Xeon Gold 5320"
)


SECONDS_PER_YEAR = 365.0 * 86400.0


@dataclass(frozen=True, slots=True)
class Request:
    """A run to analyse."""

    shape: TransformerShape
    work: Workload  # Work of one step on one device
    device: Device
    drives: Drives
    host_memory_bytes: int
    # FLOP/s of the device; None for the figure of the hardware table
    sustained_flops: float | None = None
    # Parameters that the host updates in a second; None for Fuyou's host
    update_rate: float | None = None

    def __post_init__(self) -> None:
        require_positive(self, "", "host_memory_bytes", "sustained_flops", "update_rate")
        positive("machine: flops", self.flops)
        require_positive(self.rates, "machine: rates.", "read", "write", "link", "paths")

    @property
    def flops(self) -> float:
        """FLOP/s of the device in a transformer block."""
        given = self.sustained_flops or self.device.sustained_flops
        return self.device.flops * _sustained_share() if given is None else given

    @property
    def updates(self) -> float:
        """Parameters that the host updates in a second."""
        return self.update_rate or USUAL_UPDATES

    @property
    def rates(self) -> Rates:
        """What drives and link move, the link as measured if that is known."""
        drive, device = self.drives.drive, self.device
        link = device.measured_link or device.link
        return Rates(drive.read, drive.write, self.drives.count, link)

    def machine_assumptions(self) -> list[str]:
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

    def assumptions(self) -> list[str]:
        """Return what an analysis rests on, a line each."""
        updates = _UPDATES_SOURCE if self.update_rate is None else "given"
        return [
            *self.machine_assumptions(),
            f"host: {self.updates / _GB:.2g} billion parameters updated in a second ({updates})",
            "everything overlaps as well as it can; measured steps are longer",
            "states of 12 bytes a parameter; weights, gradients and activations of 2 bytes; the "
            "update runs within the backward pass",
            "training without a pause, for the lifespan of drives",
        ]


def _sustained_share() -> float:
    yardstick = named_device(_YARDSTICK)
    assert yardstick.sustained_flops is not None
    return yardstick.sustained_flops / yardstick.flops
