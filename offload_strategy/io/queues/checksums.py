"""Digests of what is written, kept in host memory, by which what is read is verified.

[Note: what a checksum notices]
``full`` hashes every byte. ``sampled``, which takes a tenth of the time, hashes one line of 64
bytes in 63, at least one of each page of 4 KiB, and all of a small block. It notices what a disk
loses, tears or misdirects by whole pages where these lines differ, and a single wrong bit with a
probability of 1/63. The next page, and the next write, have other lines.

Digests belong to a ticket, not to a place: bytes of another ticket or of an earlier step do not
match. The seed is a number that no other block has.

A tensor that autograd has saved may change while it is written, by a view of its data. So blocks of
memory that is not the pool's are hashed before and after. One that has changed is not verified:
nobody knows what was written.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from offload_strategy.config.value_types import ChecksumMode
from offload_strategy.errors import ConfigError, CorruptDataError
from offload_strategy.io.backends.protocol import Backend, BlockRequest
from offload_strategy.telemetry import get_logger
from offload_strategy.units import KiB, MiB, format_size

#: Bytes per digest at most; a request has any multiple of it.
DIGESTED_BYTES = 4 * MiB
_LINE_BYTES, _STRIDE = 64, 63
_LINE_WORDS = _LINE_BYTES // 8
#: Blocks of up to so many bytes are not sampled: that would hardly be faster.
_SMALL_BYTES = 64 * KiB


# Of the largest size: making a type for each size takes longer than hashing a small block.
_Bytes = ctypes.c_char * DIGESTED_BYTES
_generations = itertools.count()


@dataclass(frozen=True, slots=True)
class Checksum:
    """How blocks are hashed; `hash` takes bytes and a seed of 64 bits."""

    hash: Callable[[bytes | memoryview, int], int]
    sampled: bool

    def digest(self, address: int, nbytes: int, seed: int) -> int:
        """Hash `nbytes` of memory, `DIGESTED_BYTES` at most."""
        memory = memoryview(_Bytes.from_address(address))
        if not self.sampled or nbytes <= _SMALL_BYTES:
            return self.hash(memory[:nbytes], seed)
        # A first and a last page that are not whole may have no line.
        ends = b"".join((memory[:_LINE_BYTES], memory[nbytes - _LINE_BYTES : nbytes]))
        # Hardly a line is in the processor's caches. PyTorch collects them without the interpreter
        # lock, for which the thread that trains would wait.
        skipped = seed % _STRIDE
        count = -(-(nbytes // _LINE_BYTES - skipped) // _STRIDE)
        words = torch.frombuffer(memory, dtype=torch.int64)
        shape, strides = (count, _LINE_WORDS), (_STRIDE * _LINE_WORDS, 1)
        lines = words.as_strided(shape, strides, skipped * _LINE_WORDS).contiguous()
        sample = memoryview(_Bytes.from_address(lines.data_ptr()))[: lines.nbytes]
        return self.hash(sample, self.hash(ends, seed))

    def digests(self, nbytes: int, lead: int, block: int) -> Digests:
        """Return digests for a stripe, for requests of `block` bytes."""
        return Digests(self, nbytes, lead, min(DIGESTED_BYTES, block))


class Digests:
    """The digests of a stripe, of `unit` bytes each, written once; the first `lead` bytes vary."""

    __slots__ = ("_checksum", "_lead", "_seed", "_values", "unit")
    stages = False

    def __init__(self, checksum: Checksum, nbytes: int, lead: int, unit: int) -> None:
        self._checksum = checksum
        self._seed = next(_generations)
        self._lead = lead
        self.unit = unit
        self._values: list[int | None] = [None] * -(-nbytes // unit)  # None: not known

    def add_to(self, request: BlockRequest, begin: int, where: str) -> None:
        """Make a request for the bytes from `begin` on store their digests, or verify them."""
        block = (request.address, begin, request.nbytes)
        if request.write:
            request.before = partial(self._store, *block)
            if not request.is_buffer:
                request.after = partial(self._store, *block, again=True)
        else:
            request.after = partial(self._verify, *block, request.offset, where)
            units = slice(begin // self.unit, -(-(begin + request.nbytes) // self.unit))
            request.verified = None not in self._values[units]

    def _store(self, address: int, begin: int, nbytes: int, again: bool = False) -> None:
        for number, digest in self._computed(address, begin, nbytes):
            self._values[number] = None if again and self._values[number] != digest else digest

    def _verify(self, address: int, begin: int, nbytes: int, offset: int, where: str) -> None:
        for number, digest in self._computed(address, begin, nbytes):
            if self._values[number] not in (None, digest):
                at = number * self.unit - begin
                size = min(self.unit, nbytes - at)
                raise corrupt_data(where, size, offset + at, "checksum", "is failing")

    def _computed(self, address: int, begin: int, nbytes: int) -> Iterator[tuple[int, int]]:
        for at in range(0, nbytes, self.unit):
            number, size = (begin + at) // self.unit, min(self.unit, nbytes - at)
            lead = 0 if number else self._lead
            seed = hash((self._seed, number)) & 0xFFFF_FFFF_FFFF_FFFF
            yield number, self._checksum.digest(address + at + lead, size - lead, seed)


def corrupt_data(where: str, nbytes: int, offset: int, by: str, why: str) -> CorruptDataError:
    """Make the error for bytes that are not what was written; `by` names what has noticed it."""
    return CorruptDataError(
        f"{where}: {format_size(nbytes)} at offset {offset} are not what was written there ({by}). "
        f"The disk, its cable or the memory {why}: do not trust anything of this run after the "
        f"last checkpoint. Check the system's log, and continue with another path."
    )


def create_checksum(mode: ChecksumMode, backend: Backend) -> Checksum | None:
    """Return what `io.checksum` names, None for none. Raises ConfigError if a package is missing.

    `auto` is what the backend names; without the package it is `off`, if the backend allows that.
    """
    wanted = backend.default_checksum if mode == "auto" else mode
    if wanted == "off":
        return None
    try:
        from xxhash import xxh3_64_intdigest
    except ImportError as error:
        text = "the package xxhash, which verifies what is read, is missing: `pip install xxhash`"
        if mode == "auto" and wanted == "sampled":
            get_logger(__name__).warning("%s, or set io.checksum to off", text)
            return None
        raise ConfigError(f"io.checksum: {mode}: {text}, or set io.checksum to off") from error
    return Checksum(xxh3_64_intdigest, sampled=wanted == "sampled")
