"""The simulated accelerator behaves as a device does.

That it shows a wait that is missing is tested in tests/accelerator/test_mutants.py.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.accelerator.support import DEVICE
from tests.accelerator.support import device_module as sim

pytestmark = pytest.mark.skipif(DEVICE != "sim", reason="needs TEST_ACCELERATOR=sim")

N = 1 << 18
#: Long enough for the host to come to the next lines on a busy machine.
LATE_US = 200_000


@pytest.fixture(autouse=True)
def _idle() -> Iterator[None]:
    yield
    if DEVICE == "sim":
        sim.set_memory_limit(0, -1)
        sim.set_pinned_limit(-1)
        sim.synchronize_all()


def full(value: float) -> torch.Tensor:
    tensor = torch.full((N,), value, device="sim")
    torch.accelerator.synchronize(tensor.device)
    return tensor


def equals(tensor: torch.Tensor, value: float) -> bool:
    return bool(torch.all(tensor.cpu() == value))


def test_a_freed_pinned_block_is_not_used_again_before_its_copies_are_over() -> None:
    host, target = torch.full((N,), 5.0).pin_memory(), full(0.0)
    address = host.data_ptr()
    sim.sleep(LATE_US)
    target.copy_(host, non_blocking=True)
    del host
    other = torch.full((N,), 9.0).pin_memory()
    assert other.data_ptr() != address
    assert equals(target, 5.0)
    before = sim.pinned_bytes()
    sim.set_pinned_limit(before + 100)
    assert sim.host_register(address, 4 * N) != 0, "there is a limit"
    assert sim.pinned_bytes() == before


@pytest.mark.parametrize("how", ["recorded", "waited for", "neither"])
def test_memory_that_another_stream_reads_is_recorded_or_waited_for(how: str) -> None:
    side, source, target = torch.Stream("sim"), full(4.0), full(0.0)
    with side:
        sim.sleep(LATE_US)
        target.copy_(source)
        read = side.record_event()
    assert not read.query()
    if how == "recorded":
        source.record_stream(side)
    if how == "waited for":
        torch.accelerator.current_stream().wait_event(read)
    address = source.data_ptr()
    del source
    again = torch.full((N,), 8.0, device="sim")
    # Its own stream may use it again at once.
    assert (again.data_ptr() == address) is (how != "recorded")
    side.synchronize()
    assert equals(target, 4.0) is (how != "neither")


def test_out_of_memory_waits_for_streams_that_use_what_was_freed() -> None:
    side, tensor = torch.Stream("sim"), full(1.0)
    used = torch.accelerator.memory_stats()["active_bytes.all.current"]
    with side:
        sim.sleep(LATE_US)
    tensor.record_stream(side)
    del tensor
    sim.set_memory_limit(0, used)
    sim.counts(reset=True)
    again = torch.empty(N, device="sim")
    assert side.query()
    assert sim.counts()["sync:memory"] == 1
    del again


def test_calls_that_wait_for_the_device_are_counted_for_each_thread() -> None:
    tensor = full(1.0)
    sim.counts(reset=True)
    tensor[0].item()
    tensor.cpu()
    torch.equal(tensor, tensor)
    waited = {name for name in sim.counts(this_thread=True) if name.startswith("sync:")}
    calls = ("aten::_local_scalar_dense", "copy DtoH", "aten::equal")
    assert waited == {f"sync:{call}" for call in calls}
