"""One copy of streamed weights for the ranks of a machine: plain training's numbers, bytes once."""

import contextlib
import errno
import gc
import itertools
import os
import threading
import time
import weakref
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from offload_strategy import OffloadEngine
from offload_strategy.errors import ConfigError, OffloadError, StorageError
from offload_strategy.io.queues.moves import Move
from offload_strategy.store import shared_tickets
from offload_strategy.store.shared_tickets import SharedFiles
from offload_strategy.telemetry import Direction
from tests.distributed.loops import Net, check, config, run_steps, tokens
from tests.distributed.ranks import run_ranks
from tests.distributed.test_ranks import STREAMED, train
from tests.support import raising

STEPS = 6
WRITTEN = "offload/parameters/written_bytes"


def sections(directory, overlap, **others):
    no_activations = {"activations": {"enabled": False}}
    return {**config(directory, overlap), **no_activations, "parameters": STREAMED, **others}


def written_each_step(rank, engine, **options):
    """Train; return what `train` does, and bytes of weights that this rank wrote in each step."""
    sums = [0]

    def note(step, net, optimizer):
        # What is not written yet, the next step would take back from memory.
        engine._resources.store.wait_for_writes()
        dist.barrier()
        sums.append(engine.metrics()[WRITTEN])
        if (after := options.get("after")) is not None:
            after(step, net, optimizer)

    found = train(rank, engine, steps=range(STEPS), **{**options, "after": note})
    return found, [int(after - before) for before, after in itertools.pairwise(sums)]


def bytes_of_streamed(found):
    """Bytes of the net's weights of 4 KiB and more, each counted once."""
    weights = {name: w for name, w in found["weights"].items() if name != "head.weight"}
    return sum(weight.nbytes for weight in weights.values() if weight.nbytes >= 4096)


# ---------------------------------------------------------------------- bytes
def every_overlap(rank, directory):
    """Return, by overlap, what a rank wrote in each step, and the bytes of the streamed weights.

    And the bytes on its disk after the last step, of which so many are its states.
    """
    plain, result = train(rank, None, steps=range(STEPS)), {}
    for overlap in ("commit", "eager", "off"):
        kept = []
        with OffloadEngine(sections(directory, overlap)) as engine:
            after = {"after": lambda *found, kept=kept: kept.append(found)}
            found, written = written_each_step(rank, engine, **after)
            check(overlap, plain, found, moved=("optimizer", "parameters"))
            dist.barrier()
            used = sum(engine._resources.tier_used_bytes().values())
            result[overlap] = written, used, engine._optimizers.state_bytes
    return result, bytes_of_streamed(plain)


@pytest.mark.parametrize("size", [2, 4])
def test_a_machine_writes_and_keeps_each_weight_once_whatever_the_number_of_ranks(tmp_path, size):
    results = run_ranks("tests.distributed.test_shared_weights:every_overlap", tmp_path, size)
    weights = results[0][1]
    for overlap in ("commit", "eager", "off"):
        by_step, *totals = zip(*(of_rank[overlap] for of_rank, _ in results), strict=True)
        for written in [sum(of_ranks) for of_ranks in zip(*by_step, strict=True)][1:]:
            # Whole pages are written; commit moves what comes from an update in slices once more.
            assert 0.9 * weights < written < 1.1 * weights, (overlap, written, weights)
        used, states = map(sum, totals)
        # Extents are whole pages, of which small states leave some.
        assert used < 1.15 * (weights + states), (overlap, used, weights, states)


# ---------------------------------------------------------------------- what cannot be shared
def kept_by_each(rank, directory, what):
    """Where weights cannot be shared they are sent, on all ranks, and the numbers are the same."""
    plain = train(rank, None, steps=range(STEPS))
    others, options, held = {}, {}, []

    def hold(step, net, optimizer):
        """Hold the memory of one weight on every rank, which keeps it from being offloaded."""
        held[:] = [net.up.weight.detach()] if step % 2 == 0 else []

    with pytest.MonkeyPatch.context() as patch:
        if what == "encrypted":
            others = {"io": {"encryption": True}}
        elif what == "one has no files" and rank == 1:
            fails = mock.Mock(wraps=os, fstat=raising(OSError(errno.EIO, os.strerror(errno.EIO))))
            patch.setattr(shared_tickets, "os", fails)
        elif what == "one cannot open" and rank == 0:
            cannot_open = raising(ConfigError("it cannot be opened"))
            patch.setattr(shared_tickets.SharedFile, "__init__", cannot_open)
        elif what == "held":
            options = {"after": hold}
        with OffloadEngine(sections(directory, "eager", **others)) as engine:
            found, written = written_each_step(rank, engine, **options)
            check(what, plain, found, moved=("optimizer", "parameters"))
    return written, bytes_of_streamed(plain)


@pytest.mark.parametrize("what", ["encrypted", "one has no files", "one cannot open", "held"])
def test_weights_that_cannot_be_shared_are_sent_and_stored_by_every_rank(tmp_path, what):
    results = run_ranks("tests.distributed.test_shared_weights:kept_by_each", tmp_path, what=what)
    # gloo may hold a weight that it has sent for a moment longer, which then leaves in the next
    # step: so these are the bytes of all steps but the first.
    once = (STEPS - 1) * results[0][1]
    ratio = sum(sum(written[1:]) for written, _ in results) / once
    # In every second step a weight is held: there it stays in memory, on every rank, and the others
    # are shared as ever; in the steps between, each rank writes what is not shared yet.
    assert (1.0 < ratio < 1.2) if what == "held" else (1.8 < ratio < 2.2), results


# ---------------------------------------------------------------------- lives of their own
def overwrite_what_is_free(engine):
    """Write other bytes to every extent of the tier that was used before and is free now."""
    store, tiers = engine._resources.store, engine._resources.clients["parameters"]
    sizes = [*[65536] * 32, *[16384] * 64, *[4096] * 256]
    tickets = [store.put(torch.full((size,), 7, dtype=torch.uint8), "x", tiers) for size in sizes]
    store.wait_for_writes()
    return tickets


def trained(rank, engine):
    """A net that ranks have trained together, whose weights nobody has accessed since."""
    torch.manual_seed(0)
    net = Net()
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    optimizer = optimizer if engine is None else engine.attach(model, optimizer)
    run_steps(model, optimizer, engine, lambda step, _: tokens(step + rank))
    return net


def one_goes_on_alone(rank, directory, how):
    """What rank 1 does with its own weights leaves those that rank 0 reads from its file alone."""
    expected = trained(rank, None).state_dict()
    with contextlib.ExitStack() as stack:
        engine = stack.enter_context(OffloadEngine(sections(directory, "commit")))
        kept = [trained(rank, engine)]
        if rank == 1 and how == "changes them":
            with torch.no_grad():
                for weight in kept[0].parameters():
                    weight.zero_()
            engine._stream._offload_accessed()  # they may stay in memory for a while
        elif rank == 1 and how == "frees its model":
            freed = weakref.ref(kept.pop())
            gc.collect()
            assert freed() is None
        if rank == 1:
            overwrite_what_is_free(engine)
        if rank == 1 and how == "closes its engine":
            stack.close()
        dist.barrier()
        if rank == 0:
            assert engine._stream.offloaded_bytes() > 0
            for name, weight in kept[0].state_dict().items():
                assert torch.equal(weight, expected[name]), name
        dist.barrier()


@pytest.mark.parametrize("how", ["changes them", "frees its model", "closes its engine"])
def test_a_rank_reads_the_same_values_whatever_another_does_with_its_own(tmp_path, how):
    run_ranks("tests.distributed.test_shared_weights:one_goes_on_alone", tmp_path, how=how)


def one_is_late(rank, directory, what):
    """A rank that is slow to write, or to take over new values, is waited for."""
    plain = train(rank, None, steps=range(STEPS))
    engine = OffloadEngine(sections(directory, "commit"))
    with pytest.MonkeyPatch.context() as patch, engine:
        kept, seen, old = {}, {}, []  # the net; values by step

        def read_all(net):
            found = {}
            for name, parameter in net.named_parameters():
                with engine._stream.resident([parameter], changes=False):
                    found[name] = parameter.detach().clone()
            return found

        if what == "writes" and rank == 1:
            submit = Move.submit

            def late(move):
                write = move.direction is Direction.WRITE
                threading.Timer(0.3, submit, (move,)).start() if write else submit(move)

            patch.setattr(Move, "submit", late)
        elif what == "replaces" and rank == 0:
            adopt = SharedFiles.adopt

            def after_a_look(files, *args):
                if kept and len(old) not in seen:
                    time.sleep(0.3)
                    seen[len(old)] = read_all(kept["net"])
                return adopt(files, *args)

            patch.setattr(SharedFiles, "adopt", after_a_look)

        def after(step, net, _):
            kept["net"] = net
            if rank == 1:
                overwrite_what_is_free(engine)
            old.append(read_all(net))

        found = train(rank, engine, steps=range(STEPS), after=after)
        check(what, plain, found, moved=("optimizer", "parameters"))
        # While this rank was late it still had the last step's values of what others update.
        assert len(seen) == (STEPS - 1 if what == "replaces" and rank == 0 else 0)
        for step, weights in seen.items():
            same = [
                [torch.equal(weights[name], old[when][name]) for name in weights]
                for when in (step - 1, step)
            ]
            assert all(map(any, zip(*same, strict=True))), (step, same)
            assert any(same[0]), step


@pytest.mark.parametrize("what", ["writes", "replaces"])
def test_a_rank_that_is_late_is_waited_for(tmp_path, what):
    run_ranks("tests.distributed.test_shared_weights:one_is_late", tmp_path, what=what)


def one_cannot_write(rank, directory):
    """Where one rank cannot store its weights, all ranks raise in the same step."""
    words = "the disk is gone" if rank == 1 else "another rank could not store new weights"
    engine = OffloadEngine(sections(directory, "commit"))
    with pytest.MonkeyPatch.context() as patch, engine:
        if rank == 1:
            patch.setattr(SharedFiles, "share", raising(StorageError("the disk is gone")))
        with pytest.raises(OffloadError, match=words) as raised:
            train(rank, engine, steps=range(1))
        assert any("Go on from the last checkpoint" in note for note in raised.value.__notes__)


def test_all_ranks_raise_if_one_cannot_store_its_weights(tmp_path):
    run_ranks("tests.distributed.test_shared_weights:one_cannot_write", tmp_path)
