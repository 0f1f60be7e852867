"""Weights of attached models: building, loading, streaming, saving, restoring."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from offload_strategy.engine.resources import Resources
from offload_strategy.errors import ConfigError, OffloadError
from offload_strategy.host_memory.c_allocator import freed_memory
from offload_strategy.host_memory.memory_limits import available_bytes
from offload_strategy.io.regions.region import ExternalFile
from offload_strategy.telemetry import get_logger
from offload_strategy.torch_support.dtensors import is_sharded
from offload_strategy.units import MiB, format_size
from offload_strategy.weights import safetensors_files
from offload_strategy.weights.checkpoint_loading import LoadedWeights, Loader
from offload_strategy.weights.weight_stream import WeightStream

logger = get_logger(__name__)

#: Weights are restored at close if they take at most this share of the free memory.
_RESTORED_SHARE = 0.9


class EngineWeights:
    """The methods of `OffloadEngine` for weights, which stay in memory if there is no stream."""

    _resources: Resources
    _stream: WeightStream | None
    _finalizer: weakref.finalize[Any, Any]

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return not self._finalizer.alive

    def _check_open(self) -> None:
        if self.closed:
            raise OffloadError("this offload engine is closed; create a new one.")
        if os.getpid() != self._resources.pid:
            raise OffloadError(
                "a forked process cannot use its parent's offload engine. Create an engine in the "
                "process that trains."
            )

    @contextmanager
    def building(self) -> Iterator[None]:
        """Build a model that need not fit in memory: finished weights are offloaded meanwhile.

        The weights are bit-identical to those of a plain build. The context does nothing unless
        ``parameters.enabled`` is true.
        """
        self._check_open()
        with nullcontext() if self._stream is None else self._stream.building():
            yield

    def load_weights(
        self,
        model: nn.Module,
        source: str | os.PathLike[str],
        *,
        adopt: bool = False,
        strict: bool = True,
    ) -> LoadedWeights:
        """Load a model from safetensors with a few tensors in memory at a time.

        Names are those of the model's state_dict. The model may be attached or not; parameters on
        the meta device are materialized, so streamed weights need not fit in memory. Of a model
        that is sharded by FSDP2, each rank reads its own rows.

        Args:
            model: the model to load into.
            source: a safetensors file, or a directory with one file or with shards and an index.
            adopt: keep the bytes of streamed weights in these files and read them from there until
                they are updated. The files must not be modified meanwhile; they may be renamed or
                unlinked.
            strict: missing and unexpected names are errors, as in `load_state_dict`.

        Raises:
            ConfigError: names or shapes in the files do not match the model, or safetensors is not
                installed. Nothing was changed.
            StorageError: a file cannot be read; the model has been loaded partly.
        """
        self._check_open()
        stream, tiers = self._stream, self._resources.clients.get("parameters", [])
        if adopt and stream is None:
            raise ConfigError(
                "load_weights: adopt=True needs streamed weights. Set parameters.enabled: true."
            )
        checkpoint = safetensors_files.read_index(source)
        if stream is not None:
            self._check_weights_fit("load_weights", stream.unplaced_bytes(model, adopt=adopt))
        with self._resources.files(partial(ExternalFile, tier="checkpoint"), keep=adopt) as queues:
            loader = Loader(self._resources.store, stream, tiers, _device_for(model), queues)
            return loader.load(model, checkpoint, adopt=adopt, strict=strict)

    def save_weights(
        self, model: nn.Module, directory: str | os.PathLike[str], shard_bytes: int = 256 * MiB
    ) -> list[Path]:
        """Save a model as safetensors with at most one shard of it in memory.

        Transformers' `from_pretrained` reads the directory (together with its own `config.json`).
        Files of an earlier save are removed once the new ones are on disk, and an interrupted save
        leaves them whole. Returns the files with tensors.

        Args:
            model: the model to save, attached or not.
            directory: the target directory; it is created if it does not exist.
            shard_bytes: maximum size of a file in bytes, unless one tensor is larger.

        Raises:
            ConfigError: safetensors is not installed, the model is sharded, or it has extra state
                (`get_extra_state`). Nothing was written.
            StorageError: a file cannot be written.
        """
        self._check_open()
        if any(map(is_sharded, model.parameters())):
            raise ConfigError(
                "save_weights: the model is sharded, and each rank has a part of it. Save it with "
                "torch.distributed.checkpoint."
            )
        safetensors_files.refuse_extra_state(model)
        tensors, stream = safetensors_files.named_tensors(model), self._stream
        return safetensors_files.save_shards(
            tensors,
            Path(directory),
            shard_bytes,
            lambda some: nullcontext() if stream is None else stream.resident(some, changes=False),
        )

    def _expect_weights(self, model: nn.Module, device: torch.device | None) -> None:
        """Check the room for a model that will be attached, and materialize its meta parameters."""
        if self._stream is not None:
            if any(map(is_lazy, model.parameters())):
                raise ConfigError(
                    f"attach: this {type(model).__name__} has lazy modules whose weights have no "
                    f"shape yet, so they cannot be streamed. Run one forward pass first, or set "
                    f"parameters.enabled: false."
                )
            self._check_weights_fit("attach", self._stream.unplaced_bytes(model))
            self._stream.materialize_meta(model, _device_for(model) if device is None else device)
        elif any(p.is_meta for p in model.parameters()):
            raise ConfigError(
                f"attach: parameters of this {type(model).__name__} are on the meta device. Load "
                f"them first (engine.load_weights(model, directory)), materialize them "
                f"(model.to_empty(device=...)), or stream them (parameters.enabled: true)."
            )

    def _check_weights_fit(self, doing: str, nbytes: int) -> None:
        message = f"{doing}: the weights need {format_size(nbytes)}"
        advice = "or add a tier to parameters.tiers"
        self._resources.check_room("parameters", nbytes, message, advice)

    def _close_weights(self) -> None:
        """Restore streamed weights in memory, if they fit."""
        if self._stream is None:
            return
        self._resources.store.trim()
        freed_memory.return_all()
        missing, free = self._stream.offloaded_bytes(), available_bytes()
        fits = missing < _RESTORED_SHARE * free
        if not fits:
            logger.warning(
                f"close: {format_size(missing)} of weights are on tiers and do not fit in the "
                f"{format_size(free)} of free memory; they are discarded, and the model's "
                f"parameters are NaN from now on."
            )
        self._stream.close(restore=fits)


def _device_for(model: nn.Module) -> torch.device:
    """Return the device for parameters on the meta device."""
    devices = (parameter.device for parameter in model.parameters() if not parameter.is_meta)
    return next(devices, None) or torch.get_default_device()
