"""The weights of attached models: building, loading, streaming, saving, restoring."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import torch
from torch import nn

from offload_strategy.config import ParametersConfig
from offload_strategy.engine.resources import Resources
from offload_strategy.errors import ConfigError
from offload_strategy.host_memory.memory_limits import available_bytes
from offload_strategy.plan_runtime.weight_schedule import BlockPass, WeightSchedule, weight_schedule
from offload_strategy.telemetry import get_logger
from offload_strategy.units import format_size
from offload_strategy.weights.checkpoint_loading import LoadedWeights, Loader
from offload_strategy.weights.safetensors_files import named_tensors, read_index, save_shards
from offload_strategy.weights.weight_stream import WeightStream

logger = get_logger(__name__)

#: Weights are restored at close if they take at most this share of the free memory.
_RESTORED_SHARE = 0.8


class ModelWeights:
    """The weights of an engine's models; without ``parameters.enabled`` they stay in memory."""

    def __init__(
        self,
        resources: Resources,
        section: ParametersConfig,
        is_block: Callable[[str, nn.Module], bool] | None = None,
    ) -> None:
        self._resources = resources
        self._blocks_in_flight = section.blocks_in_flight
        self.stream: WeightStream | None = None
        if section.enabled:
            self.stream = WeightStream(
                resources.store,
                resources.clients["parameters"],
                blocks_in_flight=section.blocks_in_flight,
                classes=section.blocks,
                is_block=is_block,
                min_bytes=section.min_size,
            )

    def expect(self, model: nn.Module, device: torch.device) -> None:
        """Check the room for a model that will be attached, and materialize its meta parameters.

        Raises a ConfigError if the tiers are too small, or a parameter cannot be initialized.
        """
        if self.stream is not None:
            self._check_room("attach", self.stream.bytes_to_stream(model))
            self.stream.materialize_meta(model, device)
        elif any(p.is_meta for p in model.parameters()):
            raise ConfigError(
                f"attach: parameters of this {type(model).__name__} are on the meta device. Load "
                f"them first (engine.load_weights(model, directory)), materialize them "
                f"(model.to_empty(device=...)), or stream them (parameters.enabled: true)."
            )

    def _check_room(self, doing: str, nbytes: int) -> None:
        message = f"{doing}: the weights need {format_size(nbytes)}"
        advice = "or add a tier to parameters.tiers"
        self._resources.check_room("parameters", nbytes, message, advice)

    def building(self) -> AbstractContextManager[None]:
        """See `OffloadEngine.building`."""
        return nullcontext() if self.stream is None else self.stream.building()

    def load(
        self,
        model: nn.Module,
        source: str | os.PathLike[str],
        device: torch.device,
        *,
        adopt: bool,
        strict: bool,
    ) -> LoadedWeights:
        """See `OffloadEngine.load_weights`."""
        if adopt and self.stream is None:
            raise ConfigError(
                "load_weights: adopt=True needs streamed weights. Set parameters.enabled: true."
            )
        checkpoint = read_index(source)
        if self.stream is not None:
            moving: Iterable[nn.Parameter] = model.parameters()
            if adopt:
                moving = (parameter for parameter in moving if parameter.requires_grad)
            self._check_room("load_weights", self.stream.unplaced_bytes(moving))
        store, tiers = self._resources.store, self._resources.clients.get("parameters", [])
        with self._resources.files(keep=adopt) as open_file:
            loader = Loader(store, self.stream, tiers, device, open_file)
            return loader.load(model, checkpoint, adopt=adopt, strict=strict)

    def save(
        self, model: nn.Module, directory: str | os.PathLike[str], shard_bytes: int
    ) -> list[Path]:
        """See `OffloadEngine.save_weights`."""
        read = _unchanged if self.stream is None else self.stream.read
        return save_shards(named_tensors(model), Path(directory), shard_bytes, read)

    def plan(self, states_share: float, *, updates: bool) -> WeightSchedule:
        """See `OffloadEngine.plan`.

        There are so many bytes of optimizer states per byte of trained weights, and updates run
        during backward or not.
        """
        if self.stream is None:
            raise ConfigError("plan: no weights are streamed. Set parameters.enabled: true.")
        passes = []
        for block, backward in self.stream.schedule():
            states = int(block.trained * states_share)
            passes.append(BlockPass(block.name, backward, block.nbytes, block.trained, states))
        return weight_schedule(
            passes, self._blocks_in_flight, learned=self.stream.has_seen_a_step, updates=updates
        )

    def close(self) -> None:
        """Restore streamed weights in memory, if they fit."""
        stream = self.stream
        if stream is None:
            return
        missing, free = stream.offloaded_bytes(), available_bytes()
        fits = missing < _RESTORED_SHARE * free
        if not fits:
            logger.warning(
                "close: %s of weights are on tiers and do not fit in the %s of free memory; they "
                "are discarded, and the model's parameters are NaN from now on.",
                format_size(missing),
                format_size(free),
            )
        stream.close(restore=fits)


@contextmanager
def _unchanged(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    yield tensor.detach()
