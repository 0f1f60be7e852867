"""`import torch` in fresh processes: hooks register in every order and never break an import."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import CompletedProcess
from types import ModuleType
from typing import Any

import pytest

from offload_strategy import autoload
from tests.integrations.support import python, succeeded

TORCH = "import torch"
ACCELERATE = "from accelerate import Accelerator"
TRANSFORMERS = "from transformers import Trainer"
LIGHTNING = "import lightning.pytorch"
PYTORCH_LIGHTNING = "import pytorch_lightning"

# Each framework before and after each other one.
ORDERS = [
    (TORCH, ACCELERATE, TRANSFORMERS, LIGHTNING, PYTORCH_LIGHTNING),
    (PYTORCH_LIGHTNING, LIGHTNING, TRANSFORMERS, ACCELERATE, TORCH),
    ("import accelerate.commands.launch", PYTORCH_LIGHTNING, TORCH, "import lightning"),
    (TRANSFORMERS, LIGHTNING, ACCELERATE, TORCH),
]

REGISTERED = """
from accelerate.accelerator import Accelerator
from lightning.fabric.strategies import STRATEGY_REGISTRY as fabric_registry
from lightning.pytorch.strategies import StrategyRegistry as lightning_registry
from lightning_fabric.strategies import STRATEGY_REGISTRY as lightning_fabric_registry
from pytorch_lightning.strategies import StrategyRegistry as pytorch_lightning_registry
print(
    "ssd_offload" in lightning_registry,
    "ssd_offload" in pytorch_lightning_registry,
    "ssd_offload" in fabric_registry,
    "ssd_offload" in lightning_fabric_registry,
    hasattr(Accelerator.prepare_model, "__wrapped__"),
)
"""

IMPORTED = """
import sys, torch
print(sorted(name for name in sys.modules if name.startswith("offload_strategy")))
print([name for name in ("pydantic", "yaml", "psutil", "lightning") if name in sys.modules])
"""

BROKEN_HOOK = """
import sys
# Importing it raises ImportError.
sys.modules["offload_strategy.integrations.lightning.for_lightning_pytorch"] = None
import torch
import lightning.pytorch
from accelerate import Accelerator
print(torch.ones(1).item(), hasattr(Accelerator.prepare_model, "__wrapped__"))
print("ssd_offload" in lightning.pytorch.strategies.StrategyRegistry)
"""

NO_WRAPT = "import sys; sys.modules['wrapt'] = None; import torch; print(torch.ones(1).item())"

LATE = f"""
{TORCH}
{LIGHTNING}
{PYTORCH_LIGHTNING}
{ACCELERATE}
import importlib
from offload_strategy import autoload
for _ in range(2):
    autoload.register()
    autoload.register()
    importlib.reload(autoload)
{REGISTERED}
print(hasattr(Accelerator.prepare_model.__wrapped__, "__wrapped__"))
"""

CASES: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {
    **{f"order-{i}": (("-c", "\n".join([*o, REGISTERED])), {}) for i, o in enumerate(ORDERS)},
    "imported": (("-c", IMPORTED), {}),
    "broken-hook": (("-c", BROKEN_HOOK), {}),
    "no-wrapt": (("-W", "error", "-c", NO_WRAPT), {}),
    "off": (
        ("-c", f"{TORCH}\n{LIGHTNING}\n{PYTORCH_LIGHTNING}\n{REGISTERED}"),
        {"SSD_OFFLOAD_DISABLE": "1"},
    ),
    "late": (("-c", LATE), {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}),
}

Result = Callable[[str], CompletedProcess[str]]


@pytest.fixture
def result(tmp_path: Path) -> Result:
    """The result of a fresh process."""

    def of(name: str) -> CompletedProcess[str]:
        arguments, variables = CASES[name]
        return python(*arguments, home=tmp_path, variables=variables)

    return of


@pytest.mark.parametrize("index", range(len(ORDERS)))
def test_every_import_order_registers_everything(result: Result, index: int) -> None:
    process = result(f"order-{index}")
    assert succeeded(process).split() == ["True"] * 5
    assert "steps aside" not in process.stderr


def test_import_torch_imports_nothing_of_the_package_but_the_entry_point(result: Result) -> None:
    ours, heavy = succeeded(result("imported")).splitlines()
    assert ours == "['offload_strategy', 'offload_strategy.autoload']"
    assert heavy == "[]"


def test_a_broken_hook_warns_once_and_leaves_the_others_alone(result: Result) -> None:
    process = result("broken-hook")
    assert succeeded(process).split() == ["1.0", "True", "False"]
    assert process.stderr.count("offload-strategy steps aside") == 1
    assert "lightning.pytorch.strategies" in process.stderr


def test_import_torch_survives_a_missing_wrapt(result: Result) -> None:
    process = result("no-wrapt")
    assert succeeded(process).split() == ["1.0"]
    assert process.stderr.count("offload-strategy steps aside") == 1


def test_the_variable_switches_the_hooks_off(result: Result) -> None:
    process = result("off")
    assert succeeded(process).split() == ["False"] * 5
    assert "offload" not in process.stderr


def test_a_late_and_repeated_registration_reaches_modules_that_are_loaded(result: Result) -> None:
    # The last word: the methods are wrapped once, and not once a registration.
    assert succeeded(result("late")).split() == [*["True"] * 5, "False"]


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


def test_a_hook_that_raises_does_not_break_the_import_of_its_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(autoload, "_warned", False)
    for name in ("innocent_module_1", "innocent_module_2"):
        (tmp_path / f"{name}.py").write_text("complete = True\n")
        autoload._when_imported(name, lambda module: module.no_such_thing)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert importlib.import_module("innocent_module_1").complete
        assert importlib.import_module("innocent_module_2").complete
    messages = [str(warning.message) for warning in caught]
    assert len(messages) == 1
    assert "hook for innocent_module_1 failed with AttributeError" in messages[0]


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


OURS_FIRST = """
from offload_strategy.integrations.lightning import {first} as one, {second} as two
from offload_strategy.integrations.fabric import for_lightning_fabric, for_standalone_fabric
from lightning.pytorch.strategies import StrategyRegistry as lightning_registry
from pytorch_lightning.strategies import StrategyRegistry as pytorch_lightning_registry
import lightning.fabric.strategies, lightning_fabric.strategies
for ours in (one, two):
    theirs = lightning_registry if "for_lightning" in ours.__name__ else pytorch_lightning_registry
    assert theirs["ssd_offload"]["strategy"] is ours.SSDOffloadStrategy
for ours, theirs in (
    (for_lightning_fabric, lightning.fabric), (for_standalone_fabric, lightning_fabric)
):
    strategy = theirs.strategies.STRATEGY_REGISTRY["ssd_offload"]["strategy"]
    assert strategy is ours.SSDOffloadStrategy
    assert hasattr(theirs.Fabric.no_backward_sync, "__wrapped__")
    assert not hasattr(theirs.Fabric.no_backward_sync.__wrapped__, "__wrapped__")
"""


@pytest.mark.parametrize(
    ("before", "order"),
    [
        ("", ("for_lightning_pytorch", "for_pytorch_lightning")),
        ("import torch", ("for_pytorch_lightning", "for_lightning_pytorch")),
    ],
)
def test_a_script_may_import_our_modules_before_the_frameworks(
    before: str, order: tuple[str, str], tmp_path: Path
) -> None:
    code = before + OURS_FIRST.format(first=order[0], second=order[1])
    process = python("-W", "error::RuntimeWarning", "-c", code, home=tmp_path)
    succeeded(process)
    assert "steps aside" not in process.stderr
