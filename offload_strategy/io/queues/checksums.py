"""Digests of what is written, kept in host memory, by which what is read is verified; encryption.

[Note: what a checksum notices]
``full`` hashes every byte. ``sampled``, which takes a tenth of the time, hashes one line of 64
bytes in 63, at least one of each page of 4 KiB, and all of a small block. It notices for certain
what a disk loses, tears or misdirects by whole pages where these lines differ, and a single wrong
bit with a probability of 1/63. The next page, and the next write, have other lines: a fault that
stays at its place is noticed sooner or later.

Digests belong to a ticket, not to a place: bytes of another ticket or of an earlier step do not
match. The seed is the block's identity: path, offset and a number that no other write has.

Memory may change while it is written: autograd saves tensors whose neighbours change. So blocks are
hashed before and after. One that has changed is not verified: nobody knows what was written.

[Note: encrypted blocks]
AES-256-GCM under a key that is random, in memory only, and gone with the process: what is on a disk
afterwards, also after `kill -9` and on a raw block device, is noise to everybody. Every write of a
block takes the next number of a counter as its nonce, so none is used twice with the key. Nonce and
tag stay in host memory, in the place of a checksum, and sizes on the disk are as without. Only what
was written by just that write to just that place is accepted: a block that was changed, moved, or
lost so that an older one is still there, has another tag.

A request has one unit or several, which are encrypted into a buffer of the I/O thread, never in the
caller's memory; what is read is decrypted from there.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from offload_strategy.errors import ConfigError, CorruptDataError
from offload_strategy.io.backends.posix import BounceBuffer, view_of
from offload_strategy.io.backends.protocol import Backend, BlockRequest
from offload_strategy.telemetry import get_logger
from offload_strategy.units import PAGE_BYTES, KiB, MiB, format_size

#: Bytes per digest at most; a request has any multiple of it.
DIGESTED_BYTES = 4 * MiB
_LINE_BYTES, _STRIDE = 64, 63
#: Blocks of up to so many bytes are not sampled: that would hardly be faster.
_SMALL_BYTES = 64 * KiB


class _Line(ctypes.Structure):
    _fields_ = (("content", ctypes.c_char * _LINE_BYTES),)


# Of the largest size: making a type for each size takes longer than hashing a small block.
_Bytes, _Lines = ctypes.c_char * DIGESTED_BYTES, _Line * (DIGESTED_BYTES // _LINE_BYTES)
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
        lines = memoryview(_Lines.from_address(address))[seed % _STRIDE : nbytes // _LINE_BYTES]
        # A first and a last page that are not whole may have no line.
        first, last = memory[:_LINE_BYTES], memory[nbytes - _LINE_BYTES : nbytes]
        return self.hash(b"".join((lines[::_STRIDE].tobytes(), first, last)), seed)

    def digests(self, place: tuple[str, int], nbytes: int, lead: int, block: int) -> Digests:
        """Return digests for a stripe at a place (path and offset), for requests of `block`."""
        return Digests(self, place, nbytes, lead, min(DIGESTED_BYTES, block))


class Digests:
    """The digests of a stripe, of `unit` bytes each, written once; the first `lead` bytes vary."""

    __slots__ = ("_checksum", "_lead", "_seed", "_values", "unit")
    stages = False

    def __init__(
        self, checksum: Checksum, place: tuple[str, int], nbytes: int, lead: int, unit: int
    ) -> None:
        self._checksum = checksum
        self._seed = hash((*place, next(_generations)))
        self._lead = lead
        self.unit = unit
        self._values: list[int | None] = [None] * -(-nbytes // unit)  # None: not known

    def add_to(self, request: BlockRequest, begin: int, where: str) -> None:
        """Make a request for the bytes from `begin` on store their digests, or verify them."""
        block = (request.address, begin, request.nbytes)
        if request.write:
            request.before = partial(self._store, *block)
            request.after = partial(self._store, *block, again=True)
        else:
            request.after = partial(self._verify, *block, request.offset, where)

    def _store(self, address: int, begin: int, nbytes: int, again: bool = False) -> None:
        for number, digest in self._computed(address, begin, nbytes):
            changed = again and self._values[number] != digest
            self._values[number] = None if changed else digest

    def _verify(self, address: int, begin: int, nbytes: int, offset: int, where: str) -> None:
        for number, digest in self._computed(address, begin, nbytes):
            if self._values[number] not in (None, digest):
                at = number * self.unit - begin
                size = min(self.unit, nbytes - at)
                raise _corrupt(where, size, offset + at, "checksum", "is failing")

    def _computed(self, address: int, begin: int, nbytes: int) -> Iterator[tuple[int, int]]:
        for at in range(0, nbytes, self.unit):
            number, size = (begin + at) // self.unit, min(self.unit, nbytes - at)
            lead = 0 if number else self._lead
            seed = hash((self._seed, number)) & 0xFFFF_FFFF_FFFF_FFFF
            yield number, self._checksum.digest(address + at + lead, size - lead, seed)


def _corrupt(where: str, nbytes: int, offset: int, by: str, why: str) -> CorruptDataError:
    return CorruptDataError(
        f"{where}: {format_size(nbytes)} at offset {offset} are not what was written there ({by}). "
        f"The disk, its cable or the memory {why}: do not trust anything of this run after the "
        f"last checkpoint. Check the system's log, and continue with another path."
    )


def create_checksum(
    mode: Literal["auto", "full", "sampled", "off"], backend: Backend
) -> Checksum | None:
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


_NONCE_BYTES, _TAG_BYTES = 12, 16


class BlockCipher:
    """Encrypts blocks of `block_size` bytes at most; ConfigError without the package for it."""

    def __init__(self, block_size: int) -> None:
        try:
            from cryptography.exceptions import InvalidTag
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM

            self._encrypt_into = AESGCM.encrypt_into
        except (ImportError, AttributeError) as error:
            raise ConfigError(
                "io.encryption: true needs the package cryptography, version 47 or newer. Install "
                "it with `pip install offload-strategy[encryption]`, or set io.encryption to false."
            ) from error
        self._wrong_tag = InvalidTag
        self._aead = AESGCM(AESGCM.generate_key(bit_length=256))
        self._nonces = itertools.count(1)
        self.staging = BounceBuffer(block_size + PAGE_BYTES)  # the tag follows the last byte

    def digests(self, place: tuple[str, int], nbytes: int, lead: int, block: int) -> Tags:
        """Return nonces and tags for a stripe, in place of `Checksum.digests`."""
        return Tags(self, nbytes, min(DIGESTED_BYTES, block))

    def encrypt(self, request: BlockRequest, plain: memoryview, unit: int) -> list[bytes]:
        """Encrypt memory into the buffer of this thread; return nonce and tag of each unit."""
        tags = []
        for begin in range(0, len(plain), unit):
            part = plain[begin : begin + unit]
            end = begin + len(part)
            nonce = next(self._nonces).to_bytes(_NONCE_BYTES, "big")
            # The next unit is written over the tag.
            sealed = self.staging.view[begin : end + _TAG_BYTES]
            self._aead.encrypt_into(nonce, part, _place(request, begin), sealed)
            tags.append(nonce + bytes(sealed[len(part) :]))
        return tags

    def decrypt(
        self, request: BlockRequest, plain: memoryview, unit: int, tags: Sequence[bytes], where: str
    ) -> None:
        """Decrypt the buffer of this thread into memory; raise CorruptDataError on a wrong tag."""
        # Backwards: each tag is put where the next unit was.
        for begin, tag in zip(range(0, len(plain), unit)[::-1], tags[::-1], strict=True):
            part = plain[begin : begin + unit]
            sealed = self.staging.view[begin : begin + len(part) + _TAG_BYTES]
            sealed[len(part) :] = tag[_NONCE_BYTES:]
            try:
                self._aead.decrypt_into(tag[:_NONCE_BYTES], sealed, _place(request, begin), part)
            except self._wrong_tag:
                why = "is failing, or somebody has changed what is there"
                offset, by = request.offset + begin, "tag of the encryption"
                raise _corrupt(where, len(part), offset, by, why) from None


class Tags:
    """The nonces and tags of the units of a stripe, of `unit` bytes each."""

    __slots__ = ("_cipher", "_values", "unit")
    stages = True

    def __init__(self, cipher: BlockCipher, nbytes: int, unit: int) -> None:
        self._cipher = cipher
        self._values = [bytes(_NONCE_BYTES + _TAG_BYTES)] * -(-nbytes // unit)
        self.unit = unit

    def add_to(self, request: BlockRequest, begin: int, where: str) -> None:
        """Make a request for the bytes from `begin` on encrypt, or decrypt and verify."""
        cipher, plain = self._cipher, view_of(request.address, request.nbytes).cast("B")
        here = slice(begin // self.unit, -(-(begin + request.nbytes) // self.unit))

        def before() -> None:
            if request.write:
                self._values[here] = cipher.encrypt(request, plain, self.unit)
            request.address, request.whole_pages = cipher.staging.address, True

        def decrypt() -> None:
            cipher.decrypt(request, plain, self.unit, self._values[here], where)

        request.before, request.after = before, None if request.write else decrypt


def _place(request: BlockRequest, begin: int) -> bytes:
    return (request.offset + begin).to_bytes(8, "big")
