"""The master: a directory behind a socket.

Each request is answered at once, without an `await`, so no request sees a half-applied change. A
master writes no file and knows no other master: after a restart, the servers send it their whole
inventories. (design: announcements)
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from pkgutil import resolve_name
from typing import Final, TypeVar

import msgspec

from kvpool import logs
from kvpool.config import MasterConfig, check_bind
from kvpool.errors import BadMessage, Forbidden
from kvpool.guard import Who, make_guard
from kvpool.master.client_requests import ClientRequests
from kvpool.master.extension import ADDRESSES, HINTS, REQUESTS, NoHints
from kvpool.master.server_requests import ServerRequests
from kvpool.master.state.changes import PAGE_SIZE
from kvpool.master.state.directory import Directory
from kvpool.master.state.server_table import ServerTable
from kvpool.master.state.sweeper import Sweeper
from kvpool.protocols import Caller, CountedListener, Network
from kvpool.supervision import Supervisor
from kvpool.types import Member, ServerStats
from kvpool.wire import messages as wire

log = logs.get("kvpool.master")

M = TypeVar("M", bound=wire.Message)

#: The caller of tests and tools that call a master directly.
_NOBODY: Final = Caller()


class Master:
    """One master. `start`, then `close`; several side by side share nothing."""

    def __init__(
        self,
        config: MasterConfig,
        network: Network,
        *,
        directory: Directory | None = None,
        rng: random.Random | None = None,
    ) -> None:
        self._config = config
        self._network = network
        if directory is None:
            servers = ServerTable(timeout_s=config.timeout_s)
            directory = Directory(servers, blocks_max=config.blocks_max)
        self.directory = directory
        self.sweeper = Sweeper(directory)
        self.hints: NoHints = resolve_name(HINTS[-1])(self._now)
        self._listener: CountedListener | None = None
        #: The long-lived tasks of this master.
        self.tasks = Supervisor(rng)
        self._ticker: asyncio.Task[None] | None = None
        self._started = 0.0
        #: Requests that were answered, by kind.
        self.requests: Counter[str] = Counter()
        #: Messages that were refused, by reason.
        self.refusals: Counter[str] = Counter()
        self._guard = make_guard()
        self._handlers: dict[int, Callable[[bytes, Caller], wire.Message]] = {}
        self.servers = ServerRequests(directory, self.hints, self.refusals, self._now)
        self._handle(wire.Register, self.servers.register)
        self._handle(wire.Heartbeat, self.servers.from_owner(self.servers.heartbeat))
        self._handle(wire.Leave, self.servers.from_owner(self.servers.leave))
        self._handle(wire.Announce, self.servers.from_owner(self.servers.announce))
        self._handle(wire.Inventory, self.servers.from_owner(self.servers.announce))
        self.clients = ClientRequests(directory, self.hints, self._now)
        self._handle(wire.Find, self.clients.find)
        self._handle(wire.Place, self.clients.place)
        self._handle(wire.Members, self._members)
        #: Names this master's numbers of changes: another one, or the next process, has its own.
        stream = (rng or random.SystemRandom()).getrandbits(62) + 1
        further = [resolve_name(one)(directory, self.clients, stream) for one in REQUESTS]
        for one in (self.hints, *further):
            for kind, answer in one.handlers.items():
                self._handle(kind, answer)

    def __repr__(self) -> str:
        return f"<Master {self.address} {len(self.directory)} blocks>"

    @property
    def address(self) -> str:
        """`host:port`, once started. If it listens on all of this host's, one that others reach."""
        return self.servers.address

    async def start(self) -> None:
        """Listen. Raises ConfigError when the address is taken or not loopback."""
        check_bind(self._config.bind, self._config.insecure or self._network.authenticated)
        self._started = self._now()
        self._listener = await self._network.serve(self._config.bind, self.handle)
        self.servers.address = self._listener.address
        for one in ADDRESSES.values():
            self.servers.address = await resolve_name(one)(self._listener.address)
        self._ticker = self.tasks.forever("tick", self._tick)
        log.info("master is up", address=self.address)

    async def close(self) -> None:
        """Stop answering. All state is lost: servers send it to the next master."""
        if self._ticker is not None:
            self._ticker.cancel()
            await asyncio.wait([self._ticker])
        if self._listener is not None:
            await self._listener.close()
        self._guard.flush(float("inf"))

    def handle(self, type: int, body: bytes, caller: Caller = _NOBODY) -> tuple[int, bytes]:
        """The reply to one request of `caller`.

        Raises PeerError, which the peer receives as an `Error`.
        """
        handler = self._handlers.get(type)
        if handler is None:
            raise BadMessage(f"message type {type} is not a request to a master")
        return wire.encode(handler(body, caller))

    @property
    def refused_connections(self) -> int:
        """Connections that were refused, as they proved nothing."""
        return self._listener.refused if self._listener is not None else 0

    @property
    def callers(self) -> int:
        """Connections on which callers ask now."""
        return self._listener.callers if self._listener is not None else 0

    def uptime_s(self, now: float) -> float:
        return max(0.0, now - self._started)

    def _handle(self, kind: type[M], answer: Callable[[M, Caller], wire.Message]) -> None:
        number, name = wire.TYPES[kind], kind.__name__.lower()

        def handle(body: bytes, caller: Caller) -> wire.Message:
            self.requests[name] += 1
            request = wire.decode(kind, number, body)
            if caller.tenant:
                self._check(request, caller)
            return answer(request, caller)

        self._handlers[number] = handle

    def _check(self, request: wire.Message, caller: Caller) -> None:
        """Raises Forbidden for what the caller's tenant may not ask for."""
        try:
            self._guard.check(caller.tenant, request)
        except Forbidden as error:
            name = type(request).__name__
            self.refusals[f"forbidden {name.lower()}"] += 1
            who = Who(caller.tenant, "", caller.address)
            self._guard.refused(self._now(), who, name, str(error))
            raise

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    async def _tick(self) -> None:
        now = self._now()
        syncing = self.directory.servers.tick(now)
        self.clients.partial &= syncing or self.uptime_s(now) < self._config.timeout_s
        self._guard.flush(now)
        # A sweep runs in small steps between requests: a lost server may have had millions of
        # blocks.
        sweeping = self.sweeper.step()
        await asyncio.sleep(0.001 if sweeping else self._config.timeout_s / 6)

    def _members(self, m: wire.Members, caller: Caller) -> wire.MembersReply:
        """All servers. A tenant sees where they are, and not what others do there: their figures
        count the traffic of all, and name clients."""
        now, hidden = self._now(), bool(caller.tenant)
        members = sorted(self.directory.servers.members(now))
        page: list[Member] = []
        size, more = 0, False
        for member in members:
            if member.server <= m.after:
                continue
            if hidden:
                seen = ServerStats(draining=member.stats.draining)  # as much as chooses a server
                member = msgspec.structs.replace(member, stats=seen)
            size += len(wire.ENCODER.encode(member))
            if page and size > PAGE_SIZE:
                more = True
                break
            page.append(member)
        blocks = 0 if hidden else len(self.directory)
        return wire.MembersReply(self.address, self.uptime_s(now), blocks, page, more)
