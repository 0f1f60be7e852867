"""Threads that end, from inside or from outside, lose no request."""

import ctypes
import sys
import threading
import time

import pytest

from offload_strategy.io.backends import thread_pool
from offload_strategy.io.backends.thread_pool import ThreadPool
from tests.conftest import our_threads


@pytest.fixture
def pool():
    made = ThreadPool("ssd-offload-test", 1)
    yield made
    made.close(30)


def occupy(pool: ThreadPool) -> threading.Event:
    """Keep a thread busy until the event is set."""
    gate, begun = threading.Event(), threading.Event()

    def busy() -> None:
        begun.set()
        assert gate.wait(30)

    pool.submit(busy)
    assert begun.wait(30)
    return gate


# ---------------------------------------------------------------------- threads start and end
def test_no_more_threads_start_than_asked_for():
    pool = ThreadPool("ssd-offload-test", 3)
    gates = [occupy(pool) for _ in range(3)]
    ran = threading.Event()
    pool.submit(ran.set)
    assert len(our_threads()) == 3
    assert not ran.is_set()
    for gate in gates:
        gate.set()
    pool.close()
    assert ran.is_set()


def test_threads_end_when_there_is_no_work(pool, monkeypatch):
    monkeypatch.setattr(thread_pool, "IDLE_SECONDS", 0.01)
    for _ in range(2):
        occupy(pool).set()
        for thread in our_threads():
            thread.join(30)
        assert our_threads() == set()


def test_ended_threads_are_gone_at_once_and_start_again_on_demand(pool):
    ran: list[int] = []
    for number in range(3):
        pool.submit(lambda number=number: ran.append(number))
        pool.end_threads()
        assert our_threads() == set()
        assert ran[-1] == number
    occupy(pool).set()
    for thread in our_threads():  # it does not wait for another job any more
        thread.join(thread_pool.IDLE_SECONDS / 2)
    assert our_threads() == set()


def test_where_no_thread_can_start_a_running_one_is_enough_and_else_the_job_never_runs():
    pool, ran = ThreadPool("ssd-offload-test", 2), []

    def refuse(self):
        raise RuntimeError("can't start new thread")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start"):
            pool.submit(lambda: ran.append("refused"))
    gate = occupy(pool)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        pool.submit(lambda: ran.append("accepted"))
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
    ran: list[threading.Thread] = []
    died: list[BaseException] = []
    gate = occupy(pool)
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
    returned: list[bool] = []
    caller = threading.Thread(target=lambda: returned.append(pool.run_queued("/mnt/nvme0")))
    caller.start()
    assert running.wait(30)
    second.set()  # idle from here on, that thread watches the caller
    assert warned.wait(30)
    caller.join(30)
    assert returned == [True]
    first.set()
    pool.close(30)
