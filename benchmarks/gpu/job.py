"""What contenders of a table train, as JSON for their processes."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.activations.models import TINY, Shape

#: SSDTrain's evaluation, table III: the smallest hidden size, four layers, sequence 1024.
WIDE = Shape(width=8192, layers=4, heads=64, sequence=1024, dtype="bfloat16")
#: 1.3 billion parameters (GPT-3 XL).
BILLION = Shape(width=2048, layers=24, heads=16, sequence=1024, vocabulary=32000, tied=False)


@dataclass(frozen=True)
class Job:
    """A model, its batch and where it trains.

    Args:
        model: of `benchmarks.activations.models.MODELS`.
        shape: how large.
        batch: sequences of a step.
        device: type of the device; "cpu" to see that everything runs.
        updates: whether an optimizer takes part; else steps end with backward.
        autocast: whether forward runs in bfloat16 under autocast.
        host: capacity of our dram tier.
        pinned: bytes of our buffers.
    """

    model: str
    shape: Shape
    batch: int
    device: str = "cuda"
    updates: bool = False
    autocast: bool = False
    host: str = "48GiB"
    pinned: str = "8GiB"

    @classmethod
    def of(cls, options: dict[str, Any]) -> Job:
        """Of what `options` made."""
        return cls(**{**options, "shape": Shape(**options["shape"])})

    def options(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)

    @property
    def tokens(self) -> int:
        """Of a step."""
        return self.batch * self.shape.sequence


def tiny(job: Job) -> Job:
    """The same with a model of no size, to see that everything runs."""
    return Job(
        **{
            **job.__dict__,
            "shape": Shape(**{**asdict(TINY), "sequence": 64, "dtype": job.shape.dtype}),
            "batch": 2,
            "host": "256MiB",
            "pinned": "32MiB",
        }
    )
