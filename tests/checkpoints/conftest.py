"""Files that are written with and without direct I/O."""

import pytest

from offload_strategy.io.regions import unnamed_files


@pytest.fixture(params=["direct", "buffered"])
def way(request, monkeypatch):
    if request.param == "buffered":
        monkeypatch.setattr(unnamed_files, "switch_to_direct_io", lambda fd: False)
