"""Contenders in their own processes, which live through all alternations.

    python -m benchmarks.io.contender KIND JSON    (started by `Contender`)

A contender makes its files and touches its buffers once. Then it does what each line of its
standard input asks for and answers with one line of JSON: seconds by its own clock, and CPU
seconds, user and system, of its process with all its threads.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from benchmarks.io.results import Skipped

#: The first use of DeepNVMe compiles it, which takes minutes.
_START_SECONDS = 600.0
_ANSWER_SECONDS = 300.0
#: What a contender that cannot run answers first.
_CANNOT = "cannot"


class Contender:
    """The side of the runner; a context manager.

    Args:
        kind: which of `KINDS`.
        settings: its keyword arguments; must be fit for JSON.

    Raises:
        Skipped: it cannot run here.
    """

    def __init__(self, kind: str, **settings: Any) -> None:
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, kind, json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            cwd=Path(__file__).resolve().parents[2],
        )
        self._kind = kind
        try:
            ready = self._answer(_START_SECONDS)
            if _CANNOT in ready:
                raise Skipped(ready[_CANNOT])
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def ask(self, action: str, **arguments: Any) -> dict[str, Any]:
        """Have something done and wait for the answer."""
        self.tell(action, **arguments)
        return self.answer()

    def tell(self, action: str, **arguments: Any) -> None:
        """Have something begun; `answer` waits for it."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": action, **arguments}) + "\n")
        self._process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """The answer to what was told."""
        return self._answer(_ANSWER_SECONDS)

    def close(self) -> None:
        """End the process: it leaves when its input ends."""
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(OSError):  # it is gone
            process.stdin.close()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()
        self._errors.close()

    def _answer(self, patience: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        # A process that does not answer is ended, and its output with it: the wait has an end.
        watch = threading.Timer(patience, self._process.kill)
        watch.start()
        try:
            line = self._process.stdout.readline()
        finally:
            watch.cancel()
        if not line:
            self._process.wait(20)
            self._errors.seek(0)
            raise RuntimeError(
                f"contender {self._kind} ended with status {self._process.returncode} (or did not "
                f"answer for {patience:.0f} s):\n{self._errors.read()[-4000:]}"
            )
        answer: dict[str, Any] = json.loads(line)
        return answer


class _Meter:
    """Seconds and CPU seconds of what runs inside."""

    def __enter__(self) -> Self:
        self._cpu = _cpu_seconds()
        self._begin = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds = time.perf_counter() - self._begin
        self.cpu_seconds = _cpu_seconds() - self._cpu

    def figures(self) -> dict[str, Any]:
        return {"seconds": self.seconds, "cpu_seconds": self.cpu_seconds}


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


Actions = dict[str, Callable[..., dict[str, Any]]]


@contextlib.contextmanager
def ours(
    directory: str, count: int, nbytes: int, ahead: int = 4, with_path_lock: bool = False
) -> Iterator[Actions]:
    """This package: tickets written with `put`, read with `prefetch` and `get`."""
    from benchmarks.io.store_setup import OurStore

    budget = (count + ahead + 1) * nbytes
    with OurStore(
        [Path(directory)], budget=budget, capacity=2 * count * nbytes, with_path_lock=with_path_lock
    ) as store:
        sources = store.buffers(count, nbytes)
        tickets = store.write(sources)
        store.read(tickets, ahead=ahead, expected=sources)

        def write() -> dict[str, Any]:
            with _Meter() as meter:
                tickets[:] = store.write(sources)
            return meter.figures()

        def read() -> dict[str, Any]:
            with _Meter() as meter:
                store.read(tickets, ahead=ahead)
            return meter.figures()

        def read_one_by_one(seconds: float) -> dict[str, Any]:
            """Get one ticket after the other for so long; answers with the moves."""
            moves = []
            with _Meter() as meter:
                end = time.perf_counter() + seconds
                for ticket in itertools.cycle(tickets):
                    begin = time.perf_counter()
                    if begin > end:
                        break
                    store.store.get(ticket)
                    store.store.evict(ticket)
                    moves += [
                        (move.queued_at, move.started_at, move.finished_at)
                        for move in store.moves(begin)
                    ]
            return {**meter.figures(), "moves": moves}

        yield {"write": write, "read": read, "read_one_by_one": read_one_by_one}


@contextlib.contextmanager
def deepnvme(directory: str, count: int, nbytes: int) -> Iterator[Actions]:
    """DeepSpeed's `aio_handle`, on one preallocated file and its own pinned buffers."""
    try:
        import torch
        from deepspeed.ops.op_builder import AsyncIOBuilder

        library = AsyncIOBuilder().load(verbose=False)
    except Exception as error:  # not installed; no compiler, no ninja, no libaio
        raise Skipped(f"DeepNVMe cannot be used here: {error}") from error
    file = Path(directory, f"deepnvme-{os.getpid()}")
    with open(file, "wb") as made:
        os.posix_fallocate(made.fileno(), 0, count * nbytes)
    first = library.aio_handle(1 << 20, 16, False, True, 1)
    example = torch.empty(0, dtype=torch.uint8)
    buffers = [first.new_cpu_locked_tensor(nbytes, example) for _ in range(count)]
    for number, buffer in enumerate(buffers):
        buffer.fill_(number % 251 + 1)
    handles: dict[tuple[int, int, int], Any] = {}

    def move(write: bool, block: int, depth: int, threads: int) -> dict[str, Any]:
        key = (block, depth, threads)
        if key not in handles:
            handles.clear()  # each has threads
            handles[key] = library.aio_handle(block, depth, False, True, threads)
        handle = handles[key]
        begin = handle.async_pwrite if write else handle.async_pread
        with _Meter() as meter:
            for number, buffer in enumerate(buffers):
                begin(buffer, str(file), number * nbytes)
            completed = handle.wait()
        if completed != count:
            raise RuntimeError(f"DeepNVMe completed {completed} of {count} requests")
        return meter.figures()

    try:
        move(True, 1 << 20, 16, 1)  # from now on the file is overwritten
        for buffer in buffers:
            buffer.zero_()
        move(False, 1 << 20, 16, 1)
        for number, buffer in enumerate(buffers):
            if not bool((buffer == number % 251 + 1).all()):
                raise RuntimeError(f"DeepNVMe read other bytes than it wrote, buffer {number}")
        yield {
            "write": lambda **settings: move(True, **settings),
            "read": lambda **settings: move(False, **settings),
        }
    finally:
        for buffer in buffers:
            first.free_cpu_locked_tensor(buffer)
        file.unlink()


def data_parallel(**settings: Any) -> contextlib.AbstractContextManager[Actions]:
    """A rank that trains, see there."""
    from benchmarks.distributed.rank import data_parallel

    return data_parallel(**settings)


KINDS: dict[str, Callable[..., contextlib.AbstractContextManager[Actions]]] = {
    "ours": ours,
    "deepnvme": deepnvme,
    "data_parallel": data_parallel,
}


def main() -> None:
    # What libraries print must not be taken for an answer.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(figures: dict[str, Any]) -> None:
        answers.write(json.dumps(figures) + "\n")
        answers.flush()

    kind, settings = sys.argv[1:]
    try:
        with KINDS[kind](**json.loads(settings)) as actions:
            answer({"ready": True})
            for line in sys.stdin:
                request = json.loads(line)
                answer(actions[request.pop("do")](**request))
    except Skipped as why:
        answer({_CANNOT: str(why)})


if __name__ == "__main__":
    main()
