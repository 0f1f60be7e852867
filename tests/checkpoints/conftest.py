"""Files that are written with and without direct I/O."""

import pytest

from offload_strategy.checkpoints import scratch_file, streaming_files


@pytest.fixture(params=["direct", "buffered"])
def way(request, monkeypatch):
    if request.param == "buffered":
        for module in (scratch_file, streaming_files):
            monkeypatch.setattr(module, "switch_to_direct_io", lambda fd: None)
