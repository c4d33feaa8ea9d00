"""Encryption of one file: AES-256-GCM, one message for each extent and one for each header.

A key encrypts for one opening of the file only: it is derived (HKDF-SHA256) from the cluster's key
and a salt of 32 random bytes, which each opening makes anew. The nonces of a key are 1, 2, 3, ...,
and the process that counts them is the only one that has ever had this salt to encrypt with. So no
nonce is used twice under a key: not after a crash, and not when an older copy of the file, or of
the whole disk, is put back. Salt and nonce are stored with each message, so what earlier openings
have written can be read. A seal, and so the bytes that it fits, lies beside the header that names
their key and their place, in one message. (design: nvme-format)
"""

from __future__ import annotations

import asyncio
import functools
import hmac
import mmap
import struct
from collections.abc import Callable
from typing import Final, TypeVar

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from kvpool.threads import in_thread
from kvpool_tiers.nvme.format import (
    HEADER_SIZE,
    SALT_SIZE,
    SEALED_HEADER_SIZE,
    TAG_SIZE,
    ExtentSeal,
)

T = TypeVar("T")

#: Bytes per call of the library, so that nobody waits for the GIL for more than 0.2 ms.
_STEP: Final = 512 << 10
#: Up to here a thread costs more than it saves.
_INLINE_MAX: Final = 64 << 10
#: Keys of openings that are remembered. Who writes salts into the file gets no memory for it.
_KEYS_MAX: Final = 256
#: Memory for ciphertext on its way to the disk: so many buffers of so many bytes.
STAGING_SIZE: Final = 4 << 20
_STAGING_COUNT: Final = 4

#: Of an extent: salt, nonce, size, tag.
_SEAL: Final = struct.Struct(f"<{SALT_SIZE}sQQ{TAG_SIZE}s")
#: How a slot begins: salt, nonce. The encrypted header and seal follow, with their tag.
_SLOT: Final = struct.Struct(f"<{SALT_SIZE}sQ")

assert _SLOT.size + HEADER_SIZE + _SEAL.size + TAG_SIZE <= SEALED_HEADER_SIZE


class FileCipher:
    """Encrypts with a key of this opening; decrypts what all openings have written."""

    def __init__(self, key: bytes, random: Callable[[int], bytes]) -> None:
        """`key`: 32 bytes that nobody else has, the same at each opening. `random` makes salts."""
        self._derive = functools.lru_cache(_KEYS_MAX)(functools.partial(_derive, key))
        self._salt = random(SALT_SIZE)
        self._nonce = 0
        self._free = [_Staging() for _ in range(_STAGING_COUNT)]
        self._staging = asyncio.Semaphore(_STAGING_COUNT)

    # --- headers ---------------------------------------------------------------------------

    def seal_header(self, header: bytes, seal: ExtentSeal) -> bytes:
        """A slot with a header, which says where its extent lies, and the seal of the extent."""
        nonce = self._next_nonce()
        text = header + _SEAL.pack(*seal)
        hidden: bytes = AESGCM(self._derive(self._salt)).encrypt(_iv(nonce), text, None)
        return (_SLOT.pack(self._salt, nonce) + hidden).ljust(SEALED_HEADER_SIZE, b"\0")

    def open_header(self, slot: bytes) -> tuple[bytes, ExtentSeal] | None:
        """What `seal_header` was given; None if one bit of it is another one."""
        salt, nonce = _SLOT.unpack_from(slot)
        hidden = slot[_SLOT.size : _SLOT.size + HEADER_SIZE + _SEAL.size + TAG_SIZE]
        try:
            text: bytes = AESGCM(self._derive(salt)).decrypt(_iv(nonce), hidden, None)
        except InvalidTag:
            return None
        return text[:HEADER_SIZE], ExtentSeal(*_SEAL.unpack(text[HEADER_SIZE:]))

    # --- extents ---------------------------------------------------------------------------

    def begin(self, size: int) -> Sealing:
        """Encrypt an extent of `size` bytes."""
        nonce = self._next_nonce()
        return Sealing(self._derive(self._salt), ExtentSeal(self._salt, nonce, size, b""))

    async def decrypt(self, buffer: memoryview, seal: ExtentSeal) -> bool:
        """Decrypt in place, exactly `seal.size` bytes. If they are not those that were encrypted,
        `buffer` is all zeros, and the result is False."""
        call = functools.partial(_decrypt, self._derive(seal.salt), buffer, seal)
        return await _called(call, len(buffer))

    async def staging(self) -> memoryview:
        """Aligned memory of STAGING_SIZE bytes; give it back with `give_back`."""
        await self._staging.acquire()
        return self._free.pop().memory()

    def give_back(self, memory: memoryview) -> None:
        self._free.append(_Staging(memory))
        self._staging.release()

    def _next_nonce(self) -> int:
        self._nonce += 1
        return self._nonce


class Sealing:
    """One extent, encrypted step by step in the order of its bytes."""

    def __init__(self, key: bytes, seal: ExtentSeal) -> None:
        self._seal = seal
        self._context = Cipher(algorithms.AES(key), modes.GCM(_iv(seal.nonce))).encryptor()

    async def encrypt(self, source: memoryview, target: memoryview) -> None:
        """The next bytes, into memory of the same size."""
        await _called(functools.partial(_update, self._context, source, target), len(source))

    def finish(self) -> ExtentSeal:
        """After the last one."""
        self._context.finalize()
        return self._seal._replace(tag=self._context.tag)


class _Staging:
    """Memory that is allocated when it is used for the first time."""

    def __init__(self, memory: memoryview | None = None) -> None:
        self._memory = memory

    def memory(self) -> memoryview:
        if self._memory is None:
            self._memory = memoryview(mmap.mmap(-1, STAGING_SIZE))
        return self._memory


def _derive(key: bytes, salt: bytes) -> bytes:
    """HKDF-SHA256 (RFC 5869), one block."""
    extracted = hmac.digest(salt, key, "sha256")
    return hmac.digest(extracted, b"kvpool nvme 1\x01", "sha256")


def _iv(nonce: int) -> bytes:
    return nonce.to_bytes(12, "little")


def _update(context: object, source: memoryview, target: memoryview) -> None:
    for start in range(0, len(source), _STEP):
        stop = start + _STEP
        context.update_into(source[start:stop], target[start:stop])  # type: ignore[attr-defined]


def _decrypt(key: bytes, buffer: memoryview, seal: ExtentSeal) -> bool:
    context = Cipher(algorithms.AES(key), modes.GCM(_iv(seal.nonce))).decryptor()
    _update(context, buffer, buffer)
    try:
        context.finalize_with_tag(seal.tag)
    except InvalidTag:
        buffer[:] = bytes(len(buffer))  # nobody may see what an attacker has chosen
        return False
    return True


async def _called(call: Callable[[], T], size: int) -> T:
    """In a thread if it takes long. It has ended when this has, also when this is cancelled."""
    if size <= _INLINE_MAX:
        return call()
    future = in_thread(call)
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
    return future.result()
