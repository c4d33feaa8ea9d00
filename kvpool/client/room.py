"""How many sessions fit: the memory of a pool, what is live in it, and what one more would need."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

from kvpool.client.extension import ClientExtension, ClientParts
from kvpool.errors import BadKey, MasterLost
from kvpool.tenant_names import tenant_of
from kvpool.types import Demand, Member, Namespace, WorkingSet
from kvpool.wire.questions import Demands, DemandsReply

#: Before so many seconds of observation a session may not have come back once.
OBSERVED_S: Final = 120.0


class TenantRoom(NamedTuple):
    """Of one tenant ("": of none), in bytes: its live working set, its mean prompt, and how many
    more of these fit."""

    tenant: str
    working_set: int
    prompt: int
    more: int


class Room(NamedTuple):
    """`memory` (bytes) holds `share` times the live `working_set`; None: nothing is known yet.

    A session more costs about the mean `prompt`, in bytes; `more` of these fit, None: unknown. Who
    serves sessions serves `share` times as many as have lived in the last minutes, at most. The
    largest tenants come first; a client of a tenant is told of its own, and not what others leave.
    """

    memory: int
    working_set: int
    prompt: int
    share: float | None
    more: int | None
    tenants: tuple[TenantRoom, ...]


def room_of(demand: Demand, members: Iterable[Member]) -> Room:
    """What a master has measured, against the servers that live."""
    memory = sum(_size(member) for member in members if member.alive)
    free = max(0, memory - demand.size)
    by_tenant: dict[str, list[WorkingSet]] = {}
    for one in demand.working_sets:
        by_tenant.setdefault(labelled_tenant(one.namespace.name), []).append(one)
    tenants = []
    for tenant, sets in by_tenant.items():
        own = _mean_prompt(sets)
        tenants.append(
            TenantRoom(tenant, sum(one.size for one in sets), own, free // own if own else 0)
        )
    tenants.sort(key=lambda one: -one.working_set)
    prompt = _mean_prompt(demand.working_sets)
    known = bool(memory and demand.size) and demand.seconds >= OBSERVED_S
    share = memory / demand.size if known else None
    more = free // prompt if known and prompt else None
    return Room(memory, demand.size, prompt, share, more, tuple(tenants))


def labelled_tenant(name: str) -> str:
    """The tenant of a namespace: the one with a secret whose it is, or that which an engine has
    written into the name, `... tenant=NAME ...`; empty if it has none."""
    if tenant := tenant_of(name):
        return tenant
    pairs = (word.partition("=") for word in name.split(" "))
    return next((value for field, _, value in pairs if field == "tenant"), "")


class PoolRoom(ClientExtension):
    """Asks for one client."""

    def __init__(self, parts: ClientParts) -> None:
        self._masters, self._servers = parts.context.masters, parts.context.servers

    async def demand(self, deadline: float) -> Demand:
        """As `Admin.demand`."""
        answer = await self._masters.ask(Demands(), DemandsReply, deadline)
        try:
            sets = [
                WorkingSet(Namespace(name, parts), size, blocks, prompt)
                for (name, parts, size, blocks), prompt in zip(
                    answer.working_sets, answer.prompts, strict=False
                )
            ]
        except BadKey as error:
            raise MasterLost(f"a master answered with {error}") from None
        return Demand(
            answer.seconds,
            tuple(sets),
            answer.chain_servers,
            answer.beyond_hole,
            answer.asked_blocks,
            answer.found_blocks,
        )

    async def room(self, deadline: float) -> Room:
        """As `Admin.room`."""
        members = await self._servers.refresh(deadline)
        return room_of(await self.demand(deadline), members)


def _size(member: Member) -> int:
    """Of the largest tier: those above it hold no more than copies."""
    return max([member.capacity, *(tier.capacity for tier in member.stats.usage if not tier.lost)])


def _mean_prompt(sets: Iterable[WorkingSet]) -> int:
    """Bytes; of several namespaces each counts by how much of it is live."""
    known = [(one.size, one.prompt) for one in sets if one.size and one.prompt]
    total = sum(size for size, _ in known)
    return sum(size * prompt for size, prompt in known) // total if total else 0
