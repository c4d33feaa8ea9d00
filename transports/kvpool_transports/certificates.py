"""The certificates of one side of tls, as its files say now (design: authentication)."""

from __future__ import annotations

import asyncio
import hashlib
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

from kvpool import logs
from kvpool.errors import ConfigError
from kvpool.file_stamp import Stamp, stamp
from kvpool.threads import in_thread

#: Files are looked at when a connection begins, and at most so often.
LOOK_EVERY_S: Final = 1.0
_FILE_MAX: Final = 1 << 20

log = logs.get("kvpool.transport")


class Files(NamedTuple):
    """Names of PEM files; "" for none. `cert` and `key` come together."""

    cert: str
    key: str
    ca: str


class Loaded(NamedTuple):
    """One version of the files."""

    context: ssl.SSLContext
    #: The hash of the certificate that this context shows, b"" if none; proofs cover it.
    binding: bytes


class Certificates:
    """One context for all connections, and another one when the files change.

    Files that are no good change nothing: one warning says why, and those of before stay.
    """

    def __init__(self, files: Files, side: int, settle: Callable[[ssl.SSLContext], None]) -> None:
        """Read them; `settle` makes the other settings of a context. Raises ConfigError."""
        self._files = files
        self._side = side
        self._settle = settle
        self._looked = asyncio.get_running_loop().time()
        self._stamps = self._stamped()
        self._loaded = self._load()

    async def current(self) -> Loaded:
        """What a connection that begins now uses. Reads in a thread: files may be slow."""
        now = asyncio.get_running_loop().time()
        if now - self._looked >= LOOK_EVERY_S:
            self._looked = now  # at once: of many connections one looks
            stamps = await in_thread(self._stamped)
            if stamps != self._stamps:
                self._stamps = stamps  # also of bad files: they are warned of once
                await self._read_again()
        return self._loaded

    async def _read_again(self) -> None:
        try:
            self._loaded = await in_thread(self._load)
        except ConfigError as error:
            log.warning("new certificates are refused, those before stay", why=str(error))
        else:
            log.info("certificates were read again", files=", ".join(filter(None, self._files)))

    def _stamped(self) -> list[Stamp]:
        return [stamp(path) for path in self._files if path]

    def _load(self) -> Loaded:
        context = ssl.SSLContext(self._side)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        cert, key, ca = self._files
        before = read(cert) if cert else b""
        try:
            if cert:
                context.load_cert_chain(cert, key)
            if ca:
                context.load_verify_locations(ca)
        except (ssl.SSLError, OSError) as error:
            files = ", ".join(filter(None, self._files))
            raise ConfigError(
                f"tls: {files}: {error.strerror or error}; expected certificates and a key in PEM"
            ) from None
        if cert and read(cert) != before:
            raise ConfigError(f"tls: {cert}: it changed while it was read")
        self._settle(context)
        return Loaded(context, hashlib.sha256(_first(before)).digest() if cert else b"")


def read(path: str) -> bytes:
    """Raises ConfigError."""
    try:
        with Path(path).open("rb") as file:
            return file.read(_FILE_MAX)
    except OSError as error:
        raise ConfigError(f"tls: {path}: {error.strerror}") from None


def _first(pem: bytes) -> bytes:
    """The certificate that is shown, as DER, of a file that OpenSSL has accepted."""
    begin, end = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"
    _, _, rest = pem.decode("ascii", "replace").partition(begin)
    return ssl.PEM_cert_to_DER_cert(begin + rest.partition(end)[0] + end)
