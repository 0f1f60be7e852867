"""Fuyou's equations against what steps really took.

The profile is plain PyTorch's: seconds of its forward pass, its backward pass and its update. The
rates are the disk's of the same run, and this host's: of its memory, and what computation loses
while bytes move. Everything else is counted: bytes of states by parameters, and the activations
that the engine chose to move.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.io.contender import Contender
from benchmarks.io.results import Context, Result, Skipped
from benchmarks.optimizer.contenders import PLAIN
from benchmarks.optimizer.session import Outcome
from benchmarks.optimizer.table import FIRST, OURS, SECOND, THIRD, Choice, session_of
from offload_strategy.planning.cost_model import Rates, StepProfile, StepTime, predict_step
from offload_strategy.units import MiB

_WITHIN = 0.15
_ELEMENTS = 1 << 24
#: Products of square matrices of so many rows: seconds of computation.
_SIDE, _PRODUCTS = 1024, 60


@dataclass(frozen=True)
class HostRates:
    """What this host takes for the work that offload adds.

    Args:
        copy: seconds to copy an element of fp32 from one tensor into another.
        convert: seconds for an element to float32 from bfloat16, and back.
        toll: seconds that computation loses for each byte that moves meanwhile.
    """

    copy: float
    convert: float
    toll: float

    @classmethod
    def measure(cls, directory: Path) -> HostRates:
        """Of memory the best of a few runs, with the memory there already.

        Args:
            directory: on the disk that is moved to and from.
        """
        source, target = torch.ones(_ELEMENTS), torch.ones(_ELEMENTS)
        narrow = source.bfloat16()

        def convert() -> None:
            target.copy_(narrow)
            narrow.copy_(target)

        copy, back_and_forth = _best(lambda: target.copy_(source)), _best(convert)
        return cls(copy, back_and_forth, _measured_toll(directory))


def _best(run: Callable[[], object]) -> float:
    seconds = []
    for _ in range(5):
        begin = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - begin)
    return min(seconds) / _ELEMENTS


def _measured_toll(directory: Path) -> float:
    """What computation on all cores loses while our heap writes and reads in another process."""
    left, right = torch.rand(_SIDE, _SIDE), torch.rand(_SIDE, _SIDE)

    def compute() -> float:
        begin = time.perf_counter()
        for _ in range(_PRODUCTS):
            (left @ right).tanh_()
        return time.perf_counter() - begin

    tolls = []
    with Contender("ours", directory=str(directory), count=4, nbytes=64 * MiB) as heap:
        compute()
        for _ in range(5):
            alone = compute()
            moved: list[int] = []
            enough = threading.Event()
            mover = threading.Thread(target=_move, args=(heap, moved, enough))
            mover.start()
            beside, nbytes = compute(), sum(moved)
            enough.set()
            mover.join()
            tolls.append(max(0.0, beside - alone) / nbytes)
    return statistics.median(tolls)


def _move(heap: Contender, moved: list[int], enough: threading.Event) -> None:
    while not enough.is_set():
        for direction in ("write", "read"):
            heap.ask(direction)
            moved.append(4 * 64 * MiB)


def prediction(context: Context, choice: Choice) -> tuple[str, list[Result]]:
    """Predict every setting of ours that the table has; returns a table and the claims."""
    host = HostRates.measure(context.directory)
    lines = [
        f"memory: {4 / host.copy / 1e9:.1f} GB/s copied, {host.convert * 1e9:.3f} ns an element "
        f"from bfloat16 to float32 and back; computation loses {host.toll * 1e9:.3f} s for each GB "
        "that moves meanwhile",
        "",
        "| model | | predicted, s | measured, s | off by | forward | backward + update | what "
        "limits it |",
        "|---|---|---|---|---|---|---|---|",
    ]
    results = []
    for model in choice.models:
        for session in (FIRST, SECOND, THIRD):
            try:
                outcome = session_of(context, choice, model, session)
            except Skipped:
                continue
            for name in outcome.rows:
                if name not in OURS or (session, name) == (THIRD, next(iter(OURS))):
                    continue
                predicted = predict(name, outcome, host)
                measured = outcome.rows[name].median("seconds")
                off = predicted.step / measured - 1
                lines.append(
                    f"| {model} | {name} | {predicted.step:.3f} | {measured:.3f} | {off:+.1%} "
                    f"| {predicted.forward:.3f} | {predicted.backward:.3f} "
                    f"| {_limit(predicted)} |"
                )
                results.append(
                    Result(
                        f"{model}: {name}: measured beside predicted, off by",
                        measured, predicted.step, "s", abs(off), _WITHIN, at_least=False,
                        details={"limits": predicted.limits},
                    )
                )  # fmt: skip
    return "\n".join(lines), results


def predict(name: str, outcome: Outcome, host: HostRates) -> StepTime:
    """What one of ours should take.

    Args:
        name: of `OURS`.
        outcome: of the session that it was in, for plain PyTorch and the disk.
        host: rates of memory.
    """
    ours, plain, row = OURS[name], outcome.rows[PLAIN], outcome.rows[name]
    parameters = outcome.parameters
    update = plain.median("step_seconds")
    if ours.overlap == "commit":
        # The update runs on a copy of the weights, which is copied back at `step()`.
        update += 2 * parameters * host.copy
    if ours.state_dtype == "bfloat16":
        update += 2 * parameters * host.convert  # both moments
    on_disk = ours.states_bytes(parameters) * (1 - ours.host_share)
    activations = row.median("offload/activations/read_bytes") if ours.activations else 0.0
    profile = StepProfile(
        forward_seconds=plain.median("forward_seconds"),
        backward_seconds=plain.median("backward_seconds"),
        update_seconds=update,
        states_read_bytes=on_disk,
        states_written_bytes=on_disk,
        activations_bytes=activations,
    )
    rates = Rates(outcome.disk.read, outcome.disk.write, shared_cores=True, toll=host.toll)
    return predict_step(profile, rates)


def _limit(predicted: StepTime) -> str:
    moving = predicted.limits["backward paths"] >= predicted.backward
    return "the disk" if moving else "computation"
