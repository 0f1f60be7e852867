"""What `ssd-offload plan --search` finds, relative to the presets, on machines that are emulated.

A machine is a disk behind the kernel's I/O throttle, which limits each direction by itself, and a
limit of memory. The search is given what a user knows of it (the model, the memory, the disk's
rates, how large a batch may be), measures what the cores do, and writes a config; a process trains
with that, as the config's comments say.
Presets train at every batch that is allowed, and the best batch of each counts. What is killed for
want of memory, or refuses to begin, trains nothing: 0 tokens in a second.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks import disks, memory_group
from benchmarks.activations.models import Shape
from benchmarks.disks import LoopDisk, loop_disk, throttle
from benchmarks.io.results import Result, Skipped, median_ratio
from benchmarks.machine import cores, say
from benchmarks.turns import Subject, by_turns
from offload_strategy.config import OffloadConfig
from offload_strategy.config.sources import presets
from offload_strategy.units import GiB, MiB, format_size

ROOT = Path(__file__).resolve().parents[2]
_DISK_BYTES = 24 * GiB
#: Tokens in a second, of the search's config over the best preset's.
_LEAST = 1.0
#: Steps of a process that do not count: plans and budgets are made in them.
_WARM_UP, _SHORT_WARM_UP = 5, 2
#: Steps with which batches of one preset are compared, before the best of all is measured well.
_SHORT = 2
#: Processes that each of the best trains in: one is faster than another for all of its life.
_PROCESSES = 2
#: A preset whose tokens in a second fall below this share of its best has had its best batch.
_FALLS = 0.97
_PLAIN = "plain PyTorch"
_SEARCH = "search"


@dataclass(frozen=True)
class Machine:
    """A machine to emulate.

    Args:
        name: for tables.
        memory: bytes that a process may have.
        rate: bytes per second of the disk, in each direction.
        judged: whether the search must win there.
    """

    name: str
    memory: int
    rate: int
    judged: bool = True

    def __str__(self) -> str:
        """For tables."""
        return f"{self.name} ({format_size(self.memory)}, {self.rate / 1e6:.0f} MB/s)"


@dataclass(frozen=True)
class Task:
    """What is trained.

    Args:
        shape: of the GPT.
        most: sequences of a step at most.
        machines: to train on.
    """

    shape: Shape
    most: int
    machines: tuple[Machine, ...]


#: 98 million parameters: 1.5 GiB with gradients and both moments, 1.8 with the process.
TASK = Task(
    Shape(768, 12, 12, sequence=256),
    4,
    (
        Machine("fast disk, little memory", 1 * GiB, 500_000_000),
        # Here presets nearly need what there is.
        Machine("fast disk, more memory", 1536 * MiB, 500_000_000, judged=False),
        Machine("slow disk, much memory", 16 * GiB, 60_000_000),
    ),
)
#: Mostly vocabulary: states that do not fit, and little to compute.
QUICK = Task(
    Shape(128, 2, 2, sequence=64, vocabulary=1 << 17),
    2,
    (
        Machine("fast disk, little memory", 800 * MiB, 500_000_000),
        Machine("slow disk, much memory", 2 * GiB, 60_000_000),
    ),
)


@dataclass(frozen=True)
class Contender:
    """How a process trains.

    Args:
        name: for tables.
        config: a preset or a file; None for plain PyTorch.
        batch: sequences of a step.
        micro_batches: passes of a step.
        recomputed_layers: that are checkpointed.
        limited: whether the machine's limit of memory is for it, too.
    """

    name: str
    config: str | None
    batch: int
    micro_batches: int = 1
    recomputed_layers: int = 0
    limited: bool = True


@dataclass
class Trained:
    """What came of a contender.

    Args:
        contender: that trained.
        rates: tokens in a second, of each step that counts.
        peak_bytes: the most that its memory group had.
        ended: why it did not train to the end; empty if it did.
    """

    contender: Contender
    rates: list[float] = field(default_factory=list)
    peak_bytes: int = 0
    ended: str = ""

    @property
    def rate(self) -> float:
        """Median of the tokens in a second; 0 if it did not train."""
        return statistics.median(self.rates) if self.rates and not self.ended else 0.0


@dataclass(frozen=True)
class Place:
    """A machine that is there."""

    task: Task
    machine: Machine
    disk: LoopDisk

    def tokens(self, contender: Contender) -> int:
        """Of a step."""
        return contender.batch * self.task.shape.sequence

    def directory(self, name: str) -> Path:
        """A contender's own: those of one directory would take turns on it."""
        found = self.disk.directory / name.replace(" ", "-")
        found.mkdir(mode=0o700, exist_ok=True)
        return found

    @contextlib.contextmanager
    def subject(self, contender: Contender, trained: Trained) -> Iterator[Subject]:
        """A process of its own, in a memory group; notes the group's peak."""
        limit = self.machine.memory if contender.limited else None
        with memory_group.memory_group(limit) as group:
            command = [sys.executable, "-X", "faulthandler", "-m", _TRAINS]
            training = {
                **{key: value for key, value in asdict(contender).items() if key in _TOLD},
                "shape": asdict(self.task.shape),
                "threads": cores(),
            }
            options = {"command": group.command(command), "training": training}
            environment = {
                "SSD_OFFLOAD_DIR": str(self.directory(contender.name)),
                "SSD_OFFLOAD_CACHE": "",  # nobody knows more of the disk than the others
            }
            with Subject(_STARTS, contender.name, options, environment) as subject:
                try:
                    yield subject
                finally:
                    trained.peak_bytes = max(trained.peak_bytes, group.peak_bytes())


_STARTS, _TRAINS = "benchmarks.planning.search_start", "benchmarks.planning.search_subject"
_TOLD = ("config", "batch", "micro_batches", "recomputed_layers")


def search(directory: Path, steps: int, quick: bool) -> tuple[str, list[Result], list[Any]]:
    """Search on each machine, and let what was found train compared with the presets.

    Args:
        directory: on the disk.
        steps: that count, of each of the best in each of its processes.
        quick: tiny; figures mean little.

    Returns:
        The table, the claims, and all figures.
    """
    reason = disks.why_not() or memory_group.why_not()
    if reason is not None:
        raise Skipped(reason)
    task = QUICK if quick else TASK
    parts, results, figures = [], [], []
    for machine in task.machines:
        say(str(machine))
        with (
            tempfile.TemporaryDirectory(dir=directory) as folder,
            loop_disk(Path(folder), _DISK_BYTES if not quick else 2 * GiB) as disk,
            throttle() as limits,
        ):
            limits.limit(disk, read=machine.rate, write=machine.rate)
            place = Place(task, machine, disk)
            found, said = _search(place, Path(folder))
            with limits.entered():
                rows = _contest(place, found, steps)
        table, result = _judge(machine, rows, said)
        parts.append(table)
        results.append(result)
        figures.append(
            {
                "machine": asdict(machine),
                "found": said,
                "rows": [{**asdict(row), "tokens_per_second": row.rate} for row in rows],
            }
        )
    return "\n\n".join(parts), results, figures


# ------------------------------------------------------------------ the search
def _search(place: Place, folder: Path) -> tuple[Contender | None, dict[str, Any]]:
    """What the command line finds, and what it says of that; None if it finds nothing."""
    shape, machine = place.task.shape, place.machine
    model, config = folder / "config.json", folder / "found.yaml"
    keys = {
        "model_type": "gpt2",
        "n_layer": shape.layers,
        "n_embd": shape.width,
        "n_head": shape.heads,
        "n_positions": shape.sequence,
        "vocab_size": shape.vocabulary,
        "tie_word_embeddings": False,
    }
    model.write_text(json.dumps(keys))
    words = {
        "--config-json": model,
        "--device": "cpu",
        "--sequence": shape.sequence,
        "--max-batch": place.task.most,
        "--tolerance": 0,
        "--host-memory": f"{machine.memory // MiB}MiB",
        "--read": machine.rate / 1e9,
        "--write": machine.rate / 1e9,
        "--dir": place.directory(_SEARCH),
        "--write-config": config,
    }
    command = [sys.executable, "-m", "offload_strategy.cli", "plan", "--search", "--json"]
    command += ["--duplex", *(str(word) for pair in words.items() for word in pair)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(cores())}
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=ROOT, env=environment
    )
    if done.returncode not in (0, 1):
        raise RuntimeError(f"the search failed: {done.stderr.strip()}")
    said: dict[str, Any] = json.loads(done.stdout)
    if done.returncode:
        return None, said
    best = said["candidates"][0]
    print("\n".join(line for line in config.read_text().splitlines() if line[:1] != "#"))
    OffloadConfig.load(config)
    contender = Contender(
        _SEARCH,
        str(config) if best["offloads"] else None,
        best["batch"],
        best["micro_batches"],
        best["recomputed_layers"],
    )
    return contender, said


# ------------------------------------------------------------------ the contest
def _contest(place: Place, found: Contender | None, steps: int) -> list[Trained]:
    """Presets at each batch, then the best of them, the search's config and plain, alternating."""
    tried: list[Trained] = []
    for name in presets():
        tried += _batches(place, Contender(name, name, 1), max((t.rate for t in tried), default=0))
    best = max(tried, key=lambda one: one.rate)
    others = [one for one in tried if one is not best]
    last = [best.contender] if best.rate else []
    if found is None:
        others.append(Trained(Contender(_SEARCH, None, 0), ended="found nothing that fits"))
    else:
        last.append(found)
        if found.config is not None or found.recomputed_layers:
            plain = Contender(_PLAIN, None, found.batch)
            within = _alone(place, plain, _SHORT)
            others.append(within)
            last.append(
                replace(plain, name=f"{_PLAIN}, no limit", limited=False) if within.ended else plain
            )
    if not best.rate:
        others.append(best)
    return [*_by_turns(place, last, steps), *others]


def _batches(place: Place, contender: Contender, to_beat: float) -> list[Trained]:
    """One at batches of 1, 2, 4, until it is killed, or is slower than before, or cannot win."""
    tried: list[Trained] = []
    batch = 1
    while batch <= place.task.most:
        one = _alone(place, replace(contender, batch=batch), _SHORT, to_beat)
        tried.append(one)
        say(f"{contender.name}, batch {batch}: {one.rate:.0f} tokens/s {one.ended}")
        best = max(other.rate for other in tried)
        if one.ended or one.rate < _FALLS * best or _hopeless(place, one, to_beat):
            break
        batch *= 2
    return tried


def _hopeless(place: Place, trained: Trained, to_beat: float) -> bool:
    """Whether no batch can reach so many tokens a second: larger ones take no less time a step."""
    return trained.rate * place.task.most / trained.contender.batch < to_beat


def _alone(place: Place, contender: Contender, steps: int, to_beat: float = 0.0) -> Trained:
    """Train a few steps; fewer if they show that it cannot win."""
    trained = Trained(contender)
    try:
        with place.subject(contender, trained) as subject:
            for number in range(_SHORT_WARM_UP + steps):
                rate = place.tokens(contender) / subject.ask({})["seconds"]
                if number >= _SHORT_WARM_UP:
                    trained.rates.append(rate)
                elif number and _hopeless(place, Trained(contender, [rate]), to_beat):
                    # The first step makes what later ones read; the second is one of them.
                    trained.rates.append(rate)
                    break
    except RuntimeError as error:
        trained.ended = _why(error)
    return trained


def _by_turns(place: Place, contenders: Sequence[Contender], steps: int) -> list[Trained]:
    """Several processes that alternate step by step."""
    rows = {one.name: Trained(one) for one in contenders}
    for _ in range(_PROCESSES):
        with contextlib.ExitStack() as stack:
            subjects = {
                one.name: stack.enter_context(place.subject(one, rows[one.name]))
                for one in contenders
            }

            def ask(name: str, _: int, subjects: dict[str, Subject] = subjects) -> dict[str, Any]:
                row = rows[name]
                if not row.ended:
                    try:
                        return subjects[name].ask({})
                    except RuntimeError as error:
                        row.ended = _why(error)
                return {"seconds": math.inf}

            answers = by_turns(list(rows), ask, warm_up=_WARM_UP, repeats=steps)
        for name, found in answers.items():
            tokens = place.tokens(rows[name].contender)
            rows[name].rates += [tokens / one["seconds"] for one in found]
    return list(rows.values())


def _why(error: RuntimeError) -> str:
    """Killed, or the last line of what it said."""
    text = str(error)
    return "killed" if "status -9" in text else text.strip().splitlines()[-1][:120]


# ------------------------------------------------------------------ the outcome
def _judge(machine: Machine, rows: Sequence[Trained], said: dict[str, Any]) -> tuple[str, Result]:
    ours = next(row for row in rows if row.contender.name == _SEARCH)
    best = max((row for row in rows if row.contender.name in presets()), key=lambda row: row.rate)
    ratio = _ratio(ours, best)
    predicted = said["candidates"][0]["tokens_per_second"] if said["candidates"] else 0.0
    title = f"{machine}: the search predicted {predicted:.0f} tokens/s"
    name = f"{best.contender.name}, batch {best.contender.batch}" if best.rate else "all killed"
    result = Result(
        f"{machine.name}: tokens/s of the search relative to the best preset ({name})",
        ours.rate, best.rate, "tokens/s", ratio, _LEAST, judged=machine.judged,
    )  # fmt: skip
    return f"{title}\n\n{_table(rows)}", result


def _ratio(ours: Trained, best: Trained) -> float:
    """Median of the ratios of turns that followed each other, where both alternated."""
    if not best.rate or not ours.rate:
        return math.inf if ours.rate else 0.0
    if len(ours.rates) != len(best.rates):
        return ours.rate / best.rate
    return median_ratio(ours.rates, best.rates)


def _table(rows: Sequence[Trained]) -> str:
    lines = [
        "| | batch | micro-batches | layers computed again | tokens/s | steps | peak of the "
        "group, MiB | |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        one = row.contender
        lines.append(
            f"| {one.name} | {one.batch or ''} | {one.micro_batches} | {one.recomputed_layers} "
            f"| {row.rate:.0f} | {len(row.rates)} | {row.peak_bytes / MiB:.0f} | {row.ended} |"
        )
    return "\n".join(lines)
