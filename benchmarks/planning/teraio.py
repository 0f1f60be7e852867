"""Teraio's figure 3 from our planner: throughput of Llama3-8B over the bandwidth of its SSDs.

The paper (section 2.2) takes measured times of kernels, simulates what moves at a bandwidth, and
adds what training waits for. Its text says that 32 to 48 GB/s for each GPU, in both directions
(section 3.3), are near ideal for its models; the curves are a picture. Here a step of its set-up
(sections 2 and 4.1) is made from the model's shape, planned, and replayed.

`python -m benchmarks.planning.papers --slow` prints the table of docs/planning.md.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from benchmarks.planning.shape_profile import StageStep, step_profile
from offload_strategy.plan_runtime.lifetime_plan import plan_lifetimes
from offload_strategy.plan_runtime.profile import PathRates, Profile
from offload_strategy.plan_runtime.replay import replay
from offload_strategy.planner.hardware import device
from offload_strategy.planner.model_presets import preset
from offload_strategy.planner.saved_tensor_bytes import Workload
from offload_strategy.units import GiB, markdown_table

#: GB/s in each direction.
BANDWIDTHS = (4, 8, 12, 16, 24, 32, 48, 64, 96)
#: Share of the throughput with unlimited memory that counts as near ideal. The paper gives none.
NEAR_IDEAL = 0.95
#: Section 4.1, table 1.
GPU = device("h100-94g-nvl")
#: Section 4.1: all is float32. PyTorch computes that without tensor cores unless it is told
#: otherwise, and TorchTitan does not tell it. H100 NVL data sheet: 60 TFLOPS; 417 of TF32, dense.
_FLOAT32, _TF32 = 60e12, 417.5e12
#: What a GPU sustains of its peak, as in the rest of the analytical front.
_A100 = device("a100-80g")
_SHARE = (_A100.sustained_flops or 0.0) / _A100.flops
#: H100 NVL data sheet: 3.9 TB/s of memory. Adam reads four float32 of a parameter, writes three.
_UPDATE_RATE = 3.9e12 / 28


@dataclass(frozen=True)
class Setting:
    """What a curve of the figure is drawn for, and what differs from the set-up of the paper."""

    name: str
    step: StageStep  # Of one GPU
    limit: int = GPU.memory_bytes
    simplex: bool = False  # Whether both directions share the bandwidth


# Sections 2 and 4.1: two GPUs, a pipeline of two stages (1F1B), batch 16 is the smallest. Of a
# micro-batch the text says two things, of which 4 x 2048 follows (see test_teraio): ZeRO-Infinity
# runs out of memory beyond sequences of 3,072, and no kernel uses more than 14 % of GPU memory.
_STEP = StageStep(
    preset("llama3-8b"),
    Workload(4, 2048, dtype_bytes=4),
    micro_batches=4,
    flops=_FLOAT32 * _SHARE,
    update_rate=_UPDATE_RATE,
    stages=2,
)
_PEAK = replace(_STEP, flops=_FLOAT32)
AS_STATED = Setting("the paper's set-up, 94 GiB", _STEP)
THIRD = Setting("32 GiB, a third of the GPU's memory", _STEP, 32 * GiB)
#: Curves that the tests look at.
TESTED = (AS_STATED, THIRD)


def _longer(step: StageStep, tokens: int) -> StageStep:
    return replace(step, work=Workload(4, tokens, dtype_bytes=4))


#: The same with one assumption changed at a time, and two of them with two.
OTHERS = (
    *(Setting(f"{size} GiB", _STEP, size * GiB) for size in (64, 48, 40, 16)),
    Setting("60 TFLOPS: the peak", _PEAK),
    Setting("268 TFLOPS: TF32", replace(_STEP, flops=_TF32 * _SHARE)),
    *(Setting(f"micro-batch 4 x {n}", _longer(_STEP, n)) for n in (1024, 4096, 8192)),
    Setting("8 micro-batches", replace(_STEP, micro_batches=8)),
    Setting("the second GPU", replace(_STEP, stage=1)),
    Setting("one direction at a time", _STEP, simplex=True),
    Setting("60 TFLOPS and 48 GiB", _PEAK, 48 * GiB),
    Setting("60 TFLOPS and 4 x 8192", _longer(_PEAK, 8192)),
)


@functools.cache
def profile(step: StageStep) -> Profile:
    return step_profile(step)


class Point(NamedTuple):
    """Of a curve: the throughput, of which 1 is that with unlimited memory, and the peak.

    The peak of the replay may be above the limit: where moves cannot be hidden, training does not
    wait for room for what it needs at once.
    """

    throughput: float
    peak_bytes: int


@functools.cache
def point(setting: Setting, bandwidth: float) -> Point:
    """Plan and replay a step at so many GB/s."""
    path = PathRates("SSDs", bandwidth * 1e9, bandwidth * 1e9, simplex=setting.simplex)
    found = replace(profile(setting.step), paths=(path,))
    step = replay(found, plan_lifetimes(found, setting.limit))
    return Point(found.step_seconds / step.step_seconds, step.peak_bytes)


def throughput(setting: Setting, bandwidth: float) -> float:
    return point(setting, bandwidth).throughput


def near_ideal_from(setting: Setting, bandwidths: Sequence[int] = BANDWIDTHS) -> int | None:
    """The least of some bandwidths from which on throughput is near ideal; None for none."""
    least = None
    for bandwidth in reversed(bandwidths):
        if throughput(setting, bandwidth) < NEAR_IDEAL:
            break
        least = bandwidth
    return least


@functools.cache
def least_moved(setting: Setting) -> int:
    """Bytes that must leave where bandwidth is no matter, and come back."""
    ample = replace(profile(setting.step), paths=(PathRates("ample", 1e13, 1e13),))
    return plan_lifetimes(ample, setting.limit).moved_bytes


def all_idle(step: StageStep) -> int:
    """Bytes that leave, and come back, if every tensor does between any two uses."""
    found = profile(step)
    return sum(
        tensor.nbytes * sum(end > begin for begin, end in tensor.idle_periods(found.step_seconds))
        for tensor in found.tensors
    )


def roofline(step: StageStep, moved_bytes: int, bandwidth: float) -> float:
    """Throughput if a step takes as long as computing or moving each way, whichever is longer."""
    seconds = profile(step).step_seconds
    return seconds / max(seconds, moved_bytes / (bandwidth * 1e9))


def cells(values: Sequence[float]) -> list[str]:
    return [f"{value:.2f}" for value in values]


def bandwidth_table() -> str:
    rows = []
    for setting in (*TESTED, *OTHERS):
        found = [throughput(setting, bandwidth) for bandwidth in BANDWIDTHS]
        peak = f"{point(setting, 48).peak_bytes / GiB:.0f} GiB"
        rows.append((setting.name, *cells(found), near_ideal_from(setting) or "more", peak))
    for name, moved in (
        *((f"roofline, {setting.name}", least_moved(setting)) for setting in TESTED),
        ("roofline, all that lies unused leaves", all_idle(_STEP)),
    ):
        found = [roofline(_STEP, moved, bandwidth) for bandwidth in BANDWIDTHS]
        enough = NEAR_IDEAL * moved / profile(_STEP).step_seconds / 1e9
        rows.append((name, *cells(found), f"{enough:.1f}", ""))
    last = [f"{NEAR_IDEAL} from", "peak at 48"]
    return markdown_table(
        " | ".join(["GB/s in each direction", *map(str, BANDWIDTHS), *last]), rows
    )
