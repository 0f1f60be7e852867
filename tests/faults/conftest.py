"""After each fault: no mount, loop device or throttle is left either."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.disks import why_not
from tests.io.loop_devices import detached


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """Where loop disks may be made; nothing of them may be left there."""
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    yield tmp_path
    mounts = Path("/proc/mounts").read_text()
    assert str(tmp_path) not in mounts, "a file system is still mounted"
    assert detached(tmp_path), "a loop device is still there"
    ours = Path("/proc/self/cgroup").read_text()
    assert "offload-throttle" not in ours, "this process is still throttled"
    assert list(tmp_path.iterdir()) == []
