"""Endurance of SSDs and the write rate that activations need (SSDTrain, section III-D)."""

from __future__ import annotations

from dataclasses import dataclass

from offload_strategy.planner.transformer_shape import positive

SECONDS_PER_DAY = 86400.0
SECONDS_PER_YEAR = 365.0 * SECONDS_PER_DAY


@dataclass(frozen=True, slots=True)
class Wear:
    """Assumptions about the wear of a drive.

    Args:
        rated_amplification: Write amplification in the test of the rating: bytes written to flash
            for each byte written.
        amplification: Write amplification of training.
        retention_factor: How many times more often cells can be written if data need not stay
            readable for as long as the rating promises.

    Raises:
        ConfigError: If a number is not above 0.
    """

    rated_amplification: float = 1.0
    amplification: float = 1.0
    retention_factor: float = 1.0

    def __post_init__(self) -> None:
        for name in ("rated_amplification", "amplification", "retention_factor"):
            positive(f"wear: {name}", getattr(self, name))

    @property
    def factor(self) -> float:
        """Bytes that can be written for each rated byte."""
        return self.rated_amplification / self.amplification * self.retention_factor


#: The rating of the manufacturer, on which the warranty depends.
AS_RATED = Wear()
#: Large sequential writes instead of the random ones of the rating.
SEQUENTIAL = Wear(rated_amplification=2.5)
#: SSDTrain's assumption: sequential writes of data that is kept for a day instead of three years.
SSDTRAIN = Wear(rated_amplification=2.5, retention_factor=86.0)


def required_write_rate(activation_bytes: float, step_seconds: float) -> float:
    """Return the bytes per second at which a device must write to hide its activations.

    They are written during the forward pass, which is assumed to be half of the step.

    Args:
        activation_bytes: Bytes that one device writes in a step.
        step_seconds: Seconds of a step.

    Raises:
        ConfigError: If the step takes no time.
    """
    positive("step_seconds", step_seconds)
    return activation_bytes / (step_seconds / 2)


def lifespan_seconds(
    endurance_bytes: float, step_seconds: float, written_bytes: float, wear: Wear = AS_RATED
) -> float:
    """Return the seconds of training until the drives reach their endurance.

    Args:
        endurance_bytes: Rated endurance of all drives together.
        step_seconds: Seconds of a step.
        written_bytes: Bytes that a step writes to all of them.
        wear: Assumptions about wear.

    Returns:
        Seconds; infinite if nothing is written.

    Raises:
        ConfigError: If endurance or step are not above 0.
    """
    positive("endurance_bytes", endurance_bytes)
    positive("step_seconds", step_seconds)
    if written_bytes <= 0:
        return float("inf")
    return endurance_bytes * wear.factor * step_seconds / written_bytes


def bytes_per_day(written_bytes: float, step_seconds: float) -> float:
    """Return the bytes that are written in a day of training without a pause.

    Raises:
        ConfigError: If the step takes no time.
    """
    positive("step_seconds", step_seconds)
    return written_bytes / step_seconds * SECONDS_PER_DAY
