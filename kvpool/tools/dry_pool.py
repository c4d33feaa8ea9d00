"""A pool in virtual time: the directory of a master and the stores of its servers, without sockets.

Directory, placement, stores, policies, hints and the order in which a writer tries servers are the
code of the product; only messages and bytes are left out. Announcements arrive at once, heartbeats
and with them hints once a second, as in production. The result depends on the requests alone.

Servers may have a disk below their memory. Its transfers take time, which a `DryPool` does not
have: whoever plays one carries them out (`benchmarks.fleet.disks`).
"""

from __future__ import annotations

import enum
import hashlib
import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from heapq import heappop, heappush
from typing import Final, NamedTuple

from kvpool.client.shared_copies import SHARED_COPIES_MAX, needs_copy
from kvpool.client.writer import BatchState
from kvpool.errors import ConfigError, InvariantViolated
from kvpool.master.state.directory import Directory
from kvpool.master.state.hint_log import HintLog
from kvpool.master.state.server_record import Registration
from kvpool.master.state.server_table import ServerTable
from kvpool.protocols import ReserveRequest, WriteOptions
from kvpool.protocols.persistent_tier import Record
from kvpool.protocols.policy import Policy
from kvpool.server.state.entry import Entry
from kvpool.server.state.front_store import FrontStore
from kvpool.server.state.quota import Quota
from kvpool.server.state.store import Store
from kvpool.server.state.tenants import set_quotas
from kvpool.server.state.tier_stores import FileStore
from kvpool.server.state.tiered_store import TieredStore
from kvpool.tools.traces import Request
from kvpool.types import (
    ROOT,
    ChainEnd,
    Match,
    MoveStatus,
    Namespace,
    Pin,
    ReadStatus,
    Run,
    ServerStats,
    SessionHint,
    WriteBlock,
    WriteStatus,
)

#: When the next prompt is expected, in seconds: inf where that is not known, None when this was the
#: last one.
Foresight = Callable[[Request], float | None]
#: Makes the eviction policy of one server, whose memory has so many bytes.
PolicyOf = Callable[[int], Policy[Entry]]

BLOCK_SIZE: Final = 4096  # of every block: the result depends on how many of them fit
_HINTS_MAX: Final = 1024
_NAMESPACE: Final = Namespace("dry")
_OWNER: Final = 1
_NO_DEADLINE: Final = float("inf")
#: Prompts after some moment whose prefixes count as living.
_LIVING_MAX: Final = 1000


class Placing(enum.Enum):
    """Where new blocks are written: the product's way, and two others to compare it with."""

    CHAINS = "chains"  # whole chains together, new ones where the least is written
    STRIPED = "striped"  # each block by its hash
    NEAR = "near"  # on the writer's host, and as the product says where there is no room

    @classmethod
    def parsed(cls, text: str) -> Placing:
        """Of its name. Raises ConfigError."""
        try:
            return cls(text)
        except ValueError:
            raise ConfigError(f"placing {text!r}: expected chains, striped or near") from None


class Loss(NamedTuple):
    """The share of the living prefixes' blocks that is usable when one server is lost."""

    worst: float
    mean: float


class HeldRun(NamedTuple):
    """Blocks that are being read from this server, and stay there."""

    server: str
    store: TieredStore  # of the process that ran when the read began
    pins: list[Pin]


class ServerRun(NamedTuple):
    """Blocks `first` to `last` (included) of a chain, and the server that they are read from."""

    server: str
    first: int
    last: int


@dataclass(slots=True)
class DryServer:
    """One server: its store, and what it has received from the master."""

    name: str
    host: str
    store: TieredStore
    phase_s: float  # of its heartbeats
    heard: int = 0  # the number of the last hint
    draining: bool = False  # it will leave


@dataclass(slots=True)
class Played:
    """What came of all requests so far."""

    hits: int = 0
    copies: int = 0  # of blocks that many chains share
    statuses: Counter[WriteStatus] = field(default_factory=Counter)
    place_s: list[float] = field(default_factory=list)
    #: Prompts with a hit, and over how many servers their prefixes lay.
    hit_prompts: int = 0
    servers_of_hits: int = 0
    losses: list[Loss] = field(default_factory=list)


class DryPool:
    """`count` servers of equal size with room for `capacity` blocks together, on `hosts` hosts.

    The engine that plays a prompt is on one of these hosts, in turn. `guaranteed` are the shares of
    each server that tenants have for themselves. `disk` blocks are below the memory of all servers
    together, written through or back.
    """

    def __init__(
        self,
        count: int,
        capacity: int,
        policy: PolicyOf,
        hosts: int = 0,
        heartbeat_s: float = 1.0,
        guaranteed: Mapping[str, float] | None = None,
        *,
        disk: int = 0,
        write_back: bool = False,
        placing: Placing = Placing.CHAINS,
    ) -> None:
        self.capacity = disk or capacity  # blocks of the last tier
        self.has_disks = disk > 0
        self._write_back = write_back
        self._placing = placing
        self._guaranteed = guaranteed or {}
        self._heartbeat_s = heartbeat_s
        self.played = Played()
        self.written = Counter[str]()  # blocks that servers have received from writers
        self._hosts = hosts or count
        self.directory = Directory(ServerTable(servers_max=count))
        self._hints = HintLog()
        self._turns = itertools.count()
        self._policy = policy
        sizes = [blocks // count * BLOCK_SIZE for blocks in (capacity, disk)]
        self._sizes = [size for size in sizes if size]  # of a server's tiers
        self.servers: dict[str, DryServer] = {}
        self._epochs: dict[str, int] = {}
        for number in range(count):
            name, host = f"server-{number:03}", f"host-{number % self._hosts:03}"
            phase_s = number / count * heartbeat_s
            self.servers[name] = DryServer(name, host, self._new_store(), phase_s)
            self._epochs[name] = 1
            self._register(self.servers[name])
        # When each sends its next one; those of the second before the beginning are due at once.
        self._beats = [(one.phase_s - heartbeat_s, name) for name, one in self.servers.items()]

    @property
    def stores(self) -> list[Store]:
        """The memory of each server."""
        return [server.store.front for server in self.servers.values()]

    def play(self, request: Request, foresight: Foresight | None = None) -> int:
        """One prompt: read what is here, and write the rest. Returns the blocks that were hit.

        The blocks of a prompt stay until it is through. Of a chain longer than the pool only what
        fits is offered.
        """
        now, chain = request.time_s, [digest_of(id) for id in request.chain]
        host = f"host-{next(self._turns) % self._hosts:03}"
        self.exchange_heartbeats(now)
        hint, ends = None, False
        if foresight is not None:
            resume_in = foresight(request)
            ends = resume_in is None
            hint = SessionHint(str(request.session), None if resume_in == math.inf else resume_in)
        match = self.match(chain)
        held = match.length
        pins = self.pin(match, chain, host, now)
        self.store(chain[: max(held, self.capacity)], match, host, hint, now)
        written = held < min(len(chain), self.capacity)  # which carries the hint
        if not written and hint is not None and hint.resume_in is not None:
            self.hint(hint.session, hint.resume_in, now)
        if hint is not None and ends:
            self.hint(hint.session, None, now)
        self.unpin(pins)
        self.played.hits += held
        return held

    def match(self, chain: Sequence[bytes], namespace: Namespace = _NAMESPACE) -> Match:
        """The longest prefix of the chain that the pool has."""
        return self.directory.match(namespace, chain)

    def pin(
        self,
        match: Match,
        chain: Sequence[bytes],
        host: str,
        now: float,
        namespace: Namespace = _NAMESPACE,
    ) -> list[HeldRun]:
        """Read each run of it from one server, which must have it in memory.

        The blocks stay until `unpin`. Raises InvariantViolated if one is not where the map says.
        """
        pins: list[HeldRun] = []
        for name, first, last in self.sources(match, host):
            store = self.servers[name].store
            sizes = [BLOCK_SIZE] * (last + 1 - first)
            held = store.pin(_OWNER, namespace, 0, chain[first : last + 1], now, sizes)
            if any(pin.status is not ReadStatus.HIT for pin in held):
                raise InvariantViolated("a block is not where the map says")
            pins.append(HeldRun(name, store, held))
        return pins

    def sources(self, match: Match, host: str) -> list[ServerRun]:
        """Where each run is read: on the reader's host, or where the run before was."""
        runs: list[ServerRun] = []
        used: dict[str, None] = {}
        for run in match.runs:
            holders = [replica.server for replica in run.replicas]
            name = min(
                holders,
                key=lambda name: (self.servers[name].host != host, name not in used, name),
            )
            used[name] = None
            runs.append(ServerRun(name, run.first, run.last))
        if used:
            self.played.hit_prompts += 1
            self.played.servers_of_hits += len(used)
        return runs

    def unpin(self, pins: Iterable[HeldRun]) -> None:
        """These reads have ended."""
        for _, store, held in pins:
            for pin in held:
                store.front.unpin(_OWNER, pin.id)

    def store(
        self,
        chain: Sequence[bytes],
        match: Match,
        host: str,
        hint: SessionHint | None,
        now: float,
        namespace: Namespace = _NAMESPACE,
    ) -> None:
        """Write what of this chain is not in `match`, which is its prefix in the pool now."""
        held = match.length
        fresh = list(chain[held:])
        if not fresh:
            return
        options = WriteOptions(namespace, 0, True, hint)
        server = self._write(options, fresh, chain[held - 1] if held else ROOT, host, now)
        if server:
            self._copy_shared(namespace, server, match.runs, chain[:held], now)

    def lacks(self, name: str, chain: Sequence[bytes], namespace: Namespace = _NAMESPACE) -> int:
        """How many of these blocks this server does not have."""
        store = self.servers[name].store
        return sum(store.peek(namespace, 0, digest) is None for digest in chain)

    def fetch(
        self,
        name: str,
        source: str,
        chain: Sequence[bytes],
        first: int,
        end: int,
        now: float,
        namespace: Namespace = _NAMESPACE,
    ) -> list[MoveStatus]:
        """This server has received blocks `first` to before `end` of the chain from `source`, as
        extra copies. What came of each."""
        servers = self.servers
        if name not in servers or source not in servers:
            return [MoveStatus.LOST] * (end - first)
        statuses = [
            self._fetched(servers[name].store, servers[source].store, chain, at, now, namespace)
            for at in range(first, end)
        ]
        self.announce(name)
        return statuses

    def hint(self, subject: str | ChainEnd, resume_in_s: float | None, now: float) -> None:
        """The next prompt of this session is expected then; None: it has ended; ARRIVED: its
        prompt waits, which may be of no session."""
        self._hints.add(subject, resume_in_s, now)

    def lose(self, name: str) -> None:
        """This server is gone with its blocks, and does not come back."""
        del self.servers[name]
        self.directory.servers.leave(name, self._epochs[name])

    def drain(self, name: str, now: float) -> None:
        """This server will leave: from now on nothing new is placed there."""
        server = self.servers[name]
        server.draining = True
        self._beat(server, now)

    def holders(self, namespace: Namespace, digest: bytes) -> set[str]:
        """The servers that have this block."""
        return {
            name
            for name, server in self.servers.items()
            if server.store.peek(namespace, 0, digest) is not None
        }

    def drain_targets(self, entries: Sequence[Entry]) -> list[str]:
        """Servers for these blocks of a chain, as a drain asks: where placement wants them, then
        those with most room. None that leaves itself."""
        first = entries[0]
        digests, size = [one.digest for one in entries], BLOCK_SIZE * len(entries)
        placed = self.directory.place(first.index.namespace, digests, first.parent, size, "")
        staying = [one for one in self.servers.values() if not one.draining]
        by_room = sorted(staying, key=lambda one: (one.store.used_bytes, one.name))
        names = [*placed.servers, *(one.name for one in by_room)]
        return list(dict.fromkeys(name for name in names if not self.servers[name].draining))

    def restart(self, name: str, now: float = 0.0) -> None:
        """This server was killed with -9, and runs again with what its disk has, if it has one."""
        server = self.servers[name]
        records = _records(server.store)
        server.store = self._new_store()
        self.directory.servers.leave(name, self._epochs[name])
        self._epochs[name] += 1
        self._register(server)
        if records:
            for _ in server.store.restore(records, now):
                pass
            for namespace, group in itertools.groupby(records, key=lambda one: one.namespace):
                digests = [one.digest for one in group]
                self.directory.stored(name, namespace, 0, server.store.backing_tier, digests)

    def exchange_heartbeats(self, now: float) -> None:
        """What every server has sent and received until now; each has its own phase."""
        beats, every_s = self._beats, self._heartbeat_s
        while beats and beats[0][0] <= now:
            due, name = heappop(beats)
            server = self.servers.get(name)
            if server is None:
                continue  # it is lost
            due = max(due, (now - server.phase_s) // every_s * every_s + server.phase_s)
            heappush(beats, (due + every_s, server.name))
            self._beat(server, due)
            hints, server.heard = self._hints.since(server.heard, _HINTS_MAX)
            for hint in hints:
                age_s = max(0.0, due - hint.received_at)
                server.store.hint(hint.subject, hint.resume_in, due, age_s=age_s)

    def lose_each(self, following: Iterable[Request]) -> None:
        """Record what the loss of each server, one at a time, would leave of living prefixes.

        Living are the prefixes that the next prompts of each session would find now.
        """
        seen: set[int] = set()
        living = 0
        lost = dict.fromkeys(self.servers, 0)
        for request in following:
            if request.session in seen:
                continue
            seen.add(request.session)
            chain = [digest_of(id) for id in request.chain]
            match = self.match(chain)
            length = match.length
            living += length
            counted: set[str] = set()
            for run in match.runs:
                holders = {replica.server for replica in run.replicas}
                if len(holders) == 1 and not holders <= counted:
                    counted |= holders
                    lost[holders.pop()] += length - run.first
            if len(seen) >= _LIVING_MAX:
                break
        if living:
            kept = [1 - blocks / living for blocks in lost.values()]
            self.played.losses.append(Loss(min(kept), sum(kept) / len(kept)))

    # --- inside --------------------------------------------------------------------------

    def _beat(self, server: DryServer, now: float) -> None:
        store = server.store
        stats = ServerStats(
            used=store.used_bytes,
            blocks=store.stored,
            victim_age_s=store.backing.extents.policy.victim_age(now),
            draining=server.draining,
        )
        self.directory.servers.heartbeat(server.name, self._epochs[server.name], stats, now)

    def _new_store(self) -> TieredStore:
        stores: list[Store] = []
        for size in self._sizes:  # as in a server, the lowest tier follows the policy
            policy = self._policy(size) if len(stores) + 1 == len(self._sizes) else None
            store = (FileStore if stores else FrontStore)(size, alignment=BLOCK_SIZE, policy=policy)
            if self._guaranteed:
                set_quotas(store, {t: Quota(int(s * size)) for t, s in self._guaranteed.items()})
            stores.append(store)
        return TieredStore(stores, write_back=self._write_back)

    def _register(self, server: DryServer) -> None:
        tiers, size = ("dram", "nvme")[: len(self._sizes)], self._sizes[-1]
        registration = Registration(self._epochs[server.name], server.host, (), tiers, size)
        refusal = self.directory.servers.register(server.name, registration, 0.0)
        if refusal is not None:
            raise InvariantViolated(f"{server.name} is refused: {refusal}")

    def _write(
        self, options: WriteOptions, digests: list[bytes], parent: bytes, host: str, now: float
    ) -> str:
        """Returns the server on which the blocks begin, if it is the one that the master chose."""
        parents = [parent, *digests[:-1]]
        blocks = [
            WriteBlock(digest, before, (), BLOCK_SIZE)
            for digest, before in zip(digests, parents, strict=True)
        ]
        if self._placing is not Placing.STRIPED:
            return self._write_to(
                self._servers_for(options, digests, parent, host), options, blocks, now
            )
        names = sorted(self.servers)
        stripes: dict[int, list[WriteBlock]] = {}
        for block in blocks:
            stripes.setdefault(int.from_bytes(block.digest[:4]) % len(names), []).append(block)
        for number, stripe in stripes.items():
            self._write_to([*names[number:], *names[:number]], options, stripe, now)
        return ""

    def _servers_for(
        self, options: WriteOptions, digests: list[bytes], parent: bytes, host: str
    ) -> Sequence[str]:
        """To try, best first."""
        size = BLOCK_SIZE * len(digests)
        hint = options.session_hint
        started = time.perf_counter()
        placed = self.directory.place(
            options.namespace, digests, parent, size, host, session=hint.session if hint else ""
        )
        self.played.place_s.append(time.perf_counter() - started)
        if self._placing is Placing.NEAR:
            here = [one for one in self.servers.values() if one.host == host]
            near = [one.name for one in here if not one.draining]
            return [*near, *(name for name in placed.servers if name not in near)]
        return placed.servers

    def _write_to(
        self, servers: Sequence[str], options: WriteOptions, blocks: list[WriteBlock], now: float
    ) -> str:
        batch = BatchState(options, blocks, 1, _NO_DEADLINE, servers)
        needed = dict.fromkeys(range(len(blocks)), 1)
        while needed and (batches := batch.next_batches(needed)):
            for name, positions in batches.items():
                answer = self._store(name, batch, positions, now)
                if WriteStatus.NO_SPACE in answer and self.servers[name].store.is_writing_back:
                    return ""  # it waits there for the disk, and its caller writes the rest later
                batch.answered(name, positions, answer, needed)
        self.played.statuses.update(batch.results(now))
        first = servers[0] if servers else ""
        return first if first in batch.stored_on[0] else ""

    def _copy_shared(
        self,
        namespace: Namespace,
        server: str,
        runs: Sequence[Run],
        prefix: Sequence[bytes],
        now: float,
    ) -> None:
        """As `SharedCopies` and a server that fetches: heads first, for what is used less."""
        each: list[list[str]] = []
        for run in runs:
            each += [[one.server for one in run.replicas]] * (run.last + 1 - run.first)
        if not each or server in each[-1]:
            return
        target = self.servers[server].store
        for digest, holders in zip(prefix, each, strict=True):
            wanted = needs_copy(server, holders, SHARED_COPIES_MAX)
            entry = self.servers[holders[0]].store.peek(namespace, 0, digest) if wanted else None
            if entry is None:
                continue
            request = ReserveRequest(
                *(namespace, 0, [digest], [entry.parent], [BLOCK_SIZE]),
                last_used=[entry.last_used],
            )
            (reservation,) = target.reserve(_OWNER, request, now)
            if reservation.status is not WriteStatus.RESERVED:
                break
            target.seal(_OWNER, reservation.id, 0, now)
            self.played.copies += 1
        self.announce(server)

    @staticmethod
    def _fetched(
        target: TieredStore,
        source: TieredStore,
        chain: Sequence[bytes],
        position: int,
        now: float,
        namespace: Namespace,
    ) -> MoveStatus:
        digest = chain[position]
        if target.peek(namespace, 0, digest) is not None:
            return MoveStatus.HERE
        entry = source.peek(namespace, 0, digest)
        if entry is None:
            return MoveStatus.GONE
        stamp = entry.last_used
        request = ReserveRequest(
            namespace,
            *(0, [digest], [chain[position - 1] if position else ROOT], [BLOCK_SIZE]),
            last_used=[stamp],
            copies=[0],
        )
        (reservation,) = target.reserve(_OWNER, request, now)
        if reservation.status is not WriteStatus.RESERVED:
            return MoveStatus.NO_ROOM
        target.seal(_OWNER, reservation.id, 0, now, last_used=stamp)
        return MoveStatus.DONE

    def _store(
        self, name: str, batch: BatchState, positions: Sequence[int], now: float
    ) -> list[WriteStatus]:
        """Reserve and seal, as one connection does, and announce what has changed."""
        store = self.servers[name].store
        self.written[name] += len(positions)
        request = ReserveRequest(
            batch.options.namespace,
            0,
            [batch.blocks[i].digest for i in positions],
            [batch.blocks[i].parent for i in positions],
            [BLOCK_SIZE] * len(positions),
            batch.options.session_hint,
        )
        answers = []
        for reservation in store.reserve(_OWNER, request, now):
            status = reservation.status
            if status is WriteStatus.RESERVED:
                status = store.seal(_OWNER, reservation.id, 0, now)
            answers.append(status)
        self.announce(name)
        return answers

    def announce(self, name: str) -> None:
        """Tell the map what has changed on this server."""
        store = self.servers[name].store
        for namespace, _, digests, status, tier in store.change_log.take():
            if status is ReadStatus.HIT:
                self.directory.stored(name, namespace, 0, tier, digests)
            else:
                self.directory.removed(name, namespace, 0, digests, status)


def _records(store: TieredStore) -> list[Record]:
    """What is left of a process that was killed: what its disk has."""
    if store.backing_tier == store.front_tier:
        return []
    return [
        Record(
            *(one.index.namespace, 0, one.digest, one.parent),
            *(one.offset, one.size, one.checksum, one.generation),
        )
        for one in store.backing.index.inventory()
    ]


@lru_cache(maxsize=1 << 18)
def digest_of(id: int) -> bytes:
    """Spread as real ones are: a policy may sample by them. Of any number: a trace has hashes."""
    number = id.to_bytes(max(8, id.bit_length() // 8 + 1), "little", signed=True)
    return hashlib.blake2b(number, digest_size=16).digest()
