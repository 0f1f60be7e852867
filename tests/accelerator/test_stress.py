"""Copies and kernels that are late at random, few buffers, two streams or threads: the same bits.

What lies in memory that was freed too early is overwritten meanwhile, so that a stream that does
not wait for another shows in the numbers. ``make stress`` runs two threads with a thousand seeds.
"""

import os
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import cache

import pytest
import torch
from torch import nn
from torch.optim import AdamW

from offload_strategy import OffloadEngine
from offload_strategy.store.copy_engine import CopyEngine, CopyEngines
from offload_strategy.torch_support.accelerator import current_stream, using_stream
from tests import training
from tests.accelerator.support import (
    DEVICE,
    batch,
    delays,
    device_module,
    loss_of,
    make,
    new_stream,
    replaced_in_host_memory,
    sleep,
    stir,
)
from tests.training import attached, same_with_and_without, settings, weights

SMALL = {"rows": 2, "length": 16}
#: A device counts in cycles: about 0.2 ms at most.
_CYCLES = 400_000
SEEDS = int(os.environ.get("STRESS_SEEDS", "20"))


@pytest.fixture
def late_copies(monkeypatch):
    """Every third copy begins late."""
    dice = random.Random(0)

    def late(original, direction):
        def copy(engine, *args):
            if dice.random() < 0.33:
                with using_stream(engine._copying(current_stream(engine.device))[direction]):
                    sleep(dice.randrange(_CYCLES))
            return original(engine, *args)

        return copy

    monkeypatch.setattr(CopyEngine, "copy_out", late(CopyEngine.copy_out, 0))
    monkeypatch.setattr(CopyEngine, "load", late(CopyEngine.load, 1))
    yield
    torch.accelerator.synchronize()


# ---------------------------------------------------------------------- one thread
@pytest.mark.parametrize("overlap", ["commit", "off"])
@pytest.mark.parametrize("host", [None, "64KiB"], ids=["disk", "little host memory"])
def test_many_steps_are_the_same_and_take_no_more_memory(disk, late_copies, host, overlap):
    """Losses of each step, and the weights after every twentieth."""
    levels = []

    def train(engine):
        dice = random.Random(1)
        model = make(32, 2)
        optimizer = attached(engine, model, AdamW(model.parameters(), 1e-3))
        for module in model.modules():
            if isinstance(module, nn.LayerNorm):  # between the layers, wherever that is
                module.register_forward_hook(
                    lambda *_: sleep(dice.randrange(_CYCLES) if dice.random() < 0.1 else 1)
                )
        found = []
        for step in range(1000 if DEVICE == "cuda" else 30):
            torch.manual_seed(step)
            loss = loss_of(model, step, **SMALL)
            if step % 5 == 0:
                stir()
            loss.backward()
            if step % 7 == 0:
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
            found.append({"loss": loss.detach()})
            if step % 20 == 19:
                found.append(weights(model))
            if engine is not None and step % 10 == 9:
                del loss
                training.on_disk(engine)
                torch.accelerator.synchronize()
                noted = sum(value.nbytes for each in found for value in each.values())
                levels.append(device_module.memory_allocated() - noted)
        return found

    config = settings(disk, host, optimizer={"overlap": overlap}, memory={"pinned": "256KiB"})
    assert same_with_and_without(train, config)["offload/activations/written_bytes"] > 0
    assert levels[-1] <= levels[1] + (1 << 20)


# ---------------------------------------------------------------------- two streams
@pytest.mark.parametrize("priority", [-1, 0])
def test_two_streams_of_the_users_are_the_same(disk, late_copies, priority):
    """Forward on one, backward on another, as pipelines do."""

    def run(engine):
        model = make(32, 2, engine=engine)
        one, two = new_stream(priority), new_stream(priority)
        found = []
        for step in range(50 if DEVICE == "cuda" else 10):
            torch.manual_seed(step)
            one.wait_stream(torch.accelerator.current_stream())
            with using_stream(one):
                inputs = batch(step, **SMALL)
                loss = model(inputs).pow(2).mean()
            two.wait_stream(one)
            with using_stream(two):
                loss.backward()
            torch.accelerator.current_stream().wait_stream(two)
            found.append(training.gradients(model))
            torch.accelerator.synchronize()  # what the user's own streams need
            model.zero_grad()
        return found

    with delays(0, 50, 800):
        same_with_and_without(run, settings(disk, memory={"pinned": "256KiB"}))


@pytest.mark.parametrize("late", [False, True])
def test_a_host_buffer_is_overwritten_once_all_streams_have_read_it(late):
    read, written = replaced_in_host_memory(CopyEngines(), late=late)
    assert (read.unique().tolist(), written.unique().tolist()) == ([1], [2])


# ---------------------------------------------------------------------- two threads
def train(model, optimizer, seed):
    """Three steps on a stream of their own."""
    device = next(model.parameters()).device
    dice = random.Random(seed)
    torch.accelerator.set_device_index(device)
    found = []
    with using_stream(torch.Stream(device)):
        for step in range(3):
            loss = model(batch(step, **SMALL).to(device)).pow(2).mean()
            sleep(dice.randrange(4_000_000))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append({"loss": loss.detach()})
        found.append(weights(model))
        torch.accelerator.current_stream(device).synchronize()
    return found


def models():
    """Without random numbers, which threads would draw in any order; each on its own device.

    Where there are two devices, autograd has two threads as well.
    """
    devices = [f"{DEVICE}:{n % torch.accelerator.device_count()}" for n in range(2)]
    found = [make(16, 2, seed=n, dropout=False, device=each) for n, each in enumerate(devices)]
    torch.accelerator.synchronize()
    return found


@cache
def plain_history():
    """Of plain training, of one model after the other, with kernels that repeat."""
    found = [train(model, AdamW(model.parameters(), 1e-3), 0) for model in models()]
    torch.accelerator.set_device_index(0)  # other tests run in this thread
    return found


def train_both(disk, seed):
    """Losses and weights of two models, of two threads; by seed, they have one engine or two."""
    section = {"overlap": ["commit", "eager", "off"][seed // 2 % 3]}
    config = settings(disk, "64KiB", optimizer=section, memory={"pinned": "1MiB"})
    with ExitStack() as stack:
        engines = [stack.enter_context(OffloadEngine(config)) for _ in range(1 + seed % 2)]
        pairs = [
            (model, engines[n % len(engines)].attach(model, AdamW(model.parameters(), 1e-3)))
            for n, model in enumerate(models())
        ]
        begin = threading.Barrier(2)

        def work(number):
            begin.wait()
            return train(*pairs[number], seed + number)

        with ThreadPoolExecutor(2) as pool:
            found = list(pool.map(work, range(2)))
        for engine in engines:
            assert engine.metrics()["offload/activations/step_left_bytes"] > 0
    return found


def test_a_pass_that_begins_in_another_thread_does_not_end_one_in_its_backward(disk):
    """Times of a pass are read from the device when all of it is over, and not in the middle."""
    with OffloadEngine(settings(disk, optimizer={"enabled": False})) as engine:
        one, two = models()
        for model in (one, two):
            engine.attach(model)
        found = []

        def begin_another(*_):
            torch.accelerator.synchronize()  # all that was timed so far is over
            with ThreadPoolExecutor(1) as pool:
                pool.submit(two, batch(1, **SMALL).to(next(two.parameters()).device)).result()
            trace, _, _ = engine._activations.latest_pass()
            found.append(trace.on_device and len(trace.uses) < len(trace.saved_at))

        one.blocks[1].register_full_backward_hook(begin_another)
        for step in range(2):
            one(batch(step, **SMALL)).sum().backward()
        torch.accelerator.synchronize()
        one(batch(2, **SMALL))
        trace, _, _ = engine._activations.latest_pass()
        assert found == [True, True]
        assert len(trace.uses) == len(trace.saved_at)
        assert not trace.on_device, "the device has told the times"


@pytest.mark.parametrize("seed", range(SEEDS))
def test_two_threads_train_the_same(disk, seed):
    expected = plain_history()
    with delays(seed, *(random.Random(seed).randrange(200) for _ in range(2))):
        got = train_both(disk, seed)
    for one, other in zip(got, expected, strict=True):
        training.assert_same_history(one, other)
