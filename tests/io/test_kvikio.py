"""How the kvikio backend uses its library; what the library does is tested where it runs.

The stand-in below has the interface of kvikio 25.10 (CuFile, defaults) and moves the
bytes of host memory, which CUDA, played here as well, takes for the device's.
"""

import ctypes
import errno
import mmap
import os
import sys
from functools import partial, partialmethod
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from offload_strategy.errors import ConfigError
from offload_strategy.io.backends import kvikio as backend_module
from offload_strategy.io.backends.posix import PosixBackend
from offload_strategy.io.backends.protocol import available_backends, create_backend
from offload_strategy.io.queues.checksums import create_checksum
from offload_strategy.io.queues.path_queue import PathQueue
from offload_strategy.io.regions.region import Region
from offload_strategy.store.tiers import PathTier
from offload_strategy.telemetry import Recorder
from offload_strategy.units import PAGE_BYTES, MiB, round_up
from tests.io.conformance import BLOCK, Conformance, HostMemory, begin
from tests.support import raising


class CuFile:
    def __init__(self, library, file, flags="r"):
        self.library = library
        self._fd = os.open(file, {"r": os.O_RDONLY, "r+": os.O_RDWR}[flags] | os.O_DIRECT)
        library.open_files.append(self)

    def _move(self, how, buf, size, file_offset, task_size):
        library = self.library
        if library.error is not None:
            raise RuntimeError(library.error)
        if size < library.settings["gds_threshold"]:
            raise AssertionError("went through the page cache, where errors are lost")
        interface = buf.__cuda_array_interface__
        assert isinstance(interface, dict)
        assert (interface["typestr"], interface["shape"]) == ("|u1", (size,))
        address, read_only = interface["data"]
        assert not read_only
        memory = (ctypes.c_char * size).from_address(address)
        library.moved.append((how, file_offset, size, task_size))
        # As cuFile's own buffers do: whole pages move, past the page cache.
        pages = mmap.mmap(-1, round_up(size, PAGE_BYTES))
        if how == "write":
            if size % PAGE_BYTES:
                os.preadv(self._fd, [pages], file_offset)
            pages[:size] = memory.raw
            done = min(size, os.pwrite(self._fd, pages, file_offset))
        else:
            done = min(size, os.preadv(self._fd, [pages], file_offset))
            memory[:done] = pages[:done]
        return SimpleNamespace(get=lambda: done - library.short)

    pread = partialmethod(_move, "read")
    pwrite = partialmethod(_move, "write")

    def close(self):
        os.close(self._fd)
        self.library.open_files.remove(self)


class Library:
    """kvikio, cuFile and CUDA as far as the backend sees them."""

    def __init__(self):
        self.settings: dict[str, Any] = {"num_threads": 1, "gds_threshold": 1 * MiB}
        self.compatibility_mode = False
        self.open_files: list[CuFile] = []
        self.moved: list[tuple[str, int, int, int]] = []
        self.device: set[range] = set()
        self.short = 0
        self.error: str | None = None
        defaults = SimpleNamespace(
            get=self.settings.__getitem__,
            set=self.settings.__setitem__,
            is_compat_mode_preferred=lambda: self.compatibility_mode,
        )
        self.modules = {
            "kvikio": SimpleNamespace(CuFile=partial(CuFile, self), defaults=defaults),
            "kvikio.defaults": defaults,
        }

    def cuPointerGetAttribute(self, kind, attribute, address):
        assert attribute.value == 2
        if any(address.value in part for part in self.device):
            kind._obj.value = 2
            return 0
        return 1  # CUDA_ERROR_INVALID_VALUE: memory that CUDA never saw


@pytest.fixture(autouse=True)
def library(monkeypatch):
    made = Library()
    for name, module in made.modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(backend_module, "find_spec", lambda name: object())
    monkeypatch.setattr(backend_module, "_libcuda", lambda: made)
    return made


@pytest.fixture
def backend(library):
    made = create_backend("kvikio", threads=3, block_size=BLOCK)
    yield made
    made.close()
    assert library.open_files == []


def device_memory(library, nbytes, misalignment=0):
    memory = HostMemory(nbytes, misalignment)
    library.device.add(range(memory.address, memory.address + nbytes))
    return memory


class TestDeviceMemory(Conformance):
    @pytest.fixture
    def name(self, library):
        self.library = library
        yield "kvikio"
        assert library.open_files == []

    def memory(self, nbytes, misalignment=0):
        return device_memory(self.library, nbytes, misalignment)


def test_device_memory_goes_to_cufile_in_one_piece_and_host_memory_never(library, backend, region):
    assert backend.device_memory
    assert library.settings["num_threads"] == 6
    memory = device_memory(library, BLOCK - 5, misalignment=3)
    for write in (True, False):
        assert begin(backend, region.fd, memory, write=write, offset=PAGE_BYTES).get() is None
        assert begin(backend, region.fd, HostMemory(BLOCK), write=write).get() is None
    assert library.moved == [(way, PAGE_BYTES, BLOCK - 5, BLOCK) for way in ("write", "read")]
    assert len(library.open_files) == 1


@pytest.mark.parametrize("write", [True, False])
@pytest.mark.parametrize("how", ["short", "fails"])
def test_errors_of_cufile_are_errors_of_the_request(library, backend, region, write, how):
    library.short, library.error = (1, None) if how == "short" else (0, "cuFile error: 5011")
    error = begin(backend, region.fd, device_memory(library, BLOCK), write=write).get()
    assert isinstance(error, OSError)
    assert error.errno == errno.EIO
    assert (f"{BLOCK - 1} of {BLOCK} bytes" if how == "short" else "5011") in str(error)


def test_a_descriptor_that_is_used_again_is_another_file(library, backend, tmp_path):
    for content in (b"1", b"2"):
        path = tmp_path / content.decode()
        path.write_bytes(content * PAGE_BYTES)
        fd = os.open(path, os.O_RDONLY)
        memory = device_memory(library, PAGE_BYTES)
        assert begin(backend, fd, memory, write=False).get() is None
        assert memory.data == content * PAGE_BYTES
        os.close(fd)


def test_compatibility_mode_and_more_threads_of_somebody_else_are_respected(library):
    library.settings["num_threads"], library.compatibility_mode = 16, True
    backend = create_backend("kvikio", threads=2, block_size=BLOCK)
    assert library.settings["num_threads"] == 16
    assert not backend.device_memory, "device memory is better copied by us"
    backend.close()


def test_auto_does_not_take_it(library):
    """Nothing paces by the device what it moves."""
    backend = create_backend("auto", threads=1, block_size=BLOCK)
    assert type(backend) is PosixBackend
    backend.close()


def test_what_is_hashed_by_the_host_does_not_stay_on_the_device(library, tmp_path):
    """A checksum would read device memory on the host."""
    backend = create_backend("kvikio", threads=1, block_size=BLOCK)
    region = Region(tmp_path, "nvme", 64 * BLOCK)
    for checksum in (None, create_checksum("sampled", backend)):
        queue = PathQueue(region, backend, Recorder(), checksum=checksum)
        assert PathTier("nvme", [queue]).device_memory is (checksum is None)
        queue.close()
    region.close()
    backend.close()


def test_a_library_that_does_not_load_is_a_reason(monkeypatch):
    broken = raising(ImportError("libcuda.so.1: cannot open shared object file"))
    monkeypatch.setattr(backend_module, "_cufile", broken)
    assert "libcuda.so.1" in available_backends()["kvikio"]
    with pytest.raises(ConfigError, match="libcuda"):
        create_backend("kvikio", threads=1, block_size=BLOCK)
