"""Peak host memory against MemAscend's figures, part by part and in total."""

from __future__ import annotations

import statistics

import pytest

from offload_strategy.errors import ConfigError
from offload_strategy.planner.host_memory_needs import host_memory, weight_buffers
from offload_strategy.planner.model_presets import preset
from offload_strategy.planner.saved_tensor_bytes import Workload, checkpoint_bytes
from offload_strategy.units import GiB
from tests.planner.paper_tables import MEMASCEND_FIGURE_13

#: What the process has beside all buffers, which we do not count; the same for all eight.
PROCESS_GIB = (1.5, 1.9)


@pytest.mark.parametrize("name", MEMASCEND_FIGURE_13)
def test_the_peaks_are_memascends_but_for_the_process_itself(name):
    zero_infinity, memascend = MEMASCEND_FIGURE_13[name]
    for system, measured in (("zero-infinity", zero_infinity), ("memascend", memascend)):
        ours = host_memory(preset(name), system).peak_bytes / GiB
        low, high = PROCESS_GIB
        assert low < measured - ours < high


def test_the_parts_for_qwen_are_those_of_section_5a():
    parts = host_memory(preset("qwen2.5-7b"), "zero-infinity").parts
    assert parts["gradients"] / GiB == pytest.approx(28.37, abs=0.005)
    assert parts["overflow check"] / GiB == pytest.approx(35.46, abs=0.005)
    assert parts["weights in flight"] / GiB == pytest.approx(9.14, abs=0.005)
    assert (parts["states"] + parts["swap-out"]) / GiB == pytest.approx(11.17, abs=0.005)
    # The paper's overheads hold the process as well: 24.90 GiB against 1.63 GiB without rounding.
    assert parts["rounding of pinned buffers"] / GiB == pytest.approx(24.90 - 1.63, abs=0.1)
    exact = host_memory(preset("qwen2.5-7b"), "memascend").parts
    assert exact["weights in flight"] / GiB == pytest.approx(2.46, abs=0.005)
    assert "overflow check" not in exact


def test_the_pools_of_the_other_models():
    # Section III-A: 13.05 and 3.81 GiB. The text says Llama 3 8B with a hidden size of 5,120; the
    # figures are those of Qwen2.5-32B.
    pools = weight_buffers(preset("qwen2.5-32b"))
    assert pools.one_size_bytes / GiB == pytest.approx(13.05, abs=0.005)
    assert pools.exact_bytes / GiB == pytest.approx(3.81, abs=0.005)
    # Section VI-B1: as large in 14B for ZeRO-Infinity, smaller for MemAscend.
    smaller = weight_buffers(preset("qwen2.5-14b"))
    assert smaller.one_size_bytes == pools.one_size_bytes
    assert smaller.exact_bytes < pools.exact_bytes
    # And 72.71 % less on average of the four.
    saved = [weight_buffers(preset(name)) for name in MEMASCEND_FIGURE_13]
    mean = statistics.mean(1 - pool.exact_bytes / pool.one_size_bytes for pool in saved)
    assert mean == pytest.approx(0.7271, abs=0.0005)


def test_without_an_overflow_check_a_quarter_is_saved():
    # Section VI-B3: in bfloat16 25.19 % less on average. What the process has is in both peaks.
    process = statistics.mean(PROCESS_GIB) * GiB
    saved = []
    for name in MEMASCEND_FIGURE_13:
        before = host_memory(preset(name), "zero-infinity", checks_overflow=False).peak_bytes
        after = host_memory(preset(name), "memascend").peak_bytes
        saved.append(1 - (after + process) / (before + process))
    assert statistics.mean(saved) == pytest.approx(0.2519, abs=0.001)


def test_inputs_of_layers_add_62_gib_from_4096_to_131072_tokens():
    # Section VI-B2, figure 14a: 48.67 to 110.67 GiB on two devices.
    shape = preset("llama3.1-8b")
    short, long = (2 * checkpoint_bytes(shape, Workload(1, n)) for n in (4096, 131072))
    for system in ("memascend", "zero-infinity"):
        peaks = [
            host_memory(shape, system, checkpoint_bytes=size).peak_bytes for size in (short, long)
        ]
        assert (peaks[1] - peaks[0]) / GiB == pytest.approx(62.0)


def test_streaming_needs_no_gradients_of_the_whole_model():
    # Fuyou trains 65B in 128 GB of host memory, where ZeRO-Infinity fails at 13B (section 5.2).
    assert host_memory(preset("gpt3-65b"), "streamed").peak_bytes < 128e9
    assert host_memory(preset("gpt3-13b"), "zero-infinity").peak_bytes > 128e9


def test_the_breakdown_reads_as_a_table():
    text = str(host_memory(preset("qwen2.5-7b"), "memascend"))
    assert "| gradients | 28.4 GiB |" in text
    assert text.splitlines()[-1] == "| peak | 42 GiB |"


def test_nonsense_is_refused():
    shape = preset("gpt2")
    with pytest.raises(ConfigError, match="system is 'zero'; give one of zero-infinity"):
        host_memory(shape, "zero")
    with pytest.raises(ConfigError, match="checkpoint_bytes is -1; give 0 or more"):
        host_memory(shape, "memascend", checkpoint_bytes=-1)
    with pytest.raises(ConfigError, match="blocks_in_flight is 0"):
        weight_buffers(shape, 0)
