"""What the papers report, and tables of it beside the analytical front's figures.

`python -m tests.planner.paper_tables` prints the tables of docs/planning.md; with
`--slow` Teraio's figure 3 as well (see `teraio`), which takes minutes.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable

from offload_strategy.planner.endurance import (
    SECONDS_PER_YEAR,
    SSDTRAIN,
    lifespan_seconds,
    required_write_rate,
)
from offload_strategy.planner.hardware import device, drive_set, host
from offload_strategy.planner.host_memory_needs import host_memory, weight_buffers
from offload_strategy.planner.model_presets import preset
from offload_strategy.planner.saved_tensor_bytes import Workload, activation_bytes
from offload_strategy.planner.step_estimate import Machine, Swap, best_swap, swaps
from offload_strategy.planner.step_time import Rates
from offload_strategy.planner.transformer_shape import TransformerShape
from offload_strategy.units import GiB
from tests.planner.zero_subgroups import split_subgroups

#: SSDTrain, section IV-A: sequence 1024, two devices in tensor parallelism, heads of 128, float16.
BERT_WORK = Workload(batch=16, sequence=1024, tensor_parallel=2)
#: SSDTrain, table III: hidden, layers, GB offloaded, GB by its own model, GB/s of writing.
SSDTRAIN_TABLE_3 = [
    (8192, 4, 10.37, 11.13, 18.0),
    (12288, 3, 12.85, 12.60, 13.8),
    (16384, 2, 10.75, 11.50, 8.76),
]
#: SSDTrain, section III-D: four of them for each device.
FOUR_980 = drive_set("4x980-pro-1tb")

#: MemAscend, section VI-B2 (figure 13): GiB at the peak, ZeRO-Infinity and MemAscend.
MEMASCEND_FIGURE_13 = {
    "llama3.1-8b": (91.06, 44.71),
    "qwen2.5-7b": (109.06, 43.67),
    "qwen2.5-14b": (174.5, 76.1),
    "qwen2.5-32b": (322.3, 143.6),
}

#: TFLOPS on an RTX 4090 and twelve drives by batch, as Fuyou's authors publish them for the machine
#: of Fuyou's table 3 (evaluation data of Ratel, the name of later versions).
THROUGHPUT_13B = {8: 42.8, 16: 84.3, 32: 143.1, 64: 155.8, 128: 153.8}
THROUGHPUT_175B = {8: 52.6, 16: 86.9}
#: Likewise of 13B, by batch and number of drives.
DRIVES = (1, 2, 3, 6, 12)
THROUGHPUT_OVER_DRIVES = {
    32: (37.5, 64.3, 81.1, 121.7, 142.0),
    48: (53.1, 89.7, 121.7, 146.3, 153.9),
    64: (70.3, 111.7, 136.3, 151.5, 148.2),
}


def bert(hidden: int, layers: int) -> TransformerShape:
    """One of SSDTrain's models."""
    return TransformerShape("bert", layers, hidden, hidden // 128, 30592, max_positions=1024)


@dataclasses.dataclass(frozen=True)
class Run:
    """A row of Megatron-LM's table 2 (Narayanan et al. 2021), whose runs compute layers again.

    Devices, sequences of a step, TFLOPS of a device and days for 300 billion tokens are the
    table's; layers, hidden and heads those of its table 1.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    devices: int
    sequences: int
    tflops: float
    days: int
    tensor_parallel: int

    @property
    def shape(self) -> TransformerShape:
        return TransformerShape("gpt", self.layers, self.hidden, self.heads, 51200)

    @property
    def step_seconds(self) -> float:
        flops = 4 * self.shape.forward_flops(self.sequences, 2048)
        return flops / (self.devices * self.tflops * 1e12)

    def activation_bytes(self, shares_everything: bool = True) -> float:
        """Of one device in a step, its part of the layers of a pipeline counted."""
        work = Workload(
            1,
            2048,
            tensor_parallel=self.tensor_parallel,
            sequence_parallel=shares_everything,
            dropout=True,
        )
        of_a_sequence = activation_bytes(self.shape, work, 0) * self.tensor_parallel
        return of_a_sequence * self.sequences / self.devices


def _runs(
    name: str, size: tuple[int, int, int], rows: Iterable[tuple[int, int, float, int]], tp: int
) -> list[Run]:
    return [Run(name, *size, *row, tp) for row in rows]


_175B, _530B = (96, 12288, 96), (105, 20480, 128)
# SSDTrain's figure 5 is a picture; its text gives the bounds, the drives and that the data is
# Megatron-LM's, with and without ZeRO-3. That it means this table is our reading of its labels.
MEGATRON_RUNS = [
    *_runs(
        "175B, ZeRO-3",
        _175B,
        [(384, 1536, 144, 90), (768, 1536, 88, 74), (1536, 1536, 44, 74)],
        1,
    ),
    *_runs(
        "530B, ZeRO-3",
        _530B,
        [(640, 2560, 138, 169), (1120, 2240, 98, 137), (2240, 2240, 48, 140)],
        1,
    ),
    *_runs(
        "175B, Megatron",
        _175B,
        [(384, 1536, 153, 84), (768, 1536, 149, 43), (1536, 1536, 141, 23)],
        8,
    ),
    *_runs(
        "530B, Megatron",
        _530B,
        [(560, 2240, 171, 156), (1120, 2240, 167, 80), (2240, 2240, 159, 42)],
        8,
    ),
]


def fuyou_machine(gpu: str, drives: int = 12, update_rate: float | None = None) -> Machine:
    """The machine of Fuyou's table 3."""
    card, drive = device(gpu), drive_set("P5510").drive
    rates = Rates(drive.read, drive.write, drives, card.link)
    rate = update_rate or host("fuyou").update_rate
    assert card.sustained_flops is not None
    assert rate is not None
    return Machine(card.sustained_flops, rate, rates)


def fuyou_swap(model: str, batch: int, machine: Machine) -> Swap:
    """The best step that Fuyou's equations see for GPT-3."""
    return best_swap(preset(f"gpt3-{model}"), Workload(batch, 1024), machine)


def tflops(found: Swap) -> float:
    """FLOP that are computed in a second, those computed again counted."""
    return found.flops / found.time.seconds / 1e12


def _off(ours: float, paper: float) -> str:
    percent = round((ours / paper - 1) * 100)
    return f"{percent:+d} %" if percent else "0 %"


def markdown_table(head: str, rows: Iterable[Iterable[object]]) -> str:
    columns = head.count("|") + 1
    lines = [f"| {head} |", "|---" * columns + "|"]
    return "\n".join([*lines, *("| " + " | ".join(map(str, row)) + " |" for row in rows)])


def activations_table() -> str:
    rows = []
    masked = dataclasses.replace(BERT_WORK, dropout=True)
    for hidden, layers, measured, estimate, _ in SSDTRAIN_TABLE_3:
        ours, most = (activation_bytes(bert(hidden, layers), w) / 1e9 for w in (BERT_WORK, masked))
        rows.append(
            (
                f"hidden {hidden}, {layers} layers",
                f"{measured:.2f} GB",
                f"{estimate:.2f} GB",
                f"{ours:.2f} GB ({(ours / measured - 1) * 100:+.1f} %)",
                f"{most:.2f} GB ({(most / measured - 1) * 100:+.1f} %)",
            )
        )
    return markdown_table(
        "BERT | offloaded | SSDTrain's estimate | ours | with masks of dropout", rows
    )


def lifespan_table() -> str:
    rows = []
    for run in MEGATRON_RUNS:
        step, saved = 0.75 * run.step_seconds, run.activation_bytes()
        rated = lifespan_seconds(FOUR_980.endurance_bytes or 0, step, saved)
        assumed = lifespan_seconds(FOUR_980.endurance_bytes or 0, step, saved, SSDTRAIN)
        rows.append(
            (
                run.name,
                run.devices,
                f"{saved / 1e9:.0f} GB",
                f"{step:.1f} s",
                f"{required_write_rate(saved, step) / 1e9:.1f} GB/s",
                f"{assumed / SECONDS_PER_YEAR:.1f} years",
                f"{rated / 86400:.1f} days",
            )
        )
    return markdown_table(
        "run | devices | activations | step | required | lifespan | as rated", rows
    )


def host_memory_table() -> str:
    rows = []
    for name, measured in MEMASCEND_FIGURE_13.items():
        row = [name]
        for system, paper in zip(("zero-infinity", "memascend"), measured, strict=True):
            ours = host_memory(preset(name), system).peak_bytes / GiB
            row += [f"{paper:.2f}", f"{ours:.2f}", f"{paper - ours:.2f}"]
        pool = weight_buffers(preset(name))
        row += [f"{pool.one_size_bytes / GiB:.2f}", f"{pool.exact_bytes / GiB:.2f}"]
        rows.append(row)
    return markdown_table(
        "GiB | ZeRO-Infinity | ours | not counted | MemAscend | ours | not counted "
        "| buffers of one size | of their own size",
        rows,
    )


def throughput_table() -> str:
    rows = []
    for model, published in (("13b", THROUGHPUT_13B), ("175b", THROUGHPUT_175B)):
        for batch, paper in published.items():
            found = fuyou_swap(model, batch, fuyou_machine("rtx-4090"))
            ours = tflops(found)
            limits = found.time.resource_seconds
            rows.append(
                (
                    model.upper(),
                    batch,
                    f"{paper:.1f}",
                    f"{ours:.1f} ({_off(ours, paper)})",
                    f"{found.time.stage('forward').seconds:.1f} s",
                    f"{limits['backward computation']:.1f} s",
                    f"{limits['update']:.1f} s",
                    f"{limits['backward paths']:.1f} s",
                    f"{found.time.seconds:.1f} s",
                )
            )
    return markdown_table(
        "GPT-3 | batch | TFLOPS published | ours | forward | backward computes | update "
        "| paths in backward | step",
        rows,
    )


def drives_table() -> str:
    rows = []
    for batch, published in THROUGHPUT_OVER_DRIVES.items():
        row = [str(batch)]
        for drives, paper in zip(DRIVES, published, strict=True):
            work = Workload(batch, 1024)
            ours = tflops(next(swaps(preset("gpt3-13b"), work, fuyou_machine("4090", drives))))
            row.append(f"{ours:.0f} / {paper:.0f} ({_off(ours, paper)})")
        rows.append(row)
    return markdown_table("batch | 1 drive | 2 | 3 | 6 | 12", rows)


def swap_table() -> str:
    rows = []
    for batch in (32, 64, 80):
        found = fuyou_swap("13b", batch, fuyou_machine("a100-80g"))
        least = next(swaps(preset("gpt3-13b"), Workload(batch, 1024), fuyou_machine("a100-80g")))
        rows.append(
            (
                batch,
                "0" if batch == 32 else "above 0",
                f"{found.coefficient:.2f}",
                found.limit("backward"),
                f"{least.time.seconds:.1f} s",
                f"{found.time.seconds:.1f} s",
            )
        )
    return markdown_table(
        "batch | swap coefficient in figure 9 | ours | limits backward | step at 0 | step", rows
    )


def subgroups_table() -> str:
    rows = []
    for count in (3, 10, 100):
        by_smaller, by_reading = (
            split_subgroups(count, rates) for rates in ([5.3, 3.6], [6.9, 3.6])
        )
        rows.append((count, *(f"{a} : {b}" for a, b in (by_smaller, by_reading))))
    return markdown_table("subgroups | by 5.3 and 3.6 GB/s | by 6.9 and 3.6 GB/s", rows)


TABLES = (
    activations_table,
    lifespan_table,
    host_memory_table,
    throughput_table,
    drives_table,
    swap_table,
    subgroups_table,
)

if __name__ == "__main__":
    for table in TABLES:
        print(table(), end="\n\n")
    if "--slow" in sys.argv[1:]:
        from tests.planner.teraio import bandwidth_table

        print(bandwidth_table())
