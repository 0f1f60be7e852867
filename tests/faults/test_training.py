"""Every fault of the table, made for real: what training sees, and what is left behind."""

from pathlib import Path

import pytest

from benchmarks.disks import why_not
from benchmarks.faults.table import FAULTS
from tests.io.loop_devices import detached
from tests.module_map import ROOT

#: No close may take longer, also on a disk that hardly answers. A quiet machine needs a second.
_CLOSE_SECONDS = 15.0


@pytest.fixture
def place(tmp_path):
    """Where loop disks may be made; nothing of them may be left there."""
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    yield tmp_path
    assert str(tmp_path) not in Path("/proc/mounts").read_text(), "a file system is still mounted"
    assert detached(tmp_path), "a loop device is still there"
    ours = Path("/proc/self/cgroup").read_text()
    assert "offload-throttle" not in ours, "this process is still throttled"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_ends_as_the_table_says(name, place):
    outcome = FAULTS[name].provoke(place)
    assert FAULTS[name].complaints(outcome) == []
    assert outcome.close_seconds < _CLOSE_SECONDS


def test_every_line_of_the_documentation_is_one_of_the_table():
    text = (ROOT / "docs" / "faults.md").read_text()
    first_table = text.partition("Notes on")[0].partition("\n## ")[0]
    rows = [line for line in first_table.splitlines() if line.startswith("| ")][2:]
    assert [row.split("|")[1].strip() for row in rows] == [fault.title for fault in FAULTS.values()]
