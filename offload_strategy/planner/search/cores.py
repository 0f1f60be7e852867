"""A machine that computes on its own cores: one memory for everything, drives, and no link.

[Note: what the cores take]
The seconds of a pass are those of its FLOP and a share that goes with the parameters of the layers
alone, however few tokens there are: weights come from memory, and gradients go there. Both come
from two runs of one layer, as does the rate of updates from an optimizer that has everything in
memory. The gradient of an embedding is filled with zeros and then read. Offload
costs computing time as well (`cost_model`, [Note: one set of cores]). Of a step of 4 seconds of a
GPT with 13 layers whose 661 MB leave and come back, 0.1 s are hooks, and 0.1 s are lost to threads
that move bytes (docs/activations.md): that is where `HOOK_SECONDS` and `TOLL` come from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from offload_strategy.errors import ConfigError
from offload_strategy.planner.hardware import Drives
from offload_strategy.planner.saved_tensor_bytes import Workload
from offload_strategy.planner.search.choice import Choice
from offload_strategy.planner.step_time import Rates
from offload_strategy.planner.transformer_shape import TransformerShape, positive
from offload_strategy.units import format_size

#: Weights, gradients, each moment, and activations.
ELEMENT_BYTES = 4
#: Of a saved tensor that passes the hooks, forward and backward: 0.1 s for 13 layers of 11.
HOOK_SECONDS = 0.1 / (13 * 11)
#: Seconds that computation loses for a byte that moves: 0.1 s for 661 MB there and back.
TOLL = 0.1 / (2 * 661e6)
#: Share of memory that training is planned within; the count is not exact.
MEMORY_SHARE = 0.95
#: Share of memory that the plan of a run keeps to, which looks at what there really is.
LIMIT_SHARE = 0.96
_GB = 1e9


def moment_bytes(choice: Choice) -> int:
    """Bytes of both moments for a parameter; weights are in float32 anyway and have no copy."""
    return choice.state_bytes - ELEMENT_BYTES


@dataclass(frozen=True, slots=True)
class Cores:
    """What all cores of a machine do together in float32; see [Note: what the cores take].

    Args:
        flops: FLOP/s of a layer's forward and backward pass.
        update_rate: parameters that the optimizer updates in a second.
        copy_rate: bytes that are copied within memory in a second.
        process_bytes: of a process that trains, without the model and what belongs to it.
        pass_seconds: of a forward and a backward pass for each parameter of a layer, beside the
            FLOP.
        toll: seconds that computation loses for a byte that a path moves meanwhile.
        sources: where figures are from, by field.

    Raises:
        ConfigError: if a rate is not above 0, or another figure is below.
    """

    flops: float
    update_rate: float
    copy_rate: float
    process_bytes: int
    pass_seconds: float = 0.0
    toll: float = TOLL
    sources: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("flops", "update_rate", "copy_rate"):
            positive(f"cores: {name}", getattr(self, name))
        for name in ("process_bytes", "pass_seconds", "toll"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"cores: {name} is {getattr(self, name)}; give 0 or more")

    def copy_seconds(self, parameters: int) -> float:
        """Of a copy of so many parameters, or of what belongs to each."""
        return ELEMENT_BYTES * parameters / self.copy_rate


@dataclass(frozen=True, slots=True)
class CpuRequest:
    """A run to look at, on a machine that trains on its CPU in float32.

    Args:
        shape: of the model.
        cores: of the machine.
        drives: that hold what leaves memory.
        memory_bytes: that the process may take.
        duplex: whether a drive reads and writes at its rates at the same time; else one after the
            other.

    Raises:
        ConfigError: if there is no memory.
    """

    shape: TransformerShape
    cores: Cores
    drives: Drives
    memory_bytes: int
    duplex: bool = False

    def __post_init__(self) -> None:
        positive("memory_bytes", self.memory_bytes)

    @property
    def work(self) -> Workload:
        """Of one pass, but for batch and sequence."""
        return Workload(1, 1, dtype_bytes=ELEMENT_BYTES)

    @property
    def room_bytes(self) -> int:
        """Of memory, that training may take: process included."""
        return int(MEMORY_SHARE * self.memory_bytes)

    @property
    def limit_bytes(self) -> int:
        """Of memory, that a plan keeps to in a run (`planning.device_memory`)."""
        return int(LIMIT_SHARE * self.memory_bytes)

    def paths_seconds(self, read_bytes: float, written_bytes: float) -> float:
        """What the drives take for so many bytes."""
        drive = self.drives.drive
        rates = Rates(drive.read, drive.write, self.drives.count)
        if self.duplex:
            return max(rates.paths_seconds(read_bytes, 0), rates.paths_seconds(0, written_bytes))
        return rates.paths_seconds(read_bytes, written_bytes)

    def assumptions(self) -> list[str]:
        """What the figures rest on, a sentence each."""
        cores, drive = self.cores, self.drives.drive
        drives = f" ({drive.sources['read_GBps']})" if drive.sources.get("read_GBps") else ""
        return [
            f"cores: {cores.flops / _GB:.3g} GFLOPS in float32 in a transformer's layer, and "
            f"{cores.pass_seconds * _GB:.2g} s for each billion parameters a pass"
            f"{self._source('flops')}",
            f"updates: {cores.update_rate / _GB:.2g} billion parameters in a second"
            f"{self._source('update_rate')}; copies within memory: {cores.copy_rate / _GB:.3g} GB/s"
            f"{self._source('copy_rate')}",
            f"drive: {drive.read / _GB:.3g} GB/s read, {drive.write / _GB:.3g} GB/s written, "
            f"{'both at once' if self.duplex else 'one at a time'}{drives}",
            f"offload takes {HOOK_SECONDS * 1e3:.1f} ms for each tensor that autograd saves, and "
            f"computing loses {cores.toll * _GB:.3g} s for each GB that moves"
            f"{self._source('toll')}",
            "everything overlaps as well as it can, but for updates and computation, which share "
            "the cores; measured steps are longer",
            "one memory for all, in float32: 16 bytes a parameter with gradients and both moments "
            f"of Adam, activations, and {format_size(cores.process_bytes)} of the process itself"
            f"{self._source('process_bytes')}; {MEMORY_SHARE:.0%} of it is used",
        ]

    def _source(self, name: str) -> str:
        source = self.cores.sources.get(name)
        return f" ({source})" if source else ""
