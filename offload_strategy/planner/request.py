"""A model, and the figures of machines: with GPUs, or one that trains on its CPU.

A machine without a GPU has one memory for everything, drives, and no link.

docs/planning.md tells what is shared in a cluster, and what a pass costs on cores.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

from offload_strategy.config.value_types import StateType
from offload_strategy.errors import ConfigError
from offload_strategy.planner.hardware import Device, Drive
from offload_strategy.planner.hardware import device as named_device
from offload_strategy.planner.step_time import Rates
from offload_strategy.planner.transformer_shape import TransformerShape, positive, require_positive
from offload_strategy.units import GiB, format_size

#: Bytes per parameter of both moments of Adam next to a float32 copy of the weights.
STATE_BYTES: Mapping[StateType, int] = {"float32": 12, "bfloat16": 8}
#: Bytes of an element of weights, gradients and activations on a GPU.
WEIGHT_BYTES = 2
#: Bytes of an element of weights, gradients, moments and activations on the CPU.
ELEMENT_BYTES = 4
#: Seconds per saved tensor in the hooks, forward and backward: 0.1 s for 13 layers of 11.
HOOK_SECONDS = 0.1 / (13 * 11)
#: Seconds of computation that are lost for a byte that moves: 0.1 s for 661 MB in both directions.
IO_OVERHEAD = 0.1 / (2 * 661e6)
#: Share of device memory up to which activations stay: the count is not exact, and allocators
#: leave gaps.
DEVICE_SHARE = 0.9
#: Share of host memory that training may take; the rest is for the system and the data.
_HOST_SHARE = 0.9
#: Interpreter, libraries and device contexts: at most 1.8 GiB in MemAscend's measurements.
_PROCESS_BYTES = 2 * GiB
#: Share of the memory of a machine without a GPU that the search plans for.
MEMORY_SHARE = 0.95
#: Share that the plan of a run keeps to (`planning.device_memory`): it knows what there really is.
LIMIT_SHARE = 0.96
#: The device whose sustained share of its peak is assumed for devices without a measurement.
_YARDSTICK = "a100-80g-pcie"


@dataclass(frozen=True, slots=True)
class Request:
    """A model and a machine with a GPU, or several of both."""

    on_cpu: ClassVar[bool] = False
    shape: TransformerShape
    device: Device
    drives: Drive  # Of each machine
    host_memory_bytes: int  # Of each machine
    sustained_flops: float | None = None  # FLOP/s; None for the figure of the hardware table
    devices: int = 1  # Of each machine
    machines: int = 1
    # Bytes per second between the devices of a machine, in each direction; None for the link, which
    # then carries both
    interconnect: float | None = None
    network: float | None = None  # Bytes per second of each machine, in each direction

    def __post_init__(self) -> None:
        require_positive(self, "", "host_memory_bytes", "sustained_flops")
        require_positive(self, "machine: ", "devices", "machines", "interconnect", "network")
        if self.machines > 1 and self.network is None:
            raise ConfigError(
                f"machine: network is missing, over which {self.machines} machines exchange "
                f"weights and gradients: give the bytes per second of each of them"
            )
        positive("machine: flops", self.flops)
        require_positive(self.rates, "machine: rates.", "read", "write", "link")

    @property
    def flops(self) -> float:
        """FLOP/s of the device in a transformer block."""
        given = self.sustained_flops or self.device.sustained_flops
        return self.device.flops * _sustained_share() if given is None else given

    @property
    def ranks(self) -> int:
        """How many processes train together, one for each device."""
        return self.machines * self.devices

    @property
    def rates(self) -> Rates:
        """What a rank's part of the drives and its link move, the link as measured if known."""
        link = self.device.measured_link or self.device.link
        edges = []  # of the ring in which ranks exchange
        if self.devices > 1:
            edges.append(self.interconnect or link)
        if self.machines > 1 and self.network is not None:
            edges.append(self.network)
        read, write = self.drives.read / self.devices, self.drives.write / self.devices
        return Rates(read, write, link, collectives=min(edges, default=math.inf))

    @property
    def cores(self) -> Cores:
        """What computes: updates and copies on a device take no time that counts."""
        return Cores(self.flops, math.inf, math.inf, _PROCESS_BYTES)

    @property
    def room_bytes(self) -> int:
        """Host memory that a rank may take besides its process itself; less than 0 if none."""
        return int(_HOST_SHARE * self.host_memory_bytes / self.devices) - _PROCESS_BYTES

    @property
    def machine(self) -> str:
        """The machine in words."""
        memory = f"{format_size(self.host_memory_bytes)} of host memory"
        machines = f"{self.machines} machines, each of " if self.machines > 1 else ""
        devices = f"{self.devices} x " if self.devices > 1 else ""
        return f"on {machines}{devices}{self.device.name} with {self.drives.name} and {memory}"

    def assumptions(self, state_dtypes: Iterable[StateType]) -> list[str]:
        """Return what the figures rest on, a line each, if states may have these types."""
        device, sources = self.device, self.device.sources
        if self.sustained_flops is not None:
            measured = "given"
        elif device.sustained_flops is not None:
            measured = sources["sustained_flops"]
        else:
            share = f"{_sustained_share():.0%} of its peak, the share that {_YARDSTICK} sustains"
            measured = f"{share}; {sources['flops']}"
        link = sources["measured_link" if device.measured_link else "link"]
        return [
            *self._ranks_assumptions(),
            f"device: {self.flops / 1e12:.0f} TFLOPS in a transformer block ({measured})",
            f"link: {self.rates.link / 1e9:.0f} GB/s in each direction ({link})",
            _drives_assumption(self.drives, duplex=False),
            "everything overlaps as well as it can; measured steps are longer",
            f"states of {' or '.join(str(STATE_BYTES[dtype]) for dtype in state_dtypes)} bytes a "
            f"parameter, a float32 copy of the weights among them; weights, gradients and "
            f"activations of 2 bytes",
            "states are updated on the device, whose time for that does not count",
            "activations stay up to 90 % of device memory; 90 % of host memory less 2 GiB is used",
        ]

    def _ranks_assumptions(self) -> Iterator[str]:
        if self.ranks == 1:
            return
        yield (
            f"{self.ranks} ranks shard weights, gradients and states (FSDP2), and each computes a "
            f"batch of its own; those of a machine share its drives and host memory evenly"
        )
        way = "between devices over the link, which is busy with both"
        if self.interconnect is not None:
            way = f"{self.interconnect / 1e9:.3g} GB/s between devices"
        network = f"{(self.network or 0) / 1e9:.3g} GB/s of each machine's network"
        ways = [way] * (self.devices > 1) + [network] * (self.machines > 1)
        yield f"collectives: {', '.join(ways)}; in rings, whose latency does not count"


def _drives_assumption(drives: Drive, *, duplex: bool) -> str:
    when = "both at once" if duplex else "one at a time"
    source = f" ({drives.sources['read']})" if "read" in drives.sources else ""
    read, write = drives.read / 1e9, drives.write / 1e9
    return f"drives: {read:.3g} GB/s read, {write:.3g} GB/s written, {when}{source}"


def _sustained_share() -> float:
    yardstick = named_device(_YARDSTICK)
    assert yardstick.sustained_flops is not None
    return yardstick.sustained_flops / yardstick.flops


@dataclass(frozen=True, slots=True)
class Cores:
    """What all cores of a machine do together in float32."""

    flops: float  # FLOP/s of a layer's forward and backward pass
    update_rate: float  # Parameters that the optimizer updates in a second
    copy_rate: float  # Bytes that are copied within memory in a second
    process_bytes: int  # Bytes of a training process without the model and what belongs to it
    # Seconds of a forward and a backward pass for each parameter of a layer, besides the FLOP
    pass_seconds: float = 0.0
    io_overhead: float = IO_OVERHEAD  # Seconds of computation lost for each byte that moves
    sources: Mapping[str, str] = field(default_factory=dict)  # Where the figures are from, by field

    def __post_init__(self) -> None:
        require_positive(self, "cores: ", "flops", "update_rate", "copy_rate")
        for name in ("process_bytes", "pass_seconds", "io_overhead"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"cores: {name} is {getattr(self, name)}; give 0 or more")

    def times(self, count: int) -> Cores:
        """Return so many times as many of these cores."""
        names = ("flops", "update_rate", "copy_rate")
        figures = {name: count * getattr(self, name) for name in names}
        return replace(self, pass_seconds=self.pass_seconds / count, **figures)

    def copy_seconds(self, parameters: int) -> float:
        """Return the seconds of a copy of so many float32 values."""
        return ELEMENT_BYTES * parameters / self.copy_rate


@dataclass(frozen=True, slots=True)
class CpuRequest:
    """A run on a machine that trains on its CPU in float32."""

    on_cpu: ClassVar[bool] = True
    devices: ClassVar[int] = 1
    machines: ClassVar[int] = 1
    ranks: ClassVar[int] = 1
    interconnect: ClassVar[None] = None
    shape: TransformerShape  # Shape of the model
    cores: Cores  # Rates of the cores
    drives: Drive  # The drives
    memory_bytes: int  # Memory that the process may take
    duplex: bool = False  # Whether a drive reads and writes at its rates at the same time

    def __post_init__(self) -> None:
        require_positive(self, "", "memory_bytes")

    @property
    def rates(self) -> Rates:
        """What drives and cores move together."""
        read, write, overhead = self.drives.read, self.drives.write, self.cores.io_overhead
        return Rates(read, write, io_overhead=overhead, duplex=self.duplex)

    @property
    def room_bytes(self) -> int:
        """Memory that training may take, the process included."""
        return int(MEMORY_SHARE * self.memory_bytes)

    @property
    def machine(self) -> str:
        """The machine in words."""
        memory = f"{format_size(self.memory_bytes)} of memory"
        return f"on the CPU with {self.drives.name} and {memory}"

    def assumptions(self, state_dtypes: Iterable[StateType]) -> list[str]:
        """Return what the figures rest on, a line each; they hold for all types of states."""
        cores = self.cores
        of = defaultdict(str, {name: f" ({source})" for name, source in cores.sources.items()})
        return [
            f"cores: {cores.flops / 1e9:.3g} GFLOPS in float32 in a transformer layer, and "
            f"{cores.pass_seconds * 1e9:.2g} s for each billion parameters a pass{of['flops']}",
            f"updates: {cores.update_rate / 1e9:.2g} billion parameters in a second"
            f"{of['update_rate']}; copies within memory: {cores.copy_rate / 1e9:.3g} GB/s"
            f"{of['copy_rate']}",
            _drives_assumption(self.drives, duplex=self.duplex),
            f"offload takes {HOOK_SECONDS * 1e3:.1f} ms for each tensor that autograd saves, and "
            f"computation loses {cores.io_overhead * 1e9:.3g} s for each GB of I/O",
            "everything overlaps as well as it can, except updates and computation, which share "
            "the cores; measured steps are longer",
            "one memory for everything, in float32: 16 bytes a parameter with gradients and both "
            f"moments of Adam, activations, and {format_size(cores.process_bytes)} of the process "
            f"itself{of['process_bytes']}; {MEMORY_SHARE:.0%} of it is used",
        ]
