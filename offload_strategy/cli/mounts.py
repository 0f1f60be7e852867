"""Which file system a path lies on, and what is known about the disk below it."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

#: Kinds of file systems whose data is on other machines.
NETWORK = frozenset(
    [
        "nfs",
        "nfs4",
        "cifs",
        "smb3",
        "lustre",
        "beegfs",
        "gpfs",
        "ceph",
        "glusterfs",
        "fuse.glusterfs",
        "fuse.sshfs",
        "wekafs",
        "9p",
        "afs",
        "orangefs",
        "pvfs2",
        "panfs",
        "fuse.s3fs",
        "fuse.gcsfuse",
        "fuse.juicefs",
    ]
)


@dataclass(frozen=True, slots=True)
class FileSystem:
    """A mounted file system.

    Args:
        kind: such as ``ext4`` or ``nfs4``.
        mount_point: the directory that it is mounted at.
        rotational: True if it lies on a spinning disk, None where that is not known.
    """

    kind: str
    mount_point: str
    rotational: bool | None = None

    @property
    def is_network(self) -> bool:
        """Whether the data is on another machine."""
        return self.kind in NETWORK


def file_system_of(path: str | os.PathLike[str]) -> FileSystem | None:
    """The file system that a path lies on; None where the system does not tell."""
    try:
        table = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return find_mount(os.path.realpath(path), table, is_rotational)


def find_mount(
    path: str, table: str, rotational: Callable[[str], bool | None]
) -> FileSystem | None:
    """Find the mount that a resolved path lies on.

    Args:
        path: absolute, without symbolic links.
        table: text of ``/proc/self/mountinfo``.
        rotational: tells of a device number "8:0" whether it is a spinning disk.
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
    """Whether a block device, named as "major:minor", is a spinning disk.

    Virtual disks of a host, and loop devices, answer yes whatever is below them: None for those.
    """
    folder = devices / number
    if re.match(r"(vd|xvd|loop)", folder.resolve().name):
        return None
    for place in (folder, folder / ".."):  # a partition has its queue in the disk's folder
        try:
            return (place / "queue" / "rotational").read_text().strip() == "1"
        except OSError:
            continue
    return None
