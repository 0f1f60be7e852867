"""Where each framework lets the engine in; nothing here that another framework would need.

[Note: the four families of Lightning]
`lightning` and `pytorch_lightning` are separate installs of the same code, each with a Trainer and
a Fabric: four families, each with a `Strategy` class and a registry of its own, and a Trainer or
Fabric accepts only its own strategies. So strategies are mixins, from which a module for each
family derives its classes, at module level so that they can be pickled. None of these modules
imports another install.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, TypeGuard

if TYPE_CHECKING:
    from offload_strategy.optimizer.offloaded_optimizer import OffloadedOptimizer

#: Module of our classes for each family.
FAMILIES = {
    "lightning.pytorch": "offload_strategy.integrations.lightning.for_lightning_pytorch",
    "pytorch_lightning": "offload_strategy.integrations.lightning.for_pytorch_lightning",
    "lightning.fabric": "offload_strategy.integrations.fabric.for_lightning_fabric",
    "lightning_fabric": "offload_strategy.integrations.fabric.for_standalone_fabric",
}
TRAINERS = ("lightning.pytorch", "pytorch_lightning")
FABRICS = ("lightning.fabric", "lightning_fabric")


def families_in_use(families: Sequence[str], needed_by: str) -> list[str]:
    """Return the imported families, else the first installed one, else raise an ImportError."""
    found = [family for family in families if family in sys.modules]
    found = found or [family for family in families if find_spec(family.partition(".")[0])][:1]
    if not found:
        raise ImportError(f"{needed_by} needs Lightning: pip install 'offload-strategy[lightning]'")
    return found


def is_offloaded(optimizer: object) -> TypeGuard[OffloadedOptimizer]:
    """Whether an object is an optimizer whose states an engine offloads."""
    from offload_strategy.optimizer.offloaded_optimizer import OffloadedOptimizer

    return isinstance(optimizer, OffloadedOptimizer)
