"""What an engine reports: the weight schedule, profiles, predictions, metrics and traces."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from offload_strategy.activations.saved_tensor_hooks import ActivationOffload
from offload_strategy.config import OffloadConfig
from offload_strategy.engine.attached_optimizers import AttachedOptimizers
from offload_strategy.engine.memory_prediction import predict_memory
from offload_strategy.engine.metrics import Metrics
from offload_strategy.engine.model_weights import ModelWeights
from offload_strategy.engine.resources import Resources
from offload_strategy.engine.step_log import StepLog, compare_step
from offload_strategy.engine.step_profiler import profile_step
from offload_strategy.errors import ConfigError
from offload_strategy.plan_runtime.host_memory_prediction import HostMemoryPrediction
from offload_strategy.plan_runtime.predicted_and_measured import PredictionComparison
from offload_strategy.plan_runtime.profile import Profile
from offload_strategy.plan_runtime.weight_schedule import WeightSchedule
from offload_strategy.telemetry import Recorder, write_trace


class EngineReports(ABC):
    """The methods of `OffloadEngine` that only read what the engine has seen."""

    config: OffloadConfig
    _resources: Resources
    _recorder: Recorder
    _weights: ModelWeights
    _activations: ActivationOffload | None
    _optimizers: AttachedOptimizers
    _metrics: Metrics
    _log: StepLog
    _device: torch.device

    @abstractmethod
    def _check_open(self) -> None:
        """Raise an error if the engine is closed."""

    @abstractmethod
    def _is_attached(self, model: nn.Module) -> bool:
        """Return whether the model's hooks are installed."""

    def plan(self) -> WeightSchedule:
        """Return what one step moves of streamed weights and states, block by block; printable.

        Blocks are in the order of the last step, and before the first step in module order.

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
        """Return when the last step saved, used and freed each storage, and when it updated what.

        The profile is the input of `plan_runtime.lifetime_plan` and `plan_runtime.replay`; its
        `save` writes a file for ``ssd-offload plan --profile``. Stall time is left out.

        Raises:
            ConfigError: no step was trained yet, or activations are not offloaded.
        """
        self._check_open()
        found = None
        if self._activations is not None:
            shared = self._device.type == "cpu"
            found = profile_step(self._activations, list(self._optimizers), shared_cores=shared)
        if found is None:
            raise ConfigError(
                "profile: no backward pass has finished yet. Train a step first, with "
                "activations.enabled: true."
            )
        return found

    def compare_prediction(self) -> PredictionComparison:
        """Compare the prediction of a step with its measurement, figure by figure; printable.

        The prediction is a replay of the last step's profile with the bandwidth known when the
        engine was created (from earlier runs or a probe). The measurement is the median of the last
        five steps. The result's `save` writes a file for ``ssd-offload report``.

        Raises:
            ConfigError: fewer than four steps were trained, or activations are not offloaded.
        """
        profile, found = self.profile(), None
        if self._activations is not None:
            optimizers = list(self._optimizers)
            found = compare_step(profile, self._activations, optimizers, self._resources, self._log)
        if found is None:
            raise ConfigError(
                "compare_prediction: too few steps were trained. Train at least four, and more for "
                "meaningful figures."
            )
        return found

    def predict_memory(
        self, model: nn.Module, optimizer: Optimizer, *inputs: Any, **named_inputs: Any
    ) -> HostMemoryPrediction:
        """Predict the peak host memory of a step with streamed weights, before the first step.

        The step runs on fake tensors: nothing is computed or moved.

        Args:
            model: an attached model.
            optimizer: the optimizer that `attach` returned.
            inputs: positional inputs of the model's forward with the shapes and dtypes of a
                training step; the model must return a loss, or an output that has one.
            named_inputs: keyword inputs of the model's forward.

        Raises:
            ConfigError: weights are not streamed, or the model cannot run on fake tensors.
        """
        self._check_open()
        if self._weights.stream is None or not self._is_attached(model):
            raise ConfigError(
                "predict_memory: the model's weights are not streamed. Attach it to an engine with "
                "parameters.enabled: true first."
            )
        return predict_memory(
            self.config, self._weights, self._device, model, optimizer, inputs, named_inputs
        )

    def metrics(self) -> dict[str, float]:
        """Return the current metrics in bytes, seconds, GB/s (1e9 bytes per second) and shares.

        `offload/endurance/projected_years` is NaN while no tier has a rated
        endurance (``tiers[].endurance_tbw``) or nothing was written.
        """
        activations = {} if self._activations is None else self._activations.figures()
        optimizers = [optimizer.figures() for optimizer in self._optimizers]
        return self._metrics.read(self._device, activations, optimizers)

    def export_trace(self, file: str | os.PathLike[str]) -> None:
        """Write the latest transfers and stalls as a trace for Perfetto or chrome://tracing.

        Args:
            file: path of the JSON file to write.
        """
        write_trace(file, list(self._recorder.moves), list(self._recorder.stalls))
