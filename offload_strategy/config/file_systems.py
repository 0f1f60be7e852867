"""The file system of a path, and whether its disk rotates."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

#: File systems whose data is on other machines.
NETWORK = frozenset(
    [
        *("nfs", "nfs4", "cifs", "smb3", "lustre", "beegfs", "gpfs", "ceph", "glusterfs"),
        *("fuse.glusterfs", "fuse.sshfs", "fuse.s3fs", "fuse.gcsfuse", "fuse.juicefs"),
        *("wekafs", "9p", "afs", "orangefs", "pvfs2", "panfs"),
    ]
)
#: File systems that are kept in memory.
_IN_MEMORY = frozenset({"tmpfs", "ramfs", "devtmpfs", "rootfs"})


@dataclass(frozen=True, slots=True)
class FileSystem:
    """A mounted file system.

    Args:
        kind: such as ``ext4`` or ``nfs4``.
        mount_point: the directory where it is mounted.
        rotational: whether it is on a spinning disk; None where that is unknown.
    """

    kind: str
    mount_point: str
    rotational: bool | None = None

    @property
    def is_network(self) -> bool:
        """Whether the data is on another machine."""
        return self.kind in NETWORK

    @property
    def is_memory(self) -> bool:
        """Whether the file system is kept in memory."""
        return self.kind in _IN_MEMORY


def file_system_of(path: str | os.PathLike[str]) -> FileSystem | None:
    """Return the file system of a path; None where the operating system does not tell."""
    try:
        table = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return find_mount(os.path.realpath(path), table, is_rotational)


def find_mount(
    path: str, table: str, rotational: Callable[[str], bool | None]
) -> FileSystem | None:
    """Find the mount of a resolved path.

    Args:
        path: absolute, without symbolic links.
        table: text of ``/proc/self/mountinfo``.
        rotational: returns for a device number such as "8:0" whether it is a spinning disk.
    """
    best: tuple[str, str, str] | None = None
    for line in table.splitlines():
        # proc_pid_mountinfo(5): id, parent, major:minor, root, mount point, options, tags - type, …
        before, _, after = line.partition(" - ")
        fields = before.split(" ")
        if len(fields) < 5 or not after:
            continue
        point = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), fields[4])
        covers = path == point or path.startswith(point.rstrip("/") + "/")
        # Of two mounts at one place the later hides the earlier.
        if covers and (best is None or len(point) >= len(best[1])):
            best = (after.split(" ")[0], point, fields[2])
    return None if best is None else FileSystem(best[0], best[1], rotational(best[2]))


def is_rotational(number: str, devices: Path = Path("/sys/dev/block")) -> bool | None:
    """Return whether a block device, given as "major:minor", is a spinning disk.

    The result is None for virtual and loop devices, which always report a spinning disk.
    """
    folder = devices / number
    if re.match(r"(vd|xvd|loop)", folder.resolve().name):
        return None
    for place in (folder, folder / ".."):  # a partition's queue is in the disk's directory
        try:
            return (place / "queue" / "rotational").read_text().strip() == "1"
        except OSError:
            continue
    return None
