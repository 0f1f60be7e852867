"""The measurement of a path: right on a simulated device, and harmless however it ends."""

import errno
import gc
import itertools
import os
import signal
import sys
import threading
import weakref
import zlib
from contextlib import closing
from itertools import pairwise

import pytest

from offload_strategy.errors import StorageError
from offload_strategy.io.backends.posix import PosixBackend
from offload_strategy.io.backends.protocol import Backend
from offload_strategy.io.bandwidth.probe import probe, write_latencies
from offload_strategy.io.regions.region import Region
from offload_strategy.telemetry import Direction
from offload_strategy.units import PAGE_BYTES, KiB, MiB
from tests.io.backends import ManualBackend, SimulatedBackend

READ, WRITE = Direction.READ, Direction.WRITE
BLOCK = 4 * MiB
MBps = 1_000_000
probe_module = sys.modules[probe.__module__]


@pytest.fixture
def region(disk):
    made = Region(disk, "nvme", 256 * MiB)
    yield made
    made.close()


@pytest.fixture
def backend():
    made = PosixBackend(threads=4, block_size=BLOCK)
    yield made
    made.close()


class WatchedBackend(Backend):
    """Records what it is given; `fault` may return the error of a request, or raise in `submit`."""

    def __init__(self, inner, fault=lambda *_: None):
        self.inner, self.fault = inner, fault
        super().__init__(threads=inner.depth, block_size=inner.block_size)
        self.requests: list[tuple[bool, int, int, int]] = []
        self.in_flight = self.most_in_flight = 0
        self._lock = threading.Lock()

    def submit(self, requests):
        (request,) = requests
        number = len(self.requests)
        self.requests.append((request.write, request.offset, request.address, request.nbytes))
        error, on_done = self.fault(number, request), request.on_done

        def done(outcome):
            with self._lock:
                self.in_flight -= 1
            on_done(error or outcome)

        with self._lock:
            self.in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self.in_flight)
        request.on_done = done
        self.inner.submit(requests)


# ---------------------------------------------------------------------------- rates
@pytest.mark.parametrize("direct", ["auto", False], ids=["direct", "buffered"])
@pytest.mark.parametrize(("read", "write"), [(3000, 1000), (2000, 100), (50, 50), (2, 1)])
def test_the_rate_of_each_direction_is_measured_in_time(disk, monkeypatch, read, write, direct):
    backend = SimulatedBackend(read * MBps, write * MBps, monkeypatch)
    watched, shares = WatchedBackend(backend), []
    with closing(Region(disk, "nvme", 1024 * MiB, direct=direct)) as region:
        found = probe(region, watched, seconds=0.5, on_progress=shares.append)
    assert found[READ].rate == pytest.approx(read * MBps)
    assert found[WRITE].rate == pytest.approx(write * MBps)
    assert {rate.source for rate in found.values()} == {"probe"}
    # The first requests of 256 KiB are larger than what a path of 1 MB/s moves in time.
    assert backend.now <= 2 * 0.5 + 4 * 256 * KiB / (write * MBps) + 4 * 256 * KiB / (read * MBps)
    assert all(0 <= earlier <= later <= 1 for earlier, later in pairwise(shares))
    assert shares[0] <= 0.5 < shares[-1]
    ends = {True: 0, False: 0}
    for is_write, offset, _, nbytes in watched.requests:
        ends[is_write] = max(ends[is_write], offset + nbytes)
    assert ends[False] <= ends[True], "only what was written is read"


def test_requests_stay_within_the_extent_the_block_and_the_depth(region, backend):
    assert region.allocate(192 * MiB) is not None
    watched = WatchedBackend(backend)
    found = probe(region, watched, seconds=0.1)
    assert watched.in_flight == 0
    assert 1 <= watched.most_in_flight <= backend.depth
    assert len({address for _, _, address, _ in watched.requests}) == backend.depth
    for _, offset, address, nbytes in watched.requests:
        assert address % PAGE_BYTES == offset % PAGE_BYTES == 0
        assert 0 < nbytes <= BLOCK
        # A quarter of what is free is the most that it takes.
        assert 192 * MiB <= offset < offset + nbytes <= 208 * MiB
    moved = {w: sum(n for write, *_, n in watched.requests if write is w) for w in (True, False)}
    assert moved == {True: found[WRITE].nbytes, False: found[READ].nbytes}
    assert region.used_bytes == 192 * MiB


def test_the_bytes_do_not_compress_and_no_page_is_written_twice(region, backend, monkeypatch):
    # A clock that counts, so that all of the extent is written however slow the disk is.
    ticks = itertools.count()
    monkeypatch.setattr(probe_module, "_clock", lambda: 1e-4 * next(ticks))
    probe(region, backend, seconds=0.1, nbytes=1 * MiB)
    with open(f"/proc/self/fd/{region.fd}", "rb") as file:
        content = file.read(1 * MiB)
    assert len(zlib.compress(content, 1)) > 0.99 * len(content)
    pages = [content[at : at + PAGE_BYTES] for at in range(0, len(content), PAGE_BYTES)]
    assert len(set(pages)) == len(pages)


def test_a_full_region_is_refused_with_what_to_do(region, backend):
    assert region.allocate(256 * MiB - PAGE_BYTES) is not None
    with pytest.raises(StorageError, match=r"'nvme'.*no room .* 64 KiB .*Free some space"):
        probe(region, backend, seconds=0.05)
    assert region.used_bytes == 256 * MiB - PAGE_BYTES


# ---------------------------------------------------------------------------- early ends
@pytest.mark.parametrize("how", ["fails", "is refused", "Ctrl-C"])
def test_when_it_ends_early_it_says_why_and_waits_for_what_is_in_flight(region, backend, how):
    broken = OSError(errno.EIO, "Input/output error")
    ends, slow_one_ended = threading.Event(), threading.Event()

    def slow():
        assert ends.wait(30)
        slow_one_ended.set()

    def fault(number, request):
        if number == 1:
            request.before = slow
        if number == 2:
            ends.set()
            if how == "fails":
                return broken
            if how == "is refused":
                raise StorageError("the backend is at its end")
            os.kill(os.getpid(), signal.SIGINT)
        return None

    watched = WatchedBackend(backend, fault)
    with pytest.raises((StorageError, KeyboardInterrupt)) as ended:
        probe(region, watched, seconds=600)
    if how == "fails":
        text = f"tier 'nvme': measuring {region.path} failed on 256 KiB: [Errno 5] Input/output"
        assert str(ended.value).startswith(text)
        assert ended.value.__cause__ is broken
    else:
        assert str(ended.value) == ("the backend is at its end" if how == "is refused" else "")
    assert slow_one_ended.is_set()
    assert watched.in_flight == region.used_bytes == 0


def test_a_path_that_does_not_answer_is_an_error_and_its_memory_stays(region, monkeypatch):
    memories: list[weakref.ref[object]] = []
    make = probe_module._incompressible

    def make_and_record(*sizes):
        memory = make(*sizes)
        memories.append(weakref.ref(memory))
        return memory

    monkeypatch.setattr(probe_module, "STALLED_SECONDS", 0.2)
    monkeypatch.setattr(probe_module, "_incompressible", make_and_record)
    backend = ManualBackend(depth=2, block_size=BLOCK)
    with pytest.raises(StorageError, match=r"'nvme'.*has not answered for .*Check the device"):
        probe(region, backend, seconds=0.2)
    assert len(backend.waiting) == 2
    assert region.used_bytes > 0, "late writes may still land in the extent"
    gc.collect()
    assert memories[0]() is not None, "late requests still use the memory"
    for _ in range(2):
        backend.complete(OSError(errno.EIO, "at last"))
    gc.collect()
    assert memories[0]() is None


# ---------------------------------------------------------------------------- latency
def test_latencies_are_of_one_write_at_a_time(region, backend):
    watched = WatchedBackend(backend)
    latencies = write_latencies(region, watched, nbytes=2 * MiB, seconds=600, most=20)
    assert len(latencies) == 20
    assert min(latencies) > 0
    assert watched.most_in_flight == 1
    assert {(write, nbytes) for write, _, _, nbytes in watched.requests} == {(True, 2 * MiB)}
    assert region.used_bytes == 0


def test_a_write_larger_than_a_block_ends_with_its_last_block(region, monkeypatch):
    watched = WatchedBackend(SimulatedBackend(100 * MBps, 100 * MBps, monkeypatch))
    watched.block_size = 512 * KiB
    latencies = write_latencies(region, watched, nbytes=2 * MiB, seconds=0.1)
    assert latencies == pytest.approx([2 * MiB / (100 * MBps)] * 5)
    assert len(watched.requests) == 4 * len(latencies)
