"""Every transition of [Note: states of a ticket], one after the other."""

from __future__ import annotations

import errno
import gc
import os
import threading
import weakref

import pytest
import torch

from offload_strategy.errors import OffloadError, StorageError, TierFullError
from offload_strategy.heap import TicketState
from offload_strategy.storage import BlockRequest
from offload_strategy.units import KiB, MiB
from tests.heap.rig import PAGE, MakeRig, Rig, noise

BROKEN = OSError(errno.EIO, os.strerror(errno.EIO))


# ---------------------------------------------------------------------- put
def test_what_a_host_tier_has_room_for_stays_where_it_is(make_rig: MakeRig) -> None:
    rig = make_rig(host_bytes=1 * MiB)
    payload = noise(10 * KiB)
    ticket = rig.put(payload)
    assert ticket.state is TicketState.IN_MEMORY
    assert rig.heap.get(ticket).data_ptr() == payload.data_ptr()
    assert rig.host.used_bytes == 10 * KiB
    assert rig.heap.prefetch(ticket)
    rig.heap.evict(ticket)
    assert ticket.state is TicketState.IN_MEMORY
    assert not rig.backend.waiting
    assert rig.count("written") == rig.count("forwarded") == rig.count("read") == 0


def test_what_goes_to_a_disk_is_in_memory_until_its_last_block_is_written(
    make_rig: MakeRig,
) -> None:
    rig = make_rig(block_size=PAGE)
    payload = noise(3 * PAGE - 5)
    content = payload.numpy().tobytes()
    reference = weakref.ref(payload)
    ticket = rig.put(payload)
    del payload
    for _ in range(3):
        assert ticket.state is TicketState.WRITING
        assert reference() is not None
        rig.backend.complete()
    assert ticket.state is TicketState.STORED
    rig.heap.wait_for_writes()  # memory goes with the next call, on the caller's thread
    assert reference() is None
    assert rig.bytes_on_disk(ticket) == content
    assert rig.count("written") == 3 * PAGE - 5


def test_a_payload_that_shares_a_storage_is_written_from_where_it_lies(rig: Rig) -> None:
    whole = noise(10 * KiB)
    ticket = rig.put(whole[1001:5001])
    rig.complete()
    assert rig.bytes_on_disk(ticket) == whole.numpy().tobytes()[1001:5001]


def test_a_read_ends_with_its_last_page_in_memory_of_ours_and_with_its_last_byte_in_others(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    payload = noise(3 * PAGE - 5)
    ticket = rig.stored(payload)
    assert rig.heap.prefetch(ticket)
    assert [request.whole_pages for request in rig.backend.waiting] == [True]
    rig.complete()
    assert torch.equal(rig.heap.get(ticket), payload)
    rig.heap.evict(ticket)
    own = torch.full((3 * PAGE,), 7, dtype=torch.uint8)
    seen: list[bool] = []
    submit = rig.backend.submit

    def watched(request: BlockRequest) -> None:
        seen.append(request.whole_pages)
        submit(request)

    rig.at_once()
    monkeypatch.setattr(rig.backend, "submit", watched)
    rig.heap.read_into(ticket, own[: payload.numel()])
    assert seen == [False]
    assert torch.equal(own[: payload.numel()], payload)
    assert own[payload.numel() :].eq(7).all()


def test_full_tiers_spill_into_the_next_and_the_last_one_says_so(make_rig: MakeRig) -> None:
    rig = make_rig(host_bytes=10 * KiB, disk_bytes=16 * KiB)
    tickets = [rig.put(noise(4 * KiB)) for _ in range(6)]
    assert [ticket.entry.tier.name for ticket in tickets] == ["host"] * 2 + ["nvme"] * 4
    with pytest.raises(TierFullError) as refused:
        rig.put(noise(4 * KiB))
    for figure in ("4 KiB", "activations", "host: 8 KiB of 10 KiB", "nvme: 16 KiB of 16 KiB"):
        assert figure in str(refused.value)
    assert rig.heap.live_tickets == 6
    # A smaller one still fits into the first.
    assert rig.put(noise(2 * KiB)).entry.tier.name == "host"
    rig.complete()
    del tickets[3]
    assert rig.put(noise(3 * KiB)).entry.tier.name == "nvme"
    rig.complete()


def test_the_second_disk_takes_what_the_first_has_no_room_for(make_rig: MakeRig) -> None:
    first, second = make_rig(disk_bytes=4 * KiB), make_rig(disk_bytes=4 * KiB)
    both = [first.disk, second.disk]
    tickets = [first.heap.put(noise(10, seed=seed), "optimizer", both) for seed in range(2)]
    assert [ticket.entry.tier for ticket in tickets] == both
    first.at_once()
    second.at_once()
    for seed, ticket in enumerate(tickets):
        assert torch.equal(first.heap.get(ticket), noise(10, seed=seed))


# ---------------------------------------------------------------------- forwarding
def test_reading_what_is_being_written_returns_the_bytes_in_memory(rig: Rig) -> None:
    payload = noise(10 * KiB)
    ticket = rig.put(payload)
    assert rig.heap.get(ticket).data_ptr() == payload.data_ptr()
    assert rig.heap.prefetch(ticket)
    assert ticket.state is TicketState.WRITING
    assert rig.count("forwarded") == 10 * KiB
    assert rig.count("read") == 0
    rig.complete()
    assert ticket.state is TicketState.STORED


# ---------------------------------------------------------------------- failing to write
def test_a_failed_write_keeps_the_bytes_and_is_told_at_the_next_put(
    make_rig: MakeRig,
) -> None:
    rig = make_rig(block_size=PAGE)
    payload = noise(3 * PAGE)
    ticket, other = rig.put(payload), rig.put(noise(PAGE, seed=1))
    rig.backend.complete()
    rig.backend.complete(error=BROKEN)
    assert ticket.state is TicketState.IN_MEMORY
    assert torch.equal(rig.heap.get(ticket), payload)
    with pytest.raises(StorageError) as told:
        rig.put(noise(10))
    message = str(told.value)
    for part in ("'nvme'", "could not write 12 KiB", "activations", str(rig.space.path), "Input"):
        assert part in message
    assert told.value.__cause__ is BROKEN
    rig.complete()
    with pytest.raises(StorageError, match="could not write"):
        rig.heap.wait_for_writes()
    assert other.state is TicketState.STORED
    # Its place on the disk is free again, the bytes are still there to be saved.
    assert rig.space.used_bytes == PAGE
    rig.heap.evict(ticket)
    assert torch.equal(rig.heap.take(ticket), payload)


def test_all_bytes_of_a_failed_write_survive_the_memory_being_used_again(rig: Rig) -> None:
    borrowed = rig.heap.borrow("activations", 10 * KiB)
    borrowed.copy_(noise(10 * KiB))
    ticket = rig.put(borrowed)
    del borrowed
    rig.backend.complete(error=BROKEN)
    for seed in range(5):
        rig.heap.borrow("activations", 10 * KiB).copy_(noise(10 * KiB, seed=seed + 1))
    assert torch.equal(rig.heap.get(ticket), noise(10 * KiB))


# ---------------------------------------------------------------------- loading
def test_a_stored_ticket_comes_back_as_it_was(rig: Rig) -> None:
    ticket = rig.stored(noise(100_001))
    assert rig.heap.prefetch(ticket)
    assert ticket.state is TicketState.LOADING
    rig.complete()
    assert ticket.state is TicketState.IN_MEMORY
    loaded = rig.heap.get(ticket)
    assert loaded.numpy().tobytes() == rig.bytes_on_disk(ticket)
    assert torch.equal(loaded, noise(100_001))
    assert rig.count("read") == 100_001
    assert rig.heap.get(ticket).data_ptr() == loaded.data_ptr()
    assert rig.count("read") == 100_001


def test_a_get_waits_for_a_load_that_is_under_way_and_hurries_it(make_rig: MakeRig) -> None:
    rig = make_rig(block_size=PAGE)
    tickets = [rig.stored(noise(2 * PAGE, seed=index)) for index in range(3)]
    for ticket in tickets:
        assert rig.heap.prefetch(ticket)
    got: list[torch.Tensor] = []
    hurried = threading.Event()
    hurry = rig.queue.hurry

    def note(*args: object) -> None:
        hurry(*args)  # type: ignore[arg-type]
        hurried.set()

    rig.queue.hurry = note  # type: ignore[method-assign]
    reader = threading.Thread(target=lambda: got.append(rig.heap.get(tickets[2])))
    reader.start()
    assert hurried.wait(30)
    rig.backend.complete()  # was under way before
    for _ in range(2):
        rig.backend.complete()
    reader.join(30)
    assert torch.equal(got[0], noise(2 * PAGE, seed=2))
    assert [ticket.state for ticket in tickets[:2]] == [TicketState.LOADING] * 2
    assert rig.recorder.stall_seconds("activations") > 0
    rig.complete()


def test_a_failed_read_is_told_and_may_be_tried_again(rig: Rig) -> None:
    ticket = rig.stored(noise(5000))
    rig.at_once()
    rig.backend.error = BROKEN
    with pytest.raises(StorageError) as told:
        rig.heap.get(ticket)
    for part in ("'nvme'", "could not read 4.9 KiB", "activations", str(rig.space.path)):
        assert part in str(told.value)
    assert told.value.__cause__ is BROKEN
    assert ticket.state is TicketState.STORED
    rig.backend.error = None
    assert torch.equal(rig.heap.get(ticket), noise(5000))


def test_a_prefetch_that_failed_is_read_again_when_needed(rig: Rig) -> None:
    ticket = rig.stored(noise(5000))
    rig.at_once()
    rig.backend.error = BROKEN
    rig.heap.prefetch(ticket)
    assert ticket.state is TicketState.STORED
    rig.backend.error = None
    assert torch.equal(rig.heap.get(ticket), noise(5000))
    assert rig.count("read") == 5000


def test_a_prefetch_without_memory_does_nothing_and_a_get_goes_beyond(make_rig: MakeRig) -> None:
    rig = make_rig(budget=8 * KiB)
    ticket = rig.stored(noise(4 * KiB))
    lent = [rig.heap.borrow("optimizer", 4 * KiB) for _ in range(2)]
    assert not rig.heap.prefetch(ticket)
    assert ticket.state is TicketState.STORED
    rig.at_once()
    assert torch.equal(rig.heap.get(ticket), noise(4 * KiB))
    assert rig.pool.usage().held_bytes == 12 * KiB
    del lent


# ---------------------------------------------------------------------- evicting, taking
def test_an_evicted_copy_gives_its_memory_back_and_is_loaded_again(rig: Rig) -> None:
    ticket = rig.stored(noise(4 * KiB))
    rig.at_once()
    rig.heap.get(ticket)
    assert rig.pool.usage().lent_bytes == 4 * KiB
    rig.heap.evict(ticket)
    assert ticket.state is TicketState.STORED
    assert rig.pool.usage().lent_bytes == 0
    assert torch.equal(rig.heap.get(ticket), noise(4 * KiB))
    assert rig.count("read") == 8 * KiB


def test_evicting_does_not_pull_the_memory_from_under_a_reader(rig: Rig) -> None:
    ticket = rig.stored(noise(4 * KiB))
    rig.at_once()
    loaded = rig.heap.get(ticket)
    rig.heap.evict(ticket)
    again = rig.heap.get(ticket)
    assert again.data_ptr() != loaded.data_ptr()
    assert torch.equal(loaded, again)


@pytest.mark.parametrize("where", ["host", "writing", "stored", "loading", "loaded"])
@pytest.mark.parametrize("how", ["private", "take"])
def test_bytes_may_be_had_to_change_from_every_state(
    make_rig: MakeRig, where: str, how: str
) -> None:
    rig = make_rig(host_bytes=1 * MiB if where == "host" else 0)
    payload = noise(4 * KiB)
    ticket = rig.put(payload)
    if where in ("stored", "loading", "loaded"):
        rig.complete()
    if where in ("loading", "loaded"):
        rig.heap.prefetch(ticket)
    if where == "loaded":
        rig.complete()
    writing = where == "writing"
    if not writing:
        rig.backend.at_once = True
    if where == "loading":
        rig.complete()
    if writing and how == "take":
        # A block is under way: taking waits until the memory is not read any more.
        taken: list[torch.Tensor] = []
        thread = threading.Thread(target=lambda: taken.append(rig.heap.take(ticket)))
        thread.start()
        assert taken == []
        rig.backend.complete()
        thread.join(30)
        mine = taken.pop()
    else:
        mine = getattr(rig.heap, how)(ticket)
    assert torch.equal(mine, noise(4 * KiB))
    mine.zero_()
    if how == "take":
        assert ticket.state is TicketState.FREED
        assert rig.heap.live_tickets == 0
        assert rig.host.used_bytes == rig.space.used_bytes == 0
    else:
        rig.at_once()
        assert torch.equal(rig.heap.get(ticket), noise(4 * KiB))
        assert torch.equal(payload, noise(4 * KiB))


def test_taking_what_waits_to_be_written_cancels_the_write(rig: Rig) -> None:
    first, second = rig.put(noise(4 * KiB)), rig.put(noise(8 * KiB))
    payload = rig.heap.take(second)
    assert torch.equal(payload, noise(8 * KiB))
    rig.complete()
    assert first.state is TicketState.STORED
    assert rig.count("written") == 4 * KiB


def test_what_was_loaded_is_handed_over_without_another_copy(rig: Rig) -> None:
    ticket = rig.stored(noise(4 * KiB))
    rig.at_once()
    loaded = rig.heap.get(ticket)
    assert rig.heap.private(ticket).data_ptr() == loaded.data_ptr()
    assert ticket.state is TicketState.STORED


# ---------------------------------------------------------------------- freeing
@pytest.mark.parametrize("how", ["free", "drop"])
@pytest.mark.parametrize("where", ["host", "queued", "stored", "loaded", "failed"])
def test_a_ticket_may_be_freed_in_every_state(make_rig: MakeRig, where: str, how: str) -> None:
    rig = make_rig(host_bytes=1 * MiB if where == "host" else 0)
    blocker = None
    if where == "queued":
        blocker = rig.put(noise(10))
    ticket = rig.put(noise(4 * KiB))
    if where == "failed":
        rig.backend.complete(error=BROKEN)
    elif where in ("stored", "loaded"):
        rig.complete()
    if where == "loaded":
        rig.heap.prefetch(ticket)
        rig.complete()
    if how == "free":
        rig.heap.free(ticket)
        rig.heap.free(ticket)
        for use in (rig.heap.get, rig.heap.prefetch, rig.heap.take, rig.heap.private):
            with pytest.raises(OffloadError, match=r"4 KiB of activations were freed"):
                use(ticket)
    del ticket
    assert rig.heap.live_tickets == (1 if blocker is not None else 0)
    assert rig.space.used_bytes == (PAGE if blocker is not None else 0)
    assert rig.host.used_bytes == 0
    rig.complete()
    assert rig.count("written") <= 4 * KiB
    assert rig.pool.usage().lent_bytes == 0


@pytest.mark.parametrize("direction", ["writing", "loading"])
def test_an_extent_is_not_used_again_before_the_block_under_way_has_ended(
    make_rig: MakeRig, direction: str
) -> None:
    rig = make_rig(block_size=PAGE)
    ticket = rig.put(noise(4 * PAGE))
    if direction == "loading":
        rig.complete()
        rig.heap.prefetch(ticket)
    place = ticket.entry.stripes[0].extent
    rig.heap.free(ticket)
    assert rig.heap.live_tickets == 0
    assert rig.space.used_bytes == 4 * PAGE
    other = rig.put(noise(4 * PAGE, seed=1))
    assert other.entry.stripes[0].extent != place
    rig.backend.complete()
    assert rig.space.used_bytes == 4 * PAGE
    rig.complete()
    third = rig.put(noise(4 * PAGE, seed=2))
    assert third.entry.stripes[0].extent == place
    rig.at_once()
    assert torch.equal(rig.heap.get(third), noise(4 * PAGE, seed=2))
    assert torch.equal(rig.heap.get(other), noise(4 * PAGE, seed=1))


def collect_a_dropped_ticket(rig: Rig, lock: object, tickets: int) -> threading.Thread:
    """Drop tickets in a garbage collection on a thread that holds a lock."""

    class Cycle:
        def __init__(self, seed: int) -> None:
            self.me = self
            self.ticket = rig.put(noise(4 * KiB, seed=seed))

    def work() -> None:
        for seed in range(tickets):
            Cycle(seed)
        with lock:  # type: ignore[attr-defined]
            gc.collect()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(10)
    return thread


@pytest.mark.parametrize("lock", ["heap", "queue", "recorder", "pool"])
@pytest.mark.parametrize("host", [True, False], ids=["on the host", "on their way to the disk"])
def test_tickets_may_be_collected_in_the_middle_of_anything(
    make_rig: MakeRig, lock: str, host: bool
) -> None:
    rig = make_rig(host_bytes=1 * MiB if host else 0)
    locks = {
        "heap": rig.heap._ledger.lock,
        "queue": rig.queue._lock,
        "recorder": rig.recorder._lock,
        "pool": rig.pool._lock,
    }
    thread = collect_a_dropped_ticket(rig, locks[lock], tickets=5)
    assert not thread.is_alive(), "deadlock"
    assert rig.heap.live_tickets == 0
    rig.complete()
    assert rig.space.used_bytes == rig.host.used_bytes == 0


# ---------------------------------------------------------------------- limits
def test_a_put_waits_when_too_much_is_waiting_to_be_written(make_rig: MakeRig) -> None:
    rig = make_rig(write_behind=8 * KiB)
    rig.put(noise(100 * KiB))  # one is always let through
    second: list[object] = []
    thread = threading.Thread(target=lambda: second.append(rig.put(noise(4 * KiB))))
    thread.start()
    thread.join(0.1)
    assert thread.is_alive()
    assert not second
    while rig.backend.waiting and not second:
        rig.backend.complete()
    thread.join(30)
    assert second
    assert rig.recorder.stall_seconds("activations") > 0.05
    rig.complete()


def test_borrowing_waits_for_writes_to_give_memory_back(make_rig: MakeRig) -> None:
    rig = make_rig(budget=8 * KiB)
    ticket = rig.put(rig.heap.borrow("optimizer", 8 * KiB).copy_(noise(8 * KiB)))
    got: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: got.append(rig.heap.borrow("optimizer", 8 * KiB)))
    thread.start()
    thread.join(0.1)
    assert not got
    rig.complete()
    thread.join(30)
    assert len(got) == 1
    assert rig.pool.usage().peak_bytes == 8 * KiB
    assert ticket.state is TicketState.STORED


def test_borrowing_goes_beyond_the_budget_when_nothing_will_come_back(make_rig: MakeRig) -> None:
    rig = make_rig(budget=8 * KiB)
    lent = [rig.heap.borrow("optimizer", 8 * KiB) for _ in range(2)]
    assert rig.pool.usage().held_bytes == 16 * KiB
    del lent


def test_an_interrupted_wait_gives_its_place_back(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig(write_behind=8 * KiB)
    first = rig.put(noise(8 * KiB))

    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("offload_strategy.heap.writing.time.sleep", interrupt)
    with pytest.raises(KeyboardInterrupt):
        rig.put(noise(4 * KiB))
    assert rig.space.used_bytes == 8 * KiB
    assert rig.heap.live_tickets == 1
    monkeypatch.undo()
    rig.complete()
    assert first.state is TicketState.STORED


def test_a_disk_that_does_not_answer_is_reported(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("offload_strategy.heap.reports.PATIENCE_SECONDS", 0.02)
    ticket = rig.stored(noise(4 * KiB))
    reported = threading.Event()
    monkeypatch.setattr(
        "offload_strategy.heap.reports.logger.warning", lambda *args: reported.set()
    )
    thread = threading.Thread(target=lambda: rig.heap.get(ticket))
    thread.start()
    assert reported.wait(30)
    rig.complete()
    thread.join(30)
    assert not thread.is_alive()


# ---------------------------------------------------------------------- closing
def test_closing_gives_up_writes_and_keeps_their_bytes_readable(make_rig: MakeRig) -> None:
    rig = make_rig(host_bytes=4 * KiB)
    kept = rig.put(noise(4 * KiB, seed=1))
    first, second = rig.put(noise(4 * KiB, seed=2)), rig.put(noise(4 * KiB, seed=3))
    closer = threading.Thread(target=rig.heap.close)
    closer.start()
    rig.backend.complete()  # the block that was under way
    closer.join(30)
    assert not closer.is_alive()
    for seed, ticket in enumerate((kept, second), start=1):
        seed = 1 if ticket is kept else 3
        assert torch.equal(rig.heap.get(ticket), noise(4 * KiB, seed=seed))
    assert first.state in (TicketState.STORED, TicketState.IN_MEMORY)
    with pytest.raises(OffloadError, match="closed"):
        rig.put(noise(10))
    with pytest.raises(OffloadError, match="closed"):
        rig.heap.wait_for_writes()
    rig.heap.close()


def test_closing_gives_up_loads_and_says_what_is_gone(make_rig: MakeRig) -> None:
    rig = make_rig(block_size=PAGE)
    loading, stored = rig.stored(noise(3 * PAGE)), rig.stored(noise(PAGE))
    rig.heap.prefetch(loading)
    closer = threading.Thread(target=rig.heap.close)
    closer.start()
    rig.backend.complete()
    closer.join(30)
    assert not closer.is_alive()
    assert not rig.backend.waiting
    for ticket, size in ((loading, "12 KiB"), (stored, "4 KiB")):
        with pytest.raises(OffloadError, match=rf"{size} of activations are gone.*closed"):
            rig.heap.get(ticket)
        with pytest.raises(OffloadError, match="gone"):
            rig.heap.prefetch(ticket)


def test_whoever_waits_for_a_load_is_told_of_the_closing(rig: Rig) -> None:
    ticket = rig.stored(noise(PAGE))
    errors: list[BaseException] = []
    waits = threading.Event()
    hurry = rig.queue.hurry

    def note(*args: object) -> None:
        hurry(*args)  # type: ignore[arg-type]
        waits.set()

    rig.queue.hurry = note  # type: ignore[method-assign]

    def read() -> None:
        try:
            rig.heap.get(ticket)
        except OffloadError as error:
            errors.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    assert waits.wait(30)
    closer = threading.Thread(target=rig.heap.close)
    closer.start()
    while closer.is_alive():
        if rig.backend.waiting:
            rig.backend.complete()
        closer.join(0.01)
    reader.join(30)
    assert not reader.is_alive()
    # Either the block that was under way was the last and brought everything, or it is gone.
    assert all("gone" in str(error) for error in errors)


def test_tickets_that_outlive_the_heap_can_still_be_freed(rig: Rig) -> None:
    tickets = [rig.stored(noise(PAGE)), rig.put(noise(PAGE))]
    rig.complete()
    rig.close()
    rig.heap.free(tickets[0])
    del tickets
    assert rig.heap.live_tickets == 0
    assert rig.space.used_bytes == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_is_told_that_the_heap_is_its_parents(make_rig: MakeRig) -> None:
    rig = make_rig(host_bytes=8 * KiB)
    # A host buffer does not exist in the child: touching it would end the process.
    kept = rig.put(rig.heap.borrow("optimizer", 8 * KiB).copy_(noise(8 * KiB)))
    stored = rig.stored(noise(4 * KiB))
    child = os.fork()
    if child == 0:
        try:
            told = 0
            for use in (rig.heap.get, rig.heap.take, rig.heap.private, rig.heap.prefetch):
                for ticket in (kept, stored):
                    try:
                        use(ticket)
                    except OffloadError as error:
                        told += "forked process" in str(error)
            try:
                rig.put(noise(10))
            except OffloadError as error:
                told += "forked process" in str(error)
            rig.heap.close()
            del kept, stored, ticket
            gc.collect()
            os._exit(0 if told == 9 else 1)
        finally:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    rig.at_once()
    assert torch.equal(rig.heap.get(kept), noise(8 * KiB))
    assert torch.equal(rig.heap.get(stored), noise(4 * KiB))
