"""Which allocator of memory a contender's process has.

What glibc does by itself lets peaks stay where they were; a fixed mmap threshold gives all freed
memory back, and the kernel has to zero it when it comes again. An allocator that keeps small pieces
apart from large ones, as TCMalloc, jemalloc and oneTBB's do, has both: freed memory is there at
once, and little of it lies idle. oneTBB's can be had from PyPI, so any machine can repeat it.
"""

from __future__ import annotations

import enum
import importlib.metadata
from pathlib import Path

from benchmarks.machine import allocator as fixed_threshold
from benchmarks.machine import fix_allocator

#: In the order in which they are preloaded: the second needs the first, and does not say where.
_LIBRARIES = ("libtbbmalloc.so.2", "libtbbmalloc_proxy.so.2")


class Allocator(enum.StrEnum):
    """Of large memory."""

    AS_IT_COMES = "glibc's defaults"
    GIVES_BACK = fixed_threshold()
    CACHES = "oneTBB's scalable allocator, preloaded"

    @classmethod
    def best(cls) -> Allocator:
        """For speed and peaks together: the caching one where it is installed."""
        return cls.CACHES if _preloaded() else cls.GIVES_BACK

    def environment(self) -> dict[str, str]:
        """Of a process that shall have it."""
        if self is not Allocator.CACHES:
            return {}
        return {"LD_PRELOAD": ":".join(str(path) for path in _preloaded())}

    def begin(self) -> None:
        """In that process, before it allocates much.

        Raises:
            RuntimeError: the loader left the library out.
        """
        if self is Allocator.GIVES_BACK:
            fix_allocator()
        if self is Allocator.CACHES and _LIBRARIES[-1] not in Path("/proc/self/maps").read_text():
            raise RuntimeError(f"{_LIBRARIES[-1]} was preloaded, but is not there")


def _preloaded() -> list[Path]:
    """The libraries' files, none if they are not installed."""
    try:
        files = importlib.metadata.files("tbb") or []
    except importlib.metadata.PackageNotFoundError:
        return []
    found = {file.name: Path(str(file.locate())).resolve() for file in files}
    paths = [found[name] for name in _LIBRARIES if name in found]
    return paths if len(paths) == len(_LIBRARIES) and all(p.is_file() for p in paths) else []
