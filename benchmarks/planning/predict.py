"""Steps that were replayed before they were trained, relative to the steps as they were."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from benchmarks.activations.models import THIRTY_MILLION, TINY, Shape
from benchmarks.disks import loop_disk, throttle, why_not
from benchmarks.io.results import Result, Skipped
from benchmarks.machine import cores, say
from benchmarks.turns import Subject
from offload_strategy.plan_runtime.lifetime_plan import plan_lifetimes, usable_bytes
from offload_strategy.plan_runtime.profile import PathRates, Profile
from offload_strategy.plan_runtime.replay import StepReplay, replay
from offload_strategy.units import GiB, MiB

_DISK_BYTES = 24 * GiB
#: Of the saved tensors that what is planned for of a limit leaves room for.
_ROOM = 0.5
_MEDIAN_ERROR, _WORST_ERROR, _PEAK_ERROR = 0.07, 0.15, 0.10

_WIDE = replace(THIRTY_MILLION, width=768, layers=4)


@dataclass(frozen=True)
class Case:
    """A configuration.

    Args:
        model: of `benchmarks.activations.models`.
        shape: of it.
        batch: sequences.
        overlap: of the optimizer whose states leave; None if they stay.
        limited: whether memory is, so that activations leave.
        rate: bytes per second of the path, in each direction.
    """

    model: str
    shape: Shape
    batch: int
    overlap: Literal["commit", "eager", "off"] | None
    limited: bool
    rate: float

    def __str__(self) -> str:
        """For tables."""
        clients = ["activations"] * self.limited
        clients += [f"states, {self.overlap}"] * (self.overlap is not None)
        return (
            f"{self.model} {self.shape.width}x{self.shape.layers}, batch {self.batch}: "
            f"{' and '.join(clients)}, {self.rate / 1e6:.0f} MB/s"
        )


_S = THIRTY_MILLION
CASES = (
    Case("GPT", _S, 4, None, True, 150e6),
    Case("GPT", _S, 2, None, True, 300e6),
    Case("BERT", _S, 4, None, True, 200e6),
    Case("T5", _S, 2, None, True, 150e6),
    Case("UNet", _S, 2, None, True, 200e6),
    Case("GPT", _S, 2, "commit", False, 200e6),
    Case("GPT", _S, 2, "eager", False, 150e6),
    Case("GPT", _S, 2, "off", False, 300e6),
    Case("BERT", _WIDE, 2, "eager", False, 100e6),
    Case("GPT", _S, 4, "commit", True, 300e6),
    Case("BERT", _S, 4, "eager", True, 200e6),
    Case("GPT", _WIDE, 4, "eager", True, 400e6),
)


@dataclass(frozen=True)
class Outcome:
    """What was predicted, and what happened."""

    case: str
    predicted: float
    measured: float
    predicted_peak: int
    measured_peak: int
    stalls: dict[str, float]
    free_seconds: float

    @property
    def error(self) -> float:
        """Of the step time, as a share of what was measured."""
        return self.predicted / self.measured - 1

    @property
    def peak_error(self) -> float:
        """Of the peak."""
        return self.predicted_peak / self.measured_peak - 1


def predict(directory: Path, steps: int, quick: bool) -> tuple[str, list[Result], list[Any]]:
    """Profile each case on a free path, replay it on the slow one, and then train it there.

    Returns:
        The table, the claims, and all figures.
    """
    reason = why_not()
    if reason is not None:
        raise Skipped(reason)
    outcomes = []
    with (
        tempfile.TemporaryDirectory(dir=directory) as folder,
        loop_disk(Path(folder), _DISK_BYTES) as disk,
        throttle() as limits,
        limits.entered(),
    ):
        for case in CASES:
            case = replace(case, shape=TINY) if quick else case
            say(str(case))
            limits.limit(disk)
            with ExitStack() as stack:
                options = {
                    **asdict(case), "dir": str(disk.directory), "threads": cores(), "steps": steps,
                }  # fmt: skip
                subject = stack.enter_context(
                    Subject("benchmarks.planning.subject", str(case), options)
                )
                file = Path(folder) / "profile.json"
                subject.ask({"file": str(file)})
                profile = Profile.load(file)
                found, limit = replayed_step(profile, case.rate, limited=case.limited)
                limits.limit(disk, read=int(case.rate), write=int(case.rate))
                answer = subject.ask({"device_memory": limit})
            outcomes.append(
                Outcome(
                    str(case),
                    found.step_seconds,
                    answer["seconds"],
                    found.peak_bytes,
                    int(answer["peak_bytes"]),
                    dict(found.stalls),
                    profile.step_seconds + sum(update.seconds for update in profile.updates),
                )
            )
            last = outcomes[-1]
            say(f"{last.predicted:.2f} s predicted, {last.measured:.2f} s: {last.error:+.1%}")
    return _table(outcomes), _claims(outcomes), [asdict(outcome) for outcome in outcomes]


def replayed_step(profile: Profile, rate: float, *, limited: bool) -> tuple[StepReplay, int | str]:
    """The step on a path of that rate, and the limit of memory to train with."""
    profile = replace(profile, paths=(PathRates("path", read=rate, write=rate),))
    if not limited:
        return replay(profile), "auto"
    usable = int(profile.other_bytes + _ROOM * (profile.peak_bytes - profile.other_bytes))
    share = usable_bytes(GiB, keeps_freed=profile.keeps_freed) / GiB
    return replay(profile, plan_lifetimes(profile, usable)), int(usable / share)


def _claims(outcomes: Sequence[Outcome]) -> list[Result]:
    errors = [abs(outcome.error) for outcome in outcomes]
    peaks = [abs(outcome.peak_error) for outcome in outcomes]
    found = {
        "step time: median error": (statistics.median(errors), _MEDIAN_ERROR),
        "step time: worst error": (max(errors), _WORST_ERROR),
        "peak of memory: worst error": (max(peaks), _PEAK_ERROR),
    }
    return [
        Result(name, 100 * error, 0.0, "%", error, asked, at_least=False)
        for name, (error, asked) in found.items()
    ]


def _table(outcomes: Sequence[Outcome]) -> str:
    lines = [
        "| configuration | computing, s | predicted, s | measured, s | | waits predicted, s "
        "| peak predicted, MiB | measured, MiB | |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for one in outcomes:
        lines.append(
            f"| {one.case} | {one.free_seconds:.2f} | {one.predicted:.2f} | {one.measured:.2f} "
            f"| {one.error:+.1%} | {sum(one.stalls.values()):.2f} "
            f"| {one.predicted_peak / MiB:.0f} | {one.measured_peak / MiB:.0f} "
            f"| {one.peak_error:+.1%} |"
        )
    return "\n".join(lines)
