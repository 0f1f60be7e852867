"""Devices, drives, models and papers: figures of other people, autograd and the documentation."""

import dataclasses
import json
import math

import pytest
import torch

from benchmarks.planning import papers
from offload_strategy.cli import main
from offload_strategy.errors import ConfigError
from offload_strategy.planner import hardware
from offload_strategy.planner.model_presets import from_config, preset
from offload_strategy.planner.saved_tensor_bytes import (
    Workload,
    activation_bytes,
    layer_activation_bytes,
    layer_tensors,
)
from offload_strategy.planner.search.settings import weight_buffers, weights_in_flight_bytes
from offload_strategy.planner.step_time import Rates, StageLoad, StepTime
from offload_strategy.planner.transformer_shape import TransformerShape
from offload_strategy.units import SECONDS_PER_YEAR, GiB
from tests.module_map import ROOT
from tests.training import Block, saved_storages

DOCS = ROOT / "docs" / "planning.md"


# ------------------------------------------------------------------ the documentation
@pytest.mark.skipif(not DOCS.is_file(), reason="needs the source tree")
def test_the_documentation_shows_what_its_commands_and_tables_print(capsys):
    text = DOCS.read_text()
    for section in ("## Before you buy", "### Search", "### Several machines"):
        shown = text.split(section)[1]
        command = shown.split("```console\nssd-offload ")[1].split("\n```")[0]
        assert ("--search" in command) == (section == "### Search")
        assert main(command.replace("\\\n", " ").split()) == 0
        printed = capsys.readouterr().out.partition("\n# fastest\n")[0].strip()
        assert printed in shown
    for table in papers.TABLES:
        assert table() in text, table.__name__


# ------------------------------------------------------------------ SSDTrain: drives
@pytest.mark.parametrize("case", papers.MEGATRON_RUNS)
def test_megatrons_runs_take_as_many_days_and_stay_within_ssdtrains_bounds(case):
    # 300 billion tokens, which the table gives in whole days.
    steps = 300e9 / (case.sequences * 2048)
    assert steps * case.step_seconds / 86400 == pytest.approx(case.days, rel=0.015)
    # A step that moves activations need not compute them again: it takes 3/4 of the measured one.
    saved = case.activation_bytes()
    for step in (case.step_seconds, 0.75 * case.step_seconds):
        assert papers.required_write_rate(saved, step) <= 12.1e9
        seconds = hardware.lifespan_seconds(papers.FOUR_980, step, saved, hardware.SSDTRAIN)
        assert seconds > 2 * SECONDS_PER_YEAR


# ------------------------------------------------------------------ what autograd saves
def test_a_layer_saves_megatrons_34_bytes_less_what_is_said():
    # s b h (10 + 24/t) with masks (Korthikanti et al., equation 2, without scores of attention).
    for t in (1, 2, 8):
        work, shape = Workload(2, 2048), TransformerShape("gpt", 1, 4096, 32, 50257)
        statistics, embedding = 4 * 2 * 2048 * 32 // t, 2 * 2048 * 4096
        masks = papers.mask_bytes(shape, work) - embedding
        expected = 2 * 2048 * 4096 * (10 + 24 / t) + statistics
        assert layer_activation_bytes(papers.part(shape, t), work) + masks == expected


def test_small_tensors_stay_and_decoders_attend_twice():
    encoder, work = TransformerShape("t5", 4, 64, 4, 100), Workload(2, 32)
    assert activation_bytes(encoder, work, 2**21) == 0
    both = dataclasses.replace(encoder, decoder_layers=2)
    tensors = layer_tensors(both, work, crosses=True)
    crossing = sum(nbytes for name, nbytes in tensors.items() if name.startswith("cross"))
    more = activation_bytes(both, work) - activation_bytes(encoder, work)
    assert more == 2 * crossing > 0


def test_a_layer_of_torch_saves_what_is_counted():
    b, s, h, heads = 2, 16, 32, 4
    layer, x = Block(h).eval(), torch.randn(b, s, h, requires_grad=True)
    storages = saved_storages(lambda: layer(x).sum(), layer.parameters())
    statistics = 4 * 2 * b * s  # of norms
    saved = sum(nbytes for one in storages if (nbytes := one.nbytes()) > statistics)
    shape = TransformerShape("gpt", 1, h, heads, 100)
    counted = layer_activation_bytes(shape, Workload(b, s, dtype_bytes=4))
    assert saved == pytest.approx(counted, rel=0.02)


# ------------------------------------------------------------------ MemAscend: host memory
def test_the_parts_for_qwen_are_those_of_section_5a():
    parts = papers.host_memory(preset("qwen2.5-7b"), memascend=False)
    found = {name: nbytes / GiB for name, nbytes in parts.items()}
    assert found.pop("states") + found.pop("swap-out") == pytest.approx(11.17, abs=0.005)
    # The paper's overheads hold the process as well: 24.90 GiB against 1.63 GiB without rounding.
    assert found.pop("rounding of pinned buffers") == pytest.approx(24.90 - 1.63, abs=0.1)
    expected = {"gradients": 28.37, "overflow check": 35.46, "weights in flight": 9.14}
    assert {name: found[name] for name in expected} == pytest.approx(expected, abs=0.005)


def test_buffers_of_weights_are_those_of_memascends_pool():
    qwen = preset("qwen2.5-7b")
    assert weights_in_flight_bytes(qwen, 1) / GiB == pytest.approx(2.46, abs=0.005)
    # Embedding and head; gate, up and down; query and output; key and value.
    assert list(weight_buffers(qwen).values()) == [2, 3, 2, 2]
    assert list(weight_buffers(qwen, 3).values()) == [2, 9, 6, 6]
    # A model never needs more buffers than it has layers, and small weights need none.
    shape = dataclasses.replace(preset("gpt2"), layers=2, hidden=1024, heads=16)
    assert weight_buffers(shape, 8) == weight_buffers(shape, 2)
    assert weight_buffers(dataclasses.replace(shape, hidden=16, vocabulary=100)) == {}


# ---------------------------------------------------------------------- Fuyou: the equations
def test_a_step_of_fuyous_by_hand():
    # GPT-3 13B, 6 drives of 6.5 and 3.4 GB/s, a link of 32 GB/s; one at a time, both at once.
    found = papers.fuyou(64, 6)
    shape, left = preset("gpt3-13b"), found.placement.split("activations").total_bytes
    p, flops = shape.parameters, shape.forward_flops(64, 1024)
    again = 40 * shape.layer_flops(64, 1024)
    taken = {
        f"{stage.name} {resource}": stage.times * seconds
        for stage in found.step.stages
        for resource, seconds in stage.limits.items()
    }
    assert taken == pytest.approx(
        {
            # Weights are read and activations written (equation 4), both over the link (3).
            "forward paths": (2 * p / 6.5e9 + left / 3.4e9) / 6,
            "forward link": max(2 * p, left) / 32e9,
            "forward computation": flops / 164e12,
            # States, weights and activations are read, states and weights written (7). States
            # cross the link, as they are updated on the device.
            "backward, update paths": ((14 * p + left) / 6.5e9 + 14 * p / 3.4e9) / 6,
            "backward, update link": (14 * p + left) / 32e9,
            "backward, update computation": (2 * flops + again) / 164e12,
            **{f"step() {resource}": 0 for resource in ("computation", "link", "paths")},
        },
        rel=1e-3,
    )


LOAD = StageLoad(2.0, to_device=30e9, from_device=40e9, read=6e9, written=4e9)


@pytest.mark.parametrize(
    ("rates", "limits"),
    [
        # Paths of 2 and 4 GB/s that do one direction at a time; a link that does both.
        ({}, {"computation": 2.0, "link": 4.0, "paths": 4.0}),
        ({"duplex": True}, {"computation": 2.0, "link": 4.0, "paths": 3.0}),
        # A model on the host has no link to wait for.
        ({"link": math.inf}, {"computation": 2.0, "link": 0.0, "paths": 4.0}),
        # What moves takes computing time from the cores that train.
        ({"io_overhead": 1e-10}, {"computation": 3.0, "link": 4.0, "paths": 4.0}),
    ],
)
def test_a_stage_takes_as_long_as_the_slowest_of_its_parts(rates, limits):
    rates = Rates(**{"read": 2e9, "write": 4e9, "link": 10e9} | rates)
    stage = rates.stage("backward", LOAD, times=3)
    assert stage.limits == pytest.approx(limits)
    assert stage.seconds == max(limits.values())
    step = StepTime((stage, rates.stage("step()", StageLoad(computation=1.0))))
    assert (step.seconds, step.limit) == (pytest.approx(3 * stage.seconds + 1), stage.limit)
    assert step.limited_seconds["computation"] == pytest.approx(1.0)
    moved = {"to_device": 90e9, "from_device": 120e9, "read": 18e9, "written": 12e9}
    assert {way: step.moved_bytes(way) for way in moved} == pytest.approx(moved)


@pytest.mark.parametrize(
    ("find", "written", "name"),
    [
        (hardware.device, "a100-80g", "a100-80g-pcie"),
        (hardware.device, "A100 80GB", "a100-80g-pcie"),
        (hardware.device, "nvidia_a100_40g_sxm", "a100-40g-sxm"),
        (hardware.device, "RTX 4090", "rtx-4090"),
        (hardware.device, "GeForce-RTX-3090", "rtx-3090"),
        (hardware.device, "H200", "h200-141g-sxm"),
        # As their driver calls them.
        (hardware.device_called, "NVIDIA H100 80GB HBM3", "h100-80g-sxm"),
        (hardware.device_called, "NVIDIA H100 PCIe", "h100-80g-pcie"),
        (hardware.device_called, "NVIDIA A100 80GB PCIe", "a100-80g-pcie"),
        (hardware.device_called, "NVIDIA GeForce RTX 4090", "rtx-4090"),
        (hardware.device_called, "Tesla V100-SXM2-32GB", "v100-32g-sxm"),
        (hardware.device_called, "NVIDIA GeForce RTX 4090 Laptop GPU", None),
        (hardware.device_called, "NVIDIA A10", None),
    ],
)
def test_a_device_is_found_however_it_is_written(find, written, name):
    found = find(written)
    assert (found and found.name) == name


@pytest.mark.parametrize(
    ("written", "count", "name", "endurance"),
    [
        # 3.84 TB a day for 5 years, which the maker rounds to 7.0 PB.
        ("4xP5510", 4, "intel-p5510-3.84tb", 7.0e15),
        # 1.6 TB a hundred times a day.
        ("7 x Intel Optane P5800X", 7, "intel-p5800x-1.6tb", 292e15),
        ("wd-sn850x-2tb", 1, "wd-sn850x-2tb", 1.2e15),
        ("12×intel-p5510-7.68tb", 12, "intel-p5510-7.68tb", 14.0e15),
        ("2*990 PRO", 2, "samsung-990-pro-2tb", 1.2e15),
    ],
)
def test_drives_are_found_with_their_count(written, count, name, endurance):
    found = hardware.drive_set(written)
    assert found.name == f"{count} x {name}"
    assert found.capacity_bytes == count * hardware.drive_set(name).capacity_bytes
    assert found.endurance_bytes / count == pytest.approx(endurance, rel=0.01)


@pytest.mark.parametrize("kind", ["device", "drive"])
def test_every_figure_has_a_source_and_makes_sense(kind):
    entries = hardware.table(kind).values()
    assert len({entry.name for entry in entries}) >= 7
    for entry in entries:
        assert all(len(source) > 5 for source in entry.sources.values())
        fields = set(type(entry).__slots__) - {"sources", "name"}
        figures = [getattr(entry, field) for field in fields]
        assert all(figure is None or figure > 0 for figure in figures)
        assert len(entry.sources) >= sum(figure is not None for figure in figures)
    for entry in entries if kind == "device" else ():  # what is measured is below the data sheet
        assert entry.sustained_flops is None or entry.sustained_flops <= entry.flops
        assert entry.measured_link is None or entry.measured_link <= entry.link


# ---------------------------------------------------------------------- models
@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("gpt2", 124_439_808),
        ("gpt2-xl", 1_557_611_200),
        ("bert-base", 110_106_428),  # with the heads of BertForPreTraining
        ("bert-large", 336_226_108),
        ("t5-11b", 11_307_321_344),
        ("llama3-8b", 8_030_261_248),
        ("llama3.1-70b", 70_553_706_496),
        ("qwen2.5-7b", 7_615_616_512),
        ("qwen2.5-14b", 14_770_033_664),
        ("qwen2.5-32b", 32_763_876_352),
        ("mistral-7b", 7_241_732_096),
        *(
            # As many billions as the name says.
            (f"gpt3-{billions}b", pytest.approx(billions * 1e9, rel=0.025))
            for billions in (13, 33, 65, 135, 175, 276, 412)
        ),
    ],
)
def test_a_preset_has_the_parameters_of_the_published_checkpoint(name, parameters):
    assert preset(name).parameters == parameters


def test_forward_flops_are_a_quarter_of_megatrons_formula():
    # 96 B s l h^2 (1 + s/6h + V/16lh) counts four forward passes of a GPT; the head's has no
    # recomputation, so it is counted three times there and here.
    b, s, layers, h, v = 8, 1024, 40, 5120, 50257
    shape = TransformerShape("gpt", layers, h, 40, v)
    formula = 96 * b * s * layers * h * h * (1 + s / (6 * h) + v / (16 * layers * h))
    ours = 4 * layers * shape.layer_flops(b, s) + 3 * shape.head_flops(b, s)
    assert ours == pytest.approx(formula, rel=1e-12)


def spelled_out(shape):
    return dataclasses.replace(shape, feed_forward=shape.inner, kv_heads=shape.keys_heads)


def keys(names, *values):
    return dict(zip(names.split(), values, strict=True))


_USUAL = "model_type num_hidden_layers hidden_size num_attention_heads intermediate_size vocab_size"
_GROUPED = f"{_USUAL} num_key_value_heads tie_word_embeddings"
LLAMA = keys(_GROUPED, "llama", 32, 4096, 32, 14336, 128256, 8, False)
QWEN2 = keys(_GROUPED, "qwen2", 28, 3584, 28, 18944, 152064, 4, False)
MISTRAL = LLAMA | {"model_type": "mistral", "vocab_size": 32000}
BERT = keys(f"{_USUAL} max_position_embeddings", "bert", 12, 768, 12, 3072, 30522, 512)
GPT2 = keys(
    "model_type n_layer n_embd n_head n_inner n_positions vocab_size",
    *("gpt2", 12, 768, 12, None, 1024, 50257),
)
T5 = keys(
    "model_type num_layers d_model num_heads d_kv d_ff vocab_size",
    *("t5", 24, 1024, 128, 128, 65536, 32128),
)


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (LLAMA, "llama3-8b"),
        (BERT, "bert-base"),
        (GPT2, "gpt2"),
        (T5, "t5-11b"),
        (QWEN2, "qwen2.5-7b"),
        (MISTRAL, "mistral-7b"),
        # Without a type the keys tell which it is.
        ({key: value for key, value in GPT2.items() if key != "model_type"}, "gpt2"),
        ({key: value for key, value in LLAMA.items() if key != "model_type"}, "llama3-8b"),
    ],
)
def test_a_config_of_hugging_face_gives_the_preset(config, name, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config))
    for source in (config, tmp_path, str(tmp_path / "config.json")):
        assert spelled_out(from_config(source)) == spelled_out(preset(name))


def test_a_config_that_transformers_writes_counts_what_transformers_builds(tmp_path):
    transformers = pytest.importorskip("transformers")
    sizes = QWEN2 | keys(_GROUPED, "qwen2", 3, 64, 4, 96, 211, 2, False)
    config = transformers.Qwen2Config(**sizes)
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = transformers.Qwen2ForCausalLM(config)
    assert from_config(tmp_path).parameters == sum(p.numel() for p in model.parameters())


ABOVE_0 = "give a whole number above 0"


def shape(changes):
    good = {"kind": "gpt", "layers": 12, "hidden": 768, "heads": 12, "vocabulary": 100}
    return TransformerShape(**good | changes)


def llama(changes):
    return from_config(LLAMA | changes)


@pytest.mark.parametrize(
    ("make", "wrong", "message"),
    [
        # Names come with the nearest ones.
        (hardware.drive_set, "0xP5510", "whole number from 1 on, as in '4xP5510'"),
        (hardware.drive_set, "-1xP5510", "whole number from 1 on, as in '4xP5510'"),
        (hardware.drive_set, "2.5xP5510", "whole number from 1 on, as in '4xP5510'"),
        (hardware.device, "a100-90g", r"no device 'a100-90g'.*a100-80g-pcie"),
        (hardware.drive_set, "3xP5511", r"no drive 'P5511'.*intel-p5510-3\.84tb"),
        (hardware.device, "nothing like it", "no device 'nothing like it'.*a100-40g-pcie"),
        (preset, "gpt3-14b", "no model 'gpt3-14b'.*gpt3-13b"),
        # Values of a config of Hugging Face.
        (llama, {"vocab_size": None}, "config has no key 'vocab_size'; add it"),
        *(
            (llama, {"hidden_size": value}, f"hidden_size is {value!r}; {ABOVE_0}")
            for value in (-1, 0, "12", 1.5, True)
        ),
        (llama, {"num_key_value_heads": 0}, f"num_key_value_heads is 0; {ABOVE_0}"),
        (llama, {"tie_word_embeddings": 1}, "tie_word_embeddings is 1; give true or false"),
        (llama, {"model_type": "mamba"}, "model_type is mamba; known are gpt2, bert"),
        # Shapes.
        (shape, {"layers": -1}, "layers is -1; give a number above 0"),
        (shape, {"hidden": 0}, "hidden is 0"),
        (shape, {"heads": 7}, "hidden is 768, which 7 heads do not divide"),
        (shape, {"kv_heads": 5}, "5 kv_heads do not divide 12 heads"),
        (shape, {"kind": "rnn"}, "kind is 'rnn'; give one of gpt, bert, t5, llama"),
        (shape, {"max_positions": -1}, "max_positions is -1"),
        (shape, {"decoder_layers": 13}, "decoder_layers is 13, more than the 12 layers"),
    ],
)
def test_a_name_or_value_that_cannot_be_is_refused(make, wrong, message):
    with pytest.raises(ConfigError, match=message):
        make(wrong)


def test_files_that_are_none_are_refused(tmp_path):
    for text, said in ((None, "config.json cannot be read"), ("{", "no JSON"), ("[]", "a list")):
        if text is not None:
            (tmp_path / "config.json").write_text(text)
        with pytest.raises(ConfigError, match=said):
            from_config(tmp_path)
