"""Whether a host has other users, who could reach a pool without a secret."""

from __future__ import annotations

import contextlib
import os

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
