import pytest


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch):
    for variable in ("SSD_OFFLOAD_CONFIG", "SSD_OFFLOAD_DIR"):
        monkeypatch.delenv(variable, raising=False)
