"""What encryption of the tiers costs: large transfers, and a step of training."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from contextlib import ExitStack
from importlib.util import find_spec
from typing import Any

import torch

from benchmarks.activations.models import Shape
from benchmarks.gpt import GPT
from benchmarks.io.results import Context, Result, Skipped, alternating, median_ratio
from benchmarks.io.store_setup import OurStore
from benchmarks.io.tuned_peers import scratch
from benchmarks.machine import fix_allocator
from offload_strategy import OffloadEngine
from offload_strategy.units import GiB, MiB

#: About 70 million parameters.
_SHAPE = Shape(640, 12, 10)
_TOKENS = (2, 256)
_WAYS = ("off", "on")
_WARMING_UP = 3

_Seconds = dict[tuple[str, str], list[float]]


def encryption(context: Context) -> list[Result]:
    """The same with `io.encryption` off and on, in turn: 2 GiB in tickets of 64 MiB, and training.

    The step is one of a GPT of 70 million parameters on the CPU, with activations and AdamW's
    states on the disk. Seconds of all cores tell the cost also where other programs run.
    """
    if find_spec("cryptography") is None:
        raise Skipped("the package cryptography is not installed (extra encryption)")
    fix_allocator()
    count = 4 if context.quick else 32
    seconds = _transfers(context, count)
    nbytes = count * 64 * MiB
    results = [
        _result(f"encryption: {way}", seconds, way, "GB/s", nbytes / 1e9)
        for way in ("write", "read")
    ]
    results += [
        _result(f"encryption: {way}, seconds of cores", seconds, f"{way} cores", "s", None)
        for way in ("write", "read")
    ]
    steps = _steps(context)
    results.append(_result("encryption: training step", steps, "step", "s", None))
    return [*results, _result("encryption: step, seconds of cores", steps, "step cores", "s", None)]


def _transfers(context: Context, count: int) -> _Seconds:
    seconds: _Seconds = defaultdict(list)
    with ExitStack() as stack:
        stores = {
            way: stack.enter_context(
                OurStore(
                    [scratch(context, f"encryption-{way}")],
                    budget=3 * GiB,
                    encryption=way == "on",
                )
            )
            for way in _WAYS
        }
        buffers = stores["off"].buffers(count, 64 * MiB)
        for repeat in range(-1, context.repeats):  # the first writes every place once
            for way in alternating(_WAYS, repeat):
                begin = _now()
                tickets = stores[way].write(buffers)
                written = _now()
                for ticket in tickets:
                    stores[way].store.evict(ticket)
                before_reads = _now()
                stores[way].read(tickets, ahead=3)
                if repeat >= 0:
                    _note(seconds, "write", way, begin, written)
                    _note(seconds, "read", way, before_reads, _now())
    return seconds


def _steps(context: Context) -> _Seconds:
    seconds: _Seconds = defaultdict(list)
    trained: dict[str, tuple[GPT, Any]] = {}
    with ExitStack() as stack:
        for way in _WAYS:
            place = scratch(context, f"training-{way}")
            tier = {"name": "disk", "kind": "ssd", "path": str(place), "capacity": "4GiB"}
            config = {"tiers": [tier], "mode": "always", "io": {"encryption": way == "on"}}
            engine = stack.enter_context(OffloadEngine(config))
            torch.manual_seed(0)
            model = GPT(_SHAPE)
            trained[way] = model, engine.attach(model, torch.optim.AdamW(model.parameters()))
        losses: dict[str, list[float]] = defaultdict(list)
        for step in range(-_WARMING_UP, 2 if context.quick else 3 * context.repeats):
            tokens = torch.randint(
                _SHAPE.vocabulary, _TOKENS, generator=torch.Generator().manual_seed(100 + step)
            )
            for way in alternating(_WAYS, step):
                model, optimizer = trained[way]
                begin = _now()
                loss = model(tokens)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses[way].append(loss.item())
                if step >= 0:
                    _note(seconds, "step", way, begin, _now())
        if losses["off"] != losses["on"]:
            raise RuntimeError("encryption has changed a loss")
    return seconds


def _now() -> tuple[float, float]:
    """The time, and the seconds that all threads of this process have computed."""
    return time.perf_counter(), time.process_time()


def _note(
    seconds: _Seconds, what: str, way: str, begin: tuple[float, float], end: tuple[float, float]
) -> None:
    seconds[what, way].append(end[0] - begin[0])
    seconds[f"{what} cores", way].append(end[1] - begin[1])


def _result(name: str, seconds: _Seconds, what: str, unit: str, amount: float | None) -> Result:
    """One line; with an `amount`, a rate."""
    off, on = (seconds[what, way] for way in _WAYS)
    ours, peer = statistics.median(on), statistics.median(off)
    return Result(
        name=name,
        ours=ours if amount is None else amount / ours,
        peer=peer if amount is None else amount / peer,
        unit=unit,
        ratio=median_ratio(on, off) if amount is None else median_ratio(off, on),
        threshold=1.0,
        at_least=amount is not None,
        command="the same without encryption",
        details={"off_seconds": off, "on_seconds": on},
        judged=False,
    )
