"""The simulated accelerator behaves as a device does.

That it shows a wait that is missing is tested in tests/accelerator/test_mutants.py.
"""

from __future__ import annotations

import ctypes
import io
import mmap

import pytest
import torch

N = 1 << 18
#: Long enough for the host to come to the next lines on a busy machine.
LATE_US = 200_000


@pytest.fixture(autouse=True)
def _idle(sim):
    sim.synchronize_all()
    sim.counts(reset=True)
    yield
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


def test_a_freed_pinned_block_is_not_used_again_before_its_copies_are_over(sim):
    host, target = torch.full((N,), 5.0).pin_memory(), full(0.0)
    address = host.data_ptr()
    sim.sleep(LATE_US)
    target.copy_(host, non_blocking=True)
    del host
    other = torch.full((N,), 9.0).pin_memory()
    assert other.data_ptr() != address
    assert equals(target, 5.0)


@pytest.mark.parametrize("how", ["recorded", "waited for", "neither"])
def test_memory_that_another_stream_reads_is_recorded_or_waited_for(sim, how):
    side, source, target = torch.Stream("sim"), full(4.0), full(0.0)
    with side:
        sim.sleep(LATE_US)
        target.copy_(source)
        read = side.record_event()
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


def test_registered_memory_is_pinned_until_it_is_unregistered(sim):
    memory = mmap.mmap(-1, 4 * N)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    before = sim.pinned_bytes()
    assert sim.host_register(address, 4 * N) == 0
    tensor = torch.frombuffer(memory, dtype=torch.float32)
    assert tensor.is_pinned()
    assert tensor[N // 2 :].is_pinned()
    assert sim.pinned_bytes() - before == 4 * N
    assert sim.host_unregister(address) == 0
    assert not tensor.is_pinned()
    sim.set_pinned_limit(sim.pinned_bytes() + 100)
    assert sim.host_register(address, 4 * N) != 0
    assert sim.counts()["pinned:register"] == 2


def test_events_are_queried_and_timed_on_the_device(sim):
    begin = torch.Event("sim", enable_timing=True)
    end = torch.Event("sim", enable_timing=True)
    begin.record()
    sim.sleep(LATE_US)
    end.record()
    assert not end.query()
    end.synchronize()
    assert begin.elapsed_time(end) >= LATE_US / 1000 - 1


def test_out_of_memory_waits_for_streams_that_use_what_was_freed(sim):
    side, tensor = torch.Stream("sim"), full(1.0)
    used = torch.accelerator.memory_stats()["active_bytes.all.current"]
    with side:
        sim.sleep(LATE_US)
    tensor.record_stream(side)
    del tensor
    sim.set_memory_limit(0, used)
    again = torch.empty(N, device="sim")
    assert side.query()
    assert sim.counts()["sync:memory"] == 1
    del again


def test_storages_are_resized_and_tensors_saved(sim):
    tensor = torch.arange(1000.0, device="sim")
    tensor.untyped_storage().resize_(8000)
    assert torch.equal(tensor.cpu(), torch.arange(1000.0))
    file = io.BytesIO()
    torch.save(tensor, file)
    file.seek(0)
    assert torch.equal(torch.load(file).cpu(), torch.arange(1000.0))
    tensor.untyped_storage().resize_(0)
    assert tensor.untyped_storage().nbytes() == 0


def test_random_operators_and_autocast_give_the_bits_of_the_cpu(sim):
    torch.manual_seed(0)
    drawn = torch.randn(5, device="sim").cpu()
    torch.manual_seed(0)
    assert torch.equal(drawn, torch.randn(5))
    with torch.autocast("sim", dtype=torch.bfloat16):
        product = full(1.0)[:4].view(2, 2) @ full(1.0)[:4].view(2, 2)
    assert product.dtype == torch.bfloat16


def test_errors_of_arguments_are_raised_at_the_call(sim):
    with pytest.raises(RuntimeError):
        torch.ones(3, device="sim") @ torch.ones(4, device="sim")
    with pytest.raises(RuntimeError, match="same device"):
        torch.ones(3, device="sim:0") + torch.ones(3, device="sim:1")


def test_two_devices_have_their_own_streams_and_memory(sim):
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


def test_calls_that_wait_for_the_device_are_counted_for_each_thread(sim):
    tensor = full(1.0)
    sim.counts(reset=True)
    tensor[0].item()
    tensor.cpu()
    torch.equal(tensor, tensor)
    waited = {name for name in sim.counts(this_thread=True) if name.startswith("sync:")}
    assert waited == {
        f"sync:{call}" for call in ("aten::_local_scalar_dense", "copy DtoH", "aten::equal")
    }


def test_a_network_trains_as_on_the_cpu(sim):
    def train(device: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Embedding(50, 32),
            torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True),
            torch.nn.Unflatten(1, (1, -1)),
            torch.nn.Conv2d(1, 1, 3, padding=1),
            torch.nn.Flatten(1, 2),
            torch.nn.Linear(32, 50),
        ).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        data = torch.randint(0, 50, (3, 4, 17), generator=torch.Generator().manual_seed(1))
        for batch in data.to(device):
            logits = model(batch[:, :-1])
            torch.nn.functional.cross_entropy(
                logits.flatten(0, 1), batch[:, 1:].flatten()
            ).backward()
            optimizer.step()
            optimizer.zero_grad()
        return [parameter.detach().cpu() for parameter in model.parameters()]

    expected = train("cpu")
    for kernel_us, copy_us in ((0, 0), (100, 1000)):
        sim.set_delays(kernel_us, copy_us)
        assert all(map(torch.equal, expected, train("sim")))
