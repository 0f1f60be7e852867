"""Threads that die, from inside or from outside, take no request with them."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from offload_strategy.errors import StorageError
from offload_strategy.io.backends import thread_pool as pool_module
from offload_strategy.io.backends.posix import PosixBackend
from offload_strategy.io.backends.protocol import BlockRequest
from offload_strategy.io.backends.thread_pool import ThreadPool
from offload_strategy.io.regions.region import Region
from offload_strategy.units import PAGE_BYTES, MiB
from tests.conftest import our_threads


@pytest.fixture
def pool() -> Iterator[ThreadPool]:
    made = ThreadPool("ssd-offload-test", 1)
    yield made
    made.close(30)


def end_thread(thread: threading.Thread) -> None:
    """Raise SystemExit in a thread at its next bytecode, as a debugger or a supervisor may."""
    assert thread.ident is not None
    set_exception = ctypes.pythonapi.PyThreadState_SetAsyncExc
    assert set_exception(ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit)) == 1


def the_thread() -> threading.Thread:
    (thread,) = our_threads()
    return thread


class Recorded:
    """A request of one page, and how it ended."""

    def __init__(self, region: Region, before: object = None, after: object = None) -> None:
        self.memory = ctypes.create_string_buffer(PAGE_BYTES)
        self.ended: list[BaseException | None] = []
        self.over = threading.Event()
        self.request = BlockRequest(
            write=True,
            fd=region.fd,
            offset=0,
            address=ctypes.addressof(self.memory),
            nbytes=PAGE_BYTES,
            on_done=self._done,
            before=before,  # type: ignore[arg-type]
            after=after,  # type: ignore[arg-type]
        )

    def _done(self, error: BaseException | None) -> None:
        self.ended.append(error)
        self.over.set()


@pytest.fixture
def region(disk: Path) -> Iterator[Region]:
    made = Region(disk, "nvme", 4 * MiB)
    made.allocate(4 * MiB)
    yield made
    made.close()


def test_a_thread_that_is_ended_while_it_sleeps_is_replaced(pool: ThreadPool) -> None:
    ran = threading.Event()
    pool.submit(ran.set)
    assert ran.wait(30)
    first = the_thread()
    end_thread(first)
    again = threading.Event()
    pool.submit(again.set)  # wakes it up, to its end
    assert again.wait(30)
    first.join(30)
    assert first not in our_threads()


def test_a_job_that_raises_ends_its_thread_and_the_next_one_runs(pool: ThreadPool) -> None:
    died: list[BaseException] = []
    gate, ran = threading.Event(), threading.Event()

    def job() -> None:
        gate.wait(30)
        raise SystemExit(3)

    pool.submit(job, died.append)
    first = the_thread()
    pool.submit(ran.set)
    gate.set()
    assert ran.wait(30)
    assert [type(error) for error in died] == [SystemExit]
    first.join(30)
    assert the_thread() is not first


def test_where_no_fresh_thread_is_to_be_had_the_old_one_goes_on(
    pool: ThreadPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, ran = threading.Event(), threading.Event()

    def job() -> None:
        gate.wait(30)
        raise SystemExit

    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    pool.submit(job)
    pool.submit(ran.set)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        gate.set()
        assert ran.wait(30)


# One that is ended on its way out, after its last job, has nobody left to tell.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_threads_that_are_ended_at_random_lose_no_job() -> None:
    pool = ThreadPool("ssd-offload-test", 2)
    ran: list[int] = []
    died: list[int] = []
    settled: set[threading.Thread] = set()
    ended: set[threading.Thread] = set()
    count = 0
    # Which moment a thread is ended at is chance: on a busy machine it takes some more.
    while count < 300 or (not died and count < 10_000):
        number, count = count, count + 1

        def job(number: int = number) -> None:
            settled.add(threading.current_thread())
            for _ in range(20):
                time.sleep(0)
            ran.append(number)

        def fail(error: BaseException, number: int = number) -> None:
            died.append(number)

        pool.submit(job, fail)
        if number % 7 == 0:
            for thread in our_threads():
                # One that is ended while it starts would leave `Thread.start` waiting for ever,
                # and no thread can clear up if it is ended again at every line of that.
                if thread.is_alive() and thread in settled - ended:
                    assert thread.ident is not None
                    ended.add(thread)
                    set_exception = ctypes.pythonapi.PyThreadState_SetAsyncExc
                    set_exception(ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit))
                    time.sleep(0.001)
    pool.close(30)
    assert set(ran) | set(died) == set(range(count))
    assert died, "no thread was ended while it had a job: the test shows nothing"
    assert our_threads() == set()


@pytest.mark.parametrize("reason", [SystemExit, KeyboardInterrupt, GeneratorExit])
@pytest.mark.parametrize("where", ["before", "after"])
def test_a_request_whose_thread_dies_ends_with_an_error_and_the_others_go_on(
    region: Region, reason: type[BaseException], where: str
) -> None:
    backend = PosixBackend(threads=1, block_size=1 * MiB)

    def die() -> None:
        raise reason

    victim = Recorded(region, **{where: die})
    others = [Recorded(region) for _ in range(10)]
    for one in (victim, *others):
        backend.submit(one.request)
    backend.close()
    assert len(victim.ended) == 1
    assert isinstance(victim.ended[0], StorageError)
    assert isinstance(victim.ended[0].__cause__, reason)
    assert reason.__name__ in str(victim.ended[0])
    assert str(PAGE_BYTES) in str(victim.ended[0])
    assert [one.ended for one in others] == [[None]] * 10
    assert our_threads() == set()


def test_a_thread_that_is_ended_from_outside_fails_its_request_only(region: Region) -> None:
    backend = PosixBackend(threads=1, block_size=1 * MiB)
    begun, stop = threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        deadline = time.monotonic() + 30
        while not stop.is_set() and time.monotonic() < deadline:
            time.sleep(0.001)

    victim, other = Recorded(region, before=wait), Recorded(region)
    backend.submit(victim.request)
    assert begun.wait(30)
    backend.submit(other.request)
    end_thread(next(t for t in our_threads() if t.name.endswith("-0")))
    assert victim.over.wait(30)
    assert other.over.wait(30)
    stop.set()
    assert isinstance(victim.ended[0], StorageError)
    assert other.ended == [None]
    backend.close()
    assert [len(one.ended) for one in (victim, other)] == [1, 1]


@pytest.mark.parametrize("name", ["pwritev", "preadv"])
def test_a_system_call_that_says_try_again_is_repeated(
    region: Region, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    real, refusals = getattr(os, name), [errno.EAGAIN] * 5

    def busy(fd: int, views: list[memoryview], offset: int) -> int:
        if refusals:
            raise OSError(refusals.pop(), "try again")
        return int(real(fd, views, offset))

    monkeypatch.setattr(os, name, busy)
    backend = PosixBackend(threads=1, block_size=1 * MiB)
    one = Recorded(region)
    one.request.write = name == "pwritev"
    backend.submit(one.request)
    backend.close()
    assert one.ended == [None]
    assert refusals == []


def test_but_not_for_ever(region: Region, monkeypatch: pytest.MonkeyPatch) -> None:
    def busy(fd: int, views: list[memoryview], offset: int) -> int:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(os, "pwritev", busy)
    monkeypatch.setattr("offload_strategy.io.backends.posix.RETRY_SECONDS", 0.05)
    backend = PosixBackend(threads=1, block_size=1 * MiB)
    one = Recorded(region)
    begun = time.monotonic()
    backend.submit(one.request)
    backend.close()
    assert time.monotonic() - begun >= 0.05
    (error,) = one.ended
    assert isinstance(error, OSError)
    assert error.errno == errno.EAGAIN


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


def test_buffered_io_does_not_fill_the_page_cache(disk: Path) -> None:
    total, block = 32 * MiB, 1 * MiB
    region = Region(disk, "nvme", total, direct=False)
    region.allocate(total)
    os.pwrite(region.fd, b"x" * PAGE_BYTES, 0)
    assert cached_pages(region.fd, total) >= 1
    backend = PosixBackend(threads=1, block_size=block)
    memory = ctypes.create_string_buffer(block)
    ended: list[BaseException | None] = []

    def pass_over(write: bool) -> None:
        for offset in range(0, total, block):
            over = threading.Event()

            def done(error: BaseException | None, over: threading.Event = over) -> None:
                ended.append(error)
                over.set()

            address = ctypes.addressof(memory)
            backend.submit(BlockRequest(write, region.fd, offset, address, block, done))
            assert over.wait(30)

    pass_over(write=True)
    os.fdatasync(region.fd)  # what is left dirty is the disk's speed, not ours
    pass_over(write=False)
    backend.close()
    left = cached_pages(region.fd, total)
    region.close()
    assert ended == [None] * (2 * total // block)
    assert left <= 2 * block // PAGE_BYTES


# ---------------------------------------------------------------------- helping
def test_a_caller_that_waits_may_do_the_work_itself(pool: ThreadPool) -> None:
    gate, begun = threading.Event(), threading.Event()
    ran: list[str] = []

    def busy() -> None:
        begun.set()
        assert gate.wait(30)

    pool.submit(busy)
    assert begun.wait(30)
    assert not pool.run_queued("path"), "what has begun is not begun again"
    pool.submit(lambda: ran.append(threading.current_thread().name))
    assert pool.run_queued("path")
    assert ran == [threading.current_thread().name]
    assert not pool.run_queued("path")
    gate.set()


def test_a_helper_that_fails_tells_the_owner_of_the_job(pool: ThreadPool) -> None:
    gate, begun = threading.Event(), threading.Event()
    died: list[BaseException] = []

    def busy() -> None:
        begun.set()
        assert gate.wait(30)

    def fail() -> None:
        raise SystemExit

    pool.submit(busy)
    assert begun.wait(30)
    pool.submit(fail, died.append)
    with pytest.raises(SystemExit):
        pool.run_queued("path")
    assert [type(error) for error in died] == [SystemExit]
    gate.set()


def test_a_helper_that_stays_away_is_reported(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pool_module, "IDLE_SECONDS", 0.02)
    monkeypatch.setattr(pool_module, "SILENT_SECONDS", 0.05)
    pool = ThreadPool("ssd-offload-test", 2)
    gate, begun = threading.Event(), threading.Event()

    def busy() -> None:
        begun.set()
        assert gate.wait(30)

    told = threading.Event()
    monkeypatch.setattr(pool_module.logger, "warning", lambda *args: told.set())
    both, second, away = threading.Event(), threading.Event(), threading.Event()

    def until_both() -> None:
        second.set()
        assert both.wait(30)

    def silent() -> None:
        away.set()
        assert told.wait(30)

    pool.submit(busy)
    assert begun.wait(30)
    pool.submit(until_both)
    assert second.wait(30)
    pool.submit(silent)  # nobody but the helper is there for it
    helped = []
    helper = threading.Thread(target=lambda: helped.append(pool.run_queued("/mnt/nvme0")))
    helper.start()
    assert away.wait(30)
    both.set()  # idle from here on, it watches
    assert told.wait(30)
    helper.join(30)
    assert helped == [True]
    gate.set()
    pool.close(30)
