"""What the papers report, and tables of it beside the analytical front's figures.

`python -m benchmarks.planning.papers` prints the tables of docs/planning.md; with
`--slow` Teraio's figure 3 as well (see `teraio`), which takes minutes.
"""

from __future__ import annotations

import dataclasses
import sys

from offload_strategy.planner.analysis import SSDTRAIN, lifespan_seconds, required_write_rate
from offload_strategy.planner.hardware import device, drive_set
from offload_strategy.planner.host_memory_needs import host_memory, weight_buffers
from offload_strategy.planner.model_presets import preset
from offload_strategy.planner.request import SECONDS_PER_YEAR, Request
from offload_strategy.planner.saved_tensor_bytes import Workload, activation_bytes
from offload_strategy.planner.search.gpu_model import GpuModel
from offload_strategy.planner.search.settings import Settings
from offload_strategy.planner.step_estimate import Swap, best_swap, swaps
from offload_strategy.planner.transformer_shape import TransformerShape
from offload_strategy.units import GiB, format_size, markdown_table

#: SSDTrain, section IV-A: sequence 1024, float16.
BERT_WORK = Workload(batch=16, sequence=1024)
#: SSDTrain, table III: hidden, layers, GB offloaded, GB by its own model, GB/s of writing.
SSDTRAIN_TABLE_3 = [
    (8192, 4, 10.37, 11.13, 18.0),
    (12288, 3, 12.85, 12.60, 13.8),
    (16384, 2, 10.75, 11.50, 8.76),
]
#: SSDTrain, section III-D: rated bytes of the four drives for each device.
FOUR_980 = 4 * 600e12

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
    """One of SSDTrain's models, with heads of 128."""
    return TransformerShape("bert", layers, hidden, hidden // 128, 30592, max_positions=1024)


def part(shape: TransformerShape, devices: int) -> TransformerShape:
    """The part of one of several devices in tensor parallelism, which has norms as a whole."""
    return dataclasses.replace(
        shape,
        heads=shape.heads // devices,
        head_size=shape.hidden // shape.heads,
        feed_forward=shape.inner // devices,
    )


def mask_bytes(shape: TransformerShape, work: Workload) -> int:
    """Masks of dropout, of a byte for each element: two of each layer, one of the embedding."""
    return (2 * shape.layers + 1) * work.tokens * shape.hidden


@dataclasses.dataclass(frozen=True)
class Run:
    """A row of Megatron-LM's table 2 (Narayanan et al. 2021), whose runs compute layers again.

    Devices, sequences of a step, TFLOPS of a device and days for 300 billion tokens are the
    table's; layers and hidden (heads of 128 or 160) those of its table 1.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    tensor_parallel: int
    devices: int
    sequences: int
    tflops: float
    days: int

    @property
    def shape(self) -> TransformerShape:
        return TransformerShape("gpt", self.layers, self.hidden, self.heads, 51200)

    @property
    def step_seconds(self) -> float:
        flops = 4 * self.shape.forward_flops(self.sequences, 2048)
        return flops / (self.devices * self.tflops * 1e12)

    def activation_bytes(self, shares_everything: bool = True) -> float:
        """Of one device in a step, its part of the layers of a pipeline counted."""
        work, shared = Workload(1, 2048), 1 if shares_everything else self.tensor_parallel
        saved = activation_bytes(part(self.shape, shared), work, 0) + mask_bytes(self.shape, work)
        return saved * shared * self.sequences / self.devices


# SSDTrain's figure 5 is a picture; its text gives the bounds, the drives and that the data is
# Megatron-LM's, with and without ZeRO-3. That it means this table is our reading of its labels.
_SHAPES = {"175B": (96, 12288, 96), "530B": (105, 20480, 128)}
MEGATRON_RUNS = [
    Run(name, *_SHAPES[name[:4]], *row)
    for name, *row in (
        ("175B, ZeRO-3", 1, 384, 1536, 144, 90),
        ("175B, ZeRO-3", 1, 768, 1536, 88, 74),
        ("175B, ZeRO-3", 1, 1536, 1536, 44, 74),
        ("530B, ZeRO-3", 1, 640, 2560, 138, 169),
        ("530B, ZeRO-3", 1, 1120, 2240, 98, 137),
        ("530B, ZeRO-3", 1, 2240, 2240, 48, 140),
        ("175B, Megatron", 8, 384, 1536, 153, 84),
        ("175B, Megatron", 8, 768, 1536, 149, 43),
        ("175B, Megatron", 8, 1536, 1536, 141, 23),
        ("530B, Megatron", 8, 560, 2240, 171, 156),
        ("530B, Megatron", 8, 1120, 2240, 167, 80),
        ("530B, Megatron", 8, 2240, 2240, 159, 42),
    )
]


def fuyou(
    model: str, batch: int, gpu: str, drives: int = 12, update_rate: float | None = None
) -> Request:
    """GPT-3 on the machine of Fuyou's table 3."""
    machine = (device(gpu), drive_set(f"{drives}xP5510"), 768 * GiB)
    work = Workload(batch, 1024)
    return Request(preset(f"gpt3-{model}"), work, *machine, update_rate=update_rate)


def tflops(found: Swap) -> float:
    """FLOP that are computed in a second, those computed again counted."""
    return found.flops / found.time.seconds / 1e12


def _off(ours: float, paper: float, digits: int = 0) -> str:
    percent = round((ours / paper - 1) * 100, digits or None)
    return f"{percent:+.{digits}f} %" if percent else "0 %"


def activations_table() -> str:
    rows = []
    for hidden, layers, measured, estimate, _ in SSDTRAIN_TABLE_3:
        shape = bert(hidden, layers)
        saved = activation_bytes(part(shape, 2), BERT_WORK)
        both = (size / 1e9 for size in (saved, saved + mask_bytes(shape, BERT_WORK)))
        ours = (f"{size:.2f} GB ({_off(size, measured, 1)})" for size in both)
        name = f"hidden {hidden}, {layers} layers"
        rows.append((name, f"{measured:.2f} GB", f"{estimate:.2f} GB", *ours))
    return markdown_table(
        "BERT | offloaded | SSDTrain's estimate | ours | with masks of dropout", rows
    )


def lifespan_table() -> str:
    rows = []
    for run in MEGATRON_RUNS:
        step, saved = 0.75 * run.step_seconds, run.activation_bytes()
        rows.append(
            (
                run.name,
                run.devices,
                f"{saved / 1e9:.0f} GB",
                f"{step:.1f} s",
                f"{required_write_rate(saved, step) / 1e9:.1f} GB/s",
                f"{lifespan_seconds(FOUR_980, step, saved, SSDTRAIN) / SECONDS_PER_YEAR:.1f} years",
                f"{lifespan_seconds(FOUR_980, step, saved) / 86400:.1f} days",
            )
        )
    return markdown_table(
        "run | devices | activations | step | required | lifespan | as rated", rows
    )


def host_memory_table() -> str:
    rows = []
    for name, measured in MEMASCEND_FIGURE_13.items():
        pool, row = weight_buffers(preset(name)), [name]
        for system, paper in zip(("zero-infinity", "memascend"), measured, strict=True):
            ours = sum(host_memory(preset(name), system).values()) / GiB
            row += [f"{paper:.2f}", f"{ours:.2f}", f"{paper - ours:.2f}"]
        rows.append([*row, f"{pool.one_size_bytes / GiB:.2f}", f"{pool.exact_bytes / GiB:.2f}"])
    return markdown_table(
        "GiB | ZeRO-Infinity | ours | not counted | MemAscend | ours | not counted "
        "| buffers of one size | of their own size",
        rows,
    )


def throughput_table() -> str:
    rows = []
    for model, published in (("13b", THROUGHPUT_13B), ("175b", THROUGHPUT_175B)):
        for batch, paper in published.items():
            found = best_swap(fuyou(model, batch, "rtx-4090"))
            ours, limits = tflops(found), found.time.resource_seconds
            seconds = (
                found.time.stage("forward").seconds,
                *(limits[name] for name in ("backward computation", "update", "backward paths")),
                found.time.seconds,
            )
            cells = (f"{paper:.1f}", f"{ours:.1f} ({_off(ours, paper)})")
            rows.append((model.upper(), batch, *cells, *(f"{time:.1f} s" for time in seconds)))
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
            ours = tflops(next(swaps(fuyou("13b", batch, "4090", drives))))
            row.append(f"{ours:.0f} / {paper:.0f} ({_off(ours, paper)})")
        rows.append(row)
    return markdown_table("batch | 1 drive | 2 | 3 | 6 | 12", rows)


def swap_table() -> str:
    rows = []
    for batch, published in ((32, "0"), (64, "above 0"), (80, "above 0")):
        run = fuyou("13b", batch, "a100-80g")
        found = best_swap(run)
        seconds = (f"{swap.time.seconds:.1f} s" for swap in (next(swaps(run)), found))
        limit = found.limit("backward")
        rows.append((batch, published, f"{found.coefficient:.2f}", limit, *seconds))
    return markdown_table(
        "batch | swap coefficient in figure 9 | ours | limits backward | step at 0 | step", rows
    )


def tiers_table() -> str:
    """7 billion parameters on a GPU of 80 GB, four sequences of 2048, all layers recomputed."""
    rows = []
    for where, memory in (("device", 256), ("dram", 256), ("ssd", 5)):
        machine = (device("h100"), drive_set("4xP5510"), memory * GiB)
        model = GpuModel(Request(preset("mistral-7b"), Workload(1, 1), *machine))
        placed = model.place(Settings(4, 1, 2048, 32, where != "device", False, "eager"))
        fit, step = placed.fits[0], model.step_time(placed)
        moved = ("to_device", "from_device", "read", "written")
        cells = [f"{step.moved_bytes(way) / 1e9:.1f} GB" for way in moved]
        cells = [*cells, f"{step.seconds:.1f} s"] if fit.ok else ["does not fit", *[""] * 4]
        rows.append((where, format_size(fit.needed_bytes), *cells))
    return markdown_table(
        "states | device memory | to the device | from it | read | written | step", rows
    )


TABLES = (
    activations_table,
    lifespan_table,
    host_memory_table,
    throughput_table,
    drives_table,
    swap_table,
    tiers_table,
)

if __name__ == "__main__":
    for table in TABLES:
        print(table(), end="\n\n")
    if "--slow" in sys.argv[1:]:
        from benchmarks.planning.teraio import bandwidth_table

        print(bandwidth_table())
