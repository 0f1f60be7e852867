"""Encryption of what is on the paths: unreadable afterwards, and nothing else is accepted.

That bits which flip are found, and that no nonce is used twice, is tested in test_store_model.py.
"""

from __future__ import annotations

import os
import signal
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
from tests.training import same_with_and_without, settings

pytest.importorskip("cryptography", reason="the extra 'encryption' is not installed")


@pytest.mark.parametrize("overlap", ["commit", "eager", "off"])
@pytest.mark.parametrize("streamed", [False, True], ids=["states", "weights too"])
def test_training_with_encrypted_tiers_changes_no_bit(disk, overlap, streamed):
    config = settings(disk, io={"encryption": True}, optimizer={"overlap": overlap})
    if streamed:
        config["parameters"] = {"enabled": True, "min_size": 1}
    metrics = same_with_and_without(train, config)
    for client in ["activations", "optimizer", *(["parameters"] if streamed else [])]:
        moved = [metrics[f"offload/{client}/{verb}_bytes"] for verb in ("read", "forwarded")]
        assert sum(moved) > 0, client  # a write that is not over when backward comes is cancelled


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

engine = OffloadEngine({{
    "tiers": [{{"name": "nvme", "kind": "ssd", "path": sys.argv[1], "capacity": "16MiB"}}],
    "activations": {{"min_size": 1, "budget": "100%"}},
    "optimizer": {{"enabled": True}}, "parameters": {{"enabled": True, "min_size": 1}},
    "io": {{"encryption": sys.argv[2] == "on"}},
}})
model = Squares()
optimizer = engine.attach(model, torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0))
loss = model(torch.full((1 << 16,), 1.0, requires_grad=True))
engine._resources.store.wait_for_writes()
loss.backward()
optimizer.step()
engine._resources.store.wait_for_writes()
states = optimizer.state_dict()
print(len(deleted_files()), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_after_kill_9_a_raw_block_device_has_nothing_that_can_be_read(tmp_path):
    found, scratch_files = {}, {}
    for way in ("off", "on"):
        with loop_device(image := tmp_path / way, 32 * MiB) as device:
            command = [sys.executable, "-c", TRAINING, str(device), way]
            done = subprocess.run(command, capture_output=True, text=True, timeout=120)
            assert done.returncode == -signal.SIGKILL, done.stderr
            os.sync()
        content = image.read_bytes()
        assert len(content) - content.count(0) > 500 * KiB, "the bytes are there"
        found[way], scratch_files[way] = content.count(PATTERN), int(done.stdout)
    assert found["off"] > 1000
    assert found["on"] == 0
    assert scratch_files == {"off": 1, "on": 0}, "a state dict is not on a disk in clear either"


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
    rig.at_once()
    for content, aead in [(lost, key), (misplaced, key), (written, BlockCipher(MiB)._aead)]:
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
