"""What a disk may do to a block, and which checksum notices it."""


import pytest
import torch

from offload_strategy.errors import CorruptDataError
from offload_strategy.io.queues import checksums
from offload_strategy.io.queues.checksums import create_checksum
from offload_strategy.units import KiB, MiB
from tests.io.backends import ManualBackend
from tests.store.rig import PAGE, noise

UNIT = 512 * KiB
#: Of three digests, the last one of 70 pages and a part of one.
NBYTES = 2 * UNIT + 70 * PAGE + 100


def damaged(now: bytes, old: bytes) -> dict[str, bytes]:
    """What may be on the disk instead of `now`, where `old` was before."""

    def partly_old(begin: int, end: int) -> bytes:
        return now[:begin] + old[begin:end] + now[end:]

    pages = (0, 64, UNIT // PAGE - 1, UNIT // PAGE, NBYTES // PAGE - 1, NBYTES // PAGE)
    flipped = bytearray(now)
    flipped[1000::PAGE] = bytes(byte ^ 1 for byte in flipped[1000::PAGE])
    return {
        **{f"page {page} was lost": partly_old(page * PAGE, (page + 1) * PAGE) for page in pages},
        "a write was torn": partly_old(NBYTES // 2 // PAGE * PAGE, NBYTES),
        "a write was lost": old,
        "two writes changed places": now[UNIT : 2 * UNIT] + now[:UNIT] + now[2 * UNIT :],
        "a bit of every page was flipped": bytes(flipped),
    }


@pytest.mark.parametrize("checksum", ["full", "sampled", "off"])
def test_bytes_that_were_not_written_there_are_noticed(make_rig, monkeypatch, checksum):
    monkeypatch.setattr(checksums, "DIGESTED_BYTES", UNIT)
    rig, payload = make_rig(checksum=checksum, block_size=2 * MiB), noise(NBYTES, 1)
    before, ticket = rig.stored(noise(NBYTES, 0)), rig.stored(payload)
    rig.at_once()
    now = rig.bytes_on_disk(ticket)
    for damage, image in damaged(now, rig.bytes_on_disk(before)).items():
        rig.overwrite(ticket, image)
        if checksum == "off":
            assert not torch.equal(rig.store.get(ticket), payload), damage
        else:
            with pytest.raises(CorruptDataError, match=r"'nvme'.*not what was written there"):
                pytest.fail(f"{damage}: read {rig.store.get(ticket).nbytes} bytes")
        rig.store.evict(ticket)
    rig.overwrite(ticket, now)
    assert torch.equal(rig.store.get(ticket), payload)


@pytest.mark.parametrize(
    ("lead", "nbytes"), [(0, 130 * PAGE), (4032, 129 * PAGE + 70), (64, 70000)]
)
def test_a_sample_has_a_line_of_every_page_and_other_lines_in_every_write(lead, nbytes):
    checksum, memory = create_checksum("sampled", ManualBackend()), noise(131 * PAGE)
    assert checksum is not None
    lines = set()
    for seed in range(5):

        def is_noticed(begin, end, seed=seed):
            part = memory[max(begin, lead) : min(end, lead + nbytes)]
            block = (memory.data_ptr() + lead, nbytes, seed)
            expected = checksum.digest(*block)
            part.bitwise_not_()
            noticed = checksum.digest(*block) != expected
            part.bitwise_not_()
            return noticed

        pages = range(0, lead + nbytes, PAGE)
        assert [page for page in pages if not is_noticed(page, page + PAGE)] == []
        in_one = [at for at in range(2 * PAGE, 3 * PAGE, 64) if is_noticed(at, at + 64)]
        assert 1 <= len(in_one) <= 2
        lines.update(in_one)
    assert len(lines) >= 5
