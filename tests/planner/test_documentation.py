"""The documentation shows what `ssd-offload plan` and the tables of the papers print."""

from pathlib import Path

import pytest

from benchmarks.planning import papers as paper_tables
from offload_strategy.cli import main

DOCS = Path(__file__).resolve().parents[2] / "docs" / "planning.md"


pytestmark = pytest.mark.skipif(not DOCS.is_file(), reason="needs the source tree")


@pytest.mark.parametrize("section", ["## Before you buy", "### Search"])
def test_the_documentation_shows_what_its_commands_print(section, capsys):
    text = DOCS.read_text().split(section)[1]
    command = text.split("```console\nssd-offload ")[1].split("\n```")[0]
    assert ("--search" in command) == (section == "### Search")
    assert main(command.replace("\\\n", " ").split()) == 0
    printed = capsys.readouterr().out.partition("\n# fastest\n")[0].strip()
    assert printed in text


@pytest.mark.parametrize("table", paper_tables.TABLES, ids=lambda table: table.__name__)
def test_the_documentation_shows_the_tables_as_they_are(table):
    assert table() in DOCS.read_text()
