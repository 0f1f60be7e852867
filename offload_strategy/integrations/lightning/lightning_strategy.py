"""The Lightning strategy, shared by `lightning.pytorch` and `pytorch_lightning`.

[Note: the last micro-batch]
With automatic optimization Lightning runs `training_step` inside `Strategy.optimizer_step` for the
last micro-batch before an update and outside of it for the others, also in a partial last group.
So the strategy can tell the engine which backward pass is the last. With manual optimization this
is unknown in advance, and the engine gets no hint.

[Note: one device]
A `DDPStrategy` with one device still creates a process group and a distributed sampler, so data
order and weights differ. One device therefore has a `SingleDeviceStrategy`, and several have a
`DDPStrategy`. The Trainer sets `parallel_devices` and `num_nodes` after it received the strategy;
at that point a single-device strategy changes its class. `cluster_environment`, which was set
before, is passed on.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Mapping
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any, cast

import torch

from offload_strategy.integrations import is_offloaded
from offload_strategy.integrations.lightning.deepspeed_strategy import DeepSpeedOffloadMixin
from offload_strategy.integrations.lightning.engine_strategy import (
    EngineStrategy,
    OneDeviceStrategy,
    StreamingCheckpointIO,
    define_in,
    register_in,
)

if TYPE_CHECKING:
    from lightning.fabric.plugins import CheckpointIO
    from lightning.pytorch import Trainer
    from lightning.pytorch.accelerators import Accelerator
    from lightning.pytorch.plugins.precision import Precision

    from offload_strategy.config import ConfigSource
    from offload_strategy.engine.offload_engine import OffloadEngine


class OffloadStrategyMixin(EngineStrategy):
    """A strategy that trains through an `OffloadEngine`; its other options are Lightning's."""

    optimizers: Any  # Lightning's own property
    _fitting = False
    _in_optimizer_step = False

    def tensor_init_context(self, empty_init: bool | None = None) -> Any:
        """Context in which a module is created; streamed weights are offloaded meanwhile."""
        return self._model_init(super().tensor_init_context, empty_init)

    def model_to_device(self) -> None:
        """Move the model to the device, unless its weights are streamed."""
        if not self._stays(self.model):
            super().model_to_device()

    def _opened_engine(self) -> OffloadEngine:
        if self in _fitted:
            self._close_engine()
        return super()._opened_engine()

    # ------------------------------------------------------------------ fit
    def setup_optimizers(self, trainer: Trainer) -> None:
        """Open the engine and wrap the module's optimizers; Lightning calls this only for `fit`.

        Schedulers keep the module's own optimizer, whose parameter groups are the wrapper's.
        """
        if trainer.gradient_clip_val:
            self.config.check_gradients_untouched("Trainer(gradient_clip_val=...)")
        if getattr(self.precision_plugin, "scaler", None) is not None:
            self.config.check_gradients_untouched("Trainer(precision=...) with loss scaling")
        module = self.lightning_module
        clips = type(module).configure_gradient_clipping
        if module.automatic_optimization and not clips.__module__.startswith(f"{self.family}."):
            self.config.check_gradients_untouched("the module's configure_gradient_clipping")
        earlier = self._earlier_fits()
        wrapped = [optimizer for fit in earlier for optimizer in fit.optimizers]
        super().setup_optimizers(trainer)
        # An optimizer that the module returns again in a later fit gets its states back.
        for optimizer, before in product(self.optimizers, wrapped):
            if is_offloaded(before) and before.inner is optimizer:
                before.give_states_back()
        for fit in earlier:
            fit._close_engine()

        engine = self._opened_engine()
        _fitted.add(self)
        self._fitting = True
        if trainer.accumulate_grad_batches > 1:
            engine.microbatch(0, last=False)
        try:
            engine.attach(self.model, device=self.root_device)
            self.optimizers = [_attach(engine, optimizer) for optimizer in self.optimizers]
        except BaseException:
            self._close_engine()
            raise

    def _earlier_fits(self) -> list[OffloadStrategyMixin]:
        """Return the finished fits, of any Trainer, whose engine still has states of this model.

        It stays open for `save_checkpoint` until the next `fit` needs its parameters.
        """
        wanted = {id(parameter) for parameter in self.lightning_module.parameters()}

        def has_states(fit: OffloadStrategyMixin) -> bool:
            groups = [group for optimizer in fit.optimizers for group in optimizer.param_groups]
            return any(id(parameter) in wanted for group in groups for parameter in group["params"])

        return [fit for fit in _fitted if fit is self or (not fit._fitting and has_states(fit))]

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's training step, offloading its saved tensors."""
        engine = self._engine
        if engine is None or not self._fitting:  # a step by hand after `fit`
            return super().training_step(*args, **kwargs)
        module = self.lightning_module
        if module is not None and module.automatic_optimization:
            # See [Note: the last micro-batch].
            engine.microbatch(0, last=self._in_optimizer_step)
        with engine.forward():
            return super().training_step(*args, **kwargs)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the closure with the last micro-batch, then the update."""
        self._in_optimizer_step = True
        try:
            return super().optimizer_step(*args, **kwargs)
        finally:
            self._in_optimizer_step = False
            if not self._fitting and self._engine is not None:
                self._engine.end_threads()  # after `fit`, no thread outlives what needed it

    # ------------------------------------------------------------------ checkpoints, end
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load states into their tiers; Lightning's method would move all of them to the device."""
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=False):
            # A plain optimizer would keep tensors that are mapped from the checkpoint's file.
            optimizer.load_state_dict(state if is_offloaded(optimizer) else copy.deepcopy(state))

    def teardown(self) -> None:
        """Remove the hooks from the model; `save_checkpoint` can still read optimizer states.

        The engine is closed by the next `fit` of the model, with the strategy, or at exit.
        """
        engine, fitted = self._engine, self._fitting
        self._fitting = False
        if engine is not None and not engine.closed and self.model is not None:
            engine.detach_model(self.model)
            # The next backward may belong to other code: do not update ahead of a step.
            engine.microbatch(0, last=False)
            if fitted:
                engine.end_threads()
        # Lightning moves optimizer states to the CPU, which would load all offloaded ones.
        optimizers = self.optimizers
        self.optimizers = [each for each in optimizers if not is_offloaded(each)]
        try:
            super().teardown()
        finally:
            self.optimizers = optimizers

    def _close_engine(self) -> None:
        _fitted.discard(self)
        super()._close_engine()

    def __getstate__(self) -> dict[str, Any]:
        # A copy has no engine, and offloaded optimizers do not work without theirs.
        fresh = {"_fitting": False, "_optimizers": []}
        return {**super().__getstate__(), **fresh, "lr_scheduler_configs": []}


_fitted: weakref.WeakSet[OffloadStrategyMixin] = weakref.WeakSet()
"""The strategies whose engine is that of a `fit`, and not one that was opened to build a model."""


def _attach(engine: OffloadEngine, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Attach an optimizer, if it has anything to train."""
    if not any(p.requires_grad for group in optimizer.param_groups for p in group["params"]):
        return optimizer  # Lightning's placeholder where configure_optimizers returned None
    wrapped = engine.attach(optimizer=optimizer)
    if is_offloaded(wrapped):
        # LearningRateMonitor looks for the wrapped optimizer here.
        cast(Any, wrapped).optimizer = optimizer
    return wrapped


class SingleDeviceMixin(OneDeviceStrategy, OffloadStrategyMixin):
    """Trains with activations and optimizer states on host memory and SSDs.

    For one device, and by another class for several; see [Note: one device].

    Args:
        config: Sections tiers, activations, optimizer, parameters, io and memory with the options
            that `ssd-offload config schema` explains; or a YAML or JSON file with them, or a preset
            (activations, optimizer, full). None for $SSD_OFFLOAD_CONFIG, else the defaults.
        ddp: Options of Lightning's `DDPStrategy`, for a Trainer with several devices.
        accelerator: Passed on to Lightning's strategy.
        checkpoint_io: Reads and writes checkpoints; None for one that streams local files.
        precision_plugin: Passed on to Lightning's strategy.

    Raises:
        ConfigError: If the config is wrong.
    """

    precision_option = "precision_plugin"

    def __init__(
        self,
        config: ConfigSource = None,
        *,
        ddp: Mapping[str, Any] | None = None,
        accelerator: Accelerator | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        given = {"accelerator": accelerator, "checkpoint_io": checkpoint_io}
        super().__init__(config, ddp=ddp, precision_plugin=precision_plugin, **given)


class ShardedMixin(OffloadStrategyMixin):
    """A `ModelParallelStrategy` (FSDP2, tensor parallelism) whose local shards are offloaded.

    The module applies `fully_shard` in `configure_model`, with `self.device_mesh`, as for
    Lightning's own strategy.

    Args:
        config: as in `SingleDeviceMixin`.
        options: options of Lightning's `ModelParallelStrategy`. ``data_parallel_size="auto"``, the
            default, shards the model over all processes divided by `tensor_parallel_size`, the
            number of processes that compute a layer together: with "auto", one.

    Raises:
        ConfigError: the config is wrong.
    """

    strategy_name = "ssd_offload_fsdp"

    def setup_environment(self) -> None:
        """Create the process group and the device mesh."""
        strategy = cast(Any, self)
        # Lightning's defaults are tensor parallelism within each node, and the number of nodes.
        if strategy._tensor_parallel_size == "auto":
            strategy._tensor_parallel_size = 1
        if strategy._data_parallel_size == "auto":
            processes = strategy.num_nodes * strategy.num_processes
            strategy._data_parallel_size = processes // strategy._tensor_parallel_size
        super().setup_environment()


def trainer_classes(module: str, checkpoint_io: type, strategies: Any) -> tuple[Any, ...]:
    """Define the classes of a family of Trainers for its module, and register its strategies."""
    io = define_in(module, "OffloadCheckpointIO", StreamingCheckpointIO, checkpoint_io)
    define = partial(define_in, module, checkpoint_io_class=io)
    parallel = define(
        "SSDOffloadDataParallelStrategy", OffloadStrategyMixin, strategies.DDPStrategy
    )
    registered = (
        define(
            "SSDOffloadStrategy",
            SingleDeviceMixin,
            strategies.SingleDeviceStrategy,
            parallel_class=parallel,
        ),
        define("SSDOffloadFSDPStrategy", ShardedMixin, strategies.ModelParallelStrategy),
        define("SSDOffloadDeepSpeedStrategy", DeepSpeedOffloadMixin, strategies.DeepSpeedStrategy),
    )
    register_in(strategies.StrategyRegistry, *registered)
    return io, parallel, *registered
