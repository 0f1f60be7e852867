"""Encryption of the blocks of a path, with a key that only this process has.

[Note: encrypted blocks]
AES-256-GCM under a key that is random, in memory only, and gone with the process: what is on a disk
afterwards, also after `kill -9` and on a raw block device, is noise to everybody. Every write of a
block takes the next number of a counter as its nonce, so none is used twice with the key. Nonce and
tag stay in host memory, in the place of a checksum, and sizes on the disk are as without. Only what
was written by just that write to just that place is accepted: a block that was changed, moved, or
lost so that an older one is still there, has another tag.

A block is encrypted into a buffer of the I/O thread, never in the caller's memory, and what is read
is decrypted from there.
"""

from __future__ import annotations

import itertools

from offload_strategy.errors import ConfigError, CorruptDataError
from offload_strategy.io.backends.posix import BounceBuffer, view_of
from offload_strategy.io.backends.protocol import BlockRequest
from offload_strategy.units import PAGE_BYTES, format_size

_NONCE_BYTES, _TAG_BYTES = 12, 16


class BlockCipher:
    """Encrypts the blocks of all paths of an engine; see [Note: encrypted blocks].

    Args:
        block_size: bytes that a block has at most.

    Raises:
        ConfigError: the package `cryptography` is not installed, or too old.
    """

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
        self._staging = BounceBuffer(block_size + PAGE_BYTES)  # the tag follows the last byte

    def digests(self, place: tuple[str, int], nbytes: int, lead: int, block: int) -> Tags:
        """Return nonces and tags for a stripe, in place of `Checksum.digests`."""
        return Tags(self, nbytes, block)

    def guard(self, request: BlockRequest, digests: list[int], number: int, where: str) -> None:
        """Make a request encrypt what it writes, or decrypt what it reads.

        `digests[number]` has nonce and tag of the block; `where` begins the message of an error.
        """
        plain = view_of(request.address, request.nbytes).cast("B")
        place = request.offset.to_bytes(8, "big")

        def stage() -> None:
            staging = self._staging
            if request.write:
                nonce = next(self._nonces).to_bytes(_NONCE_BYTES, "big")
                sealed = staging.view[: len(plain) + _TAG_BYTES]
                self._aead.encrypt_into(nonce, plain, place, sealed)
                digests[number] = int.from_bytes(nonce + bytes(sealed[len(plain) :]), "big")
            request.address, request.whole_pages = staging.address, True

        def decrypt() -> None:
            known = digests[number].to_bytes(_NONCE_BYTES + _TAG_BYTES, "big")
            sealed = self._staging.view[: len(plain) + _TAG_BYTES]
            sealed[len(plain) :] = known[_NONCE_BYTES:]
            try:
                self._aead.decrypt_into(known[:_NONCE_BYTES], sealed, place, plain)
            except self._wrong_tag:
                raise CorruptDataError(
                    f"{where}: {format_size(len(plain))} at offset {request.offset} are not what "
                    f"was written there (tag of the encryption). The disk, its cable or the memory "
                    f"is failing, or somebody has changed what is there: do not trust anything of "
                    f"this run after the last checkpoint. Check the system's log, and continue "
                    f"with another path."
                ) from None

        request.before = stage
        request.after = None if request.write else decrypt
        request.stages = True


class Tags:
    """The nonces and tags of the blocks of a stripe, of `unit` bytes each."""

    __slots__ = ("_cipher", "_values", "unit")
    stages = True

    def __init__(self, cipher: BlockCipher, nbytes: int, unit: int) -> None:
        self._cipher = cipher
        self._values = [0] * -(-nbytes // unit)
        self.unit = unit

    def add_to(self, request: BlockRequest, begin: int, where: str) -> None:
        """Make a request for the block that begins there encrypt, or decrypt and verify."""
        self._cipher.guard(request, self._values, begin // self.unit, where)
