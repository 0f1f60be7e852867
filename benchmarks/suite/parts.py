"""What the suite runs: benchmarks, with the options of a full and of a quick run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Part:
    """One benchmark.

    Args:
        name: of its file of figures.
        title: on the page.
        module: that is run.
        options: of a full run.
        quick: of a quick one.
        minutes: that a full and a quick run may take on two cores; then they are ended.
        note: for the page, what is left out and why.
        asked: whether it runs only when it is named, as all of them would take too long.
    """

    name: str
    title: str
    module: str
    options: Sequence[str] = ()
    quick: Sequence[str] = ("--quick",)
    minutes: tuple[float, float] = (15.0, 4.0)
    note: str = ""
    asked: bool = False

    def command(self, *, quick: bool) -> list[str]:
        """The words after `python`."""
        return ["-m", self.module, *(self.quick if quick else self.options)]


#: In the order of the page. What is slow on two cores is left out of a quick run by its options.
PARTS = (
    Part(
        "contenders",
        "All contenders that train a GPT",
        "benchmarks.optimizer",
        ("--lines", "contest", "--repeats", "2"),
        ("--lines", "contest", "--quick"),
        (33.0, 7.0),  # on a fresh machine, five of them go to compiling DeepSpeed's operators
        "All contenders preload the allocator named below, as docs/activations.md recommends, "
        "except in the runs with glibc's allocator. FSDP2's `CPUOffloadPolicy` keeps shards in "
        "host memory, where they are anyway if the host computes, so it takes part on a GPU only "
        "(`python -m benchmarks.gpu`).",
    ),
    Part(
        "ablation",
        "Ablation: what each optimization of the optimizer gains",
        "benchmarks.optimizer",
        ("--lines", "ablation", "--repeats", "3"),
        ("--lines", "ablation", "--quick"),
        (40.0, 4.0),
        asked=True,
    ),
    Part(
        "optimizer",
        "Every setting of the optimizer compared with plain PyTorch and DeepSpeed",
        "benchmarks.optimizer",
        ("--lines", "table", "prediction", "--repeats", "2"),
        ("--lines", "table", "prediction", "--quick"),
        (75.0, 8.0),
        asked=True,
    ),
    Part(
        "clipping",
        "The cost of clipping for updates that run ahead",
        "benchmarks.optimizer",
        ("--lines", "clipping"),
        ("--lines", "clipping", "--quick"),
        (40.0, 4.0),
        asked=True,
    ),
    Part(
        "frameworks",
        "Unchanged scripts: Transformers' Trainer and Lightning",
        "benchmarks.frameworks",
        ("--repeats", "1"),
        ("--quick",),
        (6.0, 1.0),
    ),
    Part(
        "activations",
        "Activations: kept, recomputed, or offloaded",
        "benchmarks.activations",
        ("--lines", "curve", "--processes", "1", "--repeats", "3", "--batches", "4"),
        ("--lines", "curve", "--quick", "--processes", "1", "--repeats", "2", "--batches", "2"),
        (13.0, 1.5),
    ),
    Part(
        "planning",
        "Predicted and measured steps",
        "benchmarks.planning",
        ("--lines", "predict"),
        ("--lines", "predict", "--quick"),
        (14.5, 2.5),
    ),
    Part(
        "io",
        "I/O only, compared with fio and others",
        "benchmarks.io",
        ("bulk", "small", "--repeats", "3"),
        ("bulk", "--quick"),
        (4.0, 1.5),
    ),
    Part(
        "distributed",
        "Four ranks on one path",
        "benchmarks.distributed",
        ("--lines", "path", "--repeats", "3"),
        ("--lines", "path", "--quick"),
        (4.0, 1.5),
    ),
)
