"""Runs scripts twice in this process, with offload and without, and notes what came out.

Started by `accelerate launch` with a section in the launch file. The scripts are run as they are,
by path, one after the other, so that the frameworks are imported only once.

    accelerate launch --config_file offload.yaml twice.py results.json RUNS

RUNS is JSON: for each path the arguments of all runs, and the option that offloads, if one does.
"""

from __future__ import annotations

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

ACTIVE = "ACCELERATE_USE_SSD_OFFLOAD"
VERBS = ("written", "forwarded")


def remember_engines(engines: list[Any]) -> None:
    """Keep the metrics of engines that scripts make, whenever they close."""
    from wrapt import register_post_import_hook

    def wrap(module: Any) -> None:
        init, close = module.OffloadEngine.__init__, module.OffloadEngine.close

        def remembering(self: Any, *args: Any, **options: Any) -> None:
            init(self, *args, **options)
            engines.append(self)

        def noting(self: Any) -> None:
            if not self.closed:
                self.at_the_end = self.metrics()
            close(self)

        module.OffloadEngine.__init__, module.OffloadEngine.close = remembering, noting

    register_post_import_hook(wrap, "offload_strategy.engine.offload_engine")


def run_script(path: Path, arguments: Sequence[str], engines: list[Any]) -> dict[str, Any]:
    """Run a script as `__main__`, and return its losses, its weights' digest and bytes moved."""
    printed = io.StringIO()
    before, sys.argv = sys.argv, [str(path), *arguments]
    sys.path.insert(0, str(path.parent))
    try:
        with contextlib.redirect_stdout(printed):
            variables = runpy.run_path(str(path), run_name="__main__")
    finally:
        sys.argv = before
        sys.path.remove(str(path.parent))
    gc.collect()
    lines = [line.split() for line in printed.getvalue().splitlines() if line.strip()]
    moved = {"activations": 0.0, "optimizer": 0.0}
    for engine in engines:
        metrics = engine.at_the_end if engine.closed else engine.metrics()
        for client in moved:
            moved[client] += sum(metrics[f"offload/{client}/{verb}_bytes"] for verb in VERBS)
        engine.close()
    count = len(engines)
    engines.clear()
    del variables
    return {
        "losses": [words[1] for words in lines if words[0] == "loss"],
        "weights": [words[1] for words in lines if words[0] == "weights"],
        "engines": count,
        "moved": moved,
    }


def main(results: str, runs: str) -> None:
    """See the module."""
    engines: list[Any] = []
    remember_engines(engines)
    found: dict[str, Any] = {}
    active = os.environ.pop(ACTIVE)
    for path, (arguments, options) in json.loads(runs).items():
        plain = run_script(Path(path), arguments, engines)
        forget_accelerator()
        os.environ[ACTIVE] = active
        offloaded = run_script(Path(path), [*arguments, *options], engines)
        del os.environ[ACTIVE]
        forget_accelerator()
        found[Path(path).name] = {"plain": plain, "offloaded": offloaded}
    Path(results).write_text(json.dumps(found))


def forget_accelerator() -> None:
    """Accelerate keeps its state in classes."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    PartialState._reset_state()


if __name__ == "__main__":
    main(*sys.argv[1:])
