"""`OffloadEngine`: attaching models and optimizers, micro-batch hints, closing."""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Self, overload
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from offload_strategy.activations.budgets import WriteBudget
from offload_strategy.activations.foreign_hooks import refuse_checkpoints_that_offload
from offload_strategy.activations.forward_scope import ForwardHooks, leave_interrupted_calls
from offload_strategy.activations.saved_tensor_hooks import ActivationOffload, Packed
from offload_strategy.config import ConfigSource, OffloadConfig
from offload_strategy.config.directories import local_processes
from offload_strategy.engine import profile_run
from offload_strategy.engine.attached_optimizers import AttachedOptimizers
from offload_strategy.engine.automatic_choice import AutomaticChoice
from offload_strategy.engine.metrics import Metrics
from offload_strategy.engine.reports import EngineReports
from offload_strategy.engine.resources import Resources, with_default_tiers
from offload_strategy.engine.step_log import StepLog
from offload_strategy.errors import ConfigError
from offload_strategy.host_memory.c_allocator import reuse_freed_memory
from offload_strategy.io.backends.thread_pool import run_off_pools
from offload_strategy.optimizer.offloaded_optimizer import OffloadedOptimizer
from offload_strategy.optimizer.ranks.data_parallel_group import check_parallel
from offload_strategy.plan_runtime.lifetime_plan import load_plan
from offload_strategy.plan_runtime.profile import check_writable
from offload_strategy.telemetry import get_logger
from offload_strategy.torch_support.keyboard_interrupts import clear_last_traceback
from offload_strategy.torch_support.modules import WeakHook
from offload_strategy.units import format_size
from offload_strategy.weights.parameter_registry import ParameterRegistry
from offload_strategy.weights.weight_stream import WeightStream

logger = get_logger(__name__)

#: Offload is reported as unnecessary if what it moves would fit this many times into free memory.
_FREE_MEMORY_FACTOR = 2


class OffloadEngine(EngineReports):
    """Offloads activations, optimizer states and weights of attached models while they train.

    Use it as a context manager, or call `close`. An engine that is not closed closes itself when it
    is garbage-collected and when the process ends; nothing is left on disk either way.

    Args:
        config: an `OffloadConfig`, a mapping, a path to YAML or JSON, JSON text, a preset's name,
            or None for ``$SSD_OFFLOAD_CONFIG`` and else the defaults.
        is_block: if weights are streamed, returns for a module and its name whether it is a
            block whose weights are loaded and freed together; None to use the repeated layers.
        processes: number of training processes on this machine that share the tiers' capacities;
            None for the number that torchrun started.

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
        # A cell that was interrupted may run again: the engine of before can close itself.
        leave_interrupted_calls()
        clear_last_traceback()
        self.config = OffloadConfig.load(config)
        by_default = "tiers" not in self.config.model_fields_set
        self.config = with_default_tiers(self.config)
        if self.config.report is not None:
            check_writable(self.config.report, "report: ")
        given = self.config.planning.plan
        plan = None if given is None else load_plan(given)  # before anything is open
        if processes is None:
            processes = local_processes() if dist.is_available() and dist.is_initialized() else 1
        self._resources = Resources(self.config.divided(processes), processes)
        self._resources.has_default_tiers = by_default
        self._recorder = self._resources.recorder
        self._metrics = Metrics(self._resources)
        self._finalizer = weakref.finalize(self, run_off_pools, self._resources.close)
        self._registry = ParameterRegistry()
        self._choice = AutomaticChoice(self.config, plan, self._resources, self._registry.modules)
        self._choice.limit.processes = processes
        self._is_block = is_block
        self._hooks: WeakKeyDictionary[nn.Module, ForwardHooks] = WeakKeyDictionary()
        self._optimizers = AttachedOptimizers(self._resources, self._registry, self._choice)
        self._stream_nothing()
        if self.config.parameters.enabled is True:
            self._start_stream()
        self._last_microbatch = True
        self._device = torch.device("cpu")
        self._log = StepLog(self._recorder, self._optimizers, self._metrics.warn_about_wear)
        log = weakref.ref(self._log)
        self._choice.limit.steps = lambda: 0 if (alive := log()) is None else alive.steps
        if self.config.prometheus_port is not None:
            metrics: Any = weakref.WeakMethod(self.metrics)
            rank = int(os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or 0)
            port = self.config.prometheus_port + rank
            self._resources.serve_metrics(port, lambda: (metrics() or dict)())

    # ------------------------------------------------------------------ attaching
    @overload
    def attach(
        self, model: nn.Module | None, optimizer: None = None, *, device: torch.device | None = None
    ) -> None: ...

    @overload
    def attach(
        self,
        model: nn.Module | None = None,
        optimizer: Optimizer = ...,
        *,
        device: torch.device | None = None,
    ) -> Optimizer: ...

    def attach(
        self,
        model: nn.Module | None = None,
        optimizer: Optimizer | None = None,
        *,
        device: torch.device | None = None,
    ) -> Optimizer | None:
        """Hook a model in place and wrap its optimizer.

        Args:
            model: the model whose saved tensors are offloaded (``activations.enabled``). It may be
                passed again with another optimizer. None offloads only an optimizer's states.
            optimizer: an optimizer that updates every parameter independently, as most of
                `torch.optim` do; its states are offloaded (``optimizer.enabled``). None offloads
                activations only.
            device: the device for parameters that are on the meta device; None for the device of
                the other parameters, else torch's default device.

        Returns:
            The optimizer to use from now on, or None if none was passed. One whose states cannot be
            offloaded is returned as it is, with a warning, unless the config asks for it by name.

        Raises:
            ConfigError: the model or the parameters are attached already, there are no parameters,
                the optimizer is not supported, or the tiers are too small for its states.
            OffloadError: the engine is closed.
        """
        self._check_open()
        if model is None and optimizer is None:
            raise ConfigError("attach: pass a model, an optimizer, or both.")
        if model is not None and not isinstance(model, nn.Module):
            raise ConfigError(f"attach: expected a torch.nn.Module, got {type(model).__name__}.")
        # It may come again with another optimizer.
        new = None if optimizer is not None and model in self._registry.modules else model
        if model is not None:
            swaps = optimizer is not None and bool(self.config.optimizer.enabled)
            check_parallel(model, streams=self._stream is not None, swaps=swaps)
            self._optimizers.dp_groups.register(model)
            is_first = self._stream is None and not self._hooks and not len(self._optimizers)
        wrapped = None
        with ExitStack() as undo:
            if model is not None:
                if is_first and self._choice.streams_weights(model):
                    undo.callback(self._stream_nothing)
                    self._start_stream()
                self._expect_weights(model, device)
            if new is not None:
                self._registry.add_module(new)
                undo.callback(self.detach_model, new)
            if optimizer is not None:
                wrapped = self._optimizers.wrap(optimizer, lambda: self._last_microbatch)
            if isinstance(wrapped, OffloadedOptimizer):
                undo.callback(self._optimizers.unwrap, wrapped)
                self._note_device(wrapped.parameters()[0])
            if new is not None:
                self._hook(new)
            undo.pop_all()
        self._log.follow(wrapped)
        return wrapped

    def _hook(self, model: nn.Module) -> None:
        if self.config.activations.enabled:
            refuse_checkpoints_that_offload(model)
        parameter = next(model.parameters())
        self._note_device(parameter)
        if self.config.activations.enabled is True and parameter.device.type == "cpu":
            reuse_freed_memory()
        if self._activations is not None:
            self._activations.names.add_modules(model)
            self._hooks[model] = ForwardHooks(model, self._activations, owner=self)
        if self._stream is not None:
            self._stream.attach(model, owner=self)

    def _note_device(self, parameter: torch.Tensor) -> None:
        self._device = parameter.device
        self._resources.note_device(parameter.device)
        self._choice.limit.measure(parameter)

    def is_attached(self, model: nn.Module) -> bool:
        """Return whether a model is attached."""
        return model in self._registry.modules

    def detach_model(self, model: nn.Module) -> None:
        """Remove the hooks from a model; what is offloaded is still loaded for its backward."""
        if model in self._hooks:
            self._hooks.pop(model).remove()
        if self._stream is not None:
            self._stream.detach(model)
        self._registry.modules.discard(model)

    def save_weights_by(self, save: Callable[[torch.Tensor], Packed | None]) -> None:
        """Replace saved weights by handles of a framework that partitions weights itself.

        DeepSpeed's ZeRO-3 frees gathered weights between forward and backward, so only DeepSpeed
        knows where the bytes are when backward needs them.

        Args:
            save: returns for a tensor that autograd saves the handle to keep instead, or None for
                a tensor that is not a weight.

        Raises:
            ConfigError: weights are streamed by this engine.
        """
        self._check_open()
        if self._stream is not None:
            raise ConfigError(
                "save_weights_by: this engine streams the weights already. Set "
                "parameters.enabled: false."
            )
        if self._activations is not None:
            self._activations.save_weight = save

    # ------------------------------------------------------------------ the loop
    @contextmanager
    def forward(self) -> Iterator[None]:
        """Offload tensors saved in this context, such as those of a loss outside `forward`."""
        if (offload := self._activations) is None or self.closed or not torch.is_grad_enabled():
            yield
            return
        hooks = offload.enter()
        try:
            yield
        finally:
            offload.leave(hooks)

    def microbatch(self, index: int, *, last: bool) -> None:
        """Announce a micro-batch before its forward pass.

        Before `attach`, one that is not the last tells ``mode: auto`` that gradients accumulate.

        Args:
            index: index of the micro-batch within its step, from 0.
            last: whether `optimizer.step()` follows its backward. Without this hint every backward
                is treated as the last one: results are the same, but work may be done twice.
        """
        if index < 0:
            raise ConfigError(f"microbatch: index must be 0 or more, got {index}")
        self._last_microbatch = last
        self._choice.accumulates |= not last
        if self._activations is not None:
            self._activations.hint()

    def _before_forward(self) -> None:
        profile_run.observe_pass(self._log.passes, self.profile)
        self._registry.refresh()
        self._log.pass_begins(last=self._last_microbatch)
        if self._log.passes == 1:
            devices = {p.device for model in self._registry.modules for p in model.parameters()}
            if devices and self._device not in devices:
                logger.warning(
                    f"the model has left {self._device}, for which engine.attach() chose tiers and "
                    f"limits of memory: offload may be slow. Move the model before it is attached."
                )
        if self._log.passes == 2:
            self._advise()
        if self._log.passes == self.config.planning.profile_steps + 2:
            self._choice.explain(self.effective_config())

    def _advise(self) -> None:
        """After the first forward pass, log it if everything would have fit in memory.

        Not with a limit: what it leaves is not known to be needed for anything else.
        """
        if self._choice.limit.nbytes is not None:
            return
        sent = self._recorder.client_bytes
        moved = sent["activations", "written"] + sent["activations", "forwarded"]
        moved += self._optimizers.state_bytes
        free = self._choice.limit.free_bytes(self._device)
        if 0 < moved * _FREE_MEMORY_FACTOR <= free:
            logger.info(
                f"offload is not needed here: the {format_size(moved)} that it moves would fit "
                f"into the {format_size(free)} of memory that are free"
            )

    # ------------------------------------------------------------------ life
    def end_threads(self) -> None:
        """Let transfers finish and end the engine's threads, at the end of a training.

        States can still be read and saved: transfers start threads, which end right after them.
        """
        if not self.closed:
            self.save_report()
            self._resources.end_threads()

    def close(self) -> None:
        """Remove every hook, end the threads, and free all memory and disk space. Idempotent.

        Optimizer states are lost: save `optimizer.state_dict()` before.
        """
        self.save_report()
        if self._activations is not None:
            self._activations.enabled = False
        for hooks in self._hooks.values():
            hooks.remove()
        self._hooks.clear()
        leave_interrupted_calls()  # of models that were freed
        self._registry.modules.clear()
        self._log.close()
        self._optimizers.close()
        try:
            if not self.closed:
                self._close_weights()
        finally:
            self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _stream_nothing(self) -> None:
        """Keep the weights of models in memory; only activations may leave."""
        self._stream = self._optimizers.stream = None
        self._activations = self._make_activations() if self.config.activations.enabled else None

    def _start_stream(self) -> None:
        """Stream the weights of models that are attached from now on."""
        tiers, section = self._resources.clients["parameters"], self.config.parameters
        store, files = self._resources.store, self._resources.shared_files()
        stream = WeightStream(store, tiers, section, self._is_block, files)
        self._stream = self._optimizers.stream = stream
        if self._activations is None:
            self._activations = self._make_activations()
        self._activations.save_weight = stream.save
        self._activations.keep_weights = stream.pin_open_blocks
        stream.saving = self._activations.saving_weights

    def _make_activations(self) -> ActivationOffload:
        section = self.config.activations
        tiers = self._resources.config.tiers_for("activations")
        budgets = {tier.name: tier.writes_per_day for tier in tiers if tier.writes_per_day}
        return ActivationOffload(
            self._resources.store,
            self._resources.clients.get("activations", []),
            self._registry.is_weight,
            before_forward=WeakHook(self._before_forward),
            min_size=section.min_size if section.enabled else sys.maxsize,
            budget=section.limit(),
            prefetch_bytes=None if section.prefetch == "auto" else int(section.prefetch),
            most_backlog=self._resources.pinned_bytes,
            write_budget=WriteBudget(budgets, self._resources.store) if budgets else None,
            memory=self._choice.limit,
            plans=self._choice.plans_activations(),
            verify=section.verify,
        )
