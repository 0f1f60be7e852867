"""Encryption of what is on the paths: unreadable afterwards, and nothing else is accepted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import nn

from offload_strategy import OffloadEngine
from offload_strategy.errors import ConfigError, CorruptDataError
from offload_strategy.io.backends.protocol import create_backend
from offload_strategy.io.queues.encryption import BlockCipher
from offload_strategy.io.queues.path_queue import PathQueue
from offload_strategy.io.regions.region import Region
from offload_strategy.store.tiers import PathTier
from offload_strategy.units import PAGE_BYTES, KiB, MiB
from tests.conftest import deleted_files
from tests.io.loop_devices import loop_device
from tests.store.rig import CLIENT, Rig, noise
from tests.training import Block, Numbers, attached, same_with_and_without, settings, weights

pytest.importorskip("cryptography", reason="the extra 'encryption' is not installed")

#: What no disk has by chance: 16 bytes of a float32 tensor in which every element is the same.
VALUE = 1.2345678e-3
PATTERN = torch.full((4,), VALUE).numpy().tobytes()


def train(engine: OffloadEngine | None) -> list[Numbers]:
    torch.manual_seed(0)
    model = nn.Sequential(Block(32), Block(32))
    optimizer = attached(engine, model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    found: list[Numbers] = []
    for step in range(3):
        torch.manual_seed(step)
        loss = model(torch.randn(4, 16, 32)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append({"loss": loss.detach()})
    return [*found, weights(model)]


@pytest.mark.parametrize("overlap", ["commit", "eager", "off"])
@pytest.mark.parametrize("streamed", [False, True], ids=["states", "weights too"])
def test_training_with_encrypted_tiers_changes_no_bit(
    disk: Path, overlap: str, streamed: bool
) -> None:
    sections: dict[str, Any] = {"io": {"encryption": True}, "optimizer": {"overlap": overlap}}
    if streamed:
        sections["parameters"] = {"enabled": True, "min_size": 1}
    metrics = same_with_and_without(train, settings(disk, **sections))
    for client in ["activations", "optimizer", *(["parameters"] if streamed else [])]:
        assert metrics[f"offload/{client}/read_bytes"] > 0, client


# ---------------------------------------------------------------------- what a thief finds
TRAINING = f"""
import os, signal, sys, torch
from torch import nn
from offload_strategy import OffloadEngine

class Squares(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.full((1 << 16,), {VALUE}))
    def forward(self, x):
        return ((x * self.weight) * (x + {VALUE})).sum()

engine = OffloadEngine({{
    "tiers": [{{"name": "nvme", "kind": "ssd", "path": sys.argv[1], "capacity": "16MiB"}}],
    "activations": {{"min_size": 1, "budget": "100%"}},
    "optimizer": {{"enabled": True}},
    "parameters": {{"enabled": True, "min_size": 1}},
    "io": {{"encryption": sys.argv[2] == "on"}},
}})
model = Squares()
optimizer = engine.attach(model, torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0))
x = torch.full((1 << 16,), 1.0, requires_grad=True)
loss = model(x)
engine._resources.store.wait_for_writes()
loss.backward()
optimizer.step()
engine._resources.store.wait_for_writes()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_after_kill_9_a_raw_block_device_has_nothing_that_can_be_read(tmp_path: Path) -> None:
    found = {}
    for encryption in ("off", "on"):
        image = tmp_path / encryption
        with loop_device(image, 32 * MiB) as device:
            command = [sys.executable, "-c", TRAINING, str(device), encryption]
            done = subprocess.run(command, capture_output=True, text=True, timeout=120)
            assert done.returncode == -signal.SIGKILL, done.stderr
            os.sync()
        content = image.read_bytes()
        found[encryption] = content.count(PATTERN)
        # As much was written: the bytes are there, and look like noise.
        assert len(content) - content.count(0) > 500 * KiB
    assert found["off"] > 1000
    assert found["on"] == 0


def test_an_encrypted_run_makes_no_scratch_file_of_its_state_dict(disk: Path) -> None:
    counts = {}
    for encryption in (False, True):
        model = nn.Linear(256, 256)
        with OffloadEngine(settings(disk, io={"encryption": encryption})) as engine:
            optimizer = engine.attach(model, torch.optim.AdamW(model.parameters()))
            model(torch.randn(4, 256)).sum().backward()
            optimizer.step()
            before = len(deleted_files())
            states = optimizer.state_dict()["state"]
            counts[encryption] = len(deleted_files()) - before
            assert states[0]["exp_avg"].abs().sum() > 0
            del states
    assert counts == {False: 1, True: 0}


# ---------------------------------------------------------------------- what is not accepted
@pytest.fixture
def rig(make_rig: Callable[..., Rig]) -> Rig:
    return make_rig(encryption=True, paths=2)


def test_a_bit_that_flips_anywhere_is_found_and_named(rig: Rig) -> None:
    ticket = rig.stored(payload := noise(3 * PAGE_BYTES + 5))
    rig.at_once()
    for index in (0, PAGE_BYTES, 3 * PAGE_BYTES + 4):
        rig.flip(ticket, index)
        with pytest.raises(CorruptDataError, match=r"tier 'nvme' at .*tag of the encryption"):
            rig.store.get(ticket)
        rig.flip(ticket, index)
        assert torch.equal(rig.store.get(ticket), payload)
        rig.store.evict(ticket)


def test_with_another_key_nothing_is_accepted(rig: Rig) -> None:
    ticket = rig.stored(noise(PAGE_BYTES))
    rig.at_once()
    rig.check._aead = BlockCipher(MiB)._aead
    with pytest.raises(CorruptDataError):
        rig.store.get(ticket)


def test_a_lost_write_and_a_write_to_the_wrong_place_are_found(make_rig: Any) -> None:
    rig = make_rig(encryption=True)
    first, second = rig.stored(noise(PAGE_BYTES, 1)), rig.stored(noise(PAGE_BYTES, 2))
    old, other = rig.bytes_on_disk(first), rig.bytes_on_disk(second)
    place = first.entry.stripes[0].extent.offset
    rig.store.free(first)
    again = rig.stored(noise(PAGE_BYTES, 1))  # the same bytes in the same place
    assert again.entry.stripes[0].extent.offset == place
    written = rig.bytes_on_disk(again)
    assert len({old, other, written}) == 3, "no two writes look alike"
    rig.at_once()
    for content, accepted in ((old, False), (other, False), (written, True)):
        os.pwrite(rig.region.fd, content, place)
        if accepted:
            assert torch.equal(rig.store.get(again), noise(PAGE_BYTES, 1))
        else:
            with pytest.raises(CorruptDataError):
                rig.store.get(again)


class Spy:
    """Notes the nonce of every block that is encrypted."""

    def __init__(self, aead: Any) -> None:
        self.aead, self.nonces = aead, []
        self.decrypt_into = aead.decrypt_into

    def encrypt_into(self, nonce: bytes, *others: Any) -> None:
        self.nonces.append(nonce)
        self.aead.encrypt_into(nonce, *others)


@hypothesis_settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    sizes=st.lists(st.integers(1, 40 * KiB), min_size=1, max_size=40),
    freed=st.sets(st.integers(0, 39)),
    threads=st.integers(1, 4),
)
def test_no_two_blocks_have_one_nonce_and_each_reads_its_own_bytes(
    disk: Path, sizes: list[int], freed: set[int], threads: int
) -> None:
    from offload_strategy.host_memory.pool import BufferPool
    from offload_strategy.store.tensor_store import TensorStore
    from offload_strategy.telemetry import Recorder

    recorder, pool, cipher = Recorder(), BufferPool(8 * MiB), BlockCipher(8 * KiB)
    spy = cipher._aead = Spy(cipher._aead)
    store = TensorStore(pool, recorder, write_behind=8 * MiB)
    regions = [Region(disk, "nvme", 8 * MiB) for _ in range(2)]
    backend = create_backend("posix", threads=threads, block_size=8 * KiB)
    queues = [PathQueue(region, backend, recorder, checksum=cipher) for region in regions]
    tiers = [PathTier("nvme", queues)]
    blocks, tickets = 0, []
    for number, nbytes in enumerate(sizes):
        payload = noise(nbytes, number)
        ticket = store.put(payload.clone(), CLIENT, tiers)
        if number in freed:  # its place is used again
            store.wait_for_writes()
            store.free(ticket)
        else:
            tickets.append((ticket, payload))
        blocks += -(-nbytes // (8 * KiB))
    store.wait_for_writes()
    assert len(spy.nonces) == blocks == len(set(spy.nonces))
    for ticket, payload in tickets:
        store.evict(ticket)
        assert torch.equal(store.get(ticket), payload)
    store.close()
    backend.close()
    for region in regions:
        region.close()
    pool.close()


# ---------------------------------------------------------------------- what is refused
@pytest.mark.parametrize("backend", ["kvikio", "deepnvme"])
def test_a_backend_that_passes_by_host_memory_is_refused(disk: Path, backend: str) -> None:
    with pytest.raises(ConfigError, match=f"encryption: true needs backend: posix.*{backend}"):
        OffloadEngine(settings(disk, io={"encryption": True, "backend": backend}))


def test_without_its_package_the_error_says_what_to_install(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cryptography.exceptions", None)
    with pytest.raises(ConfigError, match=r"pip install offload-strategy\[encryption\]"):
        OffloadEngine(settings(disk, io={"encryption": True}))
