"""The profile of a step: its tensors with their sizes and times of use, its updates, its paths.

A lifetime plan and a replay start from it. Times are seconds from the start of the forward pass
without the time in which training waited. So a profile that was taken with offload is the same as
one that was taken without.

Profiles, plans and comparisons are saved as JSON. A file of another format is refused, and so is
one that contradicts the types of its dataclass.
"""

from __future__ import annotations

import json
import math
import os
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import Field, TypeAdapter, ValidationError

from offload_strategy.errors import ConfigError
from offload_strategy.telemetry import json_for_others

#: Format of JSON files; another one is refused.
FORMAT = 1

_Data = TypeVar("_Data")


@dataclass(frozen=True, slots=True)
class TensorLife:
    """The lifetime of one tensor within a step."""

    name: str  # For people
    nbytes: Annotated[int, Field(ge=0)]
    # The second of its creation, and that of its use in backward, after which it is gone
    uses: tuple[float, float]
    # Until when its memory is in use even if it was offloaded, because training references it
    # otherwise (a skip connection, an output)
    held_until: float = 0.0

    def __post_init__(self) -> None:
        if list(self.uses) != sorted(self.uses) or not all(map(math.isfinite, self.uses)):
            raise ValueError(f"{self.name}: uses must be numbers that rise")


@dataclass(frozen=True, slots=True)
class Update:
    """An optimizer update that computes for some seconds once its gradients are final."""

    ready_at: float
    seconds: float
    read_bytes: int
    written_bytes: int


@dataclass(frozen=True, slots=True)
class PathRates:
    """Rates of a path, or of several together, in bytes per second; both run concurrently."""

    name: str
    read: Annotated[float, Field(gt=0)]
    write: Annotated[float, Field(gt=0)]


@dataclass(frozen=True, slots=True)
class Profile:
    """A step as it is without offload; can be saved as JSON.

    Raises a ValueError if figures contradict each other.
    """

    forward_seconds: float  # Until backward starts
    step_seconds: float  # Of all computation, without updates
    tensors: tuple[TensorLife, ...]  # May be offloaded; in the order of their creation
    # Largest number of bytes of everything else in memory: weights, gradients, workspaces
    other_bytes: int = 0
    # Baseline memory over the step as (seconds, bytes), ascending, the first at 0; empty if only
    # its maximum is known
    others: tuple[tuple[float, int], ...] = ()
    updates: tuple[Update, ...] = ()  # In the order in which they become ready
    paths: tuple[PathRates, ...] = ()  # The one to which tensors may be offloaded, if any
    shared_cores: bool = False  # Whether updates run on the cores that run the model
    # Seconds of computation that are lost for each byte of a tensor that a path moves. What
    # updates cost in this way is part of the times
    io_overhead: float = 0.0
    # Whether the memory is the host's, where the C library keeps some of freed tensors
    keeps_freed: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.forward_seconds <= self.step_seconds:
            raise ValueError("forward_seconds must lie within step_seconds")
        moments = [moment for moment, _ in self.others]
        if moments != sorted(moments) or moments[:1] not in ([], [0.0]):
            raise ValueError("others must begin at 0 and rise")
        if self.others and max(nbytes for _, nbytes in self.others) > self.other_bytes:
            raise ValueError("others must nowhere be more than other_bytes")
        if len(self.paths) > 1:
            raise ValueError("paths must be one at most, with the rates of all together")

    @property
    def path(self) -> PathRates | None:
        """The path to which tensors may be offloaded."""
        return self.paths[0] if self.paths else None

    @property
    def baseline(self) -> tuple[tuple[float, int], ...]:
        """Baseline memory over the step, as in `others`, also if only its maximum is known."""
        return self.others or ((0.0, self.other_bytes),)

    @property
    def peak_bytes(self) -> int:
        """Peak memory of the step without offload."""
        return MemoryCurve(self).peak_bytes

    def save(self, file: Path) -> None:
        """Write the profile as JSON."""
        save_json(file, asdict(self))

    @classmethod
    def load(cls, file: Path) -> Profile:
        """Read a profile; raise a ConfigError if the file is something else."""
        how = "Take one with OffloadEngine.profile().save, or `ssd-offload plan --write-profile`."
        return load_json(file, cls, "a profile", how)


class MemoryCurve:
    """Required bytes over a step: of tensors, and of baseline memory."""

    def __init__(self, profile: Profile) -> None:
        step = profile.step_seconds
        changes = Counter({0.0: 0, step: 0})
        for (_, before), (moment, nbytes) in pairwise([(0.0, 0), *profile.baseline]):
            changes[min(moment, step)] += nbytes - before
        for tensor in profile.tensors:
            begin, end = tensor.uses
            changes[min(begin, step)] += tensor.nbytes
            changes[min(end, step)] -= tensor.nbytes
        #: Starts of segments, and the end of the step.
        self.moments = sorted(changes)
        self.levels = list(accumulate(changes[moment] for moment in self.moments[:-1]))
        # By bytes and limit: `_relieved` at the start of each segment, until levels change.
        self._reliefs: dict[tuple[int, int], list[float]] = {}

    @property
    def peak_bytes(self) -> int:
        """The largest number of required bytes."""
        return max(self.levels, default=0)

    def add(self, begin: float, end: float, nbytes: int) -> None:
        """Add bytes (or subtract them) in a span; what lies beyond the step does not count."""
        step = self.moments[-1]
        low, high = self._cut(min(begin, step)), self._cut(min(end, step))
        for place in range(low, high):
            self.levels[place] += nbytes
        self._reliefs.clear()

    def relief(self, begin: float, end: float, nbytes: int, limit: int) -> float:
        """Return the relief above a limit, in byte seconds, if so many bytes are gone in a span."""
        if end <= begin:
            return 0.0
        return self._relieved(end, nbytes, limit) - self._relieved(begin, nbytes, limit)

    def _relieved(self, until: float, nbytes: int, limit: int) -> float:
        """Return the relief from the start of the step on. A plan asks thousands of times."""
        sums = self._reliefs.get((nbytes, limit))
        if sums is None:
            lengths = (after - before for before, after in pairwise(self.moments))
            reliefs = (
                min(level - limit, nbytes) * seconds if level > limit else 0.0
                for level, seconds in zip(self.levels, lengths, strict=True)
            )
            sums = self._reliefs[nbytes, limit] = list(accumulate(reliefs, initial=0.0))
        place = bisect_right(self.moments, until) - 1
        if place == len(self.levels):
            return sums[place]
        above = max(0, self.levels[place] - limit)
        return sums[place] + min(above, nbytes) * (until - self.moments[place])

    def since(self, begin: float, end: float, level: int) -> float:
        """Return from when on, after `begin`, at most `level` bytes are required until `end`."""
        place = bisect_left(self.moments, end) - 1
        while place >= 0 and self.moments[place + 1] > begin:
            if self.levels[place] > level:
                return self.moments[place + 1]
            place -= 1
        return begin

    def _cut(self, moment: float) -> int:
        """Return the segment that starts at a time, splitting one if necessary."""
        place = bisect_left(self.moments, moment)
        if place == len(self.moments) or self.moments[place] != moment:
            self.moments.insert(place, moment)
            self.levels.insert(place, self.levels[place - 1])
        return place


# ---------------------------------------------------------------------- files
def save_json(file: Path, figures: Mapping[str, Any]) -> None:
    """Write figures by name as JSON; raise a ConfigError if that fails."""
    write_text(file, json_for_others({"format": FORMAT, **figures}, indent=1) + "\n")


def check_writable(file: Path, where: str = "", *, replace: bool = True) -> None:
    """Raise a ConfigError before work whose result could not be written, or overwrites a file."""
    if not file.absolute().parent.is_dir():
        reason = "its folder does not exist"
    elif file.is_dir():
        reason = "it is a folder"
    elif file.exists() and not replace:
        raise ConfigError(f"{file} is there already; give --force to overwrite it")
    elif not os.access(file if file.exists() else file.absolute().parent, os.W_OK):
        reason = "this user may not write there"
    else:
        return
    raise ConfigError(f"{where}{file} cannot be written: {reason}. Name a file elsewhere.")


def write_text(file: Path, text: str) -> None:
    """Write a text file; raise a ConfigError if that fails."""
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{file} cannot be written: {error.strerror or error}") from error


def load_json(file: Path, kind: type[_Data], what: str, how: str) -> _Data:
    """Read a dataclass from JSON; raise a ConfigError if the file has something else.

    The error names the content, such as "a profile", and says how to write such a file.
    """
    try:
        found: Any = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(found, dict) or found.pop("format", None) != FORMAT:
            raise ValueError(f"it is not of format {FORMAT}")
        return TypeAdapter(kind).validate_python(found)
    except (OSError, ValueError) as error:
        reason = str(error)
        if isinstance(error, ValidationError):  # whose own text has several lines
            detail = error.errors(include_url=False)[0]
            where = ".".join(map(str, detail["loc"]))
            message = detail["msg"].removeprefix("Value error, ")
            reason = f"{where}: {message}" if where else message
            if isinstance(detail["input"], str | int | float):
                reason += f", not {detail['input']!r}"
        raise ConfigError(f"{file} cannot be read as {what}: {reason}. {how}") from error
