"""The session of one `Accelerator`: its engine, from the first `prepare` to `free_memory`.

[Note: where models and optimizers are attached]
`prepare_model` and `prepare_optimizer` are wrapped rather than `prepare`: both are public, and
scripts call them one by one as well. DeepSpeed and FSDP2 bypass them, so what they have is attached
at the end of `prepare`; the sections for DeepSpeed's own offload are added to its config when the
`Accelerator` is created (config_sections.py). Others that bypass them (FSDP1, Megatron) are refused
there. The model is attached as Accelerate returns it, so that hooks stay outside of a compiled
region. The optimizer is wrapped before `AcceleratedOptimizer` wraps it.

[Note: free_memory]
`free_memory` drops Accelerate's references, but not those of the script: Transformers' `Trainer`
calls it at the start of each `train()` and continues with the same optimizer and its states. So the
engine closes when the script has dropped its prepared optimizers, or prepares new objects: then
nobody can read the states any more. Until then the session is retired.

[Note: metrics]
Metrics are added to the script's own `accelerator.log` calls, at its steps: separate calls with
another step count would make trackers with increasing steps (W&B) drop the script's values. The
Trainers of Transformers and TRL report to loggers of their own (callbacks/trainer_reports.py).
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from offload_strategy.callbacks.logged_metrics import LoggedMetrics
from offload_strategy.config import OffloadConfig
from offload_strategy.errors import ConfigError
from offload_strategy.integrations import is_offloaded
from offload_strategy.integrations.accelerate.state_saving import streaming
from offload_strategy.integrations.deepspeed import config_sections
from offload_strategy.integrations.deepspeed.gathered_weights import install
from offload_strategy.io.backends.thread_pool import run_off_pools
from offload_strategy.torch_support.modules import WeakHook

if TYPE_CHECKING:
    from accelerate import Accelerator

    from offload_strategy.engine.offload_engine import OffloadEngine

Original = Callable[..., Any]
"""A method of the `Accelerator` as it was."""


class Session:
    """What the methods of an `Accelerator`, which it does not keep alive, do while it offloads."""

    def __init__(self, config: OffloadConfig, metrics_every: int, accelerator: Accelerator) -> None:
        self.config = config
        self._metrics_every = metrics_every  # Optimizer steps; 0 for never
        self._accelerator = weakref.ref(accelerator)
        self._engine: OffloadEngine | None = None
        # Not Accelerate's own flag: `evaluate()` before `train()` sets that one as well.
        self._attached: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        _sessions.add(self)
        # The model's hooks keep the engine alive, and the model may outlive the accelerator.
        weakref.finalize(accelerator, run_off_pools, self._retire).atexit = False
        self._attached_again: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._retired = False
        self._hooks = ExitStack()  # by which they are removed
        self._counts_steps = False
        self._steps = 0
        self._logged: LoggedMetrics | None = None
        self._logged_at = -math.inf
        self._log_step: int | None = None

    def __reduce__(self) -> Any:
        """A copy of an `Accelerator` has a session without an engine."""
        return type(self), (self.config, self._metrics_every, self._accelerator())

    @property
    def engine(self) -> OffloadEngine:
        """The open engine; a new one after `close`."""
        if self._engine is None:
            from offload_strategy.engine.offload_engine import OffloadEngine

            self._engine = OffloadEngine(self.config)
            self._logged = LoggedMetrics(self._engine.metrics)
        return self._engine

    @property
    def _owner(self) -> Accelerator:
        accelerator = self._accelerator()
        assert accelerator is not None, "called through it"
        return accelerator

    # ------------------------------------------------------------------ methods of Accelerator
    def prepare(self, original: Original, *objects: Any, **options: Any) -> Any:
        """Attach also what DeepSpeed or FSDP2 make only here."""
        self.begin(*objects)
        prepared = original(*objects, **options)
        self._attach_prepared(prepared if len(objects) > 1 else (prepared,))
        return prepared

    def _attach_prepared(self, results: tuple[Any, ...]) -> None:
        """Attach what FSDP2 has sharded: its optimizers have their parameters only now."""
        if not self._owner.is_fsdp2:
            return
        for each in results:
            if isinstance(each, torch.nn.Module):
                self.attach_model(each)
        for each in results:
            if isinstance(each, Optimizer):
                accelerated: Any = each
                accelerated.optimizer = self.attach_optimizer(accelerated.optimizer)
                self._keep_for(each)

    def prepare_model(
        self,
        original: Original,
        model: torch.nn.Module,
        device_placement: bool | None = None,
        evaluation_mode: bool = False,
    ) -> Any:
        """Attach the model as Accelerate returns it, unless it is only evaluated."""
        if evaluation_mode:
            return original(model, device_placement=device_placement, evaluation_mode=True)
        self.begin(model)
        is_meta = any(parameter.is_meta for parameter in model.parameters())
        if self.config.parameters.enabled is True and is_meta:
            device_placement = False  # `Module.to` refuses what `attach_model` will make
        prepared = original(model, device_placement=device_placement)
        self.attach_model(prepared)
        return prepared

    def prepare_optimizer(
        self, original: Original, optimizer: Optimizer, device_placement: bool | None = None
    ) -> Any:
        """Wrap the optimizer before Accelerate does; that of FSDP2 is attached by `prepare`."""
        if self._owner.is_fsdp2:
            return original(optimizer, device_placement=device_placement)
        self.begin(optimizer)
        if not getattr(optimizer, "_is_accelerate_prepared", False):
            optimizer = self.attach_optimizer(optimizer)
        prepared = original(optimizer, device_placement=device_placement)
        self._keep_for(prepared)
        return prepared

    def prepare_scheduler(self, original: Original, scheduler: Any) -> Any:
        """Let the scheduler wait for its own optimizer.

        It holds the script's optimizer, by which Accelerate does not find the wrapped one; a
        scheduler without its optimizer waits for every optimizer to step.
        """
        prepared = original(scheduler)
        for optimizer in self._owner._optimizers:
            inner = getattr(optimizer.optimizer, "inner", None)
            if inner is not None and inner is getattr(scheduler, "optimizer", None):
                prepared.optimizers = [optimizer]
        return prepared

    def log(
        self,
        original: Original,
        values: Mapping[str, Any],
        step: int | None = None,
        log_kwargs: dict[str, Any] | None = None,
    ) -> None:
        """Add metrics to the values, if they are due; see [Note: metrics]."""
        if self._owner.trackers:
            self._log_step = step
            values = {**self.metrics(), **values}
        original(values, step=step, log_kwargs=log_kwargs)

    def end_training(self, original: Original) -> None:
        """Log the metrics of the last step, and end the threads: states can still be saved.

        At the script's last step, which is also right for one that writes to its trackers itself.
        """
        if metrics := self.metrics(now=True):
            for tracker in self._owner.trackers:
                tracker.log(metrics, step=self._log_step)
        original()
        if self._engine is not None:
            self._engine.end_threads()

    def free_memory(self, original: Original, *objects: Any) -> Any:
        """Retire; see [Note: free_memory]."""
        released = original(*objects)
        self._retire()
        return released

    def save_state(self, original: Original, *args: Any, **kwargs: Any) -> Any:
        """Save; the file of offloaded optimizers is streamed."""
        with streaming(self._owner):
            return original(*args, **kwargs)

    load_state = save_state

    # ------------------------------------------------------------------ the engine
    def begin(self, *objects: Any) -> None:
        """Before these objects are prepared, keep a retired engine or close it."""
        optimizers = [obj for obj in objects if isinstance(obj, Optimizer)]
        self._take_over(optimizers)
        if not self._retired:
            return
        models = [obj for obj in objects if isinstance(obj, torch.nn.Module)]
        if any(optimizer in self._optimizers for optimizer in optimizers):
            self._retired = False
        elif optimizers or any(model not in self._attached for model in models):
            again = list(self._attached_again)
            self.close()
            for model in again:
                self.attach_model(model)

    def _take_over(self, optimizers: list[Optimizer]) -> None:
        """Give optimizers that come again the states that they have in an earlier engine."""
        for other in list(_sessions):
            if other is self and not self._retired:
                continue  # it says that they are attached already
            prepared: list[Any] = list(other._optimizers)
            if other is not self and any(optimizer in optimizers for optimizer in prepared):
                raise ConfigError(
                    "prepare: this optimizer was prepared by another Accelerator, which has its "
                    "states. Go on with that one, or prepare the optimizer that was given to it."
                )
            wrapped = [each.optimizer for each in prepared if is_offloaded(each.optimizer)]
            again = [each for each in wrapped if each.inner in optimizers]
            for each in again:
                each.give_states_back()
            if again and other is not self:
                other.close()

    def _keep_for(self, prepared: Optimizer) -> None:
        """Keep the engine while a prepared optimizer is held; the accelerator may end earlier."""
        if prepared in self._optimizers:
            return
        self._optimizers.add(prepared)
        weakref.finalize(prepared, run_off_pools, self._close_if_dropped).atexit = False

    def _retire(self) -> None:
        self._retired = True
        self._close_if_dropped()

    def _close_if_dropped(self) -> None:
        """Close a retired engine as soon as the script has dropped its optimizers."""
        if self._retired and not list(self._optimizers):
            self.close()

    def attach_model(self, model: torch.nn.Module) -> None:
        """Offload what `model` saves for backward, unless it is attached already."""
        if next(model.parameters(), None) is None:
            return  # A loss function that was prepared as a module.
        if model in self._attached:
            if self._retired:
                self._attached_again.add(model)
            return
        for other in list(_sessions):
            if other is not self and _unwrapped(model) in map(_unwrapped, other._attached):
                other.close()  # as plain training, this goes on with the model
        with self._explained():
            if self._owner.gradient_accumulation_steps > 1:
                self.engine.microbatch(0, last=False)
            self.engine.attach(model, device=self._owner.device)
        self._attached.add(model)
        hook = WeakHook(self._begin_micro_batch)
        # After `attach`, whose hook is prepended too: the hint comes before its forward pass.
        self._hooks.callback(model.register_forward_pre_hook(hook, prepend=True).remove)

    def attach_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Return the optimizer that keeps its states in tiers."""
        if is_offloaded(optimizer):
            return optimizer  # The script attached it to an engine of its own.
        if self._owner.scaler is not None:
            self.config.check_gradients_untouched("Accelerate's loss scaling (mixed_precision)")
        with self._explained():
            wrapped = self.engine.attach(optimizer=optimizer)
        if not self._counts_steps:  # Of several optimizers, the steps of the first.
            self._counts_steps = True
            self._hooks.callback(wrapped.register_step_post_hook(self._after_step).remove)
        return wrapped

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Say what to do about an attachment that is refused; an engine that has none is closed."""
        try:
            yield
        except ConfigError as error:
            if "already" in str(error):
                error.add_note(
                    "accelerator.free_memory() ends an earlier training and its engine. The states "
                    "of its optimizers go with it: take their state_dict() before."
                )
            if not self._attached and not self._counts_steps:
                self.close()
            raise

    def _begin_micro_batch(self, module: torch.nn.Module, _: Any) -> None:
        """Tell the engine that a micro-batch begins, and whether gradients are complete after it.

        Accelerate decides on that before the forward pass; with manual accumulation it always says
        yes. So it is a hint, and the boundary is the optimizer's `step()`.
        """
        accelerator, engine = self._accelerator(), self._engine
        if not torch.is_grad_enabled() or accelerator is None or engine is None or engine.closed:
            return
        engine.microbatch(0, last=accelerator.sync_gradients)

    def _after_step(self, *_: Any) -> None:
        self._steps += 1

    def metrics(self, now: bool = False) -> dict[str, float]:
        """Return the metrics if they are due, with `now` after any new step; [Note: metrics]."""
        if self._logged is None or self.engine.closed:
            return {}
        every, behind = self._metrics_every, self._steps - self._logged_at
        if every == 0 or behind < (1 if now else every):
            return {}
        self._logged_at = self._steps
        return self._logged.read()

    def close(self) -> None:
        """Close the engine and remove all hooks; the session may open a new engine later."""
        self._hooks.close()
        self._attached.clear()
        self._attached_again.clear()
        self._optimizers.clear()
        self._counts_steps = False
        self._retired = False
        engine, self._engine, self._logged = self._engine, None, None
        if engine is not None:
            engine.close()


#: Those of all accelerators, so that a model that is prepared again leaves the earlier one.
_sessions: weakref.WeakSet[Session] = weakref.WeakSet()


def _unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """Return the model inside of Accelerate's data-parallel wrapper."""
    if isinstance(model, torch.nn.parallel.DistributedDataParallel):
        module: torch.nn.Module = model.module
        return module
    return model


class DeepSpeedSession(Session):
    """A `Session` that leaves the optimizer to DeepSpeed.

    Raises a ConfigError if the two configs contradict each other, or NVMe cannot be used here.
    """

    def __init__(self, config: OffloadConfig, metrics_every: int, accelerator: Accelerator) -> None:
        plugin: Any = accelerator.state.deepspeed_plugin
        sections = config_sections.derived_sections(plugin.deepspeed_config, config)
        if sections:
            config_sections.check_nvme(sections)
            config_sections.merge_sections(plugin.deepspeed_config, sections)
            if plugin.zero3_init_flag:
                plugin.set_deepspeed_weakref()  # by which Transformers makes models in pieces
        super().__init__(config_sections.for_activations(config), metrics_every, accelerator)

    def _attach_prepared(self, results: tuple[Any, ...]) -> None:
        """Attach the DeepSpeed engines among the results."""
        import deepspeed

        for each in results:
            # An engine without an optimizer is only evaluated.
            if isinstance(each, deepspeed.DeepSpeedEngine) and each.optimizer is not None:
                self.attach_model(each)

    def attach_model(self, model: torch.nn.Module) -> None:
        """Offload the saved tensors of DeepSpeed's engine, unless it is attached already."""
        is_new = model not in self._attached
        super().attach_model(model)
        if is_new and model in self._attached and (weights := install(self.engine, model)):
            self._hooks.callback(weights.remove)

    def attach_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Return the optimizer unchanged."""
        return optimizer

    def metrics(self, now: bool = False) -> dict[str, float]:
        """Return the metrics for the trackers; the steps are DeepSpeed's."""
        engines: list[Any] = list(self._attached)
        self._steps = max((int(engine.global_steps) for engine in engines), default=0)
        return super().metrics(now)
