"""The Lightning strategy, shared by `lightning.pytorch` and `pytorch_lightning`.

The two are separate installs of the same code: each has its own `Strategy` class, registry and
Trainer, and a Trainer accepts only its own. The strategy is therefore a mixin;
`for_lightning_pytorch` and `for_pytorch_lightning` derive one class each, at module level so that
it can be pickled. Neither imports the other install.

    from lightning.pytorch import Trainer
    from offload_strategy.integrations.lightning import SSDOffloadStrategy

    Trainer(strategy="ssd_offload")                       # $SSD_OFFLOAD_CONFIG, or the defaults
    Trainer(strategy=SSDOffloadStrategy(config="full"))   # a preset, file or mapping
    Trainer(strategy="ssd_offload", devices=2)            # DistributedDataParallel

device_strategies.py has the differences between one device and several.

[Note: the last micro-batch]
With automatic optimization Lightning runs `training_step` inside `Strategy.optimizer_step` for the
last micro-batch before an update and outside of it for the others, also in a partial last group.
So the strategy can tell the engine which backward pass is the last. With manual optimization this
is unknown in advance, and the engine gets no hint.

[Note: models that do not fit]
With streamed weights a module is created in `configure_model`, or within `Trainer.init_module()`,
and its weights are offloaded meanwhile (`OffloadEngine.building`). With
`init_module(empty_init=True)` it is on the meta device until `fit` initializes each module.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch

if TYPE_CHECKING:
    from lightning.fabric.plugins import CheckpointIO
    from lightning.pytorch import Trainer
    from lightning.pytorch.strategies import Strategy as _Strategy

    from offload_strategy.config import ConfigSource, OffloadConfig
    from offload_strategy.engine.offload_engine import OffloadEngine
else:
    # The concrete class has the base of its own install.
    _Strategy = object

__all__ = ["FAMILIES", "STRATEGY_NAME", "OffloadStrategyMixin", "register_in"]

STRATEGY_NAME = "ssd_offload"

#: Module of the strategies for each Lightning install.
FAMILIES = {
    "lightning.pytorch": "offload_strategy.integrations.lightning.for_lightning_pytorch",
    "pytorch_lightning": "offload_strategy.integrations.lightning.for_pytorch_lightning",
}


class OffloadStrategyMixin(_Strategy):
    """A strategy that trains through an `OffloadEngine`.

    Args:
        config: anything that `OffloadConfig.load` reads; None for $SSD_OFFLOAD_CONFIG, else the
            defaults.
        options: passed on to Lightning's strategy.

    Raises:
        ConfigError: the config is wrong.
    """

    strategy_name = STRATEGY_NAME
    family: str
    checkpoint_io_class: type[CheckpointIO]

    def __init__(
        self,
        config: ConfigSource = None,
        **options: Any,
    ) -> None:
        from offload_strategy.config import OffloadConfig

        super().__init__(**options)
        self.config: OffloadConfig = OffloadConfig.load(config)
        self._engine: OffloadEngine | None = None
        self._when_gone: weakref.finalize[..., Any] | None = None
        self._fitting = False
        # Whether the engine was opened to build a model, and has no optimizer yet.
        self._is_ahead = False
        self._in_optimizer_step = False
        self._micro_batch = 0

    @property
    def local_processes(self) -> int:
        """Number of processes of the Trainer on this node."""
        return 1

    @property
    def offload_engine(self) -> OffloadEngine | None:
        """The engine of the current or the last `fit`; None before the first."""
        return self._engine

    # ------------------------------------------------------------------ models that do not fit

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Context in which a module is created; see [Note: models that do not fit].

        Args:
            empty_init: whether to skip initialization, because a checkpoint will be loaded.
        """
        if not self.config.parameters.enabled:
            with super().tensor_init_context(empty_init=empty_init):
                yield
        elif empty_init:
            with torch.device("meta"), self.precision_plugin.tensor_init_context():
                yield
        else:
            with super().tensor_init_context(), self._opened_engine().building():
                yield

    def model_to_device(self) -> None:
        """Move the model to the device, unless its weights are streamed."""
        assert self.model is not None
        tensors = [*self.model.parameters(), *self.model.buffers()]
        if self.config.parameters.enabled and all(
            tensor.is_meta or tensor.device == self.root_device for tensor in tensors
        ):
            return  # `Module.to` would load every weight, and refuse the meta device
        cast(Any, super()).model_to_device()

    def _opened_engine(self) -> OffloadEngine:
        """Return the engine of the next fit, opening it if needed."""
        from offload_strategy.engine.offload_engine import OffloadEngine

        if self._engine is None or self._engine.closed or not self._is_ahead:
            self._close_engine()
            self._engine = engine = OffloadEngine(self.config, processes=self.local_processes)
            # The model's hooks keep the engine alive, and the model may outlive the Trainer.
            self._when_gone = weakref.finalize(self, engine.close)
            self._is_ahead = True
        return self._engine

    # ------------------------------------------------------------------ fit

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Open the engine and wrap the module's optimizers; Lightning calls this only for `fit`.

        Learning-rate schedulers keep the module's own optimizer, with which the wrapper shares its
        parameter groups.
        """
        if trainer.gradient_clip_val:
            self.config.check_gradients_untouched("Trainer(gradient_clip_val=...)")
        if getattr(self.precision_plugin, "scaler", None) is not None:
            self.config.check_gradients_untouched("Trainer(precision=...) with loss scaling")
        module = self.lightning_module
        assert module is not None
        clips = type(module).configure_gradient_clipping
        if module.automatic_optimization and not clips.__module__.startswith(f"{self.family}."):
            self.config.check_gradients_untouched("the module's configure_gradient_clipping")
        earlier = self._earlier_fits()
        wrapped = [optimizer for fit in earlier for optimizer in fit.optimizers]
        super().setup_optimizers(trainer)
        for optimizer in self.optimizers:
            _take_over_states(optimizer, wrapped)
        for fit in earlier:
            if not fit._is_ahead:
                fit._close_engine()

        engine = self._opened_engine()
        self._is_ahead = False
        self._fitting = True
        self._micro_batch = 0
        _with_engine.add(self)
        try:
            engine.attach(self.model, device=self.root_device)
            self.optimizers = [_attach(engine, optimizer) for optimizer in self.optimizers]
        except BaseException:
            self._close_engine()
            raise

    def _earlier_fits(self) -> list[OffloadStrategyMixin]:
        """Return the finished fits, of any Trainer, whose engine still has states of this model.

        The engine of a finished fit stays open for `save_checkpoint`, until the next `fit` needs
        its parameters.
        """
        assert self.lightning_module is not None
        wanted = {id(parameter) for parameter in self.lightning_module.parameters()}
        return [
            fit
            for fit in list(_with_engine)
            if fit is self or (not fit._fitting and not wanted.isdisjoint(fit._parameter_ids()))
        ]

    def _parameter_ids(self) -> set[int]:
        return {
            id(parameter)
            for optimizer in self.optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        }

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's training step, offloading its saved tensors."""
        engine = self._engine
        if engine is None:
            return super().training_step(*args, **kwargs)
        module = self.lightning_module
        if module is not None and module.automatic_optimization:
            # See [Note: the last micro-batch].
            engine.microbatch(self._micro_batch, last=self._in_optimizer_step)
            self._micro_batch = 0 if self._in_optimizer_step else self._micro_batch + 1
        with engine.forward():
            return super().training_step(*args, **kwargs)

    def optimizer_step(
        self,
        optimizer: torch.optim.Optimizer,
        closure: Callable[[], Any],
        model: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Run the closure with the last micro-batch, then the update."""
        self._in_optimizer_step = True
        try:
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        finally:
            self._in_optimizer_step = False

    # ------------------------------------------------------------------ checkpoints, end

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """The user's checkpoint plugin, else one that streams local files."""
        given: Any = self._checkpoint_io
        if given is None:
            self._checkpoint_io = self.checkpoint_io_class()
        elif getattr(given, "checkpoint_io", given) is None:
            # A wrapper such as AsyncCheckpointIO, which would wrap Lightning's by default.
            given.checkpoint_io = self.checkpoint_io_class()
        return super().checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        self._checkpoint_io = io

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the states of the optimizers into their tiers.

        Lightning's method would move all loaded states to the device.
        """
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=False):
            # A plain optimizer would keep tensors that are mapped from the checkpoint's file.
            kept = state if _is_offloaded(optimizer) else copy.deepcopy(state)
            optimizer.load_state_dict(kept)

    def teardown(self) -> None:
        """Remove the hooks from the model; `save_checkpoint` can still read optimizer states.

        The engine is closed by the next `fit` of the model, with the strategy, or at exit.
        """
        self._fitting = False
        if self._engine is not None and not self._engine.closed and self.model is not None:
            self._engine.detach_model(self.model)
            # The next backward may belong to other code: do not update ahead of a step.
            self._engine.microbatch(0, last=False)
        # Lightning moves optimizer states to the CPU, which would load all offloaded ones.
        optimizers = self.optimizers
        self.optimizers = [each for each in optimizers if not _is_offloaded(each)]
        try:
            super().teardown()
        finally:
            self.optimizers = optimizers

    def _close_engine(self) -> None:
        self._engine = None
        self._is_ahead = False
        _with_engine.discard(self)
        if self._when_gone is not None:
            self._when_gone()

    def __getstate__(self) -> dict[str, Any]:
        # A copy has no engine, and offloaded optimizers do not work without theirs.
        state = {**super().__getstate__(), "_engine": None, "_when_gone": None, "_fitting": False}
        state["_is_ahead"] = False
        return {**state, "_optimizers": [], "lr_scheduler_configs": []}

    def __repr__(self) -> str:
        # Lightning shows this in its error for a strategy of another install.
        other = next(name for name in FAMILIES if name != self.family)
        return (
            f"<SSDOffloadStrategy for {self.family}; for the Trainer of {other} use "
            f"{FAMILIES[other]}.SSDOffloadStrategy>"
        )


_with_engine: weakref.WeakSet[OffloadStrategyMixin] = weakref.WeakSet()
"""The strategies whose engine is open."""


def _attach(engine: OffloadEngine, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Attach an optimizer, if it has anything to train."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    if not any(p.requires_grad for p in params):
        return optimizer  # Lightning's placeholder where configure_optimizers returned None
    wrapped: Any = engine.attach(None, optimizer)
    if _is_offloaded(wrapped):
        # LearningRateMonitor looks for the wrapped optimizer here.
        wrapped.optimizer = optimizer
    assert isinstance(wrapped, torch.optim.Optimizer)
    return wrapped


def _is_offloaded(optimizer: torch.optim.Optimizer) -> bool:
    from offload_strategy.optimizer.offloaded_optimizer import OffloadedOptimizer

    return isinstance(optimizer, OffloadedOptimizer)


def _take_over_states(
    optimizer: torch.optim.Optimizer, wrapped: list[torch.optim.Optimizer]
) -> None:
    """Restore the states of an optimizer that the module returns again in a later fit."""
    for earlier in wrapped:
        if getattr(earlier, "inner", None) is optimizer:
            optimizer.load_state_dict(earlier.state_dict())


def register_in(registry: Any, strategy: type[OffloadStrategyMixin]) -> None:
    """Register a strategy with the `StrategyRegistry` of its Lightning install. Idempotent."""
    if strategy.strategy_name not in registry:
        registry.register(
            strategy.strategy_name,
            strategy,
            description="Moves activations and optimizer states to host memory and SSDs",
        )
