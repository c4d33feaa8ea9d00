"""kvpool: KV-cache pool for LLM inference with code that people can read.

The master knows where blocks are. The servers own the bytes. A client asks the master *where*, and
a server *what*.

    pool = await kvpool.connect("127.0.0.1:7450")
    match = await pool.match(namespace, chain)
    results = await pool.read(namespace, chain[: match.length], buffers, match=match)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from kvpool import dev, sync
    from kvpool.client.admin import admin
    from kvpool.client.device_direct import reserve_device_memory
    from kvpool.client.match_poller import MatchPoller
    from kvpool.client.opening import connect
    from kvpool.client.pool import Pool
    from kvpool.client.pool_events import EventPosition, PoolEvent, PoolEventKind
    from kvpool.config import ClientConfig, Config, MasterConfig, ServerConfig
    from kvpool.errors import (
        BadBuffer,
        BadKey,
        Closed,
        ConfigError,
        KvpoolError,
        MasterLost,
        TooLarge,
        Unavailable,
        UsageError,
    )
    from kvpool.registry import check_transports
    from kvpool.runtime import host_id
    from kvpool.secret_file import local_secret, read_cluster, read_secret
    from kvpool.types import (
        ROOT,
        BlockKey,
        Cluster,
        Demand,
        DeviceRows,
        Explanation,
        HostScore,
        Match,
        Member,
        Memory,
        MoveStatus,
        Namespace,
        Presence,
        ReadResult,
        ReadStatus,
        Replica,
        Run,
        SessionReport,
        WriteStatus,
    )

__version__ = "0.2.0"

__all__ = [
    "ROOT",
    "BadBuffer",
    "BadKey",
    "BlockKey",
    "ClientConfig",
    "Closed",
    "Cluster",
    "Config",
    "ConfigError",
    "Demand",
    "DeviceRows",
    "EventPosition",
    "Explanation",
    "HostScore",
    "KvpoolError",
    "MasterConfig",
    "MasterLost",
    "Match",
    "MatchPoller",
    "Member",
    "Memory",
    "MoveStatus",
    "Namespace",
    "Pool",
    "PoolEvent",
    "PoolEventKind",
    "Presence",
    "ReadResult",
    "ReadStatus",
    "Replica",
    "Run",
    "ServerConfig",
    "SessionReport",
    "TooLarge",
    "Unavailable",
    "UsageError",
    "WriteStatus",
    "admin",
    "check_transports",
    "connect",
    "dev",
    "host_id",
    "local_secret",
    "read_cluster",
    "read_secret",
    "reserve_device_memory",
    "sync",
]


#: Where the names are that are not in `kvpool.types`. The imports above are for type checkers.
_MODULES: Final = {
    "MatchPoller": "kvpool.client.match_poller",
    "Pool": "kvpool.client.pool",
    "admin": "kvpool.client.admin",
    "connect": "kvpool.client.opening",
    **dict.fromkeys(("EventPosition", "PoolEvent", "PoolEventKind"), "kvpool.client.pool_events"),
    **dict.fromkeys(("ClientConfig", "Config", "MasterConfig", "ServerConfig"), "kvpool.config"),
    **dict.fromkeys(("local_secret", "read_cluster", "read_secret"), "kvpool.secret_file"),
    **dict.fromkeys(("BadBuffer", "BadKey", "Closed", "ConfigError"), "kvpool.errors"),
    **dict.fromkeys(("KvpoolError", "MasterLost", "TooLarge"), "kvpool.errors"),
    **dict.fromkeys(("Unavailable", "UsageError"), "kvpool.errors"),
    "check_transports": "kvpool.registry",
    "host_id": "kvpool.runtime",
    "reserve_device_memory": "kvpool.client.device_direct",
}


def __getattr__(name: str) -> object:
    """Import what a name stands for when it is first used (PEP 562; design: layout)."""
    if name in ("dev", "sync"):
        return import_module(f"kvpool.{name}")
    if name not in __all__:
        raise AttributeError(f"module 'kvpool' has no attribute {name!r}")
    value: object = getattr(import_module(_MODULES.get(name, "kvpool.types")), name)
    globals()[name] = value  # the next use does not come here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
