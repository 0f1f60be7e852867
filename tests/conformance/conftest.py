"""torch's databases are part of its own tests, which need a package that these do not use."""

from __future__ import annotations

import importlib.util
import sys
import unittest
from types import ModuleType

if importlib.util.find_spec("expecttest") is None:
    stand_in = ModuleType("expecttest")
    stand_in.TestCase = unittest.TestCase  # type: ignore[attr-defined]
    sys.modules["expecttest"] = stand_in
