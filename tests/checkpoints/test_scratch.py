"""Tensors in a scratch file: the right values, little memory, and gone with the last of them."""

import logging
import os
import random
import stat
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from offload_strategy.checkpoints import scratch_file as scratch
from offload_strategy.checkpoints.scratch_file import ScratchFile, scratch_directories
from offload_strategy.config import default_directory
from offload_strategy.errors import StorageError, TierFullError
from offload_strategy.io.regions.unnamed_files import PageFile
from offload_strategy.units import MiB
from tests.conftest import deleted_files
from tests.support import raising
from tests.training import bits


def filled(directories, *tensors):
    """The same tensors, in a scratch file."""
    with ScratchFile(directories) as file:
        slots = [file.reserve(t.shape, t.dtype, t.stride()) for t in tensors]
        file.open()
        for slot, tensor in zip(slots, tensors, strict=True):
            slot.fill(0, tensor)
        return [slot.tensor() for slot in slots]


def opened(name):
    """The file of an entry of `deleted_files`."""
    return Path("/proc/self/fd", name.split(" ")[0])


LARGE = torch.randn(300, 401)
TENSORS = [
    torch.tensor(3.5),
    torch.arange(10),
    torch.empty(0, 4),
    LARGE,
    LARGE[:100],
    LARGE.to(torch.bfloat16),
    LARGE.to(torch.complex64),
    torch.randn(16384),
    torch.randint(0, 2, (70_001,)).bool(),
    torch.randn(8, 16, 33, 33).to(memory_format=torch.channels_last),
    LARGE.t(),
    torch.randn(5, 7, 1, 4001).permute(2, 1, 3, 0),
    torch.randn(1, 3).expand(30_000, 3),
    torch.randn(100, 900)[:, :400],
]


@pytest.mark.parametrize("directories", [True, False], ids=["file", "memory"])
@pytest.mark.parametrize("buffer", [8 * MiB, 16384])
def test_tensors_come_back_with_strides_dtype_and_bits(directories, buffer, disk, way, monkeypatch):
    monkeypatch.setattr(scratch, "_BUFFER_BYTES", buffer)
    before = deleted_files()
    for copy, tensor in zip(filled([disk] * directories, *TENSORS), TENSORS, strict=True):
        assert type(copy) is torch.Tensor
        assert bits(copy) == bits(tensor)
        assert copy.stride() == tensor.clone().stride()  # gaps and overlaps are not kept
        assert copy.untyped_storage().nbytes() == copy.numel() * copy.element_size()
        assert copy.storage_offset() == 0
        assert (deleted_files() == before) == (not directories)


@pytest.mark.parametrize("row", [1, 7, 5000])
def test_rows_may_be_filled_in_pieces_and_in_any_order(row, disk, way):
    rows = 200_000 // row
    expected, other = torch.randn(rows, row), torch.randn(rows, row)
    pieces = list(pairwise([0, rows // 9, rows // 9 + 1, rows // 3, rows // 2, rows - 1, rows]))
    random.Random(row).shuffle(pieces)
    with ScratchFile([disk]) as file:
        first = file.reserve(expected.shape, expected.dtype)
        second = file.reserve(other.shape, other.dtype)
        file.open()
        for begin, end in pieces:
            first.fill(begin, expected[begin:end])
            second.fill(begin, other[begin:end].to(torch.bfloat16))  # and values are converted
        other = other.to(torch.bfloat16).to(torch.float32)
        assert torch.equal(first.tensor(), expected)
        assert torch.equal(second.tensor(), other)


def test_the_file_is_the_owners_alone_stays_as_it_is_and_ends_with_the_last_tensor(disk):
    before = deleted_files()
    copies = filled([disk], LARGE, LARGE + 1)
    (name,) = deleted_files() - before
    status = opened(name).stat()
    assert (stat.S_IMODE(status.st_mode), status.st_nlink) == (0o600, 0)
    bytes_before = opened(name).read_bytes()
    copies[0].zero_()
    last = copies[1].add_(1)
    assert not copies[0].any()
    assert opened(name).read_bytes() == bytes_before
    copies.clear()
    assert deleted_files() - before == {name}
    assert torch.equal(last, LARGE + 1 + 1)
    del last
    assert deleted_files() == before
    with ScratchFile([disk]) as file:  # not used to the end
        file.reserve(LARGE.shape, LARGE.dtype)
        file.open()
        assert deleted_files() != before
    assert deleted_files() == before


def test_small_tensors_need_no_file(disk):
    before = deleted_files()
    with ScratchFile([disk / "nowhere"]) as file:
        slot = file.reserve((10, 10), torch.float32)
        file.open()
        slot.fill(3, torch.ones(7, 10))
        slot.fill(0, torch.zeros(3, 10))
        assert slot.tensor().sum() == 70
    assert deleted_files() == before


def test_too_little_room_is_an_error_before_anything_is_written(disk):
    before = deleted_files()
    with ScratchFile([disk]) as file:
        file.reserve((1 << 32, 1 << 16), torch.float32)
        message = rf"1024 TiB of optimizer states .*{disk} has .*B free.*Free some space"
        with pytest.raises(TierFullError, match=message):
            file.open()
        assert deleted_files() == before


@pytest.mark.parametrize("is_last", [True, False])
def test_the_next_directory_is_taken_where_the_first_one_is_gone(is_last, disk, tmp_path, caplog):
    with caplog.at_level(logging.INFO, "offload_strategy"):
        (copy,) = filled([disk / "gone", disk, *([] if is_last else [tmp_path])], LARGE)
    assert torch.equal(copy, LARGE)
    assert f"{disk / 'gone'} cannot hold a file (No such file or directory)" in caplog.text
    assert f"scratch file in {disk} instead" in caplog.text
    # The other tiers were named for this purpose, but maybe not the last directory.
    assert caplog.records[-1].levelno == (logging.WARNING if is_last else logging.INFO)


def test_a_write_that_fails_says_where(disk, monkeypatch):
    monkeypatch.setattr(PageFile, "write", raising(OSError(5, os.strerror(5))))
    message = rf"469.*KiB of optimizer states .*{disk}: Input/output"
    with pytest.raises(StorageError, match=message):
        filled([disk], LARGE)


def test_a_scratch_file_lies_in_a_tier_or_the_default_directory(disk, tmp_path, monkeypatch):
    monkeypatch.setenv("SSD_OFFLOAD_DIR", str(tmp_path))
    assert scratch_directories([disk, tmp_path]) == [disk, tmp_path]
    assert scratch_directories([disk]) == [disk, tmp_path]
    assert scratch_directories([]) == []
    monkeypatch.setenv("SSD_OFFLOAD_DIR", "$NOT_SET_ANYWHERE/x")
    assert scratch_directories([disk]) == [disk]


def test_a_block_device_holds_no_scratch_file(disk):
    device = next((path for path in Path("/dev").iterdir() if path.is_block_device()), None)
    if device is None:
        pytest.skip("there is no block device here")
    assert scratch_directories([device]) == [default_directory()]
    assert scratch_directories([device, disk]) == [disk, default_directory()]
