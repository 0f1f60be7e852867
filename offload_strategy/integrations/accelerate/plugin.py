"""Accelerate: the engine inside `Accelerator.prepare`, for scripts that never mention this package.

Three ways in, all to one session per `Accelerator`:

    accelerate launch --config offload.yaml train.py       # with an `ssd_offload_config:` section
    ACCELERATE_USE_SSD_OFFLOAD=1 python train.py           # config from $SSD_OFFLOAD_CONFIG
    Accelerator(kwargs_handlers=[SSDOffloadPlugin("full")])

$SSD_OFFLOAD_CONFIG alone activates nothing: it is the default config everywhere, and a default must
not offload every Accelerate script on the machine.

[Note: where models and optimizers are attached]
`prepare_model` and `prepare_optimizer` are wrapped rather than `prepare`: both are public, and
scripts call them one by one as well. DeepSpeed bypasses them: see deepspeed_session.py. So does
FSDP2, which gives an optimizer its sharded parameters at the end of `prepare`: both are attached
after that. Other engines that bypass them (FSDP1, Megatron) are refused when the `Accelerator` is
created. The model is attached as Accelerate returns it, so that hooks stay outside of a compiled
region. The optimizer is wrapped before `AcceleratedOptimizer` wraps it.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from offload_strategy.autoload import is_disabled
from offload_strategy.config import ConfigSource, OffloadConfig
from offload_strategy.errors import ConfigError
from offload_strategy.integrations.accelerate import deepspeed_session
from offload_strategy.integrations.accelerate.launch import ACTIVE_VARIABLE
from offload_strategy.integrations.accelerate.session import Session
from offload_strategy.integrations.accelerate.state_saving import (
    install_in,
    install_in_trainer,
    streaming,
)

if TYPE_CHECKING:
    from accelerate import Accelerator

METRICS_VARIABLE = "SSD_OFFLOAD_METRICS_EVERY"

_SESSION = "_ssd_offload_session"
_INSTALLED = "_ssd_offload_installed"


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

    config: ConfigSource = field(
        default=None,
        metadata={
            "help": "What OffloadConfig.load reads; None for $SSD_OFFLOAD_CONFIG or the defaults."
        },
    )
    metrics_every: int = field(
        default_factory=_metrics_every,
        metadata={
            "help": "Optimizer steps between two sets of metrics in the Accelerator's trackers, 0 "
            f"for none. Default: ${METRICS_VARIABLE}, else 10."
        },
    )

    def __post_init__(self) -> None:
        self.config = OffloadConfig.load(self.config)
        if self.metrics_every < 0:
            raise ConfigError(
                f"SSDOffloadPlugin: metrics_every is {self.metrics_every}, allowed are 0 (never) "
                "and up"
            )
        # For processes in which `import torch` did not register the hook.
        install(importlib.import_module("accelerate.accelerator"))


# ---------------------------------------------------------------------- Accelerator


def session_of(accelerator: Any) -> Session | None:
    """Return the session of an `Accelerator`, None if it does not offload."""
    session: Session | None = getattr(accelerator, _SESSION, None)
    return session


def install(module: Any) -> None:
    """Wrap the methods of `Accelerator` in which models and optimizers are attached. Idempotent.

    Args:
        module: The module `accelerate.accelerator`.
    """
    cls = module.Accelerator
    if getattr(cls, _INSTALLED, False):
        return
    for name, wrap in {
        "__init__": _init,
        "prepare": _prepare,
        "prepare_model": _prepare_model,
        "prepare_optimizer": _prepare_optimizer,
        "prepare_scheduler": _prepare_scheduler,
        "log": _log,
        "end_training": _end_training,
        "free_memory": _free_memory,
        "save_state": _with_streams,
        "load_state": _with_streams,
    }.items():
        setattr(cls, name, wrap(getattr(cls, name)))
    install_in(importlib.import_module("accelerate.checkpointing"))
    setattr(cls, _INSTALLED, True)


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
        elif _is_active_by_environment():
            plugins = [SSDOffloadPlugin()]
        if len(plugins) > 1:
            raise ConfigError("kwargs_handlers: more than one SSDOffloadPlugin, pass one")
        original(self, *args, **kwargs)
        if plugins:
            plugin = plugins[0]
            config = OffloadConfig.load(plugin.config)
            session = deepspeed_session.session_for(self, config, plugin.metrics_every)
            if session is None:
                _refuse_other_engines(self)
                install_in_trainer()
                session = Session(config, plugin.metrics_every, self)
            setattr(self, _SESSION, session)

    return __init__


def _is_active_by_environment() -> bool:
    value = os.environ.get(ACTIVE_VARIABLE, "").strip().lower()
    return value in ("1", "true", "yes", "on", "y", "t") and not is_disabled()


def _refuse_other_engines(accelerator: Accelerator) -> None:
    distributed = str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type))
    if distributed == "NO" or distributed.startswith("MULTI_") or accelerator.is_fsdp2:
        return
    version = " with fsdp_version 1" if distributed == "FSDP" else ""
    raise ConfigError(
        "offloading through Accelerate works in one process, with data-parallel processes "
        "(DistributedDataParallel), with FSDP version 2 and with DeepSpeed, and this Accelerator "
        f"has distributed_type {distributed}{version}: launch with distributed_type 'NO', "
        f"'MULTI_GPU' ('MULTI_CPU'), 'FSDP' with fsdp_version 2 or 'DEEPSPEED', or remove the "
        f"plugin, the section of the launch file or ${ACTIVE_VARIABLE}"
    )


def _prepare(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def prepare(self: Accelerator, *args: Any, **kwargs: Any) -> Any:
        session = session_of(self)
        if session is not None:
            session.begin(*args)
        prepared = original(self, *args, **kwargs)
        if isinstance(session, deepspeed_session.DeepSpeedSession):
            session.attach_prepared(prepared)
        elif session is not None and self.is_fsdp2:
            _attach_sharded(session, prepared if len(args) > 1 else (prepared,))
        return prepared

    return prepare


def _attach_sharded(session: Session, prepared: tuple[Any, ...]) -> None:
    """Attach what `prepare` has sharded: optimizers have their final parameters only now."""
    for each in prepared:
        if isinstance(each, torch.nn.Module):
            session.attach_model(each)
    for each in prepared:
        if isinstance(each, torch.optim.Optimizer):
            accelerated: Any = each
            accelerated.optimizer = session.attach_optimizer(accelerated.optimizer)
            session.keep_for(each)


def _prepare_model(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def prepare_model(
        self: Accelerator,
        model: torch.nn.Module,
        device_placement: bool | None = None,
        evaluation_mode: bool = False,
    ) -> Any:
        session = session_of(self)
        if session is not None and not evaluation_mode:
            session.begin(model)
            if session.fills(model):
                device_placement = False  # `Module.to` refuses the meta device
        prepared = original(
            self, model, device_placement=device_placement, evaluation_mode=evaluation_mode
        )
        if session is not None and not evaluation_mode:
            session.attach_model(prepared)
        return prepared

    return prepare_model


def _prepare_optimizer(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def prepare_optimizer(
        self: Accelerator, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> Any:
        session = session_of(self)
        if session is None or self.is_fsdp2:
            return original(self, optimizer, device_placement=device_placement)
        session.begin(optimizer)
        if not getattr(optimizer, "_is_accelerate_prepared", False):
            optimizer = session.attach_optimizer(optimizer)
        prepared = original(self, optimizer, device_placement=device_placement)
        session.keep_for(prepared)
        return prepared

    return prepare_optimizer


def _prepare_scheduler(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def prepare_scheduler(self: Accelerator, scheduler: Any) -> Any:
        prepared = original(self, scheduler)
        if session_of(self) is not None:
            # The script's scheduler holds the script's optimizer, by which Accelerate did not find
            # the wrapped one; a scheduler without its optimizer waits for every optimizer to step.
            for optimizer in self._optimizers:
                inner = getattr(optimizer.optimizer, "inner", None)
                if inner is not None and inner is getattr(scheduler, "optimizer", None):
                    prepared.optimizers = [optimizer]
        return prepared

    return prepare_scheduler


def _log(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def log(
        self: Accelerator,
        values: Mapping[str, Any],
        step: int | None = None,
        log_kwargs: dict[str, Any] | None = None,
    ) -> None:
        session = session_of(self)
        if session is not None and self.trackers:
            session.log_step = step
            values = {**session.metrics(), **values}
        original(self, values, step=step, log_kwargs=log_kwargs)

    return log


def _end_training(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def end_training(self: Accelerator) -> None:
        session = session_of(self)
        if session is not None and (metrics := session.metrics(now=True)):
            # At the script's last step, which is also right for one that writes to its trackers
            # itself.
            for tracker in self.trackers:
                tracker.log(metrics, step=session.log_step)
        original(self)

    return end_training


def _free_memory(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def free_memory(self: Accelerator, *objects: Any) -> Any:
        released = original(self, *objects)
        session = session_of(self)
        if session is not None:
            session.retire()
        return released

    return free_memory


def _with_streams(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def save_or_load_state(self: Accelerator, *args: Any, **kwargs: Any) -> Any:
        if session_of(self) is None:
            return original(self, *args, **kwargs)
        with streaming(self):
            return original(self, *args, **kwargs)

    return save_or_load_state
