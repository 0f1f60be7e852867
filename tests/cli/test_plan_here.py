"""`ssd-offload plan MODEL` says what this machine can train, in three ways, and what to buy."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml

from offload_strategy import OffloadConfig, OffloadEngine
from offload_strategy.cli import plan_here, plan_search, this_machine
from offload_strategy.planner.hardware import device, device_called
from offload_strategy.planner.request import Cores
from offload_strategy.units import GiB, MiB

CORES = Cores(1.5e11, 2e9, 1.5e10, 300 * MiB, sources={"flops": "measured"})
#: The config.json of a small model.
LLAMA = {
    **{"model_type": "llama", "hidden_size": 512, "num_hidden_layers": 8},
    **{"num_attention_heads": 8, "intermediate_size": 2048, "vocab_size": 32000},
    "max_position_embeddings": 64,
}
ON_CPU = ["--device", "cpu", "--host-memory", "16GiB"]


@pytest.fixture
def here(monkeypatch, tmp_path):
    """This machine: cores that are known, and one disk."""
    monkeypatch.setenv("SSD_OFFLOAD_DIR", str(tmp_path))
    monkeypatch.setattr(plan_search, "measured_cores", lambda *_, **__: CORES)


# ---------------------------------------------------------------------- what is printed
def configs_in(printed: str) -> dict[str, str]:
    """The configs at the end of the output by their names."""
    return {
        block.partition("\n")[0]: block.partition("\n")[2] for block in printed.split("\n# ")[1:]
    }


def test_three_configs_are_printed_from_the_fastest_to_the_one_that_needs_the_least(
    here, ssd_offload, tmp_path
):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    printed = ssd_offload("plan", tmp_path, *ON_CPU).out
    found = configs_in(printed)
    assert list(found) == ["fastest", "in-between", "cheapest"]
    for name, text in found.items():
        (tmp_path / f"{name}.yaml").write_text(text)
        ssd_offload("config", "check", tmp_path / f"{name}.yaml")
    assert printed.startswith("It fits; the rows are: fastest, in-between, cheapest.")
    assert "64 tokens (the model's context length)" in printed
    assert "To double the speed:\n\n- a larger batch: " in printed
    found = json.loads(ssd_offload("plan", tmp_path, *ON_CPU, "--json").out)
    rates = [one["tokens_per_second"] for one in found["candidates"]]
    needs = [one["needs_bytes"]["memory"] for one in found["candidates"]]
    assert rates == sorted(rates, reverse=True)
    assert needs == sorted(needs, reverse=True)
    assert needs[0] > needs[-1]
    # With less memory than the last one needs, nothing fits.
    less = ["--device", "cpu", "--host-memory", f"{int(0.84 * needs[-1] / MiB)}MiB"]
    assert ssd_offload("plan", tmp_path, *less, status=1).out.startswith("It does not fit.")


def test_what_doubles_the_speed_does_so_by_the_same_model(here, ssd_offload):
    found = json.loads(ssd_offload("plan", "gpt2", *ON_CPU, "--json").out)
    advice = dict(line.split(": ", 1) for line in found["advice"])
    assert set(advice) == {"a larger batch", "drives", "memory", "GPU", "cores"}
    assert advice["cores"].startswith("2x makes it 2")
    assert advice["drives"] == "16x does not make it twice as fast, nor does less"
    assert "makes it more than 99x as fast" in advice["GPU"]


def test_what_does_not_fit_is_told_with_what_it_takes(here, ssd_offload):
    printed = ssd_offload("plan", "llama3-70b", *ON_CPU, status=1).out
    assert printed.startswith("It does not fit.")
    assert "To make it fit:\n\n- memory is " in printed
    assert "(assumed: say another with --sequence)" in printed


def test_options_may_follow_the_model_and_go_before_this_machine(here, ssd_offload):
    words = ["--sequence", 128, "--batch", 2, "--gpu", "4090", "--ssd", "4xP5510", "--json"]
    found = json.loads(ssd_offload("plan", "qwen2.5-7b", *words).out)
    best = found["candidates"][0]
    assert (best["sequence"], best["batch"]) == (128, 2)
    assert "Fuyou" in found["assumptions"][0]
    assert found["length"] == "Sequences have 128 tokens (as given)."


def test_the_gpu_of_this_machine_is_planned_for(here, ssd_offload, monkeypatch):
    gpu = dataclasses.replace(device("h100"), memory_bytes=20 * GiB)
    monkeypatch.setattr(plan_here, "this_gpu", lambda: gpu)
    printed = ssd_offload("plan", "gpt2", "--host-memory", "128GiB").out
    assert "on h100-80g-sxm with 1 x path and 128 GiB of host memory" in printed
    found = json.loads(ssd_offload("plan", "gpt2", "--host-memory", "128GiB", "--json").out)
    assert all(one["needs_bytes"]["device memory"] <= 20 * GiB for one in found["candidates"])


def test_a_gpu_that_the_table_does_not_know_is_refused(here, ssd_offload, monkeypatch):
    seen = SimpleNamespace(name="NVIDIA H100 80GB HBM3", total_memory=79 * GiB)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: seen)
    assert this_machine.this_gpu() == dataclasses.replace(device("h100"), memory_bytes=79 * GiB)
    seen.name = "NVIDIA A10"
    message = ssd_offload("plan", "gpt2", status=2).err
    assert "there is no device 'NVIDIA A10' in the hardware table; the nearest are" in message


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["gpt5"], "there is no model 'gpt5'; the nearest are gpt2"),
        (["gpt2", "bert-base"], "give one model: gpt2 is one already"),
        (["gpt2", "--model", "bert-base"], "give one model"),
    ],
    ids=["unknown", "two", "twice"],
)
def test_what_is_no_model_is_refused(here, ssd_offload, words, message):
    assert message in ssd_offload("plan", *words, status=2).err


# ---------------------------------------------------------------------- what is written
def test_the_configs_train_a_shrunken_model(here, ssd_offload, tmp_path):
    transformers = pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    file = tmp_path / "plan.yaml"
    ssd_offload("plan", tmp_path, *ON_CPU, "--write-config", file)
    shrunken = transformers.LlamaConfig(
        **LLAMA | {"num_hidden_layers": 2, "vocab_size": 256, "hidden_size": 256}
    )

    def losses(config):
        torch.manual_seed(0)
        net = transformers.LlamaForCausalLM(shrunken)
        optimizer = torch.optim.AdamW(net.parameters())
        tokens, found = torch.arange(128).view(2, 64), []
        with OffloadEngine(config) as engine:
            optimizer = engine.attach(net, optimizer) if config is not None else optimizer
            for _ in range(3):
                loss = net(input_ids=tokens, labels=tokens).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                found.append(loss.item())
            written = engine.metrics()["offload/optimizer/written_bytes"]
        return found, written

    plain, _ = losses(None)
    for name in ("plan.yaml", "plan-in-between.yaml", "plan-cheapest.yaml"):
        ssd_offload("config", "check", tmp_path / name)
        sections = yaml.safe_load((tmp_path / name).read_text())
        if "planning" in sections:  # this process has more than the one that was planned for
            sections["planning"]["device_memory"] = "64GiB"
        found, written = losses(sections)
        assert found == plain, name
    assert written > 0  # by the cheapest


def test_a_way_that_is_missing_has_no_file_and_one_that_is_there_is_overwritten_only_by_force(
    here, ssd_offload, tmp_path, monkeypatch
):
    file, cheapest = tmp_path / "plan.yaml", tmp_path / "plan-cheapest.yaml"
    cheapest.write_text("mine")
    words = ["plan", "gpt2", *ON_CPU, "--write-config", file]
    assert "plan-cheapest.yaml is there already" in ssd_offload(*words, status=2).err
    assert not file.exists()
    all_ways = plan_here.three_ways

    def two(fastest):
        found = all_ways(fastest)
        return {way: found[way] for way in ("fastest", "cheapest")}

    monkeypatch.setattr(plan_here, "three_ways", two)
    printed = ssd_offload(*words, "--force").out
    assert f"# cheapest\nis in {cheapest}\n" in printed
    assert OffloadConfig.load(cheapest).parameters.enabled is True
    assert OffloadConfig.load(file).parameters.enabled is False
    assert not (tmp_path / "plan-in-between.yaml").exists()


# ---------------------------------------------------------------------- this machine
def test_rates_that_bench_or_a_plan_has_measured_are_remembered(
    here, ssd_offload, tmp_path, monkeypatch
):
    monkeypatch.setenv("SSD_OFFLOAD_CACHE", str(tmp_path / "other"))
    first, second = (this_machine.known_path(tmp_path, 0.02) for _ in range(2))
    assert [one.sources["read_GBps"] for one in (first, second)] == ["measured", "remembered"]
    assert (first.read, first.write) == (second.read, second.write) > (0, 0)
    monkeypatch.setenv("SSD_OFFLOAD_CACHE", str(tmp_path / "cache"))
    figures = tmp_path / "bench.json"
    ssd_offload("bench", tmp_path, "--seconds", 0.05, "--size", "4MiB", "--json", figures)
    measured = json.loads(figures.read_text())["paths"][0]
    found = this_machine.known_path(tmp_path)
    assert found.read == measured["read_bytes_per_second"]
    assert found.write == measured["write_bytes_per_second"]
    assert found.sources == {"read_GBps": "remembered"}
    assert f"(remembered on {tmp_path})" in ssd_offload("plan", "gpt2", *ON_CPU).out


def test_one_directory_is_found_on_each_disk(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    found = this_machine.usual_directories()
    assert found[0] == tmp_path
    disks = [path.stat().st_dev for path in found]
    assert len(disks) == len(set(disks))


def test_an_answer_at_once_imports_no_compiler():
    # An optimizer of torch imports one, which takes longer than all the rest.
    script = (
        "import sys; from offload_strategy.cli import main; main(['plan', 'gpt2']); "
        "assert 'torch._dynamo' not in sys.modules"
    )
    root = Path(__file__).parents[2]
    ended = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert "It fits" in ended.stdout


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("NVIDIA H100 80GB HBM3", "h100-80g-sxm"),
        ("NVIDIA H100 PCIe", "h100-80g-pcie"),
        ("NVIDIA A100 80GB PCIe", "a100-80g-pcie"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("Tesla V100-SXM2-32GB", "v100-32g-sxm"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA A10", None),
    ],
)
def test_devices_are_found_by_the_names_of_their_driver(name, known):
    found = device_called(name)
    assert (found and found.name) == known
