"""All faults: what the user must see of each, and how to make it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.faults import call_faults, disk_faults, sharing
from benchmarks.faults.subject import STEPS, Outcome
from offload_strategy.errors import ConfigError, CorruptDataError, StorageError, TierFullError

_MOUNT = r"/mnt/nvme0"


@dataclass(frozen=True)
class Fault:
    """One line of the table.

    Args:
        title: what happens.
        provoke: makes it happen on disks in the given directory, and tells what was seen.
        error: the class of what is raised, or None if training goes on to its end.
        says: pattern of what is raised or logged; empty if nothing is.
        weights: what `Outcome.weights` may be.
        states: what `Outcome.states` may be.
        steps: that ended, if it is the same each time.
    """

    title: str
    provoke: Callable[[Path], Outcome]
    error: type[BaseException] | None = None
    says: str = ""
    weights: tuple[str, ...] = ("right",)
    states: tuple[str, ...] = ("right",)
    steps: int | None = None

    def complaints(self, outcome: Outcome) -> list[str]:
        """What of an outcome is not as it must be."""
        found = []
        if type(outcome.error) is not (self.error or type(None)):
            found.append(f"raised {outcome.error!r}, not {self.error}")
        if not self.says and outcome.seen:
            found.append(f"said: {outcome.seen}")
        if not re.search(self.says, outcome.seen):
            found.append(f"said {outcome.seen!r}, nothing like {self.says!r}")
        if outcome.weights not in self.weights:
            found.append(f"weights are {outcome.weights}")
        if outcome.states not in self.states:
            found.append(f"the state dict is {outcome.states}")
        steps = STEPS if self.error is None else self.steps
        if steps is not None and outcome.whole_steps != steps:
            found.append(f"{outcome.whole_steps} steps ended, not {steps}")
        return found + [f"left behind: {thing}" for thing in outcome.left]


_OR_RAISES = ("right", "StorageError")
_CORRUPT: dict[str, Any] = {
    "error": CorruptDataError,
    "says": rf"'nvme0' at {_MOUNT}: .*B at offset \d+ are not what was written",
    "states": ("right", "CorruptDataError"),
    "steps": 1,
}

FAULTS: dict[str, Fault] = {
    fault.provoke.__name__: fault
    for fault in (
        Fault(
            "the disk has less than the capacity, at start",
            disk_faults.too_large_a_capacity,
            ConfigError,
            rf"'nvme0': capacity is 1 GiB, but {_MOUNT} has only .*Lower the capacity",
            steps=0,
        ),
        Fault(
            "the disk is full at start, no capacity given",
            disk_faults.full_at_start,
            ConfigError,
            rf"'nvme0': {_MOUNT} has too little free space \(.*B\).*Free some",
            steps=0,
        ),
        Fault(
            "others fill the disk while training",
            disk_faults.filled_while_running,
            TierFullError,
            rf"no tier has room for .*nvme0: .* used at {_MOUNT}.*has 0 B available.*"
            r"free some space",
            steps=0,
        ),
        Fault(
            "the same, and there is a second tier",
            disk_faults.filled_with_a_second_tier,
        ),
        Fault(
            "others fill a disk without preallocation (ENOSPC on write)",
            disk_faults.filled_without_preallocation,
            TierFullError,
            rf"'nvme0': could not write .*B of .* at {_MOUNT}: .*No space left.*free some space",
        ),
        Fault(
            "EIO on write",
            disk_faults.write_error,
            StorageError,
            rf"'nvme0': could not write .*B of .* at {_MOUNT}: .*Input/output error.*system's log",
        ),
        Fault(
            "EIO on read, in backward",
            disk_faults.read_error,
            StorageError,
            rf"'nvme0': could not read .*B of .* at {_MOUNT}: .*Input/output error.*system's log",
            states=_OR_RAISES,
            steps=1,
        ),
        Fault(
            "EIO on read, within optimizer.step()",
            disk_faults.read_error_in_step,
            StorageError,
            rf"'nvme0': could not read .*B of optimizer at {_MOUNT}: .*Input/output error.*"
            r"had updated \d+ of \d+ subgroups: .*the last checkpoint",
            weights=("half a step",),
            states=("StorageError",),
            steps=1,
        ),
        Fault(
            "the disk answers EIO at start",
            disk_faults.failed_before_start,
            ConfigError,
            rf"'nvme0': {_MOUNT} cannot be written and read: Input/output error.*Check the disk",
            steps=0,
        ),
        Fault(
            "the path is unmounted (umount -l) while training", disk_faults.unmounted_while_running
        ),
        Fault(
            "the path is not there at start",
            disk_faults.not_there_at_start,
            ConfigError,
            rf"'nvme0' .*there is no directory '{_MOUNT}'.*mkdir -p",
            steps=0,
        ),
        Fault(
            "the path is mounted read-only at start",
            disk_faults.read_only_at_start,
            ConfigError,
            rf"'nvme0' .*'{_MOUNT}' is mounted read-only\. Remount it for writing",
            steps=0,
        ),
        Fault(
            "the kernel makes the file system read-only after an error",
            disk_faults.read_only_while_running,
            StorageError,
            rf"'nvme0': could not write .*B of .* at {_MOUNT}: .*Read-only file system",
            states=_OR_RAISES,
            steps=1,
        ),
        Fault("mount -o remount,ro while training", disk_faults.remounted_while_running),
        Fault(
            "a raw block device is made read-only",
            disk_faults.read_only_device,
            StorageError,
            r"'nvme0': could not write .*B of .* at /dev/nvme0n1: .*not permitted",
            states=_OR_RAISES,
            steps=1,
        ),
        Fault(
            "the directory is deleted while training",
            disk_faults.deleted_directory,
            says=rf"{_MOUNT}/offload cannot hold a file .*scratch file in .* instead",
        ),
        Fault(
            "the device stalls (64 KiB/s) for a while",
            disk_faults.stalled,
            says=rf"waiting for {_MOUNT} to \w+ .*B for \d+ s; the path does not answer",
        ),
        Fault(
            "Ctrl-C, then close(), while the device stalls",
            disk_faults.interrupted_while_stalled,
            KeyboardInterrupt,
            rf"waiting for {_MOUNT} to \w+ .*B for \d+ s",
            weights=("right", "half a step"),  # as with plain PyTorch, if it comes within step()
            steps=1,
        ),
        Fault("reads and writes of a page at most", call_faults.short_answers),
        Fault("reads and writes of 1,000 bytes at most, buffered", call_faults.odd_answers),
        Fault("EAGAIN two times of three", call_faults.try_again),
        Fault(
            "EAGAIN for ever",
            call_faults.try_again_for_ever,
            StorageError,
            rf"'nvme0': could not \w+ .*B of .* at {_MOUNT}: .*Resource temporarily unavailable",
            states=_OR_RAISES,
            steps=1,
        ),
        Fault("a storm of signals (EINTR)", call_faults.signals),
        Fault(
            "flipped bytes on the disk",
            call_faults.flipped_bytes,
            CorruptDataError,
            r"'nvme0' at /dev/nvme0n1: .*B at offset \d+ are not what was written",
            states=("CorruptDataError",),
            steps=1,
        ),
        Fault(
            "lost writes: what was there before is still there", call_faults.lost_writes, **_CORRUPT
        ),
        Fault("torn writes: half of each block", call_faults.torn_writes, **_CORRUPT),
        Fault("each write at the place of another", call_faults.misdirected_writes, **_CORRUPT),
        Fault(
            "flipped bytes on the disk, io.checksum: off",
            call_faults.flipped_bytes_unnoticed,
            weights=("wrong",),
            states=("wrong",),
        ),
        Fault(
            "lost writes, io.checksum: off",
            call_faults.lost_writes_unnoticed,
            weights=("wrong",),
            states=("wrong",),
        ),
        Fault(
            "a thread dies while it writes a block",
            call_faults.dead_worker,
            StorageError,
            r"'nvme0': could not \w+ .*the thread that moved \d+ bytes .* was ended by SystemExit",
            states=_OR_RAISES,
            steps=1,
        ),
        Fault(
            "threads die while they wait for work",
            call_faults.dead_idle_workers,
            says=r"a thread of ssd-offload-io ended: SystemExit",
        ),
        Fault(
            "kill -9 of two of four processes on a path, one in its turn",
            sharing.killed,
        ),
    )
}
