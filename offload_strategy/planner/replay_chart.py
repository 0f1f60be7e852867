"""A replay as a picture: what each lane does, and memory beside its limit."""

from __future__ import annotations

from pathlib import Path

from offload_strategy.errors import ConfigError
from offload_strategy.plan_runtime.replay_lanes import StepReplay
from offload_strategy.units import MiB


def draw(found: StepReplay, limit: int, file: Path) -> None:
    """Draw lanes and memory over the time of a step into a svg, png or pdf file.

    `limit` is in bytes. Raises a ConfigError if matplotlib is not installed, or the file cannot be
    written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            "a picture needs matplotlib: pip install 'offload-strategy[bench]', or leave it out"
        ) from error
    lanes = list(dict.fromkeys(span.lane for span in found.spans))
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[max(1, len(lanes)), 4])
    for span in found.spans:
        above.barh(
            lanes.index(span.lane), span.end - span.begin, left=span.begin, height=0.8,
            color=f"C{lanes.index(span.lane)}", edgecolor="white", linewidth=0.3,
        )  # fmt: skip
    above.set_yticks(range(len(lanes)), lanes)
    above.invert_yaxis()
    times = [moment for moment, _ in found.memory]
    below.step(times, [nbytes / MiB for _, nbytes in found.memory], where="post", color="C3")
    below.axhline(limit / MiB, color="black", linestyle="--", linewidth=1)
    below.text(0, limit / MiB, " limit", va="bottom")
    below.set(xlabel="seconds of a step", ylabel="memory, MiB", ylim=(0, None))
    try:
        figure.savefig(file)
    except (OSError, ValueError) as error:
        raise ConfigError(f"the picture {file} cannot be written: {error}") from error
