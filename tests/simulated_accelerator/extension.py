"""The compiled part of the simulated accelerator."""

from __future__ import annotations

from pathlib import Path

from torch.utils import cpp_extension

_SOURCES = Path(__file__).parent / "csrc"

extension = cpp_extension.load(
    "offload_strategy_sim",
    [str(_SOURCES / "runtime.cpp"), str(_SOURCES / "operators.cpp")],
    extra_cflags=["-O1", "-std=c++20"],
)
