"""One training of a run: plain, or offloaded with what goes wrong within its process."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import torch
import transformers
from torch import nn

from benchmarks.faults.making import answers
from benchmarks.faults.subject import deleted_files, threads
from benchmarks.soak.runs import Run
from offload_strategy import ConfigError, OffloadEngine, OffloadError, load, save
from offload_strategy.units import MiB

CHECKPOINT = "last.ckpt"
Say = Callable[[str, Any], None]
_CLASSES: dict[str, tuple[type[Any], type[Any]]] = {
    "GPT-2": (transformers.GPT2Config, transformers.GPT2LMHeadModel),
    "Llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "BERT": (transformers.BertConfig, transformers.BertForMaskedLM),
    "T5": (transformers.T5Config, transformers.T5ForConditionalGeneration),
    "ViT": (transformers.ViTConfig, transformers.ViTForImageClassification),
    "Mixtral": (transformers.MixtralConfig, transformers.MixtralForCausalLM),
}


class DeliberateError(Exception):
    """The user's code fails."""


class Training:
    """A model, its optimizer and, unless it is plain, an engine.

    Args:
        run: what is trained.
        directories: for the paths of the tiers; None for plain PyTorch.
        folder: of the checkpoint, from which it goes on if there is one; None for none.
    """

    def __init__(
        self, run: Run, directories: list[Path] | None = None, folder: Path | None = None
    ) -> None:
        self.run, self.folder = run, folder
        self.losses: list[str] = []
        self.begin = 0
        self.engine: OffloadEngine | None = None
        torch.manual_seed(run.seed)
        self.model = _model(run)
        self.optimizer = _optimizer(run, self.model)
        checkpoint = None
        if folder is not None and (folder / CHECKPOINT).exists():
            checkpoint = load(folder / CHECKPOINT)
        if checkpoint is not None and run.before_attach:
            self._go_on_from(checkpoint)
        if directories is not None:
            self.engine = OffloadEngine(self._config(directories))
            try:
                if run.micro_batches > 1:
                    self.engine.microbatch(0, last=False)
                attached = self.engine.attach(self.model, self.optimizer)
                assert attached is not None
                self.optimizer = attached
            except BaseException:
                self.engine.close()
                raise
        if checkpoint is not None and not run.before_attach:
            self._go_on_from(checkpoint)

    def step(self, number: int) -> None:
        """Train one step, which depends on nothing but the run, its number and the weights."""
        run = self.run
        torch.manual_seed(run.seed * 10_007 + number)
        if run.schedule:
            for group in self.optimizer.param_groups:
                group["lr"] = 1e-3 / (1 + number)
        losses = []
        for index in range(run.micro_batches):
            if self.engine is not None and run.hints:
                self.engine.microbatch(index, last=index == run.micro_batches - 1)
            inputs = _inputs(run, number * 16 + index)
            with torch.autocast("cpu", torch.bfloat16, enabled=run.autocast):
                loss = self.model(**inputs).loss / run.micro_batches
            loss.backward()
            losses.append(float(loss.detach()).hex())
        if run.clip is not None:
            norm = nn.utils.clip_grad_norm_(self.model.parameters(), run.clip)
            losses.append(float(norm).hex())
        try:
            self.optimizer.step()
        except DeliberateError as error:
            if error.args == ("before the step",):
                self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(" ".join(losses))

    def save(self) -> None:
        """Write a checkpoint of what was trained so far."""
        assert self.folder is not None
        checkpoint = {
            "losses": list(self.losses),
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }
        save(checkpoint, self.folder / CHECKPOINT)

    def end(self) -> dict[str, Any]:
        """Close, and tell losses and digests of weights and optimizer states."""
        states = _digest(self.optimizer.state_dict()["state"])
        if self.engine is not None:
            self.engine.close()
        weights = _digest(self.model.state_dict())
        return {"losses": self.losses, "weights": weights, "states": states}

    def abandon(self) -> None:
        """Close after an error; what is offloaded may be lost."""
        if self.engine is not None:
            with contextlib.suppress(OffloadError):
                self.engine.close()
        # A backward that failed leaves nodes in autograd's queue of this thread until the next.
        torch.zeros(1, requires_grad=True).sum().backward()

    def reload(self) -> None:
        """Go on from the checkpoint in the same engine."""
        assert self.folder is not None
        with contextlib.suppress(OffloadError):  # `eager` tells once that no step() has followed
            self.optimizer.zero_grad()
        self.optimizer.zero_grad()
        self._go_on_from(load(self.folder / CHECKPOINT))

    def _go_on_from(self, checkpoint: dict[str, Any]) -> None:
        self.losses = list(checkpoint["losses"])
        self.begin = len(self.losses)
        self.model.load_state_dict(checkpoint["model"])
        self.optimizer.load_state_dict(checkpoint["optimizer"])

    def _config(self, directories: list[Path]) -> dict[str, Any]:
        run = self.run
        memory: dict[str, Any] = {"pinned": "64MiB"}
        if run.limit is not None:
            weights = sum(p.numel() * p.element_size() for p in self.model.parameters())
            now = psutil.Process().memory_info().rss
            memory["limit"] = now + 24 * MiB + int(run.limit * weights)
        return {**run.sections, "tiers": run.tiers_at(directories), "memory": memory}


def train(
    run: Run,
    directories: list[Path] | None,
    folder: Path,
    say: Say,
    *,
    rest: float = 0.0,
    resumed: bool = False,
) -> dict[str, Any]:
    """Train a run to its end, with what goes wrong within the process.

    Args:
        run: what is trained.
        directories: for the paths of the tiers, one more than there are paths; None for plain
            PyTorch, to which nothing happens.
        folder: of the checkpoint.
        say: is told what begins: ("step", number) and ("saving", number).
        rest: seconds of rest for each second of CPU time.
        resumed: whether the fault happened in an earlier process.

    Returns:
        losses and digests as of `Training.end`; "refused", the reason, if the configuration is;
        "error", a typed error, if the run shall go on in another process; "happened", how often
        the fault did; "left", what was there after `close` that was not there before.
    """
    chance = random.Random(run.seed + 1)
    threads_before, open_before = threads(), deleted_files()
    hostility = "none" if directories is None or resumed else run.hostility
    moments = {chance.randrange(run.steps) for _ in range(2)}
    happened, left = 0, []
    with contextlib.ExitStack() as faults:
        if hostility == "I/O error":
            assert directories is not None
            bad = directories[chance.randrange(2 if "two" in run.tiers else 1)]
            faults.enter_context(_failing(bad, chance.randrange(400)))
        failure: OffloadError | None = None
        training: Training | None = None
        try:
            training = Training(run, directories, folder if directories else None)
        except ConfigError as error:
            return {"refused": str(error), "happened": 0, "left": []}
        except OffloadError as error:
            if hostility != "I/O error":
                raise
            failure = error
        number = training.begin if training is not None else 0
        result: dict[str, Any] | None = None
        while result is None:
            start = time.process_time()
            say("step", number)
            try:
                if failure is not None:
                    raise failure
                assert training is not None
                if number == run.steps:
                    result = training.end()
                    break
                if number in moments and hostility == "exception":
                    moments.remove(number)
                    number, done = _with_exception(training, number, chance)
                    happened += done
                    continue
                training.step(number)
                number += 1
                if training.folder is not None and number % run.every == 0:
                    say("saving", number)
                    training.save()
            except OffloadError as error:
                refused = isinstance(error, ConfigError)
                if refused and run.limit is not None and number == getattr(training, "begin", 0):
                    # More is in use than the limit, which is known in the first pass.
                    assert training is not None
                    training.abandon()
                    return {"refused": str(error), "happened": happened, "left": left}
                if refused or hostility != "I/O error":
                    raise
                happened += 1
                if training is not None:
                    training.abandon()
                said = f"{type(error).__name__}: {error}"
                failure = training = None
                gc.collect()
                if not run.same_process:
                    return {"error": said, "happened": happened, "left": left}
                directories = [path for path in directories or () if path != bad] + [bad]
                training = Training(run, directories, folder)
                number = training.begin
            if number in moments and hostility == "reopen":
                moments.remove(number)
                happened += 1
                training.save()
                training.abandon()
                left += _left(threads_before, open_before)
                training = Training(run, directories, folder)
            time.sleep(rest * (time.process_time() - start))
    training = None
    gc.collect()
    left += _left(threads_before, open_before)
    return {**result, "happened": happened, "left": left}


def _with_exception(training: Training, number: int, chance: random.Random) -> tuple[int, bool]:
    """Train a step in which the user's code fails at a random moment, and go on as one would.

    Returns:
        the step that is next, and whether the code failed.
    """
    moment = chance.choice(["forward", "backward", "backward", "before the step", "after it"])
    failed = False
    if training.folder is not None and not (training.folder / CHECKPOINT).exists():
        training.save()
    with contextlib.ExitStack() as hooks:

        def fail(*_: Any) -> None:
            nonlocal failed
            if not failed:
                failed = True
                raise DeliberateError(moment)

        if moment == "before the step":
            hooks.callback(training.optimizer.register_step_pre_hook(fail).remove)
        elif moment == "after it":
            hooks.callback(training.optimizer.register_step_post_hook(fail).remove)
        else:
            module = chance.choice(list(training.model.modules()))

            def after_forward(module: nn.Module, inputs: Any, output: Any) -> None:
                if moment == "forward":
                    fail()
                for tensor in output if isinstance(output, tuple) else (output,):
                    if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                        tensor.register_hook(fail)
                        return

            hooks.callback(module.register_forward_hook(after_forward).remove)
        try:
            training.step(number)
            return number + 1, failed
        except DeliberateError:
            pass
    # With `eager`, updates are visible at once: only the checkpoint has a whole step's weights.
    if training.run.overlap == "eager" and moment == "backward":
        training.reload()
        return training.begin, True
    training.optimizer.zero_grad()
    return number, True


@contextlib.contextmanager
def _failing(path: Path, after: int) -> Iterator[None]:
    """Reads and writes of a path fail for good, after some have succeeded."""
    left = after

    def change(call: Callable[..., int], fd: int, views: list[memoryview], offset: int) -> int:
        nonlocal left
        if os.readlink(f"/proc/self/fd/{fd}").startswith(f"{path}/"):
            left -= 1
            if left < 0:
                raise OSError(5, "Input/output error")
        return call(fd, views, offset)

    with answers(change):
        yield


def _left(threads_before: set[Any], open_before: set[str]) -> list[str]:
    gc.collect()
    found = [f"thread {thread.name}" for thread in threads() - threads_before]
    return found + [f"open file {file}" for file in deleted_files() - open_before]


def _model(run: Run) -> nn.Module:
    config, kind = _CLASSES[run.model]
    model: Any = kind(config(**run.sizes))
    if run.model == "GPT-2":
        model.loss_type = "ForCausalLM"
    if run.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if run.frozen:
        for parameter in list(model.parameters())[1::3]:
            parameter.requires_grad_(False)
    return model.train()  # type: ignore[no-any-return]


def _optimizer(run: Run, model: nn.Module) -> torch.optim.Optimizer:
    parameters = list(model.parameters())
    if run.optimizer == "SGD with momentum":
        return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9)
    if run.optimizer == "Adafactor":
        return torch.optim.Adafactor(parameters, lr=1e-3)
    if run.optimizer == "Adam":
        return torch.optim.Adam(parameters, lr=1e-3)
    return torch.optim.AdamW(parameters, lr=1e-3, fused=run.optimizer == "AdamW, fused")


def _inputs(run: Run, number: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(run.seed * 100_003 + number)
    samples, length = run.batch
    if run.model == "ViT":
        images = torch.randn(samples, 3, 32, 32, generator=generator)
        return {"pixel_values": images, "labels": torch.arange(samples) % 10}
    words = run.sizes["vocab_size"]
    tokens = torch.randint(words, (samples, length), generator=generator)
    return {"input_ids": tokens, "labels": tokens}


def _digest(values: Any) -> str:
    """Of every tensor in nested dicts, to the last bit."""
    found = hashlib.sha256()

    def add(value: Any) -> None:
        if isinstance(value, dict):
            for key in sorted(value, key=str):
                found.update(str(key).encode())
                add(value[key])
        elif isinstance(value, torch.Tensor):
            found.update(f"{value.dtype} {tuple(value.shape)}".encode())
            found.update(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy())
        else:
            found.update(repr(value).encode())

    add(values)
    return found.hexdigest()
