"""From a name to an implementation, by entry points.

A third party adds a transport, a tier or a policy by declaring it in its own `pyproject.toml`;
nothing here changes. Only declared entry points are ever loaded: a name from the wire or a file is
looked up among them, never imported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from kvpool.core.eviction import Policy
from kvpool.core.store import Entry
from kvpool.errors import ConfigError
from kvpool.protocols import Transport

TRANSPORTS = "kvpool.transports"
TIERS = "kvpool.tiers"
POLICIES = "kvpool.policies"


def installed(group: str) -> dict[str, EntryPoint]:
    """What is declared in a group, by name."""
    return {entry.name: entry for entry in entry_points(group=group)}


def transport(scheme: str) -> Transport:
    """A new transport of this scheme. Raises ConfigError when there is none or it cannot load."""
    made: Transport = _load(TRANSPORTS, scheme, "transport")()
    return made


def transports(schemes: Iterable[str]) -> dict[str, Transport]:
    """Those of `schemes` that are installed, in that order; at least one must be."""
    known = installed(TRANSPORTS)
    wanted = list(schemes)
    found = {scheme: transport(scheme) for scheme in wanted if scheme in known}
    if not found:
        raise ConfigError(f"none of the transports {wanted} is installed: have {sorted(known)}")
    return found


def tier(name: str) -> Callable[..., Any]:
    """The constructor of a tier. Raises ConfigError."""
    return _load(TIERS, name, "tier")


def policy(name: str, capacity: int) -> Policy[Entry]:
    """A new policy for a store of `capacity` bytes. Raises ConfigError when there is none."""
    made: Policy[Entry] = _load(POLICIES, name, "policy")(capacity)
    return made


def _load(group: str, name: str, what: str) -> Callable[..., Any]:
    known = installed(group)
    if name not in known:
        raise ConfigError(f"no {what} {name!r} is installed: have {sorted(known)}")
    try:
        loaded: Callable[..., Any] = known[name].load()
    except ImportError as error:
        raise ConfigError(f"{what} {name!r} is installed but cannot be loaded: {error}") from None
    return loaded
