"""`Trainer(strategy="ssd_offload_deepspeed")`: Lightning's DeepSpeed strategy, with offload.

The engine offloads activations and reports metrics; tiers for optimizer states and weights become
DeepSpeed's own sections (deepspeed/config_sections.py). docs/deepspeed.md has examples.

[Note: DeepSpeed on the CPU]
DeepSpeed trains on the CPU, but Lightning's strategy refuses it. The device of a process needs an
index, which DeepSpeed uses as its rank, and `Trainer(accelerator="cpu")` gives none.
"""

from __future__ import annotations

import copy
import os
from typing import TYPE_CHECKING, Any

import torch

from offload_strategy.config import ConfigSource, OffloadConfig
from offload_strategy.integrations.deepspeed import config_sections
from offload_strategy.integrations.deepspeed.gathered_weights import GatheredWeights, install
from offload_strategy.integrations.lightning.engine_strategy import EngineOwner

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

_AIO_OPTIONS = ("block_size", "queue_depth", "single_submit", "overlap_events", "thread_count")


class DeepSpeedOffloadMixin(EngineOwner):
    """A DeepSpeed strategy whose activations are offloaded by an `OffloadEngine`.

    Args:
        offload_config: anything that `OffloadConfig.load` reads; None for $SSD_OFFLOAD_CONFIG, else
            the defaults. (`config` is DeepSpeed's, as in Lightning's strategy.)
        deepspeed: options of Lightning's `DeepSpeedStrategy`.

    Raises:
        ConfigError: the config is wrong, or DeepSpeed's config contradicts it.
    """

    strategy_name = "ssd_offload_deepspeed"
    description = "DeepSpeed, with activations on host memory and SSDs"
    stages = (1, 2, 3)
    _weights: GatheredWeights | None = None

    def __init__(self, offload_config: ConfigSource = None, **deepspeed: Any) -> None:
        self.offload_config = OffloadConfig.load(offload_config)
        super().__init__(**deepspeed)
        # The user's own DeepSpeed config, without Lightning's defaults.
        self._given = copy.deepcopy(self.config)
        if deepspeed.get("config") is None and self.DEEPSPEED_ENV_VAR not in os.environ:
            if not any(name in deepspeed for name in _AIO_OPTIONS):
                self._given.pop("aio", None)
            if "sub_group_size" not in deepspeed:
                self._given.get("zero_optimization", {}).pop("sub_group_size", None)
        self._derive()

    def _derive(self, largest_parameter: int | None = None) -> dict[str, Any]:
        sections = config_sections.derived_sections(
            self._given, self.offload_config, largest_parameter
        )
        config_sections.merge_sections(self.config, sections)
        if "offload_optimizer" in sections.get("zero_optimization", {}):
            # Otherwise DeepSpeed accepts only its own optimizers from `configure_optimizers`.
            self.config.setdefault("zero_force_ds_cpu_optimizer", False)
        return sections

    def setup_environment(self) -> None:
        """Create the process group, on the CPU as well; see [Note: DeepSpeed on the CPU]."""
        if self.root_device.type != "cpu":
            super().setup_environment()
            return
        self.parallel_devices = [torch.device("cpu", each) for each in range(self.num_processes)]
        self.accelerator.setup_device(self.root_device)
        self.setup_distributed()

    def setup(self, trainer: Trainer) -> None:
        """Set up DeepSpeed, then attach the model."""
        sizes = [getattr(p, "ds_numel", p.numel()) for p in self.model.parameters()]
        config_sections.check_nvme(self._derive(largest_parameter=max(sizes, default=None)))
        super().setup(trainer)
        if trainer.state.fn != "fit":
            return
        config = config_sections.for_activations(self.offload_config)
        engine = self._open_engine(config, self.num_processes)
        try:
            engine.attach(self.model)
            self._weights = install(engine, self.model)
        except BaseException:
            self._close_engine()
            raise

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's training step, offloading its saved tensors."""
        engine = self._engine
        if engine is None:
            return super().training_step(*args, **kwargs)
        if self.lightning_module is not None and self.lightning_module.automatic_optimization:
            engine.microbatch(0, last=True)
        with engine.forward():
            return super().training_step(*args, **kwargs)

    def teardown(self) -> None:
        """Remove the hooks from the model; metrics can be read until the next `fit`."""
        if self._engine is not None and not self._engine.closed and self.model is not None:
            self._engine.detach_model(self.model)
            self._engine.end_threads()
        if self._weights is not None:
            self._weights.remove()
            self._weights = None
        super().teardown()
