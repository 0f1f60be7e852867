"""`ssd-offload plan --search --device cpu`: this machine, as given or as measured."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from offload_strategy.cli import cpu_measurement as cores
from offload_strategy.cli import main, plan_cpu
from offload_strategy.config import OffloadConfig
from offload_strategy.planner.model_presets import preset
from offload_strategy.planner.search.cpu_request import Cores
from offload_strategy.planner.transformer_shape import TransformerShape
from offload_strategy.units import GiB, MiB

MODEL = ["--model", "gpt", "--layers", "12", "--hidden", "768", "--heads", "12"]
MODEL += ["--vocabulary", "8192"]
WORK = ["--sequence", "256", "--max-batch", "8"]
RATES = ["--read", "0.6", "--write", "0.5"]
CORES = Cores(1.5e11, 2e9, 1.5e10, 300 * MiB, sources={"flops": "measured"})


@pytest.fixture
def known_cores(monkeypatch):
    """What would be measured; returns what it was asked with."""
    asked = []

    def measured(shape, sequence, **given):
        asked.append((shape, sequence, given))
        return CORES

    monkeypatch.setattr(plan_cpu, "measured_cores", measured)
    return asked


def search(*words):
    return main(["plan", *MODEL, *WORK, "--search", "--device", "cpu", *map(str, words)])


def test_it_prints_a_table_of_one_memory(known_cores, capsys):
    assert search(*RATES, "--host-memory", "1GiB") == 0
    text = capsys.readouterr().out
    assert "billion parameters on the CPU with 1 x path and 1 GiB of memory" in text
    assert "| leaves memory |" in text
    assert "| memory | disk |" in text
    assert "drive: 0.6 GB/s read, 0.5 GB/s written, one at a time (given)" in text
    assert "cores: 150 GFLOPS" in text
    assert search(*RATES, "--host-memory", "1GiB", "--duplex") == 0
    assert "drive: 0.6 GB/s read, 0.5 GB/s written, both at once" in capsys.readouterr().out


def test_the_config_that_it_writes_loads(known_cores, tmp_path, capsys):
    file = tmp_path / "found.yaml"
    words = ["--host-memory", "1GiB", "--write-config", file, "--dir", tmp_path, "--json"]
    assert search(*RATES, *words) == 0
    best = json.loads(capsys.readouterr().out)["candidates"][0]
    config = OffloadConfig.load(file)
    assert config.tiers[-1].paths == [tmp_path]
    for client in ("activations", "optimizer", "parameters"):
        assert getattr(config, client).enabled is (client in best["offloads"])
    assert main(["config", "check", str(file)]) == 0


def test_status_1_says_that_nothing_fits(known_cores, capsys):
    assert search(*RATES, "--host-memory", "400MiB") == 1
    assert "settings need more memory than there is" in capsys.readouterr().out


def test_memory_that_is_not_given_is_what_is_free(known_cores, monkeypatch, capsys):
    monkeypatch.setattr(plan_cpu, "available_bytes", lambda: 64 * GiB)
    assert search(*RATES) == 0
    text = capsys.readouterr().out
    assert "64 GiB of memory" in text
    assert "The first row offloads nothing" in text


def test_rates_that_are_not_given_are_measured(known_cores, tmp_path, capsys):
    assert search("--host-memory", "64GiB", "--dir", tmp_path) == 0
    assert f"measured on {tmp_path}" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_a_drive_may_have_a_name(known_cores, capsys):
    assert search("--ssd", "2xP5510", "--host-memory", "1GiB") == 0
    assert "2 x intel-p5510-3.84tb" in capsys.readouterr().out


def test_what_the_cores_do_may_be_given(known_cores):
    words = ["--tflops", "0.2", "--update-rate", "1e9", "--host-memory", "4GiB"]
    assert search(*RATES, *words) == 0
    ((shape, sequence, given),) = known_cores
    assert (shape.layers, sequence) == (12, 256)
    assert given == {"flops": pytest.approx(2e11), "update_rate": 1e9}


def test_the_tolerance_is_a_share_that_a_smaller_batch_may_cost(known_cores, capsys):
    batches = {}
    for tolerance in ("0", "0.2"):
        assert search(*RATES, "--host-memory", "64GiB", "--tolerance", tolerance, "--json") == 0
        best = json.loads(capsys.readouterr().out)["candidates"][0]
        batches[tolerance] = best["batch"]
    assert batches["0.2"] < batches["0"] == 8


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--read", "0.6"], "give both of --read and --write"),
        ([*RATES, "--ssd", "P5510"], "give --ssd, or --read and --write"),
        (["--read", "0", "--write", "1"], "--read is 0.0; give more than 0 GB/s"),
        ([*RATES, "--tflops", "-1"], "--tflops: give a number above 0"),
        ([*RATES, "--update-rate", "0"], "--update-rate: give a number above 0"),
        ([*RATES, "--host-memory", "much"], "--host-memory:"),
        ([*RATES, "--gpu-price", "100"], "--gpu-price: no effect with --search"),
        ([*RATES, "--tolerance", "1"], "tolerance is 1"),
        (["--dir", "/nowhere", *RATES], "/nowhere: No such file"),
    ],
)
def test_what_is_wrong_is_said_in_one_message(words, message, known_cores, capsys):
    assert search(*words) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert message in output.err


def test_a_sequence_is_needed(known_cores, capsys):
    assert main(["plan", *MODEL, "--search", "--device", "cpu", *RATES]) == 2
    assert "give --sequence as well" in capsys.readouterr().err


def test_without_a_search_there_is_no_cpu(capsys):
    assert main(["plan", *MODEL, "--batch", "1", "--sequence", "256", "--device", "cpu"]) == 2
    assert "--device cpu: give --search as well" in capsys.readouterr().err


def test_the_cores_of_this_machine_are_measured():
    shape = TransformerShape("gpt", 2, 128, 2, 512, max_positions=64)
    found = cores.measured_cores(shape, 64)
    assert 1e8 < found.flops < 1e15
    assert 1e7 < found.update_rate < 1e12
    assert 1e8 < found.copy_rate < 1e13
    assert 0 <= found.pass_seconds < 1e-4
    assert 64 * MiB < found.process_bytes < 16 * GiB
    assert found.sources["flops"] == f"measured, {torch.get_num_threads()} threads"


def test_odd_shapes_are_measured_by_a_layer_that_is_near():
    shape = dataclasses.replace(
        preset("llama3-8b"), hidden=320, heads=5, kv_heads=1, feed_forward=100
    )
    assert cores.measured_cores(shape, 16, update_rate=1e9).flops > 1e8
