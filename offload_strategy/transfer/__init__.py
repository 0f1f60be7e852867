"""Moves between memory and paths: queues with priorities, and the device's own copies."""

from offload_strategy.transfer.bandwidth import Bandwidth, Sustained
from offload_strategy.transfer.checksums import Checksum, create_checksum
from offload_strategy.transfer.device import DeviceCopier
from offload_strategy.transfer.interrupts import UninterruptedSection
from offload_strategy.transfer.known_paths import KnownPaths, PathStanding
from offload_strategy.transfer.moves import Move, MoveState, Priority, Stripe
from offload_strategy.transfer.queue import PathQueue

__all__ = [
    "Bandwidth",
    "Checksum",
    "DeviceCopier",
    "KnownPaths",
    "Move",
    "MoveState",
    "PathQueue",
    "PathStanding",
    "Priority",
    "Stripe",
    "Sustained",
    "UninterruptedSection",
    "create_checksum",
]
