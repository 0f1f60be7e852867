"""`ssd-offload plan` prints three ways or the best settings, or says what is wrong."""

import dataclasses
import json

import pytest
import torch

from offload_strategy.cli import plan_search
from offload_strategy.config import OffloadConfig
from offload_strategy.planner.model_presets import preset
from offload_strategy.planner.request import Cores
from offload_strategy.planner.transformer_shape import TransformerShape
from offload_strategy.units import GiB, MiB

GPT = "--model gpt --layers 40 --hidden 5120 --heads 40"
WORK = "--batch 32 --sequence 1024"
MACHINE = "--gpu a100-80g --ssd 4xP5510 --host-memory 128GiB"
SEARCHED = "--model gpt3-13b --gpu 4090 --ssd 4xP5510 --host-memory 64GiB"
SEARCH = f"{SEARCHED} --search --sequence 1024"
BOUNDED = f"{SEARCH} --max-batch 16"
SMALL = "--model gpt --layers 12 --hidden 768 --heads 12 --vocabulary 8192"
ON_CPU = f"{SMALL} --sequence 256 --max-batch 8 --search --device cpu"
RATES = "--read 0.6 --write 0.5"
CORES = Cores(1.5e11, 2e9, 1.5e10, 300 * MiB, sources={"flops": "measured"})


@pytest.fixture
def known_cores(monkeypatch):
    """What would be measured; returns what it was asked with."""
    asked = []

    def measured(shape, sequence, **given):
        asked.append((shape, sequence, given))
        return CORES

    monkeypatch.setattr(plan_search, "measured_cores", measured)
    return asked


@pytest.fixture
def plan(ssd_offload):
    """Runs the command and returns what it prints; figures if it ends with --json."""

    def run(words: str, status: int = 0):
        text = ssd_offload("plan", *words.split(), status=status).out
        return json.loads(text) if words.endswith("--json") else text

    return run


# ------------------------------------------------------------------ a named machine, in three ways
# What it prints is in the documentation: test_documentation.py. This machine: test_plan_here.py.
def test_it_prints_json(plan):
    data = plan(f"{GPT} {WORK} {MACHINE} --tflops 100 --json")
    # As GPT-3 13B with half of its learned positions.
    assert data["parameters"] == preset("gpt3-13b").parameters - 1024 * 5120
    assert {one["batch"] for one in data["candidates"]} == {32}
    assert set(data["configs"]) == {"fastest", "in-between", "cheapest"}
    assert any(line.startswith("drives: ") for line in data["advice"])
    assert data["assumptions"][0] == "device: 100 TFLOPS in a transformer block (given)"


def test_a_config_of_hugging_face_will_do(plan, tmp_path):
    config = {"model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12}
    config |= {"n_positions": 1024, "vocab_size": 50257}
    (tmp_path / "config.json").write_text(json.dumps(config))
    data = plan(f"--config-json {tmp_path}/config.json {MACHINE} --json")
    assert data["parameters"] == 124_439_808
    assert "1024 tokens (the model's context length)" in data["length"]


def test_status_1_says_what_does_not_fit_and_writes_nothing(plan, tmp_path):
    words = "--model gpt3-175b --sequence 2048 --gpu 4090 --ssd 980-pro --host-memory 8GiB"
    text = plan(f"{words} --batch 64", 1)
    assert text.startswith("It does not fit.")
    for what in ("device memory is", "host memory is", "disk is", "not even a batch of 1 fits"):
        assert what in text
    file = tmp_path / "found.yaml"
    searched = plan(f"{words} --max-batch 16 --search --write-config {file}", 1)
    assert "Nothing fits." in searched
    assert not file.exists()


def test_a_smaller_batch_that_fits_is_named(plan):
    machine = "--model gpt3-175b --sequence 1024 --gpu 4090 --ssd 12xP5510 --host-memory 768GiB"
    text = plan(f"{machine} --batch 31", 1)
    batch = int(text.rpartition("a batch of ")[2].split()[0])
    plan(f"{machine} --batch {batch} --json")
    plan(f"{machine} --batch {batch + 1} --json", 1)


def test_what_drives_last_follows_from_what_is_written(plan):
    words = f"--model gpt3-13b {WORK} --search --gpu a100-80g --ssd 2xP5510 --host-memory 24GiB"
    data, text = plan(f"{words} --json"), plan(words)
    best = data["candidates"][0]
    per_day = best["written_bytes_per_step"] / best["step_seconds"] * 86400
    rated, sequential, assumed = data["lifespan_years"].values()
    assert rated * 365 == pytest.approx(2 * 3.84e12 * 365 * 5 / per_day)
    assert (sequential, assumed) == pytest.approx((2.5 * rated, 2.5 * 86 * rated))
    assert f"| written in a step | {best['written_bytes_per_step'] / 1e9:.1f} GB |" in text
    assert f"| {best['step_seconds']:.2f} | " in text.partition("| the step |")[2]
    idle = plan(f"--model gpt2 {WORK} --search {MACHINE} --json")
    assert idle["lifespan_years"]["as rated"] is None


# ------------------------------------------------------------------ the search
def test_the_config_that_it_writes_loads(plan, ssd_offload, tmp_path, monkeypatch):
    file = tmp_path / "found.yaml"
    found = plan(f"{BOUNDED} --write-config {file} --dir /mnt/a --dir /mnt/b --json")
    best, config = found["candidates"][0], OffloadConfig.load(file)
    assert [str(path) for path in config.tiers[-1].paths] == ["/mnt/a", "/mnt/b"]
    assert config.parameters.enabled is ("parameters" in best["offloads"]) is True
    assert config.optimizer.subgroup_size == best["subgroup_size"]
    assert best["link_bytes_per_step"] > best["read_bytes_per_step"] > 0
    ssd_offload("config", "check", file)
    # Without a directory it is the default one.
    monkeypatch.setenv("SSD_OFFLOAD_DIR", str(tmp_path))
    plan(f"{BOUNDED} --write-config {file} --force")
    assert OffloadConfig.load(file).tiers[-1].paths == [tmp_path]


def test_a_file_is_overwritten_only_by_force(tmp_path, ssd_offload):
    file = tmp_path / "mine.yaml"
    file.write_text("mine")
    output = ssd_offload("plan", *BOUNDED.split(), "--write-config", file, status=2)
    assert "give --force to overwrite it" in output.err
    assert output.out == ""
    assert file.read_text() == "mine"


def test_a_batch_of_auto_is_searched_among_the_sequences(plan):
    assert plan(f"{BOUNDED} --batch auto --json") == plan(f"{BOUNDED} --json")
    both = plan(f"{SEARCHED} --search --max-tokens 16384 --sequences 512 2048 --json")
    best = both["candidates"][0]
    assert best["sequence"] in (512, 2048)
    assert best["batch"] * best["sequence"] <= 16384


def test_what_changes_numbers_has_to_be_allowed(plan):
    plain = plan(f"{BOUNDED} --json")["candidates"][0]
    allowed = plan(f"{BOUNDED} --allow eager --allow bfloat16 --json")["candidates"][0]
    assert (plain["state_dtype"], allowed["state_dtype"]) == ("float32", "bfloat16")
    assert plain["overlap"] != allowed["overlap"] == "eager"


# ------------------------------------------------------------------ the search on the CPU
def test_on_the_cpu_there_is_one_memory(known_cores, plan):
    text = plan(f"{ON_CPU} {RATES} --host-memory 1GiB")
    for words in (
        "billion parameters on the CPU with 1 x path and 1 GiB of memory",
        "| leaves memory |",
        "| memory | disk |",
        "drives: 0.6 GB/s read, 0.5 GB/s written, one at a time (given)",
        "| lifespan | the drive's rating is not known |",
        "cores: 150 GFLOPS",
    ):
        assert words in text
    both = plan(f"{ON_CPU} {RATES} --host-memory 1GiB --duplex")
    assert "drives: 0.6 GB/s read, 0.5 GB/s written, both at once" in both
    assert "2 x intel-p5510-3.84tb" in plan(f"{ON_CPU} --ssd 2xP5510 --host-memory 1GiB")
    little = plan(f"{ON_CPU} {RATES} --host-memory 400MiB", 1)
    assert "settings need more memory than there is" in little


def test_what_is_not_given_is_looked_up_or_measured(known_cores, plan, tmp_path, monkeypatch):
    monkeypatch.setattr(plan_search, "available_bytes", lambda: 64 * GiB)
    text = plan(f"{ON_CPU} --dir {tmp_path}")
    assert "64 GiB of memory" in text
    assert "The first row offloads nothing" in text
    assert f"measured on {tmp_path}" in text
    assert list(tmp_path.iterdir()) == []
    plan(f"{ON_CPU} {RATES} --tflops 0.2 --update-rate 1e9 --host-memory 4GiB")
    shape, sequence, given = known_cores[-1]
    assert (shape.layers, sequence) == (12, 256)
    assert given == {"flops": pytest.approx(2e11), "update_rate": 1e9, "quickly": False}


def test_the_tolerance_is_a_share_that_a_smaller_batch_may_cost(known_cores, plan):
    small, large = (
        plan(f"{ON_CPU} {RATES} --host-memory 64GiB --tolerance {tolerance} --json")
        for tolerance in (0.2, 0)
    )
    assert small["candidates"][0]["batch"] < large["candidates"][0]["batch"] == 8


def test_the_cores_of_this_machine_are_measured():
    found = plan_search.measured_cores(
        TransformerShape("gpt", 2, 128, 2, 512, max_positions=64), 64
    )
    assert 1e8 < found.flops < 1e15
    assert 1e7 < found.update_rate < 1e12
    assert 1e8 < found.copy_rate < 1e13
    assert 0 <= found.pass_seconds < 1e-4
    assert 64 * MiB < found.process_bytes < 16 * GiB
    assert found.sources["flops"] == f"measured, {torch.get_num_threads()} threads"
    # Odd shapes are measured by a layer that is near.
    odd = dataclasses.replace(
        preset("llama3-8b"), hidden=320, heads=5, kv_heads=1, feed_forward=100
    )
    assert plan_search.measured_cores(odd, 16, update_rate=1e9).flops > 1e8


# ------------------------------------------------------------------ what is wrong
RUN, BOUND = f"{GPT} {WORK} {MACHINE}", "--sequence 1024 --max-batch 16"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (f"{WORK} {MACHINE}", "give one of --model and --config-json"),
        (f"--model gpt --layers 4 {WORK} {MACHINE}", "give --hidden, --heads as well"),
        (f"{RUN} --gpu a1000", "no device 'a1000'"),
        (f"{RUN} --host-memory=-1GiB", "--host-memory: '-1GiB' is negative"),
        (f"{RUN} --tflops x", "--tflops: 'x' is not a number above 0"),
        (f"{RUN} --tflops -1", "--tflops: '-1' is not a number above 0"),
        (
            f"{RUN} --update-rate 8e9 --read 0.5 --duplex",
            "--update-rate, --read, --duplex: no effect",
        ),
        # With a search, or for one.
        (f"{SEARCHED} {BOUND} --tolerance 0", "--max-batch, --tolerance: give --search as well"),
        (f"{SEARCHED} --search", "give --sequence as well"),
        (f"{BOUNDED} --batch 4", "leave out --batch"),
        (f"{BOUNDED} --write-config /nowhere/found.yaml", "no file in a directory"),
        (f"{BOUNDED} --profile steps.json", "give one of them"),
        # On the CPU.
        (f"{ON_CPU} --read 0.6", "give both of --read and --write"),
        (f"{ON_CPU} {RATES} --ssd P5510", "give --ssd, or --read and --write"),
        (f"{ON_CPU} {RATES} --host-memory much", "--host-memory:"),
        (f"{ON_CPU} --dir /nowhere {RATES}", "/nowhere: No such file"),
    ],
)
def test_what_is_wrong_is_said_in_one_message(words, message, known_cores, ssd_offload):
    output = ssd_offload("plan", *words.split(), status=2)
    assert output.out == ""
    assert message in output.err


def test_a_budget_of_writes_is_compared_with_the_plan_and_goes_into_the_config(plan):
    words = f"{GPT} {WORK} {MACHINE} --tflops 100"
    figures = plan(f"{words} --json")["candidates"][0]
    step, written = figures["step_seconds"], figures["written_bytes_per_step"]
    per_day = written / step * 86400
    activations = figures["ssd_bytes"].get("activations", 0) * figures["micro_batches"]
    printed = plan(f"{words} --writes-per-day {int(per_day / 2)}")
    others = 2 * (1 - activations / written)
    assert f"| of the budget for a day | 200%, without activations {others:.0%} |" in printed
    assert f"  writes_per_day: {int(per_day / 2)}\n" in printed
