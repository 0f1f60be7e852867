"""Starts `search_subject` in a memory group: from its first large import on, its memory counts.

    python -m benchmarks.planning.search_start '{"command": [...], "training": {...}}'

The command runs another one in a group (`MemoryGroup.command`); the process stays the same.
"""

from __future__ import annotations

import json
import os
import sys

if __name__ == "__main__":
    options = json.loads(sys.argv[1])
    os.execvp(options["command"][0], [*options["command"], json.dumps(options["training"])])
