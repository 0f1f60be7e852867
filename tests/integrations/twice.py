"""Runs scripts twice in this process, with offload and without, and notes what came out.

Started by `accelerate launch` with a section in the launch file. The scripts are run as they are,
by path, one after the other, so that the frameworks are imported only once.

    accelerate launch --config_file offload.yaml twice.py results.json RUNS

RUNS is JSON: for each path the arguments of all runs, and those of the run that offloads.
"""

import contextlib
import gc
import io
import json
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from wrapt import register_post_import_hook

ACTIVE = "ACCELERATE_USE_SSD_OFFLOAD"

engines: list[Any] = []
rows: list[dict[str, Any]] = []


def remember_engines(module: Any) -> None:
    """Keep the engines that scripts make, and their metrics when they close."""

    class Remembered(module.OffloadEngine):  # type: ignore[misc,name-defined]
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            engines.append(self)

        def close(self) -> None:
            if not self.closed:
                self.at_the_end = self.metrics()
            super().close()

    module.OffloadEngine = Remembered


def remember_rows(module: Any) -> None:
    """Keep the rows that scripts give to W&B."""
    log = module.Run.log

    def remembered(run: Any, row: dict[str, Any], *args: Any, **options: Any) -> None:
        rows.append(dict(row))
        log(run, row, *args, **options)

    module.Run.log = remembered


def run_script(path: Path, arguments: Sequence[str]) -> dict[str, Any]:
    """Run a script as `__main__`, and return its losses, its weights' digest and bytes moved."""
    rows.clear()
    sys.argv = [str(path), *arguments]
    sys.path.insert(0, str(path.parent))
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        variables = runpy.run_path(str(path), run_name="__main__")
    sys.path.remove(str(path.parent))
    # Not before the first script has imported frameworks by itself.
    from tests.integrations.accelerate_runs import forget_accelerator
    from tests.training import left_bytes

    if "wandb" in sys.modules:
        sys.modules["wandb"].finish()
    gc.collect()
    lines = [line.split() for line in printed.getvalue().splitlines() if line.strip()]
    moved, count = {"activations": 0.0, "optimizer": 0.0}, len(engines)
    while engines:
        engine = engines.pop()
        engine.close()
        for client in moved:
            moved[client] += left_bytes(engine.at_the_end, client)
    del variables
    forget_accelerator()
    return {
        "losses": [words[1] for words in lines if words[0] == "loss"],
        "weights": [words[1] for words in lines if words[0] == "weights"],
        "prints metrics": "offload/" in printed.getvalue(),
        "engines": count,
        "moved": moved,
        "rows": [*rows],
    }


def main(results: str, runs: str) -> None:
    register_post_import_hook(remember_engines, "offload_strategy.engine.offload_engine")
    register_post_import_hook(remember_rows, "wandb.sdk.wandb_run")
    found: dict[str, Any] = {}
    active = os.environ.pop(ACTIVE)
    for path, (arguments, options) in json.loads(runs).items():
        plain = run_script(Path(path), arguments)
        os.environ[ACTIVE] = active
        offloaded = run_script(Path(path), [*arguments, *options])
        del os.environ[ACTIVE]
        found[Path(path).name] = {"plain": plain, "offloaded": offloaded}
    Path(results).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
