"""The environment variable that switches the import hooks off. Imports nothing of the package."""

from __future__ import annotations

import os

DISABLE_VARIABLE = "SSD_OFFLOAD_DISABLE"


def is_disabled() -> bool:
    """Return whether $SSD_OFFLOAD_DISABLE is set to anything but "", "0", "false", "no", "off"."""
    value = os.environ.get(DISABLE_VARIABLE, "").strip().lower()
    return value not in ("", "0", "false", "no", "off")
