"""The queue of one path: moves are cut into blocks, and the most urgent block goes next."""

from __future__ import annotations

import heapq
import threading
import time
from functools import partial
from timeit import default_timer as perf_counter

from offload_strategy.io.backends.protocol import Backend, BlockRequest, Done
from offload_strategy.io.bandwidth.estimator import BandwidthEstimator
from offload_strategy.io.queues.checksums import DIGESTED_BYTES, Checksum
from offload_strategy.io.queues.encryption import BlockCipher
from offload_strategy.io.queues.path_lock import PathLock, PathLockHolder
from offload_strategy.io.queues.request_queue import (
    InFlight,
    MoveState,
    Priority,
    RequestQueue,
    StripeMove,
)
from offload_strategy.io.regions.region import ExternalFile, Region
from offload_strategy.telemetry import Direction, MoveRecord, Recorder
from offload_strategy.torch_support.keyboard_interrupts import UninterruptedSection
from offload_strategy.units import PAGE_BYTES, MiB

#: A move of no more than this is small: whoever waits for it polls before falling asleep.
SMALL_BYTES = 2 * MiB
#: Where a request takes less than this, a waiting thread runs a queued one itself.
_SHORT_REQUEST_SECONDS = 0.002

#: All requests in flight together carry what the path moves in about this time. Larger requests
#: cost less CPU time per byte, but an urgent move waits until they are over.
_IN_FLIGHT_SECONDS = 0.020
_MIN_REQUEST_BYTES = DIGESTED_BYTES

#: `Move.one_block_at_a_time` holds while no more than this many parts of moves wait.
_FEW_WAITING = 8


class PathQueue:
    """Feeds one backend, which other queues may share, with the blocks of many moves.

    Only as many blocks are in flight in each direction as the backend can use, so an urgent move
    waits for a few blocks at most. Within a priority it is first in, first out. Writes wait while a
    read is needed now, and take half of the slots at most while reads are prefetched.
    """

    def __init__(
        self,
        region: Region | ExternalFile,
        backend: Backend,
        recorder: Recorder,
        *,
        path_lock: PathLock | None = None,
        checksum: Checksum | BlockCipher | None = None,
    ) -> None:
        self.region, self.path, self.tier = region, region.path, region.tier
        self.backend = backend
        self.bandwidth = BandwidthEstimator()
        self.checksum = checksum
        self._recorder = recorder
        self._where = f"tier {self.tier!r} at {self.path}"
        self._lock = threading.Lock()
        self._reads = RequestQueue()
        self._writes = RequestQueue()
        self._sequence = 0
        self._dispatching = False
        # Running mean of a request's time in the backend; 0 while nothing is known.
        self._request_seconds = 0.0
        self._path_lock = PathLockHolder(path_lock, self._path_lock_acquired)

    def submit(self, part: StripeMove) -> None:
        """Queue a part of a move; for `Move.submit`, which defers Ctrl-C."""
        with self._lock:
            if part.state is not MoveState.QUEUED:
                return  # another part of its move failed before this one was queued
            self._push(part)
        self._dispatch()
        if part.nbytes <= SMALL_BYTES and self.backend.threads.queued > 1:
            # Woken threads wait for the interpreter lock, and a caller that offloads one small
            # tensor after the other would keep it for milliseconds.
            time.sleep(0)

    def raise_priority(self, part: StripeMove) -> None:
        """Let a queued part, which is needed now, overtake others."""
        with self._lock:
            if part.priority is not Priority.NEEDED_NOW:
                part.priority = Priority.NEEDED_NOW
                self._push(part)

    def cancel(self, part: StripeMove) -> None:
        """Cancel a part: blocks in flight finish, the others never start. For `Move.cancel`."""
        with self._lock:
            if part.is_over:
                return
            part.state = MoveState.CANCELLED
            over = part.blocks_in_flight == 0
        if over:
            self._end(part)
        # Writes may have been waiting for it.
        self._dispatch()

    def run_queued(self) -> bool:
        """Run a queued request, if it is short, on the calling thread, which waits anyway."""
        if not 0 < self._request_seconds < _SHORT_REQUEST_SECONDS:
            return False
        with UninterruptedSection():
            return self.backend.threads.run_queued(str(self.path))

    def end_threads(self) -> None:
        """Let what is queued finish and end all threads; they start again on demand."""
        for _ in range(2):  # reads that end may need the path lock once more
            self._path_lock.end_threads()
            self.backend.threads.end_threads()

    def close(self) -> None:
        """Release the path lock and the cipher's buffer; nothing may be in flight any more."""
        self._path_lock.close()
        if isinstance(self.checksum, BlockCipher):
            self.checksum.close()

    # ------------------------------------------------------------------ scheduling
    def _push(self, part: StripeMove) -> None:
        self._sequence += 1
        heapq.heappush(self._queue(part).waiting, (int(part.priority), self._sequence, part))

    def _queue(self, part: StripeMove) -> RequestQueue:
        return self._writes if part.direction is Direction.WRITE else self._reads

    def _next(self) -> StripeMove | None:
        depth = self.backend.depth
        read = self._reads.head()
        if read is not None and not self._may_read(read):
            read = None  # another process holds the path lock: writes need not make room
        if read is not None and self._reads.has_slot(
            self._slots(self._reads, read), self._request_bytes(read)
        ):
            return read
        write = self._writes.head()
        if write is None:
            return None
        slots = self._slots(self._writes, write)
        if write.priority is not Priority.NEEDED_NOW:
            read_is_urgent = read is not None and read.priority is Priority.NEEDED_NOW
            if read_is_urgent or self._reads.urgent_in_flight:
                slots = 0
            elif read is not None or self._reads.in_flight:
                slots = min(slots, max(1, depth // 2))
        return write if self._writes.has_slot(slots, self._request_bytes(write)) else None

    def _request_bytes(self, part: StripeMove) -> int:
        """How much of a part the next request carries at most."""
        most = self.backend.block_size
        rate = self.bandwidth.rate(part.direction)
        wanted = most // 2 if rate is None else int(rate * _IN_FLIGHT_SECONDS / self.backend.depth)
        wanted = max(wanted, _MIN_REQUEST_BYTES)
        unit = PAGE_BYTES if part.digests is None else part.digests.unit
        return max(unit, min(most, wanted) // unit * unit)

    def _slots(self, queue: RequestQueue, head: StripeMove) -> int:
        """How many blocks of a direction may be in flight."""
        one = head.one_block_at_a_time and head.priority is not Priority.NEEDED_NOW
        return 1 if one and len(queue.waiting) <= _FEW_WAITING else self.backend.depth

    def _dispatch(self) -> None:
        with self._lock:
            if self._dispatching:
                return  # the thread that dispatches looks again before it stops
            self._dispatching = True
        while True:
            with self._lock:
                part = self._next()
                if part is None:
                    if self._release_path_lock_if_idle():
                        continue
                    self._dispatching = False
                    return
                in_flight = self._take(part)
            requests = [
                self._request(part, begin, nbytes, partial(self._block_done, in_flight, part))
                for part, begin, nbytes in in_flight.blocks
            ]
            try:
                self.backend.submit(requests)
            except BaseException as error:
                for part, _, _ in in_flight.blocks:
                    self._block_done(in_flight, part, error)

    def _take(self, part: StripeMove) -> InFlight:
        """The next request, which begins with a part; the caller holds the lock."""
        queue, room, begin = self._queue(part), self._request_bytes(part), part.next_block
        nbytes = min(room, part.nbytes - begin)
        self._begins(part, nbytes)
        urgent = part.priority is Priority.NEEDED_NOW
        if urgent or nbytes < part.nbytes:
            blocks = [(part, begin, nbytes)]
        else:
            parts = queue.take_adjacent(part, room - nbytes, self.backend.max_adjacent, self._joins)
            blocks = [(part, 0, part.nbytes) for part in parts]
        in_flight = InFlight(queue, blocks, urgent)
        in_flight.begun = self.bandwidth.begins(perf_counter(), saturated=self._is_saturated())
        return in_flight

    def _is_saturated(self) -> bool:
        return self._reads.in_flight + self._writes.in_flight >= self.backend.depth

    def _joins(self, part: StripeMove) -> bool:
        """Begin all of a part, unless it has to wait for the path lock."""
        if part.direction is Direction.READ and not self._may_read(part):
            return False
        self._begins(part, part.nbytes)
        return True

    def _begins(self, part: StripeMove, nbytes: int) -> None:
        """Begin the next block of a part; once all have begun, `head` returns another part."""
        part.next_block += nbytes
        part.blocks_in_flight += 1
        if part.state is MoveState.QUEUED:
            part.state = MoveState.RUNNING
            part.started_at = self._recorder.move_started(self.tier, part.direction)
        if part.direction is Direction.READ:
            self._path_lock.bytes_left -= nbytes

    def _request(self, part: StripeMove, begin: int, nbytes: int, done: Done) -> BlockRequest:
        request = BlockRequest(
            write=part.direction is Direction.WRITE,
            fd=self.region.fd,
            offset=part.offset + begin,
            address=part.address + begin,
            nbytes=nbytes,
            is_buffer=part.is_buffer,
            direct=self.region.direct,
            on_done=done,
        )
        if part.digests is not None:
            part.digests.add_to(request, begin, self._where)
        return request

    # ------------------------------------------------------------------ completion
    def _block_done(
        self, in_flight: InFlight, part: StripeMove, error: BaseException | None
    ) -> None:
        with self._lock:
            now = perf_counter()
            if request_over := in_flight.block_ended():
                self._request_seconds += (now - in_flight.begun.at - self._request_seconds) / 4
                direction, queue, nbytes = part.direction, in_flight.queue, in_flight.nbytes
                begun, saturated = in_flight.begun, self._is_saturated()
                self.bandwidth.completed(direction, nbytes, now, begun, saturated=saturated)
                idle = not (self._reads.in_flight or self._writes.in_flight)
                full = queue.head() is not None and (queue.in_flight > 0 or idle)
                self.bandwidth.add_sustained(direction, nbytes, now, full=full)
            part.blocks_in_flight -= 1
            if error is not None and part.state is MoveState.RUNNING:
                part.state = MoveState.FAILED
                part.error = error
            part_over = part.blocks_in_flight == 0 and (
                part.state is not MoveState.RUNNING or part.next_block >= part.nbytes
            )
            if part_over and part.state is MoveState.RUNNING:
                part.state = MoveState.DONE
        if part_over:
            self._end(part)
        if request_over and (self._reads.waiting or self._writes.waiting or self._path_lock.held):
            self._dispatch()

    def _end(self, part: StripeMove) -> None:
        if part.next_block:
            place = (self.tier, str(self.path), part.direction, part.nbytes)
            times = (part.queued_at, part.started_at, perf_counter())
            record = MoveRecord(part.client, *place, *times)
            self._recorder.move_finished(record, completed=part.state is MoveState.DONE)
        part.on_end(part)

    # ------------------------------------------------------------------ path lock
    def _may_read(self, part: StripeMove) -> bool:
        return self._path_lock.may_begin(first_block=part.state is MoveState.QUEUED)

    def _release_path_lock_if_idle(self) -> bool:
        """Release a lock that no read uses; return whether reads may go on without it."""
        if not self._path_lock.held or self._reads.in_flight:
            return False
        self._path_lock.release()
        return self._reads.head() is not None and self._path_lock.may_begin(first_block=True)

    def _path_lock_acquired(self) -> None:
        with self._lock:
            self._path_lock.acquired()
        self._dispatch()
