"""kvpool: KV-cache pool for LLM inference with code that people can read.

The master knows where blocks are. The servers own the bytes. A client asks the master *where*, and
a server *what*.

    pool = await kvpool.connect("127.0.0.1:7450")
    match = await pool.match(namespace, chain)
    results = await pool.read(namespace, chain[: match.length], buffers, match=match)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from kvpool.client.match_poller import MatchPoller
from kvpool.client.pool import Pool, connect
from kvpool.config import (
    ClientConfig,
    Config,
    MasterConfig,
    ServerConfig,
    local_secret,
    read_secret,
)
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
from kvpool.types import (
    ROOT,
    BlockKey,
    Cluster,
    Demand,
    EventPosition,
    Explanation,
    HintStatus,
    HostScore,
    Match,
    Member,
    Memory,
    Namespace,
    PoolEvent,
    PoolEventKind,
    PrefetchStatus,
    Presence,
    ReadResult,
    ReadStatus,
    Replica,
    Run,
    SessionReport,
    WriteStatus,
)

if TYPE_CHECKING:
    from types import ModuleType

    from kvpool import dev, sync

__version__ = "0.1.0"

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
    "EventPosition",
    "Explanation",
    "HintStatus",
    "HostScore",
    "KvpoolError",
    "MasterConfig",
    "MasterLost",
    "Match",
    "MatchPoller",
    "Member",
    "Memory",
    "Namespace",
    "Pool",
    "PoolEvent",
    "PoolEventKind",
    "PrefetchStatus",
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
    "check_transports",
    "connect",
    "dev",
    "local_secret",
    "read_secret",
    "sync",
]


def __getattr__(name: str) -> ModuleType:
    """`kvpool.sync` and `kvpool.dev` are imported when they are used (design: import-time)."""
    if name in ("dev", "sync"):
        return import_module(f"kvpool.{name}")
    raise AttributeError(f"module 'kvpool' has no attribute {name!r}")
