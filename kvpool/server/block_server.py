"""The block server: puts the parts together, starts them in order, and closes them in order.

context.py       what the connections share: the store, its memory, the counters
clients.py       who is connected, and holds how much
connection.py    one client's reservations and pins
extension.py     what a server can do besides: moves/, tenancy.py, namespace_removal.py
announcer.py     one master's view of this server; outbox.py has what it has yet to hear
tiers.py         the joint of tiers: tier_mover.py moves bytes between them
state/, eviction/   pure: which block lies where, and which one is evicted next
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from pkgutil import resolve_name
from typing import Final

from kvpool import logs
from kvpool.config import ServerConfig, check_bind, parse_transport
from kvpool.errors import ConfigError, Unavailable
from kvpool.guard import TenantSecrets, Who, make_guard
from kvpool.protocols import (
    Connection,
    Listener,
    Network,
    Peer,
    RequiresCertificates,
    Tier,
    Transport,
)
from kvpool.protocols.policy import Policy
from kvpool.runtime import Host, this_host
from kvpool.server.announcer import Announcer, Identity
from kvpool.server.clients import HeldByClient
from kvpool.server.connection import ServerConnection
from kvpool.server.context import ServerContext
from kvpool.server.extension import ADDRESSES, Extensions, ServerParts
from kvpool.server.state.blocks import Blocks
from kvpool.server.state.entry import Entry
from kvpool.server.state.holdings import START, Limits
from kvpool.server.state.store import Store
from kvpool.server.tiers import mover_for
from kvpool.supervision import Supervisor
from kvpool.tenant_names import qualified
from kvpool.types import NAME_MAX, Cluster, ServerStats

log = logs.get("kvpool.server")

#: Clients in one heartbeat: those that hold most.
_CLIENTS_SHOWN: Final = 16


class BlockServer:
    """One block server. `start`, then `close`; it is a `BlockStore` to its transports.

    `secret` is what the previous process of this server had, too; without one a new one is made.
    With `keeps_secret` the next process will have it, so that masters reserve the id for it
    (design: server-identity).
    """

    def __init__(
        self,
        config: ServerConfig,
        *,
        cluster: Cluster,
        network: Network,
        transports: Mapping[str, Transport],
        tiers: Sequence[Tier],
        stores: Sequence[Store] = (),
        policy: Policy[Entry] | None = None,
        host: Host | None = None,
        rng: random.Random | None = None,
        secret: bytes = b"",
        keeps_secret: bool = False,
        tenants: TenantSecrets | None = None,
    ) -> None:
        self.guard = make_guard(tenants)
        self.host = host or this_host()
        rng = rng or random.SystemRandom()
        self.cluster = cluster
        self.server = config.id or f"{self.host.name}-{rng.getrandbits(24):06x}"
        self.epoch = rng.getrandbits(63)
        self._secret = secret or rng.randbytes(32)
        self._keeps_secret = keeps_secret
        self.tiers = list(tiers)
        store = mover_for(tiers).blocks_of(tiers, stores, policy, config)
        memory = store.front.allocator.capacity
        # What connections may pin and reserve of it.
        store.front.held.limits = Limits.of(memory // 4, default_reserved_max(memory))
        #: The long-lived tasks of this server.
        self.tasks = tasks = Supervisor(rng)
        self._context = ServerContext(
            self.server, store, self.tiers, config.connections_max, tasks, self.epoch, self.guard
        )
        context = self._context
        self.extensions = Extensions()
        others = (self.host, cluster, network, transports)
        self._parts = ServerParts(config, context, self.extensions, *others)
        self.extensions.add_all(self._parts)
        self._listeners: list[Listener] = []
        #: Where clients reach this server, one for each transport.
        self.addresses: list[str] = []
        self._connection_id = 0

    def __repr__(self) -> str:
        return f"<BlockServer {self.server} {self._context.store!r}>"

    @property
    def stack(self) -> Blocks:
        """The index: which block is in which tier."""
        return self._context.store

    @property
    def store(self) -> Store:
        """The blocks of the tier that clients reach."""
        return self._context.store.front

    @property
    def tier(self) -> Tier:
        """The memory that clients write into and read out of."""
        return self.tiers[self._context.store.front_tier]

    @property
    def registered(self) -> bool:
        """A master has accepted this server."""
        return any(announcer.registered for announcer in self._context.announcers)

    async def start(self) -> None:
        """Recover what the tiers still hold, listen, and begin to announce it to the masters.

        Raises ConfigError, or Unavailable for a tier that cannot be read; then nothing is left
        open.
        """
        config, context = self._parts.config, self._context
        try:
            if self.cluster.tenant:
                raise ConfigError(
                    f"a tenant's key makes no server: give the cluster's secret, not the key of "
                    f"tenant {self.cluster.tenant!r} (setting secret_file)"
                )
            for extension in self.extensions.all:
                extension.check()
            addresses = [parse_transport(text).address or text for text in config.listen]
            for address in addresses:
                check_scheme(address, self._parts.transports)
                transport = self._parts.transports[address.partition("://")[0]]
                if not transport.same_host:
                    certified = (
                        isinstance(transport, RequiresCertificates)
                        and transport.requires_certificates
                    )
                    asked = transport.authenticated and (bool(self.cluster.secret) or certified)
                    check_bind(address, config.insecure or asked)
            await context.mover.recover(self.cluster)
            context.mover.start()
            for extension in self.extensions.all:
                extension.start()
            announced_at = resolve_name(ADDRESSES[-1])
            for address in addresses:
                scheme, _, rest = address.partition("://")
                transport = self._parts.transports[scheme]
                listener = await transport.listen(address if rest else "", self)
                self._listeners.append(listener)
                reached = listener.address
                if not transport.same_host:
                    reached = await announced_at(reached, config.announce, config.masters)
                self.addresses.append(reached)
            names, kept = [tier.name for tier in self.tiers], self._keeps_secret
            where = self.host.id, self.addresses, names
            identity = Identity(self.server, self.epoch, *where, self._secret, kept=kept)
            for master in config.masters:
                calls = (self.stats, self.extensions.others_have_room, self.tasks)
                link = self._parts.network.connect(master)
                announcer = Announcer(identity, context.store, link, config.heartbeat_s, *calls)
                announcer.start()
                context.announcers.append(announcer)
        except BaseException:
            await self.close()
            raise
        log.info("server is up", server=self.server, addresses=self.addresses)

    async def wait_until_registered(self, deadline: float) -> None:
        """Wait until one master knows this server. Raises what stands in the way.

        ConfigError when another living server has this id, MasterLost's cause when none answers.
        """
        while not self.registered:
            if asyncio.get_running_loop().time() >= deadline:
                raise self._context.announcers[0].master.problem or Unavailable(
                    "no master has answered yet"
                )
            await asyncio.sleep(0.01)

    async def close(self) -> None:
        """Leave the masters, end every connection, free the memory. Idempotent."""
        context = self._context
        for extension in self.extensions.all:
            await extension.leave()
        ending: list[Announcer | Listener] = [*context.announcers, *self._listeners]
        context.announcers, self._listeners, self.addresses = [], [], []
        for one in ending:
            await one.close()
        self.guard.flush(float("inf"))
        for extension in self.extensions.all:
            await extension.close()
        await context.mover.close(self._parts.config.flush_s)
        for tier in self.tiers:
            tier.close()

    # --- for the transports -------------------------------------------------------------

    def connect(self, peer: Peer) -> Connection:
        """One more client. Raises Overloaded when it may not have one more connection."""
        context = self._context
        self._connection_id += 1
        held = HeldByClient(context.store, self._connection_id, _as_shown(peer))
        context.clients.admit(held, asyncio.get_running_loop().time())
        return ServerConnection(context, self.extensions, held)

    def count(self, event: str) -> None:
        self._context.counters[event] += 1

    def forbidden(self, peer: Peer, message: str, why: str) -> None:
        self._context.counters["forbidden_requests"] += 1
        who = Who(peer.tenant, _as_shown(peer).name, peer.address)
        self.guard.refused(asyncio.get_running_loop().time(), who, message, why)

    # --- for the masters ------------------------------------------------------------------

    def stats(self, now: float) -> ServerStats:
        """The figures of this server now; masters, `kvpool status` and `/metrics` show them."""
        context, store = self._context, self._context.store
        self.guard.flush(now)
        front, base = store.front, store.backing
        clients = context.clients.usage(now)
        stats = ServerStats(
            used=store.used_bytes,
            blocks=store.stored,
            pins=front.held.pins,
            reservations=front.held.reservations,
            pinned_bytes=sum(client.pinned_bytes for client in clients),
            oldest_pin_s=max((client.oldest_pin_s for client in clients), default=0.0),
            reserved_bytes=sum(client.reserved_bytes for client in clients),
            rss=self.host.resident(),
            victim_age_s=base.extents.policy.victim_age(now),
            counters={
                # Prometheus sees no increase from nothing to one: what alerts ask for is there.
                "corrupt_blocks": 0,
                "over_limit_blocks": 0,
                "refused_connections": 0,
                "rejected_victims": 0,
                **context.counters,
                "connections": len(context.clients.connections),
                "connections_max": self._parts.config.connections_max,
                "dropped_corrections": store.change_log.missed.shares.refused.total()
                + sum(one.outbox.missed.shares.refused.total() for one in context.announcers),
                "unlisted_blocks": sum(one.map.unlisted for one in context.announcers),
                "map_differences": sum(one.map.differences for one in context.announcers),
                **store.figures,
                "quarantined": front.held.quarantined,
                "quarantined_bytes": front.held.quarantined_bytes,
                **base.extents.policy.figures,
            },
            usage=context.mover.usage(now, context.counters["read_blocks"]),
            clients=clients[:_CLIENTS_SHOWN],
            draining=context.draining,
        )
        for extension in self.extensions.all:
            stats = extension.completed(stats)
        return stats


def _as_shown(peer: Peer) -> Peer:
    """With the name that logs and figures show: a client of a tenant has none of anybody else."""
    if not peer.tenant:
        return peer
    return peer._replace(name=qualified(peer.tenant, peer.name)[:NAME_MAX])


def default_reserved_max(memory: int) -> int:
    """A quarter of the memory; three quarters of it where one quarter is less than 1 MiB.

    Steps of one or two blocks would leave the end of a chain without a child between two steps, and
    in a small memory that is full of other chains' middles it would be evicted. Not
    all of it: writers that stop may keep what they reserved in quarantine.
    """
    return memory // 4 if memory // 4 >= START else memory * 3 // 4


def check_scheme(address: str, transports: Mapping[str, Transport]) -> None:
    """Raises ConfigError for an address of a transport that is not there."""
    scheme, found, _ = address.partition("://")
    if not found or scheme not in transports:
        raise ConfigError(
            f"address {address!r}: expected one of {', '.join(f'{s}://' for s in transports)}"
        )
