from __future__ import annotations

import errno
import gc
import os
import signal
import sys
import threading
import time
import weakref
import zlib
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from offload_strategy.errors import StorageError
from offload_strategy.io.backends.posix import PosixBackend
from offload_strategy.io.backends.protocol import BlockRequest, create_backend
from offload_strategy.io.bandwidth.probe import PathBandwidth, _Stopped, probe, write_latencies
from offload_strategy.io.regions.region import Region
from offload_strategy.units import PAGE_BYTES, KiB, MiB
from tests.io.loop_disk import loop_disk, slow_disk

BLOCK = 4 * MiB
MBps = 1_000_000
# The package offers a function of the same name.
probe_module = sys.modules[probe.__module__]


@pytest.fixture
def region(disk: Path) -> Iterator[Region]:
    made = Region(disk, "nvme", 256 * MiB)
    yield made
    made.close()


@pytest.fixture
def backend() -> Iterator[PosixBackend]:
    made = PosixBackend(threads=4, block_size=BLOCK)
    yield made
    made.close()


class Watched:
    """A backend that notes what it is given, and may be told to go wrong.

    Args:
        inner: what does the work.
        fault: called with the number of each request and the request; an error that it returns is
            the request's end, one that it raises comes out of `submit`.
    """

    def __init__(
        self,
        inner: PosixBackend,
        fault: Callable[[int, BlockRequest], Exception | None] = lambda number, request: None,
    ) -> None:
        self.inner, self.fault = inner, fault
        self.depth, self.block_size = inner.depth, inner.block_size
        self.device_memory = False
        self.requests: list[tuple[bool, int, int, int]] = []
        self.under_way = self.most_under_way = 0
        self._lock = threading.Lock()

    def submit(self, request: BlockRequest) -> None:
        number = len(self.requests)
        self.requests.append((request.write, request.offset, request.address, request.nbytes))
        error = self.fault(number, request)
        on_done = request.on_done
        with self._lock:
            self.under_way += 1
            self.most_under_way = max(self.most_under_way, self.under_way)

        def done(outcome: BaseException | None) -> None:
            with self._lock:
                self.under_way -= 1
            on_done(error or outcome)

        request.on_done = done
        self.inner.submit(request)

    def close(self) -> None:
        self.inner.close()


@pytest.mark.alone
def test_it_measures_both_directions_and_gives_the_extent_back(
    region: Region, backend: PosixBackend
) -> None:
    shares: list[float] = []
    started = time.perf_counter()
    found = probe(region, backend, seconds=0.2, on_progress=shares.append)
    took = time.perf_counter() - started
    assert found.read == pytest.approx(found.read_bytes / found.read_seconds)
    assert found.write == pytest.approx(found.written_bytes / found.write_seconds)
    assert min(found.read, found.write) <= found.round_trip <= max(found.read, found.write)
    assert found.read_seconds + found.write_seconds <= took < 2
    assert all(0 <= earlier <= later <= 1 for earlier, later in pairwise(shares))
    assert shares[0] < 0.5 < shares[-1]
    assert region.used_bytes == 0


def test_requests_stay_within_the_extent_the_block_and_the_depth(
    region: Region, backend: PosixBackend
) -> None:
    watched = Watched(backend)
    found = probe(region, watched, seconds=0.1, nbytes=16 * MiB)
    assert watched.under_way == 0
    assert 1 < watched.most_under_way <= backend.depth
    assert {write for write, *_ in watched.requests} == {True, False}
    assert len({address for _, _, address, _ in watched.requests}) == backend.depth
    for _, offset, address, nbytes in watched.requests:
        assert address % PAGE_BYTES == offset % PAGE_BYTES == 0
        assert 0 < nbytes <= BLOCK
        assert 0 <= offset < offset + nbytes <= 16 * MiB
    moved = {w: sum(n for write, *_, n in watched.requests if write is w) for w in (True, False)}
    assert moved == {True: found.written_bytes, False: found.read_bytes}


def test_only_what_was_written_is_read(disk: Path, backend: PosixBackend) -> None:
    region = Region(disk, "nvme", 256 * MiB)
    watched = Watched(backend, lambda number, request: time.sleep(0.01) if request.write else None)
    try:
        probe(region, watched, seconds=0.05)
    finally:
        region.close()
    end = {
        w: max(offset + nbytes for write, offset, _, nbytes in watched.requests if write is w)
        for w in (True, False)
    }
    assert end[False] <= end[True] < 64 * MiB  # a quarter of the space was there to be written


def test_the_bytes_do_not_compress_and_no_page_is_written_twice(
    region: Region, backend: PosixBackend
) -> None:
    probe(region, backend, seconds=0.1, nbytes=8 * MiB)
    with open(f"/proc/self/fd/{region.fd}", "rb") as file:
        content = file.read(8 * MiB)
    assert len(content) == 8 * MiB
    assert len(zlib.compress(content, 1)) > 0.99 * len(content)


def test_a_quarter_of_what_is_free_is_the_most_that_it_takes(
    disk: Path, backend: PosixBackend
) -> None:
    region = Region(disk, "nvme", 32 * MiB)
    taken = region.allocate(16 * MiB)
    assert taken is not None
    watched = Watched(backend)
    probe(region, watched, seconds=0.05)
    assert all(16 * MiB <= offset < 20 * MiB for _, offset, _, _ in watched.requests)
    assert region.used_bytes == 16 * MiB
    region.close()


def test_a_tiny_space_and_tiny_blocks_will_do(disk: Path) -> None:
    region = Region(disk, "nvme", 64 * KiB)
    backend = create_backend("posix", threads=2, block_size=PAGE_BYTES)
    found = probe(region, backend, seconds=0.05)
    assert found.round_trip > 0
    backend.close()
    region.close()


def test_a_full_space_is_refused_with_what_to_do(region: Region, backend: PosixBackend) -> None:
    assert region.allocate(256 * MiB - PAGE_BYTES) is not None
    with pytest.raises(StorageError, match=r"'nvme'.*no room .* 64 KiB .*Free some space"):
        probe(region, backend, seconds=0.05)
    assert region.used_bytes == 256 * MiB - PAGE_BYTES


# ---------------------------------------------------------------------------- slow and broken disks
@pytest.mark.alone
@pytest.mark.parametrize("direct", [True, False], ids=["direct", "buffered"])
def test_a_slow_path_is_measured_in_time(
    direct: bool, tmp_path: Path, backend: PosixBackend
) -> None:
    with slow_disk(tmp_path, 400 * MiB, 50 * MBps) as disk:
        assert disk.directory is not None
        region = Region(disk.directory, "slow", 200 * MiB, direct=direct)
        try:
            started = time.perf_counter()
            found = probe(region, backend, seconds=0.5)
            took = time.perf_counter() - started
        finally:
            region.close()
    # The throttle lets a burst of a tenth of a second pass, and read-ahead reads too far.
    assert 40 * MBps < found.write < 65 * MBps
    assert 35 * MBps < found.read < 65 * MBps
    assert found.read_seconds + found.write_seconds < 2 * 0.5 + 4 * BLOCK / (50 * MBps)
    assert took < 2.5  # other programs may be running


@pytest.mark.alone
def test_paths_are_told_apart_by_their_speed(tmp_path: Path, backend: PosixBackend) -> None:
    found: dict[int, PathBandwidth] = {}
    for speed in (300, 100):
        with slow_disk(tmp_path / str(speed), 400 * MiB, speed * MBps) as disk:
            assert disk.directory is not None
            region = Region(disk.directory, "path", 200 * MiB)
            found[speed] = probe(region, backend, seconds=0.25)
            region.close()
    assert 2.2 < found[300].round_trip / found[100].round_trip < 3.8


def test_a_read_that_the_disk_fails_ends_it_with_path_and_reason(
    tmp_path: Path, backend: PosixBackend
) -> None:
    with loop_disk(tmp_path, 200 * MiB) as disk:
        assert disk.directory is not None
        region = Region(disk.directory, "broken", 100 * MiB)

        def lose_the_end(share: float) -> None:
            if share > 0.5:  # all is written
                os.truncate(disk.file, 1 * MiB)

        try:
            with pytest.raises(StorageError, match=r"'broken'.*measuring .*/mount failed") as got:
                probe(region, backend, seconds=0.5, on_progress=lose_the_end)
        finally:
            region.close()
        assert isinstance(got.value.__cause__, OSError)
        assert got.value.__cause__.errno == errno.EIO
        assert region.used_bytes == 0


def test_a_write_that_the_disk_fails_ends_it_with_path_and_reason(
    tmp_path: Path, backend: PosixBackend
) -> None:
    # A disk that promises 200 MiB and has less than 24.
    with (
        loop_disk(tmp_path / "small", 24 * MiB) as small,
        loop_disk(small.directory / "promise", 200 * MiB, sparse=True) as disk,
    ):
        assert disk.directory is not None
        region = Region(disk.directory, "broken", 110 * MiB)
        try:
            with pytest.raises(StorageError, match=r"'broken'.*measuring .*/mount failed") as got:
                probe(region, backend, seconds=0.5)
        finally:
            region.close()
        assert isinstance(got.value.__cause__, OSError)
        assert got.value.__cause__.errno in (errno.EIO, errno.ENOSPC)
        assert region.used_bytes == 0


# ---------------------------------------------------------------------------- ends before the end
def test_a_failed_block_waits_for_the_others(region: Region, backend: PosixBackend) -> None:
    running = threading.Semaphore(0)

    def slowly() -> None:
        time.sleep(0.3)
        running.release()

    def fault(number: int, request: BlockRequest) -> Exception | None:
        if number == 1:
            return OSError(errno.EIO, "Input/output error")
        if number == 2:
            request.before = slowly
        return None

    watched = Watched(backend, fault)
    with pytest.raises(StorageError, match="Input/output error"):
        probe(region, watched, seconds=0.2)
    assert running.acquire(blocking=False), "the slow block was still running"
    assert watched.under_way == 0
    assert region.used_bytes == 0


def test_a_backend_that_refuses_a_block_waits_for_the_others(
    region: Region, backend: PosixBackend
) -> None:
    def fault(number: int, request: BlockRequest) -> Exception | None:
        if number == 5:
            raise StorageError("the backend is closed")
        return None

    watched = Watched(backend, fault)
    with pytest.raises(StorageError, match="the backend is closed"):
        probe(region, watched, seconds=0.2)
    assert watched.under_way == 0
    assert region.used_bytes == 0


def test_a_path_that_does_not_answer_is_given_up_and_its_memory_stays(
    region: Region, backend: PosixBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe_module, "STALLED_SECONDS", 0.2)
    monkeypatch.setattr(probe_module, "_incompressible", _remembered(memories := []))
    late: list[BlockRequest] = []

    class Silent(PosixBackend):
        def submit(self, request: BlockRequest) -> None:
            late.append(request)

    with pytest.raises(StorageError, match=r"'nvme'.*has not answered for .*Check the device"):
        probe(region, Silent(threads=2, block_size=BLOCK), seconds=0.2)
    assert len(late) == 2
    assert region.used_bytes > 0, "late writes may still land in the extent"
    gc.collect()
    assert memories[0]() is not None, "late requests still use the memory"
    for request in late:
        assert request.before is not None
        with pytest.raises(_Stopped):
            request.before()  # what did not begin yet never will
        request.on_done(OSError(errno.EIO, "at last"))
    del request
    late.clear()
    gc.collect()
    assert memories[0]() is None


def _remembered(memories: list[weakref.ref[object]]) -> Callable[[int, int], object]:
    make = probe_module._incompressible

    def remember(slots: int, nbytes: int) -> object:
        memory = make(slots, nbytes)
        memories.append(weakref.ref(memory))
        return memory

    return remember


def test_ctrl_c_ends_it_and_nothing_is_left_under_way(
    region: Region, backend: PosixBackend
) -> None:
    watched = Watched(backend)
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    started = time.perf_counter()
    try:
        with pytest.raises(KeyboardInterrupt):
            probe(region, watched, seconds=20)
    finally:
        timer.join()
    assert time.perf_counter() - started < 5
    assert watched.under_way == 0
    assert region.used_bytes == 0


def test_an_error_of_the_progress_report_ends_it(region: Region, backend: PosixBackend) -> None:
    def fail(share: float) -> None:
        raise ValueError("no terminal")

    with pytest.raises(ValueError, match="no terminal"):
        probe(region, backend, seconds=20, on_progress=fail)
    assert region.used_bytes == 0


# ---------------------------------------------------------------------------- latency
def test_latencies_are_of_one_write_at_a_time(region: Region, backend: PosixBackend) -> None:
    watched = Watched(backend)
    latencies = write_latencies(region, watched, seconds=0.2, most=20)
    assert len(latencies) == 20
    assert all(0 < seconds < 1 for seconds in latencies)
    assert watched.most_under_way == 1
    assert {(write, nbytes) for write, _, _, nbytes in watched.requests} == {(True, 2 * MiB)}
    assert region.used_bytes == 0


def test_a_write_larger_than_a_block_is_over_when_its_last_block_is(region: Region) -> None:
    backend = PosixBackend(threads=4, block_size=512 * KiB)
    watched = Watched(
        backend, lambda number, request: setattr(request, "before", lambda: time.sleep(0.05))
    )
    try:
        latencies = write_latencies(region, watched, seconds=0.01)
    finally:
        backend.close()
    assert len(watched.requests) == 4 * len(latencies)
    assert min(latencies) >= 0.05
    assert watched.most_under_way == 4
