"""The secret of a server that outlives its process: 32 random bytes in a file of its own.

With it a restarted server has its id back at once, and no other process gets it. The file stays
locked as long as its server lives, so that two processes never have one identity by mistake.
(design: server-identity)
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import secrets
import stat
from pathlib import Path
from types import TracebackType
from typing import Final

from kvpool import logs
from kvpool.config import ServerConfig
from kvpool.errors import ConfigError
from kvpool.private_files import make_private_directory, runtime_directory, state_directory

log = logs.get("kvpool.server")

_SECRET_SIZE: Final = 32


class IdentityFile:
    """The secret of the server `config.id` of a cluster. Use with `with`: it holds the file's lock.

    With `server.identity_file` the secret is `kept`. Without, it lies in a directory of this user
    that no logout empties (an earlier release's in the runtime directory), until the server ends in
    order: the id is free then.
    """

    def __init__(self, config: ServerConfig, cluster: str) -> None:
        self._id = config.id
        self.kept = bool(config.identity_file)
        self.secret = b""
        self.has_run = False  # the secret is that of an earlier process
        self._fd = -1
        if self.kept:
            self._path = Path(config.identity_file)
        else:
            named = "\0".join((cluster, config.id, *sorted(config.masters)))
            name = hashlib.sha256(named.encode()).hexdigest()[:32]
            self._path = state_directory() / f"{name}.identity"
            earlier = runtime_directory() / self._path.name
            with contextlib.suppress(OSError):  # it is not there, or not this user's
                owners = {earlier.lstat().st_uid, earlier.parent.lstat().st_uid}
                if owners == {os.geteuid()} and not self._path.exists():
                    self._path = earlier

    def __enter__(self) -> IdentityFile:
        """Raises ConfigError when another process holds the file, or it is not usable."""
        try:
            if not self.kept:
                self._path.parent.parent.mkdir(parents=True, exist_ok=True)
                make_private_directory(self._path.parent)
            self._fd = self._open_locked(self._path)
            self.secret = self._read_or_make(self._path)
        except OSError as error:
            self._close()
            if self.kept:
                raise ConfigError(f"identity file {str(self._path)!r}: {error.strerror}") from None
            log.warning(
                "this server has no identity that outlives it: after a crash it waits for its id",
                file=str(self._path),
                why=error.strerror,
            )
        except ConfigError:
            self._close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._fd >= 0 and not self.kept:
            # Before the lock is released: another process that waits for nothing finds no file, or
            # one that is locked.
            with contextlib.suppress(OSError):
                self._path.unlink()
        self._close()

    def _close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)  # this releases the lock
            self._fd = -1

    def _open_locked(self, path: Path) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        while True:
            fd = os.open(path, flags, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(fd)
                raise ConfigError(
                    f"server id {self._id!r} belongs to another living server on this host, which "
                    f"holds the identity file {str(path)!r}; choose another with --id"
                    + (" and --identity-file" if self.kept else "")
                ) from None
            except OSError:
                os.close(fd)
                raise
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(fd), os.stat(path)):
                    return fd
            os.close(fd)  # its last owner has just removed it

    def _read_or_make(self, path: Path) -> bytes:
        found = os.fstat(self._fd)
        if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
            raise ConfigError(
                f"identity file {str(path)!r} is open to other users, who could take the id of "
                f"this server: chown and chmod 600 {path}"
            )
        text = os.read(self._fd, 4096).decode(errors="replace").strip()
        if not text:
            secret = secrets.token_bytes(_SECRET_SIZE)
            os.pwrite(self._fd, secret.hex().encode() + b"\n", 0)
            os.fsync(self._fd)
            return secret
        with contextlib.suppress(ValueError):
            secret = bytes.fromhex(text)
            if len(secret) == _SECRET_SIZE:
                self.has_run = True
                return secret
        raise ConfigError(
            f"identity file {str(path)!r} is damaged: expected {2 * _SECRET_SIZE} hex digits; "
            "remove it, and the server makes a new one"
        )
