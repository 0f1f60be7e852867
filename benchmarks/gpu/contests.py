"""Who trains how fast with how much memory: activations, optimizer states, 7 billion parameters.

Contenders train one after the other, plain PyTorch first and last, so that a drift of the machine
shows.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.activations.models import Shape
from benchmarks.gpu import contenders as who
from benchmarks.gpu.contenders import Job
from benchmarks.gpu.training import median
from benchmarks.gpu.worker import Worker
from benchmarks.io.results import Result, Skipped, markdown_table
from benchmarks.machine import say
from benchmarks.turns import Deadline
from offload_strategy.units import GiB, MiB

Rows = Mapping[str, Any]
#: Who must be as fast as whom: what SSDTrain reaches, of plain training; and each peer that keeps
#: states where we keep them.
_FASTER = (
    (who.TO_HOST, who.PLAIN, 0.99),
    (who.TO_DISK, who.PLAIN, 0.99),
    (who.STATES_DISK, who.ZERO_DISK, 1.0),
    *((who.STATES_HOST, peer, 1.0) for peer in (who.TORCHAO, who.FSDP2, who.ZERO_HOST)),
)
#: Of plain training's activation peak: SSDTrain saves 28 to 47 %.
_PEAK = 0.53
_AGAIN = "plain, again at the end"
#: Device memory that the large model may have, for each of its parameters: plain training has
#: weights, gradients and two moments in float32, 16 bytes, beside what it computes with.
_LIMIT_BYTES = 12


@dataclass(frozen=True)
class Contest:
    """One comparison: its title, what is trained, and by whom (a brief run: by the first two)."""

    title: str
    job: Job
    names: Sequence[str]


@dataclass
class Found:
    """What a part of the evidence found: figures for JSON, Markdown by title, and claims."""

    figures: dict[str, Any] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    claims: list[Result] = field(default_factory=list)


# ---------------------------------------------------------------------- what must hold
def claims(where: str, rows: Rows, names: Sequence[str], *, judged: bool) -> list[Result]:
    """Bits of plain training; speed and memory, if they are judged; that a large model trains."""
    found, plain = [], rows.get(who.PLAIN)
    for name in (name for name in who.OURS if name in rows and plain is not None):
        mine, theirs = (row["losses"] + row["gradients"] for row in (rows[name], plain))
        same = sum(one == other for one, other in zip(mine, theirs, strict=True))
        told = f"{where}: {name}: bits of plain training"
        found.append(Result(told, same, len(theirs), "figures", same / len(theirs), 1.0))
    for ours, peer, threshold in _FASTER:
        if ours in rows and peer in rows:
            rates = [1 / median(rows[name], "seconds") for name in (ours, peer)]
            told, ratio = f"{where}: {ours}: speed beside {peer}", rates[0] / rates[1]
            found.append(Result(told, *rates, "steps/s", ratio, threshold, judged=judged))
    for name in (name for name in (who.TO_HOST, who.TO_DISK) if name in rows and plain):
        peaks = [median(row, "peak_bytes") / MiB for row in (rows[name], plain)]
        told, ratio = f"{where}: {name}: activation peak beside plain", peaks[0] / max(1, peaks[1])
        found.append(Result(told, *peaks, "MiB", ratio, _PEAK, at_least=False, judged=judged))
    for name in names if who.LARGE in names else ():
        held = float((name in rows) is (name != who.PLAIN))
        told = f"{where}: {name} " + ("is out of memory" if name == who.PLAIN else "trains")
        found.append(Result(told, held, 1, "runs", held, 1))
    return found


# ---------------------------------------------------------------------- who trains what
#: The three sizes of SSDTrain's evaluation, table III, of 16 sequences of 1024 tokens.
ACTIVATIONS = tuple(
    Contest(
        f"activations, GPT {width} wide",
        Job(Shape(width, layers, width // 128, 1024, dtype="bfloat16"), 16),
        (
            who.PLAIN, who.TO_HOST, who.TO_DISK, who.AUTO, who.TRL, who.RECOMPUTE, who.SAVE_ON_CPU,
        ),
    )
    for width, layers in ((8192, 4), (12288, 3), (16384, 2))
)  # fmt: skip
#: 1.3 billion parameters (GPT-3 XL).
OPTIMIZER = Contest(
    "optimizer states, GPT of 1.3 billion parameters",
    Job(Shape(2048, 24, 16, 1024, 32000, tied=False), 16, updates=True, autocast=True),
    (
        who.PLAIN, who.STATES_HOST, who.STATES_DISK, who.STATES_DEVICE, who.TORCHAO, who.FSDP2,
        who.ZERO_HOST, who.ZERO_DISK, who.STATES_HOST_EAGER, who.STATES_DISK_EAGER,
    ),
)  # fmt: skip
#: 32 layers 4096 wide.
LARGE = Contest(
    "7 billion parameters that plain training has no memory for",
    Job(
        Shape(4096, 32, 32, 2048, 32000, tied=False),
        8,
        updates=True,
        autocast=True,
        limit=_LIMIT_BYTES,
        recompute=True,
    ),
    (who.PLAIN, who.LARGE, who.LARGE_DEVICE, who.LARGE_STREAMED),
)


# ---------------------------------------------------------------------- the contest
def run(
    contests: Sequence[Contest], worker: Worker, seconds: float, *, steps: int, judged: bool
) -> Found:
    """Let contenders train, one after the other, in equal shares of the time, so many steps each.

    `judged` says whether speed and memory mean something here; bits always do.
    """
    found, deadline = Found(), Deadline(seconds)
    for number, contest in enumerate(contests):
        rows, skipped = _train(contest, worker, deadline.left / (len(contests) - number), steps)
        found.claims += claims(contest.title, rows, contest.names, judged=judged)
        found.texts[contest.title] = markdown(rows, skipped, contest.job)
        found.figures[contest.title] = {
            "job": asdict(contest.job), "contenders": rows, "skipped": skipped,
        }  # fmt: skip
    return found


def _train(
    contest: Contest, worker: Worker, seconds: float, steps: int
) -> tuple[dict[str, Any], dict[str, str]]:
    rows: dict[str, Any] = {}
    skipped: dict[str, str] = {}
    deadline = Deadline(seconds)
    turns = [*contest.names, *([_AGAIN] if contest.job.limit is None else [])]
    for number, name in enumerate(turns):
        share = deadline.left / (len(turns) - number)
        if share <= 0:
            skipped[name] = "no time was left"
            continue
        trains = who.PLAIN if name == _AGAIN else name
        options = {"contender": trains, "job": asdict(contest.job), "steps": steps}
        begin = time.monotonic()
        try:
            rows[name] = worker.do("training.train", options, share, alone=trains in who.ALONE)
            told = f"{median(rows[name], 'seconds'):.3f} s a step"
        except (Skipped, RuntimeError) as why:
            # Of a process that ended: the error below its traceback.
            skipped[name] = told = str(why).strip().splitlines()[-1][:500]
        say(f"{contest.title}: {name}: {told} ({time.monotonic() - begin:.0f} s in all)")
    return rows, skipped


_COLUMNS = (
    "", "tokens/s", "of plain", "step, s", "launched after, s", "step's peak above its begin, MiB",
    "of plain", "device memory, GiB", "host memory, GiB",
)  # fmt: skip


def markdown(rows: Rows, skipped: Mapping[str, str], job: Job) -> str:
    """A table of what was found."""
    cells = []
    for name, found in rows.items():
        plain = rows.get(who.PLAIN, found)
        seconds, peak = median(found, "seconds"), median(found, "peak_bytes")
        of_plain = median(plain, "seconds") / seconds, peak / max(1.0, median(plain, "peak_bytes"))
        whole = [median(found, figure) / GiB for figure in ("device_bytes", "host_bytes")]
        launched = median(found, "launch_seconds")
        speed = (job.tokens / seconds, of_plain[0], seconds, launched)
        cells.append((name, *speed, peak / MiB, of_plain[1], *whole))
    parameters = max((found["parameters"] for found in rows.values()), default=0)
    limit = (
        "" if job.limit is None else f", {(job.memory_limit or 0) / GiB:.3g} GiB of device memory"
    )
    told = f"{parameters / 1e6:,.1f}M parameters, {job.tokens:,} tokens a step{limit}.\n\n"
    left_out = (f"\n\n{name} did not take part: {why}" for name, why in skipped.items())
    return told + markdown_table(_COLUMNS, cells) + "".join(left_out)
