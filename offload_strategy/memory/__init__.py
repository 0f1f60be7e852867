"""Page-aligned host buffers of exactly the size asked for, recycled under one budget."""

from offload_strategy.memory.buffers import HostBuffer
from offload_strategy.memory.limits import available_bytes, memory_cgroup_limit
from offload_strategy.memory.peak import PeakMeter
from offload_strategy.memory.pool import IDLE_BYTES, BufferPool, MemoryUsage

__all__ = [
    "IDLE_BYTES",
    "BufferPool",
    "HostBuffer",
    "MemoryUsage",
    "PeakMeter",
    "available_bytes",
    "memory_cgroup_limit",
]
