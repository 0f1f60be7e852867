"""Every backend that can run here does what every backend must do."""

import importlib.util
import os
import subprocess

import pytest
import torch

from offload_strategy.config import OffloadConfig
from offload_strategy.errors import ConfigError, CorruptDataError
from offload_strategy.io.backends.protocol import available_backends, create_backend
from tests.io.conformance import BLOCK, Conformance, HostMemory, begin
from tests.support import raising, run_python

AVAILABLE = available_backends()
#: Set to 1 to try DeepSpeed's backend as well, where it can run.
DEEPNVME_VARIABLE = "SSD_OFFLOAD_TEST_DEEPNVME"
#: As `AVAILABLE`, but for what takes minutes to compile and is not asked for.
TRIED = dict(AVAILABLE)
if AVAILABLE["deepnvme"] is None and os.environ.get(DEEPNVME_VARIABLE) != "1":
    TRIED["deepnvme"] = (
        f"to compile DeepSpeed's operators takes minutes; set {DEEPNVME_VARIABLE}=1 to try them"
    )
needs_deepnvme = pytest.mark.skipif(
    TRIED["deepnvme"] is not None, reason=f"deepnvme: {TRIED['deepnvme']}"
)
# The first test of all waits until DeepSpeed's operators are compiled.
pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module", autouse=True)
def _deepspeed_is_compiled():
    """At its first use it takes minutes, and leaves a descriptor open."""
    if TRIED["deepnvme"] is None:
        create_backend("deepnvme", threads=1, block_size=BLOCK).close()


class TestBackends(Conformance):
    def reports_failed_writes(self, backend):
        return type(backend).__name__ != "DeepNvmeBackend"

    @pytest.fixture(params=AVAILABLE)
    def name(self, request):
        reason = TRIED[request.param]
        if reason is not None:
            pytest.skip(f"{request.param}: {reason}")
        return str(request.param)


def test_posix_runs_everywhere_auto_is_a_backend_and_a_tape_is_none():
    assert AVAILABLE["posix"] is None
    create_backend("auto", threads=1, block_size=BLOCK).close()
    with pytest.raises(ConfigError, match=r"'tape'.*posix"):
        OffloadConfig.load({"io": {"backend": "tape"}})


@pytest.mark.parametrize("name", [name for name, reason in AVAILABLE.items() if reason])
def test_one_that_cannot_run_here_is_refused_with_the_reason(name):
    with pytest.raises(ConfigError) as refused:
        create_backend(name, threads=1, block_size=BLOCK)
    assert name in str(refused.value)
    assert str(AVAILABLE[name]) in str(refused.value)


@pytest.mark.parametrize(("package", "module"), [("deepspeed", "deepnvme"), ("kvikio", "kvikio")])
def test_a_package_that_is_not_installed_is_named(package, module, monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(
        f"offload_strategy.io.backends.{module}.find_spec",
        lambda name: None if name == package else real(name),
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    reason = available_backends()[module]
    assert f"the package {package} is not installed" in reason
    assert "pip install" in reason


@needs_deepnvme
@pytest.mark.parametrize("tool", ["c++", "libaio.h"])
def test_what_deepspeed_compiles_with_is_named_if_missing(tool, monkeypatch):
    if tool == "c++":
        monkeypatch.setattr("shutil.which", lambda name: None)
    else:
        monkeypatch.setattr(subprocess, "run", raising(subprocess.CalledProcessError(1, "c++")))
    assert "apt install g++ libaio-dev" in available_backends()["deepnvme"]


@needs_deepnvme
@pytest.mark.parametrize("persists", [False, True])
@pytest.mark.parametrize("region", ["auto"], indirect=True)
def test_what_deepspeed_did_not_read_is_read_again_and_checked_again(region, monkeypatch, persists):
    from offload_strategy.io.backends.deepnvme import _Handle

    backend = create_backend("deepnvme", threads=1, block_size=BLOCK)
    memory, lost = HostMemory(BLOCK), []
    memory.data = data = b"d" * BLOCK
    assert begin(backend, region.fd, memory, write=True).get() is None
    memory.data = bytes(BLOCK)
    monkeypatch.setattr(_Handle, "move", lambda self, fd, view, offset, write: lost.append(offset))

    def check():
        if persists or memory.data != data:
            raise CorruptDataError("the checksum differs")

    error = begin(backend, region.fd, memory, write=False, after=check).get()
    assert lost == [0]
    assert isinstance(error, CorruptDataError) if persists else error is None
    assert memory.data == data
    # Without a check, or if it knows only a part, nothing is left to DeepSpeed.
    for options in ({}, {"after": lambda: None, "verified": False}):
        assert begin(backend, region.fd, memory, write=False, **options).get() is None
    assert lost == [0]
    backend.close()


FIRST_WRITES = """
import sys, pathlib
from offload_strategy.io.backends.protocol import create_backend
from offload_strategy.io.regions.region import Region
from tests.io.conformance import BLOCK, HostMemory, begin
sys.setswitchinterval(1e-6)
region = Region(pathlib.Path(sys.argv[1]), "nvme", 64 * BLOCK)
region.allocate(64 * BLOCK)
backend = create_backend("deepnvme", threads=8, block_size=BLOCK)
ends = [
    begin(backend, region.fd, HostMemory(BLOCK), write=True, offset=at * BLOCK) for at in range(64)
]
print([end.get() for end in ends] == [None] * 64)
backend.close()
region.close()
"""


@needs_deepnvme
def test_deepspeeds_first_writes_may_come_from_many_threads(disk):
    assert run_python("-c", FIRST_WRITES, disk, timeout=240).strip().endswith("True")
