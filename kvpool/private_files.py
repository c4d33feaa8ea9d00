"""Where files of one user lie, and who else may read them."""

from __future__ import annotations

import contextlib
import os
import pwd
import stat
from pathlib import Path


def runtime_directory() -> Path:
    """Where files of running processes lie that nobody misses after a reboot."""
    if directory := os.environ.get("XDG_RUNTIME_DIR"):
        return Path(directory) / "kvpool"
    import tempfile

    return Path(tempfile.gettempdir()) / f"kvpool-{os.geteuid()}"


def state_directory() -> Path:
    """Where a file lies that this user's processes share for as long as there is the user.

    The same for each of them, whatever its session, and neither a logout, which empties
    `$XDG_RUNTIME_DIR`, nor a reboot takes it away. Without a home that this user can write to, as
    in containers, it is a directory for temporary files.
    """
    if chosen := os.environ.get("XDG_STATE_HOME"):
        return Path(chosen) / "kvpool"
    with contextlib.suppress(KeyError):  # a user without an account
        home = Path(pwd.getpwuid(os.geteuid()).pw_dir)
        if os.access(home, os.W_OK | os.X_OK, effective_ids=True):
            return home / ".local/state/kvpool"
    kept = os.access("/var/tmp", os.W_OK | os.X_OK, effective_ids=True)
    return Path("/var/tmp" if kept else "/tmp") / f"kvpool-{os.geteuid()}"


def make_private_directory(directory: Path) -> None:
    """Make it for this user alone. Raises OSError when it is there and somebody else's.

    Everybody may write into /tmp, so another user may have made it first.
    """
    with contextlib.suppress(FileExistsError):
        directory.mkdir(mode=0o700)
    found = directory.lstat()
    private = stat.S_ISDIR(found.st_mode) and not stat.S_IMODE(found.st_mode) & 0o077
    if not private or found.st_uid != os.geteuid():
        raise PermissionError(0, f"{directory} is not a directory of this user alone")


def others_may_read(path: Path) -> bool:
    """Whether every user of this host can read this file: its mode and its folders let them.

    Raises OSError.
    """
    found = path.resolve()
    return bool(found.stat().st_mode & stat.S_IROTH) and all(
        folder.stat().st_mode & stat.S_IXOTH for folder in found.parents
    )
