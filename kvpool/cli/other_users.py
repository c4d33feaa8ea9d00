"""Whether a host has other users, who could reach a pool without a secret."""

from __future__ import annotations

import contextlib
import os

from kvpool.cli.shared import stderr
from kvpool.config import Config
from kvpool.errors import ConfigError
from kvpool.guard import of_secrets

_UID_MIN = 1000  # below are the accounts of services


def has_other_users(accounts: str = "/etc/passwd") -> bool:
    """Users besides this one and root have an account to log in with, or run processes.

    As far as this process can see: it is for a hint, not for a decision.
    """
    own = {0, os.geteuid()}
    with contextlib.suppress(OSError), open(accounts) as lines:
        for fields in (line.rstrip("\n").split(":") for line in lines):
            if len(fields) != 7 or not fields[2].isdecimal():
                continue
            uid, may_log_in = int(fields[2]), not fields[6].endswith(("/nologin", "/false"))
            if may_log_in and uid >= _UID_MIN and uid not in own:
                return True
    with contextlib.suppress(OSError), os.scandir("/proc") as found:
        for entry in found:
            with contextlib.suppress(OSError):
                if entry.name.isdecimal() and entry.stat().st_uid not in own:
                    return True
    return False


def say_who_may_use_it(settings: Config, *, insecure: bool = False, quiet: bool = False) -> None:
    """One line about the users of this host, unless `quiet`: who started this has told it.

    On stderr: scripts read stdout.
    """
    if quiet:
        return
    if settings.local_only:
        with contextlib.suppress(ConfigError):  # who asks for the secret says it
            file = of_secrets("local_secret_file")()
            line = f"only for processes of this user: the secret is {file}"
            stderr.print(line, soft_wrap=True, markup=False)
    elif not settings.secret_file and not insecure and has_other_users():
        stderr.print(
            "[yellow]no secret:[/] every user of this host can read and change what is stored; "
            "--local-only admits processes of this user only",
            soft_wrap=True,
        )
