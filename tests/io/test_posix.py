"""The posix backend where system calls misbehave, and what it leaves in the page cache.

`test_backends.py` has what every backend must do.
"""

import ctypes
import errno
import mmap
import os

import pytest

from offload_strategy.errors import CorruptDataError
from offload_strategy.io.backends.posix import PosixBackend
from offload_strategy.io.backends.protocol import BlockRequest
from offload_strategy.io.regions.region import Region
from offload_strategy.units import PAGE_BYTES, MiB
from tests.io.conformance import HostMemory, Outcome, begin

BLOCK = 16 * PAGE_BYTES
CALLS = pytest.mark.parametrize("call", ["pwritev", "preadv"])


@pytest.fixture
def backend():
    made = PosixBackend(threads=2, block_size=BLOCK)
    yield made
    made.close()


@CALLS
@pytest.mark.parametrize("how", ["moves nothing", "is busy a few times", "is busy forever"])
def test_a_system_call_that_does_nothing_is_repeated_for_a_while(
    backend, region, monkeypatch, call, how
):
    real, refusals = getattr(os, call), [errno.EAGAIN] * 5

    def refuse(fd, views, offset):
        if how == "moves nothing":
            return 0
        if how == "is busy forever" or refusals:
            raise OSError(errno.EAGAIN if how == "is busy forever" else refusals.pop(), "try again")
        return real(fd, views, offset)

    monkeypatch.setattr(os, call, refuse)
    if how == "is busy forever":
        monkeypatch.setattr("offload_strategy.io.backends.posix.RETRY_SECONDS", 0.05)
    memory = HostMemory(2 * PAGE_BYTES)
    error = begin(backend, region.fd, memory, write=call == "pwritev", offset=PAGE_BYTES).get()
    if how == "moves nothing":
        assert isinstance(error, OSError)
        assert str(2 * PAGE_BYTES) in str(error)
    else:
        assert isinstance(error, BlockingIOError) if how == "is busy forever" else error is None


@CALLS
@pytest.mark.parametrize("how", ["fails", "is short", "moves wrong bytes"])
def test_an_error_of_one_of_several_adjacent_requests_is_its_own(
    backend, region, monkeypatch, call, how
):
    real, calls = getattr(os, call), []

    def broken(fd, views, offset):
        calls.append(len(views))
        if how == "is short":
            return real(fd, views[:1], offset)
        if how == "fails" and offset <= 4 * PAGE_BYTES < offset + sum(map(len, views)):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(fd, views, offset)

    def verify():
        if how == "moves wrong bytes":
            raise CorruptDataError("the checksum differs")

    monkeypatch.setattr(os, call, broken)
    outcomes = [Outcome(HostMemory(PAGE_BYTES)) for _ in range(3)]
    places = [(3 + number) * PAGE_BYTES for number in range(3)]
    requests = [
        BlockRequest(call == "pwritev", region.fd, place, end.memory.address, PAGE_BYTES, end)
        for place, end in zip(places, outcomes, strict=True)
    ]
    requests[1].after = verify
    backend.submit(requests)
    errors = [type(end.get()) for end in outcomes]
    assert calls == ([3] if how == "moves wrong bytes" else [3, 1, 1, 1]), "one by one then"
    error = {"fails": OSError, "is short": type(None), "moves wrong bytes": CorruptDataError}[how]
    assert errors == [type(None), error, type(None)]


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
