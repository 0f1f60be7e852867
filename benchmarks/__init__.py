"""Measurements of this package compared with its peers, and what they need."""

import os

# A path is slowed down, and set free again, between two engines: none may start from what another
# one has seen of it.
os.environ["SSD_OFFLOAD_CACHE"] = ""
