"""One training of which one operation fails: what may come of it, and what came of it."""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import os
import re
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.disks import loop_disk
from benchmarks.faults import operations, subject
from benchmarks.faults.operations import Seam
from benchmarks.faults.points import Setting
from offload_strategy import OffloadEngine, load, save
from offload_strategy.config import default_directory
from offload_strategy.errors import OffloadError
from offload_strategy.optimizer.states.precision import Precision
from offload_strategy.optimizer.user_class import compatibility, trial
from offload_strategy.optimizer.user_class.compatibility import SupportedOptimizer
from offload_strategy.units import MiB

STEPS = 3
#: What a message must advise, one way or the other.
_ADVICE = re.compile(
    r"\b(add|allow|check|choose|close|continue|create|free|load|lower|name|offload|raise|remove"
    r"|set|start|try|use)\b",
    re.IGNORECASE,
)
_NOTE = "the weights are not those of any one step"


_device = ["cpu"]


def train_on(device: str) -> None:
    """Train there from now on, for the whole of this process; before operations are installed."""
    if device == "sim":
        os.environ.setdefault("TEST_ACCELERATOR", "sim")
        from tests.simulated_accelerator import sim  # noqa: F401
    _device[0] = device


@dataclass
class Seen:
    """What was to be seen of a point.

    Args:
        failed: the call that failed, and the line that made it; empty if it was not reached.
        result: "same numbers", or the class of the error.
        said: the text of the error, with its notes.
        during: what raised it: opening, attach, forward, backward, step, saving or close.
        weights: "right", "half a step", "wrong", or the class of what reading them raised.
        states: "right", "half a step", "wrong", or the class of what `state_dict()` raised.
        complaints: what is not as it must be.
        left: threads, files, mappings and hooks that are still there.
    """

    point: str = ""
    kind: str = ""
    for_good: bool = False
    failed: str = ""
    result: str = "same numbers"
    said: str = ""
    during: str = ""
    whole_steps: int = 0
    saved_steps: int = 0
    weights: str = "right"
    states: str = "right"
    close_seconds: float = 0.0
    seconds: float = 0.0
    complaints: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    log: list[str] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """For a file, without what is empty."""
        return {key: value for key, value in asdict(self).items() if value not in ("", [], {})}


@contextlib.contextmanager
def places(*, raw: bool = False) -> Iterator[tuple[Path, Path]]:
    """A directory or a block device for a tier, and a directory for checkpoints."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="every-operation-")))
        place, saves = folder / "disk", folder / "saves"
        place.mkdir(mode=0o700)
        saves.mkdir()
        if raw:
            place = stack.enter_context(loop_disk(place, 32 * MiB, formatted=False)).device
        yield place, saves


def provoke(setting: Setting, seam: Seam) -> Seen:
    """Train, look at what came of it, and continue from the last checkpoint."""
    begin = time.perf_counter()
    with places(raw=setting.raw) as (place, saves):
        seen = trained(setting, seam, place, saves)
        seen.complaints += names_left(seam, place, saves)
        if not seam.kind or seen.result != "same numbers" or seen.complaints:
            with _tried_once():
                resume(setting, place, saves, seen)
    seen.seconds = time.perf_counter() - begin
    return seen


def trained(setting: Setting, seam: Seam, place: Path, saves: Path) -> Seen:
    """Train, and look at what came of it; with two ranks, this process is one of a group."""
    seen = Seen()
    with _watched(seen), _tried_once(), seam:
        _train(setting, place, saves, seam, seen)
    seen.failed, seen.counts = seam.failed, dict(seam.counts)
    if not dist.is_initialized() or seam.kind:
        _judge(setting, seam, seen, place, saves)
    if seam.maps:
        seen.left.append(f"{len(seam.maps)} mappings")
    seen.complaints += [f"left behind: {thing}" for thing in seen.left]
    return seen


# ---------------------------------------------------------------------- the training
def _train(setting: Setting, place: Path, saves: Path, seam: Seam, seen: Seen) -> None:
    seen.during = "opening"
    model, engine, optimizer = _make_model(), None, None
    grouped = dist.is_initialized()
    first = not grouped or dist.get_rank() == 0
    called: nn.Module = DistributedDataParallel(model) if grouped else model
    try:
        engine = OffloadEngine(setting.config(place))
        seen.during = "attach"
        optimizer = engine.attach(called, _adamw(model))
        for step in range(STEPS):
            seen.during = "forward"
            loss = called(_batch(step)).square().mean()
            seen.during = "backward"
            loss.backward()
            seen.during = "step"
            optimizer.step()
            optimizer.zero_grad()
            seen.whole_steps = step + 1
            seen.during = "saving"
            states = {"step": step + 1, "model": model.state_dict()}
            states["optimizer"] = optimizer.state_dict()
            if first:  # of all ranks, which have the same
                save(states, saves / "last.ckpt")
            states = {}
            seen.saved_steps = step + 1
    except Exception as error:
        _note(seen, error)
    loss = None
    # See `subject.train`.
    torch.zeros(1, requires_grad=True).sum().backward()
    if optimizer is not None:
        # Of ranks, all would have to ask for the state dict.
        _look(model, optimizer, seen, states_too=not grouped or seen.result == "same numbers")
    if engine is not None:
        begin = time.perf_counter()
        try:
            engine.close()
        except Exception as error:
            if seen.result == "same numbers":
                seen.during = "close"
                _note(seen, error)
            else:
                _raised(seen, error, "close()")
        seen.close_seconds = time.perf_counter() - begin
    seam.lift()
    if optimizer is not None:
        _look_again(model, seen)
    hooks = [module._forward_hooks or module._forward_pre_hooks for module in model.modules()]
    if any(hooks) or any(p._post_accumulate_grad_hooks for p in model.parameters()):
        seen.left.append("hooks on the model")
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        seen.left.append("hooks for saved tensors")


def _make_model() -> nn.Module:
    """The same each time: as small as it can be while a state is still too large to stay aside."""
    torch.manual_seed(0)
    layers = nn.Linear(16, 128, bias=False), nn.Linear(128, 128, bias=False), nn.Linear(128, 4)
    return nn.Sequential(layers[0], nn.GELU(), *layers[1:]).to(_device[0])


def _batch(step: int) -> torch.Tensor:
    rows = torch.randn(16, 16, generator=torch.Generator().manual_seed(step))
    return rows.to(_device[0])


@functools.cache
def _plain() -> tuple[list[list[torch.Tensor]], list[list[dict[str, Any]]]]:
    """Weights and optimizer states before the first step and after each, without offload."""
    model = _make_model()
    optimizer = _adamw(model)
    weights, states = [_copy(model)], [_states(optimizer)]
    for step in range(STEPS):
        _one_step(model, optimizer, step)
        weights.append(_copy(model))
        states.append(_states(optimizer))
    return weights, states


def _one_step(model: nn.Module, optimizer: Any, step: int) -> None:
    model(_batch(step)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@contextlib.contextmanager
def _tried_once() -> Iterator[None]:
    """AdamW is tried once: that takes most of the time, and makes no operation."""
    supported, sliceable = _trial()
    with (
        mock.patch.object(compatibility, "check_supported", return_value=supported),
        mock.patch.object(trial, "is_elementwise", return_value=sliceable),
    ):
        yield


@functools.cache
def _trial() -> tuple[SupportedOptimizer, bool]:
    optimizer, precision = _adamw(_make_model()), Precision()
    group = optimizer.param_groups[0]
    supported = compatibility.check_supported(optimizer, precision)
    return supported, trial.is_elementwise(optimizer, group, precision)


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def _note(seen: Seen, error: Exception) -> None:
    seen.said = " ".join((str(error), *getattr(error, "__notes__", ())))
    seen.result = _raised(seen, error, seen.during)


def _raised(seen: Seen, error: Exception, during: str) -> str:
    """The name of an error, which must be one of ours; frees what its frames hold."""
    of_group = dist.is_initialized() and "gloo" in str(error)  # the other rank is gone
    if not isinstance(error, OffloadError) and not of_group:
        frames = traceback.extract_tb(error.__traceback__)
        lines = [f"{Path(f.filename).name}:{f.lineno}" for f in frames if "offload" in f.filename]
        where = " > ".join(lines[-4:])
        seen.complaints.append(f"{during} raises {error!r}, no error of ours ({where})")
    _clear(error)
    return type(error).__name__


def _clear(error: BaseException | None) -> None:
    """Free what the frames of an error hold."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


def _look(model: nn.Module, optimizer: Any, seen: Seen, *, states_too: bool = True) -> None:
    """Compare weights and states with those of plain training after as many steps."""
    weights, states = _plain()
    done = seen.whole_steps
    following = min(done + 1, STEPS)
    try:
        got = _copy(model)
    except Exception as error:
        seen.weights = _raised(seen, error, "reading the weights")
    else:
        if not _same(got, weights[done]):
            around = zip(got, weights[done], weights[following], strict=True)
            halves = all(bool(((now == old) | (now == new)).all()) for now, old, new in around)
            seen.weights = "half a step" if halves else "wrong"
    if not states_too:
        return
    try:
        found = _states(optimizer)
    except Exception as error:
        seen.states = _raised(seen, error, "state_dict()")
    else:
        if not subject._same_states(found, states[done]):
            seen.states = "half a step" if _halves(found, states, done) else "wrong"


def _look_again(model: nn.Module, seen: Seen) -> None:
    """After `close()` weights are those of the last step; after an error some may be lost."""
    weights, done = _plain()[0], seen.whole_steps
    try:
        got = _copy(model)
    except OffloadError as error:  # those that `close()` could not read
        if seen.result == "same numbers":
            seen.complaints.append(f"weights are gone after close(): {error}")
        return
    if seen.result == "same numbers":
        right = _same(got, weights[done])
    else:
        around = zip(got, weights[done], weights[min(done + 1, STEPS)], strict=True)
        right = all(bool(((now == a) | (now == b) | now.isnan()).all()) for now, a, b in around)
    if not right:
        seen.complaints.append("weights are neither right nor NaN after close()")


def _halves(found: list[Any], states: list[list[dict[str, Any]]], done: int) -> bool:
    following = states[min(done + 1, STEPS)]
    before = states[done] or [dict.fromkeys(state, None) for state in following]
    if len(found) > len(following):
        return False
    return all(
        bool(((now == new) | (now == (torch.zeros_like(new) if old is None else old))).all())
        for state, olds, news in zip(found, before, following, strict=False)
        for now, old, new in ((state[key], olds[key], news[key]) for key in state)
    )


def _copy(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone().cpu() for parameter in model.parameters()]


def _states(optimizer: Any) -> list[dict[str, Any]]:
    return [{n: v.cpu() for n, v in each.items()} for each in subject._states(optimizer)]


def _same(got: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


# ---------------------------------------------------------------------- what may come of it
def _judge(setting: Setting, seam: Seam, seen: Seen, place: Path, saves: Path) -> None:
    if seen.result == "same numbers":
        if seen.whole_steps != STEPS:
            seen.complaints.append(f"{seen.whole_steps} steps ended")
        allowed = {"right"}
    else:
        allowed = {"right", *_halves_allowed(setting, seen)}
        of_memory = seam.kind in (operations.MAP, operations.LOOK)
        where = {"memory"} if of_memory else {str(place), str(saves)}
        if setting.raw:  # where a state dict goes
            where.add(str(default_directory()))
        if not any(each in seen.said for each in where):
            seen.complaints.append(f"the error does not name {' or '.join(where)}: {seen.said}")
        if not _ADVICE.search(seen.said):
            seen.complaints.append(f"the error gives no advice: {seen.said}")
    raises = {"StorageError", "TierFullError", "CorruptDataError", "OffloadError"}
    if not seam.failed:
        raises = set()
    if seen.weights not in allowed | raises:
        seen.complaints.append(f"weights are {seen.weights} after an error in {seen.during}")
    if seen.states not in allowed | raises:
        seen.complaints.append(f"the state dict is {seen.states} after an error in {seen.during}")


def _halves_allowed(setting: Setting, seen: Seen) -> set[str]:
    """What docs/faults.md says of errors within `step()`, and of eager updates."""
    if seen.during == "step" and (_NOTE in seen.said or setting.what in ("activations", "weights")):
        return {"half a step"}  # a plain optimizer, whose weights are streamed, adds no note
    if setting.overlap == "eager" and seen.during in ("backward", "step"):
        return {"half a step"}
    return set()


def resume(setting: Setting, place: Path, saves: Path, seen: Seen) -> None:
    """Continue from the last checkpoint that was saved: to the numbers of plain training."""
    file = saves / "last.ckpt"
    saved: Any = load(file) if file.exists() else {"step": 0}
    # A save may have failed after the new file was in its place.
    if saved["step"] not in (seen.saved_steps, seen.whole_steps):
        seen.complaints.append(f"step {saved['step']} is saved, not {seen.saved_steps}")
    model = _make_model()
    with OffloadEngine(setting.config(place)) as engine:
        optimizer = engine.attach(model, _adamw(model))
        if saved["step"]:
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
        for step in range(saved["step"], STEPS):
            _one_step(model, optimizer, step)
        after = Seen(whole_steps=STEPS)
        _look(model, optimizer, after)
        save({"step": STEPS}, file)  # removes what an earlier save could not
    left = [f"left behind: file {name}" for name in set(os.listdir(saves)) - {"last.ckpt"}]
    seen.complaints += left
    if (after.weights, after.states) != ("right", "right"):
        seen.complaints.append(
            f"resumed from step {saved['step']}: weights are {after.weights}, states {after.states}"
        )


# ---------------------------------------------------------------------- what is left
@contextlib.contextmanager
def _watched(seen: Seen) -> Iterator[None]:
    """Keep the log, and look for what is there afterwards that was not there before."""
    _plain(), _trial()
    logger = logging.getLogger("offload_strategy")
    before = logger.handlers[:], logger.propagate
    logger.handlers[:], logger.propagate = [subject._Notes(seen.log)], False
    _freeze()
    threads, files = set(threading.enumerate()), _open_files()
    try:
        yield
    finally:
        logger.handlers[:], logger.propagate = before
    gc.collect()
    gc.collect()  # what the first one has finalized
    seen.left += [f"thread {thread.name}" for thread in set(threading.enumerate()) - threads]
    seen.left += [f"open file {file}" for file in sorted(_open_files() - files)]


def names_left(seam: Seam, place: Path, saves: Path) -> list[str]:
    """What is left in the directories of a training that is over."""
    left = os.listdir(place) if place.is_dir() else []
    # Where even `unlink` fails, the temporary file of a save stays until the next: see `resume`.
    if "unlink" not in seam.raised:
        left += set(os.listdir(saves)) - {"last.ckpt"}
    return [f"left behind: file {name}" for name in left]


@functools.cache
def _freeze() -> None:
    """Spare later collections all of torch."""
    gc.collect()
    gc.freeze()


def _open_files() -> set[str]:
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the descriptor of this very listing
            found.add(f"{entry.name} -> {os.readlink(entry)}")
    return found
