"""The documentation shows what `ssd-offload plan` and the tables of the papers print."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.planning import papers as paper_tables
from offload_strategy.cli import main
from offload_strategy.errors import ConfigError
from offload_strategy.planner.hardware import device, drive_set
from offload_strategy.planner.model_presets import preset
from offload_strategy.planner.request import Request
from offload_strategy.planner.search.search_result import Space
from offload_strategy.planner.search.settings_search import search
from offload_strategy.units import GiB

DOCS = Path(__file__).resolve().parents[2] / "docs" / "planning.md"


def request(**more):
    options = {"host_memory_bytes": 128 * GiB, **more}
    return Request(preset("gpt3-13b"), device("l40s"), drive_set("12xP5510"), **options)


def test_every_assumption_has_its_figure_or_source():
    text = "\n".join(search(request(), Space((1024,), 32)).assumptions())
    assert "232 TFLOPS" in text  # 64 % of 362, as the A100 sustains of its own peak
    assert "64% of its peak" in text
    assert "Intel D7-P5510 product specification" in text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"host_memory_bytes": -1}, "host_memory_bytes is -1"),
        ({"sustained_flops": -1.0}, "_flops is -1"),
    ],
)
def test_nonsense_is_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        request(**change)


@pytest.mark.skipif(not DOCS.is_file(), reason="needs the source tree")
@pytest.mark.parametrize("section", ["## Before you buy", "### Search"])
def test_the_documentation_shows_what_its_commands_print(section, capsys):
    text = DOCS.read_text().split(section)[1]
    command = text.split("```console\nssd-offload ")[1].split("\n```")[0]
    assert ("--search" in command) == (section == "### Search")
    assert main(command.replace("\\\n", " ").split()) == 0
    printed = capsys.readouterr().out.partition("\n# fastest\n")[0].strip()
    assert printed in text


@pytest.mark.skipif(not DOCS.is_file(), reason="needs the source tree")
@pytest.mark.parametrize("table", paper_tables.TABLES, ids=lambda table: table.__name__)
def test_the_documentation_shows_the_tables_as_they_are(table):
    assert table() in DOCS.read_text()
