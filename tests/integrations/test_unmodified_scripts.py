"""Scripts that import nothing of ours, with the launch file or one flag and without.

    SSD_OFFLOAD_SCRIPTS_TABLE=table.md pytest tests/integrations/test_unmodified_scripts.py

writes the table of `docs/training_scripts.md`.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.integrations.support import run, succeeded
from tests.integrations.test_launch import CONSOLE_SCRIPT, launch_file

ROOT = Path(__file__).resolve().parent.parent.parent
SCRIPTS = ROOT / "examples" / "unmodified"
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
NEEDS = ("accelerate", "datasets", "jsonargparse", "lightning", "peft", "transformers", "trl")

Results = Mapping[str, Mapping[str, Any]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """What the scripts printed and moved; two processes, as most of the time goes into imports."""
    for package in NEEDS:
        pytest.importorskip(package)
    home = tmp_path_factory.mktemp("scripts")
    launch_file(home, "offload.yaml", ssd_offload_config=SECTION)
    twice = [str(ROOT / "tests" / "integrations" / "twice.py")]
    launched = [str(SCRIPTS / name) for name, change in CHANGES.items() if change == LAUNCHED]
    accelerate = [CONSOLE_SCRIPT, "launch", "--config", "offload.yaml"]
    cli = [str(SCRIPTS / "lightning_cli.py"), "fit", "--trainer.strategy=ssd_offload"]
    variables = {"SSD_OFFLOAD_CONFIG": json.dumps(SECTION)}
    with ThreadPoolExecutor(2) as pool:
        done: list[Future[Any]] = [
            pool.submit(run, [sys.executable, *arguments], home, given, timeout=300)
            for arguments, given in (
                (["-c", *accelerate, *twice, "launched.json", *launched], {}),
                ([*twice, "cli.json", *cli], variables),
            )
        ]
        for each in done:
            succeeded(each.result())
    return {
        name: result
        for file in ("launched.json", "cli.json")
        for name, result in json.loads((home / file).read_text()).items()
    }


@pytest.mark.parametrize("script", CHANGES)
def test_losses_and_weights_are_identical_and_bytes_move(results: Results, script: str) -> None:
    plain, offloaded = results[script]["plain"], results[script]["offloaded"]
    assert len(plain["losses"]) >= 8
    assert len(plain["weights"]) == 1
    for key in ("losses", "weights"):
        assert offloaded[key] == plain[key]
    assert plain["engines"] == 0
    for client, moved in offloaded["moved"].items():
        assert moved > 0, client


@pytest.mark.parametrize("script", CHANGES)
def test_the_scripts_mention_nothing_of_ours(script: str) -> None:
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


def test_the_table_of_the_document_is_of_these_scripts(results: Results) -> None:
    written = table(results)
    if target := os.environ.get(TABLE_VARIABLE):
        Path(target).write_text(written)
    lines = DOCUMENT.read_text().splitlines()
    for line in written.splitlines():
        # Moved bytes depend on how far the disk keeps up; all else is as in the document.
        beginning = "|".join(line.split("|")[:4])
        assert any(other.startswith(beginning) for other in lines), beginning


def test_the_example_of_a_config_file_is_one_that_the_strategy_takes() -> None:
    from offload_strategy import OffloadConfig

    content = yaml.safe_load((SCRIPTS / "lightning_cli.yaml").read_text())
    strategy = content["trainer"]["strategy"]
    assert strategy["class_path"] == "offload_strategy.SSDOffloadStrategy"
    assert OffloadConfig.load(strategy["init_args"]["config"]).activations.min_size == 256 * 1024


def test_the_launch_file_of_the_package_changes_no_bit(tmp_path: Path) -> None:
    """The command of the documents as it stands, and the same file without our section."""
    for package in ("accelerate", "datasets", "transformers"):
        pytest.importorskip(package)
    shipped = ROOT / "configs" / "accelerate" / "offload.yaml"
    content = yaml.safe_load(shipped.read_text())
    assert content.pop("ssd_offload_config")
    without = tmp_path / "without.yaml"
    without.write_text(yaml.safe_dump(content))
    script = str(SCRIPTS / "transformers_trainer.py")

    def launch(file: Path) -> Any:
        return run([sys.executable, "-c", CONSOLE_SCRIPT, "launch", "--config", str(file), script],
                   home=tmp_path)  # fmt: skip

    with ThreadPoolExecutor(2) as pool:
        offloaded, plain = pool.map(launch, (shipped, without))
    got, expected = (
        [line for line in succeeded(one).splitlines() if line.startswith(("loss ", "weights "))]
        for one in (offloaded, plain)
    )
    assert got == expected
    assert len(expected) >= 10
    assert "ssd-offload: " in offloaded.stderr
    assert "ssd-offload: " not in plain.stderr
