"""The one-pass overflow check: its time, its memory and its verdicts."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.io.results import Context, Result, Skipped, alternating, median_ratio
from offload_strategy.optimizer.gradients.gradient_backing import has_overflow
from offload_strategy.units import GiB, MiB

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_PEER = "isinf().any() | isnan().any()"
_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
#: The kernel counts resident pages per thread in batches: less than this is not to be seen.
_COUNTING_BYTES = 2 * MiB


def overflow(context: Context) -> list[Result]:
    """A tensor without overflow, which both have to read to its end."""
    nbytes = 256 * MiB if context.quick else 1 * GiB
    results = []
    for dtype in DTYPES:
        context.say(f"overflow, {dtype}")
        tensor = torch.randn(nbytes // dtype.itemsize // 8).to(dtype).repeat(8)
        took: dict[str, list[float]] = {"ours": [], _PEER: []}
        checks: dict[str, Callable[[torch.Tensor], bool]] = {"ours": has_overflow, _PEER: by_masks}
        for number in range(-1, context.repeats):
            for name in alternating(list(checks), number):
                begin = time.perf_counter()
                assert not checks[name](tensor)
                if number >= 0:
                    took[name].append(time.perf_counter() - begin)
        ours, theirs = took["ours"], took[_PEER]
        gigabytes = tensor.numel() * tensor.itemsize / 1e9
        short = str(dtype).removeprefix("torch.")
        results.append(
            Result(
                name=f"overflow: time, {short}",
                ours=1e3 * statistics.median(ours) / gigabytes,
                peer=1e3 * statistics.median(theirs) / gigabytes,
                unit="ms/GB",
                ratio=median_ratio(ours, theirs),
                threshold=0.1,
                at_least=False,
                command=_PEER,
                details={"threads": torch.get_num_threads(), "ours": ours, "peer": theirs},
            )
        )
        results.append(_memory(short, tensor))
        results.append(_verdicts(short, dtype))
    return results


def by_masks(tensor: torch.Tensor) -> bool:
    """The usual check."""
    return bool(tensor.isinf().any() | tensor.isnan().any())


def _memory(short: str, tensor: torch.Tensor) -> Result:
    extra = {}
    for name, check in (("ours", has_overflow), (_PEER, by_masks)):
        extra[name] = peak_growth(lambda check=check: check(tensor))  # type: ignore[misc]
    size = tensor.numel() * tensor.itemsize
    return Result(
        name=f"overflow: peak memory, {short}",
        ours=extra["ours"] / MiB,
        peer=extra[_PEER] / MiB,
        unit="MiB",
        ratio=extra["ours"] / size,
        threshold=_COUNTING_BYTES / size,
        at_least=False,
        command=f"{_PEER}; the ratio is to the {size // MiB} MiB of the tensor",
    )


def peak_growth(action: Callable[[], object]) -> int:
    """By how many bytes resident memory rose above its level, at most, while something ran.

    Raises:
        Skipped: this system does not tell.
    """
    if not _CLEAR.exists():
        raise Skipped("peak memory is measured with /proc/self/clear_refs, which is Linux's")
    gc.collect()
    _CLEAR.write_text("5")  # VmHWM starts again from VmRSS
    before = _resident("VmRSS")
    action()
    return max(0, _resident("VmHWM") - before)


def _resident(key: str) -> int:
    for line in _STATUS.read_text().splitlines():
        if line.startswith(f"{key}:"):
            return 1024 * int(line.split()[1])
    raise Skipped(f"/proc/self/status has no {key}")


def _verdicts(short: str, dtype: torch.dtype) -> Result:
    values = special_values(dtype)
    wrong = []
    for bits, value in values.items():
        crowd = torch.linspace(-1, 1, 1000).to(dtype)
        crowd[777] = value[0]
        expected = by_masks(value)
        if has_overflow(value) != expected or has_overflow(crowd) != expected:
            wrong.append(bits)
    right = len(values) - len(wrong)
    return Result(
        name=f"overflow: same verdict, {short}",
        ours=right,
        peer=len(values),
        unit="values",
        ratio=right / len(values),
        threshold=1.0,
        command=f"{_PEER}: every special value alone, and among a thousand others",
        details={"wrong": wrong, "values": list(values)},
    )


def special_values(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """By their bits: zeros, subnormals, the largest, infinities, every kind of NaN; and 1e30."""
    width = 8 * dtype.itemsize
    as_integer = {32: torch.int32, 16: torch.int16}[width]
    infinity = int(torch.tensor([torch.inf], dtype=dtype).view(as_integer))
    one = infinity & -infinity  # the lowest bit of the exponent: the smallest normal number
    quiet = one >> 1
    positive = [0, 1, one - 1, one, infinity - 1, infinity]
    positive += [infinity | payload for payload in (1, quiet - 1, quiet, quiet | 1, one - 1)]
    values = {}
    for bits in positive:
        for signed in (bits, bits - (1 << (width - 1))):
            tensor = torch.tensor([signed], dtype=as_integer).view(dtype)
            values[f"0x{signed % (1 << width):0{width // 4}x}"] = tensor
    values["1e30"] = torch.tensor([1e30]).to(dtype)
    return values
