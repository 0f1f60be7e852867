"""Recognise what is on a block device by its first and last bytes, as `wipefs` does."""

from __future__ import annotations

import struct
from collections.abc import Callable

from offload_strategy.units import KiB, MiB

#: Bytes at the start of a device that are inspected, and never written.
HEAD_BYTES = 1 * MiB
#: Bytes at its end that are inspected.
TAIL_BYTES = 1 * MiB

_MD = b"\xfc\x4e\x2b\xa9"  # little-endian

#: (name, offset from the start, magic bytes), the more specific first: NTFS and FAT, for example,
#: begin with a boot sector, too.
_AT_START: tuple[tuple[str, int, bytes], ...] = (
    ("an ext2, ext3 or ext4 file system", 0x438, b"\x53\xef"),
    ("an XFS file system", 0, b"XFSB"),
    ("a Btrfs file system", 0x10040, b"_BHRfS_M"),
    ("an F2FS file system", 0x400, b"\x10\x20\xf5\xf2"),
    ("a bcache device", 0x1018, bytes.fromhex("c68573f64e1a45ca8265f57f48ba6d81")),
    ("a Bcachefs file system", 0x1018, bytes.fromhex("c68573f666ce90a9d96a60cf803df7ef")),
    ("a SquashFS file system", 0, b"hsqs"),
    ("an EROFS file system", 0x400, b"\xe2\xe1\xf5\xe0"),
    ("a ReiserFS file system", 0x10034, b"ReIsEr"),
    ("a JFS file system", 0x8000, b"JFS1"),
    ("a NILFS2 file system", 0x406, b"\x34\x34"),
    ("a GFS2 file system", 0x10000, b"\x01\x16\x19\x70"),
    ("an OCFS2 file system", 0x2000, b"OCFSV2"),
    ("an APFS container", 0x20, b"NXSB"),
    ("an HFS+ file system", 0x400, b"H+"),
    ("an ISO 9660 file system", 0x8001, b"CD001"),
    ("a UDF file system", 0x8001, b"BEA01"),
    ("a Ceph OSD", 0, b"bluestore block device"),
    ("swap space", 4 * KiB - 10, b"SWAPSPACE2"),
    ("swap space", 4 * KiB - 10, b"SWAP-SPACE"),
    ("swap space", 16 * KiB - 10, b"SWAPSPACE2"),
    ("swap space", 64 * KiB - 10, b"SWAPSPACE2"),
    ("a LUKS encrypted volume", 0, b"LUKS\xba\xbe"),
    ("an LVM physical volume", 0x018, b"LVM2 001"),
    ("an LVM physical volume", 0x218, b"LVM2 001"),
    ("an LVM physical volume", 0x418, b"LVM2 001"),
    ("an LVM physical volume", 0x618, b"LVM2 001"),
    ("a member of a Linux RAID (md)", 0, _MD),
    ("a member of a Linux RAID (md)", 0x1000, _MD),
    ("a GPT partition table", 0x200, b"EFI PART"),
    ("a GPT partition table", 0x1000, b"EFI PART"),
    ("an NTFS file system", 3, b"NTFS    "),
    ("an exFAT file system", 3, b"EXFAT   "),
    ("a FAT file system", 0x52, b"FAT32   "),
    ("a FAT file system", 0x36, b"FAT16   "),
    ("a FAT file system", 0x36, b"FAT12   "),
    ("an MBR partition table", 0x1FE, b"\x55\xaa"),
)  # fmt: skip

#: (name, offset as a function of the device's size, magic bytes)
_AT_END: tuple[tuple[str, Callable[[int], int], bytes], ...] = (
    ("a backup of a GPT partition table", lambda size: size - 512, b"EFI PART"),
    ("a backup of a GPT partition table", lambda size: size - 4096, b"EFI PART"),
    ("a member of a Linux RAID (md)", lambda size: (size // 512 - 16 & ~7) * 512, _MD),
    ("a member of a Linux RAID (md)", lambda size: (size & ~0xFFFF) - 0x10000, _MD),
    ("a member of an Intel RAID", lambda size: size - 1024, b"Intel Raid ISM Cfg Sig."),
    ("a member of a DDF RAID", lambda size: size - 512, b"\xde\x11\xde\x11"),
)

#: ZFS has a label of 256 KiB twice at either end; its second half is a ring of uberblocks.
_ZFS_LABEL_BYTES = 256 * KiB
_ZFS_MAGICS = (struct.pack("<Q", 0x00BAB10C), struct.pack(">Q", 0x00BAB10C))


def recognise(head: bytes, tail: bytes, size: int) -> str | None:
    """Name what is on a device of `size` bytes by its first `HEAD_BYTES` and last `TAIL_BYTES`.

    Returns for instance "an XFS file system"; "data of an unknown kind" if the head is not
    recognised but not all zeros; None if the device looks empty.
    """
    for name, offset, magic in _AT_START:
        if head[offset : offset + len(magic)] == magic:
            return name
    if _has_zfs_label(head) or _has_zfs_label(tail):
        return "a member of a ZFS pool"
    begin = size - len(tail)
    for name, place, magic in _AT_END:
        offset = place(size) - begin
        if offset >= 0 and tail[offset : offset + len(magic)] == magic:
            return name
    return "data of an unknown kind" if any(head) else None


def _has_zfs_label(part: bytes) -> bool:
    half = _ZFS_LABEL_BYTES // 2
    return any(
        part[slot : slot + 8] in _ZFS_MAGICS
        for label in range(0, len(part), _ZFS_LABEL_BYTES)
        for slot in range(label + half, label + _ZFS_LABEL_BYTES, KiB)
    )
