"""What training uses up: the life of drives (SSDTrain, section III-D), and money."""

from __future__ import annotations

from dataclasses import dataclass

from offload_strategy.planner.transformer_shape import positive, require_positive

SECONDS_PER_DAY = 86400.0
SECONDS_PER_YEAR = 365.0 * SECONDS_PER_DAY


#: Bytes that can be written for each rated byte: as the manufacturer rates, on which the warranty
#: depends; with large sequential writes instead of the random ones of the rating; and as SSDTrain
#: assumes, sequential writes of data that need not stay readable for years, but for a day.
AS_RATED, SEQUENTIAL, SSDTRAIN = 1.0, 2.5, 2.5 * 86.0


def required_write_rate(activation_bytes: float, step_seconds: float) -> float:
    """Return the bytes per second at which a device must write to hide its activations.

    They are written during the forward pass, which is assumed to be half of the step.
    """
    positive("step_seconds", step_seconds)
    return activation_bytes / (step_seconds / 2)


def lifespan_seconds(
    endurance_bytes: float, step_seconds: float, written_bytes: float, wear: float = AS_RATED
) -> float:
    """Return the seconds of training until all drives together reach their rated endurance.

    Infinite if a step writes nothing. Raises a ConfigError if endurance or step are not above 0.
    """
    positive("endurance_bytes", endurance_bytes)
    positive("step_seconds", step_seconds)
    if written_bytes <= 0:
        return float("inf")
    return endurance_bytes * wear * step_seconds / written_bytes


@dataclass(frozen=True, slots=True)
class Prices:
    """Prices of the machine in US dollars; None for what is not known."""

    device: float | None = None  # Price of the device
    drive: float | None = None  # Price of each drive
    host: float | None = None  # Price of the rest
    # Depreciation period of device and host. A drive is depreciated over as many years, or
    # over its rated life if that is shorter
    years: float = 3.0

    def __post_init__(self) -> None:
        require_positive(self, "prices: ", "device", "drive", "host", "years")

    def dollars_per_second(self, drives: int, drive_seconds: float) -> float | None:
        """Return the depreciation of all, with drives of so long a life; None without a price."""
        if self.device is None or self.drive is None or self.host is None:
            return None
        seconds = self.years * SECONDS_PER_YEAR
        worn = min(seconds, drive_seconds)
        return (self.device + self.host) / seconds + drives * self.drive / worn
