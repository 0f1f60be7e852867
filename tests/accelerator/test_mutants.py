"""Deliberate bugs in the synchronisation of the copy engine: each must be found.

A test of streams proves something only if it fails when a wait is missing. Each mutant changes one
line of the copy engine; scenarios are repeated with other delays until one of them shows it, in a
gradient that differs, or in memory that is not freed.
"""

import inspect
import textwrap
from functools import partial
from itertools import product
from types import ModuleType

import pytest
import torch
from torch import nn

from offload_strategy import OffloadEngine
from offload_strategy.errors import CorruptDataError
from offload_strategy.optimizer import subgroup_update
from offload_strategy.optimizer.overlap import update_stream
from offload_strategy.store import copy_engine, tensor_store
from offload_strategy.torch_support import accelerator
from offload_strategy.torch_support.accelerator import ReleaseWindow, using_stream
from offload_strategy.units import KiB, MiB
from tests.accelerator.support import (
    DEVICE,
    Deep,
    delays,
    device_module,
    new_stream,
    replaced_in_host_memory,
)
from tests.activations.support import noise
from tests.training import attached, on_disk, settings

pytestmark = pytest.mark.skipif(DEVICE != "sim", reason="needs the simulated accelerator")

LAYERS, ELEMENTS = 24, 32 * KiB
SEEDS = 6


def churn(elements=ELEMENTS):
    """Use the memory that was just freed."""
    for _ in range(4):
        torch.full((elements,), float("nan"), device=DEVICE)


def model_on(engine):
    model = Deep(LAYERS).to(DEVICE)
    if engine is not None:
        engine.attach(model)
    return model


def inputs(*shape, seed=0):
    found = noise(*shape, seed=seed).to(DEVICE)
    torch.accelerator.synchronize()
    return found.requires_grad_()


def gradients(engine, seed, elements=ELEMENTS):
    """Of three steps, on a stream of the user's with every other seed."""
    model, x, found = model_on(engine), inputs(elements), []
    stream = new_stream() if seed % 2 else torch.accelerator.current_stream()
    for _ in range(3):
        with using_stream(stream):
            loss = model(x).sum()
            churn(elements)
            loss.backward()
            churn(elements)
        torch.accelerator.current_stream().wait_stream(stream)
        found.append(x.grad.clone())
        torch.accelerator.current_stream().synchronize()
        x.grad = None
    return found


def gradients_after_a_dropped_pass(engine, seed):
    """A pass is dropped while the device is behind; its buffers serve loads of another one."""
    model, x = model_on(engine), inputs(ELEMENTS, seed=seed)
    loss = model(x).sum()
    if engine is not None:
        on_disk(engine)
    device_module.sleep(100_000)
    dropped = model(x * 2)
    del dropped
    loss.backward()
    return [x.grad]


def updated(engine, seed):
    """Weights, of which updates run during backward on a stream of their own."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(128, 128) for _ in range(6))).to(DEVICE)
    optimizer = attached(engine, model, torch.optim.AdamW(model.parameters(), 1e-2, foreach=True))
    x = inputs(64, 128, seed=seed).detach()
    seen = []
    for _ in range(3):
        device_module.sleep(10_000)  # gradients are late, which an update must not overlook
        model(x).pow(2).sum().backward()
        if engine is None:
            optimizer.step()  # `eager` has updated the weights by now
        seen += [parameter.detach().clone() for parameter in model.parameters()]
        churn()
        if engine is not None:
            optimizer.step()
        optimizer.zero_grad()
        churn()
    return seen


def differs(run, host, disk, seed):
    """Whether tensors are not those of plain training."""
    eager = {"overlap": "eager", "subgroup_size": 20_000}
    section = eager if run is updated else {"enabled": False}
    config = settings(disk, host, optimizer=section, memory={"pinned": "4MiB"})
    with delays(seed, 100 * (seed % 3), 800 * ((seed + 1) % 3)), OffloadEngine(config) as engine:
        got = [tensor.cpu() for tensor in run(engine, seed)]
    return not all(map(torch.equal, got, [tensor.cpu() for tensor in run(None, seed)]))


def too_much_memory(disk, seed):
    """Whether more is in use than the windows allow while the device is behind."""
    config = settings(disk, "1GiB", optimizer={"enabled": False}, memory={"pinned": "4MiB"})
    with OffloadEngine(config) as engine:
        model, x = model_on(engine), inputs(1 * MiB)
        before = device_module.memory_allocated()
        for _ in range(3):
            torch.accelerator.synchronize()
            device_module.reset_peak_memory_stats()
            device_module.sleep(500_000)
            model(x).sum().backward()
            x.grad = None
        model(x.detach())  # the next forward pass begins
        # Of freed memory, what another stream still uses counts, too.
        peak = device_module.memory_stats()["active_bytes.all.peak"] - before
        left = device_module.memory_allocated() - before
        torch.accelerator.synchronize()
    # A few tensors of the next pass may be on their way; the window would be more.
    return bool(peak > 64 * MiB or left > 12 * MiB)


def differs_where_replaced(disk, seed):
    """Whether bytes are lost where others replace them in host memory."""
    read, written = replaced_in_host_memory(tensor_store.CopyEngines(), late=bool(seed % 2))
    return (read.unique().tolist(), written.unique().tolist()) != ([1], [2])


def differs_where_released_together(disk, seed):
    """Whether the memory of two copies is used again before the second of them is over."""
    window, other = ReleaseWindow(torch.accelerator.current_stream()), torch.Stream(DEVICE)
    sources = [torch.ones(ELEMENTS, device=DEVICE) for _ in range(2)]
    copies = [torch.zeros(ELEMENTS, device=DEVICE) for _ in range(2)]
    torch.accelerator.synchronize()
    with using_stream(other):
        for copy in copies:
            device_module.sleep(20_000)
            copy.copy_(sources[0])
            window.add(other.record_event(), copy.nbytes, sources.pop(0))
    window.release()
    churn()
    torch.accelerator.synchronize()
    return torch.cat(copies).unique().tolist() != [1]


SCENARIOS = [
    partial(differs, gradients, None),
    partial(differs, gradients, "1GiB"),
    partial(differs, partial(gradients, elements=512 * KiB), "1GiB"),
    partial(differs, gradients_after_a_dropped_pass, None),
    too_much_memory,
    differs_where_replaced,
    differs_where_released_together,
]
OF_UPDATES = [partial(differs, updated, "1GiB")]


def recorded(copies, end):
    """The end of copies is recorded before them."""
    indent = 12 * " "
    copied = f"{indent}_copy_together({copies})\n"
    event = f"{indent}{end}\n"
    return copied + event, event + copied


WAITS = "wait_event(compute.record_event())"
MEMORY = """\
        tensors = [
            torch.empty(host.numel(), dtype=torch.uint8, device=self.device) for host in hosts
        ]
"""
COPYING = "        _, incoming = self._copying(compute)\n"
GATHER = "            torch._foreach_copy_(parts, mine)\n"
CROSS = "            whole.copy_(staging, non_blocking=True)\n"
#: What is changed, by file: a line that is left out, or a part of the source and what replaces it.
MUTANTS = {
    copy_engine: {
        "the copy to the host does not wait for the computation": f"outgoing.{WAITS}",
        "the end of a copy to the host is recorded before it": recorded(
            "sources, hosts, to_host=True", "done.record(outgoing)"
        ),
        "the write to the path does not wait for the copy": (
            "while not event.query():",
            "while False:",
        ),
        "the copy to the device does not wait for the computation": f"incoming.{WAITS}",
        "the computation does not wait for the copy to the device": (
            "compute.wait_event(copy.done)"
        ),
        "the end of a copy to the device is recorded before it": recorded(
            "tensors, hosts, to_host=False", "done.record(incoming)"
        ),
        "a host buffer is free before the copy out of it is over": (
            "self._loads.append((done, copies, hosts))"
        ),
        "loaded memory belongs to the incoming stream": (
            MEMORY + COPYING + f"        incoming.{WAITS}\n",
            COPYING + "        with using_stream(incoming):\n" + textwrap.indent(MEMORY, "    "),
        ),
        "small tensors are gathered after their buffer has crossed the link": (
            GATHER + CROSS,
            CROSS + GATHER,
        ),
        "the window has no end": ("max(_WINDOW_BYTES, 2 * self._largest)", "1 << 40"),
        "what backward has used stays in the window": ("entry.state is TicketState.FREED", "False"),
        "what another stream reads is overwritten": ("stream in copy.awaited_by", "True"),
        "what replaces bytes does not wait for their copy": "outgoing.wait_event(after)",
        "copies to the host run on the compute stream, with no order to what follows": (
            "with using_stream(outgoing):",
            "with using_stream(_):",
        ),
    },
    # The windows in which memory is referenced until its stream waits for what uses it.
    accelerator: {
        "memory is freed without a wait for its copy": "self._owner.wait_event(end)",
        "the wait is for the first copy of those released": (
            "            end, nbytes, held = self._uses.popleft()\n",
            "            first, nbytes, held = self._uses.popleft()\n"
            "            end = end or first\n",
        ),
        "nothing is released while the device is behind": (
            "while self._uses and self.nbytes > at_most:",
            "while self._uses and self.nbytes > at_most and self._uses[0][0].query():",
        ),
        "a gradient is dropped without a wait for its update": "self._owner.wait_event(end)",
    },
    # The stream on which updates run.
    update_stream: {
        "an update does not wait for what produced the gradients": "stream.wait_stream(producer)",
        "the end of backward does not join the updates": (
            "torch.autograd.Variable._execution_engine.queue_callback(self.join)"
        ),
    },
}


ORIGINALS = {name: original for original, names in MUTANTS.items() for name in names}


def mutated(original, old, new):
    source = inspect.getsource(original)
    assert source.count(old) >= 1, "the mutant's line is not there any more"
    module = ModuleType("mutated")
    module.__dict__["__name__"] = original.__name__
    exec(compile(source.replace(old, new), "mutant", "exec"), module.__dict__)
    return module


@pytest.mark.parametrize("name", ORIGINALS)
def test_a_deliberate_bug_is_found(disk, monkeypatch, name):
    original = ORIGINALS[name]
    change = MUTANTS[original][name]
    module = mutated(original, *((change, "pass") if isinstance(change, str) else change))
    if original is copy_engine:
        close = module.CopyEngine.close

        def close_when_idle(engine):
            # A copy that the mutant has lost sight of must not end the process.
            torch.accelerator.synchronize()
            close(engine)

        monkeypatch.setattr(module.CopyEngine, "close", close_when_idle)
        monkeypatch.setattr(tensor_store, "CopyEngines", module.CopyEngines)
    elif original is accelerator:
        for method in ("release", "release_unused"):
            monkeypatch.setattr(ReleaseWindow, method, getattr(module.ReleaseWindow, method))
    else:
        monkeypatch.setattr(subgroup_update, "UpdateStreams", module.UpdateStreams)
    of_updates = original is update_stream or "update" in name
    if of_updates:
        monkeypatch.setattr(update_stream, "_WINDOW_BYTES", 0)
    for seed, scenario in product(range(SEEDS), OF_UPDATES if of_updates else SCENARIOS):
        try:
            if scenario(disk, seed):
                return
        except (torch.OutOfMemoryError, CorruptDataError):  # a checksum notices some
            return
        finally:
            torch.accelerator.synchronize()
    pytest.fail(f"nothing noticed in {SEEDS} seeds that {name}")


def test_calls_that_wait_for_the_device_are_counted():
    tensor = inputs(ELEMENTS).detach()
    device_module.counts(reset=True)
    tensor[0].item()
    tensor.cpu()
    torch.equal(tensor, tensor)
    waited = {n for n in device_module.counts(this_thread=True) if n.startswith("sync:")}
    calls = ("aten::_local_scalar_dense", "copy DtoH", "aten::equal")
    assert waited == {f"sync:{call}" for call in calls}


def test_without_a_bug_nothing_is_found(disk):
    for seed, scenario in product(range(SEEDS), [*SCENARIOS, *OF_UPDATES]):
        assert not scenario(disk, seed), f"{scenario}, seed {seed}"
