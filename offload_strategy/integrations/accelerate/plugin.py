"""Accelerate: the engine inside `Accelerator.prepare`, for scripts that never mention this package.

Three ways in, all to one session per `Accelerator`:

    accelerate launch --config offload.yaml train.py       # with an `ssd_offload_config:` section
    ACCELERATE_USE_SSD_OFFLOAD=1 python train.py           # config from $SSD_OFFLOAD_CONFIG
    Accelerator(kwargs_handlers=[SSDOffloadPlugin("full")])

$SSD_OFFLOAD_CONFIG alone activates nothing: it is the default config everywhere, and a default must
not offload every Accelerate script on the machine.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from offload_strategy.autoload import is_disabled
from offload_strategy.callbacks import trainer_reports
from offload_strategy.config import ConfigSource, OffloadConfig
from offload_strategy.errors import ConfigError
from offload_strategy.integrations.accelerate.launch import ACTIVE_VARIABLE
from offload_strategy.integrations.accelerate.session import DeepSpeedSession, Session
from offload_strategy.integrations.accelerate.state_saving import install_in, install_in_trainer

if TYPE_CHECKING:
    from accelerate import Accelerator

METRICS_VARIABLE = "SSD_OFFLOAD_METRICS_EVERY"

_SESSION = "_ssd_offload_session"
_YES = ("1", "true", "yes", "on", "y", "t")

#: Methods of `Accelerator` that a `Session` has as well, with the original as first argument.
_WRAPPED = [
    "prepare",
    "prepare_model",
    "prepare_optimizer",
    "prepare_scheduler",
    "log",
    "end_training",
    "free_memory",
    "save_state",
    "load_state",
]


def _metrics_every() -> int:
    value = os.environ.get(METRICS_VARIABLE, "10")
    try:
        return int(value)
    except ValueError:
        raise ConfigError(
            f"${METRICS_VARIABLE}: got {value!r}, allowed is a number of steps, or 0 for never"
        ) from None


@dataclass
class SSDOffloadPlugin:
    """Offloading for one `Accelerator`: `Accelerator(kwargs_handlers=[SSDOffloadPlugin("full")])`.

    Raises:
        ConfigError: If the config is wrong.
    """

    config: ConfigSource = None
    """What `OffloadConfig.load` reads; None for $SSD_OFFLOAD_CONFIG or the defaults."""
    metrics_every: int = field(default_factory=_metrics_every)
    """Optimizer steps between two sets of metrics in the Accelerator's trackers, 0 for none.
    Default: $SSD_OFFLOAD_METRICS_EVERY, else 10."""

    def __post_init__(self) -> None:
        self.config = OffloadConfig.load(self.config)
        if self.metrics_every < 0:
            raise ConfigError(
                f"SSDOffloadPlugin: metrics_every is {self.metrics_every}, allowed are 0 (never) "
                "and up"
            )
        # For processes in which `import torch` did not register the hook.
        install(importlib.import_module("accelerate.accelerator"))


def session_of(accelerator: Any) -> Session | None:
    """Return the session of an `Accelerator`, None if it does not offload."""
    return cast("Session | None", getattr(accelerator, _SESSION, None))


@functools.cache  # it is installed once
def install(module: Any) -> None:
    """Wrap the methods of `accelerate.accelerator.Accelerator` that concern offload. Idempotent."""
    cls = module.Accelerator
    cls.__init__ = _init(cls.__init__)
    for name in _WRAPPED:
        setattr(cls, name, _through_session(name, getattr(cls, name)))
    install_in(importlib.import_module("accelerate.checkpointing"))


def _through_session(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def method(self: Accelerator, *args: Any, **kwargs: Any) -> Any:
        if (session := session_of(self)) is None:
            return original(self, *args, **kwargs)
        return getattr(session, name)(functools.partial(original, self), *args, **kwargs)

    return method


def _init(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def __init__(self: Accelerator, *args: Any, **kwargs: Any) -> None:
        # Its eighteenth parameter: nobody gives it by position.
        handlers = kwargs.get("kwargs_handlers") or []
        plugins = [handler for handler in handlers if isinstance(handler, SSDOffloadPlugin)]
        if plugins:
            # Accelerate looks handlers up in a fixed table of its own classes.
            others = [handler for handler in handlers if not isinstance(handler, SSDOffloadPlugin)]
            kwargs["kwargs_handlers"] = others or None
        elif os.environ.get(ACTIVE_VARIABLE, "").strip().lower() in _YES and not is_disabled():
            plugins = [SSDOffloadPlugin()]
        if len(plugins) > 1:
            raise ConfigError("kwargs_handlers: more than one SSDOffloadPlugin, pass one")
        original(self, *args, **kwargs)
        if plugins:
            setattr(self, _SESSION, _make_session(self, plugins[0]))

    return __init__


def _make_session(accelerator: Accelerator, plugin: SSDOffloadPlugin) -> Session:
    config = OffloadConfig.load(plugin.config)
    trainer_reports.install(session_of)
    distributed = str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type))
    if distributed == "DEEPSPEED":
        return DeepSpeedSession(config, plugin.metrics_every, accelerator)
    if distributed == "NO" or distributed.startswith("MULTI_") or accelerator.is_fsdp2:
        install_in_trainer(session_of)
        return Session(config, plugin.metrics_every, accelerator)
    version = " with fsdp_version 1" if distributed == "FSDP" else ""
    raise ConfigError(
        "offloading through Accelerate works in one process, with data-parallel processes "
        "(DistributedDataParallel), with FSDP version 2 and with DeepSpeed, and this Accelerator "
        f"has distributed_type {distributed}{version}: launch with distributed_type 'NO', "
        f"'MULTI_GPU' ('MULTI_CPU'), 'FSDP' with fsdp_version 2 or 'DEEPSPEED', or remove the "
        f"plugin, the section of the launch file or ${ACTIVE_VARIABLE}"
    )
