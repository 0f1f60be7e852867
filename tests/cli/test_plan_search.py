"""`ssd-offload plan --search` prints the best settings and writes them as a config."""

from __future__ import annotations

import json

import pytest

from offload_strategy.cli import main
from offload_strategy.config import OffloadConfig

MODEL = ["--model", "gpt3-13b"]
MACHINE = ["--gpu", "4090", "--ssd", "4xP5510", "--host-memory", "64GiB"]
WORK = ["--sequence", "1024", "--max-batch", "16"]


def plan(*words):
    return main(["plan", *map(str, words)])


def search(*words):
    return plan(*MODEL, *MACHINE, *WORK, "--search", *words)


def test_it_prints_a_table_and_what_was_searched(capsys):
    assert search() == 0
    text = capsys.readouterr().out
    assert "| tokens/s | step | limits | batch |" in text
    assert "and 16 sequences" in text
    assert "settings need more device memory than there is" in text


def test_the_config_that_it_writes_loads(tmp_path, capsys):
    file = tmp_path / "found.yaml"
    assert search("--write-config", file, "--dir", "/mnt/a", "--dir", "/mnt/b", "--json") == 0
    best = json.loads(capsys.readouterr().out)["candidates"][0]
    config = OffloadConfig.load(file)
    assert [str(path) for path in config.tiers[-1].paths] == ["/mnt/a", "/mnt/b"]
    assert config.parameters.enabled is ("parameters" in best["offloads"]) is True
    assert config.optimizer.subgroup_size == best["subgroup_size"]
    assert main(["config", "check", str(file)]) == 0


def test_without_a_directory_it_is_the_default_one(tmp_path, monkeypatch):
    monkeypatch.setenv("SSD_OFFLOAD_DIR", str(tmp_path))
    assert search("--write-config", tmp_path / "found.yaml") == 0
    assert OffloadConfig.load(tmp_path / "found.yaml").tiers[-1].paths == [tmp_path]


def test_a_file_is_overwritten_only_by_force(tmp_path, capsys):
    file = tmp_path / "mine.yaml"
    file.write_text("mine")
    assert search("--write-config", file) == 2
    output = capsys.readouterr()
    assert "give --force to overwrite it" in output.err
    assert output.out == ""
    assert file.read_text() == "mine"
    assert search("--write-config", file, "--force") == 0
    OffloadConfig.load(file)


def test_a_batch_that_is_given_is_kept_and_auto_is_none(capsys):
    words = [*MODEL, *MACHINE, "--sequence", "1024", "--search", "--json"]
    assert plan(*words, "--batch", 12) == 0
    assert {one["batch"] for one in json.loads(capsys.readouterr().out)["candidates"]} == {12}
    assert plan(*words, "--max-batch", 16, "--batch", "auto") == 0
    searched = capsys.readouterr().out
    assert plan(*words, "--max-batch", 16) == 0
    assert capsys.readouterr().out == searched


def test_sequences_to_choose_from(capsys):
    words = ["--search", "--max-tokens", 16384, "--json", "--sequences", 512, 2048]
    assert plan(*MODEL, *MACHINE, *words) == 0
    best = json.loads(capsys.readouterr().out)["candidates"][0]
    assert best["sequence"] in (512, 2048)
    assert best["batch"] * best["sequence"] <= 16384


def test_what_changes_numbers_has_to_be_allowed(capsys):
    assert search("--json") == 0
    plain = json.loads(capsys.readouterr().out)["candidates"][0]
    assert search("--json", "--allow", "eager", "--allow", "bfloat16") == 0
    allowed = json.loads(capsys.readouterr().out)["candidates"][0]
    assert (plain["state_dtype"], allowed["state_dtype"]) == ("float32", "bfloat16")
    assert plain["overlap"] != allowed["overlap"] == "eager"


def test_status_1_says_that_nothing_fits_and_writes_nothing(tmp_path, capsys):
    machine = ["--gpu", "4090", "--ssd", "980-pro", "--host-memory", "32GiB"]
    file = tmp_path / "found.yaml"
    assert plan("--model", "gpt3-175b", *machine, *WORK, "--search", "--write-config", file) == 1
    assert "Nothing fits." in capsys.readouterr().out
    assert not file.exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([*WORK], "--max-batch: give --search as well"),
        (["--search"], "give --sequence as well"),
        ([*WORK, "--search", "--batch", "4"], "leave out --batch"),
        (["--sequence", "1024", "--search", "--batch", "0"], "batch is 0"),
        ([*WORK, "--search", "--update-rate", "8e9"], "--update-rate: no effect with --search"),
        (["--sequence", "1024", "--search", "--max-batch", "0"], "max_batch is 0"),
        ([*WORK, "--search", "--max-tokens", "10"], "less than one sequence of 1024 tokens"),
        ([*WORK, "--search", "--write-config", "/nowhere/found.yaml"], "no file in a directory"),
        ([*WORK, "--search", "--profile", "steps.json"], "give one of them"),
        (["--sequence", "1024", "--force"], "--force: give --search as well"),
        (["--sequence", "1024", "--tolerance", "0"], "--tolerance: give --search as well"),
        ([*WORK, "--search", "--duplex"], "--duplex: no effect with --search for a GPU"),
        ([*WORK, "--search", "--read", "1"], "--read: no effect with --search for a GPU"),
    ],
)
def test_what_is_wrong_is_said_in_one_message(words, message, capsys):
    assert plan(*MODEL, *MACHINE, *words) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert message in output.err
