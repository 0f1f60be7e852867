"""Where a config may come from, what it may say, and what is said when it is wrong."""

import copy
import json
import os
import pickle
import re
from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError

from offload_strategy import ConfigError
from offload_strategy.config import ActivationsConfig, OffloadConfig, presets
from offload_strategy.units import GiB, KiB, MiB, TiB
from tests.module_map import ROOT
from tests.support import run_python

LAUNCH_FILE = ROOT / "configs" / "accelerate" / "offload.yaml"

CONTRACT = """
tiers:
  - {name: host,  kind: dram, capacity: 16GiB}
  - {name: nvme0, kind: ssd, path: /mnt/nvme0, capacity: 400GiB, endurance_tbw: 1200}
  - {name: pfs,   kind: ssd, path: /lustre/me, capacity: 1TiB}
activations: {enabled: true,  tiers: [host, nvme0], min_size: 1MiB, budget: auto, prefetch: auto}
optimizer:   {enabled: true,  tiers: [host, nvme0, pfs], subgroup_size: auto, state_dtype: float32, overlap: commit}
parameters:  {enabled: false, tiers: [nvme0], blocks_in_flight: 2}
io:          {backend: auto, threads: 4, block_size: 4MiB, direct: auto, checksum: false, encryption: false}
memory:      {pinned: 4GiB}
"""  # noqa: E501


def tier(**options):
    return {"tiers": [{"name": "a", **options}]}


LIMIT = {"planning": {"device_memory": "1GiB"}}
DRAM = {"kind": "dram", "capacity": 1}
DEVICE_AND_DRAM = {"tiers": [{"name": "a", "kind": "device", "capacity": 1}, {"name": "b", **DRAM}]}


def refusal(source):
    with pytest.raises(ConfigError) as caught:
        OffloadConfig.load(source)
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None or caught.value.__suppress_context__
    return str(caught.value)


def test_mapping_json_text_and_files_mean_the_same(tmp_path):
    sections = yaml.safe_load(CONTRACT)
    as_yaml, as_json = tmp_path / "a.yml", tmp_path / "a.json"
    as_yaml.write_text(CONTRACT)
    # Tabs are fine in JSON and not in YAML.
    as_json.write_text(json.dumps(sections, indent="\t"))
    config = OffloadConfig.load(sections)
    text, made = json.dumps(sections), OffloadConfig(**sections)
    for source in (str(as_yaml), as_yaml, as_json, text, made):
        assert OffloadConfig.load(source) == config
    host, nvme0, pfs = config.tiers
    assert (host.kind, host.capacity, host.path) == ("dram", 16 * GiB, None)
    assert (nvme0.path, nvme0.endurance_tbw) == (Path("/mnt/nvme0"), 1200)
    assert (pfs.capacity, config.io.block_size, config.memory.pinned) == (TiB, 4 * MiB, 4 * GiB)
    # A section uses the tiers that it names in their order, or all.
    assert config.tiers_for("activations") == [host, nvme0]
    sections["activations"]["tiers"] = ["nvme0", "host"]
    del sections["optimizer"]["tiers"]
    config = OffloadConfig.load(sections)
    assert config.tiers_for("activations") == [nvme0, host]
    assert config.tiers_for("optimizer") == [host, nvme0, pfs]


def test_presets_are_the_defaults_but_for_the_switches_that_their_names_say():
    on = {"activations": {"activations"}, "optimizer": {"optimizer"}}
    on["full"] = {"activations", "optimizer"}
    assert presets().keys() == on.keys()
    for name in presets():
        expected = OffloadConfig.load({}).model_dump()
        for section in ("activations", "optimizer"):
            expected[section]["enabled"] = section in on[name]
        assert OffloadConfig.load(name).model_dump() == expected


def test_the_environment_gives_the_default_config(tmp_path, monkeypatch):
    file = tmp_path / "config.yaml"
    file.write_text("memory: {pinned: 7MiB}")
    for value in [str(file), '{"memory": {"pinned": "7MiB"}}']:
        monkeypatch.setenv("SSD_OFFLOAD_CONFIG", value)
        assert OffloadConfig.load().memory.pinned == 7 * MiB
    monkeypatch.setenv("SSD_OFFLOAD_CONFIG", "optimizer")
    assert not OffloadConfig.load().activations.enabled
    assert OffloadConfig.load({}).activations.enabled, "an explicit source wins"
    monkeypatch.setenv("SSD_OFFLOAD_CONFIG", "")
    assert OffloadConfig.load().activations.enabled
    monkeypatch.setenv("SSD_OFFLOAD_CONFIG", "ful")
    assert refusal(None).startswith("$SSD_OFFLOAD_CONFIG: 'ful'")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # Empty files and sections.
        ("# nothing\n", {}),
        ("activations:\n  # min_size: 1MiB\n", {}),
        ("optimizer: {overlap: off}", {"optimizer": {"overlap": "off"}}),  # YAML reads false
        # The section of a launch file, or what it names: a preset, or a file beside it.
        ("num_processes: 1\nssd_offload_config:", {}),
        ("num_processes: 1\nssd_offload_config: activations", "activations"),
        ("num_processes: 1\nssd_offload_config: mine.yaml", {"memory": {"pinned": "7MiB"}}),
    ],
)
def test_what_a_file_means(text, expected, tmp_path):
    (tmp_path / "mine.yaml").write_text("memory: {pinned: 7MiB}")
    file = tmp_path / "config.yaml"
    file.write_text(text)
    assert OffloadConfig.load(file) == OffloadConfig.load(expected)


def test_a_config_survives_yaml_pickling_and_copying(tmp_path):
    config = OffloadConfig.load(yaml.safe_load(CONTRACT))
    file = tmp_path / "config.yaml"
    file.write_text(config.to_yaml())
    assert "block_size: 4MiB" in file.read_text()
    assert OffloadConfig.load(file) == config
    assert OffloadConfig.load(config) is config
    assert pickle.loads(pickle.dumps(config)) == copy.deepcopy(config) == config
    with pytest.raises(ValidationError, match="frozen"):
        config.activations.enabled = False


def test_processes_share_what_drives_may_be_written():
    disk = {"name": "a", "kind": "ssd", "path": "/a", "endurance_tbw": 1200, "writes_per_day": 80}
    (tier,) = OffloadConfig.load({"tiers": [disk]}).divided(8).tiers
    assert (tier.endurance_tbw, tier.writes_per_day) == (150, 10)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("activations:\n  min_size: [1MiB\nio: {}\n", "not valid YAML.* in line 3"),
        ("memory: {pinned: 1MiB}\nmemory: {}\n", "'memory' is given twice in line 2"),
        ("memory: !!python/object/apply:os.system [true]", "not valid YAML"),
        ("tiers: [{name: 2024-13-01}]", "not valid YAML"),
        ("io: {threads: !!int abc}", "not valid YAML"),
        ("io: {direct: !!bool foo}", "not valid YAML"),
        ("tiers: !!map [1]", "not valid YAML"),
        ("compute_environment: LOCAL_MACHINE\n", "has no 'ssd_offload_config:' section"),
        ("ssd_offload_config: other.yaml", "leads back to itself"),
        ("- a\n", "allowed are sections"),
        ("just text\n", "allowed are sections"),
        ("3: a\n", "the key 3 is not text"),
    ],
)
def test_files_that_hold_no_config(content, words, tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text(content)
    (tmp_path / "other.yaml").write_text("ssd_offload_config: config.yaml")
    message = refusal(file)
    assert str(file) in message
    assert re.search(words, message)


@pytest.mark.parametrize(
    ("sections", "where", "words"),
    [
        # A misspelt key comes with the nearest right one.
        ({"activations": {"min_sise": 1}}, "activations.min_sise", "mean 'activations.min_size'?"),
        ({"activations": {"min-size": 1}}, "activations.min-size", "mean 'activations.min_size'?"),
        ({"activations": {"capacity": 1}}, "activations.capacity", "mean 'tiers[].capacity'?"),
        ({"activations": {"pinned": 1}}, "activations.pinned", "did you mean 'memory.pinned'?"),
        ({"optimiser": {}}, "optimiser", "did you mean 'optimizer'?"),
        ({"min_size": 1}, "min_size", "mean 'activations.min_size' or 'parameters.min_size'?"),
        ({"Memory": {}}, "Memory", "did you mean 'memory'?"),
        (tier(kind="ssd", path="/a", capcity=1), "tiers[0].capcity", "'tiers[].capacity'?"),
        ({"memory": {"zzz": 1}}, "memory.zzz", "unknown key; the keys here are limit, pinned"),
        # So does a wrong value with what is allowed.
        ({"tiers": []}, "tiers", "empty"),
        ({"tiers": {"name": "a"}}, "tiers", "a list"),
        ({"tiers": ["a"]}, "tiers[0]", "name, kind, path"),
        ({"tiers": [{"kind": "dram", "capacity": 1}]}, "tiers[0].name", "missing"),
        (tier(name="a/b", kind="ssd", path="/a"), "tiers[0].name", "letters"),
        (tier(kind="nvme"), "tiers[0].kind", "'device', 'dram' or"),
        (tier(kind="ssd"), "tiers[0]", "needs a path"),
        (tier(kind="ssd", path=""), "tiers[0].path", "empty"),
        (tier(kind="ssd", path=[]), "tiers[0].path", "empty"),
        (tier(kind="ssd", path=3), "tiers[0].path", "directory"),
        (tier(kind="ssd", path=["/a", "/a"]), "tiers[0].path", "'/a' is named twice"),
        (tier(kind="ssd", path="$NOWHERE/x"), "tiers[0].path", "$NOWHERE, which is not set"),
        (tier(kind="ssd", path="/a", endurance_tbw=-1), "tiers[0].endurance_tbw", "greater"),
        (tier(kind="dram"), "tiers[0]", "needs a capacity"),
        (tier(kind="device", capacity=1), "config", "need a dram or ssd tier"),
        ({**DEVICE_AND_DRAM, "activations": {"tiers": ["a"]}}, "activations", "states only"),
        (tier(kind="dram", capacity="1GiB", path="/a"), "tiers[0]", "cannot have a path"),
        (
            tier(kind="dram", capacity=0),
            "tiers[0].capacity",
            "got 0: must be a size greater than 0",
        ),
        (tier(kind="dram", capacity="-1GiB"), "tiers[0].capacity", "negative"),
        (tier(kind="dram", capacity=1, overwrite=True), "tiers[0]", "remove overwrite"),
        ({"tiers": 2 * tier(kind="dram", capacity=1)["tiers"]}, "tiers", "two tiers are named"),
        ({"activations": {"tiers": ["host"]}}, "activations", "configured tiers are: ssd"),
        ({"activations": {"tiers": []}}, "activations.tiers", "enabled: false"),
        ({"activations": {"tiers": "ssd"}}, "activations.tiers", "a list"),
        ({"activations": {"tiers": ["ssd", "ssd"]}}, "activations.tiers", "twice"),
        ({"activations": True}, "activations", "enabled, tiers, min_size"),
        ({"activations": {"min_size": "512M"}}, "activations.min_size", "MiB"),
        ({"activations": {"budget": "170%"}}, "activations.budget", "between 0% and 100%"),
        ({"activations": {"budget": "much"}}, "activations.budget", "or 'auto'"),
        ({"optimizer": {"subgroup_size": 0}}, "optimizer.subgroup_size", "at least one"),
        ({"optimizer": {"overlap": True}}, "optimizer.overlap", "'commit'"),
        ({"io": {"threads": True}}, "io.threads", "not true or false"),
        ({"parameters": {"blocks_in_flight": True}}, "parameters.blocks_in_flight", "a number"),
        ({"report": "$NO_WHERE/run.json"}, "report", "$NO_WHERE, which is not set"),
        ({"io": {"threads": 0}}, "io.threads", "greater than or equal to 1"),
        ({"io": {"block_size": "1000B"}}, "io.block_size", "direct I/O moves whole pages"),
        ({"io": {"block_size": 0}}, "io.block_size", "must be a positive multiple of 4096 bytes"),
        ({"io": {"direct": "maybe"}}, "io.direct", "'auto', true or false"),
        ({"io": {"backend": "tape"}}, "io.backend", "'deepnvme'"),
        ({"io": {"backend": "deepnvme", "checksum": False}}, "io", "needs checksum: full"),
        ({"io": {"checksum": ["full"]}}, "io.checksum", "'sampled'"),
        ({"io": {"backend": "kvikio", "encryption": True}}, "io", "needs backend: posix"),
        ({"io": {"backend": "deepnvme", "encryption": True}}, "io", "needs backend: posix"),
        ({"memory": {"pinned": 0}}, "memory.pinned", "at least 1 B"),
        ({"parameters": {"blocks_in_flight": 0}}, "parameters.blocks_in_flight", "equal to 1"),
        # What contradicts a limit of memory.
        ({**LIMIT, "activations": {"enabled": False}}, "config", "needs activations.enabled: true"),
        ({**LIMIT, "activations": {"budget": "50%"}}, "config", "leave out activations.budget"),
        ({**LIMIT, "activations": {"prefetch": 1}}, "config", "leave out activations.prefetch"),
        ({"planning": {"plan": "a.json"}}, "config", "plan needs planning.device_memory"),
    ],
)
def test_a_wrong_value_is_refused_with_its_place_and_what_is_allowed(sections, where, words):
    message = refusal(sections)
    assert message.startswith(f"the given mapping: {where}: ")
    assert words in message
    assert "pydantic" not in message


def test_what_cannot_be_a_source_is_refused():
    assert re.search(r"neither a file .* full, optimizer\)\. .* mean 'full'\?", refusal("ful"))
    assert "is a directory" in refusal("/")
    assert "line 1, column 13" in refusal('{"memory": 1')
    for source in (3, True, b"full", ["full"]):
        assert "cannot read a config from" in refusal(source)


def test_one_message_has_all_problems_and_names_the_source(tmp_path):
    message = refusal({"activations": {"min_sise": 1}, "io": {"threads": 0}})
    for words in ("2 problems", "activations.min_sise", "io.threads"):
        assert words in message
    file = tmp_path / "launch.yaml"
    file.write_text("num_processes: 1\nssd_offload_config: {optimizer: {overlapp: off}}")
    message = refusal(file)
    assert message.startswith(f"file {str(file)!r}, ssd_offload_config: optimizer.overlapp: ")
    with pytest.raises(ConfigError, match=r"activations\.min_size"):
        OffloadConfig(activations={"min_sise": 1})


@pytest.mark.parametrize(
    ("budget", "limit"),
    [("auto", "auto"), (" 12.5 % ", 0.125), ("100%", 1.0), ("8GiB", 8 * GiB), (0, 0), (1, 1)],
)
def test_a_budget_is_auto_or_a_share_or_bytes(budget, limit):
    found = ActivationsConfig(budget=budget).limit()
    assert (type(found), found) == (type(limit), limit)


def test_every_key_has_a_description():
    schema = OffloadConfig.model_json_schema()
    models = schema["$defs"]
    assert all(model["description"] for model in models.values())
    keys = [
        (model["title"], key, field)
        for model in [schema, *models.values()]
        for key, field in model["properties"].items()
    ]
    assert len(keys) > 25
    # A section is described where it is defined.
    assert [key for *key, field in keys if not {"description", "$ref"} & field.keys()] == []
    # A size may be a number or text.
    sizes = models["MemoryConfig"]["properties"]["pinned"]
    assert {kind["type"] for kind in sizes["anyOf"]} == {"integer", "string"}
    assert "512MiB" in sizes["examples"]


def test_reading_a_config_imports_no_torch():
    code = "import sys, offload_strategy.config as c; c.OffloadConfig.load('full'); "
    run_python("-c", f"{code} sys.exit('torch' in sys.modules)")


def test_our_launch_file_has_a_config_and_accelerate_accepts_its_rest(tmp_path):
    assert OffloadConfig.load(LAUNCH_FILE).activations.min_size == 256 * KiB
    config_args = pytest.importorskip("accelerate.commands.config.config_args")
    content = yaml.safe_load(LAUNCH_FILE.read_text())
    del content["ssd_offload_config"]
    file = tmp_path / "launch.yaml"
    file.write_text(yaml.safe_dump(content))
    config = config_args.ClusterConfig.from_yaml_file(str(file))
    assert config.num_processes == 1
    assert config.use_cpu is True


def test_a_system_without_affinity_of_threads_has_all_cores(monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    assert OffloadConfig().io.threads_to_use() == 3
