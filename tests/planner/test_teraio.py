"""Teraio's figure 3 from the analytical front: the paper's set-up, planned and replayed."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks.planning.shape_profile import active_bytes
from benchmarks.planning.teraio import (
    AS_STATED,
    GPU,
    NEAR_IDEAL,
    THIRD,
    Setting,
    cells,
    least_moved,
    point,
    roofline,
    throughput,
)
from offload_strategy.planner.saved_tensor_bytes import Workload

DOCS = Path(__file__).resolve().parents[2] / "docs" / "planning.md"
STEP = AS_STATED.step


def test_active_tensors_are_the_share_that_section_2_1_gives():
    # 1.7 % of GPU memory on average over models and kernels, less than 14 % in any kernel. Ours are
    # 1.2 % and 12.8 %; twice the tokens in a micro-batch would be more than 14 %.
    def shares(tokens: int) -> list[float]:
        work = Workload(4, tokens // 4, dtype_bytes=4)
        stages = (replace(STEP, work=work, stage=stage) for stage in (0, 1))
        return [nbytes / GPU.memory_bytes for one in stages for nbytes in active_bytes(one)]

    ours = shares(STEP.work.tokens)
    assert sum(ours) / len(ours) == pytest.approx(0.0124, abs=0.0005)
    assert max(ours) == pytest.approx(0.128, abs=0.001)
    assert max(shares(2 * STEP.work.tokens)) > 0.14


@pytest.mark.slow
def test_as_stated_the_curve_is_near_ideal_with_32_gb_a_second_and_flat_beyond():
    at = curve(AS_STATED, 8, 16)
    # The text's claim holds: 32 to 48 GB/s are enough, and more can add nothing ...
    assert at[16] > 0.98
    # ... but the curve flattens before 16. So far as the text gives kernels, memory and
    # micro-batches, Llama3-8B does not need 32 GB/s.
    assert at[8] < NEAR_IDEAL < at[16]
    # That is what the paper measures: by figure 7 Llama3-8B is near ideal without host memory on
    # four SSDs, about 16 GB/s for each GPU (section 4.1).
    assert point(AS_STATED, 16).peak_bytes < 1.01 * AS_STATED.limit
    assert cells(at.values()) == documented(AS_STATED.name, at)


@pytest.mark.slow
def test_with_a_third_of_the_memory_the_curve_flattens_between_32_and_48():
    # What memory the paper's model leaves to a step is not given; it moves the knee most.
    at = curve(THIRD, 32, 48)
    assert at[32] < NEAR_IDEAL < at[48], "the knee"
    # Not all can be hidden here: what is needed at once comes though there is no room for it.
    assert point(THIRD, 48).peak_bytes < 1.15 * THIRD.limit
    assert cells(at.values()) == documented(THIRD.name, at)


def curve(setting: Setting, *bandwidths: int) -> dict[int, float]:
    """Throughput by bandwidth; it rises, and is nowhere above the roofline."""
    found = {bandwidth: throughput(setting, bandwidth) for bandwidth in bandwidths}
    shares = list(found.values())
    assert all(after > before - 0.002 for before, after in pairwise(shares))
    moved = least_moved(setting)
    for bandwidth, share in found.items():
        assert share <= roofline(setting.step, moved, bandwidth) + 1e-9
    return found


def documented(name: str, bandwidths: dict[int, float]) -> list[str]:
    """Cells of a row of the table in docs/planning.md."""
    if not DOCS.is_file():
        pytest.skip("needs the source tree")
    lines = [line.strip("| ").split(" | ") for line in DOCS.read_text().splitlines()]
    (head,) = (line for line in lines if line[0] == "GB/s in each direction")
    (row,) = (line for line in lines if line[0] == name)
    return [row[head.index(str(bandwidth))] for bandwidth in bandwidths]
