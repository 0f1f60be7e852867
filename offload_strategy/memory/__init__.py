"""Page-aligned host buffers of exactly the size asked for, recycled under one budget."""

from offload_strategy.memory.buffers import HostBuffer
from offload_strategy.memory.idle import IdleMemory, resident_bytes
from offload_strategy.memory.limits import available_bytes, memory_cgroup_limit
from offload_strategy.memory.peak import PeakMeter
from offload_strategy.memory.pool import IDLE_BYTES, BufferPool, MemoryUsage

__all__ = [
    "IDLE_BYTES",
    "BufferPool",
    "HostBuffer",
    "IdleMemory",
    "MemoryUsage",
    "PeakMeter",
    "available_bytes",
    "memory_cgroup_limit",
    "resident_bytes",
]
