"""Keeps torch.compile out of this package's own code.

Where a compiled graph breaks, torch.compile tries to compile every Python function that runs next,
those included that our hooks call: seconds of compilation for nothing, and a warning for each
builtin that it cannot trace. It has a list of files that it leaves alone.
"""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType

from wrapt import register_post_import_hook

from offload_strategy.activations import module_hooks

_PACKAGE = "offload_strategy"
#: Left to torch.compile: models of ours are to be compiled, and in the hooks on a module a graph
#: breaks with words of ours.
_TRACED = {f"{_PACKAGE}.examples", module_hooks.__name__}

_registered = False


def keep_torch_compile_out() -> None:
    """See to it that torch.compile does not look into this package. Idempotent."""
    global _registered
    if not _registered:
        _registered = True
        # Importing torch._dynamo takes seconds, and who does not compile may never need it.
        register_post_import_hook(_keep_out, "torch._dynamo")


def _keep_out(dynamo: ModuleType) -> None:
    for name in _untraced(_PACKAGE):
        dynamo.trace_rules.add(name)
    # Traced as part of a larger graph, but not compiled for themselves.
    for hook in (module_hooks.Before, module_hooks.After):
        dynamo.eval_frame.skip_code(hook.__call__.__code__)


def _untraced(package: str) -> list[str]:
    """Names of a package's modules; of those of its packages that are left alone as a whole."""
    names = []
    for module in pkgutil.iter_modules(importlib.import_module(package).__path__, f"{package}."):
        if module.name in _TRACED:
            continue
        partly = any(name.startswith(f"{module.name}.") for name in _TRACED)
        names.extend(_untraced(module.name) if partly else [module.name])
    return names
