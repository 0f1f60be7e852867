"""What the papers report, and tables of it beside the analytical front's figures.

`python -m benchmarks.planning.papers` prints the tables of docs/planning.md.
"""

from __future__ import annotations

import dataclasses

from offload_strategy.planner.hardware import SSDTRAIN, device, drive_set, lifespan_seconds
from offload_strategy.planner.model_presets import preset
from offload_strategy.planner.request import Request
from offload_strategy.planner.saved_tensor_bytes import Workload, activation_bytes
from offload_strategy.planner.search.memory_model import GpuModel
from offload_strategy.planner.search.search_result import Candidate
from offload_strategy.planner.search.settings import Settings, weight_buffers
from offload_strategy.planner.step_time import Rates, StageLoad
from offload_strategy.planner.transformer_shape import TransformerShape
from offload_strategy.units import SECONDS_PER_YEAR, GiB, format_size, markdown_table

#: SSDTrain, section IV-A: sequence 1024, float16.
BERT_WORK = Workload(batch=16, sequence=1024)
#: SSDTrain, table III: hidden, layers, GB offloaded, GB by its own model, GB/s of writing.
SSDTRAIN_TABLE_3 = [
    (8192, 4, 10.37, 11.13, 18.0),
    (12288, 3, 12.85, 12.60, 13.8),
    (16384, 2, 10.75, 11.50, 8.76),
]
#: What it leaves on the device: tensors of fewer than 2**20 elements (algorithm 1, line 2). Those
#: of about this size are float32.
SMALL_BYTES = 4 * 2**20
#: SSDTrain, section III-D: rated bytes of the four drives for each device.
FOUR_980 = 4 * 600e12

#: MemAscend, section VI-B2 (figure 13): GiB at the peak, ZeRO-Infinity and MemAscend.
MEMASCEND_FIGURE_13 = {
    "llama3.1-8b": (91.06, 44.71),
    "qwen2.5-7b": (109.06, 43.67),
    "qwen2.5-14b": (174.5, 76.1),
    "qwen2.5-32b": (322.3, 143.6),
}

#: Its section V-A lists the parts for Qwen2.5-7B. States and swap-out: the paper says 11.17 GiB for
#: both without the number of buffers; 5 of float32 and 1 of half precision, each of the largest
#: weight's size, give 11.166.
_STATE_BUFFERS, _SWAP_BUFFERS = 5, 1
#: Of the flat buffer of gradients, while the overflow check runs: a copy, and up to a byte a value.
_CHECK_SHARE = 1.25

#: TFLOPS of 13B on an RTX 4090 by batch and number of drives, as Fuyou's authors publish them for
#: the machine of Fuyou's table 3 (evaluation data of Ratel, the name of later versions).
DRIVES = (1, 2, 3, 6, 12)
THROUGHPUT_OVER_DRIVES = {
    32: (37.5, 64.3, 81.1, 121.7, 142.0),
    48: (53.1, 89.7, 121.7, 146.3, 153.9),
    64: (70.3, 111.7, 136.3, 151.5, 148.2),
}


def required_write_rate(activation_bytes: float, step_seconds: float) -> float:
    """Return the bytes per second at which a device must write to hide its activations.

    They are written during the forward pass, which is assumed to be half of the step (SSDTrain,
    section III-D).
    """
    return activation_bytes / (step_seconds / 2)


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
        saved = activation_bytes(part(self.shape, shared), work) + mask_bytes(self.shape, work)
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


def timed(model: GpuModel, settings: Settings) -> Candidate:
    """Settings, which need not fit, with the time of their step."""
    placement = model.place(settings)
    return Candidate(placement, model.step_time(placement), model.request)


def fuyou(batch: int, drives: int) -> Candidate:
    """Steps of GPT-3 13B as Fuyou makes them: all layers recomputed, everything on the drives.

    Only time is looked at: host memory is so little that nothing has room in it.
    """
    machine = (device("rtx-4090"), drive_set(f"{drives}xP5510"), 7 * GiB)
    settings = Settings(batch, 1, 1024, 40, True, True, "eager")
    return timed(GpuModel(Request(preset("gpt3-13b"), *machine)), settings)


def tflops(found: Candidate) -> float:
    """FLOP that are computed in a second, those computed again counted."""
    shape, work = preset("gpt3-13b"), (found.settings.batch, found.settings.sequence)
    flops = 3 * shape.forward_flops(*work) + shape.layers * shape.layer_flops(*work)
    return flops / found.step.seconds / 1e12


def host_memory(shape: TransformerShape, *, memascend: bool) -> dict[str, int]:
    """Peak host memory by use, in bytes, of MemAscend, or else of ZeRO-Infinity (section V-A).

    Gradients are one flat buffer of 4 bytes a parameter. Weights have buffers of their own sizes in
    MemAscend, and of the largest one's in ZeRO-Infinity; PyTorch there rounds each pinned buffer up
    to the next power of two (section III-B).
    """
    buffers = weight_buffers(shape)
    largest = max(shape.vocabulary * shape.hidden, *shape.layer_matrices())
    weight, state, gradients = 2 * largest, 4 * largest, 4 * shape.parameters
    kept = {"states": _STATE_BUFFERS * state, "swap-out": _SWAP_BUFFERS * weight}
    if memascend:
        exact = sum(size * count for size, count in buffers.items())
        return {"gradients": gradients, "weights in flight": exact, **kept}
    number = sum(buffers.values())
    rounding = _rounding(gradients) + (number + _SWAP_BUFFERS) * _rounding(weight)
    return {
        "gradients": gradients,
        "overflow check": int(_CHECK_SHARE * gradients),
        "weights in flight": max(buffers) * number,
        **kept,
        "rounding of pinned buffers": rounding + _STATE_BUFFERS * _rounding(state),
    }


def _rounding(nbytes: int) -> int:
    return (1 << (nbytes - 1).bit_length()) - nbytes


def _off(ours: float, paper: float, digits: int = 0) -> str:
    percent = round((ours / paper - 1) * 100, digits or None)
    return f"{percent:+.{digits}f} %" if percent else "0 %"


def activations_table() -> str:
    rows = []
    for hidden, layers, measured, estimate, _ in SSDTRAIN_TABLE_3:
        shape = bert(hidden, layers)
        saved = activation_bytes(part(shape, 2), BERT_WORK, SMALL_BYTES)
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
        row: list[object] = [name]
        for memascend, paper in zip((False, True), measured, strict=True):
            parts = host_memory(preset(name), memascend=memascend)
            ours = sum(parts.values()) / GiB
            row += [f"{paper:.2f}", f"{ours:.2f}", f"{paper - ours:.2f}"]
            row.append(f"{parts['weights in flight'] / GiB:.2f}")
        rows.append(row)
    return markdown_table(
        "GiB | ZeRO-Infinity | ours | not counted | of it weights | MemAscend | ours "
        "| not counted | of it weights",
        rows,
    )


def drives_table() -> str:
    rows = []
    for batch, published in THROUGHPUT_OVER_DRIVES.items():
        row = [str(batch)]
        for drives, paper in zip(DRIVES, published, strict=True):
            ours = tflops(fuyou(batch, drives))
            row.append(f"{ours:.0f} / {paper:.0f} ({_off(ours, paper)})")
        rows.append(row)
    return markdown_table("batch | 1 drive | 2 | 3 | 6 | 12", rows)


def machines_table() -> str:
    """MLP-Offload, section 4.4 and table 1: 70 billion parameters, 4 GPUs in each of 2 machines."""
    of_a_machine = dataclasses.replace(preset("llama3-70b"), vocabulary=32000).parameters / 2
    nvme, file_system = (13.5e9, 4.8e9), (6.9e9, 13.7e9)
    both = [sum(rates) for rates in zip(nvme, file_system, strict=True)]
    rows = []
    for what, each, (read, write), paper in (
        ("ZeRO-3: states and float32 gradients, NVMe", 16, nvme, 168.0),
        ("MLP-Offload: states, NVMe alone", 12, nvme, 4.8 * 24),
        ("MLP-Offload: states, NVMe and parallel file system", 12, both, 4.8 * 24),
    ):
        moved = each * of_a_machine
        ours = Rates(read, write).stage("update", StageLoad(read=moved, written=moved)).seconds
        cells = [f"{moved / 1e9:.0f} GB", f"{ours:.0f} s", f"{paper:.0f} s", _off(ours, paper)]
        rows.append((what, *cells))
    return markdown_table("what the drives of a machine hold | each way | ours | paper | ", rows)


def tiers_table() -> str:
    """7 billion parameters on a GPU of 80 GB, four sequences of 2048, all layers recomputed."""
    rows = []
    for where, memory in (("device", 256), ("dram", 256), ("ssd", 5)):
        machine = (device("h100"), drive_set("4xP5510"), memory * GiB)
        model = GpuModel(Request(preset("mistral-7b"), *machine))
        settings = Settings(4, 1, 2048, 32, where != "device", False, "eager")
        found = timed(model, settings)
        fit, step = found.placement.fits[0], found.step
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
    drives_table,
    machines_table,
    tiers_table,
)

if __name__ == "__main__":
    for table in TABLES:
        print(table(), end="\n\n")
