"""The projects whose own tests we run, with our strategy as their default.

Another project is one entry of `PEERS`, and a function that makes its default ours.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Peer:
    """A project, of which a checkout has the tests and the environment the package.

    Args:
        package: what is installed; its version is noted next to that of the checkout.
        folder: of the checkout, from which its tests run.
        tests: files and folders to run, relative to it, one pytest process each.
        offload: makes offload the default, in the process of its tests.
        options: of pytest, for example to leave out tests that choose another strategy by name.
        variables: of the environment of its tests.
    """

    package: str
    folder: str
    tests: tuple[str, ...]
    offload: Callable[[], None]
    options: tuple[str, ...] = ()
    variables: dict[str, str] = field(default_factory=dict)


def lightning() -> None:
    """Let `Trainer(strategy="auto")` on one device be `Trainer(strategy="ssd_offload")`."""
    from lightning.pytorch.strategies import SingleDeviceStrategy
    from lightning.pytorch.trainer.connectors import accelerator_connector

    connector = accelerator_connector._AcceleratorConnector
    choose = connector._choose_strategy

    def choose_ours(self: Any) -> Any:
        chosen = choose(self)
        return "ssd_offload" if type(chosen) is SingleDeviceStrategy else chosen

    connector._choose_strategy = choose_ours  # type: ignore[method-assign]


def accelerate() -> None:
    """Let every `Accelerator` offload."""
    os.environ["ACCELERATE_USE_SSD_OFFLOAD"] = "true"


_LIGHTNING = """
    trainer/optimization loops core models tuner checkpointing trainer/flags trainer/logging_
    trainer/properties trainer/connectors trainer/dynamic_args trainer/test_trainer.py
    trainer/test_states.py trainer/test_dataloaders.py trainer/test_config_validator.py
    callbacks utilities loggers profilers overrides
"""

PEERS = {
    "lightning": Peer(
        package="lightning",
        folder="tests",
        tests=tuple(f"tests_pytorch/{each}" for each in _LIGHTNING.split()),
        offload=lightning,
        options=("-k", "not ddp_spawn and not ddp_fork"),
    ),
    "accelerate": Peer(
        package="accelerate",
        folder="",
        tests=("tests/test_accelerator.py", "tests/test_optimizer.py", "tests/test_scheduler.py"),
        offload=accelerate,
    ),
}
