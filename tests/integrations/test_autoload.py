"""`import torch` in fresh processes: hooks register in every order and never break an import."""

import importlib
import sys
import warnings
from functools import partial
from types import ModuleType

import pytest

from offload_strategy import autoload
from tests.integrations.support import python, succeeded

REGISTERED = """
def registered():
    import lightning.fabric, lightning.pytorch, lightning_fabric, pytorch_lightning
    from accelerate.accelerator import Accelerator
    registries = (
        lightning.pytorch.strategies.StrategyRegistry,
        pytorch_lightning.strategies.StrategyRegistry,
        lightning.fabric.strategies.STRATEGY_REGISTRY,
        lightning_fabric.strategies.STRATEGY_REGISTRY,
    )
    for method in (
        lightning.fabric.Fabric.no_backward_sync,
        lightning_fabric.Fabric.no_backward_sync,
        Accelerator.prepare_model,
    ):
        assert not hasattr(getattr(method, "__wrapped__", None), "__wrapped__")
    wrapped = hasattr(Accelerator.prepare_model, "__wrapped__")
    return [wrapped, *("ssd_offload" in registry for registry in registries)]
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
print(registered())
"""

# Each of these imports torch from inside of itself; of ours, the modules import the frameworks.
# Accelerate's launcher comes first in test_unmodified_scripts.py.
OTHERS_FIRST = {
    "transformers": "from transformers import Trainer; import lightning.pytorch",
    "ours": """
from offload_strategy.integrations.fabric import for_lightning_fabric, for_standalone_fabric
from offload_strategy.integrations.lightning import for_pytorch_lightning, for_lightning_pytorch
import lightning
registry = lightning.pytorch.strategies.StrategyRegistry
assert registry["ssd_offload"]["strategy"] is for_lightning_pytorch.SSDOffloadStrategy
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


def printed(home, code, *options, **variables):
    """What a fresh process prints, whose hooks all work."""
    result = python(*options, "-c", REGISTERED + code, home=home, variables=variables)
    assert "steps aside" not in result.stderr
    return succeeded(result).splitlines()


def test_import_torch_is_cheap_and_the_install_in_use_is_found(tmp_path):
    ours, heavy, other, registered = printed(tmp_path, TORCH_FIRST)[-4:]
    assert ours == "['offload_strategy', 'offload_strategy.autoload']"
    assert (heavy, other, registered) == ("[]", "False", str([True] * 5))


@pytest.mark.parametrize("first", OTHERS_FIRST)
def test_every_import_order_registers_everything(first, tmp_path):
    code = f"{OTHERS_FIRST[first]}\nprint(registered())"
    assert printed(tmp_path, code, "-W", "error::RuntimeWarning")[-1] == str([True] * 5)


def test_hooks_are_switched_off_by_the_variable_and_reach_loaded_modules(tmp_path):
    lines = printed(tmp_path, OFF_AND_LATE, SSD_OFFLOAD_DISABLE="1")
    assert lines[-2:] == [str([False] * 5), str([True] * 5)]


@pytest.fixture
def modules(tmp_path, monkeypatch):
    """A folder of modules to import, of an autoload that has not warned yet."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(autoload, "_warned", False)
    return tmp_path


# It asks for the hook on itself before it has defined anything. That a first attempt may succeed is
# seen above, where Accelerate imports torch.
HALF_IMPORTED = """
from offload_strategy import autoload
if autoload.saw not in autoload.asked:
    autoload.asked.append(autoload.saw)
    autoload._when_imported(__name__, autoload.saw)
    raise ImportError("the first attempt")
complete = True
"""


def test_a_hook_waits_until_the_second_attempt_at_an_import_is_complete(modules, monkeypatch):
    seen = []
    monkeypatch.setattr(autoload, "asked", [], raising=False)
    monkeypatch.setattr(autoload, "saw", lambda module: seen.append(module.complete), raising=False)
    (modules / "half_imported_module.py").write_text(HALF_IMPORTED)
    with pytest.raises(ImportError, match="the first attempt"):
        importlib.import_module("half_imported_module")
    module = importlib.import_module("half_imported_module")
    assert seen == [True]
    assert type(module.__spec__).__name__ == "ModuleSpec"


def test_a_hook_that_raises_warns_once_and_leaves_the_others_alone(modules):
    seen = []
    hooks = {
        "innocent_module_0": partial(autoload._install, "no_such_module", None),
        "innocent_module_1": lambda module: module.nothing,
        "innocent_module_2": seen.append,
    }
    for name, hook in hooks.items():
        (modules / f"{name}.py").write_text("complete = True\n")
        autoload._when_imported(name, hook)
    with warnings.catch_warnings(record=True, action="always") as caught:
        imported = [importlib.import_module(name) for name in hooks]
    assert all(module.complete for module in imported)
    assert seen == imported[2:]
    (message,) = [str(warning.message) for warning in caught]
    assert "hook for innocent_module_0 failed with ModuleNotFoundError" in message


@pytest.mark.usefixtures("modules")
@pytest.mark.parametrize("wrapt", [None, ModuleType("wrapt")], ids=["missing", "unknown"])
@pytest.mark.parametrize("action", ["default", "error"])
def test_a_broken_wrapt_is_said_once_and_raises_nothing(monkeypatch, capfd, wrapt, action):
    monkeypatch.setitem(sys.modules, "wrapt", wrapt)
    with warnings.catch_warnings(record=action == "default", action=action) as caught:
        autoload.register()
    said = [str(warning.message) for warning in caught or ()] + [capfd.readouterr().err]
    assert "".join(said).count("offload-strategy steps aside") == 1
