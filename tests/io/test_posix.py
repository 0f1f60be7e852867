"""The posix backend where system calls misbehave, and what it leaves in the page cache.

`test_backends.py` has what every backend must do.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os

import pytest

from offload_strategy.io.backends.posix import PosixBackend
from offload_strategy.io.regions.region import Region
from offload_strategy.units import PAGE_BYTES, MiB
from tests.io.conformance import HostMemory, begin

BLOCK = 16 * PAGE_BYTES
CALLS = pytest.mark.parametrize("call", ["pwritev", "preadv"])


@pytest.fixture
def backend():
    made = PosixBackend(threads=2, block_size=BLOCK)
    yield made
    made.close()


@pytest.mark.parametrize("misalignment", [0, 1], ids=["aligned", "unaligned"])
def test_short_reads_and_writes_are_continued(backend, region, monkeypatch, misalignment):
    calls = []

    def short(name):
        real = getattr(os, name)

        def call(fd, views, offset):
            calls.append(name)
            return int(real(fd, [views[0][:PAGE_BYTES]], offset))

        return call

    for name in ("pwritev", "preadv"):
        monkeypatch.setattr(os, name, short(name))
    nbytes = 5 * PAGE_BYTES + 100
    written, read = HostMemory(nbytes, misalignment), HostMemory(nbytes, misalignment)
    written.data = os.urandom(nbytes)
    assert begin(backend, region.fd, written, write=True).get() is None
    assert begin(backend, region.fd, read, write=False).get() is None
    assert read.data == written.data
    assert (calls.count("pwritev"), calls.count("preadv")) == (6, 6)


@CALLS
def test_a_system_call_that_moves_nothing_is_an_error_and_no_endless_loop(
    backend, region, monkeypatch, call
):
    monkeypatch.setattr(os, call, lambda fd, views, offset: 0)
    memory = HostMemory(2 * PAGE_BYTES)
    error = begin(backend, region.fd, memory, write=call == "pwritev", offset=PAGE_BYTES).get()
    assert isinstance(error, OSError)
    assert str(2 * PAGE_BYTES) in str(error)


@pytest.mark.parametrize("forever", [False, True], ids=["a few times", "forever"])
@CALLS
def test_a_system_call_that_fails_with_eagain_is_repeated_for_a_while(
    backend, region, monkeypatch, call, forever
):
    real, refusals = getattr(os, call), [errno.EAGAIN] * 5

    def busy(fd, views, offset):
        if forever or refusals:
            raise OSError(errno.EAGAIN if forever else refusals.pop(), "try again")
        return int(real(fd, views, offset))

    monkeypatch.setattr(os, call, busy)
    monkeypatch.setattr("offload_strategy.io.backends.posix.RETRY_SECONDS", 0.05 if forever else 30)
    error = begin(backend, region.fd, HostMemory(PAGE_BYTES), write=call == "pwritev").get()
    assert isinstance(error, BlockingIOError) if forever else error is None


def cached_pages(fd: int, nbytes: int) -> int:
    """How many pages of a file are in the page cache."""
    system = ctypes.CDLL(None, use_errno=True)
    if not hasattr(system, "mincore"):
        pytest.skip("this system cannot tell what is in the page cache")
    found = (ctypes.c_ubyte * (nbytes // PAGE_BYTES))()
    with mmap.mmap(fd, nbytes) as mapped:
        anchor = ctypes.c_char.from_buffer(mapped)
        address = ctypes.c_void_p(ctypes.addressof(anchor))
        error = system.mincore(address, ctypes.c_size_t(nbytes), found)
        del anchor
    assert error == 0, os.strerror(ctypes.get_errno())
    return sum(page & 1 for page in found)


def test_buffered_io_does_not_fill_the_page_cache(disk):
    total, block = 32 * MiB, 1 * MiB
    region = Region(disk, "nvme", total, direct=False)
    region.allocate(total)
    os.pwrite(region.fd, b"x" * PAGE_BYTES, 0)
    assert cached_pages(region.fd, total) >= 1
    backend, memory = PosixBackend(threads=1, block_size=block), HostMemory(block)
    for write in (True, False):
        for offset in range(0, total, block):
            assert begin(backend, region.fd, memory, write=write, offset=offset).get() is None
        os.fdatasync(region.fd)  # how soon dirty pages are written depends on the disk
    backend.close()
    left = cached_pages(region.fd, total)
    region.close()
    assert left <= 2 * block // PAGE_BYTES
