"""torch's databases are part of its own tests, which need a package that these do not use."""

import importlib
import importlib.util
import sys
import unittest
from types import ModuleType

import torch

if importlib.util.find_spec("expecttest") is None:
    stand_in = ModuleType("expecttest")
    stand_in.TestCase = unittest.TestCase  # type: ignore[attr-defined]
    sys.modules["expecttest"] = stand_in

# It also forbids to set flags of backends for the rest of the process, which other tests do.
_disable, torch.backends.disable_global_flags = torch.backends.disable_global_flags, lambda: None
importlib.import_module("torch.testing._internal.common_utils")
torch.backends.disable_global_flags = _disable
