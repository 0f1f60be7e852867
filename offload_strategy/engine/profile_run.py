"""A run that ends after a few forward passes: what they were like is all that is wanted of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from offload_strategy.plan_runtime.profile import Profile


class ProfileRunOver(SystemExit):
    """Ends the script: a library may catch every error, but not this."""


@dataclass(slots=True)
class ProfileRun:
    """What is asked of the first engine that trains, and what it was.

    Args:
        passes: forward passes to look at; the last of them is told about.
        seen: forward passes so far.
        profile: of the last one, once they are over.
    """

    passes: int
    seen: int = 0
    profile: Profile | None = None


_requested: ProfileRun | None = None


@contextmanager
def dry_run(passes: int) -> Iterator[ProfileRun]:
    """Within, the first engine whose forward passes are that many tells its profile, and ends.

    Args:
        passes: more than 0; some are needed until times and buffers have settled.
    """
    global _requested
    _requested = found = ProfileRun(passes)
    try:
        yield found
    finally:
        _requested = None


def is_requested() -> bool:
    """Whether the first engine that trains is asked for its profile."""
    return _requested is not None


def look(seen: int, profile: Callable[[], Profile | None]) -> None:
    """A forward pass begins; so many were before it.

    Args:
        seen: by the engine.
        profile: of it, `OffloadEngine.profile`.

    Raises:
        ProfileRunOver: all that was wanted is known.
    """
    asked = _requested
    if asked is None or asked.profile is not None:
        return
    asked.seen = max(asked.seen, seen + 1)
    if seen >= asked.passes:
        asked.profile = profile()
        if asked.profile is not None:
            raise ProfileRunOver(0)
