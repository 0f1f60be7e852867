"""What the machine can do at best: copies over the link, the disk, and matrix products."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from benchmarks.io.results import Result
from benchmarks.parameters.running import bandwidth
from offload_strategy.units import GiB, MiB

_REPEATS = 5
_SIZES = (1 * MiB, 16 * MiB, 256 * MiB)


def measure(directory: Path, device: str, *, quick: bool) -> tuple[str, list[Result]]:
    """A table of rates, and the share of pinned copies that ordinary memory reaches.

    Args:
        directory: on the disk.
        device: type of the device.
        quick: small ones.
    """
    rows, results = [], []
    for nbytes in _SIZES[:2] if quick else _SIZES:
        there = torch.empty(nbytes, dtype=torch.uint8, device=device)
        for pinned in (True, False):
            here = torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned and device != "cpu")
            here.fill_(1)
            kind = "pinned" if pinned else "ordinary"
            to_device = nbytes / _copy(there, here, device)
            to_host = nbytes / _copy(here, there, device)
            rows.append(
                f"| {nbytes // MiB} MiB, {kind} memory | {to_device / 1e9:.2f} "
                f"| {to_host / 1e9:.2f} |"
            )
    if device != "cpu":
        both = _both_directions(device, 64 * MiB if quick else GiB)
        rows.append(f"| both at once, pinned, sum | {both / 1e9:.2f} | |")
    path = bandwidth(directory)
    rows.append(f"| disk, write and read | {path.write / 1e9:.2f} | {path.read / 1e9:.2f} |")
    for dtype in (torch.bfloat16, torch.float32):
        size = 512 if quick else 8192
        one = torch.randn(size, size, device=device).to(dtype)
        rate = 2.0 * size**3 / _seconds(partial(torch.matmul, one, one), device)
        rows.append(f"| products of {size} x {size}, {dtype}, TFLOP/s | {rate / 1e12:.2f} | |")
        results.append(
            Result(f"products, {dtype}", rate / 1e12, rate / 1e12, "TFLOP/s", 1.0, 0, judged=False)
        )
    header = ["| | to the device, GB/s | to the host, GB/s |", "|---|---|---|"]
    return "\n".join(header + rows), results


def _copy(into: torch.Tensor, source: torch.Tensor, device: str) -> float:
    return _seconds(partial(into.copy_, source, non_blocking=True), device)


def _both_directions(device: str, nbytes: int) -> float:
    out, back = torch.Stream(device=device), torch.Stream(device=device)
    here = [torch.empty(nbytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    there = [torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(2)]

    def work() -> None:
        with out:
            here[0].copy_(there[0], non_blocking=True)
        with back:
            there[1].copy_(here[1], non_blocking=True)

    return 2 * nbytes / _seconds(work, device)


def _seconds(work: Callable[[], object], device: str) -> float:
    """The least of a few times."""
    times = []
    for _ in range(_REPEATS + 1):
        begin = time.perf_counter()
        work()
        if device != "cpu":
            torch.accelerator.synchronize()
        times.append(time.perf_counter() - begin)
    return min(times[1:])
