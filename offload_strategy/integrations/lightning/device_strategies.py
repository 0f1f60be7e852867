"""The Lightning strategy for one device, and for several.

[Note: one device]
A `DDPStrategy` with one device still creates a process group and a distributed sampler, so data
order and weights differ. One device therefore has a `SingleDeviceStrategy`, and several have a
`DDPStrategy`. The Trainer sets `parallel_devices` and `num_nodes` after it received the strategy;
at that point a single-device strategy changes its class. `cluster_environment`, which was set
before, is passed on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, cast

from offload_strategy.integrations.lightning.engine_strategy import OneDeviceStrategy
from offload_strategy.integrations.lightning.lightning_strategy import OffloadStrategyMixin

if TYPE_CHECKING:
    from lightning.fabric.plugins import CheckpointIO
    from lightning.pytorch.accelerators import Accelerator
    from lightning.pytorch.plugins.precision import Precision

    from offload_strategy.config import ConfigSource


class SingleDeviceMixin(OneDeviceStrategy, OffloadStrategyMixin):
    """A strategy for one device; see [Note: one device].

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

    parallel_class: type[OffloadStrategyMixin]
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

    @property
    def num_nodes(self) -> int:
        """The number of nodes."""
        return 1

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        if num_nodes > 1:
            self._become_parallel()
            cast(Any, self).num_nodes = num_nodes


class ShardedMixin(OffloadStrategyMixin):
    """A `ModelParallelStrategy` (FSDP2, tensor parallelism) whose local shards are offloaded.

    The module applies `fully_shard` in `configure_model`, with `self.device_mesh`, as for
    Lightning's own strategy.

    Args:
        config: as in `OffloadStrategyMixin`.
        data_parallel_size: number of processes over which the model is sharded; "auto" for all
            processes divided by `tensor_parallel_size`.
        tensor_parallel_size: number of processes that compute a layer together; "auto" for one.
        options: other options of Lightning's `ModelParallelStrategy`.

    Raises:
        ConfigError: the config is wrong.
    """

    strategy_name = "ssd_offload_fsdp"
    may_stream_weights = True

    def __init__(
        self,
        config: ConfigSource = None,
        *,
        data_parallel_size: Literal["auto"] | int = "auto",
        tensor_parallel_size: Literal["auto"] | int = "auto",
        **options: Any,
    ) -> None:
        super().__init__(
            config,
            data_parallel_size=data_parallel_size,
            tensor_parallel_size=1 if tensor_parallel_size == "auto" else tensor_parallel_size,
            **options,
        )

    def setup_environment(self) -> None:
        """Create the process group and the device mesh."""
        strategy = cast(Any, self)
        if strategy._data_parallel_size == "auto":
            # Lightning's default is the number of nodes, with tensor parallelism within each.
            processes = strategy.num_nodes * strategy.num_processes
            strategy._data_parallel_size = processes // strategy._tensor_parallel_size
        super().setup_environment()

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Do nothing: `load_checkpoint` has loaded the states of each rank."""
