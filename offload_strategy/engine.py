"""The engine: what the three lines of the public contract do."""

from __future__ import annotations

import math
import os
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self, overload

import psutil
import torch
from torch import nn
from torch.optim import Optimizer

from offload_strategy.activations import ActivationOffload, ForwardHooks
from offload_strategy.config import ConfigSource, OffloadConfig
from offload_strategy.errors import ConfigError, OffloadError
from offload_strategy.memory import available_bytes
from offload_strategy.optimizer import OffloadedOptimizer, Precision, check_supported
from offload_strategy.parameters import ParameterRegistry, WeightStream, save_shards
from offload_strategy.planning import (
    optimizer_need,
    shortfall,
    spare_memory_advice,
    weights_shortfall,
)
from offload_strategy.resources import Resources
from offload_strategy.telemetry import CLIENTS, Direction, Recorder, get_logger, write_trace
from offload_strategy.units import MiB, format_size

logger = get_logger(__name__)

#: Weights come back at `close` if they take no more than this share of the memory that is free.
_RESTORED_SHARE = 0.8
_SECONDS_PER_YEAR = 365.25 * 24 * 3600


class OffloadEngine:
    """Moves activations and optimizer states of attached models to tiers, while they train.

    Use it as a context manager, or call `close`; an engine that is forgotten closes itself when it
    is collected and when the process ends, and leaves nothing on disk either way.

    Args:
        config: an `OffloadConfig`, a mapping, a path to YAML or JSON, JSON text, a preset's name,
            or None for ``$SSD_OFFLOAD_CONFIG`` and else the defaults.

    Raises:
        ConfigError: the config is wrong, or a tier's directory cannot be used.
    """

    def __init__(self, config: ConfigSource = None) -> None:
        self.config = OffloadConfig.load(config)
        self._recorder = Recorder()
        self._resources = Resources.open(self.config, self._recorder)
        self._finalizer = weakref.finalize(self, self._resources.close)
        self._registry = ParameterRegistry()
        self._stream = self._make_stream()
        self._activations = self._make_activations()
        self._hooks: dict[int, tuple[weakref.ref[nn.Module], ForwardHooks]] = {}
        self._optimizers: weakref.WeakSet[OffloadedOptimizer] = weakref.WeakSet()
        self._last_microbatch = True
        self._forwards = 0
        self._device = torch.device("cpu")
        self._started_at = time.perf_counter()

    # ------------------------------------------------------------------ attaching
    @overload
    def attach(self, model: nn.Module | None, optimizer: Optimizer) -> Optimizer: ...

    @overload
    def attach(self, model: nn.Module | None, optimizer: None = None) -> None: ...

    @overload
    def attach(self, model: nn.Module | None = None, *, optimizer: Optimizer) -> Optimizer: ...

    def attach(
        self, model: nn.Module | None = None, optimizer: Optimizer | None = None
    ) -> Optimizer | None:
        """Hook a model in place, and wrap its optimizer.

        Args:
            model: its saved tensors are offloaded (``activations.enabled``). May be given again
                with another optimizer. None to swap an optimizer's states only.
            optimizer: one that updates every parameter by itself, as most of `torch.optim` do;
                its states are swapped (``optimizer.enabled``). None to offload activations only.

        Returns:
            The optimizer to use from now on, or None if none was given.

        Raises:
            ConfigError: model or parameters are attached already; there are no parameters; the
                optimizer cannot be swapped; the tiers are too small for its states.
            OffloadError: the engine is closed.
        """
        self._check_open()
        if model is None and optimizer is None:
            raise ConfigError("attach: pass a model, an optimizer, or both.")
        if model is not None and not isinstance(model, nn.Module):
            raise ConfigError(f"attach: expected a torch.nn.Module, got {type(model).__name__}.")
        if self._stream is not None and model is not None:
            tiers = self._resources.clients["parameters"]
            room = sum(tier.capacity - tier.used_bytes for tier in tiers)
            complaint = weights_shortfall(self._stream.bytes_to_come(model), room)
            if complaint is not None:
                raise ConfigError(f"attach: {complaint}")
            self._stream.fill(model, self._device)
        wrapped = None if optimizer is None else self._wrap(optimizer)
        if wrapped is not None and self._stream is not None:
            stream = self._stream
            wrapped.register_step_post_hook(lambda *_: stream.start_over())
        try:
            if model is not None:
                self._hook(model, again_is_fine=optimizer is not None)
        except BaseException:
            if isinstance(wrapped, OffloadedOptimizer):
                self._unwrap(wrapped)
            raise
        return wrapped

    def _hook(self, model: nn.Module, *, again_is_fine: bool) -> None:
        # Ids of models that died are given to others.
        for known in [key for key, (alive, _) in self._hooks.items() if alive() is None]:
            del self._hooks[known]
        if again_is_fine and id(model) in self._hooks:
            return
        if any(p.is_meta for p in model.parameters()):
            raise ConfigError(
                f"attach: parameters of this {type(model).__name__} are on the meta device. "
                f"Materialise them first (model.to_empty(device=...) and load weights), or have "
                f"them streamed (parameters.enabled: true)."
            )
        self._registry.add_module(model)
        self._note_device(model.parameters())
        if self._activations is not None:
            hooks = ForwardHooks(model, self._activations, owner=self)
            self._hooks[id(model)] = (weakref.ref(model), hooks)
        if self._stream is not None:
            try:
                self._stream.attach(model)
            except BaseException:
                self.detach_model(model)
                raise

    def _wrap(self, optimizer: Optimizer) -> Optimizer:
        if isinstance(optimizer, OffloadedOptimizer):
            raise ConfigError("attach: this optimizer is attached already. Attach it once.")
        section = self.config.optimizer
        if not section.enabled:
            return optimizer
        precision = Precision(
            narrow=torch.bfloat16 if section.state_dtype == "bfloat16" else None,
            stochastic=section.stochastic_rounding,
            masters=section.master_weights,
        )
        state_bytes = check_supported(optimizer, precision)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        tiers = self._resources.clients["optimizer"]
        weights_bytes = sum(p.numel() * p.element_size() for p in parameters)
        waiting_bytes = max(0, weights_bytes - section.gradient_memory)
        need = optimizer_need(state_bytes, weights_bytes, section.overlap, waiting_bytes)
        complaint = shortfall(need, sum(tier.capacity - tier.used_bytes for tier in tiers))
        if complaint is not None:
            raise ConfigError(f"attach: {complaint}")
        self._registry.check_unclaimed(parameters)
        self._note_device(parameters)
        size = section.subgroup_size
        wrapped = OffloadedOptimizer(
            optimizer,
            self._resources.heap,
            tiers,
            overlap=section.overlap,
            subgroup_size=None if size == "auto" else int(size),
            is_last=self._is_last,
            state_bytes=state_bytes,
            precision=precision,
            waiting_room=self._resources.waiting_room,
            gradient_memory=section.gradient_memory,
            directories=self._resources.scratch_directories("optimizer"),
            residence=self._stream,
        )
        self._registry.claim_states(parameters, wrapped)
        self._optimizers.add(wrapped)
        return wrapped

    def _unwrap(self, optimizer: OffloadedOptimizer) -> None:
        optimizer.close()
        self._registry.release_states(optimizer.parameters(), optimizer)
        self._optimizers.discard(optimizer)

    def _note_device(self, parameters: Any) -> None:
        first = next(iter(parameters), None)
        if first is not None:
            self._device = first.device

    def detach_model(self, model: nn.Module) -> None:
        """Take the hooks off a model again; what left already comes back for its backward."""
        entry = self._hooks.pop(id(model), None)
        if entry is not None:
            entry[1].remove()
        if self._stream is not None:
            self._stream.detach(model)
        self._registry.remove_module(model)

    @contextmanager
    def building(self) -> Iterator[None]:
        """Make a model inside that need not fit: its weights leave as soon as others are made.

        With ``parameters.enabled``; without it, a model is made as ever. The weights are those of
        a plain build, to the last bit.
        """
        self._check_open()
        if self._stream is None:
            yield
            return
        with self._stream.building():
            yield

    def save_weights(
        self, model: nn.Module, directory: str | os.PathLike[str], shard_bytes: int = 256 * MiB
    ) -> list[Path]:
        """Save a model as safetensors, without ever having more than a shard of it in memory.

        Transformers' `from_pretrained` takes the directory as it is (with the `config.json` of its
        own). A file is replaced when the new one is on the disk.

        Args:
            model: attached or not.
            directory: is made if it is not there.
            shard_bytes: of one file at most, unless one tensor is larger.

        Returns:
            The files with tensors.

        Raises:
            ConfigError: safetensors are not installed.
            StorageError: a file cannot be written.
        """
        self._check_open()
        # Not torch.Tensor.detach, which state_dict() calls: that would bring every weight back.
        tensors = {
            name: value
            for name, value in model.state_dict(keep_vars=True).items()
            if isinstance(value, torch.Tensor)
        }
        read = _as_it_is if self._stream is None else self._stream.read
        return save_shards(tensors, Path(directory), shard_bytes, read)

    # ------------------------------------------------------------------ the loop
    @contextmanager
    def forward(self) -> Iterator[None]:
        """Offload what autograd saves inside: for work outside of `model.forward`, like a loss."""
        if self._activations is None or self.closed or not torch.is_grad_enabled():
            yield
            return
        with self._activations.forward():
            yield

    def microbatch(self, index: int, *, last: bool) -> None:
        """Hint, before a micro-batch's forward.

        Args:
            index: number of the micro-batch within its step, from 0.
            last: whether `optimizer.step()` follows its backward. Without hints every backward is
                taken for the last; that is never wrong, but work may be done twice.
        """
        if index < 0:
            raise ConfigError(f"microbatch: index must be 0 or more, got {index}")
        self._last_microbatch = last
        if self._activations is not None:
            self._activations.hint()

    def _is_last(self) -> bool:
        return self._last_microbatch

    def _before_forward(self) -> None:
        self._registry.refresh()
        self._forwards += 1
        if self._forwards == 2:
            self._advise()

    def _advise(self) -> None:
        """After one whole step, say so if all of this was not needed."""
        moved = sum(
            self._recorder.client_bytes("activations", verb) for verb in ("written", "forwarded")
        )
        moved += sum(optimizer.state_bytes for optimizer in self._optimizers)
        if self._device.type == "cuda":
            free = torch.cuda.mem_get_info(self._device)[0]
        else:
            free = available_bytes()
        advice = spare_memory_advice(moved, free)
        if advice is not None:
            logger.info(advice)

    # ------------------------------------------------------------------ metrics
    def metrics(self) -> dict[str, float]:
        """Figures of this moment, flat; bytes, seconds, GB/s (1e9 bytes per second) and shares.

        `offload/endurance/projected_years` is NaN while no tier has a rating
        (``tiers[].endurance_tbw``) or nothing was written.
        """
        recorder, resources = self._recorder, self._resources
        _ = resources.heap.live_tickets  # takes notice of tickets that were dropped since
        metrics: dict[str, float] = {}
        for client in CLIENTS:
            prefix = f"offload/{client}"
            for verb in ("written", "read", "forwarded"):
                metrics[f"{prefix}/{verb}_bytes"] = float(recorder.client_bytes(client, verb))
            metrics[f"{prefix}/stall_seconds"] = recorder.stall_seconds(client)
        for name, used_bytes in resources.tier_used_bytes().items():
            prefix = f"offload/tier/{name}"
            metrics[f"{prefix}/used_bytes"] = float(used_bytes)
            metrics[f"{prefix}/read_GBps"] = recorder.bandwidth_GBps(name, Direction.READ)
            metrics[f"{prefix}/write_GBps"] = recorder.bandwidth_GBps(name, Direction.WRITE)
            metrics[f"{prefix}/queued_seconds"] = sum(
                recorder.queue_seconds(name, direction) for direction in Direction
            )
        if self._activations is not None:
            for name, value in self._activations.figures().items():
                metrics[f"offload/activations/{name}"] = value
        for name in ("speculated_steps", "redone_steps"):
            metrics[f"offload/optimizer/{name}"] = sum(
                (optimizer.figures()[name] for optimizer in self._optimizers), 0.0
            )
        usage = resources.pool.usage()
        metrics["offload/memory/pinned_bytes"] = float(usage.held_bytes)
        metrics["offload/memory/pinned_peak_bytes"] = float(usage.peak_bytes)
        metrics["offload/memory/fragmentation"] = usage.fragmentation
        metrics["offload/host/rss_bytes"] = float(psutil.Process().memory_info().rss)
        metrics["offload/device/peak_bytes"] = self._device_peak_bytes()
        metrics["offload/transfer/busy_seconds"] = recorder.busy_seconds()
        metrics["offload/transfer/hidden_share"] = recorder.hidden_share()
        metrics.update(self._endurance())
        return metrics

    def export_trace(self, file: str | os.PathLike[str]) -> None:
        """Write the latest moves and waits as a trace for Perfetto or chrome://tracing.

        Args:
            file: to write; JSON.
        """
        write_trace(file, list(self._recorder.moves), list(self._recorder.stalls))

    def _device_peak_bytes(self) -> float:
        if self._device.type == "cuda":
            return float(torch.cuda.max_memory_allocated(self._device))
        return 0.0

    def _endurance(self) -> dict[str, float]:
        elapsed = time.perf_counter() - self._started_at
        written = 0
        years = math.inf
        for tier in self.config.tiers:
            if tier.kind != "ssd":
                continue
            tier_written = self._recorder.tier_bytes(tier.name, Direction.WRITE)
            written += tier_written
            if tier.endurance_tbw is not None and tier_written and elapsed > 0:
                rate = tier_written / elapsed
                years = min(years, tier.endurance_tbw * 1e12 / rate / _SECONDS_PER_YEAR)
        return {
            "offload/endurance/written_bytes": float(written),
            "offload/endurance/projected_years": years if math.isfinite(years) else math.nan,
        }

    # ------------------------------------------------------------------ life
    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return not self._finalizer.alive

    def close(self) -> None:
        """Detach every hook, end the threads, give all memory and disk space back. Idempotent.

        Optimizer states are gone after this: take `optimizer.state_dict()` before it.
        """
        if self._activations is not None:
            self._activations.enabled = False
        for reference, hooks in self._hooks.values():
            hooks.remove()
            if (model := reference()) is not None:
                self._registry.remove_module(model)
        self._hooks.clear()
        for optimizer in list(self._optimizers):
            self._unwrap(optimizer)
        try:
            if self._stream is not None and not self.closed:
                self._close_stream(self._stream)
        finally:
            self._finalizer()

    def _close_stream(self, stream: WeightStream) -> None:
        missing, free = stream.nbytes_away(), available_bytes()
        fits = missing < _RESTORED_SHARE * free
        if not fits:
            logger.warning(
                "close: %s of weights are on tiers and would not fit into the %s of memory that "
                "are free; they are given up, and the model's parameters are NaN from now on.",
                format_size(missing),
                format_size(free),
            )
        stream.close(restore=fits)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _check_open(self) -> None:
        if self.closed:
            raise OffloadError("this offload engine is closed; make a new one.")
        if os.getpid() != self._resources.pid:
            raise OffloadError(
                "a forked process cannot use its parent's offload engine. Make an engine in the "
                "process that trains."
            )

    def _make_activations(self) -> ActivationOffload | None:
        section = self.config.activations
        if not section.enabled and self._stream is None:
            return None
        fraction, limit = section.budget_fraction(), section.budget_bytes()
        return ActivationOffload(
            self._resources.heap,
            self._resources.clients.get("activations", []),
            self._registry.is_weight,
            before_forward=_weakly(self._before_forward),
            min_size=section.min_size if section.enabled else sys.maxsize,
            budget="auto" if section.budget == "auto" else limit if fraction is None else fraction,
            prefetch_bytes=None if section.prefetch == "auto" else int(section.prefetch),
            most_backlog=self.config.memory.pinned,
            save_weight=None if self._stream is None else self._stream.save,
        )

    def _make_stream(self) -> WeightStream | None:
        section = self.config.parameters
        if not section.enabled:
            return None
        return WeightStream(
            self._resources.heap,
            self._resources.clients["parameters"],
            blocks_in_flight=section.blocks_in_flight,
            classes=section.blocks,
            min_bytes=section.min_size,
        )


@contextmanager
def _as_it_is(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    yield tensor.detach()


def _weakly(method: Callable[[], None]) -> Callable[[], None]:
    """Call a bound method without keeping its object alive."""
    reference = weakref.WeakMethod(method)

    def call() -> None:
        if (alive := reference()) is not None:
            alive()

    return call
