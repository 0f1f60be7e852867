"""The posix backend: system calls that misbehave, what stays in the page cache, and its threads."""

import ctypes
import errno
import mmap
import os
import sys
import threading
import time
from functools import partial

import pytest

from offload_strategy.errors import CorruptDataError
from offload_strategy.io.backends import thread_pool
from offload_strategy.io.backends.posix import PosixBackend
from offload_strategy.io.backends.protocol import BlockRequest
from offload_strategy.io.backends.thread_pool import ThreadPool
from offload_strategy.io.regions.region import Region
from offload_strategy.units import PAGE_BYTES, MiB
from tests.conftest import our_threads
from tests.io.conformance import HostMemory, Outcome, begin
from tests.store.rig import meanwhile
from tests.support import raising

BLOCK = 16 * PAGE_BYTES
CALLS = pytest.mark.parametrize("call", ["pwritev", "preadv"])


@pytest.fixture
def backend():
    made = PosixBackend(threads=2, block_size=BLOCK)
    yield made
    made.close()


@CALLS
@pytest.mark.parametrize("how", ["moves nothing", "is busy a few times", "is busy forever"])
def test_a_busy_system_call_is_repeated_for_a_while_and_one_that_moves_nothing_fails(
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
    kinds = {"moves nothing": OSError, "is busy a few times": type(None)}
    assert type(error) is kinds.get(how, BlockingIOError)
    assert how != "moves nothing" or str(2 * PAGE_BYTES) in str(error)


@CALLS
@pytest.mark.parametrize("how", ["fails", "is short", "moves wrong bytes"])
def test_an_error_of_one_of_several_adjacent_requests_is_its_own(
    backend, region, monkeypatch, call, how
):
    real, calls, prepared = getattr(os, call), [], []

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
    requests[1].before, requests[1].after = partial(prepared.append, call), verify
    backend.submit(requests)
    errors = [type(end.get()) for end in outcomes]
    assert calls == ([3] if how == "moves wrong bytes" else [3, 1, 1, 1]), "one by one then"
    error = {"fails": OSError, "is short": type(None), "moves wrong bytes": CorruptDataError}[how]
    assert errors == [type(None), error, type(None)]
    assert prepared


def cached_pages(fd, nbytes):
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


@pytest.fixture
def pool():
    made = ThreadPool("ssd-offload-test", 1)
    yield made
    made.close(30)


def occupy(pool):
    """Keep a thread busy until the event is set."""
    gate, begun = threading.Event(), threading.Event()

    def busy():
        begun.set()
        assert gate.wait(30)

    pool.submit(busy)
    assert begun.wait(30)
    return gate


# ---------------------------------------------------------------------- threads start and end


def test_threads_end_when_there_is_no_work(pool, monkeypatch):
    monkeypatch.setattr(thread_pool, "IDLE_SECONDS", 0.01)
    for _ in range(2):
        occupy(pool).set()
        for thread in our_threads():
            thread.join(30)
        assert our_threads() == set()


def test_ended_threads_are_gone_at_once_and_start_again_on_demand(pool):
    ran = []
    for number in range(3):
        pool.submit(lambda number=number: ran.append(number))
        pool.end_threads()
        assert (our_threads(), ran[-1]) == (set(), number)
    occupy(pool).set()
    for thread in our_threads():  # it does not wait for another job any more
        thread.join(thread_pool.IDLE_SECONDS / 2)
    assert our_threads() == set()


def test_where_no_thread_can_start_a_running_one_is_enough_and_else_the_job_never_runs(monkeypatch):
    pool, ran = ThreadPool("ssd-offload-test", 2), []
    refuse = raising(RuntimeError("can't start new thread"))
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError, match="can't start"):
        pool.submit(lambda: ran.append("refused"))
    monkeypatch.undo()
    gate = occupy(pool)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    pool.submit(lambda: ran.append("accepted"))
    monkeypatch.undo()
    gate.set()
    pool.close()
    assert ran == ["accepted"]


# ---------------------------------------------------------------------- threads that die
# With a trace function (a debugger's, coverage's) every thread of CPython 3.11 that calls a Python
# function goes round in circles there while an exception waits for a thread that waits for a lock.
@pytest.mark.skipif(
    sys.gettrace() is not None and sys.version_info < (3, 12), reason="CPython 3.11 is being traced"
)
# A thread that is ended after its last job has nobody left to tell.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_threads_that_are_ended_at_random_lose_no_job():
    pool, count = ThreadPool("ssd-offload-test", 2), 0
    ran: set[int] = set()
    died: set[int] = set()
    settled: set[threading.Thread] = set()
    ended: set[threading.Thread] = set()
    # At which moment a thread is ended is random: on a busy machine it takes more jobs.
    while count < 300 or (not died and count < 10_000):
        number, count = count, count + 1

        def job(number=number):
            settled.add(threading.current_thread())
            for _ in range(20):
                time.sleep(0)
            ran.add(number)

        pool.submit(job, lambda error, number=number: died.add(number))
        if number % 7 == 0:
            for thread in our_threads() & settled - ended:
                # A thread that is ended while it starts would leave `Thread.start` waiting forever,
                # and none can clean up if it is ended again at every line of that.
                if thread.is_alive():
                    ended.add(thread)
                    set_exception = ctypes.pythonapi.PyThreadState_SetAsyncExc
                    set_exception(ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit))
                    time.sleep(0.001)
    pool.close(30)
    assert ran | died == set(range(count))
    assert died, "no thread was ended while it had a job: the test shows nothing"
    assert our_threads() == set()


# ---------------------------------------------------------------------- jobs on the calling thread
def test_a_caller_that_waits_may_run_a_queued_job_itself(pool):
    gate, ran, died = occupy(pool), [], []
    assert not pool.run_queued("path"), "a running job is not queued"
    pool.submit(lambda: ran.append(threading.current_thread()))
    pool.submit(sys.exit, died.append)
    assert pool.run_queued("path")
    assert ran == [threading.current_thread()]
    with pytest.raises(SystemExit):
        pool.run_queued("path")
    assert [type(error) for error in died] == [SystemExit], "its owner is told"
    assert not pool.run_queued("path")
    gate.set()


def test_an_idle_thread_warns_of_a_caller_whose_job_does_not_end(monkeypatch):
    monkeypatch.setattr(thread_pool, "IDLE_SECONDS", 0.02)
    monkeypatch.setattr(thread_pool, "SILENT_SECONDS", 0.05)
    warned, running = threading.Event(), threading.Event()
    monkeypatch.setattr(thread_pool.logger, "warning", lambda *args: warned.set())
    pool = ThreadPool("ssd-offload-test", 2)
    first, second = occupy(pool), occupy(pool)

    def silent():
        running.set()
        assert warned.wait(30)

    pool.submit(silent)  # no thread but the caller's is free for it
    caller = meanwhile(pool.run_queued, "/mnt/nvme0")
    assert running.wait(30)
    second.set()  # idle from here on, that thread watches the caller
    assert warned.wait(30)
    assert caller.result(30) is True
    first.set()
    pool.close(30)
