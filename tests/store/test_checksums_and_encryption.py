"""What a disk may do to a block, and how checksums and encryption notice it."""

import os
import sys
from importlib.util import find_spec

import pytest
import torch

from offload_strategy import OffloadEngine
from offload_strategy.errors import ConfigError, CorruptDataError
from offload_strategy.io.queues import checksums
from offload_strategy.io.queues.checksums import create_checksum
from offload_strategy.io.queues.encryption import BlockCipher
from offload_strategy.units import KiB, MiB
from tests.engine.test_resources import train
from tests.io.backends import ManualBackend
from tests.io.loop_devices import loop_device
from tests.store.rig import PAGE, noise
from tests.support import run_python
from tests.training import assert_same_history, settings

UNIT = 512 * KiB
#: Of three digests, the last one of 70 pages and a part of one.
NBYTES = 2 * UNIT + 70 * PAGE + 100


def damaged(now, old):
    """What may be on the disk instead of `now`, where `old` was before."""

    def partly_old(begin, end):
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


# ---------------------------------------------------------------------- encryption
needs_cryptography = pytest.mark.skipif(
    not find_spec("cryptography"), reason="the extra 'encryption' is not installed"
)


@pytest.fixture(scope="module")
def plain():
    return train(None)


@needs_cryptography
@pytest.mark.parametrize(
    ("overlap", "streamed"), [("commit", True), ("eager", True), ("commit", False), ("off", False)]
)
def test_training_with_encrypted_tiers_changes_no_bit(disk, plain, overlap, streamed):
    config = settings(disk, io={"encryption": True}, optimizer={"overlap": overlap})
    if streamed:
        config["parameters"] = {"enabled": True, "min_size": 1}
    with OffloadEngine(config) as engine:
        assert_same_history(train(engine), plain)
        metrics = engine.metrics()
    for client in ["activations", "optimizer", *(["parameters"] if streamed else [])]:
        moved = [metrics[f"offload/{client}/{verb}_bytes"] for verb in ("read", "forwarded")]
        assert sum(moved) > 0, client  # a write under way when backward comes is cancelled


#: What no disk has by chance: 16 bytes of a float32 tensor in which every element is the same.
VALUE = 1.2345678e-3
PATTERN = torch.full((4,), VALUE).numpy().tobytes()
TRAINING = f"""
import os, signal, sys, torch
from offload_strategy import OffloadEngine
from tests.conftest import deleted_files
from tests.training import settings

class Squares(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((1 << 16,), {VALUE}))
    def forward(self, x):
        return ((x * self.weight) * (x + {VALUE})).sum()

model = Squares()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)

def train(device, encryption):
    streamed = {{"enabled": True, "min_size": 1}}
    engine = OffloadEngine(settings(device, parameters=streamed, io={{"encryption": encryption}}))
    attached = engine.attach(model, optimizer)
    loss = model(torch.full((1 << 16,), 1.0, requires_grad=True))
    engine._resources.store.wait_for_writes()
    loss.backward()
    attached.step()
    engine._resources.store.wait_for_writes()
    states = attached.state_dict()
    print(len(deleted_files()), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

for device, encryption in zip(sys.argv[1:], (False, True)):
    if not (child := os.fork()):
        train(device, encryption)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
"""


@needs_cryptography
def test_after_kill_9_a_raw_block_device_has_nothing_that_can_be_read(tmp_path):
    images = [tmp_path / "clear", tmp_path / "encrypted"]
    with loop_device(images[0], 80 * MiB) as clear, loop_device(images[1], 80 * MiB) as encrypted:
        printed = run_python("-c", TRAINING, clear, encrypted, timeout=240)
        os.sync()
    contents = [image.read_bytes() for image in images]
    for content in contents:
        assert len(content) - content.count(0) > 500 * KiB, "the bytes are there"
    assert contents[0].count(PATTERN) > 1000
    assert contents[1].count(PATTERN) == 0
    assert printed.split() == ["1", "0"], "a state dict is not on a disk in clear either"


@needs_cryptography
def test_only_what_was_written_just_then_and_there_with_this_key_is_accepted(make_rig):
    rig = make_rig(encryption=True)
    first, second = rig.stored(noise(PAGE, 1)), rig.stored(noise(PAGE, 2))
    lost, misplaced = rig.bytes_on_disk(first), rig.bytes_on_disk(second)
    place = first.entry.stripes[0].extent.offset
    rig.store.free(first)
    again = rig.stored(noise(PAGE, 1))  # the same bytes in the same place
    assert again.entry.stripes[0].extent.offset == place
    written, key = rig.bytes_on_disk(again), rig.check._aead
    assert len({lost, misplaced, written}) == 3, "no two writes look alike"
    flipped = bytes([written[0] ^ 1]) + written[1:]
    others = [(content, key) for content in (lost, misplaced, flipped)]
    rig.at_once()
    for content, aead in [*others, (written, BlockCipher(MiB)._aead)]:
        os.pwrite(rig.region.fd, content, place)
        rig.check._aead = aead
        with pytest.raises(CorruptDataError, match=r"tier 'nvme' at .*tag of the encryption"):
            rig.store.get(again)
    rig.check._aead = key
    assert torch.equal(rig.store.get(again), noise(PAGE, 1))


def test_without_its_package_the_error_says_what_to_install(disk, monkeypatch):
    monkeypatch.setitem(sys.modules, "cryptography.exceptions", None)
    with pytest.raises(ConfigError, match=r"pip install offload-strategy\[encryption\]"):
        OffloadEngine(settings(disk, io={"encryption": True}))
