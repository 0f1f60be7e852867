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
        sim.set_delays(0, 0)
        sim.set_memory_limit(0, -1)
        sim.set_pinned_limit(-1)
        sim.synchronize_all()


def full(value: float, device: str = "sim") -> torch.Tensor:
    tensor = torch.full((N,), value, device=device)
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


def test_two_devices_have_their_own_streams_and_memory() -> None:
    assert torch.accelerator.device_count() == 2
    first = full(1.0, "sim:0")
    with torch.accelerator.device_index(1):
        sim.sleep(LATE_US)
    assert torch.accelerator.current_device_index() == 0
    assert torch.accelerator.current_stream(0).query()
    assert not torch.accelerator.current_stream(1).query()
    second = first.to("sim:1") * 2
    assert second.device.index == 1
    assert equals(second.to("sim:0") + first, 3.0)
    assert torch.accelerator.memory_allocated(1) >= 4 * N
    with pytest.raises(RuntimeError, match="same device"):
        first + second


def test_calls_that_wait_for_the_device_are_counted_for_each_thread() -> None:
    tensor = full(1.0)
    sim.counts(reset=True)
    tensor[0].item()
    tensor.cpu()
    torch.equal(tensor, tensor)
    waited = {name for name in sim.counts(this_thread=True) if name.startswith("sync:")}
    calls = ("aten::_local_scalar_dense", "copy DtoH", "aten::equal")
    assert waited == {f"sync:{call}" for call in calls}


def test_a_network_trains_as_on_the_cpu() -> None:
    def train(device: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True),
            torch.nn.Unflatten(1, (1, -1)),
            torch.nn.Conv2d(1, 1, 3, padding=1),
        ).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(3):
            model(torch.randn(4, 17, 32, device=device)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [parameter.detach().cpu() for parameter in model.parameters()]

    expected = train("cpu")
    for kernel_us, copy_us in ((0, 0), (100, 1000)):
        sim.set_delays(kernel_us, copy_us)
        assert all(map(torch.equal, expected, train("sim")))
