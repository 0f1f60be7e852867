"""Peak memory and equality of the main job, with everything in memory and with offload.

    python benchmarks/demo_memory.py --repeats 3

Trains the first 30 steps of examples/lightning_gpt.py in fp32, with strategy "auto" and with
"ssd_offload" alternately, each in its own process and with the same settings of the allocator.
Every loss must be the same to the last bit, and so must a checksum over all parameters at the end;
if not, the exit status is 1. Other options are those of the example: --accumulate 4 --clip 1.0.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "lightning_gpt.py"
KEEP, OFFLOAD = "auto", "ssd_offload"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=3, help="runs of each strategy")
    parser.add_argument("--steps", type=int, default=30, help="optimizer steps of a run")
    options, others = parser.parse_known_args()

    runs: dict[str, list[dict[str, Any]]] = {KEEP: [], OFFLOAD: []}
    print("peak resident memory above the level after the imports, in MiB")
    for repeat in range(options.repeats):
        for strategy in (KEEP, OFFLOAD):
            run = train(strategy, options.steps, others)
            runs[strategy].append(run)
            print(
                f"  run {repeat + 1}  {strategy:12s} {run['peak_bytes'] / 2**20:8.1f}", flush=True
            )

    peaks = {name: statistics.median(run["peak_bytes"] for run in runs[name]) for name in runs}
    print(f"allocator, in both: {runs[KEEP][0]['allocator']}")
    print(f"config of the engine: {runs[OFFLOAD][0]['config']}")
    for name, peak in peaks.items():
        print(f"  median {name:12s} {peak / 2**20:8.1f}")
    ratio = peaks[OFFLOAD] / peaks[KEEP]
    print(f"ratio {ratio:.3f}: {1 - ratio:.1%} lower with offload")

    every = [*runs[KEEP], *runs[OFFLOAD]]
    first = every[0]
    equal = {
        f"all {len(first['losses'])} training losses": "losses",
        "validation loss before": "validation_losses",
        f"all {first['parameters']:,} parameters at the end": "parameters_sha256",
    }
    failed = False
    for what, key in equal.items():
        same = all(run[key] == first[key] for run in every)
        failed |= not same
        print(f"{what}: {'identical to the last bit' if same else 'DIFFERENT'}")
    return int(failed)


def train(strategy: str, steps: int, others: list[str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        figures = Path(folder, "figures.json")
        command = [sys.executable, str(EXAMPLE), f"--strategy={strategy}", f"--stop-after={steps}"]
        command += ["--no-compare", f"--json={figures}", f"--logdir={folder}", *others]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
        run: dict[str, Any] = json.loads(figures.read_text())
        return run


if __name__ == "__main__":
    sys.exit(main())
