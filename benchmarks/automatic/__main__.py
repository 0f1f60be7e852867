"""Defaults, nothing configured, in less and less memory, compared with plain PyTorch.

    python -m benchmarks.automatic                              320M parameters
    python -m benchmarks.automatic --model 70M --limits 900MiB  a smaller model
    python -m benchmarks.automatic --configs '{"optimizer": {"overlap": "eager"}}'
    python -m benchmarks.automatic --through lightning --share 0.5   a limit of half of plain's peak

Contenders alternate, each in its own process, and in its own memory group where it has a limit.
The allocator is glibc as it comes. The peak is that of resident memory of the whole process from
the first step on. Exit status 1: a loss differs, or a contender other than plain was killed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.machine import cores, describe_machine, say, tidy_up_when_ended
from benchmarks.memory_group import memory_group, why_not
from offload_strategy.units import MiB, format_size, markdown_table, parse_size

_ROOT = Path(__file__).resolve().parents[2]
_PLAIN = "plain PyTorch"
#: What `accelerate config` writes for one process on the CPU.
_LAUNCH = {
    "compute_environment": "LOCAL_MACHINE",
    "distributed_type": "NO",
    "mixed_precision": "no",
    "num_processes": 1,
    "use_cpu": True,
}


@dataclass
class Contender:
    """A setting, and what its processes printed: figures of steps, and what the engine told."""

    name: str
    config: Any
    limit: int | None = None
    #: Share of plain's peak that is the limit in the config.
    share: float | None = None
    runs: list[list[dict[str, Any]]] = field(default_factory=list)
    told: list[str] = field(default_factory=list)
    status: int = 0

    def run(self, options: argparse.Namespace) -> None:
        """Train once, in a process of its own."""
        subject = {"steps": options.steps, "threads": cores(), "through": options.through}
        with tempfile.TemporaryDirectory() as folder:
            if options.through is None:
                subject |= {"model": options.model, "clip": options.clip, "config": self.config}
                command = [sys.executable, "-m", "benchmarks.automatic.subject"]
            else:
                command = self._launch(Path(folder), subject)
            command.append(json.dumps(subject))
            with nullcontext() if self.limit is None else memory_group(self.limit) as group:
                command = command if group is None else group.command(command)
                done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True)
        self.status = self.status or done.returncode
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        self.runs.append([json.loads(line) for line in lines])
        self.told = [line for line in done.stderr.splitlines() if "mode: auto" in line]
        last = "" if done.returncode == 0 else f": {done.stderr.strip().splitlines()[-1:]}"
        say(f"{self.name}: status {done.returncode}, {len(self.runs[-1])} steps{last}")

    def _launch(self, folder: Path, subject: dict[str, Any]) -> list[str]:
        """Return the command of a framework, whose configuration is all that offload takes."""
        command = [sys.executable, "-m"]
        if self.config is not None and subject["through"] == "lightning":
            subject["strategy"] = "ssd_offload"
            command = ["env", f"SSD_OFFLOAD_CONFIG={json.dumps(self.config)}", *command]
        elif self.config is not None:
            file = folder / "offload.yaml"
            written = {**_LAUNCH, "ssd_offload_config": self.config}
            file.write_text(json.dumps(written))
            command += ["accelerate.commands.launch", "--config_file", str(file), "-m"]
        return [*command, "benchmarks.automatic.frameworks"]

    @property
    def seconds(self) -> float:
        """Median of the steps after the first of each process."""
        return statistics.median(step["seconds"] for run in self.runs for step in run[1:])

    @property
    def peak_bytes(self) -> float:
        """Median of the processes."""
        peaks = ([step["peak_bytes"] for step in run] for run in self.runs)
        return statistics.median(max(run, default=0) for run in peaks)  # the engine resets them

    def losses(self) -> set[tuple[str, ...]]:
        """Of each process that reached the last step."""
        return {tuple(step["loss"] for step in run) for run in self.runs}


def main() -> int:
    """Run the contenders in turns and print their medians."""
    options = _options()
    tidy_up_when_ended()
    reason = why_not()
    limits = [] if reason else options.limits
    if reason:
        say(f"without limits: {reason}")
    plain = Contender(_PLAIN, None)
    contenders = [plain, *(Contender(json.dumps(c), c) for c in options.configs)]
    if options.share is None:
        contenders.append(Contender("defaults", {}))
    else:
        contenders.append(Contender(f"memory: {options.share} of plain", {}, share=options.share))
    for limit in limits:
        contenders.append(Contender(f"defaults in {format_size(limit)}", {}, limit))
    machine = describe_machine(Path("/tmp"))
    print("\n".join(f"{name}: {value}" for name, value in machine.items()), flush=True)
    for _ in range(options.laps):
        for contender in contenders:
            if contender.share is not None:
                contender.config = {"memory": int(contender.share * plain.peak_bytes)}
            contender.run(options)
    dies = [Contender(f"{_PLAIN} in {format_size(limit)}", None, limit) for limit in limits]
    for contender in dies:
        contender.run(options)
    rows = []
    for each in contenders:
        same = each.losses() == plain.losses()
        rows.append(
            (
                each.name,
                f"{each.seconds:.2f}" if each.status == 0 else "killed",
                f"{each.seconds / plain.seconds:.2f}" if each.status == 0 else "",
                f"{each.peak_bytes / MiB:,.0f}",
                f"{each.peak_bytes / plain.peak_bytes:.2f}",
                "identical" if same else "DIFFERENT",
            )
        )
    rows += [(each.name, f"status {each.status}", "", "", "", "") for each in dies]
    heading = "contender | s a step | of plain | peak, MiB | of plain | losses"
    print(markdown_table(heading, rows))
    for each in contenders:
        for line in each.told:
            print(f"{each.name}: {line}")
    if options.json is not None:
        figures = [{**vars(each)} for each in (*contenders, *dies)]
        options.json.write_text(json.dumps({"machine": machine, "contenders": figures}, indent=1))
    failed = any(each.status or each.losses() != plain.losses() for each in contenders)
    return int(failed)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.automatic", description=__doc__)
    parser.add_argument("--model", default="320M", choices=["70M", "320M"])
    parser.add_argument(
        "--limits",
        nargs="*",
        type=parse_size,
        default=[parse_size(size) for size in ("4.5GiB", "3.2GiB", "2.2GiB")],
        help="of memory groups",
    )
    parser.add_argument("--configs", nargs="*", type=json.loads, default=[], help="more settings")
    parser.add_argument("--through", choices=["lightning", "accelerate"], help="a framework")
    parser.add_argument("--share", type=float, help="of plain's peak, as the limit of the config")
    parser.add_argument("--clip", type=float, help="limit of the gradients' norm")
    parser.add_argument("--steps", type=int, default=6, help="of each process")
    parser.add_argument("--laps", type=int, default=1, help="processes of each contender")
    parser.add_argument("--json", type=Path, help="file for the figures")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
