"""What the package and its planner predict, beside what was measured; needs no device."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.gpu import contenders as who
from benchmarks.gpu.contests import LARGE, Contest, Found
from benchmarks.gpu.training import median
from benchmarks.io.results import Result, markdown_table
from benchmarks.planning.papers import timed
from offload_strategy.planner.hardware import device, drive_set
from offload_strategy.planner.request import Request
from offload_strategy.planner.search.memory_model import GpuModel
from offload_strategy.planner.search.settings import Settings
from offload_strategy.planner.step_time import Rates, StageLoad
from offload_strategy.planner.transformer_shape import TransformerShape
from offload_strategy.units import GiB

#: Rows of a comparison that are shown; the others are in the file.
_SHOWN = ("step", "peak of memory", "read in a step", "written in a step")
#: Bytes of a parameter: both moments and a copy in float32; a weight in bfloat16.
STATE_BYTES, NARROW_BYTES = 12, 2
#: Of device memory: allocators leave gaps.
_SHARE = 0.9
CARD = "7 billion parameters on a card of 80 GB, by the planner's table of hardware"


def compare(parts: Mapping[str, Any]) -> Found:
    """Compare in all parts that trained, by name; then place the states of a large model."""
    found, shown = Found(), []
    rows = found.figures["comparisons"] = list(_rows(parts))
    for row in rows:
        if "reason" in row:
            shown.append((row["run"], row["reason"], "", "", ""))
        elif row["part"] in _SHOWN and None not in (row["predicted"], row["observed"]):
            figures = (row["predicted"], row["observed"], row["ratio"] or "")
            shown.append((row["run"], f"{row['part']}, {row['unit']}", *figures))
    ratios = [row["ratio"] for row in rows if row.get("part") == "step" and row["ratio"]]
    if ratios:
        told = "steps, observed over predicted: the median of all runs"
        middle = statistics.median(ratios)
        found.claims.append(Result(told, middle, 1.0, "", middle, 0.0, judged=False))
    header = ("", "", "predicted", "observed", "observed over predicted")
    found.texts["Predicted and observed steps"] = markdown_table(header, shown)
    cells = found.figures[CARD] = [tiers(*one) for one in (("device", "dram"), ("dram",), ("ssd",))]
    found.texts[CARD] = markdown_table(list(cells[0]), [list(row.values()) for row in cells])
    return found


def _rows(parts: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    contests = (
        (title, contest)
        for part in parts.values()
        for title, contest in part["figures"].items()
        if isinstance(contest, Mapping) and "contenders" in contest
    )
    for title, contest in contests:
        for name, run in contest["contenders"].items():
            prediction, told = run.get("prediction", {}), f"{title}: {name}"
            if "reason" in prediction:
                yield {"run": told, "reason": prediction["reason"]}
            for row in prediction.get("parts", ()):
                yield {"run": told, **row}


# ---------------------------------------------------------------------- the tiers of 7 billion
def tiers(*names: str) -> dict[str, Any]:
    """Where float32 states are, and what a step moves, by the planner's search on a card of 80 GB.

    All layers are computed again in backward, and updates are eager, on the device. A device tier
    takes the memory that is left over.
    """
    layers, width, heads = LARGE.job.shape.layers, LARGE.job.shape.width, LARGE.job.shape.heads
    batch, sequence = LARGE.job.batch, LARGE.job.shape.sequence
    shape = TransformerShape("gpt", layers, width, heads, LARGE.job.shape.vocabulary, tied=False,
                             max_positions=sequence)  # fmt: skip
    host = 5 * GiB if names == ("ssd",) else 256 * GiB
    card = Request(shape, device("h100-80g"), drive_set("p5510"), host)
    settings = Settings(batch, 1, sequence, layers, offloads_optimizer=True, overlap="eager")
    candidate = timed(GpuModel(card), settings)
    placement, found = candidate.placement, candidate.as_dict()
    memory = placement.fits[0]
    left_over = int(_SHARE * memory.available_bytes) - memory.needed_bytes
    states = placement.split("states")
    on_device = min(states.total_bytes, left_over) if "device" in names else 0
    return {
        "states go to": ", then ".join(names),
        "GB on the device": on_device / 1e9,
        "in dram": (states.host_bytes - on_device) / 1e9,
        "on the ssd": states.ssd_bytes / 1e9,
        "GB over the link in a step": found["link_bytes_per_step"] / 1e9 - 2 * on_device / 1e9,
        "read from the ssd": found["read_bytes_per_step"] / 1e9,
        "written": found["written_bytes_per_step"] / 1e9,
        "step, s, without a device tier": found["step_seconds"],
    }


# ---------------------------------------------------------------------- the roofline
def roofline(found: Found, contest: Contest, rates: Mapping[str, Any]) -> None:
    """Add to what was found of a large model how near its steps come to the machine's best.

    What crosses the link is counted from the sizes: states both ways, activations that left, and
    streamed weights twice to the device and once back. What the disk moved was measured.
    """
    link = min(rates["to_device"], rates["to_host"])
    machine = Rates(rates["read"], rates["write"], link)
    rows = found.figures[contest.title]["contenders"]
    for name in (name for name in who.OURS if name in rows):
        row, tokens = rows[name], contest.job.tokens
        weights = NARROW_BYTES * row["parameters"] if name == who.LARGE_STREAMED else 0
        states = STATE_BYTES * row["parameters"] + median(row, "left_bytes")
        read, written = (
            sum(
                median(row, f"offload/{c}/{v}_bytes")
                for c in ("activations", "optimizer", "parameters")
            )
            for v in ("read", "written")
        )
        computing = 6.0 * row["parameters"] * tokens / max(rates["operations"].values())
        load = StageLoad(computing, states + 2 * weights, states + weights, read, written)
        best, seconds = machine.stage("step", load), median(row, "seconds")
        row["roofline"] = {
            "load": load._asdict(), "seconds": dict(best.limits), "limited_by": best.limit,
            "share": best.seconds / seconds,
        }  # fmt: skip
        found.claims.append(
            Result(
                f"{contest.title}: {name}: beside the roofline", tokens / seconds,
                tokens / best.seconds, "tokens/s", best.seconds / seconds, 0.0, judged=False,
            )
        )  # fmt: skip
