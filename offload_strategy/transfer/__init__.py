"""Moves between memory and paths: queues with priorities, and the device's own copies."""

from offload_strategy.transfer.device import DeviceCopier
from offload_strategy.transfer.interrupts import UninterruptedSection
from offload_strategy.transfer.moves import Move, MoveState, Priority
from offload_strategy.transfer.queue import PathQueue

__all__ = ["DeviceCopier", "Move", "MoveState", "PathQueue", "Priority", "UninterruptedSection"]
