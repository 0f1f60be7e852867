"""A rank that dies takes the job down: in time, with a message that names it, and with no file.

A rank is killed in the middle of "backward" or "step", or has an "error" of its own in an update;
or gloo loses the messages that are sent at the moment when it is killed. torchrun may start the
ranks again.
"""

import errno
import json
import os
import signal
import sys
import time
from pathlib import Path
from unittest import mock

import psutil
import pytest
import torch
import torch.distributed as dist
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.nn.parallel import DistributedDataParallel

from offload_strategy import OffloadEngine, load, save
from offload_strategy.optimizer.ranks import data_parallel_group as ranks
from offload_strategy.optimizer.ranks import rank_directory
from tests.distributed.loops import Net, config, different, loss_of
from tests.distributed.ranks import run_ranks
from tests.distributed.test_ranks import train as data_parallel
from tests.training import stored_states

RANKS = 3
VICTIM = 2


class Lost:
    """A collective whose message was lost, and which never ends."""

    def is_completed(self):
        return False

    def wait(self, timeout=None):
        time.sleep(1800 if timeout is None else timeout.total_seconds())
        raise RuntimeError("Operation timed out!")


def train(rank, how, tier, notes):
    """Train until rank 2 is gone; a loop that goes on says so."""
    (notes / f"process-{rank}").write_text(str(os.getpid()))
    store = f"file://{notes}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=RANKS)
    trained = 0

    def end(moment):
        if (rank, trained, moment) == (VICTIM, 2, "backward" if how == "backward" else "step"):
            (notes / "died").write_text(str(time.time()))
            if how == "error":
                raise OSError("an update failed")
            os.kill(os.getpid(), signal.SIGKILL)

    def broadcast(*arguments):
        return Lost() if trained == 2 else begin(*arguments)

    if how == "lost" and rank != VICTIM:
        begin, ranks.DataParallelGroup.broadcast = ranks.DataParallelGroup.broadcast, broadcast
        ranks._PATIENCE_SECONDS = 1.0

    class Adam(torch.optim.AdamW):
        def step(self, closure=None):
            end("step")
            return super().step(closure)

    torch.manual_seed(0)
    net = Net()
    net.up.weight.register_hook(lambda _: end("backward"))
    model = DistributedDataParallel(net, bucket_cap_mb=0.02)
    with OffloadEngine(config(tier, "off")) as engine:
        optimizer = engine.attach(model, Adam(net.parameters(), lr=1e-2))
        while trained < 1000:
            loss_of(model, torch.randint(0, 96, (4, 17))).backward()
            optimizer.step()
            optimizer.zero_grad()
            trained += 1
            moved = stored_states(engine)
            (notes / f"moved-{rank}").write_text(str(moved))
    (notes / "to-the-end").touch()


def by_themselves(rank, directory, tier, ways):
    """Ranks that no launcher looks after; their exit statuses, and the seconds until then.

    Their output goes to files.
    """
    ranks = {}
    for how in ways:
        notes = directory / how
        notes.mkdir()
        for rank in range(RANKS):
            process = os.fork()
            if process == 0:
                os.environ["RANK"] = str(rank)  # torch's errors begin with it
                output = os.open(notes / f"output-{rank}", os.O_CREAT | os.O_WRONLY)
                os.dup2(output, 1)
                os.dup2(output, 2)
                train(rank, how, Path(tier), notes)
                sys.exit()
            ranks[process] = how, rank
    found = {how: {} for how in ways}
    while ranks:
        process, status = os.wait()
        how, rank = ranks.pop(process)
        after = time.time() - float((directory / how / "died").read_text())
        found[how][rank] = [os.waitstatus_to_exitcode(status), after]
    return found


# ---------------------------------------------------------------------- started again
STEPS, EVERY, KILLED_AFTER = 8, 3, 4


def restarted(rank, directory, tier):
    """Start two ranks as torchrun does, but forked, and again after one was killed."""
    # From the launcher's own store ranks that are started again may read where the old ones
    # listened (torch 2.13, with or without offload).
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    launched = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=2, max_restarts=1, monitor_interval=0.1,
        run_id="here", rdzv_backend="c10d", rdzv_endpoint="localhost:0", start_method="fork",
    )  # fmt: skip
    elastic_launch(launched, train_and_compare)(Path(tier), directory)


def train_on(engine, checkpoint, doomed):
    """Train to the end, from the checkpoint if there is one.

    A rank is killed between two checkpoints; the ranks that torchrun starts again go on from the
    last one.
    """
    rank = dist.get_rank()
    saved = load(checkpoint) if checkpoint.exists() else None
    first = 0 if saved is None else saved["step"]

    def after(step, net, optimizer):
        if doomed and step == KILLED_AFTER:
            os.kill(os.getpid(), signal.SIGKILL)
        if engine is not None and (step + 1) % EVERY == 0:
            states = optimizer.state_dict()
            if rank == 0:
                save({"step": step + 1, "model": net.state_dict(), "optimizer": states}, checkpoint)
            dist.barrier()

    found = data_parallel(rank, engine, states=saved, steps=range(first, STEPS), after=after)
    return {**found, "first": first}


def train_and_compare(tier, notes):
    """Train, be killed, train again, and compare with training that nothing interrupts."""
    dist.init_process_group("gloo")
    rank, restarts = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    (notes / f"process-{rank}-{restarts}").write_text(str(os.getpid()))
    with OffloadEngine(config(tier, "commit")) as engine:
        ours = train_on(engine, notes / "last.ckpt", doomed=rank == 1 and restarts == 0)
        moved = stored_states(engine)
    plain = train_on(None, notes / "none", doomed=False)
    first = ours["first"]
    plain["losses"] = plain["losses"][first:]
    differs = [key for key in different(plain, ours) if key != "first"]
    found = {"restarts": restarts, "first": first, "moved": moved, "differs": differs}
    (notes / f"found-{rank}").write_text(json.dumps(found))
    dist.destroy_process_group()


# ---------------------------------------------------------------------- what came of it
def test_ranks_without_a_launcher_end_by_themselves_and_name_the_one_that_is_gone(tmp_path, disk):
    ways = ["backward", "step", "error", "lost"]
    where = "tests.distributed.test_deaths:by_themselves"
    (found,) = run_ranks(where, tmp_path, size=1, group=False, tier=str(disk), ways=ways)
    for how in ways:
        files = [file for file in (tmp_path / how).iterdir() if file.name != "store"]
        notes = {file.name: file.read_text() for file in files}
        assert "to-the-end" not in notes
        for rank in range(3):
            status, seconds_after = found[how][str(rank)]
            said = notes[f"output-{rank}"]
            assert not psutil.pid_exists(int(notes[f"process-{rank}"]))
            assert float(notes[f"moved-{rank}"]) > 0
            assert seconds_after < 30
            if rank != 2:
                assert f"rank 2 (process {notes['process-2']})" in said, said
            elif how == "error":
                assert "OSError: an update failed" in said
            assert status == (-9 if rank == 2 and how != "error" else 1), said


def test_torchrun_ends_all_ranks_and_starts_others_that_end_as_an_unbroken_job(tmp_path, disk):
    where = "tests.distributed.test_deaths:restarted"
    run_ranks(where, tmp_path, size=1, group=False, tier=str(disk))
    for rank in range(2):
        assert not psutil.pid_exists(int((tmp_path / f"process-{rank}-0").read_text()))
        found = json.loads((tmp_path / f"found-{rank}").read_text())
        assert (found["restarts"], found["first"], found["differs"]) == (1, 3, [])
        assert found["moved"] > 0


# ---------------------------------------------------------------------- without descriptors
@pytest.mark.parametrize(
    ("error", "ended"),
    [(OSError(errno.EMFILE, os.strerror(errno.EMFILE)), False), (psutil.NoSuchProcess(1), True)],
)
def test_a_process_that_cannot_be_looked_at_has_not_ended(error, ended):
    process = mock.Mock(is_running=mock.Mock(side_effect=error))
    assert rank_directory._has_ended(process) is ended
