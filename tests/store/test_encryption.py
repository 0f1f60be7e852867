"""Encryption of what is on the paths: unreadable afterwards, and nothing else is accepted."""

import os
import subprocess
import sys

import pytest
import torch

from offload_strategy import OffloadEngine
from offload_strategy.errors import ConfigError, CorruptDataError
from offload_strategy.io.queues.encryption import BlockCipher
from offload_strategy.units import PAGE_BYTES, KiB, MiB
from tests.engine.test_resources import train
from tests.io.loop_devices import loop_device
from tests.store.rig import noise
from tests.training import assert_same_history, settings

pytest.importorskip("cryptography", reason="the extra 'encryption' is not installed")


@pytest.fixture(scope="module")
def plain():
    return train(None)


@pytest.mark.parametrize(
    ("overlap", "streamed"), [("commit", True), ("eager", True), ("off", True), ("commit", False)]
)
def test_training_with_encrypted_tiers_changes_no_bit(disk, plain, overlap, streamed):
    config = settings(disk, io={"encryption": True}, optimizer={"overlap": overlap})
    if streamed:
        config["parameters"] = {"enabled": True, "min_size": 1}
    with OffloadEngine(config) as engine:
        assert_same_history(train(engine), plain)
        metrics = engine.metrics()
    for client in ["activations", "optimizer", *(["parameters"] if streamed else [])]:
        read = metrics[f"offload/{client}/read_bytes"]
        forwarded = metrics[f"offload/{client}/forwarded_bytes"]
        assert read + forwarded > 0, client  # a write under way when backward comes is cancelled


#: What no disk has by chance: 16 bytes of a float32 tensor in which every element is the same.
VALUE = 1.2345678e-3
PATTERN = torch.full((4,), VALUE).numpy().tobytes()
TRAINING = f"""
import os, signal, sys, torch
from offload_strategy import OffloadEngine
from tests.conftest import deleted_files

class Squares(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((1 << 16,), {VALUE}))
    def forward(self, x):
        return ((x * self.weight) * (x + {VALUE})).sum()

model = Squares()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)

def train(device, encryption):
    engine = OffloadEngine({{
        "tiers": [{{"name": "nvme", "kind": "ssd", "path": device, "capacity": "16MiB"}}],
        "activations": {{"min_size": 1, "budget": "100%"}},
        "optimizer": {{"enabled": True}}, "parameters": {{"enabled": True, "min_size": 1}},
        "io": {{"encryption": encryption}},
    }})
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


def test_after_kill_9_a_raw_block_device_has_nothing_that_can_be_read(tmp_path):
    images = [tmp_path / "clear", tmp_path / "encrypted"]
    with loop_device(images[0], 32 * MiB) as clear, loop_device(images[1], 32 * MiB) as encrypted:
        done = subprocess.run(
            [sys.executable, "-c", TRAINING, str(clear), str(encrypted)],
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert done.returncode == 0, done.stderr
        os.sync()
    contents = [image.read_bytes() for image in images]
    for content in contents:
        assert len(content) - content.count(0) > 500 * KiB, "the bytes are there"
    assert contents[0].count(PATTERN) > 1000
    assert contents[1].count(PATTERN) == 0
    assert done.stdout.split() == ["1", "0"], "a state dict is not on a disk in clear either"


def test_only_what_was_written_just_then_and_there_with_this_key_is_accepted(make_rig):
    rig = make_rig(encryption=True)
    first, second = rig.stored(noise(PAGE_BYTES, 1)), rig.stored(noise(PAGE_BYTES, 2))
    lost, misplaced = rig.bytes_on_disk(first), rig.bytes_on_disk(second)
    place = first.entry.stripes[0].extent.offset
    rig.store.free(first)
    again = rig.stored(noise(PAGE_BYTES, 1))  # the same bytes in the same place
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
    assert torch.equal(rig.store.get(again), noise(PAGE_BYTES, 1))


def test_without_its_package_the_error_says_what_to_install(disk, monkeypatch):
    monkeypatch.setitem(sys.modules, "cryptography.exceptions", None)
    with pytest.raises(ConfigError, match=r"pip install offload-strategy\[encryption\]"):
        OffloadEngine(settings(disk, io={"encryption": True}))
