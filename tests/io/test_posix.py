from __future__ import annotations

import errno
import os
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from offload_strategy.errors import ConfigError
from offload_strategy.io.backends.posix import PosixBackend
from offload_strategy.io.backends.protocol import BlockRequest, create_backend
from offload_strategy.io.backends.thread_pool import ThreadPool
from offload_strategy.io.regions.region import Region
from offload_strategy.units import PAGE_BYTES, MiB
from tests.conftest import our_threads
from tests.io.conformance import HostMemory as Memory

BLOCK = 16 * PAGE_BYTES


@pytest.fixture(params=[True, False], ids=["direct", "buffered"])
def region(request: pytest.FixtureRequest, disk: Path) -> Iterator[Region]:
    made = Region(disk, "nvme", 4 * MiB, direct="auto" if request.param else False)
    if request.param and not made.direct:
        made.close()
        pytest.skip("the temporary directory does not take direct I/O")
    made.allocate(4 * MiB)
    yield made
    made.close()


@pytest.fixture
def backend() -> Iterator[PosixBackend]:
    made = create_backend("posix", threads=2, block_size=BLOCK)
    assert isinstance(made, PosixBackend)
    yield made
    made.close()


def move(
    backend: PosixBackend,
    region: Region,
    memory: Memory,
    *,
    write: bool,
    offset: int = 0,
    before: Callable[[], None] | None = None,
) -> BaseException | None:
    """One block, and the error that it ended with."""
    outcome: list[BaseException | None] = []
    over = threading.Event()

    def done(error: BaseException | None) -> None:
        outcome.append(error)
        over.set()

    backend.submit(
        BlockRequest(
            write=write,
            fd=region.fd,
            offset=offset,
            address=memory.address,
            nbytes=memory.nbytes,
            on_done=done,
            before=before,
        )
    )
    assert over.wait(30)
    assert len(outcome) == 1
    return outcome[0]


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    nbytes=st.one_of(
        st.integers(1, BLOCK),
        st.sampled_from([1, PAGE_BYTES - 1, PAGE_BYTES, PAGE_BYTES + 1, BLOCK - 1, BLOCK]),
    ),
    out=st.sampled_from([0, 1, 8, 512, PAGE_BYTES - 1]),
    back=st.sampled_from([0, 1, 8, 512, PAGE_BYTES - 1]),
    page=st.integers(0, 20),
)
def test_any_length_at_any_address_comes_back_as_it_was(
    backend: PosixBackend, region: Region, nbytes: int, out: int, back: int, page: int
) -> None:
    written, read = Memory(nbytes, out), Memory(nbytes, back)
    written.data = random.Random(nbytes).randbytes(nbytes)
    assert move(backend, region, written, write=True, offset=page * PAGE_BYTES) is None
    assert move(backend, region, read, write=False, offset=page * PAGE_BYTES) is None
    assert read.data == written.data
    assert read.around == {0xA5}
    with open(f"/proc/self/fd/{region.fd}", "rb") as other:  # as the file system sees it
        other.seek(page * PAGE_BYTES)
        assert other.read(nbytes) == written.data


def test_a_block_does_not_touch_the_pages_beside_it(backend: PosixBackend, region: Region) -> None:
    whole = Memory(4 * PAGE_BYTES)
    assert move(backend, region, whole, write=True) is None
    middle = Memory(PAGE_BYTES + 1, misalignment=3)
    middle.data = b"m" * middle.nbytes
    assert move(backend, region, middle, write=True, offset=PAGE_BYTES) is None
    assert move(backend, region, whole, write=False) is None
    assert whole.data[:PAGE_BYTES] == b"\xa5" * PAGE_BYTES
    assert whole.data[PAGE_BYTES : 2 * PAGE_BYTES + 1] == middle.data
    assert whole.data[3 * PAGE_BYTES :] == b"\xa5" * PAGE_BYTES


@pytest.mark.parametrize("misalignment", [0, 1], ids=["aligned", "unaligned"])
def test_short_reads_and_writes_go_on_where_they_stopped(
    backend: PosixBackend, region: Region, monkeypatch: pytest.MonkeyPatch, misalignment: int
) -> None:
    real_write, real_read = os.pwritev, os.preadv
    calls = {"write": 0, "read": 0}

    def short_write(fd: int, views: list[memoryview], offset: int) -> int:
        calls["write"] += 1
        return real_write(fd, [views[0][:PAGE_BYTES]], offset)

    def short_read(fd: int, views: list[memoryview], offset: int) -> int:
        calls["read"] += 1
        return real_read(fd, [views[0][:PAGE_BYTES]], offset)

    monkeypatch.setattr(os, "pwritev", short_write)
    monkeypatch.setattr(os, "preadv", short_read)
    nbytes = 5 * PAGE_BYTES + 100
    written, read = Memory(nbytes, misalignment), Memory(nbytes, misalignment)
    written.data = os.urandom(nbytes)
    assert move(backend, region, written, write=True) is None
    assert move(backend, region, read, write=False) is None
    assert read.data == written.data
    assert calls == {"write": 6, "read": 6}


@pytest.mark.parametrize("misalignment", [0, 1], ids=["aligned", "unaligned"])
@pytest.mark.parametrize("name", ["pwritev", "preadv"])
def test_an_error_of_the_system_is_handed_on(
    backend: PosixBackend,
    region: Region,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    misalignment: int,
) -> None:
    def broken(fd: int, views: Any, offset: int) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, name, broken)
        error = move(backend, region, Memory(100, misalignment), write=name == "pwritev")
    assert isinstance(error, OSError)
    assert error.errno == errno.EIO
    # The thread survived it.
    assert move(backend, region, Memory(100), write=True) is None


@pytest.mark.parametrize("name", ["pwritev", "preadv"])
def test_a_system_call_that_moves_nothing_is_an_error_and_no_endless_loop(
    backend: PosixBackend, region: Region, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(os, name, lambda fd, views, offset: 0)
    error = move(
        backend, region, Memory(2 * PAGE_BYTES), write=name == "pwritev", offset=PAGE_BYTES
    )
    assert isinstance(error, OSError)
    assert str(2 * PAGE_BYTES) in str(error)


def test_a_read_beyond_the_end_of_the_file_is_an_error(
    backend: PosixBackend, region: Region
) -> None:
    error = move(backend, region, Memory(PAGE_BYTES), write=False, offset=64 * MiB)
    assert isinstance(error, OSError)
    assert "end of file" in str(error)


def test_what_must_come_before_a_block_comes_before_it(
    backend: PosixBackend, region: Region
) -> None:
    written, read = Memory(100), Memory(100)

    def fill() -> None:
        written.data = b"f" * 100

    assert move(backend, region, written, write=True, before=fill) is None
    assert move(backend, region, read, write=False) is None
    assert read.data == b"f" * 100


def test_when_that_fails_nothing_is_written(backend: PosixBackend, region: Region) -> None:
    def fail() -> None:
        raise RuntimeError("the device is gone")

    error = move(backend, region, Memory(100), write=True, before=fail)
    assert str(error) == "the device is gone"
    read = Memory(100)
    assert move(backend, region, read, write=False) is None
    assert read.data == bytes(100)


def test_closing_finishes_what_was_submitted_and_ends_the_threads(region: Region) -> None:
    backend = PosixBackend(threads=2, block_size=BLOCK)
    ended: list[BaseException | None] = []
    memory = Memory(BLOCK)
    for index in range(20):
        backend.submit(
            BlockRequest(True, region.fd, index * BLOCK, memory.address, BLOCK, ended.append)
        )
    backend.close()
    assert ended == [None] * 20
    assert our_threads() == set()
    backend.close()
    with pytest.raises(RuntimeError, match="closed"):
        backend.submit(BlockRequest(True, region.fd, 0, memory.address, 1, ended.append))


def test_no_more_threads_come_than_asked_for() -> None:
    pool = ThreadPool("ssd-offload-test", 3)
    gate, running = threading.Event(), threading.Semaphore(0)

    def job() -> None:
        running.release()
        gate.wait(30)

    for _ in range(10):
        pool.submit(job)
    for _ in range(3):
        assert running.acquire(timeout=30)
    assert len(our_threads()) == 3
    gate.set()
    pool.close()


def test_threads_leave_when_there_is_no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offload_strategy.io.backends.thread_pool.IDLE_SECONDS", 0.01)
    pool = ThreadPool("ssd-offload-test", 1)
    ran = threading.Event()
    pool.submit(ran.set)
    assert ran.wait(30)
    for thread in threading.enumerate():
        if thread.name.startswith("ssd-offload-test"):
            thread.join(30)
    assert our_threads() == set()
    again = threading.Event()
    pool.submit(again.set)
    assert again.wait(30)
    pool.close()


def test_a_system_that_starts_no_thread_is_an_error_and_the_job_never_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool = ThreadPool("ssd-offload-test", 2)
    ran: list[str] = []

    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start"):
            pool.submit(lambda: ran.append("refused"))
    pool.submit(lambda: ran.append("accepted"))
    pool.close()
    assert ran == ["accepted"]


def test_one_thread_is_enough_where_the_system_gives_no_second(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool = ThreadPool("ssd-offload-test", 2)
    gate, ran = threading.Event(), threading.Event()
    pool.submit(lambda: gate.wait(30) and None)

    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        pool.submit(ran.set)
    gate.set()
    assert ran.wait(30)
    pool.close()


def test_a_backend_that_does_not_exist_is_refused_with_those_that_do() -> None:
    with pytest.raises(ConfigError, match=r"'tape'.*posix"):
        create_backend("tape", threads=1, block_size=BLOCK)
