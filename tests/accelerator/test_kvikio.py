"""GPUDirect Storage does what every backend must do, with device and with host memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from offload_strategy.io.backends.protocol import available_backends, create_backend
from offload_strategy.io.regions.region import Region
from offload_strategy.units import PAGE_BYTES, MiB
from tests.io.conformance import Conformance, Memory, begin
from tests.io.conftest import region

__all__ = ["region"]

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA device: torch.cuda.is_available() is False"
)


class DeviceMemory:
    """Device memory at a chosen distance from a page's start, with a guard on both sides."""

    def __init__(self, nbytes: int, misalignment: int = 0) -> None:
        self.nbytes = nbytes
        self._whole = torch.full(
            (nbytes + misalignment + 3 * PAGE_BYTES,), 0xA5, dtype=torch.uint8, device="cuda"
        )
        self._start = PAGE_BYTES + -self._whole.data_ptr() % PAGE_BYTES + misalignment
        self.address = self._whole.data_ptr() + self._start
        torch.accelerator.synchronize()

    @property
    def _part(self) -> torch.Tensor:
        return self._whole[self._start : self._start + self.nbytes]

    @property
    def data(self) -> bytes:
        return self._part.cpu().numpy().tobytes()

    @data.setter
    def data(self, value: bytes) -> None:
        self._part.copy_(torch.frombuffer(bytearray(value), dtype=torch.uint8))
        torch.accelerator.synchronize()

    @property
    def around(self) -> set[int]:
        """The values of the bytes before and behind."""
        behind = self._whole[self._start + self.nbytes :]
        return set(self._whole[: self._start].tolist()) | set(behind.tolist())


class _Kvikio(Conformance):
    @pytest.fixture
    def name(self) -> str:
        reason = available_backends()["kvikio"]
        if reason is not None:
            pytest.skip(f"kvikio: {reason}")
        return "kvikio"


class TestHostMemory(_Kvikio):
    pass


class TestDeviceMemory(_Kvikio):
    def memory(self, nbytes: int, misalignment: int = 0) -> Memory:
        return DeviceMemory(nbytes, misalignment)

    @pytest.fixture
    def big(self, disk: Path) -> Iterator[Region]:
        made = Region(disk, "nvme", 256 * MiB)
        made.allocate(256 * MiB)
        yield made
        made.close()

    def test_what_one_way_writes_the_other_reads(self, name: str, big: Region) -> None:
        backend = create_backend(name, threads=4, block_size=4 * MiB)
        data = torch.randint(0, 256, (64 * MiB,), dtype=torch.uint8, device="cuda")
        back = torch.zeros(64 * MiB, dtype=torch.uint8)
        torch.accelerator.synchronize()

        class Part:
            def __init__(self, tensor: torch.Tensor, offset: int) -> None:
                self.address, self.nbytes = tensor.data_ptr() + offset, 4 * MiB
                self.data, self.around = b"", set[int]()

        for tensor, write in ((data, True), (back, False)):
            ends = [
                begin(backend, big.fd, Part(tensor, offset), write=write, offset=offset)
                for offset in range(0, 64 * MiB, 4 * MiB)
            ]
            assert [end.get() for end in ends] == [None] * len(ends)
        backend.close()
        assert torch.equal(back, data.cpu())
