"""What every test is held to: when it is over, nothing of the engine's is left."""

import gc
import os
import shutil
import signal
import threading
import weakref

import pytest
import torch

from offload_strategy.host_memory import buffers
from offload_strategy.store.tensor_store import TensorStore
from tests.alone import in_the_room
from tests.support import descriptors

torch.set_num_threads(1)

# Engines learn nothing from those of other tests, and leave nothing in the user's cache directory.
os.environ["SSD_OFFLOAD_CACHE"] = ""

# The device of the tests of accelerators. The simulated one is the only one of its process, which
# is why they run by themselves: TEST_ACCELERATOR=sim pytest tests/accelerator
_usual = "cuda" if torch.cuda.is_available() else "none"
TEST_ACCELERATOR = os.environ.setdefault("TEST_ACCELERATOR", _usual)
if TEST_ACCELERATOR == "sim":
    from torch.utils.cpp_extension import get_cxx_compiler

    if shutil.which(get_cxx_compiler()) is None:
        TEST_ACCELERATOR = os.environ["TEST_ACCELERATOR"] = "none"
    else:
        from tests.simulated_accelerator import sim  # noqa: F401

_stores: list[weakref.ref[TensorStore]] = []
_make_store = TensorStore.__init__


def _remember(self, *args, **options):
    _stores.append(weakref.ref(self))
    _make_store(self, *args, **options)


TensorStore.__init__ = _remember  # type: ignore[method-assign]

# A shell without job control starts what runs in its background with SIGINT ignored, and children
# inherit that; tests that press Ctrl-C need the usual handler.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item):
    """A test that is marked as `alone` runs while the other workers wait."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return (yield)
    with in_the_room(alone=item.get_closest_marker("alone") is not None):
        return (yield)


def our_threads():
    """The threads of this process that move bytes."""
    return {t for t in threading.enumerate() if t.name.startswith("ssd-offload")}


def deleted_files():
    """The files without a name that this process has open, by descriptor."""
    return {f"{fd} -> {target}" for fd, target in descriptors() if target.endswith("(deleted)")}


@pytest.fixture(autouse=True)
def _nothing_is_left():
    """After each test no ticket, buffer, thread, open file or saved-tensor hook remains.

    What an earlier test left, because it failed, is not held against those that follow.
    """
    _stores.clear()
    files_before, buffers_before = deleted_files(), set(buffers._live)
    threads_before = our_threads()
    gc.freeze()  # the collection below looks at what this test made, and not at all of torch
    yield
    if _stores or not set(buffers._live) <= buffers_before:
        gc.collect()  # engines and models refer to each other
    tickets = [store.registry.live for ref in _stores if (store := ref()) is not None]
    assert not any(tickets), f"tickets that were never freed, by store: {tickets}"
    assert our_threads() <= threads_before
    assert deleted_files() <= files_before
    assert set(buffers._live) <= buffers_before, "host buffers are still mapped"
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    assert hooks is None, "saved-tensor hooks are still in force"


@pytest.fixture
def rates_cache(tmp_path, monkeypatch):
    """The user's cache directory, in which engines remember how fast paths are."""
    monkeypatch.setenv("SSD_OFFLOAD_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def disk(tmp_path):
    """The directory of an ssd tier; no file may ever appear in it under a name."""
    directory = tmp_path / "disk"
    directory.mkdir()
    yield directory
    assert list(directory.iterdir()) == []
