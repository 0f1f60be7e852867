"""`offload_strategy.save` and `load`: torch's format, whole or not at all, in little memory."""

import errno
import fcntl
import itertools
import os
import random
import signal
import stat
import time
from pathlib import Path

import pytest
import torch

from benchmarks.machine import status_bytes
from offload_strategy import StorageError, load, save
from offload_strategy.checkpoints import copy_on_write_maps as maps
from offload_strategy.checkpoints import streaming_files as files
from offload_strategy.checkpoints.scratch_file import ScratchFile
from offload_strategy.units import PAGE_BYTES, MiB
from tests.io.test_posix import cached_pages
from tests.training import bits

STATE = {
    "step": 7,
    "weights": torch.randn(300, 401),
    "odd": {"half": torch.randn(77, dtype=torch.bfloat16), "scalar": torch.tensor(2.5)},
    "text": ["a", "b"],
}


def assert_is_state(found):
    assert found.keys() == STATE.keys()
    assert (found["step"], found["text"]) == (STATE["step"], STATE["text"])
    assert bits(found["weights"]) == bits(STATE["weights"])
    for name, tensor in STATE["odd"].items():
        assert bits(found["odd"][name]) == bits(tensor)


@pytest.fixture
def target(tmp_path):
    """Where to save; beside it nothing may remain."""
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    yield folder / "last.ckpt"
    assert set(os.listdir(folder)) <= {"last.ckpt"}


# ---------------------------------------------------------------------- the format
def test_what_is_saved_is_read_by_torch_and_by_load(target, way):
    save(STATE, target)
    assert_is_state(torch.load(target))
    assert_is_state(load(target))
    assert_is_state(load(str(target), weights_only=False))
    torch.save(STATE, target, _use_new_zipfile_serialization=False)
    assert_is_state(load(target))


@pytest.mark.parametrize("size", [0, 1, 4096, 8 * MiB - 1000, 8 * MiB, 20 * MiB + 3])
def test_any_size_is_saved(size, target, way):
    values = torch.arange(size, dtype=torch.int32).to(torch.uint8)
    save(values, target)
    assert torch.equal(torch.load(target), values)


def mapped(path):
    return str(path) in Path("/proc/self/maps").read_text()


@pytest.mark.parametrize("location", ["cpu", torch.device("cpu"), lambda storage, _: storage])
def test_what_is_small_does_not_keep_the_file(location, target):
    save(STATE, target)
    found = load(target, location)
    assert mapped(target)
    assert_is_state(found)
    del found["weights"], found["odd"]["half"]
    assert not mapped(target)


def test_a_map_location_of_the_users_decides(target):
    save(STATE, target)
    assert load(target, "meta")["weights"].is_meta
    for location in (None, lambda storage, _: None, lambda storage, _: storage.clone()):
        assert_is_state(load(target, location))


@pytest.fixture
def too_large(monkeypatch):
    """As if the kernel had no memory for copies of the pages of any file."""
    monkeypatch.setattr(maps, "can_be_reserved", lambda fd, nbytes: False)


@pytest.mark.parametrize("write", [torch.save, save], ids=["torch", "ours"])
@pytest.mark.parametrize("larger", [False, True], ids=["fits", "larger than all memory"])
def test_a_file_is_mapped_and_stays_as_it_is_when_tensors_change(larger, write, target, request):
    if larger:
        request.getfixturevalue("too_large")
    state = {**STATE, "view": STATE["weights"][3], "empty": torch.empty(0, 3)}
    state["more"] = [torch.randn(size) for size in (0, 17_000, 1, 100_000, 60_000)]
    write(state, target)
    assert load(target, "meta")["weights"].is_meta
    assert_is_state({key: load(target, None)[key] for key in STATE})
    found = load(target)
    assert mapped(target)
    view = found.pop("view")
    assert torch.equal(view, STATE["weights"][3])
    assert found.pop("empty").shape == (0, 3)
    for tensor, expected in zip(found.pop("more"), state["more"], strict=True):
        assert torch.equal(tensor, expected)
    assert_is_state(found)
    found["weights"].zero_()
    assert not view.any(), "views of one storage stay views of one storage"
    assert torch.equal(load(target)["weights"], STATE["weights"])


def test_storages_in_another_order_are_read_into_memory(target, too_large, monkeypatch):
    save(STATE, target)
    ranges = maps._storage_ranges
    monkeypatch.setattr(maps, "_storage_ranges", lambda path: ranges(path)[::-1])
    assert_is_state(load(target))


def test_a_map_that_is_larger_than_all_memory(tmp_path):
    with open(tmp_path / "sparse", "w+b") as file:
        file.truncate(1 << 42)
        with maps.private_map(file.fileno(), 1 << 42) as whole:
            whole[-1] = 5
            assert whole[-2:] == b"\0\5"
        assert os.pread(file.fileno(), 1, (1 << 42) - 1) == b"\0"


# ---------------------------------------------------------------------- memory
def test_filling_saving_and_loading_take_no_memory_but_a_buffer(disk, target, way, monkeypatch):
    values = torch.randn(16, MiB // 4)  # 16 MiB
    peaks, level = [], status_bytes("RssAnon")

    def look():
        peaks.append(status_bytes("RssAnon") - level)

    class Watched(files._ArchiveWriter):
        def write(self, data):
            look()
            return super().write(data)

    with ScratchFile([disk]) as scratch:
        slots = [scratch.reserve(values.shape, values.dtype) for _ in range(12)]
        scratch.open()
        for number, slot in enumerate(slots):
            slot.fill(0, values.fill_(number))
            look()
        tensors = [slot.tensor() for slot in slots]
    monkeypatch.setattr(files, "_ArchiveWriter", Watched)
    save(tensors, target)
    for found in (tensors, load(target)):
        look()
        # Comparing would make tensors, whose memory the C library may keep.
        assert [tuple(map(float, each.aminmax())) for each in found] == [(n, n) for n in range(12)]
        look()
    assert len(peaks) > 24
    assert max(peaks) < 24 * MiB  # of 192


def test_what_was_saved_does_not_stay_in_the_page_cache(target, way):
    save(torch.randn(64 * MiB // 4), target)
    with open(target, "r+b") as file:
        assert cached_pages(file.fileno(), 64 * MiB) * PAGE_BYTES < 8 * MiB


# ---------------------------------------------------------------------- names, modes, links
@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_a_new_file_has_the_mode_that_torch_would_give_it(mask, target):
    before = os.umask(mask)
    try:
        save(STATE, target)
    finally:
        os.umask(before)
    assert stat.S_IMODE(target.stat().st_mode) == 0o666 & ~mask


@pytest.mark.parametrize("mode", [0o600, 0o660])
def test_a_file_keeps_its_mode_and_owner_also_while_it_is_written(mode, target):
    target.touch()
    target.chmod(mode)
    owner = (1234, 2345) if os.geteuid() == 0 else (os.getuid(), os.getgid())
    os.chown(target, *owner)
    modes = []

    class Looking:
        def __reduce__(self):
            modes.extend(stat.S_IMODE(path.stat().st_mode) for path in target.parent.iterdir())
            return (int, ())

    save(Looking(), target)
    assert [*modes, stat.S_IMODE(target.stat().st_mode)] == [mode] * 3
    assert (target.stat().st_uid, target.stat().st_gid) == owner
    assert load(target, weights_only=False) == 0


@pytest.mark.parametrize("exists", [True, False])
def test_a_symbolic_link_is_followed_and_stays(exists, target, tmp_path):
    link = tmp_path / "link.ckpt"
    link.symlink_to(target)
    if exists:
        target.touch()
    save(STATE, link)
    assert link.is_symlink()
    assert_is_state(torch.load(target))
    assert sorted(os.listdir(tmp_path)) == ["checkpoints", "link.ckpt"]


def test_a_name_may_be_as_long_as_the_file_system_allows(tmp_path):
    target = tmp_path / ("ä" * 126 + ".pt")  # 255 bytes
    save(STATE, target)
    save(STATE, target)
    assert os.listdir(tmp_path) == [target.name]


# ---------------------------------------------------------------------- what goes wrong
class Unwilling:
    def __init__(self, error):
        self.error = error

    def __reduce__(self):
        raise self.error


@pytest.mark.parametrize("error", [KeyboardInterrupt(), TypeError("no")], ids=["Ctrl-C", "error"])
def test_an_error_while_saving_leaves_the_previous_file(error, target):
    save(STATE, target)
    with pytest.raises(type(error)):
        save([torch.randn(5 * MiB), Unwilling(error)], target)
    assert_is_state(load(target))


@pytest.mark.parametrize("at", ["first", "last"])
@pytest.mark.parametrize(
    ("number", "advice"),
    [(errno.EIO, "Check the disk"), (errno.ENOSPC, "Free some space on the disk"), (None, None)],
    ids=["a broken disk", "a full disk", "Ctrl-C"],
)
def test_a_write_that_fails_leaves_the_previous_file(number, advice, at, target, monkeypatch):
    save(STATE, target)
    write = files.PageFile.write

    def fail(self, view, offset):
        if offset == 0 if at == "first" else len(view) < 8 * MiB:
            raise KeyboardInterrupt if number is None else OSError(number, os.strerror(number))
        write(self, view, offset)

    monkeypatch.setattr(files.PageFile, "write", fail)
    if number is None:
        expected = pytest.raises(KeyboardInterrupt)
    else:
        message = rf"'{target}': {os.strerror(number)} after .*{advice}.*intact"
        expected = pytest.raises(StorageError, match=message)
    with expected:
        save([torch.randn(5 * MiB) for _ in range(2)], target)
    monkeypatch.undo()
    assert_is_state(load(target))


def test_what_cannot_be_a_file_is_named_and_not_replaced(tmp_path):
    with pytest.raises(StorageError, match=f"Create the directory {tmp_path / 'nowhere'}"):
        save(STATE, tmp_path / "nowhere" / "last.ckpt")
    with pytest.raises(StorageError, match="Is a directory"):
        save(STATE, tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(StorageError, match="cannot be replaced"):
        save(STATE, tmp_path / "pipe")
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)
    assert os.listdir(tmp_path) == ["pipe"]


# ---------------------------------------------------------------------- killed
def partial(target, digit="a"):
    return target.parent / f".{target.name}.{16 * digit}.partial"


def test_what_a_killed_save_left_is_removed_by_the_next(target):
    partial(target, "a").write_bytes(b"half")
    busy = partial(target, "b")
    with open(busy, "wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        save(STATE, target)
        assert busy.exists(), "another process is writing it"
        assert not partial(target, "a").exists()
    save(STATE, target)
    assert not busy.exists()
    assert_is_state(load(target))


def test_files_of_other_names_and_links_are_left_alone(target, tmp_path):
    other = partial(target.with_name("other.ckpt"))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(b"mine")
    other.write_bytes(b"half")
    partial(target).symlink_to(elsewhere)
    save(STATE, target)
    assert (other.read_bytes(), elsewhere.read_bytes()) == (b"half", b"mine")
    assert partial(target).is_symlink()
    other.unlink()
    partial(target).unlink()


def _save_for_ever(target):
    try:
        for number in itertools.count():
            save({"first": torch.full((MiB,), number), "last": torch.tensor(number)}, target)
    finally:
        os._exit(1)


def test_a_process_killed_while_it_saves_leaves_a_whole_file(target):
    chance = random.Random(0)
    halves = 0
    for _ in range(12):
        child = os.fork()
        if child == 0:
            _save_for_ever(target)
        try:
            deadline = time.monotonic() + 30
            while not (target.exists() and len(os.listdir(target.parent)) > 1):
                assert time.monotonic() < deadline
            time.sleep(chance.uniform(0, 0.01))
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        halves += len(os.listdir(target.parent)) > 1
        found = load(target)
        assert bool((found["first"] == found["last"]).all())
    assert halves > 0  # or nothing was tested
    save(STATE, target)
