"""`import torch` in fresh processes: hooks register in every order and never break an import."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from offload_strategy import autoload
from tests.integrations.support import python, succeeded

REGISTERED = """
def registered():
    from accelerate.accelerator import Accelerator
    from lightning.fabric.strategies import STRATEGY_REGISTRY as lightning_fabric_registry
    from lightning.pytorch.strategies import StrategyRegistry as lightning_registry
    from lightning_fabric.strategies import STRATEGY_REGISTRY as standalone_registry
    from pytorch_lightning.strategies import StrategyRegistry as pytorch_lightning_registry
    registries = (
        lightning_registry,
        pytorch_lightning_registry,
        lightning_fabric_registry,
        standalone_registry,
    )
    once = hasattr(Accelerator.prepare_model, "__wrapped__") and not hasattr(
        Accelerator.prepare_model.__wrapped__, "__wrapped__"
    )
    return [once, *("ssd_offload" in registry for registry in registries)]
"""

TORCH_FIRST = """
import sys, torch
print(sorted(name for name in sys.modules if name.startswith("offload_strategy")))
print([name for name in ("pydantic", "yaml", "psutil", "lightning") if name in sys.modules])
import pytorch_lightning as pl
from offload_strategy import SSDOffloadStrategy
from offload_strategy.callbacks import MicroBatchHints, OffloadMonitor
from offload_strategy.integrations.lightning import SSDOffloadStrategy as same
assert same is SSDOffloadStrategy
trainer = pl.Trainer(strategy=SSDOffloadStrategy(), logger=False)
for callback in (OffloadMonitor(), MicroBatchHints()):
    assert callback in pl.Trainer(callbacks=callback, logger=False).callbacks
print("lightning.pytorch" in sys.modules)
from transformers import Trainer
print(registered())
"""

# Each of these imports torch from inside of itself; of ours, the modules import the frameworks.
# Accelerate's launcher comes first in test_unmodified_scripts.py.
OTHERS_FIRST = {
    "transformers": "from transformers import Trainer; import lightning.pytorch",
    "ours": """
from offload_strategy.integrations.fabric import for_lightning_fabric, for_standalone_fabric
from offload_strategy.integrations.lightning import for_pytorch_lightning, for_lightning_pytorch
import lightning, lightning_fabric, pytorch_lightning
for ours, theirs in (
    (for_lightning_pytorch, lightning.pytorch.strategies.StrategyRegistry),
    (for_pytorch_lightning, pytorch_lightning.strategies.StrategyRegistry),
    (for_lightning_fabric, lightning.fabric.strategies.STRATEGY_REGISTRY),
    (for_standalone_fabric, lightning_fabric.strategies.STRATEGY_REGISTRY),
):
    assert theirs["ssd_offload"]["strategy"] is ours.SSDOffloadStrategy
for fabric in (lightning.fabric.Fabric, lightning_fabric.Fabric):
    assert not hasattr(fabric.no_backward_sync.__wrapped__, "__wrapped__")
""",
}

OFF_AND_LATE = """
import importlib, os
import torch
from accelerate import Accelerator
print(registered())
del os.environ["SSD_OFFLOAD_DISABLE"]
from offload_strategy import autoload
for _ in range(2):
    autoload.register()
    autoload.register()
    importlib.reload(autoload)
print(registered())
"""


def test_import_torch_is_cheap_and_the_install_in_use_is_found(tmp_path: Path) -> None:
    result = python("-c", REGISTERED + TORCH_FIRST, home=tmp_path)
    ours, heavy, other, registered = succeeded(result).splitlines()[-4:]
    assert ours == "['offload_strategy', 'offload_strategy.autoload']"
    assert heavy == "[]"
    assert other == "False"
    assert registered == str([True] * 5)
    assert "steps aside" not in result.stderr


@pytest.mark.parametrize("first", OTHERS_FIRST)
def test_every_import_order_registers_everything(first: str, tmp_path: Path) -> None:
    code = f"{REGISTERED}{OTHERS_FIRST[first]}\nprint(registered())"
    result = python("-W", "error::RuntimeWarning", "-c", code, home=tmp_path)
    assert succeeded(result).splitlines()[-1] == str([True] * 5)
    assert "steps aside" not in result.stderr


def test_the_variable_switches_the_hooks_off_and_a_late_registration_reaches_loaded_modules(
    tmp_path: Path,
) -> None:
    variables = {"SSD_OFFLOAD_DISABLE": "1"}
    result = python("-c", REGISTERED + OFF_AND_LATE, home=tmp_path, variables=variables)
    assert succeeded(result).splitlines()[-2:] == [str([False] * 5), str([True] * 5)]
    assert "steps aside" not in result.stderr


# ---------------------------------------------------------------------- in this process


@pytest.fixture
def half_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A module that asks for the hook on itself before it has defined anything."""
    monkeypatch.syspath_prepend(str(tmp_path))
    name = "half_imported_module"
    (tmp_path / f"{name}.py").write_text(
        "import register_the_hook\n"
        "if register_the_hook.fails.pop():\n"
        "    raise ImportError('the first attempt')\n"
        "complete = True\n"
    )
    yield name
    for module in (name, "register_the_hook"):
        sys.modules.pop(module, None)


@pytest.mark.parametrize("failures", [0, 1], ids=["first-attempt", "second-attempt"])
def test_a_hook_waits_until_a_half_imported_module_is_complete(
    half_imported: str, tmp_path: Path, failures: int
) -> None:
    (tmp_path / "register_the_hook.py").write_text(
        "from offload_strategy import autoload\n"
        f"fails = [False, *[True] * {failures}]\n"
        "seen = []\n"
        "hook = lambda module: seen.append(module.complete)\n"
        f"autoload._when_imported({half_imported!r}, hook)\n"
    )
    for _ in range(failures):
        with pytest.raises(ImportError, match="the first attempt"):
            importlib.import_module(half_imported)
    module = importlib.import_module(half_imported)
    hook = importlib.import_module("register_the_hook")
    assert hook.seen == [True]
    assert type(module.__spec__).__name__ == "ModuleSpec"


def test_a_hook_that_raises_warns_once_and_leaves_the_others_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(autoload, "_warned", False)
    seen: list[ModuleType] = []
    hooks = [
        partial(autoload._install, "no_such_module", None),
        lambda module: module.nothing,
        seen.append,
    ]
    for number, hook in enumerate(hooks):
        (tmp_path / f"innocent_module_{number}.py").write_text("complete = True\n")
        autoload._when_imported(f"innocent_module_{number}", hook)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        modules = [importlib.import_module(f"innocent_module_{number}") for number in range(3)]
    assert all(module.complete for module in modules)
    assert seen == modules[2:]
    (message,) = [str(warning.message) for warning in caught]
    assert "hook for innocent_module_0 failed with ModuleNotFoundError" in message


@pytest.mark.parametrize("wrapt", [None, ModuleType("wrapt")], ids=["missing", "unknown"])
@pytest.mark.parametrize("action", ["default", "error"])
def test_a_broken_wrapt_is_said_once_and_raises_nothing(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], wrapt: Any, action: Any
) -> None:
    monkeypatch.setattr(autoload, "_registered", False)
    monkeypatch.setattr(autoload, "_warned", False)
    monkeypatch.setitem(sys.modules, "wrapt", wrapt)
    with warnings.catch_warnings(record=action == "default") as caught:
        warnings.simplefilter(action)
        autoload.register()
    said = [str(warning.message) for warning in caught or ()] + [capfd.readouterr().err]
    assert "".join(said).count("offload-strategy steps aside") == 1
