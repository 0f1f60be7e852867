"""What the strategies of Trainers and of Fabric share: the engine, and models that do not fit.

[Note: models that do not fit]
With streamed weights a module is created in `configure_model`, or within the `init_module()` of
the Trainer or of Fabric, and its weights are offloaded meanwhile (`OffloadEngine.building`). With
`init_module(empty_init=True)` it is on the meta device until training initializes each module.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from torch import nn

from offload_strategy.config import ConfigSource, OffloadConfig
from offload_strategy.integrations import FAMILIES

if TYPE_CHECKING:
    from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment

    from offload_strategy.engine.offload_engine import OffloadEngine

    _OfFamily = Any
else:
    # The concrete class has the base of its own family.
    _OfFamily = object


class EngineOwner(_OfFamily):
    """A strategy that has an engine, which its copies do not have."""

    strategy_name = "ssd_offload"
    description = "Moves activations and optimizer states to host memory and SSDs"
    stages: tuple[int, ...] = ()  # of ZeRO, with a variant each
    _engine: OffloadEngine | None = None
    _when_gone: weakref.finalize[..., Any] | None = None

    @property
    def offload_engine(self) -> OffloadEngine | None:
        """The engine of the current or the last training; None before the first."""
        return self._engine

    def _open_engine(self, config: OffloadConfig, processes: int | None) -> OffloadEngine:
        from offload_strategy.engine.offload_engine import OffloadEngine
        from offload_strategy.io.backends.thread_pool import run_off_pools

        self._close_engine()
        self._engine = engine = OffloadEngine(config, processes=processes)
        # The model's hooks keep the engine alive, and the model may outlive the strategy.
        self._when_gone = weakref.finalize(self, run_off_pools, engine.close)
        return engine

    def _close_engine(self) -> None:
        self._engine = None
        if self._when_gone is not None:
            self._when_gone()

    def __getstate__(self) -> dict[str, Any]:
        state: Any = super().__getstate__()
        return {**state, "_engine": None, "_weights": None, "_when_gone": None}


class EngineStrategy(EngineOwner):
    """A strategy whose engine offloads what its config says."""

    family: str  # of Lightning; see `define_in`
    checkpoint_io_class: type[StreamingCheckpointIO]
    _checkpoint_io: CheckpointIO | None

    def __init__(self, config: ConfigSource = None, **options: Any) -> None:
        super().__init__(**options)
        self.config = OffloadConfig.load(config)

    def _opened_engine(self) -> OffloadEngine:
        """Return the engine of the next training, opening it if needed."""
        if self._engine is None or self._engine.closed:
            devices = getattr(self, "parallel_devices", None) or ()
            # With one device, the script may have initialized a process group of its own.
            return self._open_engine(self.config, len(devices) if len(devices) > 1 else None)
        return self._engine

    @contextmanager
    def _model_init(
        self, plain: Callable[..., AbstractContextManager[Any]], empty: bool | None
    ) -> Iterator[None]:
        """Context in which a model is created; see [Note: models that do not fit].

        `plain` makes that of the framework; `empty` tells whether to skip initialization, because
        a checkpoint will be loaded.
        """
        if self.config.parameters.enabled is not True:
            with plain(empty_init=empty):
                yield
        elif empty:
            with plain(), torch.device("meta"):
                yield
        else:
            engine = self._opened_engine()
            with plain(), engine.building():
                yield
            engine.end_threads()  # the model may be used for something else than training

    def _stays(self, model: nn.Module) -> bool:
        """Whether a model must not be moved: `to` loads streamed weights, and refuses meta."""
        tensors = [*model.parameters(), *model.buffers()]
        return self.config.parameters.enabled is True and all(
            tensor.is_meta or tensor.device == self.root_device for tensor in tensors
        )

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """The user's checkpoint plugin, else one that streams local files."""
        given: Any = self._checkpoint_io
        if getattr(given, "checkpoint_io", given) is None:
            ours: Any = self.checkpoint_io_class()
            if given is None:
                self._checkpoint_io = ours
            else:
                # A wrapper such as AsyncCheckpointIO, which would wrap Lightning's by default.
                given.checkpoint_io = ours
        return cast("CheckpointIO", super().checkpoint_io)

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        self._checkpoint_io = io

    def __repr__(self) -> str:
        # Lightning shows this in its error for a strategy of another family.
        others = [
            f"{other} has {module}.SSDOffloadStrategy"
            for other, module in FAMILIES.items()
            if other != self.family
        ]
        return f"<SSDOffloadStrategy for {self.family}; {', '.join(others)}>"


def define_in(module: str, name: str, *bases: type, **attributes: Any) -> Any:
    """Return a new class of a family's module, where pickle finds it by its name."""
    family = next(each for each, ours in FAMILIES.items() if ours == module)
    own = {"__module__": module, "__doc__": bases[0].__doc__, "family": family}
    return type(name, bases, own | attributes)


def register_in(registry: Any, *strategies: type[EngineOwner]) -> None:
    """Register strategies, with variants for ZeRO stages, in a family's registry. Idempotent."""
    for strategy in strategies:
        name, description = strategy.strategy_name, strategy.description
        if name in registry:
            continue
        registry.register(name, strategy, description=description)
        for stage in strategy.stages:
            text = f"{description}, ZeRO-{stage}"
            registry.register(f"{name}_stage_{stage}", strategy, description=text, stage=stage)


class OneDeviceStrategy(EngineStrategy):
    """A single-device strategy, which becomes a `DDPStrategy` (with options `ddp`) for several."""

    parallel_class: type[EngineStrategy]  # for several devices
    precision_option: str

    def __init__(
        self, config: ConfigSource = None, *, ddp: Mapping[str, Any] | None = None, **options: Any
    ) -> None:
        super().__init__(config, **options)
        self._ddp = dict(ddp or {})
        self._devices: list[torch.device] | None = None
        self.cluster_environment: ClusterEnvironment | None = None  # The framework sets it

    @property
    def parallel_devices(self) -> list[torch.device] | None:
        """The devices that were chosen."""
        return self._devices

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device] | None) -> None:
        self._devices = devices
        if devices:
            self._root_device = torch.device(devices[0])
            if len(devices) > 1:
                self._become_parallel()

    def _become_parallel(self) -> None:
        """Take another class: the framework holds this object already, and has not used it yet."""
        options = {
            "accelerator": self._accelerator,
            "checkpoint_io": self._checkpoint_io,
            self.precision_option: getattr(self, f"_{self.precision_option}"),
            "parallel_devices": self._devices,
            "cluster_environment": self.cluster_environment,
        }
        made = self.parallel_class(self.config, **{**options, **self._ddp})
        self.__class__, self.__dict__ = type(made), made.__dict__

    @property
    def num_nodes(self) -> int:
        """The number of nodes."""
        return 1

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        if num_nodes > 1:
            self._become_parallel()
            self.num_nodes = num_nodes

    # Fabric sets this attribute, although it looks for the property.
    _num_nodes = num_nodes


class StreamingCheckpointIO(_OfFamily):
    """Writes local checkpoints tensor by tensor, and maps their files to load them.

    Lightning's builds the whole checkpoint in memory before it writes, and reads all of it before
    it returns. The files are the same; remote paths are left to Lightning.
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None
    ) -> None:
        """Save a checkpoint; an existing file is replaced atomically, or intact after an error."""
        from offload_strategy.checkpoints import save

        local = local_path(path)
        if local is None or storage_options is not None:
            super().save_checkpoint(checkpoint, path, storage_options=storage_options)
            return
        os.makedirs(os.path.dirname(local), exist_ok=True)
        save(checkpoint, local)

    def load_checkpoint(
        self,
        path: Any,
        map_location: Any = lambda storage, _: storage,
        weights_only: bool | None = None,
    ) -> Any:
        """Load a checkpoint whose tensors stay in the file until they are read."""
        from offload_strategy.checkpoints import load

        local = local_path(path)
        if local is None or not os.path.isfile(local):
            return super().load_checkpoint(path, map_location, weights_only)
        return load(local, map_location, weights_only)


def local_path(path: Any) -> str | None:
    """Return the local path of a path or URL, or None if it is remote."""
    system, stripped = url_to_fs(str(path))
    return stripped if isinstance(system, LocalFileSystem) else None
