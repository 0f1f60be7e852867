"""Two processes with an accelerator each: the same bits, and reductions beside backward."""

import os
import threading

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from offload_strategy import OffloadEngine
from tests.activations.support import noise
from tests.distributed.ranks import run_ranks
from tests.training import (
    assert_same_history,
    attached,
    gradients,
    settings,
    stored_states,
    weights,
)

#: Not from `support`, which loads the device: ranks are forked before they do.
DEVICE = os.environ["TEST_ACCELERATOR"]
WIDTH = 96


def join(rank, directory):
    """Join a process group with the semantics of NCCL; return this rank's device."""
    if DEVICE == "sim":
        from tests.simulated_accelerator import process_group, sim

        sim.set_delays(20, 100)
    torch.accelerator.set_device_index(rank)
    backend = process_group.BACKEND if DEVICE == "sim" else "nccl"
    store = f"file://{directory}/accelerators"
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=2)
    return torch.device(DEVICE, rank)


def engine_of(directory, overlap, first, streamed=False):
    """An engine with a disk for this rank, and a `first` tier of memory, as "kind capacity"."""
    folder = directory / f"disk-{dist.get_rank()}"
    folder.mkdir()
    optimizer = {"overlap": overlap, "subgroup_size": 5000}
    memory, parameters = {"pinned": "8MiB"}, {"enabled": streamed, "min_size": "1KiB"}
    sections = {"optimizer": optimizer, "memory": memory, "parameters": parameters}
    config = settings(folder, **sections)
    if first is not None:
        kind, capacity = first.split()
        config["tiers"].insert(0, {"name": "first", "kind": kind, "capacity": capacity})
    return OffloadEngine(config)


def train(engine, device, sharded, eager, hook=lambda net: None):
    """Losses, the gradients of one step, and final weights."""
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(6)))
    net.to(device)
    model = net
    if sharded:
        for part in (*net, net):
            fully_shard(part, mesh=init_device_mesh(device.type, (2,)))
    else:
        model = DistributedDataParallel(net, bucket_cap_mb=0.05)
    optimizer = attached(engine, model, torch.optim.AdamW(net.parameters(), lr=1e-2))
    hook(net)
    found = []
    for step in range(4):
        inputs = noise(16, WIDTH, seed=10 * step + device.index).to(device)
        loss = model(inputs).pow(2).mean()
        loss.backward()
        if step == 2 and not eager:
            # What backward has left is read here, before step().
            found.append(gradients(net))
        optimizer.step()
        optimizer.zero_grad()
        found.append({"loss": torch.tensor(loss.item())})
    parts = [*found, weights(net)]
    return [{n: v.to_local() if isinstance(v, DTensor) else v for n, v in p.items()} for p in parts]


def compare(rank, directory, sharded, overlap, first, streamed):
    """Fail unless all is the same with and without offload; return whether tiers have states."""
    device, eager = join(rank, directory), overlap == "eager"
    expected = train(None, device, sharded, eager)
    with engine_of(directory, overlap, first, streamed) as engine:
        assert_same_history(train(engine, device, sharded, eager), expected)
        used = engine.metrics().get("offload/tier/first/used_bytes", 1)
        found = stored_states(engine) > 0 and used > 0
    dist.barrier()
    dist.destroy_process_group()
    return found


def overlap_of_reductions(rank, directory, overlap):
    """How many reductions did not end before backward had reached the first layer.

    The first reduction of each step takes until the compute stream has executed the backward of the
    first layer. It can only end if nothing on the compute stream waits for it before that.
    """
    device = join(rank, directory)
    from tests.simulated_accelerator import process_group, sim

    reached = threading.Event()
    late = 0

    def delayed(collective, number):
        nonlocal late
        if number == 0 and not reached.wait(20.0):  # seconds until it is missing
            late += 1
        collective()

    def hook(net):
        def begin(module, args):
            torch.accelerator.synchronize()
            reached.clear()
            group.number = 0

        # The inputs of the second layer have a gradient, which the first layer's backward uses.
        net[1].register_full_backward_hook(lambda *_: sim.launch_python(reached.set))
        net.register_forward_pre_hook(begin)

    group = process_group.default_group()
    group.number = 1  # what DistributedDataParallel sends when it is made is not delayed
    with engine_of(directory, overlap, "dram 64MiB") as engine:
        group.delayed = delayed
        train(engine, device, sharded=False, eager=overlap == "eager", hook=hook)
        group.delayed = process_group.at_once
    dist.barrier()
    dist.destroy_process_group()
    return late


@pytest.fixture(autouse=True)
def _two_devices():
    if DEVICE == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("needs two devices")


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("overlap", "first"),
    [
        ("commit", None),
        ("eager", "dram 64MiB"),
        ("off", None),
        ("commit", "device 160KiB"),  # for some of the states
        ("eager", "device 160KiB"),
    ],
)
def test_the_bits_are_the_same(tmp_path, sharded, overlap, first, streamed):
    options = {"sharded": sharded, "overlap": overlap, "first": first, "streamed": streamed}
    assert run_ranks(f"{__name__}:compare", tmp_path, group=False, **options) == [True, True]


@pytest.mark.skipif(DEVICE != "sim", reason="needs collectives that wait for a mark")
@pytest.mark.parametrize("overlap", ["commit", "off"])
def test_backward_does_not_wait_for_reductions(tmp_path, overlap):
    where = f"{__name__}:overlap_of_reductions"
    assert run_ranks(where, tmp_path, group=False, overlap=overlap) == [0, 0]
