"""A profile run: a training script that ends as soon as a forward pass has been profiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from offload_strategy.plan_runtime.profile import Profile


class ProfileRunOver(SystemExit):
    """Ends the script; libraries that catch every error do not catch this."""


@dataclass(slots=True)
class ProfileRun:
    """The request for a profile to the first engine that trains, and its result.

    Args:
        passes: Number of forward passes to run; the last one is profiled.
        seen: Forward passes so far.
        profile: Profile of the last one at the end.
    """

    passes: int
    seen: int = 0
    profile: Profile | None = None


_requested: ProfileRun | None = None


@contextmanager
def profile_run(passes: int) -> Iterator[ProfileRun]:
    """Profile the first engine that runs so many forward passes within this context, then end it.

    Args:
        passes: More than 0; times and buffers settle after a few.
    """
    global _requested
    _requested = found = ProfileRun(passes)
    try:
        yield found
    finally:
        _requested = None


def is_requested() -> bool:
    """Return whether a profile is requested from the first engine that trains."""
    return _requested is not None


def observe_pass(seen: int, profile: Callable[[], Profile | None]) -> None:
    """Note that a forward pass starts.

    Args:
        seen: Forward passes of the engine before this one.
        profile: `OffloadEngine.profile`.

    Raises:
        ProfileRunOver: If the profile is complete.
    """
    asked = _requested
    if asked is None or asked.profile is not None:
        return
    asked.seen = max(asked.seen, seen + 1)
    if seen >= asked.passes:
        asked.profile = profile()
        if asked.profile is not None:
            raise ProfileRunOver(0)
