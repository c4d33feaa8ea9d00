"""Sockets of shared memory that have a path instead of an abstract name."""

from __future__ import annotations

import contextlib
import os
import socket
import stat

from kvpool.errors import ConfigError


def make_free(address: str, path: str) -> None:
    """A server that was killed has left no file at this path. Raises ConfigError, OSError.

    The directory must keep other users from replacing the socket.
    """
    directory = os.path.dirname(path)
    status = os.stat(directory)
    shared = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not status.st_mode & stat.S_ISVTX
    if shared or status.st_uid not in (os.geteuid(), 0):
        raise ConfigError(
            f"cannot listen on {address}: other users could replace a socket in {directory}: "
            f"choose a directory of this user, such as $XDG_RUNTIME_DIR, or chmod 700 {directory}"
        )
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISSOCK(os.lstat(path).st_mode) and not _is_served(path):
            os.unlink(path)


def _is_served(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as sock:
        try:
            sock.connect(path)
        except ConnectionRefusedError:
            return False
        except OSError:  # a server whose backlog is full, a socket of another kind
            return True
    return True
