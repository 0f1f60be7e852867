"""`ssd-offload plan` says what a machine can train, in three ways or by a search."""

import dataclasses
import json
import re
from types import SimpleNamespace

import pytest
import torch
import yaml

from offload_strategy import OffloadConfig, OffloadEngine
from offload_strategy.cli import plan_search, this_machine
from offload_strategy.planner.hardware import device
from offload_strategy.planner.model_presets import preset
from offload_strategy.planner.request import Cores
from offload_strategy.planner.search import settings_search
from offload_strategy.planner.transformer_shape import TransformerShape
from offload_strategy.units import GiB, MiB
from tests.integrations.support import python, succeeded

SMALL = "--model gpt --layers 12 --hidden 768 --heads 12"
WORK = "--batch 32 --sequence 1024"
MACHINE = "--gpu a100-80g --ssd 4xP5510 --host-memory 128GiB"
SEARCHED = "--model gpt3-13b --gpu 4090 --ssd 4xP5510 --host-memory 64GiB"
BOUNDED = f"{SEARCHED} --search --sequence 1024 --max-batch 16"
ON_CPU = f"{SMALL} --vocabulary 8192 --sequence 256 --max-batch 8 --search --device cpu"
RATES = "--read 0.6 --write 0.5"
HERE = "--device cpu --host-memory 16GiB"
#: The config.json of a small model.
LLAMA = {
    **{"model_type": "llama", "hidden_size": 512, "num_hidden_layers": 8},
    **{"num_attention_heads": 8, "intermediate_size": 2048, "vocab_size": 32000},
    "max_position_embeddings": 64,
}


@pytest.fixture
def known_cores(monkeypatch, tmp_path):
    """This machine has one disk, and cores of which this returns what it was asked with."""
    asked = []

    def measured(shape, sequence, **given):
        asked.append((shape, sequence, given))
        return Cores(1.5e11, 2e9, 1.5e10, 300 * MiB, sources={"flops": "measured"})

    monkeypatch.setenv("SSD_OFFLOAD_DIR", str(tmp_path))
    monkeypatch.setattr(plan_search, "measured_cores", measured)
    return asked


@pytest.fixture
def plan(ssd_offload):
    """Runs the command and returns what it prints; figures if it ends with --json."""

    def run(words, status=0):
        text = ssd_offload("plan", *words.split(), status=status).out
        return json.loads(text) if words.endswith("--json") else text

    return run


# ------------------------------------------------------------------ three ways
# What it prints of a named machine is in the documentation: tests/planner/test_figures.py.
def test_a_model_is_described_by_options_or_a_config_of_hugging_face(plan, tmp_path):
    data = plan(f"{SMALL} {WORK} {MACHINE} --tflops 100 --json")
    assert data["parameters"] == preset("gpt2").parameters
    assert {one["batch"] for one in data["candidates"]} == {32}
    assert data["assumptions"][0] == "device: 100 TFLOPS in a transformer block (given)"
    config = {"model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12}
    config |= {"n_positions": 1024, "vocab_size": 50257}
    (tmp_path / "config.json").write_text(json.dumps(config))
    data = plan(f"--config-json {tmp_path}/config.json {MACHINE} --json")
    assert data["parameters"] == preset("gpt2").parameters
    assert "1024 tokens (the model's context length)" in data["length"]


def test_three_configs_train_a_shrunken_model(known_cores, plan, ssd_offload, tmp_path):
    transformers = pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    printed = plan(f"{tmp_path} {HERE} {RATES}")
    assert printed.startswith("It fits; the rows are: fastest, in-between, cheapest.")
    assert "64 tokens (the model's context length)" in printed
    assert "To double the speed:\n\n- a larger batch: " in printed
    configs = dict(block.split("\n", 1) for block in printed.split("\n# ")[1:])
    assert list(configs) == ["fastest", "in-between", "cheapest"]
    data = plan(f"{tmp_path} {HERE} {RATES} --json")
    rates = [one["tokens_per_second"] for one in data["candidates"]]
    needs = [one["needs_bytes"]["memory"] for one in data["candidates"]]
    assert (rates, needs) == (sorted(rates, reverse=True), sorted(needs, reverse=True))
    assert needs[0] > needs[-1]
    # With less memory than the last one needs, nothing fits.
    less = f"{tmp_path} --device cpu {RATES} --host-memory {int(0.84 * needs[-1] / MiB)}MiB"
    assert plan(less, 1).startswith("It does not fit.")
    # What doubles the speed does so by the same model.
    advice = dict(line.split(": ", 1) for line in data["advice"])
    assert set(advice) == {"a larger batch", "drives", "memory", "GPU", "cores"}
    assert advice["cores"].startswith("2x makes it 2")
    assert advice["drives"] == "16x does not make it twice as fast, nor does less"
    assert "makes it more than 99x as fast" in advice["GPU"]

    sizes = {"num_hidden_layers": 2, "vocab_size": 256, "hidden_size": 256}
    shrunken = transformers.LlamaConfig(**LLAMA | sizes)

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
            return found, engine.metrics()["offload/optimizer/written_bytes"]

    plain, _ = losses(None)
    for name, text in configs.items():
        (tmp_path / f"{name}.yaml").write_text(text)
        ssd_offload("config", "check", tmp_path / f"{name}.yaml")
        sections = yaml.safe_load(text)
        if "planning" in sections:  # this process has more than the one that was planned for
            sections["planning"]["device_memory"] = "64GiB"
        found, written = losses(sections)
        assert found == plain, name
    assert written > 0  # by the cheapest


def test_files_are_overwritten_only_by_force(known_cores, ssd_offload, tmp_path, monkeypatch):
    file, cheapest = tmp_path / "plan.yaml", tmp_path / "plan-cheapest.yaml"
    cheapest.write_text("mine")
    words = ["plan", "gpt2", *HERE.split(), "--write-config", file]
    assert "plan-cheapest.yaml is there already" in ssd_offload(*words, status=2).err
    assert not file.exists()
    all_ways = plan_search.three_ways

    def two(fastest):
        found = all_ways(fastest)
        return {way: found[way] for way in ("fastest", "cheapest")}

    monkeypatch.setattr(plan_search, "three_ways", two)
    assert f"# cheapest\nis in {cheapest}\n" in ssd_offload(*words, "--force").out
    assert OffloadConfig.load(cheapest).parameters.enabled is True
    assert OffloadConfig.load(file).parameters.enabled is False
    assert not (tmp_path / "plan-in-between.yaml").exists()


def test_status_1_says_what_does_not_fit_and_writes_nothing(known_cores, plan, tmp_path):
    words = "--model gpt3-175b --sequence 2048 --gpu 4090 --ssd 980-pro --host-memory 8GiB"
    text = plan(f"{words} --batch 64", 1)
    assert text.startswith("It does not fit.")
    for what in ("device memory is", "host memory is", "disk is", "not even a batch of 1 fits"):
        assert what in text
    file = tmp_path / "found.yaml"
    assert "Nothing fits." in plan(f"{words} --max-batch 16 --search --write-config {file}", 1)
    assert not file.exists()
    printed = plan(f"llama3-70b {HERE}", 1)
    assert "To make it fit:\n\n- memory is " in printed
    assert "(assumed: say another with --sequence)" in printed


def test_a_smaller_batch_that_fits_is_named(plan):
    machine = "--model gpt3-175b --sequence 1024 --gpu 4090 --ssd 12xP5510 --host-memory 768GiB"
    text = plan(f"{machine} --batch 31", 1)
    batch = int(text.rpartition("a batch of ")[2].split()[0])
    plan(f"{machine} --batch {batch} --json")
    plan(f"{machine} --batch {batch + 1} --json", 1)


def test_options_may_follow_the_model_and_go_before_this_machine(plan):
    found = plan("qwen2.5-7b --sequence 128 --batch 2 --gpu 4090 --ssd 4xP5510 --json")
    best = found["candidates"][0]
    assert (best["sequence"], best["batch"]) == (128, 2)
    assert "Fuyou" in found["assumptions"][0]
    assert found["length"] == "Sequences have 128 tokens (as given)."
    grown = plan(f"{BOUNDED} --devices 2 --machines 3 --network 25 --json")
    assert list(grown["by_machines"]) == ["1", "2", "3"]


@pytest.mark.parametrize("more", ["", " --json", " --search", " --search --json"])
def test_of_a_cluster_only_what_is_shown_is_searched_and_once(more, plan, monkeypatch):
    asked = []

    def search(request, space):
        asked.append((request, space))
        return settings_search.search(request, space)

    monkeypatch.setattr(plan_search, "search", search)
    cluster = "--model gpt2 --sequence 512 --batch 1 --gpu h100 --ssd P5510 --host-memory 64GiB"
    printed = plan(f"{cluster} --devices 2 --machines 4 --network 25{more}")
    if "--json" in more:
        assert list(printed["by_machines"]) == ["1", "2", "4"]
    else:
        assert re.findall(r"^\| (\d) \| \d+ \|", printed, re.M) == ["1", "2", "4"]
    assert not any(one in asked[:number] for number, one in enumerate(asked))
    # More machines than were asked for are shown as what doubles the speed.
    more_machines = set() if "--search" in more else {8, 16}
    assert {request.machines for request, _ in asked} == {1, 2, 4} | more_machines
    assert len(asked) == 3 or "--search" not in more


# ------------------------------------------------------------------ this machine
def test_the_gpu_of_this_machine_is_planned_for(known_cores, plan, ssd_offload, monkeypatch):
    seen = SimpleNamespace(name="NVIDIA H100 80GB HBM3", total_memory=20 * GiB)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: seen)
    assert this_machine.this_gpu() == dataclasses.replace(device("h100"), memory_bytes=20 * GiB)
    printed = plan("gpt2 --host-memory 128GiB")
    assert "on h100-80g-sxm with 1 x path and 128 GiB of host memory" in printed
    found = plan("gpt2 --host-memory 128GiB --json")
    assert all(one["needs_bytes"]["device memory"] <= 20 * GiB for one in found["candidates"])
    seen.name = "NVIDIA A10"
    message = ssd_offload("plan", "gpt2", status=2).err
    assert "there is no device 'NVIDIA A10' in the hardware table; the nearest are" in message


def test_rates_that_a_plan_has_measured_are_remembered(known_cores, plan, tmp_path, rates_cache):
    first, second = (this_machine.known_path(tmp_path, 0.02) for _ in range(2))
    assert [one.sources["read"] for one in (first, second)] == ["measured", "remembered"]
    assert (first.read, first.write) == (second.read, second.write) > (0, 0)
    assert f"(remembered on {tmp_path})" in plan(f"gpt2 {HERE}")


def test_one_directory_is_found_on_each_disk(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    found = this_machine.usual_directories()
    assert found[0] == tmp_path
    disks = [path.stat().st_dev for path in found]
    assert len(disks) == len(set(disks))


def test_an_answer_at_once_imports_no_compiler(tmp_path):
    # An optimizer of torch imports one, which takes longer than all the rest.
    script = (
        "import sys; from offload_strategy.cli import main; main(['plan', 'gpt2']); "
        "assert 'torch._dynamo' not in sys.modules"
    )
    assert "It fits" in succeeded(python("-c", script, home=tmp_path))


def test_the_cores_of_this_machine_are_measured():
    shape = TransformerShape("gpt", 2, 128, 2, 512, max_positions=64)
    found = this_machine.measured_cores(shape, 64)
    assert 1e8 < found.flops < 1e15
    assert 1e7 < found.update_rate < 1e12
    assert 1e8 < found.copy_rate < 1e13
    assert 0 <= found.pass_seconds < 1e-4
    assert 64 * MiB < found.process_bytes < 16 * GiB
    assert found.sources["flops"] == f"measured, {torch.get_num_threads()} threads"
    # Odd shapes are measured by a layer that is near.
    sizes = {"hidden": 320, "heads": 5, "kv_heads": 1, "feed_forward": 100}
    odd = dataclasses.replace(preset("llama3-8b"), **sizes)
    assert this_machine.measured_cores(odd, 16, update_rate=1e9).flops > 1e8


# ------------------------------------------------------------------ the search
def test_what_drives_last_follows_from_what_is_written(plan, tmp_path):
    file = tmp_path / "found.yaml"
    words = f"--model gpt3-13b {WORK} --search --gpu a100-80g --ssd 2xP5510 --host-memory 24GiB"
    data = plan(f"{words} --json")
    best = data["candidates"][0]
    written = best["written_bytes_per_step"]
    per_day = written / best["step_seconds"] * 86400
    rated, sequential, assumed = data["lifespan_years"].values()
    assert rated * 365 == pytest.approx(2 * 3.84e12 * 365 * 5 / per_day)
    assert (sequential, assumed) == pytest.approx((2.5 * rated, 2.5 * 86 * rated))
    text = plan(f"{words} --writes-per-day {int(per_day / 2)} --write-config {file}")
    assert f"| written in a step | {written / 1e9:.1f} GB |" in text
    assert f"| {best['step_seconds']:.2f} | " in text.partition("| the step |")[2]
    # The budget is compared with the plan, and goes into the config.
    activations = best["ssd_bytes"].get("activations", 0) * best["micro_batches"]
    others = 2 * (1 - activations / written)
    assert f"| of the budget for a day | 200%, without activations {others:.0%} |" in text
    assert f"  writes_per_day: {int(per_day / 2)}\n" in file.read_text()
    idle = plan(f"--model gpt2 {WORK} --search {MACHINE} --json")
    assert idle["lifespan_years"]["as rated"] is None


def test_the_config_that_it_writes_loads(plan, ssd_offload, tmp_path, monkeypatch):
    file = tmp_path / "found.yaml"
    found = plan(f"{BOUNDED} --write-config {file} --dir /mnt/a --dir /mnt/b --json")
    best, config = found["candidates"][0], OffloadConfig.load(file)
    assert [str(path) for path in config.tiers[-1].paths] == ["/mnt/a", "/mnt/b"]
    assert config.parameters.enabled is ("parameters" in best["offloads"]) is True
    assert config.optimizer.subgroup_size == best["subgroup_size"]
    assert best["link_bytes_per_step"] > best["read_bytes_per_step"] > 0
    ssd_offload("config", "check", file)
    before = file.read_text()
    output = ssd_offload("plan", *BOUNDED.split(), "--write-config", file, status=2)
    assert "give --force to overwrite it" in output.err
    assert (output.out, file.read_text()) == ("", before)
    # Without a directory it is the default one.
    monkeypatch.setenv("SSD_OFFLOAD_DIR", str(tmp_path))
    plan(f"{BOUNDED} --write-config {file} --force")
    assert OffloadConfig.load(file).tiers[-1].paths == [tmp_path]


def test_a_batch_of_auto_is_searched_and_what_changes_numbers_has_to_be_allowed(plan):
    data = plan(f"{BOUNDED} --json")
    assert plan(f"{BOUNDED} --batch auto --json") == data
    both = plan(f"{SEARCHED} --search --max-tokens 16384 --sequences 512 2048 --json")
    best = both["candidates"][0]
    assert best["sequence"] in (512, 2048)
    assert best["batch"] * best["sequence"] <= 16384
    plain = data["candidates"][0]
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
    words = f"{ON_CPU} {RATES} --host-memory 64GiB"
    small, large = (plan(f"{words} --tolerance {tolerance} --json") for tolerance in (0.2, 0))
    assert small["candidates"][0]["batch"] < large["candidates"][0]["batch"] == 8


# ------------------------------------------------------------------ what is wrong
RUN = f"{SMALL} {WORK} {MACHINE}"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (f"{WORK} {MACHINE}", "give one of --model and --config-json"),
        (f"--model gpt --layers 4 {WORK} {MACHINE}", "give --hidden, --heads as well"),
        (f"{RUN} --gpu a1000", "no device 'a1000'"),
        (f"{RUN} --host-memory=-1GiB", "--host-memory: '-1GiB' is negative"),
        (f"{RUN} --tflops x", "--tflops: 'x' is not a number above 0"),
        (f"{RUN} --tflops -1", "--tflops: '-1' is not a number above 0"),
        (f"{RUN} --update-rate 8e9 --read 0.5", "--update-rate, --read: no effect"),
        (f"{RUN} --duplex", "--duplex: no effect"),
        (
            "gpt2 --gpu h100 --device-memory 1GiB --write-plan x",
            "--device-memory, --write-plan: for",
        ),
        ("gpt2 --layers 2 --gated", "--layers, --gated: for a kind"),
        ("gpt2 --write-profile profile.json", "--write-profile: for a script"),
        (f"{RUN} --machines 2", "network is missing"),
        (f"{RUN} --network 50", "--network: no effect with --machines 1"),
        (f"{RUN} --devices 2 --machines 1 --network 50", "--network: no effect"),
        (f"{RUN} --interconnect 450", "--interconnect: no effect with --devices 1"),
        (f"{RUN} --machines 2 --network 50 --interconnect 450", "--interconnect: no effect"),
        (f"{BOUNDED} --devices 4 --network 50", "--network: no effect"),
        (f"{ON_CPU} {RATES} --devices 2", "--devices: for GPUs"),
        ("gpt5", "there is no model 'gpt5'; the nearest are gpt2"),
        ("gpt2 bert-base", "give one model: gpt2 is one already"),
        ("gpt2 --model bert-base", "give one model"),
        # With a search, or for one.
        (f"{SEARCHED} --max-batch 16 --tolerance 0", "--max-batch, --tolerance: give --search"),
        (f"{SEARCHED} --batch auto", "--batch auto: give --search"),
        (f"{SEARCHED} --search", "give --sequence as well"),
        (f"{BOUNDED} --batch 4", "leave out --batch"),
        (f"{BOUNDED} --write-config /nowhere/found.yaml", "its folder does not exist"),
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
