"""The contenders of each table, and which tables are selected."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks.allocators import Allocator
from benchmarks.io.results import Context
from benchmarks.optimizer.contenders import (
    DEEPSPEED,
    DEEPSPEED_DEFAULTS,
    DEEPSPEED_HOST,
    FILES,
    MOVING,
    PLAIN,
    RECOMPUTE,
    TENSORNVME,
    Ours,
    deepspeed_options,
    plain_options,
    preset,
    simple_options,
)
from benchmarks.optimizer.deepspeed_peer import Settings
from benchmarks.optimizer.tasks import SHAPES, TINY, RandomTokens
from offload_strategy.config import presets

EAGER, COMMIT = "eager, with activations", "commit, with activations"
EAGER_STATES, COMMIT_STATES = "eager, states only", "commit, states only"
EAGER_BF16, COMMIT_BF16 = "eager, bfloat16", "commit, bfloat16"
EAGER_HOST, COMMIT_HOST = "eager, half on the host", "commit, half on the host"

#: memory.pinned: `eager` is for the least memory; `commit` has what it has by default.
_PINNED = {"eager": "160MiB", "commit": "512MiB"}


def _ours(overlap: str, **options: Any) -> Ours:
    return Ours(overlap, pinned=_PINNED[overlap], **options)


OURS = {
    EAGER: _ours("eager", activations=True),
    COMMIT: _ours("commit", activations=True),
    EAGER_STATES: _ours("eager"),
    COMMIT_STATES: _ours("commit"),
    EAGER_BF16: _ours("eager", activations=True, state_dtype="bfloat16"),
    COMMIT_BF16: _ours("commit", activations=True, state_dtype="bfloat16"),
    EAGER_HOST: _ours("eager", activations=True, host_share=0.5),
    COMMIT_HOST: _ours("commit", activations=True, host_share=0.5),
}
#: What each is, for the table.
MEANING = {
    PLAIN: "torch.optim.AdamW(fused=True), zero_grad(set_to_none=True), everything in memory",
    DEEPSPEED: "ZeRO-3 on the CPU accelerator, optimizer on NVMe, its own CPUAdam; with the "
    "fastest settings of several that were tried",
    DEEPSPEED_DEFAULTS: "the same with its own defaults, but for buffer_count 16 and pipelining",
    EAGER: "states and saved activations on the disk, overlap: eager",
    COMMIT: "the same, overlap: commit",
    EAGER_STATES: "states on the disk, activations in memory",
    COMMIT_STATES: "the same, overlap: commit",
    EAGER_BF16: "as the first of ours, states in bfloat16",
    COMMIT_BF16: "the same, overlap: commit",
    EAGER_HOST: "as the first of ours, a dram tier for half of the states' bytes in front",
    COMMIT_HOST: "the same, overlap: commit",
    MOVING: "plain PyTorch, while a process that computes nothing reads and writes in every step "
    "as many bytes as the first of ours does: what the machine takes for that",
    RECOMPUTE: "torch.utils.checkpoint around every block, non-reentrant",
    FILES: "saved_tensors_hooks with torch.save and torch.load, a file each (the tutorial's)",
    TENSORNVME: "its DiskOffloader (libaio), one parameter's states read ahead, AdamW(fused=True)",
    DEEPSPEED_HOST: "ZeRO-3 on the CPU accelerator, optimizer in host memory, its own CPUAdam",
    **{preset(name): f"OffloadEngine('{name}'), on the same disk" for name in presets()},
}
#: All at once would not fit into memory: each session has those that are compared.
FIRST, SECOND = "compared with DeepSpeed", "with less memory and bfloat16"
THIRD = "with a host tier"
DEFAULTS = "compared with DeepSpeed's defaults"
STATES = "compared with DeepSpeed, states only"
OWN_ALLOCATOR = "with glibc's allocator"
CONCURRENT_IO = "compared with concurrent I/O"
OTHERS, PRESETS = "other ways", "our presets"
SESSIONS = {
    FIRST: (PLAIN, DEEPSPEED, EAGER, COMMIT),
    DEFAULTS: (PLAIN, DEEPSPEED_DEFAULTS, EAGER, COMMIT, EAGER_STATES),
    STATES: (PLAIN, DEEPSPEED, EAGER_STATES),
    OWN_ALLOCATOR: (PLAIN, DEEPSPEED, EAGER, EAGER_STATES),
    CONCURRENT_IO: (PLAIN, MOVING, EAGER, EAGER_STATES),
    SECOND: (PLAIN, EAGER_STATES, COMMIT_STATES, EAGER_BF16, COMMIT_BF16),
    THIRD: (PLAIN, EAGER, EAGER_HOST, COMMIT_HOST),
    OTHERS: (PLAIN, RECOMPUTE, FILES, DEEPSPEED_HOST, TENSORNVME),
    PRESETS: (PLAIN, *(preset(name) for name in presets())),
}
#: Everybody has the best allocator, but for sessions that show what others do.
ALLOCATORS = {OWN_ALLOCATOR: Allocator.AS_IT_COMES}
#: Those of which the table consists, and those of the contest of all: of every model, of one.
TABLE = (FIRST, DEFAULTS, STATES, OWN_ALLOCATOR, SECOND, THIRD)
CONTEST = (FIRST, DEFAULTS)
CONTEST_OF_ONE = (OWN_ALLOCATOR, CONCURRENT_IO, OTHERS, PRESETS)


@dataclass
class Choice:
    """What is trained and by whom, as the command line says.

    Args:
        models: of `SHAPES`.
        contenders: of those of `SESSIONS`; plain PyTorch always takes part.
        pinned: bytes of our staging buffers; None for what each contender has.
        budget: of our activations.
        deepspeed: its settings; None to search for the fastest.
        searched: what the search has tried, by model.
        fastest: of its settings, by model, in the order in which they were searched.
        left_out: sessions without the peer that they are for, and why.
    """

    models: Sequence[str] = tuple(SHAPES)
    contenders: Sequence[str] = tuple(MEANING)
    pinned: str | None = None
    budget: str = Ours.budget
    deepspeed: Settings | None = None
    searched: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    fastest: dict[str, Settings] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)

    def task(self, model: str, context: Context) -> RandomTokens:
        """The task of a model: batches of two sequences of 256 tokens."""
        return RandomTokens(TINY if context.quick else SHAPES[model])

    def options(self, name: str) -> dict[str, Any]:
        """Options of one of ours, or of plain PyTorch."""
        if name == PLAIN:
            return plain_options()
        if name == DEEPSPEED_HOST:
            return deepspeed_options(Settings(on_host=True))
        if name == DEEPSPEED_DEFAULTS:
            return {**deepspeed_options(Settings()), "contender": name}
        return self.ours(name).options() if name in OURS else simple_options(name)

    def ours(self, name: str) -> Ours:
        """One of `OURS`, as chosen."""
        setting = OURS[name]
        return replace(setting, pinned=self.pinned or setting.pinned, budget=self.budget)

    def meaning(self, name: str) -> str:
        """What a contender is."""
        pinned = f", memory.pinned {self.ours(name).pinned}" if name in OURS else ""
        return MEANING[name] + pinned
