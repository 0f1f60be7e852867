"""The search on a machine that trains on its CPU: one memory for all, and drives."""

import dataclasses
import math
import sys

import pytest
import yaml

from offload_strategy.config import OffloadConfig
from offload_strategy.planner.hardware import Drive
from offload_strategy.planner.request import (
    HOOK_SECONDS,
    LIMIT_SHARE,
    MEMORY_SHARE,
    Cores,
    CpuRequest,
)
from offload_strategy.planner.saved_tensor_bytes import Workload, activation_bytes
from offload_strategy.planner.search.memory_model import CpuModel
from offload_strategy.planner.search.search_result import Space, config_yaml
from offload_strategy.planner.search.settings import Settings
from offload_strategy.planner.search.settings_search import search
from offload_strategy.planner.transformer_shape import TransformerShape
from offload_strategy.units import GiB, MiB
from tests.support import run_python

#: 98 million parameters: 1.46 GiB with gradients and both moments.
GPT_98M = TransformerShape("gpt", 12, 768, 12, 8192, tied=False, max_positions=256)
P = GPT_98M.parameters
CORES = Cores(1.5e11, 2e9, 1.5e10, 300 * MiB, pass_seconds=1e-9, sources={"flops": "measured"})
ORDER = ("waiting", "activations", "states")
OFF = Settings(1, 1, 64, offloads_optimizer=True, overlap="off", host_priority=ORDER)
COMMIT = dataclasses.replace(OFF, overlap="commit")


def request(memory=2 * GiB, read=6e8, write=6e8, shape=GPT_98M, capacity=10**12, **more):
    drive = Drive("1 x path", read, write, capacity, sources={"read": "given"})
    return CpuRequest(shape, dataclasses.replace(CORES, **more), drive, int(memory))


def placed(run, settings):
    return CpuModel(run).place(settings)


def timed(run, settings):
    return CpuModel(run).step_time(placed(run, settings))


def needed(run, settings):
    """Of memory, without the process."""
    return placed(run, settings).fits[0].needed_bytes - run.cores.process_bytes


def config_of(found, candidate, *directories):
    """The config of a candidate, as text and loaded; it offloads what the candidate does."""
    text = config_yaml(dataclasses.replace(found, candidates=(candidate,)), directories)
    assert all(len(line) <= 100 for line in text.splitlines() if line.startswith("#"))
    config = OffloadConfig.load(yaml.safe_load(text))
    for client in ("activations", "optimizer", "parameters"):
        assert getattr(config, client).enabled is (client in candidate.offloads)
    if "optimizer" in candidate.offloads:
        for name in ("overlap", "state_dtype"):
            assert getattr(config.optimizer, name) == getattr(candidate.settings, name)
        assert config.optimizer.subgroup_size == candidate.placement.subgroup_size
    return text, config


# ------------------------------------------------------------------ memory, by hand
def test_plain_training_needs_16_bytes_a_parameter_and_what_is_saved():
    run, p = request(64 * GiB), P
    # One short sequence: gradients are more than what is saved, and all of them are there at last.
    assert 16 * p <= needed(run, Settings(1, 1, 16)) < 16.5 * p
    # Many long ones: the worst moment is the head's, without gradients.
    work = Workload(16, 256, dtype_bytes=4)
    saved, logits = activation_bytes(GPT_98M, work), 16 * 256 * 8192 * 4
    assert needed(run, Settings(16, 1, 256)) == pytest.approx(12 * p + saved + 3 * logits, rel=1e-6)
    # Of two micro-batches the second begins with the first one's gradients.
    two = needed(run, Settings(32, 2, 256))
    assert two == pytest.approx(16 * p + saved + 3 * logits, rel=1e-6)
    # Of layers that are computed again the input stays. The worst moment is the first layer's.
    inputs = 12 * 16 * 256 * 768 * 4
    again = needed(run, Settings(16, 1, 256, recomputed_layers=12))
    assert again == pytest.approx(16 * p + inputs + saved / 12, rel=0.01)


def test_states_that_leave_take_buffers_and_those_that_stay_a_tier():
    run = request(1.65 * GiB)
    found = placed(run, OFF)
    states = found.split("states")
    assert states.total_bytes == 8 * P
    assert 0 < states.host_bytes < 8 * P
    # Weights, gradients, states that stay, buffers; and less than a tier's grain is free.
    need = found.fits[0].needed_bytes
    known = 300 * MiB + 8 * P + states.host_bytes + found.pinned_bytes
    assert need == pytest.approx(known, abs=4 * MiB)
    assert 0 <= run.room_bytes - need < 16 * MiB


def test_with_commit_gradients_and_new_weights_wait():
    much, little = placed(request(64 * GiB, 5e9, 5e9), COMMIT), placed(request(1.2 * GiB), COMMIT)
    assert (much.gradient_memory, much.split("waiting").host_bytes) == (4 * P, 8 * P)
    # Old and new states.
    assert much.split("states").total_bytes == 16 * P
    assert 0 < little.split("waiting").ssd_bytes < 8 * P
    assert little.split("states").host_bytes == 0


def test_saved_tensors_leave_until_the_rest_fits():
    plenty = placed(request(64 * GiB), Settings(8, 1, 256))
    assert plenty.split("activations").total_bytes == 0
    # 300 MiB less than that is needed: so much leaves, and buffers come instead.
    memory = math.ceil((plenty.fits[0].needed_bytes - 300 * MiB) / MEMORY_SHARE)
    left = placed(request(memory), Settings(8, 1, 256)).split("activations")
    assert left.host_bytes == 0
    assert 300 * MiB <= left.ssd_bytes <= 370 * MiB


_MEASURES = """
from benchmarks.machine import fix_allocator, forget_peak, status_bytes
fix_allocator()
import torch
from benchmarks.activations.models import Shape
from benchmarks.gpt import GPT
torch.set_num_threads(1)
def peak_bytes(width, layers, batch, micro_batches):
    model = GPT(Shape(width, layers, width // 64, 256, 4096))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for _ in range(2):
        forget_peak()
        tokens = torch.zeros(batch, 256, dtype=torch.int64)
        for part in tokens.chunk(micro_batches):
            model(part).backward()
        optimizer.step()
        optimizer.zero_grad()
    return status_bytes("VmHWM")
peak_bytes(256, 1, 1, 1)
process = status_bytes("VmRSS")
print(peak_bytes(384, 6, 4, 2) - process)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_what_is_counted_is_what_training_takes():
    shape = TransformerShape("gpt", 6, 384, 6, 4096, tied=False, max_positions=256)
    counted = needed(request(shape=shape), Settings(4, 2, 256))
    # A few megabytes are the kernels' own.
    assert counted == pytest.approx(int(run_python("-c", _MEASURES)), rel=0.12, abs=24 * MiB)


# ------------------------------------------------------------------ seconds, by hand
def test_a_step_that_moves_nothing_computes_and_updates():
    step = timed(request(64 * GiB), Settings(4, 1, 256))
    layers = 12 * GPT_98M.layer_parameters
    seconds = 3 * GPT_98M.forward_flops(4, 256) / 1.5e11 + layers * 1e-9
    seconds += 4 * 8192 * 768 / 1.5e10 + P / 2e9
    assert (step.seconds, step.limited_seconds.keys()) == (pytest.approx(seconds), {"computation"})
    assert step.moved_bytes("written") == 0
    # Every further micro-batch costs a pass over weights and gradients.
    each = layers * 1e-9 + 4 * 8192 * 768 / 1.5e10 + 1.5 * 4 * P / 1.5e10
    four = timed(request(64 * GiB), Settings(4, 4, 256))
    assert four.seconds - step.seconds == pytest.approx(3 * each)


def test_an_update_in_step_waits_for_the_drives():
    run = request(1.65 * GiB, read=4e8, write=2e8)
    step = timed(run, OFF)
    moved = 8 * P - placed(run, OFF).split("states").host_bytes
    assert step.stages[-1].name == "step()"
    assert step.stages[-1].seconds == pytest.approx(moved / 4e8 + moved / 2e8)
    assert step.moved_bytes("written") == moved
    both = dataclasses.replace(run, duplex=True)
    assert timed(both, OFF).stages[-1].seconds == pytest.approx(moved / 2e8)


def test_an_update_in_backward_hides_behind_it_but_takes_the_same_cores():
    run = request(64 * GiB, 1e13, 1e13, io_overhead=0.0)
    plain = timed(run, Settings(4, 1, 256)).seconds
    settings = dataclasses.replace(COMMIT, batch=4, sequence=256)
    # Four passes over the weights, of which two only read.
    assert timed(run, settings).seconds - plain == pytest.approx(3 * 4 * P / 1.5e10)
    settings = dataclasses.replace(settings, host_priority=("waiting", "activations"))
    backward = timed(request(64 * GiB, 1e8, 1e8), settings).stages[1]
    assert (backward.limit, backward.seconds) == ("paths", pytest.approx(16 * P / 1e8))


def test_what_moves_takes_its_toll():
    settings = Settings(8, 1, 256)
    runs = [request(2.3 * GiB, 1e13, 1e13, io_overhead=toll) for toll in (0.0, 1e-10)]
    free, usual = (timed(run, settings).seconds for run in runs)
    left = placed(request(2.3 * GiB), settings).split("activations").ssd_bytes
    assert left > 100 * MiB
    assert usual - free == pytest.approx(2 * left * 1e-10)
    stay = timed(request(64 * GiB, 1e13, 1e13, io_overhead=0.0), settings).seconds
    assert free - stay == pytest.approx(12 * 11 * HOOK_SECONDS, rel=1e-3)


# ------------------------------------------------------------------ what leaves, and the config
@pytest.mark.parametrize("overlap", ["commit", "off", "eager"])
@pytest.mark.parametrize(
    ("memory", "batch", "moved"),
    [
        # 16 bytes a parameter fit, what eight sequences save does not.
        (2.3, 8, {"activations"}),
        (1.6, 8, {"optimizer", "activations"}),
        (1.6, 2, {"optimizer"}),
        (1.25, 8, {"optimizer", "activations", "parameters"}),
        (0.8, 2, {"optimizer", "parameters"}),
    ],
)
def test_the_less_memory_the_more_leaves_by_a_config_that_loads(memory, batch, moved, overlap):
    run = request(memory * GiB, 5e9, 5e9)  # no checkpointing: a cheap disk is what is left
    found = search(run, Space((256,), batch=batch, overlaps=(overlap,)))
    # With all updates in step() the least memory is not enough.
    ways = [set(candidate.offloads) for candidate in found.candidates]
    assert moved in ways or (memory, overlap) == (0.8, "off")
    for candidate in found.candidates:
        assert candidate.placement.fits[0].needed_bytes <= run.room_bytes
        text, config = config_of(found, candidate, "/mnt/nvme0")
        for words in ("no step was measured", "on the CPU with 1 x path and", "150 GFLOPS"):
            assert words in text
        assert "half-precision" not in text
        # Host memory is no place to send activations or weights to: they would still be in memory.
        dram = [tier for tier in config.tiers if tier.kind == "dram"]
        assert [tier.name for tier in dram] in ([], ["host-states"])
        if dram:
            # With commit it holds what is old and what is new.
            wanted = candidate.placement.split("states").host_bytes
            wanted //= 2 if overlap == "commit" else 1
            assert dram[0].capacity == math.ceil(wanted / MiB) * MiB
            assert config.optimizer.tiers == ["host-states", "ssd"]
        if "activations" in candidate.offloads:
            limit = math.ceil(LIMIT_SHARE * run.memory_bytes / MiB) * MiB
            assert abs(config.planning.device_memory - limit) <= MiB
        else:
            assert config.planning.device_memory is None
        if "optimizer" in candidate.offloads:
            assert config.optimizer.overlap == overlap
            assert config.memory.pinned <= run.room_bytes
            assert "MALLOC_MMAP_THRESHOLD_" in text


def test_updates_that_are_committed_are_larger_as_they_take_cores_that_compute():
    run = request(64 * GiB, shape=dataclasses.replace(GPT_98M, layers=24))
    for overlap, expected in (("off", 1 << 22), ("eager", 1 << 22), ("commit", 1 << 23)):
        placement = placed(run, dataclasses.replace(OFF, overlap=overlap))
        assert placement.subgroup_size == expected
