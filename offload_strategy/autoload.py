"""What `import torch` runs when the package is installed: it asks to be told of some frameworks.

This is the entry point of group `torch.backends`. It registers post-import hooks for Lightning, its
Fabric and Accelerate and does nothing else, so that they work in scripts that never mention us.

[Note: nothing may escape]
An exception in an entry point of this group breaks `import torch` for the whole environment, and
one in a post-import hook breaks the import of the framework. So every failure becomes one warning,
and the package steps aside. With `SSD_OFFLOAD_DISABLE=1` nothing is offloaded.

[Note: half imported]
`from accelerate import Accelerator` before `import torch` imports torch from inside
`accelerate/accelerator.py`. When this entry point runs, that module is in `sys.modules` but has no
`Accelerator` yet, and a post-import hook fires at once. So a hook waits until the import system
says that the module is finished: until it sets `spec._initializing` to False.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Any

DISABLE_VARIABLE = "SSD_OFFLOAD_DISABLE"

#: Module of a framework -> our module that is imported after it, and the function that is called
#: with the framework's module; modules without a function register themselves on import.
_HOOKS = {
    "accelerate.accelerator": ("accelerate.plugin", "install"),
    "accelerate.commands.config.config_args": ("accelerate.launch", "install_in_config"),
    "accelerate.commands.launch": ("accelerate.launch", "install_in_launcher"),
    "lightning.fabric.fabric": ("fabric.for_lightning_fabric", None),
    "lightning_fabric.fabric": ("fabric.for_standalone_fabric", None),
    "lightning.pytorch.strategies": ("lightning.for_lightning_pytorch", None),
    "pytorch_lightning.strategies": ("lightning.for_pytorch_lightning", None),
}

_warned = False


def register() -> None:
    """Register the post-import hooks, which are harmless to run again; `import torch` calls this.

    Never raises. If `is_disabled`, only what leaves our section of a launch file alone.
    """
    try:
        for framework, (ours, function) in _HOOKS.items():
            if not is_disabled() or ours == "accelerate.launch":
                _when_imported(framework, partial(_install, ours, function))
    except Exception as error:
        _step_aside("the post-import hooks", error)


def is_disabled() -> bool:
    """Whether $SSD_OFFLOAD_DISABLE is set to anything but "", "0", "false", "no" or "off"."""
    value = os.environ.get(DISABLE_VARIABLE, "").strip().lower()
    return value not in ("", "0", "false", "no", "off")


def _install(name: str, function: str | None, module: ModuleType) -> None:
    """Import a module of our integrations, and call a function of it with the framework's."""
    ours = import_module(f"offload_strategy.integrations.{name}")
    if function is not None:
        getattr(ours, function)(module)


def _when_imported(name: str, hook: Callable[[ModuleType], None]) -> None:
    """Call `hook` with module `name` once it is completely imported, now or later."""
    from wrapt import register_post_import_hook

    def imported(module: ModuleType) -> None:
        try:
            spec = getattr(module, "__spec__", None)
            if getattr(spec, "_initializing", False):
                _when_finished(spec, partial(_when_imported, name, hook))
            else:
                hook(module)
        except Exception as error:
            _step_aside(f"the hook for {name}", error)

    register_post_import_hook(imported, name)


def _when_finished(spec: Any, then: Callable[[], None]) -> None:
    """Call `then` when an import ends or fails.

    After a failure wrapt counts the hook as done, but a second attempt may succeed.
    """
    plain = type(spec)

    class _WatchedSpec(plain):  # type: ignore[misc,valid-type]
        def __setattr__(self, key: str, value: object) -> None:
            super().__setattr__(key, value)
            if key == "_initializing" and not value:
                self.__class__ = plain
                then()

    spec.__class__ = _WatchedSpec


def _step_aside(what: str, error: Exception) -> None:
    """Warn once that the package is not active. See [Note: nothing may escape]."""
    global _warned
    if _warned:
        return
    _warned = True
    message = (
        f"offload-strategy steps aside: {what} failed with {type(error).__name__}: {error}. "
        f"Everything else works as without it. Set {DISABLE_VARIABLE}=1 to silence this."
    )
    try:
        warnings.warn(message, RuntimeWarning, stacklevel=2)
    except Exception:
        # `python -W error` turns the warning into an exception.
        print(message, file=sys.stderr)
