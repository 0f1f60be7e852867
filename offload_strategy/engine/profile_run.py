"""A profile run: a training script that ends as soon as a forward pass has been profiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from offload_strategy.plan_runtime.profile import Profile


@dataclass(slots=True)
class ProfileRun:
    """The request to profile the last of so many forward passes, those seen so far, the result."""

    passes: int
    seen: int = 0
    profile: Profile | None = None


_requested: ProfileRun | None = None


@contextmanager
def profile_run(passes: int) -> Iterator[ProfileRun]:
    """Profile the first engine that runs so many forward passes within this context, then end it.

    Times and buffers settle after a few passes.
    """
    global _requested
    _requested = found = ProfileRun(passes)
    try:
        yield found
    finally:
        _requested = None


def observe_pass(seen: int, profile: Callable[[], Profile]) -> None:
    """Note a forward pass after so many others; end the script if the profile is complete."""
    asked = _requested
    if asked is not None and asked.profile is None:
        asked.seen = max(asked.seen, seen + 1)
        if seen >= asked.passes:
            asked.profile = profile()
            raise SystemExit(0)  # which libraries that catch every error do not catch
