"""The structure of the package: no circular imports, small files, unique names, a true map."""

import re
from collections import Counter

import grimp
import pytest

from tests.module_map import MAP, PACKAGE, ROOT, source_files, written

pytestmark = pytest.mark.skipif(not (PACKAGE / "engine").is_dir(), reason="needs the source tree")

_MOST_LINES = 450


def test_no_files_import_each_other_in_a_circle():
    """Imports for type checking included."""
    graph = grimp.build_graph("offload_strategy", cache_dir=None)
    reached = {module: graph.find_upstream_modules(module) for module in graph.modules}
    for module, upstream in reached.items():
        assert [other for other in upstream if module in reached[other]] == [], module


def test_no_file_is_longer_than_a_reader_can_hold():
    lengths = {str(file): len(file.read_text().splitlines()) for file in source_files()}
    assert {file: n for file, n in lengths.items() if n > _MOST_LINES} == {}


def test_no_two_files_have_the_same_name():
    names = Counter(file.name for file in source_files() if not file.name.startswith("__"))
    assert [name for name, count in names.items() if count > 1] == []


def test_nothing_that_others_may_have_written_can_run_code():
    """Pickles, and YAML that makes objects; consolidation reads what torch's own code unpickles."""
    unsafe = re.compile(
        r"\b(eval|exec|os\.system|pickle\.loads?|yaml\.(unsafe_load|full_load))\("
        r"|weights_only=False|yaml\.load\([^)]*(?<!Safe)Loader|shell=True"
    )
    found = {str(file.relative_to(PACKAGE)) for file in source_files() if any(
        unsafe.search(line.partition("#")[0]) for line in file.read_text().splitlines()
        if "_UniqueKeyLoader" not in line
    )}  # fmt: skip
    assert found == {"checkpoints/consolidation.py"}


def test_the_module_map_matches_the_tree():
    assert MAP.read_text(encoding="utf-8") == written(), "run `make module-map`"


def test_the_contributors_table_names_files_that_exist():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    table = text.partition("## To change X, open Y")[2].partition("\n## ")[0]
    places = re.findall(r"`([\w/]+\.(?:py|md|yaml|toml))`", table)
    assert len(table.strip().splitlines()) - 2 >= 20
    for place in places:
        assert (PACKAGE / place).exists() or (ROOT / place).exists(), place


def test_only_the_store_tells_kinds_of_tiers_apart():
    probe = re.compile(r"isinstance\([^()]*\b(HostTier|PathTier)\b")
    for file in source_files():
        in_store = "store" in file.relative_to(PACKAGE).parts
        assert in_store or not probe.search(file.read_text()), file


def test_only_one_file_tells_kinds_of_accelerators_apart():
    kinds = re.compile(r"""["'](cuda|xpu|mps|hpu)["']""")
    named = {
        str(file.relative_to(PACKAGE)) for file in source_files() if kinds.search(file.read_text())
    }
    assert named == {"torch_support/accelerator.py"}


def test_the_glossary_is_short():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    glossary = text.partition("## Glossary")[2].partition("\n## ")[0]
    assert 1 <= len(re.findall(r"^- \*\*", glossary, re.M)) <= 15
