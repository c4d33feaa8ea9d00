"""Where to write: the servers that a writer should try, best first."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable
from typing import Final, NamedTuple

import xxhash

from kvpool.master.state.server_record import ServerRecord


class Placement(NamedTuple):
    """Servers to try, best first, and how many complete replicas of each block there are."""

    servers: tuple[str, ...]
    copies: list[int]


#: A chain stays on its parent's server if that server's next victim is at least this share as old
#: as the oldest one: then the server is under no more pressure than the others.
_AGE_TOLERANCE: Final = 0.9


def rank_servers(
    records: Iterable[ServerRecord],
    *,
    key: bytes,
    parent_servers: Container[str],
    size: int,
    host: str,
    copies: int,
) -> list[ServerRecord]:
    """The `records` of living servers, best first, for `size` bytes whose first digest is `key`.

    1. Servers on the writer's `host`.
    2. Servers with free memory.
    3. The parent's server, if no younger data is evicted there than elsewhere.
    4. When all are full: by weighted rendezvous hashing, where the weight falls with the age of
       the server's next victim. So the pool evicts its oldest data, whichever server has it, and
       two writers of one block choose the same server.

    With several `copies` the best servers of different hosts come first, because all servers of a
    host fail together.
    """
    servers = list(records)
    oldest_s = max(map(_victim_age_s, servers), default=0.0)

    def preference(record: ServerRecord) -> tuple[bool, bool, bool, float]:
        has_room = record.capacity - record.stats.used - record.bytes_placed >= size
        share = _victim_age_s(record) / oldest_s if oldest_s and not has_room else 1.0
        stays = record.server in parent_servers and share >= _AGE_TOLERANCE
        # -weight / ln(uniform): each server is the largest with a probability of its weight.
        hashed = xxhash.xxh3_64_intdigest(key + record.server.encode())
        # 53 bits: with all 64 the quotient can round to 1, and then the logarithm is 0.
        uniform = ((hashed >> 11) + 1) / (2**53 + 1)
        return record.host == host, has_room, stays, -(share**2) / math.log(uniform)

    servers.sort(key=preference, reverse=True)
    if copies > 1:
        best_of_host = {record.host: record for record in reversed(servers)}
        servers.sort(key=lambda record: best_of_host[record.host] is not record)
    return servers


def _victim_age_s(record: ServerRecord) -> float:
    """Age of the next victim, less the share of memory that was placed since it was reported."""
    return record.stats.victim_age_s * max(0.0, 1 - record.bytes_placed / record.capacity)
