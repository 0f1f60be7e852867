"""`ssd-offload plan` prints the analysis, or says what is wrong with what was asked."""

from __future__ import annotations

import json

import pytest

from offload_strategy.cli import main
from offload_strategy.planner.model_presets import preset

GPT = ["--model", "gpt", "--layers", "40", "--hidden", "5120", "--heads", "40"]
WORK = ["--batch", "32", "--sequence", "1024"]
MACHINE = ["--gpu", "a100-80g", "--ssd", "4xP5510", "--host-memory", "768GiB"]


def plan(*words):
    return main(["plan", *words])


def test_it_prints_tables(capsys):
    assert plan(*GPT, *WORK, *MACHINE) == 0
    text = capsys.readouterr().out
    assert "batch 32 of 1024 tokens, on a100-80g-pcie with 4 x intel-p5510-3.84tb" in text
    for heading in ("memory and disk", "a step", "host memory", "drives", "What to change first"):
        assert heading in text


def test_it_prints_json(capsys):
    assert plan(*GPT, *WORK, *MACHINE, "--json") == 0
    data = json.loads(capsys.readouterr().out)
    assert data["machine"] == {
        "device": "a100-80g-pcie",
        "drive": "intel-p5510-3.84tb",
        "drives": 4,
    }
    # As GPT-3 13B with half of its learned positions.
    assert data["model"]["parameters"] == preset("gpt3-13b").parameters - 1024 * 5120


def test_a_config_of_hugging_face_will_do(capsys, tmp_path):
    config = {
        "model_type": "gpt2",
        "n_layer": 12,
        "n_embd": 768,
        "n_head": 12,
        "n_positions": 1024,
        "vocab_size": 50257,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    file = str(tmp_path / "config.json")
    assert plan("--config-json", file, *WORK, *MACHINE, "--json") == 0
    assert json.loads(capsys.readouterr().out)["model"]["parameters"] == 124_439_808


def test_status_1_says_that_it_does_not_fit(capsys):
    machine = ["--gpu", "4090", "--ssd", "980-pro", "--host-memory", "8GiB"]
    assert plan("--model", "gpt3-175b", *WORK, *machine) == 1
    assert "| no |" in capsys.readouterr().out


def test_prices_give_a_cost_and_rates_are_taken(capsys):
    more = [
        "--host-price",
        "14098",
        "--ssd-price",
        "500",
        "--tflops",
        "100",
        "--update-rate",
        "8e9",
    ]
    assert plan(*GPT, *WORK, *MACHINE, *more, "--json") == 0
    data = json.loads(capsys.readouterr().out)
    assert data["dollars_per_million_tokens"] > 0
    assert data["assumptions"][0] == "device: 100 TFLOPS in a transformer block (given)"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([*WORK, *MACHINE], "give one of --model and --config-json"),
        (["--model", "gpt", "--layers", "4", *WORK, *MACHINE], "give --hidden, --heads as well"),
        (["--model", "gpt3-13b", *MACHINE], "give --batch, --sequence as well"),
        (["--model", "gpt3-14b", *WORK, *MACHINE], "no model 'gpt3-14b'"),
        (["--config-json", "/nowhere/config.json", *WORK, *MACHINE], "cannot be read"),
        ([*GPT, *WORK, *MACHINE, "--gpu", "a1000"], "no device 'a1000'"),
        ([*GPT, *WORK, *MACHINE, "--ssd", "0xP5510"], "asks for 0 drives"),
        ([*GPT, *WORK, *MACHINE, "--host-memory", "-1GiB"], "--host-memory: '-1GiB' is negative"),
        ([*GPT, *WORK, *MACHINE, "--batch", "0"], "workload: batch is 0"),
        ([*GPT, *WORK, *MACHINE, "--layers", "-2"], "transformer: layers is -2"),
        ([*GPT, *WORK, *MACHINE, "--ssd-price", "-1"], "prices: drive is -1"),
        ([*GPT, *WORK, *MACHINE, "--update-rate", "0"], "update_rate is 0"),
    ],
)
def test_what_is_wrong_is_said_in_one_message(words, message, capsys):
    # argparse takes a value that begins with a dash for an option: with = it is a value.
    joined = []
    for word in words:
        if joined and joined[-1] == "--host-memory":
            joined[-1] = f"--host-memory={word}"
        else:
            joined.append(word)
    assert plan(*joined) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("ssd-offload: ")
    assert message in output.err
