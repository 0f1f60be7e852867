"""How fast drives must be for activations, and how long they last (SSDTrain, section III-D)."""

from __future__ import annotations

from dataclasses import dataclass

from offload_strategy.planner.transformer_shape import positive

SECONDS_PER_DAY = 86400.0
SECONDS_PER_YEAR = 365.0 * SECONDS_PER_DAY


@dataclass(frozen=True, slots=True)
class Wear:
    """What is assumed about how writing wears a drive out.

    Args:
        rated_amplification: bytes that reach the flash for a byte written, in the test that the
            rating comes from.
        amplification: likewise for what is written here.
        retention_factor: how many times more often cells can be written when data need not stay
            readable for as long as the rating promises.

    Raises:
        ConfigError: if a number is not above 0.
    """

    rated_amplification: float = 1.0
    amplification: float = 1.0
    retention_factor: float = 1.0

    def __post_init__(self) -> None:
        for name in ("rated_amplification", "amplification", "retention_factor"):
            positive(f"wear: {name}", getattr(self, name))

    @property
    def factor(self) -> float:
        """Bytes that can be written for each byte of the rating."""
        return self.rated_amplification / self.amplification * self.retention_factor


#: The maker's rating as it is: what a warranty goes by.
AS_RATED = Wear()
#: Large sequential writes instead of the rating's random ones; nothing about retention.
SEQUENTIAL = Wear(rated_amplification=2.5)
#: SSDTrain's: sequential writes, and data that is kept for a day instead of three years.
SSDTRAIN = Wear(rated_amplification=2.5, retention_factor=86.0)


def required_write_rate(activation_bytes: float, step_seconds: float) -> float:
    """Bytes per second at which a device must write to hide its activations.

    They are written during the forward pass, which is taken as half of the step.

    Args:
        activation_bytes: that one device writes in a step.
        step_seconds: of a step.

    Raises:
        ConfigError: if the step takes no time.
    """
    positive("step_seconds", step_seconds)
    return activation_bytes / (step_seconds / 2)


def lifespan_seconds(
    endurance_bytes: float, step_seconds: float, written_bytes: float, wear: Wear = AS_RATED
) -> float:
    """Seconds of training until drives have written what they can.

    Args:
        endurance_bytes: that the drives are rated for, all together.
        step_seconds: of a step.
        written_bytes: to all of them, in a step.
        wear: what is assumed beyond the rating.

    Returns:
        Seconds; infinite if nothing is written.

    Raises:
        ConfigError: if endurance or step are not above 0.
    """
    positive("endurance_bytes", endurance_bytes)
    positive("step_seconds", step_seconds)
    if written_bytes <= 0:
        return float("inf")
    return endurance_bytes * wear.factor * step_seconds / written_bytes


def bytes_per_day(written_bytes: float, step_seconds: float) -> float:
    """Bytes written in a day of training without a pause.

    Raises:
        ConfigError: if the step takes no time.
    """
    positive("step_seconds", step_seconds)
    return written_bytes / step_seconds * SECONDS_PER_DAY
