"""Runs the tests of another project with and without offload, and lists what changes.

    python -m tests.peers PEER /path/to/its/checkout --out results.json [FOLDER ...]
    python -m tests.peers lightning /path/to/its/checkout --keep runs     # goes on where it was
    python -m tests.peers lightning /path/to/its/checkout --quick         # without: only what fails

The checkout should be of the version that is installed. Nothing of it is changed, but models and
data that its tests would load from a hub are made in it (`stand_ins.py`). The report names for each
test that passes without offload and fails with it the last line of the error.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))  # as in the processes of the tests

from peers import PEERS, Peer  # noqa: E402

#: Nearly everything of a tiny model leaves, to a disk.
CONFIG = {
    "mode": "always",
    "parameters": {"enabled": True, "min_size": 1},
    "activations": {"min_size": 1, "budget": "100%"},
    "memory": {"pinned": "256MiB"},
}

Outcomes = dict[str, dict[str, Any]]


def run(tests: str, offloads: bool, options: Any, only: Sequence[str] = ()) -> Outcomes:
    """Run the tests of a folder in a process, or only some; return what came of each."""
    how = "with" if offloads else "without"
    kept = options.keep and options.keep / f"{tests.strip('/').replace('/', '-')}-{how}.json"
    if kept and kept.exists():
        return json.loads(kept.read_text())
    peer = PEERS[options.peer]
    with tempfile.TemporaryDirectory(prefix="peer-") as home:
        results, disk = Path(home, "results"), Path(home, "disk")
        results.touch()
        disk.mkdir()
        environment = {
            **os.environ,
            **peer.variables,
            "PEER": options.peer,
            "PEER_OFFLOADS": str(int(offloads)),
            "PEER_RESULTS": str(results),
            "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent.parent), *options.path]),
            "SSD_OFFLOAD_CACHE": "",
            "SSD_OFFLOAD_CONFIG": json.dumps(CONFIG),
            "SSD_OFFLOAD_DIR": str(disk),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "HF_HOME": str(Path(home, "hugging-face")),
            "HF_DATASETS_CACHE": str(Path(home, "datasets")),
        }
        plugins = "-p peers -p no:cacheprovider -p no:xdist"
        arguments = [f"--basetemp={home}/temporary", f"--timeout={options.timeout}", *peer.options]
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *(only or [tests]), *plugins.split(), *arguments,
             "-q", "--continue-on-collection-errors"],
            cwd=options.checkout / peer.folder, env=environment, capture_output=True, text=True,
            check=False,
        )  # fmt: skip
        notes = map(json.loads, results.read_text().splitlines())
        outcomes: Outcomes = {note["test"]: note for note in notes}
        left = sorted(path.name for path in disk.iterdir())
    if kept:
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(json.dumps(outcomes))
    print(f"{tests} {how} offload: {counts(outcomes)}", flush=True)
    if done.returncode not in (0, 1) or not outcomes:
        print("\n".join(done.stdout.splitlines()[-15:]), done.stderr[-2000:], sep="\n")
    if left:
        print(f"left on the disk: {left}")
    return outcomes


def counts(outcomes: Outcomes) -> dict[str, int]:
    return dict(Counter(note["outcome"] for note in outcomes.values()))


def compare(without: Outcomes, with_offload: Outcomes) -> dict[str, Any]:
    """What changes: tests that only fail with offload, or without, and those with other losses."""

    def failing(one: Outcomes, other: Outcomes) -> list[dict[str, Any]]:
        passed = [test for test, note in one.items() if note["outcome"] == "passed"]
        lost = {"outcome": "died", "error": "the process ended before this test"}
        found = [{"test": test, **other.get(test, lost)} for test in passed]
        return [note for note in found if note["outcome"] not in ("passed", "skipped")]

    def differs(one: dict[str, Any], other: dict[str, Any]) -> bool:
        both = {note["outcome"] for note in (one, other)} == {"passed"}
        return both and one.get("digest") != other.get("digest")

    trained = [t for t, note in with_offload.items() if note.get("losses") and t in without]
    return {
        "other losses": [t for t in trained if differs(without[t], with_offload[t])],
        "trained in both": len(trained),
        "of these, offloaded": sum(bool(with_offload[t].get("moved")) for t in trained),
        "counts without": counts(without),
        "counts with": counts(with_offload),
        "only fail with": failing(without, with_offload),
        "only fail without": failing(with_offload, without),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="tests.peers", description=__doc__)
    parser.add_argument("peer", choices=PEERS)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("tests", nargs="*", help="some of its folders; all that are known if none")
    parser.add_argument("--out", type=Path, help="a JSON file for the results")
    parser.add_argument("--keep", type=Path, help="a folder for what has run, and is not run again")
    parser.add_argument("--quick", action="store_true", help="without: only what fails with")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--timeout", type=int, default=120, help="seconds for one test")
    parser.add_argument("--path", action="append", default=[], help="further Python paths")
    options = parser.parse_intermixed_args()
    sys.path.extend(options.path)
    peer: Peer = PEERS[options.peer]
    folders = options.tests or peer.tests
    peer.prepare(options.checkout / peer.folder)
    outcomes: dict[bool, Outcomes] = {False: {}, True: {}}
    jobs = list(product(folders, (True,) if options.quick else (False, True)))
    with ThreadPoolExecutor(options.processes) as pool:
        runs = pool.map(lambda job: run(*job, options), jobs)
        for (folder, offloads), found in zip(jobs, runs, strict=True):
            outcomes[offloads] |= found
            failed = [test for test, note in found.items() if note["outcome"] in ("failed", "died")]
            if options.quick and failed:
                only = [test.removeprefix(f"{peer.folder}/") for test in failed]
                outcomes[False] |= run(folder, False, options, only)
    results = {
        "peer": options.peer,
        "installed": version(peer.package),
        "checkout": options.checkout.name,
        "tests": list(folders),
        "options": peer.options,
        **compare(outcomes[False], outcomes[True]),
    }
    if options.out is not None:
        options.out.write_text(json.dumps(results, indent=1))
    print("| test | last line of the error |", "|---|---|", sep="\n")
    for note in results["only fail with"]:
        print(f"| `{note['test']}` | {note.get('error') or note['outcome']} |")
    for name in ("counts without", "counts with", "trained in both", "of these, offloaded"):
        print(f"{name}: {results[name]}")
    print(f"other losses: {results['other losses']}")


if __name__ == "__main__":
    main()
