"""A small training that a fault happens to, and everything that can be seen of it afterwards."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from offload_strategy import OffloadEngine

STEPS = 4
#: Moments of a step at which a fault may be made.
BEFORE, FORWARDED, BACKWARDED = "before the step", "after forward", "after backward"
Faults = Mapping[tuple[int, str], Callable[[OffloadEngine], object]]

Weights = list[torch.Tensor]


@dataclass
class Outcome:
    """What was to be seen of a training that a fault happened to.

    Args:
        error: what was raised, or None.
        log: what was logged as a warning.
        whole_steps: steps that ended.
        weights: "right" if they are, bit for bit, those of plain training after as many steps;
            "half a step" if each value is of that step or of the next one; else "wrong".
        states: "right", "wrong", or the name of the error that `state_dict()` raised.
        close_seconds: how long `engine.close()` took.
        left: what is still there after `close()`: threads, files, names in the directory.
    """

    error: BaseException | None = None
    log: list[str] = field(default_factory=list)
    whole_steps: int = 0
    weights: str = "right"
    states: str = "right"
    close_seconds: float = 0.0
    left: list[str] = field(default_factory=list)

    @property
    def seen(self) -> str:
        """What the user sees, with paths such as /mnt/nvme0."""
        said = [*dict.fromkeys(self.log)]
        if self.error is not None:
            what = ": ".join(filter(None, (type(self.error).__name__, str(self.error))))
            said.append(" ".join((what, *getattr(self.error, "__notes__", ()))))
        text = "\n".join(said)
        for number, place in enumerate(dict.fromkeys(_MOUNTED.findall(text))):
            text = text.replace(place, f"/mnt/nvme{number}")
        return _DEVICE.sub("/dev/nvme0n1", _FOLDER.sub("/mnt", text))


# How `disks.loop_disk` names its places.
_MOUNTED = re.compile(r"/[^\s']*loop-disk-\w+/mounted")
_FOLDER = re.compile(r"/[^\s']*loop-disk-\w+")
_DEVICE = re.compile(r"/dev/loop\d+")


def make_model() -> nn.Module:
    """The same each time."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256), nn.Linear(256, 8))


def batch(step: int) -> torch.Tensor:
    """The input of a step."""
    return torch.randn(32, 64, generator=torch.Generator().manual_seed(step))


def settings(*paths: Path, capacity: int | str | None = "16MiB", **sections: Any) -> dict[str, Any]:
    """A config under which nearly everything of the model leaves, to a tier a path."""
    tiers = []
    for number, path in enumerate(paths):
        tier: dict[str, Any] = {"name": f"nvme{number}", "kind": "ssd", "path": str(path)}
        tiers.append(tier if capacity is None else {**tier, "capacity": capacity})
    config: dict[str, Any] = {
        "tiers": tiers,
        "activations": {"min_size": 1, "budget": "100%"},
        "optimizer": {"subgroup_size": 20_000},
        "io": {"threads": 2, "block_size": "64KiB"},
        "memory": {"pinned": "64MiB"},
    }
    for name, options in sections.items():
        config[name] = {**config.get(name, {}), **options}
    return config


@functools.cache
def plain() -> tuple[list[Weights], list[list[dict[str, Any]]]]:
    """Weights and optimizer states before the first step and after each, without offload."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    weights, states = [_copy(model)], [_states(optimizer)]
    for step in range(STEPS):
        model(batch(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        weights.append(_copy(model))
        states.append(_states(optimizer))
    return weights, states


def train(
    engine: OffloadEngine,
    outcome: Outcome,
    faults: Faults | None = None,
    *,
    states_too: bool = True,
) -> None:
    """Train until the end or an error, note what came of it, and close the engine.

    Args:
        engine: to train with; it is closed.
        outcome: what was seen is written there.
        faults: what to do at which moment of which step.
        states_too: whether to ask for the state dict as well.
    """
    happen = faults or {}
    model = make_model()
    optimizer = engine.attach(model, torch.optim.AdamW(model.parameters(), lr=1e-3))

    def reach(step: int, moment: str) -> None:
        happen.get((step, moment), lambda engine: None)(engine)

    try:
        for step in range(STEPS):
            reach(step, BEFORE)
            loss = model(batch(step)).square().mean()
            reach(step, FORWARDED)
            loss.backward()
            reach(step, BACKWARDED)
            optimizer.step()
            optimizer.zero_grad()
            outcome.whole_steps = step + 1
    except BaseException as error:
        outcome.error = error.with_traceback(None)
    loss = None
    # A backward that failed leaves nodes in autograd's queue of this thread, and with them what
    # they saved, until the next backward.
    torch.zeros(1, requires_grad=True).sum().backward()
    expected_weights, expected_states = plain()
    got, done = _copy(model), outcome.whole_steps
    if not _same(got, expected_weights[done]):
        next_one = expected_weights[min(done + 1, STEPS)]
        around = zip(got, expected_weights[done], next_one, strict=True)
        # Rows of a parameter that is cut may be of one step and of the next.
        halves = all(bool(((now == old) | (now == new)).all()) for now, old, new in around)
        outcome.weights = "half a step" if halves else "wrong"
    if states_too:
        try:
            states = _states(optimizer)
        except Exception as error:
            outcome.states = type(error).__name__
        else:
            outcome.states = "right" if _same_states(states, expected_states[done]) else "wrong"
    begin = time.perf_counter()
    engine.close()
    outcome.close_seconds = time.perf_counter() - begin
    hooks = [module._forward_hooks or module._forward_pre_hooks for module in model.modules()]
    if any(hooks) or any(p._post_accumulate_grad_hooks for p in model.parameters()):
        outcome.left.append("hooks on the model")


@contextlib.contextmanager
def observed(*directories: Path) -> Iterator[Outcome]:
    """Watch the log, and what is there afterwards that was not there before.

    An error is noted, not raised, where it is one of storage.
    """
    outcome = Outcome()
    before, open_before = threads(), deleted_files()
    handler = _Notes(outcome.log)
    logger = logging.getLogger("offload_strategy")
    handlers, propagate = logger.handlers[:], logger.propagate
    logger.handlers[:], logger.propagate = [handler], False
    try:
        yield outcome
    except RuntimeError as error:  # all of the package's are
        outcome.error = error.with_traceback(None)
    finally:
        logger.handlers[:], logger.propagate = handlers, propagate
    gc.collect()
    outcome.left += [f"thread {thread.name}" for thread in threads() - before]
    outcome.left += [f"open file {file}" for file in deleted_files() - open_before]
    for directory in directories:
        with contextlib.suppress(OSError):  # the directory, or its disk, is gone
            names = set(os.listdir(directory)) - {"lost+found", FILLER}
            outcome.left += [f"file {name}" for name in sorted(names)]


#: What the faults themselves put on a disk.
FILLER = "filler"


def threads() -> set[threading.Thread]:
    """The package's, of this process."""
    return {t for t in threading.enumerate() if t.name.startswith("ssd-offload")}


def deleted_files() -> set[str]:
    """Files without a name that this process has open."""
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the descriptor of this very listing
            target = os.readlink(entry)
            if target.endswith("(deleted)"):
                found.add(f"{entry.name} -> {target}")
    return found


class _Notes(logging.Handler):
    """Collects warnings."""

    def __init__(self, notes: list[str]) -> None:
        super().__init__(logging.WARNING)
        self._notes = notes

    def emit(self, record: logging.LogRecord) -> None:
        self._notes.append(record.getMessage())


def _copy(model: nn.Module) -> Weights:
    return [parameter.detach().clone() for parameter in model.parameters()]


def _states(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    found = copy.deepcopy(optimizer.state_dict()["state"])
    return [state for _, state in sorted(found.items())]


def _same(got: Weights, expected: Weights) -> bool:
    return all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def _same_states(got: list[dict[str, Any]], expected: list[dict[str, Any]]) -> bool:
    return len(got) == len(expected) and all(
        a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)
        for a, b in zip(got, expected, strict=True)
    )
