"""Encryption of the blocks of a path, with a key that only this process has.

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

import itertools
from collections.abc import Sequence

from offload_strategy.errors import ConfigError
from offload_strategy.io.backends.posix import BounceBuffer, view_of
from offload_strategy.io.backends.protocol import BlockRequest
from offload_strategy.io.queues.checksums import DIGESTED_BYTES, corrupt_data
from offload_strategy.units import PAGE_BYTES

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

    def close(self) -> None:
        """Free the buffer of the thread that calls; those of I/O threads end with them."""
        self.__dict__.pop("staging", None)

    def digests(self, nbytes: int, lead: int, block: int) -> Tags:
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
                raise corrupt_data(where, len(part), offset, by, why) from None


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
            request.address, request.is_buffer = cipher.staging.address, True

        def decrypt() -> None:
            cipher.decrypt(request, plain, self.unit, self._values[here], where)

        request.before, request.after = before, None if request.write else decrypt


def _place(request: BlockRequest, begin: int) -> bytes:
    return (request.offset + begin).to_bytes(8, "big")
