"""What the entry point adds to `import torch`: medians with the hooks and with them switched off.

    python benchmarks/import_cost.py [RUNS]

Each run is `python -X importtime -c "import torch"` in a fresh process, the kinds in turns so that
a drift of the machine meets all. "off" sets SSD_OFFLOAD_DISABLE=1, which leaves the import of the
entry point's own module. As the differences are smaller than the noise, the last table times the
entry point alone, in fresh processes that have imported torch without it.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence

KINDS = {
    "on": {"SSD_OFFLOAD_DISABLE": "0"},
    "off": {"SSD_OFFLOAD_DISABLE": "1"},
    "no entry points": {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
}

ENTRY_POINT = """
from importlib.metadata import entry_points
from time import perf_counter
import torch
found = [e for e in entry_points(group="torch.backends") if "offload_strategy" in e.value]
if not found:
    raise SystemExit("the package is not installed: pip install -e .")
entry = found[0]
start = perf_counter()
function = entry.load()
loaded = perf_counter()
import wrapt
wrapt_loaded = perf_counter()
function()
end = perf_counter()
print(*(1000 * seconds for seconds in (
    loaded - start, wrapt_loaded - loaded, end - wrapt_loaded, end - start
)))
"""


def python(
    arguments: Sequence[str], variables: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    result = subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    if result.returncode:
        sys.exit(result.stderr)
    return result


def import_milliseconds(variables: Mapping[str, str]) -> float:
    """Import torch in a fresh process and return the cumulative time of that import."""
    result = python(["-X", "importtime", "-c", "import torch"], variables)
    for line in reversed(result.stderr.splitlines()):
        # import time:      self [us] | cumulative | name, indented by depth
        fields = line.split("|")
        if len(fields) == 3 and fields[2].strip() == "torch":
            return int(fields[1]) / 1000
    raise RuntimeError(result.stderr)


def entry_point_milliseconds() -> list[float]:
    """Load and call the entry point in a fresh process; return the time of each part."""
    result = python(["-c", ENTRY_POINT], KINDS["no entry points"])
    return [float(number) for number in result.stdout.split()]


def main() -> None:
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 10
    entry_point_milliseconds()
    for variables in KINDS.values():
        import_milliseconds(variables)  # Fills the page cache.
    imports: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for _ in range(runs):
        for kind, variables in KINDS.items():
            imports[kind].append(import_milliseconds(variables))
    parts = zip(*(entry_point_milliseconds() for _ in range(runs)), strict=True)

    print(f"import torch, median of {runs}\n")
    print("| hooks | median ms | fastest ms | slowest ms |")
    print("|---|---:|---:|---:|")
    for kind, times in imports.items():
        print(f"| {kind} | {statistics.median(times):.0f} | {min(times):.0f} | {max(times):.0f} |")
    print("\n| part of the entry point | median ms |")
    print("|---|---:|")
    names = ("its module", "wrapt", "registering the hooks", "all of it")
    for name, times in zip(names, parts, strict=True):
        print(f"| {name} | {statistics.median(times):.2f} |")


if __name__ == "__main__":
    main()
