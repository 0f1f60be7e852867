"""The session of one `Accelerator`: its engine, from the first `prepare` to `free_memory`.

[Note: free_memory]
`free_memory` drops Accelerate's references, but not those of the script: Transformers' `Trainer`
calls it at the start of each `train()` and continues with the same optimizer and its states. So the
engine closes when the script has dropped its prepared optimizers, or prepares new objects: then
nobody can read the states any more. Until then the session is retired.

[Note: metrics]
Metrics are added to the script's own `accelerator.log` calls, at its steps: separate calls with
another step count would make trackers with increasing steps (W&B) drop the script's values.
"""

from __future__ import annotations

import math
import weakref
from typing import TYPE_CHECKING, Any

import torch

from offload_strategy.config import OffloadConfig
from offload_strategy.errors import ConfigError
from offload_strategy.torch_support.modules import WeakHook

if TYPE_CHECKING:
    from accelerate import Accelerator

    from offload_strategy.engine.offload_engine import OffloadEngine


class Session:
    """Offloads for one `Accelerator`, from the first `prepare` to `free_memory`.

    Args:
        config: config of its engines.
        metrics_every: optimizer steps between two sets of metrics, 0 for none.
        accelerator: the owner of the session; it is not kept alive.
    """

    def __init__(self, config: OffloadConfig, metrics_every: int, accelerator: Accelerator) -> None:
        self._config = config
        self._metrics_every = metrics_every
        self._accelerator = weakref.ref(accelerator)
        self._engine: OffloadEngine | None = None
        # Not Accelerate's own flag: `evaluate()` before `train()` sets that one as well.
        self._attached: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self._attached_again: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._retired = False
        self._handles: list[Any] = []
        self._counts_steps = False
        self._steps = 0
        self._micro_batch = 0
        self._logged_at: int | None = None
        self.log_step: int | None = None
        """The step of the script's last `accelerator.log`."""

    @property
    def engine(self) -> OffloadEngine:
        """The open engine; a new one after `close`."""
        if self._engine is None:
            from offload_strategy.engine.offload_engine import OffloadEngine

            self._engine = OffloadEngine(self._config)
        return self._engine

    def begin(self, *objects: Any) -> None:
        """Before a `prepare`, keep a retired engine or close it; see [Note: free_memory].

        Args:
            objects: the objects that are prepared.
        """
        optimizers = [obj for obj in objects if isinstance(obj, torch.optim.Optimizer)]
        models = [obj for obj in objects if isinstance(obj, torch.nn.Module)]
        if not self._retired:
            return
        if any(optimizer in self._optimizers for optimizer in optimizers):
            self._retired = False
        elif optimizers or any(model not in self._attached for model in models):
            again = list(self._attached_again)
            self.close()
            for model in again:
                self.attach_model(model)

    def retire(self) -> None:
        """Close the engine as soon as the script has dropped its optimizers."""
        self._retired = True
        if not list(self._optimizers):
            self.close()

    def keep_for(self, prepared: torch.optim.Optimizer) -> None:
        """Keep the engine while the script holds a prepared optimizer."""
        if prepared in self._optimizers:
            return
        me = weakref.ref(self)

        def gone() -> None:
            if (session := me()) is not None and session._retired:
                session.retire()

        self._optimizers.add(prepared)
        weakref.finalize(prepared, gone).atexit = False

    def fills(self, model: torch.nn.Module) -> bool:
        """Whether parameters of a model are on the meta device, and `attach_model` makes them."""
        return self._config.parameters.enabled and any(p.is_meta for p in model.parameters())

    def attach_model(self, model: torch.nn.Module) -> None:
        """Offload what `model` saves for backward, unless it is attached already."""
        if next(model.parameters(), None) is None:
            return  # A loss function that was prepared as a module.
        if model in self._attached:
            if self._retired:
                self._attached_again.add(model)
            return
        self._attach(model)
        self._attached.add(model)
        hook = WeakHook(self.begin_micro_batch)
        # After `attach`, whose hook is prepended too: the hint comes before the forward pass it is
        # about.
        self._handles.append(model.register_forward_pre_hook(hook, prepend=True))

    def attach_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Return the optimizer that keeps its states in tiers."""
        from offload_strategy.optimizer.offloaded_optimizer import OffloadedOptimizer

        if isinstance(optimizer, OffloadedOptimizer):
            return optimizer  # The script attached it to an engine of its own.
        accelerator = self._accelerator()
        if accelerator is not None and accelerator.scaler is not None:
            self._config.check_gradients_untouched("Accelerate's loss scaling (mixed_precision)")
        wrapped = self._attach(None, optimizer)
        assert wrapped is not None
        if not self._counts_steps:  # Of several optimizers, the steps of the first.
            self._counts_steps = True
            self._handles.append(wrapped.register_step_post_hook(self._after_step))
        return wrapped

    def _attach(
        self, model: torch.nn.Module | None, optimizer: torch.optim.Optimizer | None = None
    ) -> torch.optim.Optimizer | None:
        try:
            if optimizer is not None:
                return self.engine.attach(model, optimizer)
            accelerator = self._accelerator()
            device = None if accelerator is None else accelerator.device
            self.engine.attach(model, device=device)
            return None
        except ConfigError as error:
            if "already" in str(error):
                error.add_note("accelerator.free_memory() ends an earlier training and its engine.")
            if not self._attached and not self._counts_steps:
                self.close()
            raise

    def begin_micro_batch(self, module: torch.nn.Module, _: Any) -> None:
        """Tell the engine that a micro-batch begins, and whether gradients are complete after it.

        Accelerate decides on that before the forward pass; with manual accumulation it always says
        yes. So it is a hint, and the boundary is the optimizer's `step()`.
        """
        if not module.training or not torch.is_grad_enabled():
            return
        accelerator = self._accelerator()
        if accelerator is None or self._engine is None or self._engine.closed:
            return
        self._engine.microbatch(self._micro_batch, last=accelerator.sync_gradients)
        self._micro_batch += 1

    def _after_step(self, *_: Any) -> None:
        self._steps += 1
        self._micro_batch = 0

    def metrics(self, now: bool = False) -> dict[str, float]:
        """Return the metrics for the trackers, empty if they are not due. See [Note: metrics].

        Args:
            now: return them after any new step, without waiting for the interval.
        """
        if self._engine is None or self._engine.closed:
            return {}
        every = self._metrics_every
        behind = math.inf if self._logged_at is None else self._steps - self._logged_at
        if every == 0 or behind < (1 if now else every):
            return {}
        self._logged_at = self._steps
        metrics = self._engine.metrics()
        return {key: value for key, value in metrics.items() if math.isfinite(value)}

    def close(self) -> None:
        """Close the engine and remove all hooks; the session may open a new engine later."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._attached.clear()
        self._attached_again.clear()
        self._optimizers.clear()
        self._counts_steps = False
        self._retired = False
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()
