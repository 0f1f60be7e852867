"""The engine: what the three lines of the public contract do."""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self, overload

import torch
from torch import nn
from torch.optim import Optimizer

from offload_strategy.activations.conflicting_offloads import refuse_checkpoints_that_offload
from offload_strategy.activations.forward_scope import ForwardHooks
from offload_strategy.activations.planned_budget import MemoryLimit
from offload_strategy.activations.saved_tensor_hooks import ActivationOffload, Packed
from offload_strategy.config import ConfigSource, OffloadConfig
from offload_strategy.engine import profile_run as dry_run
from offload_strategy.engine.attached_optimizers import SwappedOptimizers
from offload_strategy.engine.memory_prediction import predict_memory
from offload_strategy.engine.metrics import Metrics
from offload_strategy.engine.model_weights import ModelWeights
from offload_strategy.engine.resources import Resources
from offload_strategy.engine.step_log import StepLog, follow_step
from offload_strategy.engine.step_profiler import profile_step
from offload_strategy.errors import ConfigError, OffloadError
from offload_strategy.host_memory.memory_limits import available_bytes
from offload_strategy.host_memory.peak_memory import PeakMeter
from offload_strategy.optimizer.offloaded_optimizer import OffloadedOptimizer
from offload_strategy.optimizer.ranks.data_parallel_group import check_parallel, local_processes
from offload_strategy.plan_runtime.host_memory_prediction import MemoryForecast
from offload_strategy.plan_runtime.predicted_and_measured import FollowUp
from offload_strategy.plan_runtime.profile import Profile
from offload_strategy.plan_runtime.space_requirements import spare_memory_advice
from offload_strategy.plan_runtime.weight_schedule import StepPlan
from offload_strategy.telemetry import Recorder, get_logger, write_trace
from offload_strategy.torch_support.weak_callbacks import weakly
from offload_strategy.units import MiB
from offload_strategy.weights.checkpoint_loading import LoadedWeights
from offload_strategy.weights.parameter_registry import ParameterRegistry

logger = get_logger(__name__)

#: Forward passes between looks at how much was written.
_LOOK_EVERY = 32


class OffloadEngine:
    """Moves activations and optimizer states of attached models to tiers, while they train.

    Use it as a context manager, or call `close`; an engine that is forgotten closes itself when it
    is collected and when the process ends, and leaves nothing on disk either way.

    Args:
        config: an `OffloadConfig`, a mapping, a path to YAML or JSON, JSON text, a preset's name,
            or None for ``$SSD_OFFLOAD_CONFIG`` and else the defaults.
        is_block: with ``parameters.enabled`` says of a module, by its name, whether its weights
            come and go together; None to find layers that repeat.
        processes: that train on this machine with this config; the capacities of tiers are for all
            of them together. None for as many as torchrun started.

    Raises:
        ConfigError: the config is wrong, or a tier's directory cannot be used.
    """

    def __init__(
        self,
        config: ConfigSource = None,
        *,
        is_block: Callable[[str, nn.Module], bool] | None = None,
        processes: int | None = None,
    ) -> None:
        self.config = OffloadConfig.load(config)
        self._limit = MemoryLimit.configured(self.config.planning)
        self._recorder = Recorder()
        among = local_processes() if processes is None else processes
        self._resources = Resources.open(self.config.divided(among), self._recorder, among)
        self._finalizer = weakref.finalize(self, self._resources.close)
        self._registry = ParameterRegistry()
        self._weights = ModelWeights(self._resources, self.config.parameters, is_block)
        self._stream = self._weights.stream
        self._activations = self._make_activations()
        if self._stream is not None and self._activations is not None:
            self._stream.saving = self._activations.saving_weights
        self._hooks: dict[int, tuple[weakref.ref[nn.Module], ForwardHooks]] = {}
        self._optimizers = SwappedOptimizers(
            self._resources, self.config.optimizer, self._registry, self._stream
        )
        self._last_microbatch = True
        self._forwards = 0
        self._device = torch.device("cpu")
        self._metrics = Metrics(self.config, self._resources, self._recorder)
        self._log = StepLog(self._recorder)

    # ------------------------------------------------------------------ attaching
    @overload
    def attach(
        self,
        model: nn.Module | None,
        optimizer: Optimizer,
        *,
        device: torch.device | None = None,
    ) -> Optimizer: ...

    @overload
    def attach(
        self,
        model: nn.Module | None,
        optimizer: None = None,
        *,
        device: torch.device | None = None,
    ) -> None: ...

    @overload
    def attach(self, model: nn.Module | None = None, *, optimizer: Optimizer) -> Optimizer: ...

    def attach(
        self,
        model: nn.Module | None = None,
        optimizer: Optimizer | None = None,
        *,
        device: torch.device | None = None,
    ) -> Optimizer | None:
        """Hook a model in place, and wrap its optimizer.

        Args:
            model: its saved tensors are offloaded (``activations.enabled``). May be given again
                with another optimizer. None to swap an optimizer's states only.
            optimizer: one that updates every parameter by itself, as most of `torch.optim` do;
                its states are swapped (``optimizer.enabled``). None to offload activations only.
            device: where parameters are to be that are on the meta device; None for where the
                others are, else torch's default.

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
        if model is not None:
            check_parallel(
                model,
                streams=self._stream is not None,
                swaps=optimizer is not None and self.config.optimizer.enabled,
            )
            self._optimizers.note(model)
            self._weights.expect(model, _device_for(model) if device is None else device)
        wrapped = None
        if optimizer is not None:
            wrapped = self._optimizers.wrap(optimizer, self._is_last)
            if isinstance(wrapped, OffloadedOptimizer):
                self._note_device(wrapped.parameters())
        if wrapped is not None and self._stream is not None:
            stream = self._stream
            wrapped.register_step_post_hook(lambda *_: stream.start_over())
        try:
            if model is not None:
                self._hook(model, again_is_fine=optimizer is not None)
        except BaseException:
            if isinstance(wrapped, OffloadedOptimizer):
                self._optimizers.unwrap(wrapped)
            raise
        self._log.follow(wrapped)
        return wrapped

    def _hook(self, model: nn.Module, *, again_is_fine: bool) -> None:
        # Ids of models that died are given to others.
        for known in [key for key, (alive, _) in self._hooks.items() if alive() is None]:
            del self._hooks[known]
        if again_is_fine and id(model) in self._hooks:
            return
        if self.config.activations.enabled:
            refuse_checkpoints_that_offload(model)
        self._registry.add_module(model)
        self._note_device(model.parameters())
        if self._activations is not None:
            self._activations.names.add_modules(model)
            self._activations.blocks.add_model(model)
            hooks = ForwardHooks(model, self._activations, owner=self)
            self._hooks[id(model)] = (weakref.ref(model), hooks)
        if self._stream is not None:
            try:
                self._stream.attach(model)
            except BaseException:
                self.detach_model(model)
                raise

    def _note_device(self, parameters: Any) -> None:
        first = next(iter(parameters), None)
        if first is not None:
            self._device = first.device
            if self._limit is not None and self._limit.meter is None:
                self._limit.meter = PeakMeter(first.device)

    def detach_model(self, model: nn.Module) -> None:
        """Take the hooks off a model again; what left already comes back for its backward."""
        entry = self._hooks.pop(id(model), None)
        if entry is not None:
            entry[1].remove()
        if self._activations is not None:
            self._activations.blocks.remove_model(model)
        if self._stream is not None:
            self._stream.detach(model)
        self._registry.remove_module(model)

    def save_weights_by(self, save: Callable[[torch.Tensor], Packed | None]) -> None:
        """Have autograd hold something else in place of weights that it saves.

        For frameworks that take weights apart between forward and backward, as DeepSpeed's ZeRO-3
        does: only they know where the bytes are when backward needs them.

        Args:
            save: given what autograd saves, returns what it shall hold instead; None for a tensor
                that is no weight.

        Raises:
            ConfigError: weights are streamed by this engine.
        """
        self._check_open()
        if self._stream is not None:
            raise ConfigError(
                "save_weights_by: the weights are streamed by this engine, and have one owner. Set "
                "parameters.enabled: false."
            )
        if self._activations is not None:
            self._activations.save_weight = save

    @contextmanager
    def building(self) -> Iterator[None]:
        """Make a model inside that need not fit: its weights leave as soon as others are made.

        With ``parameters.enabled``; without it, a model is made as ever. The weights are those of
        a plain build, to the last bit.
        """
        self._check_open()
        with self._weights.building():
            yield

    def load_weights(
        self,
        model: nn.Module,
        source: str | os.PathLike[str],
        *,
        adopt: bool = False,
        strict: bool = True,
    ) -> LoadedWeights:
        """Load a model from safetensors, a few tensors in memory at a time.

        Names are those of the model's state_dict. The model may be attached or not; what it has on
        the meta device is made, so that nothing need fit that is streamed.

        Args:
            model: to load into.
            source: a file of safetensors, or a directory with one, or with shards and their index.
            adopt: leave the bytes of streamed weights in these files and read them from there, as
                long as they are not updated. The files must not be written to meanwhile; they may
                be renamed or unlinked.
            strict: names that are missing here or there are errors, as in `load_state_dict`.

        Returns:
            Missing and unexpected names.

        Raises:
            ConfigError: the files, or the names or shapes in them, are not the model's; safetensors
                are not installed. Nothing was changed.
            StorageError: a file cannot be read; the model has some of its values.
        """
        self._check_open()
        return self._weights.load(model, source, _device_for(model), adopt=adopt, strict=strict)

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
        return self._weights.save(model, directory, shard_bytes)

    def plan(self) -> StepPlan:
        """What one step moves of streamed weights and states, block by block; print it.

        In the order of the last step; before there was one, in that of the model's modules.

        Raises:
            ConfigError: weights are not streamed.
        """
        self._check_open()
        trained = sum(
            p.nbytes for optimizer in self._optimizers for p in optimizer.parameters()
            if p.requires_grad
        )  # fmt: skip
        share = self._optimizers.state_bytes / trained if trained else 0.0
        return self._weights.plan(share, updates=self.config.optimizer.overlap != "off")

    def profile(self) -> Profile:
        """What the last step saved, used and left idle, and when; and when it updated what.

        For `planning.plan_lifetimes`, for `planning.simulation.replay`, or as a file (its `save`)
        for ``ssd-offload plan --profile``. Time in which training waited is left out.

        Raises:
            ConfigError: nothing was trained yet, or activations are not offloaded.
        """
        self._check_open()
        found = None
        if self._activations is not None:
            shared = self._device.type == "cpu"
            found = profile_step(self._activations, list(self._optimizers), shared_cores=shared)
        if found is None:
            raise ConfigError(
                "profile: no pass was seen whose backward is over. Train a step first, with "
                "activations.enabled: true."
            )
        return found

    def follow_up(self) -> FollowUp:
        """A step as it was foretold beside the step as it was, part by part; print it.

        Foretold is what a replay says of the last step's profile, on paths as they were known when
        the engine was made (from earlier runs, or a probe). Observed is the middle one of the last
        five steps. Its `save` writes a file for ``ssd-offload report``.

        Raises:
            ConfigError: fewer than four steps were trained, or activations are not offloaded.
        """
        profile, found = self.profile(), None
        if self._activations is not None:
            optimizers = list(self._optimizers)
            found = follow_step(profile, self._activations, optimizers, self._resources, self._log)
        if found is None:
            raise ConfigError(
                "follow_up: too few steps were seen. Train four at least, and more for figures "
                "that mean something."
            )
        return found

    def predict_memory(
        self, model: nn.Module, optimizer: Optimizer, *inputs: Any, **named_inputs: Any
    ) -> MemoryForecast:
        """How much host memory a step of streamed training takes at most, before the first one.

        The step is gone through without data; nothing is computed or moved.

        Args:
            model: attached.
            optimizer: as `attach` returned it.
            inputs: of the model's forward, with the shapes and dtypes of a step's; what it returns
                must be, or have, a loss.
            named_inputs: likewise.

        Raises:
            ConfigError: weights are not streamed; the model cannot be gone through without values.
        """
        self._check_open()
        if self._stream is None or id(model) not in self._hooks:
            raise ConfigError(
                "predict_memory: the model's weights are not streamed. Attach it to an engine with "
                "parameters.enabled: true first."
            )
        return predict_memory(
            self.config, self._weights, self._device, model, optimizer, inputs, named_inputs
        )

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
        dry_run.look(self._forwards, self.profile)
        self._registry.refresh()
        self._log.pass_begins(last=self._last_microbatch)
        self._forwards += 1
        if self._forwards == 2:
            self._advise()
        if self._forwards % _LOOK_EVERY == 0:
            self._metrics.warn_of_wear()

    def _advise(self) -> None:
        """After one whole step, say so if all of this was not needed."""
        moved = sum(
            self._recorder.client_bytes("activations", verb) for verb in ("written", "forwarded")
        )
        moved += self._optimizers.state_bytes
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
        activations = {} if self._activations is None else self._activations.figures()
        optimizers = [optimizer.figures() for optimizer in self._optimizers]
        return self._metrics.read(self._device, activations, optimizers)

    def export_trace(self, file: str | os.PathLike[str]) -> None:
        """Write the latest moves and waits as a trace for Perfetto or chrome://tracing.

        Args:
            file: to write; JSON.
        """
        write_trace(file, list(self._recorder.moves), list(self._recorder.stalls))

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
            self._activations.blocks.close()
        for reference, hooks in self._hooks.values():
            hooks.remove()
            if (model := reference()) is not None:
                self._registry.remove_module(model)
        self._hooks.clear()
        self._log.close()
        self._optimizers.close()
        try:
            if not self.closed:
                self._weights.close()
        finally:
            self._finalizer()

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
        watched = self._limit is not None or dry_run.is_requested()
        return ActivationOffload(
            self._resources.store,
            self._resources.clients.get("activations", []),
            self._registry.is_weight,
            before_forward=weakly(self._before_forward),
            min_size=section.min_size if section.enabled else sys.maxsize,
            budget="auto" if section.budget == "auto" else limit if fraction is None else fraction,
            prefetch_bytes=None if section.prefetch == "auto" else int(section.prefetch),
            most_backlog=self.config.memory.pinned,
            plan_within=self._limit,
            recompute=self.config.planning.recompute if watched else False,
            save_weight=None if self._stream is None else self._stream.save,
        )


def _device_for(model: nn.Module) -> torch.device:
    """Where parameters are to be that are on the meta device: with the others, or the default."""
    for parameter in model.parameters():
        if not parameter.is_meta:
            return parameter.device
    return torch.get_default_device()
