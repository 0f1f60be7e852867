"""What a step makes, uses and leaves idle, and when: numbers that a plan and a replay start from.

Times are of training alone: seconds from the begin of the forward pass, in which training computed
and did not wait. So a profile that was taken with offload is the same as one without.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from offload_strategy.errors import ConfigError

#: Of the file; another one is refused.
FORMAT = 1


@dataclass(frozen=True, slots=True)
class TensorLife:
    """One tensor within a step.

    Args:
        name: for people: what it is, and where it was made.
        nbytes: of it.
        uses: seconds at which training uses it, rising. The first is when it is made, unless it
            lives on from step to step.
        cyclic: whether it lives on: from the last use of a step to the first one of the next it is
            idle, too.
        held_until: seconds until which its memory is not free even if it has left, as training
            holds on to it otherwise (a skip connection, an output).
    """

    name: str
    nbytes: int
    uses: tuple[float, ...]
    cyclic: bool = False
    held_until: float = 0.0

    def __post_init__(self) -> None:
        if self.nbytes < 0 or not self.uses:
            raise ValueError(f"{self.name}: needs bytes and at least one use")
        if list(self.uses) != sorted(self.uses) or not all(map(math.isfinite, self.uses)):
            raise ValueError(f"{self.name}: uses must be numbers that rise")

    def idle_periods(self, step_seconds: float) -> list[tuple[float, float]]:
        """When it lies unused: between uses; a cyclic tensor also beyond the end of the step."""
        periods = list(zip(self.uses, self.uses[1:], strict=False))
        if self.cyclic:
            periods.append((self.uses[-1], step_seconds + self.uses[0]))
        return periods


@dataclass(frozen=True, slots=True)
class Block:
    """A part of the forward pass that may be computed again in backward, from its inputs.

    Args:
        name: of the module.
        first: number of the first tensor that is saved within.
        end: number of the first one after it.
        begins_at: seconds.
        ends_at: seconds; between both it is computed.
        input_bytes: that must be there to compute it again.
    """

    name: str
    first: int
    end: int
    begins_at: float
    ends_at: float
    input_bytes: int

    @property
    def seconds(self) -> float:
        """Of computing."""
        return self.ends_at - self.begins_at


@dataclass(frozen=True, slots=True)
class Update:
    """An optimizer update that runs once its gradients are final.

    Args:
        ready_at: seconds, within the step, at which they are.
        seconds: of computing.
        read_bytes: of states that it needs.
        written_bytes: of what it leaves.
    """

    ready_at: float
    seconds: float
    read_bytes: int
    written_bytes: int


@dataclass(frozen=True, slots=True)
class PathRates:
    """What one path moves, in bytes per second.

    Args:
        name: of the path.
        read: from it.
        write: to it.
        simplex: whether both directions share their time; else each has its own.
        latency: seconds that a move takes beside its bytes.
    """

    name: str
    read: float
    write: float
    simplex: bool = False
    latency: float = 0.0

    def __post_init__(self) -> None:
        for rate in (self.read, self.write):
            if not rate > 0:
                raise ValueError(f"{self.name}: bytes per second must be more than 0, got {rate}")


@dataclass(frozen=True, slots=True)
class Profile:
    """A step, as it is without any offload; saved as JSON.

    Args:
        forward_seconds: until backward begins.
        step_seconds: of computing in all, updates not included.
        tensors: what may be moved, in the order in which it is made.
        other_bytes: what else training has in memory at most: weights, gradients, workspaces.
        others: what of it there is from a moment of the step until the next: (seconds, bytes),
            rising, the first at 0; empty where only the most is known.
        blocks: that may be computed again, in the order of the forward pass; apart from each other.
        updates: of the optimizer, in the order in which they become ready.
        paths: where tensors may go.
        shared_cores: whether updates are computed on the cores that run the model.
        toll: seconds that computing loses for each byte of tensors that a path moves. What updates
            cost so lies in the times.
        about: for people: model, machine, date.
    """

    forward_seconds: float
    step_seconds: float
    tensors: tuple[TensorLife, ...]
    other_bytes: int = 0
    others: tuple[tuple[float, int], ...] = ()
    blocks: tuple[Block, ...] = ()
    updates: tuple[Update, ...] = ()
    paths: tuple[PathRates, ...] = ()
    shared_cores: bool = False
    toll: float = 0.0
    about: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 0 <= self.forward_seconds <= self.step_seconds:
            raise ValueError("forward_seconds must lie within step_seconds")
        moments = [moment for moment, _ in self.others]
        if moments != sorted(moments) or moments[:1] not in ([], [0.0]):
            raise ValueError("others must begin at 0 and rise")
        if any(not 0 <= one.first <= one.end <= len(self.tensors) for one in self.blocks):
            raise ValueError("blocks must be of tensors that there are")
        if self.others and max(nbytes for _, nbytes in self.others) > self.other_bytes:
            raise ValueError("others must nowhere be more than other_bytes")

    @property
    def tensors_bytes(self) -> int:
        """Of all that may be moved."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def beside(self) -> tuple[tuple[float, int], ...]:
        """What else is in memory, as `others`, also where only the most is known."""
        return self.others or ((0.0, self.other_bytes),)

    @property
    def peak_bytes(self) -> int:
        """What a step needs without offload."""
        return peak_of(self.tensors, self.step_seconds, self.beside)

    def save(self, path: Path) -> None:
        """Write it as JSON."""
        path.write_text(json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> Profile:
        """Read it.

        Raises:
            ConfigError: it is no profile.
        """
        try:
            found = json.loads(path.read_text())
            if not isinstance(found, dict) or found.pop("format", None) != FORMAT:
                raise ValueError(f"it is not of format {FORMAT}")
            return cls(
                **{
                    **found,
                    "tensors": tuple(
                        TensorLife(**{**one, "uses": tuple(one["uses"])})
                        for one in found["tensors"]
                    ),
                    "others": tuple((at, nbytes) for at, nbytes in found.get("others", ())),
                    "blocks": tuple(Block(**one) for one in found.get("blocks", ())),
                    "updates": tuple(Update(**one) for one in found["updates"]),
                    "paths": tuple(PathRates(**one) for one in found["paths"]),
                }
            )
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ConfigError(
                f"{path} cannot be read as a profile: {error}. Take one with planning.profile, "
                "or with `ssd-offload plan --write-profile`."
            ) from error


def peak_of(
    tensors: Iterable[TensorLife],
    step_seconds: float,
    others: Sequence[tuple[float, int]] = (),
) -> int:
    """Bytes that are alive at the same time, at most.

    Args:
        tensors: of a step.
        step_seconds: of it.
        others: what else there is, as in a profile.
    """
    changes: list[tuple[float, int]] = []
    before = 0
    for moment, nbytes in others:
        changes.append((moment, nbytes - before))
        before = nbytes
    for tensor in tensors:
        begin, end = (0.0, step_seconds) if tensor.cyclic else (tensor.uses[0], tensor.uses[-1])
        changes += [(begin, tensor.nbytes), (math.nextafter(end, math.inf), -tensor.nbytes)]
    now = peak = 0
    for _, change in sorted(changes, key=lambda one: (one[0], one[1])):
        now += change
        peak = max(peak, now)
    return peak
