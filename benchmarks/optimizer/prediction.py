"""Fuyou's equations compared with measured step times.

The profile is plain PyTorch's: seconds of its forward pass, its backward pass and its update. The
rates are the disk's of the same run, and this host's: of its memory, and what plain PyTorch loses
during concurrent transfers. Everything else is counted: bytes of states by parameters, and the
activations that the engine chose to move.
"""

from __future__ import annotations

import contextlib
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from benchmarks.io.contender import Contender
from benchmarks.io.results import Context, Result, Skipped
from benchmarks.optimizer.contender_sets import FIRST, OURS, SECOND, THIRD, Choice
from benchmarks.optimizer.contenders import PLAIN, plain_options
from benchmarks.optimizer.session import Outcome, start
from benchmarks.optimizer.table import session_of
from offload_strategy.optimizer.user_class.inner_step import CHUNK_ELEMENTS
from offload_strategy.planner.step_time import Rates, StageLoad, StepTime
from offload_strategy.units import MiB, parse_size

_WITHIN = 0.15
_ELEMENTS = 1 << 24
#: Steps that are timed with and without concurrent transfers, and how many move at a time.
_STEPS, _MOVED = 3, 256 * MiB


@dataclass(frozen=True)
class HostRates:
    """What this host does with memory, in seconds per element of fp32.

    Args:
        copy: of one tensor into another.
        convert: to float32 from bfloat16, and back, a part at a time.
        total: to add up the bits of all.
    """

    copy: float
    convert: float
    total: float

    @classmethod
    def measure(cls) -> HostRates:
        """The best of a few runs, with the memory there already."""
        source, target = torch.ones(_ELEMENTS), torch.ones(_ELEMENTS)
        narrow = source.bfloat16()

        def convert() -> None:
            for part in narrow.split(CHUNK_ELEMENTS):
                wide = target[: part.numel()].copy_(part)
                part.copy_(wide)

        words = source.view(torch.int64)
        return cls(_best(lambda: target.copy_(source)), _best(convert), _best(words.sum))


def _best(run: Callable[[], object]) -> float:
    seconds = []
    for _ in range(5):
        begin = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - begin)
    return min(seconds) / _ELEMENTS


def measured_io_overhead(context: Context, choice: Choice, model: str) -> float:
    """Seconds that plain PyTorch's steps lose for each byte that our store moves meanwhile.

    The store writes and reads in another process: what is measured is the machine, not the engine.
    """
    io_overheads = []
    with contextlib.ExitStack() as stack:
        task, directory = choice.task(model, context), context.directory
        plain, _ = start(stack, PLAIN, plain_options(), task, directory)
        store = stack.enter_context(
            Contender("ours", directory=str(directory), count=4, nbytes=_MOVED // 4)
        )

        def steps() -> float:
            answer = plain.ask({"steps": _STEPS})["steps"]
            return sum(step["seconds"] for step in answer)

        steps()
        for _ in range(context.repeats):
            alone = steps()
            moved: list[int] = []
            enough = threading.Event()
            mover = threading.Thread(target=_move, args=(store, moved, enough))
            mover.start()
            try:
                with_io, nbytes = steps(), sum(moved)
            finally:
                enough.set()
                mover.join()
            io_overheads.append(max(0.0, with_io - alone) / nbytes)
    return statistics.median(io_overheads)


def _move(store: Contender, moved: list[int], enough: threading.Event) -> None:
    while not enough.is_set():
        for direction in ("write", "read"):
            store.ask(direction)
            moved.append(_MOVED)


def prediction(context: Context, choice: Choice) -> tuple[str, list[Result]]:
    """Predict every setting of ours that the table has; returns a table and the claims."""
    host = HostRates.measure()
    io_overheads = {model: measured_io_overhead(context, choice, model) for model in choice.models}
    lines = [
        f"memory: {4 / host.copy / 1e9:.1f} GB/s copied, {host.convert * 1e9:.3f} ns an element "
        "from bfloat16 to float32 and back",
        *(
            f"{model}: plain PyTorch loses {io_overhead * 1e9:.3f} s for each GB of other I/O"
            for model, io_overhead in io_overheads.items()
        ),
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
                predicted = predict(name, outcome, host, io_overheads[model], choice)
                measured = outcome.rows[name].median("seconds")
                off = predicted.seconds / measured - 1
                lines.append(
                    f"| {model} | {name} | {predicted.seconds:.3f} | {measured:.3f} | {off:+.1%} "
                    f"| {predicted.stages[0].seconds:.3f} "
                    f"| {predicted.stages[1].seconds:.3f} "
                    f"| {_limit(predicted)} |"
                )
                results.append(
                    Result(
                        f"{model}: {name}: measured relative to predicted, off by",
                        measured, predicted.seconds, "s", abs(off), _WITHIN, at_least=False,
                        details={one.name: dict(one.limits) for one in predicted.stages},
                    )
                )  # fmt: skip
    return "\n".join(lines), results


def predict(
    name: str, outcome: Outcome, host: HostRates, io_overhead: float, choice: Choice
) -> StepTime:
    """What one of ours should take.

    Args:
        name: of `OURS`.
        outcome: of the session that it was in, for plain PyTorch and the disk.
        host: rates of memory.
        io_overhead: seconds that plain PyTorch loses for each byte of I/O.
        choice: has the size of our buffers.
    """
    ours, plain, row = choice.ours(name), outcome.rows[PLAIN], outcome.rows[name]
    parameters = outcome.parameters
    update = plain.median("step_seconds")
    waiting = 0.0
    if ours.overlap == "commit":
        # The update runs on a copy of the weights, which is copied back at `step()`, and the bits
        # of the weights are added up before both. What of them finds no room waits on the disk.
        update += 2 * parameters * (host.copy + host.total)
        waiting = max(0.0, 4 * parameters - parse_size(ours.pinned) / 2)
    if ours.state_dtype == "bfloat16":
        update += 2 * parameters * host.convert  # both moments
    on_disk = ours.states_bytes(parameters) * (1 - ours.host_share)
    activations = row.median("offload/activations/read_bytes") if ours.activations else 0.0
    rates = Rates(outcome.disk.read, outcome.disk.write, io_overhead=io_overhead)
    moved = on_disk + waiting
    # An update shares the cores with backward.
    backward = plain.median("backward_seconds") + update
    loads = {
        "forward": StageLoad(plain.median("forward_seconds"), written=activations),
        "backward": StageLoad(backward, read=moved + activations, written=moved),
    }
    return StepTime(tuple(rates.stage(*one) for one in loads.items()))


def _limit(predicted: StepTime) -> str:
    moving = predicted.stages[-1].limit == "paths"
    return "the disk" if moving else "computation"
