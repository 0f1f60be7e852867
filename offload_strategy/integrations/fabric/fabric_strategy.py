"""The Fabric strategy, shared by `lightning.fabric` and the standalone `lightning_fabric`.

[Note: the last micro-batch in Fabric]
The script has its own loop. `fabric.no_backward_sync` surrounds every micro-batch but the last; for
a single device Fabric does not ask its strategy, so the method is wrapped. A script that does not
use it gets the same numbers, but some work is done twice.

[Note: lifetime of the engine in Fabric]
Fabric has no call for the end of training. The engine lives as long as the strategy, to which
Fabric, its models and its optimizers refer, or until `fabric.strategy.teardown()`.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, cast

from torch import nn
from torch.optim import Optimizer

from offload_strategy.errors import ConfigError
from offload_strategy.integrations import is_offloaded
from offload_strategy.integrations.lightning import engine_strategy


class OffloadFabricMixin(engine_strategy.EngineStrategy):
    """A strategy of Fabric that trains through an `OffloadEngine`; options are Fabric's."""

    def module_init_context(
        self, empty_init: bool | None = None
    ) -> AbstractContextManager[Any, bool | None]:
        """Context in which a module is created; streamed weights are offloaded meanwhile."""
        return self._model_init(super().module_init_context, empty_init)

    def module_to_device(self, module: nn.Module) -> None:
        """Move a model to the device, unless its weights are streamed."""
        if not self._stays(module):
            super().module_to_device(module)

    def setup_module(self, module: nn.Module) -> Any:
        """Attach a model, unless it was set up before."""
        module = super().setup_module(module)
        attached = self._engine is not None and self._engine.is_attached(module)
        if next(module.parameters(), None) is not None and not attached:
            self._attach(module)
        return module

    def setup_optimizer(self, optimizer: Optimizer) -> Any:
        """Return the optimizer whose states are offloaded."""
        optimizer = super().setup_optimizer(optimizer)
        if getattr(self.precision, "scaler", None) is not None:
            self.config.check_gradients_untouched("Fabric(precision=...) with loss scaling")
        if not any(p.requires_grad for group in optimizer.param_groups for p in group["params"]):
            return optimizer
        wrapped = self._attach(optimizer)
        if is_offloaded(wrapped):
            kind = type(wrapped)
            wrapped.__class__ = type(kind.__name__, (_AddsGroups, kind), {})
        else:
            # It would keep tensors that are mapped from the checkpoint's file.
            optimizer.register_load_state_dict_pre_hook(lambda _, state: copy.deepcopy(state))
        return wrapped

    def _attach(self, trained: nn.Module | Optimizer) -> Any:
        """Attach a model or an optimizer, and return the optimizer to use."""
        engine = self._opened_engine()
        try:
            if isinstance(trained, Optimizer):
                return engine.attach(optimizer=trained)
            return engine.attach(trained, device=self.root_device)
        except ConfigError as error:
            if "already" in str(error):
                error.add_note(
                    "In Fabric: drop the optimizer that an earlier setup returned (del optimizer), "
                    "or end the earlier training with fabric.strategy.teardown() of its Fabric. "
                    "Its states go with it: take its state_dict() before, or make a new optimizer."
                )
            raise

    @contextmanager
    def accumulating(self, enabled: bool, plain: AbstractContextManager[Any]) -> Iterator[None]:
        """Context of a micro-batch, whether another one follows before the optimizer steps or not.

        `plain` is Fabric's own context. See [Note: the last micro-batch in Fabric].
        """
        engine = self._engine
        with plain:
            if engine is None:
                yield
                return
            engine.microbatch(0, last=not enabled)
            try:
                yield
            finally:
                engine.microbatch(0, last=True)

    def clip_gradients_norm(self, *args: Any, **kwargs: Any) -> Any:
        """Clip by norm, as Fabric does, unless the gradients are gone by now."""
        self.config.check_gradients_untouched("fabric.clip_gradients(max_norm=...)")
        return super().clip_gradients_norm(*args, **kwargs)

    def clip_gradients_value(self, *args: Any, **kwargs: Any) -> None:
        """Clip by value, as Fabric does, unless the gradients are gone by now."""
        self.config.check_gradients_untouched("fabric.clip_gradients(clip_val=...)")
        super().clip_gradients_value(*args, **kwargs)

    def teardown(self) -> None:
        """Close the engine and drop all states. See [Note: lifetime of the engine in Fabric]."""
        self._close_engine()
        super().teardown()


class SingleDeviceFabricMixin(engine_strategy.OneDeviceStrategy, OffloadFabricMixin):
    """A single-device strategy of Fabric; with several devices it becomes a data-parallel one.

    Args:
        config: anything that `OffloadConfig.load` reads; None for $SSD_OFFLOAD_CONFIG, else the
            defaults.
        ddp: options of Fabric's `DDPStrategy`, for several devices.
        options: accelerator, checkpoint_io and precision are passed on to Fabric's strategy.

    Raises:
        ConfigError: the config is wrong.
    """

    precision_option = "precision"


class _AddsGroups:
    """An `OffloadedOptimizer` to which groups can be added through Fabric's wrapper.

    That derives from the class of the optimizer without its attributes. Methods that Fabric does
    not define run with the wrapper as `self`: they read attributes of the inner optimizer, but
    would set them on the wrapper.
    """

    def add_param_group(self: Any, param_group: dict[str, Any]) -> None:
        """Add a group, as the plain optimizer does."""
        wrapped = self if "inner" in self.__dict__ else self.optimizer
        cast(Any, super(_AddsGroups, wrapped)).add_param_group(param_group)


def fabric_classes(
    module: str, checkpoint_io: type, strategies: Any, fabric: Any
) -> tuple[Any, Any, Any]:
    """Define the classes of a family of Fabric for its module, and register them with Fabric."""
    define_in, streaming = engine_strategy.define_in, engine_strategy.StreamingCheckpointIO
    io = define_in(module, "OffloadCheckpointIO", streaming, checkpoint_io)
    define = functools.partial(define_in, module, checkpoint_io_class=io)
    parallel = define("SSDOffloadDataParallelStrategy", OffloadFabricMixin, strategies.DDPStrategy)
    strategy = define(
        "SSDOffloadStrategy",
        SingleDeviceFabricMixin,
        strategies.SingleDeviceStrategy,
        parallel_class=parallel,
    )
    engine_strategy.register_in(strategies.STRATEGY_REGISTRY, strategy)
    original = fabric.no_backward_sync

    @functools.wraps(original)
    def no_backward_sync(self: Any, module: Any, enabled: bool = True) -> Any:
        context = original(self, module, enabled)  # checks the module
        if isinstance(self.strategy, OffloadFabricMixin):
            return self.strategy.accumulating(enabled, context)
        return context

    fabric.no_backward_sync = no_backward_sync
    return io, parallel, strategy
