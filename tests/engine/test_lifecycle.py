"""However training ends, nothing stays on disk, nothing hangs, and the error is the user's own."""

import copy
import gc
import os
import pickle
import signal
import sys
import threading
import time
import weakref
from code import InteractiveInterpreter
from contextlib import suppress
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW
from torch.utils.data import DataLoader

from offload_strategy import OffloadEngine, OffloadError
from offload_strategy.host_memory import buffers
from offload_strategy.io.backends import posix
from tests.distributed.ranks import run_ranks
from tests.engine.test_engine import model, train, trained
from tests.support import run_python
from tests.training import (
    activations_only,
    assert_same_bits,
    attached,
    gradients,
    moved,
    on_disk,
    same_with_and_without,
    settings,
    weights,
)

BEGIN = """
import os, sys, signal
import torch
from torch import nn
torch.set_num_threads(1)
from offload_strategy import OffloadEngine
from tests.training import settings
torch.manual_seed(0)
model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
sections = {"optimizer": {"subgroup_size": 5000}, "io": {"block_size": "4KiB"}}
engine = OffloadEngine(settings(sys.argv[1], **sections))
optimizer = engine.attach(model, torch.optim.AdamW(model.parameters(), fused=True))
def step():
    optimizer.zero_grad()
    loss = model(torch.randn(256, 64)).pow(2).mean()
    loss.backward()
    optimizer.step()
    return loss
step()
step()
print("ready", flush=True)
"""


def test_an_optimizer_that_lost_its_states_with_the_engine_goes_on_when_they_are_loaded(disk):
    def train_twice(offload):
        torch.manual_seed(0)
        layer = nn.Linear(64, 64)
        inner, saved = AdamW(layer.parameters(), lr=1e-2), {}
        for again in (False, True):
            with OffloadEngine(settings(disk)) as engine:
                if offload and again:
                    attach = partial(engine.attach, None, inner)
                    for refused in (inner.step, inner.state_dict, attach):
                        with pytest.raises(OffloadError, match="went with the earlier engine"):
                            refused()
                    inner.load_state_dict(saved)
                optimizer = engine.attach(layer, inner) if offload else inner
                for _ in range(3):
                    layer(torch.ones(8, 64)).square().sum().backward()
                    optimizer.step()
                saved = optimizer.state_dict()
        return weights(layer)

    assert_same_bits(train_twice(True), train_twice(False))


# ---------------------------------------------------------------------- ends of a process
#: What follows, the exit status, and what the error says.
ENDS = {
    "closed": ("engine.close()", 0, ""),
    "closed while a graph is alive": (
        "loss = step(); keep = model(torch.randn(256, 64)).sum(); engine.close()", 0, ""
    ),
    "forgotten": ("loss = step()", 0, ""),
    "forgotten in the middle of a step": (
        "optimizer.zero_grad(); model(torch.randn(256, 64)).pow(2).mean().backward()", 0, ""
    ),
    "forgotten before backward": ("loss = model(torch.randn(256, 64)).pow(2).mean()", 0, ""),
    "an exception": ("step(); raise ValueError('of the user')", 1, "ValueError: of the user"),
    "sys.exit": ("step(); sys.exit(7)", 7, ""),
    "os._exit": ("step(); os._exit(5)", 5, ""),
}  # fmt: skip
GO_ON = BEGIN + "while True: step()\n"
SIGNALS = {
    "Ctrl-C": (GO_ON, signal.SIGINT),
    "killed": (GO_ON, signal.SIGKILL),
    # As on file systems that have no unnamed files.
    "terminated, with an unlinked file": ("import os\ndel os.O_TMPFILE\n" + GO_ON, signal.SIGTERM),
}
SURVIVE = f"""{BEGIN}
import gc, random, threading, time
random.seed(1)
interrupts = 0
go, came = threading.Semaphore(0), threading.Event()
def press():
    for _ in range(80):
        go.acquire()
        time.sleep(random.uniform(0, 0.02))
        os.kill(os.getpid(), signal.SIGINT)
        # Python ignores what is raised while a weak reference is cleared.
        while not came.wait(20):
            os.kill(os.getpid(), signal.SIGINT)
        came.clear()
fingers = threading.Thread(target=press)
fingers.start()
for _ in range(80):
    try:
        go.release()
        while True:
            step()
    except KeyboardInterrupt:
        interrupts += 1
        came.set()
fingers.join()
for _ in range(3):  # it goes on, and a checkpoint can be written
    loss = step()
state = optimizer.state_dict()
assert len(state["state"]) == 12, len(state["state"])
assert loss.isfinite(), loss
del loss
optimizer.zero_grad()
store = engine._resources.store
store.wait_for_writes()
sys.last_value = sys.last_traceback = None
gc.collect()
engine.close()
assert interrupts == 80, interrupts
assert store.registry.live == 0, store.registry.live
left = [t.name for t in threading.enumerate() if t.name.startswith("ssd-offload")]
assert not left, left
assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
print("survived")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs fork, signals and /proc")
def test_a_process_ends_with_its_own_exit_code_and_leaves_nothing_on_disk(tmp_path):
    scripts = {end: (BEGIN + code, 0) for end, (code, _, _) in ENDS.items()}
    scripts |= {**SIGNALS, "survives": (SURVIVE, 0)}
    where = "tests.ends:outcomes"
    (found,) = run_ranks(where, tmp_path, size=1, seconds=300, group=False, scripts=scripts)
    for (end, (_, how)), result in zip(scripts.items(), found, strict=True):
        _, expected, message = ENDS.get(end, ("", -how, ""))
        code, errors = result["status"], result["errors"]
        assert code == expected, (end, errors)
        assert message in errors, end
        assert "Exception ignored" not in errors, end
        assert result["left"] == [], end
        if how:  # the file, beside the directory that processes take turns on
            (ours,) = result["in_use"]
            assert ours.endswith("(deleted)"), end
        if how == signal.SIGINT:
            assert errors.rstrip().endswith("KeyboardInterrupt")
        elif end in ENDS:
            said = [line for line in errors.splitlines() if not line.startswith("ssd-offload: ")]
            assert bool(said) == bool(message), (end, errors)
    # Ctrl-C in a notebook, over and over: no state is lost, nothing hangs.
    assert found[-1]["output"].endswith("survived\n")


# ---------------------------------------------------------------------- forks
FORKS = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")


@FORKS
@pytest.mark.parametrize("persistent", [False, True])
def test_data_loader_workers_are_forked_while_training(disk, persistent):
    rows = list(torch.randn(24, 8))

    def run(engine):
        net = model()
        optimizer = attached(engine, net, AdamW(net.parameters(), 1e-2))
        forks = {} if engine is None else {"num_workers": 2, "multiprocessing_context": "fork"}
        forks["persistent_workers"] = persistent and engine is not None
        loader = DataLoader(rows, batch_size=4, **forks)
        for _ in range(2):
            for batch in loader:
                optimizer.zero_grad()
                net(batch).pow(2).sum().backward()
                optimizer.step()
        return [weights(net)]

    same_with_and_without(run, settings(disk, "2KiB"))


@FORKS
@pytest.mark.parametrize("host", [None, "1MiB"], ids=["on disk", "in host memory"])
def test_a_forked_child_that_trains_is_told_to_make_its_own_engine(disk, host):
    with OffloadEngine(settings(disk, host)) as engine:
        net, optimizer = trained(engine)
        batch = torch.randn(4, 8)
        pending = net(batch).sum()
        on_disk(engine)
        child = os.fork()
        if child == 0:
            try:
                with torch.no_grad():
                    net(batch)  # using the weights is fine
                uses = (optimizer.step, optimizer.state_dict)
                for use in (*uses, lambda: net(batch), lambda: engine.attach(model())):
                    with pytest.raises(OffloadError, match="forked process"):
                        use()
                engine.close()
                os._exit(0)
            finally:
                os._exit(2)
        assert os.waitpid(child, 0)[1] == 0
        pending.backward()
        optimizer.step()


# ---------------------------------------------------------------------- copies
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net))])
def test_a_copy_of_an_attached_model_trains_without_offload(disk, copied):
    expected, net = model(), model()
    with OffloadEngine(settings(disk)) as engine:
        train(expected, SGD(expected.parameters(), 0.1), 1)
        train(net, engine.attach(net, SGD(net.parameters(), 0.1)), 1)
        loss = net(torch.ones(4, 8)).sum()
        twin = copied(net)
        loss.backward()
        on_disk(engine)
        before = moved(engine)
        for each in (twin, expected):
            train(each, SGD(each.parameters(), 0.1), 3)
        assert_same_bits(weights(twin), weights(expected))
        on_disk(engine)
        assert moved(engine) == before
        # The copy may be attached for itself.
        train(twin, engine.attach(twin, SGD(twin.parameters(), 0.1)), 1)
        assert moved(engine) + moved(engine, verb="forwarded") > before


# ---------------------------------------------------------------------- other systems
POORER = """
import os, mmap
os.environ.setdefault("USERNAME", "somebody")  # as such systems do
import torch  # which has ways of its own on such systems
for module, names in (
    (os, ["O_DIRECT", "O_TMPFILE", "O_CLOEXEC", "O_NOFOLLOW", "posix_fallocate", "pread", "pwrite",
          "preadv", "pwritev", "fstatvfs", "statvfs", "register_at_fork", "fork", "getuid",
          "posix_fadvise", "sched_getaffinity", "major", "minor"]),
    (mmap, [name for name in dir(mmap) if name.startswith(("MADV_", "MAP_", "PROT_"))]),
):
    for name in names:
        if hasattr(module, name):
            delattr(module, name)
"""

IMPORT_ALL = """
import importlib, pkgutil, sys
import offload_strategy
failed = []
for module in pkgutil.walk_packages(offload_strategy.__path__, "offload_strategy."):
    if ".examples" in module.name:
        continue
    try:
        importlib.import_module(module.name)
    except BaseException as error:  # packages of others may be missing
        if not isinstance(error, ImportError) or "offload_strategy" in str(error):
            failed.append((module.name, repr(error)))
assert not failed, failed
from tests.engine.test_engine import model, train
from tests.training import attached, same_with_and_without, settings, weights
def run(engine):
    net = model()
    train(net, attached(engine, net, torch.optim.AdamW(net.parameters())))
    return [weights(net)]
figures = same_with_and_without(run, settings(None, "64MiB"))
assert figures["offload/tier/host/used_bytes"] > 0
try:
    offload_strategy.OffloadEngine(settings(sys.argv[1]))
except offload_strategy.ConfigError as error:
    print(error)
"""


def test_it_imports_and_uses_host_memory_where_the_system_offers_little(disk):
    out = run_python("-c", POORER + IMPORT_ALL, disk)
    assert "does not offer. Use a tier of kind dram" in out


# ---------------------------------------------------------------------- notebooks
SET_UP = """
import torch
from torch import nn
from offload_strategy import OffloadEngine

torch.manual_seed(0)
model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
engine = OffloadEngine(config)
optimizer = engine.attach(model, torch.optim.AdamW(model.parameters()))
"""
TRAIN = """
for _ in range(3):
    model(torch.ones(8, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
# Inside a hook of autograd, inside an update of the optimizer, and inside a forward pass.
INTERRUPTIONS = {
    "backward": "model[0].weight.register_hook(interrupt)",
    "update": "optimizer.register_step_pre_hook(interrupt)",
    "forward": "model[2].register_forward_hook(interrupt)",
}


def interrupt(*_):
    raise KeyboardInterrupt


@pytest.mark.parametrize("overlap", ["commit", "eager", "off"])
@pytest.mark.parametrize("place", INTERRUPTIONS)
def test_the_engine_of_an_interrupted_cell_ends_with_the_next(disk, place, overlap, monkeypatch):
    for name in ("last_type", "last_value", "last_traceback", "last_exc"):
        monkeypatch.setattr(sys, name, None, raising=False)
    cells = {"config": settings(disk, optimizer={"overlap": overlap}), "interrupt": interrupt}
    notebook = InteractiveInterpreter(cells)
    monkeypatch.setattr(notebook, "write", lambda text: None)
    for cell in (SET_UP, TRAIN, INTERRUPTIONS[place]):
        notebook.runcode(compile(cell, "<cell>", "exec"))
        assert sys.last_value is None
    notebook.runcode(compile(TRAIN, "<cell>", "exec"))
    assert isinstance(sys.last_value, KeyboardInterrupt)
    sys.last_value = sys.last_value.with_traceback(sys.last_traceback)  # as notebooks keep it
    earlier = weakref.ref(cells["engine"])
    store = weakref.ref(cells["engine"]._resources.store)
    for cell in (SET_UP, TRAIN):
        notebook.runcode(compile(cell, "<cell>", "exec"))
        gc.collect()
        assert earlier() is store() is None
    assert isinstance(sys.last_value, KeyboardInterrupt)  # the message stays
    cells["engine"].close()


class Interrupted(nn.Linear):
    def forward(self, x):
        raise KeyboardInterrupt


class Catching(nn.Module):
    """Goes on after a module inside of it was interrupted."""

    def __init__(self):
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(4, 4), Interrupted(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        x = self.first(x).exp()
        with suppress(KeyboardInterrupt):
            self.inner(x)
        return self.last(x).exp()


@pytest.mark.parametrize("inner", ["another engine", "the same engine"])
def test_a_forward_pass_that_catches_an_interruption_ends_as_it_would(disk, inner):
    torch.manual_seed(0)
    model, plain = Catching(), Catching()
    plain.load_state_dict(model.state_dict())
    with activations_only(disk) as engine, activations_only(disk) as other:
        engine.attach(model)
        (other if inner == "another engine" else engine).attach(model.inner)
        for each in (model, plain):
            each(torch.ones(2, 4)).sum().backward()
        assert_same_bits(gradients(model), gradients(plain))
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def test_an_interrupted_model_and_its_engine_are_freed_as_before(disk):
    model, engine = nn.Sequential(nn.Linear(4, 4), Interrupted(4, 4)), activations_only(disk)
    engine.attach(model)
    with suppress(KeyboardInterrupt):
        model(torch.ones(2, 4))
    seen = [weakref.ref(model), weakref.ref(engine)]
    del model, engine
    gc.collect()
    assert [reference() for reference in seen] == [None, None]
    with activations_only(disk):
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def test_garbage_that_an_io_thread_collects_does_not_stop_the_collector(disk, monkeypatch):
    collected, may_collect = threading.Event(), threading.Event()
    write, mapped = posix.write_all, set(buffers._live)

    def collecting(*args):
        may_collect.wait(30)
        write(*args)
        if not collected.is_set():
            gc.collect()  # as any allocation of this thread may do
            collected.set()

    monkeypatch.setattr(posix, "write_all", collecting)
    gc.disable()
    try:
        engine = OffloadEngine(settings(disk, io={"backend": "posix", "threads": 1}))
        region, net = engine._resources.regions[0], model()
        engine.attach(net)
        cycle = [engine, net, net(torch.randn(64, 8))]
        cycle.append(cycle)
        del engine, net, cycle
        may_collect.set()
        assert collected.wait(30)
    finally:
        gc.enable()
    deadline = time.monotonic() + 30
    while region.fd >= 0 or not set(buffers._live) <= mapped:  # another thread closes both
        assert time.monotonic() < deadline
        time.sleep(0.01)
    cycle = [weakref.WeakSet()]
    cycle.append(cycle)
    alive = weakref.ref(cycle[0])
    del cycle
    gc.collect()
    assert alive() is None
