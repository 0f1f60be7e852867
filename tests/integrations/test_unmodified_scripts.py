"""Scripts that import nothing of ours, with the launch file or one flag and without.

Those of the Trainers also name loggers, in `report_to`.

    SSD_OFFLOAD_SCRIPTS_TABLE=table.md pytest tests/integrations/test_unmodified_scripts.py

writes the table of `docs/training_scripts.md`.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from offload_strategy import OffloadConfig
from offload_strategy.integrations.accelerate.launch import environment_for
from tests.integrations.support import python, succeeded, tensorboard_scalars

ROOT = Path(__file__).resolve().parent.parent.parent
SCRIPTS = ROOT / "examples" / "unmodified"
SHIPPED = ROOT / "configs" / "accelerate" / "offload.yaml"
DOCUMENT = ROOT / "docs" / "training_scripts.md"
TABLE_VARIABLE = "SSD_OFFLOAD_SCRIPTS_TABLE"

SECTION: dict[str, Any] = {"activations": {"min_size": "1KiB", "budget": "100%"}}
LAUNCHED = "`accelerate launch --config offload.yaml`"
CHANGES = {
    "transformers_trainer.py": LAUNCHED,
    "trl_sft.py": LAUNCHED,
    "trl_dpo.py": LAUNCHED,
    "peft_lora.py": LAUNCHED,
    "accelerate_loop.py": LAUNCHED,
    "lightning_cli.py": "`--trainer.strategy=ssd_offload`",
}
NEEDS = (
    "accelerate", "datasets", "jsonargparse", "lightning", "peft", "tensorboard", "transformers",
    "trl", "wandb",
)  # fmt: skip
REPORTING = ("transformers_trainer.py", "trl_sft.py")
REPORT = ["--report_to", "tensorboard", "wandb"]
WRITTEN = "offload/optimizer/written_bytes"
RATES = {
    "offload/bandwidth/read_GBps",
    "offload/bandwidth/write_GBps",
    "offload/waits/activations_share",
    "offload/waits/optimizer_share",
    "offload/waits/parameters_share",
}
GROUPS = {"activations", "bandwidth", "endurance", "memory", "optimizer", "tier", "waits"}

Results = Mapping[str, Mapping[str, Any]]


def run_all(home: Path) -> Results:
    """What the scripts printed and moved; one process, as most of the time goes into imports."""
    shipped = yaml.safe_load(SHIPPED.read_text())
    section = shipped["ssd_offload_config"]
    for name, options in SECTION.items():  # tiny models have little that is worth to be moved
        section[name] = {**section.get(name, {}), **options}
    (home / "offload.yaml").write_text(yaml.safe_dump(shipped))
    runs = {
        str(SCRIPTS / name): ([], REPORT if name in REPORTING else [])
        if change == LAUNCHED
        else (["fit"], [change.strip("`")])
        for name, change in CHANGES.items()
    }
    variables = {
        "SSD_OFFLOAD_METRICS_EVERY": "3",
        "TENSORBOARD_LOGGING_DIR": str(home / "board"),
        "WANDB_MODE": "offline",
        "WANDB_DIR": str(home),
    }
    twice = [str(ROOT / "tests" / "integrations" / "twice.py"), "results.json", json.dumps(runs)]
    launcher = ["-m", "accelerate.commands.launch", "--config_file", "offload.yaml"]
    succeeded(python(*launcher, *twice, home=home, variables=variables, timeout=280))
    found: Results = json.loads((home / "results.json").read_text())
    return found


# One test for what one process did: pytest-xdist would run it again for others.
def test_losses_and_weights_are_identical_and_bytes_move_as_the_document_says(
    tmp_path: Path,
) -> None:
    for package in NEEDS:
        pytest.importorskip(package)
    results = run_all(tmp_path)
    for script in CHANGES:
        plain, offloaded = results[script]["plain"], results[script]["offloaded"]
        assert len(plain["losses"]) >= 8
        assert len(plain["weights"]) == 1
        for key in ("losses", "weights"):
            assert offloaded[key] == plain[key], script
        assert plain["engines"] == 0
        assert not offloaded["prints metrics"]
        for client, moved in offloaded["moved"].items():
            assert moved > 0, (script, client)
    written = table(results)
    if target := os.environ.get(TABLE_VARIABLE):
        Path(target).write_text(written)
    lines = DOCUMENT.read_text().splitlines()
    for line in written.splitlines():
        # Moved bytes depend on how far the disk keeps up; all else is as in the document.
        beginning = "|".join(line.split("|")[:4])
        assert any(other.startswith(beginning) for other in lines), beginning
    check_reports(tmp_path)


def check_reports(home: Path) -> None:
    """Loggers have the metrics at the steps of the losses, of each of the scripts."""
    scalars = tensorboard_scalars(home / "board")
    assert [step for step, _ in scalars["train/loss"]] == len(REPORTING) * [*range(1, 9)]
    ours = {name for name in scalars if "offload/" in name}
    assert ours >= RATES
    assert {name.split("/")[1] for name in ours} >= GROUPS
    for name in ours:
        assert name.startswith("offload/")
        assert [step for step, _ in scalars[name]] == len(REPORTING) * [1, 4, 7, 8], name
        assert all(math.isfinite(value) for _, value in scalars[name])
    assert scalars[WRITTEN][0][1] < scalars[WRITTEN][3][1]

    files = list(home.glob("wandb/offline-run-*/run-*.wandb"))
    assert len(files) == len(REPORTING)
    for file in files:
        rows = [row for row in wandb_rows(file) if WRITTEN in row]
        assert [row["train/global_step"] for row in rows] == [1, 4, 7, 8]
        assert all("train/loss" in row for row in rows[:-1])
        assert {name for name in rows[0] if "offload/" in name} == ours


def wandb_rows(file: Path) -> Iterator[dict[str, Any]]:
    """What an offline run of W&B has logged, row by row."""
    records = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    content, place, record = file.read_bytes(), 7, b""
    while place + 7 <= len(content):  # LevelDB's log format, in blocks of 32 KiB
        if (left := 32768 - place % 32768) < 7:
            place += left
            continue
        _, length, kind = struct.unpack("<IHB", content[place : place + 7])
        record += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind not in (1, 4):  # the whole record, or its last part
            continue
        parsed, record = records.Record.FromString(record), b""
        if parsed.WhichOneof("record_type") == "history":
            items = parsed.history.item
            yield {one.key or "/".join(one.nested_key): json.loads(one.value_json) for one in items}


def test_the_scripts_mention_nothing_of_ours() -> None:
    for script in CHANGES:
        imports = [
            line
            for line in (SCRIPTS / script).read_text().splitlines()
            if line.lstrip().startswith(("import ", "from "))
        ]
        assert imports
        assert not any("offload" in line for line in imports)


def table(results: Results) -> str:
    """The results as the table of the document."""
    lines = [
        "| script | change | losses | activations moved | states moved |",
        "|---|---|---|---|---|",
    ]
    for script, change in CHANGES.items():
        offloaded, plain = results[script]["offloaded"], results[script]["plain"]
        same = offloaded["losses"] == plain["losses"] and offloaded["weights"] == plain["weights"]
        verdict = f"{len(plain['losses'])}, identical" if same else "differ"
        moved = (f"{bytes_ / 1024:,.0f} KiB" for bytes_ in offloaded["moved"].values())
        link = f"[`{script}`](../examples/unmodified/{script})"
        lines.append(f"| {' | '.join([link, change, verdict, *moved])} |")
    return "\n".join(lines) + "\n"


def test_the_launch_file_of_the_package_is_one_that_the_launcher_takes() -> None:
    variables = environment_for(str(SHIPPED))
    given = yaml.safe_load(SHIPPED.read_text())["ssd_offload_config"]
    assert OffloadConfig.load(variables["SSD_OFFLOAD_CONFIG"]) == OffloadConfig.load(given)
    assert variables["ACCELERATE_USE_SSD_OFFLOAD"] == "true"
