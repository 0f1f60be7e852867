"""What every backend must do, whatever it moves the bytes with."""

import errno
import mmap
import os
import random
import threading
import time
from ctypes import addressof, c_char
from fcntl import F_GETFL, fcntl
from functools import partial
from typing import Any

import pytest

from offload_strategy.errors import CorruptDataError
from offload_strategy.io.backends.protocol import Backend, BlockRequest, create_backend
from offload_strategy.io.regions.region import Region
from offload_strategy.units import PAGE_BYTES, MiB, round_up
from tests.conftest import our_threads
from tests.io.loop_devices import loop_disk, run

BLOCK = 64 * PAGE_BYTES
SIZES = [1, 511, PAGE_BYTES - 1, PAGE_BYTES, PAGE_BYTES + 1, 5 * PAGE_BYTES + 77, BLOCK - 1, BLOCK]


class HostMemory:
    """Memory at a chosen distance from a page's start, with a guard on both sides."""

    def __init__(self, nbytes: int, misalignment: int = 0) -> None:
        self.nbytes = nbytes
        self._map = mmap.mmap(-1, nbytes + misalignment + 2 * PAGE_BYTES)
        self._start = PAGE_BYTES + misalignment
        self._map[:] = b"\xa5" * len(self._map)
        self._anchor = c_char.from_buffer(self._map)
        self.address = addressof(self._anchor) + self._start

    @property
    def data(self) -> bytes:
        return self._map[self._start : self._start + self.nbytes]

    @data.setter
    def data(self, value: bytes) -> None:
        self._map[self._start : self._start + self.nbytes] = value

    @property
    def around(self) -> set[int]:
        """The values of the bytes before and behind."""
        return set(self._map[: self._start]) | set(self._map[self._start + self.nbytes :])


Memory = HostMemory
"""Or what has its attributes."""


class Outcome:
    """How a request ends, and how often it says so."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory  # alive as long as the request
        self.errors: list[BaseException | None] = []
        self._over = threading.Event()

    def __call__(self, error: BaseException | None) -> None:
        self.errors.append(error)
        self._over.set()

    def get(self) -> BaseException | None:
        assert self._over.wait(60), "a request does not end"
        assert len(self.errors) == 1
        return self.errors[0]


def is_direct(fd: int) -> bool:
    """Whether a file was opened for direct I/O, or is closed."""
    try:
        return bool(fcntl(fd, F_GETFL) & os.O_DIRECT)
    except OSError:
        return True


def begin(
    backend: Backend, fd: int, memory: Memory, *, write: bool, offset: int = 0, **options: Any
) -> Outcome:
    """Submit one request; `options` are those of `BlockRequest`."""
    outcome = Outcome(memory)
    options.setdefault("verified", "after" in options)
    options.setdefault("direct", is_direct(fd))
    nbytes = options.pop("nbytes", memory.nbytes)
    backend.submit([BlockRequest(write, fd, offset, memory.address, nbytes, outcome, **options)])
    return outcome


def assert_fails(end: Outcome, *codes: int) -> None:
    """The request must end with a system's error, which has one of the codes."""
    error = end.get()
    assert isinstance(error, OSError), repr(error)
    assert error.errno in codes


class Conformance:
    """The tests. A subclass says which backend, and may say which memory."""

    @pytest.fixture
    def name(self):
        raise NotImplementedError

    def memory(self, nbytes: int, misalignment: int = 0) -> Memory:
        return HostMemory(nbytes, misalignment)

    def reports_failed_writes(self, backend: Backend) -> bool:
        return True

    @pytest.fixture
    def backend(self, name):
        made = create_backend(name, threads=2, block_size=BLOCK)
        yield made
        made.close()

    @pytest.fixture
    def failing(self, tmp_path):
        """A region on a disk, and what makes that disk fail."""
        with loop_disk(tmp_path / "failing", 96 * MiB) as disk:
            region = Region(disk.directory, "failing", 8 * MiB)
            region.allocate(8 * MiB)

            def fail():
                run("sync", "-f", disk.directory)
                os.truncate(disk.image, 0)
                run("losetup", "--set-capacity", disk.device)

            yield region, fail
            region.close()

    @pytest.mark.parametrize(("out", "back"), [(0, 0), (1, 0), (0, 8), (512, PAGE_BYTES - 1)])
    def test_any_size_at_any_address_comes_back_as_it_was(self, backend, region, out, back):
        for nbytes in SIZES:
            written, read = self.memory(nbytes, out), self.memory(nbytes, back)
            written.data = data = random.Random(nbytes).randbytes(nbytes)
            for offset in (0, 3 * PAGE_BYTES, 4 * MiB):
                assert begin(backend, region.fd, written, write=True, offset=offset).get() is None
                # With and without a check afterwards: a backend may choose another way for it.
                for after in (None, lambda: None):
                    read.data = bytes(nbytes)
                    end = begin(backend, region.fd, read, write=False, offset=offset, after=after)
                    assert end.get() is None
                    assert read.data == data
                assert (read.around, written.data) == ({0xA5}, data)
                with open(f"/proc/self/fd/{region.fd}", "rb") as file:  # as the file system sees it
                    file.seek(offset)
                    assert file.read(nbytes) == data

    def test_a_read_that_may_fill_its_last_page_touches_no_other(self, backend, region):
        for nbytes in SIZES:
            written, size = self.memory(nbytes), round_up(nbytes, PAGE_BYTES)
            written.data = data = random.Random(nbytes).randbytes(nbytes)
            assert begin(backend, region.fd, written, write=True).get() is None
            roomy = self.memory(size + PAGE_BYTES)
            roomy.data = b"\x5a" * roomy.nbytes
            end = begin(backend, region.fd, roomy, write=False, nbytes=nbytes, is_buffer=True)
            assert end.get() is None
            assert roomy.data[:nbytes] == data
            assert roomy.data[size:] == b"\x5a" * PAGE_BYTES

    def test_many_requests_at_once_in_any_order(self, backend, region):
        dice = random.Random(7)
        blocks = [self.memory(dice.randint(1, BLOCK), dice.choice([0, 0, 5])) for _ in range(48)]
        contents = [dice.randbytes(block.nbytes) for block in blocks]
        request, order = partial(begin, backend, region.fd), dice.sample(range(48), 48)
        for block, data in zip(blocks, contents, strict=True):
            block.data = data
        ends = [request(blocks[at], write=True, offset=at * BLOCK) for at in order]
        assert [end.get() for end in ends] == [None] * len(ends)
        for block in blocks:
            block.data = bytes(block.nbytes)
        dice.shuffle(order)
        # Reads and writes side by side, of different places.
        extra, ends = self.memory(BLOCK), []
        for turn, at in enumerate(order):
            ends.append(request(blocks[at], write=False, offset=at * BLOCK, after=lambda: None))
            if turn % 6 == 0:
                ends.append(request(extra, write=True, offset=(48 + turn // 6) * BLOCK))
        assert [end.get() for end in ends] == [None] * len(ends)
        assert [block.data for block in blocks] == contents

    def test_reads_go_on_while_as_many_writes_as_it_asks_for_are_stuck(self, backend, region):
        gate, depth = threading.Event(), backend.depth
        memory, wait = self.memory(PAGE_BYTES), lambda: gate.wait(60) and None
        stuck = [begin(backend, region.fd, memory, write=True, before=wait) for _ in range(depth)]
        read = begin(backend, region.fd, self.memory(PAGE_BYTES), write=False, offset=MiB)
        assert read.get() is None
        assert [end.errors for end in stuck] == [[]] * depth
        gate.set()
        assert [end.get() for end in stuck] == [None] * depth

    @pytest.mark.parametrize("write", [True, False], ids=["write", "read"])
    def test_calls_before_and_after_a_block_are_made_then(self, backend, region, write):
        memory, other = self.memory(BLOCK), self.memory(BLOCK)
        memory.data = b"1" * BLOCK
        expected = b"2" * BLOCK if write else memory.data
        if not write:
            assert begin(backend, region.fd, memory, write=True).get() is None
        seen: list[bytes] = []
        threads: list[str] = []

        def before():
            threads.append(threading.current_thread().name)
            memory.data = b"2" * BLOCK

        def after():
            threads.append(threading.current_thread().name)
            with open(f"/proc/self/fd/{region.fd}", "rb") as file:
                seen.append(file.read(BLOCK) if write else memory.data)

        outcome = begin(backend, region.fd, memory, write=write, before=before, after=after)
        assert outcome.get() is None
        assert seen == [expected]
        assert threads[0] == threads[1] != threading.current_thread().name
        assert begin(backend, region.fd, other, write=False).get() is None
        assert other.data == expected

    def test_beyond_the_end_of_a_file_or_after_it_was_closed_requests_fail(self, backend, region):
        memory = self.memory(2 * PAGE_BYTES)
        for offset in (64 * MiB, 16 * MiB, 16 * MiB - PAGE_BYTES):
            assert_fails(begin(backend, region.fd, memory, write=False, offset=offset), errno.EIO)
        fd = os.dup(region.fd)
        os.close(fd)
        for write in (True, False):
            assert isinstance(begin(backend, fd, memory, write=write).get(), OSError)

    @pytest.mark.parametrize("misalignment", [0, 3])
    @pytest.mark.parametrize("direct", [True, False], ids=["direct", "buffered"])
    def test_the_last_bytes_of_a_file_of_any_length_can_be_read(
        self, backend, tmp_path, direct, misalignment
    ):
        path, data = tmp_path / "external", os.urandom(3 * PAGE_BYTES + 1234)
        path.write_bytes(data)
        fd = os.open(path, os.O_RDONLY | (os.O_DIRECT if direct else 0))
        for offset, nbytes in [(2 * PAGE_BYTES, PAGE_BYTES + 1234), (3 * PAGE_BYTES, 1000)]:
            memory = self.memory(nbytes, misalignment)
            assert begin(backend, fd, memory, write=False, offset=offset).get() is None
            assert (memory.data, memory.around) == (data[offset : offset + nbytes], {0xA5})
        for offset, nbytes in [(2 * PAGE_BYTES, PAGE_BYTES + 1235), (0, 4 * PAGE_BYTES)]:
            memory = self.memory(nbytes, misalignment)
            assert_fails(begin(backend, fd, memory, write=False, offset=offset), errno.EIO)
        os.close(fd)

    @pytest.mark.parametrize("misalignment", [0, 1])
    def test_a_disk_that_fails_is_an_error_of_each_request_and_never_wrong_data(
        self, failing, backend, misalignment
    ):
        region, fail = failing  # the first fixture: it is unmounted when all is closed
        # Bytes of each place: what a failed read leaves in memory may be what was moved last.
        written = {at: os.urandom(BLOCK) for at in range(0, 8 * MiB, BLOCK)}
        for offset, data in written.items():
            block = self.memory(BLOCK, misalignment)
            block.data = data
            assert begin(backend, region.fd, block, write=True, offset=offset).get() is None
        fail()

        def check(block, at):
            if block.data != written[at]:
                raise CorruptDataError("the checksum differs")

        def requests(*, write):
            ends = []
            for at in list(written)[:8]:
                block = self.memory(BLOCK, misalignment)
                block.data = b"w" * BLOCK if write else bytes(BLOCK)
                after = None if write else partial(check, block, at)
                ends.append(begin(backend, region.fd, block, write=write, offset=at, after=after))
            return ends

        for end in requests(write=False):
            assert_fails(end, errno.EIO)
        for end in requests(write=True):
            # A backend that cannot tell is used with checksums: its writes are found out below.
            if end.get() is not None or self.reports_failed_writes(backend):
                assert_fails(end, errno.EIO, errno.ENOSPC)
        for end in requests(write=False):
            assert isinstance(end.get(), OSError)

    def test_closing_waits_for_requests_in_flight(self, name, region):
        backend = create_backend(name, threads=2, block_size=BLOCK)
        write = partial(begin, backend, region.fd, self.memory(BLOCK), write=True)
        slow = partial(time.sleep, 0.01)
        ends = [write(offset=index * BLOCK, before=slow) for index in range(20)]
        backend.close()
        assert [end.errors for end in ends] == [[None]] * 20
        assert our_threads() == set()
        backend.close()
        with pytest.raises(RuntimeError, match="closed"):
            write()
