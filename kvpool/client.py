"""The client: asks a master where, and servers what.

A read in one breath: `Pool.read` groups the blocks by the best server that holds them, each group
goes down that server's channel into the caller's buffers, and what did not come is asked of the
next replica, until everything is there or every place has been tried. A miss is an answer, never
an exception; exceptions are for calls that are wrong in themselves.
"""

from __future__ import annotations

import asyncio
import functools
import os
import random
import socket
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Final, NamedTuple, TypeVar

from kvpool import logs, registry
from kvpool.config import ClientConfig
from kvpool.errors import (
    BadBuffer,
    BadKey,
    Closed,
    ConfigError,
    DeadlineExceeded,
    KvpoolError,
    LinkBroken,
    MasterLost,
    Overloaded,
    PeerError,
    ServerLost,
    TooLarge,
    Unavailable,
)
from kvpool.hosts import host_id
from kvpool.link import ZmqNetwork
from kvpool.protocols import (
    Channel,
    Link,
    Network,
    Reading,
    Transport,
    View,
    Viewable,
    Writing,
)
from kvpool.types import (
    BATCH_BLOCKS_MAX,
    BLOCK_SIZE_MAX,
    ROOT,
    BlockKey,
    Buffer,
    Explanation,
    Match,
    Member,
    Namespace,
    Outgoing,
    ReadResult,
    ReadStatus,
    Replica,
    Run,
    Wanted,
    WriteStatus,
    check_digest_size,
    check_digests,
)
from kvpool.wire import messages as wire

log = logs.get("kvpool.client")

T = TypeVar("T")

#: Keys in one question to a master: an answer where every block lies elsewhere must fit, too.
_FIND_KEYS: Final = 4096
#: Bytes that one call to a channel carries; larger batches go in several.
_BATCH_BYTES: Final = 256 << 20
#: After a server did not answer it is left alone for this long, doubling up to the second value.
_BACKOFF_S: Final = 0.2
_BACKOFF_S_MAX: Final = 5.0


async def connect(
    *masters: str, config: ClientConfig | None = None, cluster: str = "default"
) -> Pool:
    """Open a pool on the masters at `host:port`; any one of them is enough.

    Raises MasterLost when none answers within the configured time.
    """
    if config is None:
        config = ClientConfig(masters=list(masters)) if masters else ClientConfig()
    transports = registry.transports(config.transports)
    network = ZmqNetwork(cluster)
    try:
        pool = Pool(
            config, cluster=cluster, network=network, transports=transports, owns_network=True
        )
    except BaseException:
        network.close()
        raise
    try:
        await pool.members()
    except BaseException:
        await pool.close()
        raise
    return pool


class Pool:
    """The pool, as one client sees it. Belongs to the event loop that made it.

    Every call takes `timeout` in seconds (default: `ClientConfig.timeout_s`) and ends by then.
    """

    def __init__(
        self,
        config: ClientConfig,
        *,
        cluster: str,
        network: Network,
        transports: Mapping[str, Transport],
        owns_network: bool = False,
        chance: random.Random | None = None,
    ) -> None:
        self._config = config
        self._network = network
        self._owns_network = owns_network
        self._loop = asyncio.get_running_loop()
        self._pid = os.getpid()
        self._closed = False
        self.counters: Counter[str] = Counter()
        self._masters = _Masters(network, config)
        self._host = host_id()
        name = f"{socket.gethostname()}/{self._pid}"
        self._servers = _Servers(
            config, cluster, name, self._host, transports, self._masters, self.counters, chance
        )

    def __repr__(self) -> str:
        return f"<Pool {'closed' if self._closed else 'open'} {self._servers!r}>"

    async def __aenter__(self) -> Pool:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    # --- looking -------------------------------------------------------------------------

    async def match(
        self, namespace: Namespace, chain: Sequence[bytes], *, timeout: float | None = None
    ) -> Match:
        """The longest prefix of `chain` that the pool holds, and why it ends there.

        It reserves nothing and touches nothing. Without any master the answer is an empty match
        with the reason NO_MASTER.
        """
        deadline = self._begin(timeout)
        size = check_digest_size(chain)
        runs: list[Run] = []
        for first in range(0, len(chain), _FIND_KEYS):
            digests = chain[first : first + _FIND_KEYS]
            packed = b"".join(digests)
            if len(packed) != size * len(digests):  # cheaper than looking at hundreds of keys
                check_digests(chain)
            try:
                found = await self._find(namespace, packed, size, True, deadline)
            except Unavailable:
                return Match(tuple(runs), first, ReadStatus.NO_MASTER)
            runs += _runs(found, first, len(digests))
            if found.misses:
                length = runs[-1].last + 1 if runs else 0
                return Match(tuple(runs), length, _miss(found.misses[0]))
        return Match(tuple(runs), len(chain), ReadStatus.HIT)

    async def explain(
        self, namespace: Namespace, digests: Sequence[bytes], *, timeout: float | None = None
    ) -> list[Explanation]:
        """Where each block is, or why it is not, in words. Raises MasterLost."""
        deadline = self._begin(timeout)
        size = check_digests(digests)
        answers: list[Explanation] = []
        for first in range(0, len(digests), BATCH_BLOCKS_MAX):
            batch = digests[first : first + BATCH_BLOCKS_MAX]
            request = wire.Explain(namespace.name, namespace.parts, size, b"".join(batch))
            explained = await self._masters.ask(request, wire.Explained, deadline)
            if len(explained.blocks) != len(batch):
                raise MasterLost(f"a master answered for {len(explained.blocks)} of {len(batch)}")
            answers += [
                Explanation(
                    BlockKey(namespace, digest),
                    _read_status(status),
                    tuple(Replica(*replica) for replica in replicas),
                    text,
                )
                for digest, (status, text, replicas) in zip(batch, explained.blocks, strict=True)
            ]
        return answers

    async def members(self, *, timeout: float | None = None) -> list[Member]:
        """Every server a master knows of, the silent ones included. Raises MasterLost."""
        return await self._servers.refresh(self._begin(timeout))

    # --- reading -------------------------------------------------------------------------

    async def read(
        self,
        namespace: Namespace,
        digests: Sequence[bytes],
        buffers: Sequence[Buffer],
        *,
        part: int = 0,
        match: Match | None = None,
        timeout: float | None = None,
    ) -> list[ReadResult]:
        """Fill each buffer with its block, or say why not: one result per block.

        With the `match` that these digests (or a longer chain that begins with them) were found
        by, no master is asked again. When it returns or raises, nobody writes to the buffers any
        more; buffers of misses may have been written to, and their contents mean nothing.
        """
        deadline = self._begin(timeout)
        check_digests(digests)
        _check_part(namespace, part)
        if len(buffers) != len(digests):
            raise BadBuffer(f"{len(buffers)} buffers for {len(digests)} keys")
        views = [_writable(buffer, i) for i, buffer in enumerate(buffers)]
        results, places = await self._locate(namespace, digests, part, match, deadline)
        reading = Reading(namespace, part, self._config.verify)

        async def read_from(server: str, positions: list[int]) -> list[ReadResult]:
            blocks = [Wanted(digests[i], views[i]) for i in positions]
            return await self._servers.call(
                server, lambda channel: channel.read(reading, blocks, deadline=deadline), deadline
            )

        # Each round asks one server per block; whoever misses is asked elsewhere in the next.
        missing = [i for i, servers in enumerate(places) if servers]
        while missing:
            rounds = _grouped(missing, places, [len(view) for view in views])
            answers = await _together([read_from(server, group) for server, group in rounds])
            corrupt: list[tuple[str, list[bytes]]] = []
            for (server, group), answer in zip(rounds, answers, strict=True):
                for index, position in enumerate(group):
                    results[position] = (
                        answer[index]
                        if not isinstance(answer, KvpoolError)
                        else ReadResult(_why(answer))
                    )
                bad = [digests[i] for i in group if results[i].status is ReadStatus.CORRUPT]
                if bad:
                    corrupt.append((server, bad))
            await self._report_corrupt(namespace, part, corrupt, deadline)
            missing = [i for i in missing if not results[i].status.hit and places[i]]
        self._count(results)
        for position, result in enumerate(results):
            if result.status is ReadStatus.BUFFER_TOO_SMALL:
                raise BadBuffer(
                    f"buffer {position} has {len(views[position])} bytes, block "
                    f"{digests[position].hex()[:12]} is larger"
                )
        return results

    @asynccontextmanager
    async def read_view(
        self,
        namespace: Namespace,
        digests: Sequence[bytes],
        *,
        part: int = 0,
        match: Match | None = None,
        timeout: float | None = None,
    ) -> AsyncIterator[list[View]]:
        """The pool's own memory, pinned inside the `with`: no copy at all.

        Where a server is not on this host, or its transport cannot show memory, the blocks are
        misses with the reason REFUSED: use `read`. The memory is read-only.
        """
        deadline = self._begin(timeout)
        check_digests(digests)
        _check_part(namespace, part)
        results, places = await self._locate(namespace, digests, part, match, deadline)
        views = [View(result.status) for result in results]
        reading = Reading(namespace, part, self._config.verify)
        async with AsyncExitStack() as stack:
            missing = [i for i, servers in enumerate(places) if servers]
            for server, group in _grouped(missing, places, [0] * len(digests)):
                try:
                    channel = await self._servers.viewable(server, deadline)
                    shown = await stack.enter_async_context(
                        channel.read_view(reading, [digests[i] for i in group], deadline=deadline)
                    )
                except (Unavailable, PeerError, Overloaded) as error:
                    shown = [View(_why(error))] * len(group)
                for position, view in zip(group, shown, strict=True):
                    views[position] = view
            self._count([ReadResult(view.status) for view in views])
            yield views

    # --- writing -------------------------------------------------------------------------

    async def write(
        self,
        namespace: Namespace,
        digests: Sequence[bytes],
        buffers: Sequence[Buffer],
        *,
        parent: bytes = ROOT,
        parents: Sequence[bytes] | None = None,
        part: int = 0,
        visible: bool = True,
        timeout: float | None = None,
    ) -> list[WriteStatus]:
        """Store blocks; one status per block.

        The digests are a chain: each block's parent is the one before it, and the first one's is
        `parent` (ROOT at the start of a prompt), unless `parents` names them all. With `visible`
        the call returns when every living master can be asked for the blocks. The buffers are
        the caller's again when it returns or raises.
        """
        deadline = self._begin(timeout)
        size = check_digests(digests)
        _check_part(namespace, part)
        if len(buffers) != len(digests):
            raise BadBuffer(f"{len(buffers)} buffers for {len(digests)} keys")
        if parents is None:
            parents = [parent, *digests[:-1]]
        _check_parents(parents, digests, size)
        blocks = [
            Outgoing(digest, parent_of, _readable(buffer, i))
            for i, (digest, parent_of, buffer) in enumerate(
                zip(digests, parents, buffers, strict=True)
            )
        ]
        writing = Writing(namespace, part, visible)
        statuses = [WriteStatus.NO_MASTER] * len(blocks)
        for group in _batches(range(len(blocks)), [len(block.buffer) for block in blocks]):
            written = await self._write_batch(writing, [blocks[i] for i in group], deadline)
            for position, status in zip(group, written, strict=True):
                statuses[position] = status
            if any(status is WriteStatus.DEADLINE for status in written):
                for position in range(group[-1] + 1, len(blocks)):
                    statuses[position] = WriteStatus.DEADLINE
                break
        for position, status in enumerate(statuses):
            self.counters[f"write_{status.name.lower()}"] += 1
            if status is WriteStatus.TOO_LARGE:
                raise TooLarge(
                    f"block {digests[position].hex()[:12]} has {len(blocks[position].buffer)} "
                    "bytes, more than any server's whole segment"
                )
        return statuses

    async def write_to(
        self,
        server: str,
        namespace: Namespace,
        digest: bytes,
        buffer: Buffer,
        *,
        timeout: float | None = None,
    ) -> WriteStatus:
        """Store one block on a server of your choice: for trials and tools.

        Raises ServerLost when that server cannot be reached.
        """
        deadline = self._begin(timeout)
        check_digests([digest])
        block = Outgoing(digest, ROOT, _readable(buffer, 0))
        (status,) = await self._servers.write(
            server, Writing(namespace, 0, True), [block], deadline
        )
        return status

    async def remove(
        self, namespace: Namespace, digests: Sequence[bytes], *, timeout: float | None = None
    ) -> list[bool]:
        """Forget blocks, every part and copy; True where the pool had one. Raises MasterLost."""
        deadline = self._begin(timeout)
        check_digests(digests)
        removed = [False] * len(digests)
        for first in range(0, len(digests), BATCH_BLOCKS_MAX):
            batch = digests[first : first + BATCH_BLOCKS_MAX]
            # Every living server, not only those in the map: the map may not know yet.
            servers = [m.server for m in await self._servers.refresh(deadline) if m.alive]
            answers = await _together(
                [
                    self._servers.call(
                        server, functools.partial(_remove, namespace, batch, deadline), deadline
                    )
                    for server in servers
                ]
            )
            for answer in answers:
                if not isinstance(answer, KvpoolError):
                    for position, one in enumerate(answer):
                        removed[first + position] |= one
        return removed

    async def close(self) -> None:
        """End every call that is running, then every connection. Idempotent."""
        if not self._closed:
            self._closed = True
            await self._servers.close()
            self._masters.close()
            if self._owns_network:
                self._network.close()

    # --- inside --------------------------------------------------------------------------

    def _begin(self, timeout: float | None) -> float:
        """The deadline of a call that starts now. Raises Closed in the wrong place."""
        if self._closed:
            raise Closed("the pool is closed")
        if os.getpid() != self._pid:
            raise Closed("the pool was opened before a fork: open another one in the child")
        try:
            here: asyncio.AbstractEventLoop | None = asyncio.get_running_loop()
        except RuntimeError:
            here = None
        if here is not self._loop:
            raise Closed(
                "the pool belongs to another event loop or thread: use kvpool.sync.Pool from "
                "threads, or open one pool in each loop"
            )
        seconds = self._config.timeout_s if timeout is None else timeout
        return self._loop.time() + seconds

    async def _find(
        self, namespace: Namespace, packed: bytes, size: int, prefix: bool, deadline: float
    ) -> wire.Found:
        request = wire.Find(namespace.name, namespace.parts, size, packed, prefix)
        return await self._masters.ask(request, wire.Found, deadline)

    async def _locate(
        self,
        namespace: Namespace,
        digests: Sequence[bytes],
        part: int,
        match: Match | None,
        deadline: float,
    ) -> tuple[list[ReadResult], list[list[str]]]:
        """For each block the result so far and the servers to ask, best last (they are popped)."""
        # Beyond a match that ends in a hit nobody was asked: that is no hit.
        stopped = match.stopped if match and not match.stopped.hit else ReadStatus.NO_MASTER
        results = [ReadResult(stopped)] * len(digests)
        places: list[list[str]] = [[] for _ in digests]
        runs: list[Run] = []
        if match is not None:
            runs = list(match.runs)
        else:
            for first in range(0, len(digests), _FIND_KEYS):
                batch = digests[first : first + _FIND_KEYS]
                try:
                    packed = b"".join(batch)
                    found = await self._find(namespace, packed, len(batch[0]), False, deadline)
                except Unavailable:
                    break
                runs += _runs(found, first, len(batch))
                here = {i for run in runs for i in range(run.first, run.last + 1)}
                misses = iter(found.misses)
                for position in range(first, first + len(batch)):
                    if position not in here:
                        results[position] = ReadResult(_miss(next(misses, 0)))
        for run in runs:
            servers = [r.server for r in reversed(run.replicas) if r.part == part]
            for position in range(run.first, min(run.last + 1, len(digests))):
                places[position] = list(servers)
        return results, places

    async def _write_batch(
        self, writing: Writing, blocks: Sequence[Outgoing], deadline: float
    ) -> list[WriteStatus]:
        """Place, then try the servers in that order until every block has a home."""
        try:
            placed = await self._place(writing.namespace, blocks, deadline)
        except DeadlineExceeded:
            return [WriteStatus.DEADLINE] * len(blocks)
        except Unavailable:
            return [WriteStatus.NO_MASTER] * len(blocks)
        statuses = [WriteStatus.SERVER_LOST] * len(blocks)
        missing = []
        for position, present in enumerate(placed.present):
            if present and writing.namespace.parts == 1:
                statuses[position] = WriteStatus.ALREADY_STORED
            else:
                missing.append(position)
        for server in placed.servers:
            if not missing:
                break
            batch = [blocks[i] for i in missing]
            try:
                answers = await self._servers.write(server, writing, batch, deadline)
            except (Unavailable, PeerError, Overloaded) as error:
                late = isinstance(error, DeadlineExceeded)
                status = WriteStatus.DEADLINE if late else WriteStatus.SERVER_LOST
                answers = [status] * len(batch)
            for position, status in zip(missing, answers, strict=True):
                statuses[position] = status
            homeless = (WriteStatus.NO_SPACE, WriteStatus.SERVER_LOST, WriteStatus.TOO_LARGE)
            missing = [i for i in missing if statuses[i] in homeless]
            if self._loop.time() >= deadline:
                break
        return statuses

    async def _place(
        self, namespace: Namespace, blocks: Sequence[Outgoing], deadline: float
    ) -> wire.Placed:
        request = wire.Place(
            namespace.name,
            namespace.parts,
            len(blocks[0].digest),
            b"".join([block.digest for block in blocks]),
            blocks[0].parent,
            sum(len(block.buffer) for block in blocks),
            self._host,
        )
        placed = await self._masters.ask(request, wire.Placed, deadline)
        if len(placed.present) != len(blocks):
            raise Unavailable(f"a master answered for {len(placed.present)} of {len(blocks)}")
        return placed

    async def _report_corrupt(
        self,
        namespace: Namespace,
        part: int,
        corrupt: list[tuple[str, list[bytes]]],
        deadline: float,
    ) -> None:
        for server, digests in corrupt:
            log.error("wrong checksum", server=server, blocks=len(digests))
            self.counters["corrupt"] += len(digests)
            await _together(
                [
                    self._servers.call(
                        server,
                        functools.partial(_suspect, namespace, part, digests, deadline),
                        deadline,
                    )
                ]
            )

    def _count(self, results: Sequence[ReadResult]) -> None:
        hits = 0
        for status, size in results:
            if status is ReadStatus.HIT:
                hits += 1
                self.counters["read_bytes"] += size
            else:
                self.counters[f"read_{status.name.lower()}"] += 1
        self.counters["read_hit"] += hits


class _Masters:
    """Any master that answers. The one that answered last is asked first."""

    def __init__(self, network: Network, config: ClientConfig) -> None:
        self._links: list[Link] = [network.connect(address) for address in config.masters]
        self._attempt_s = config.attempt_s
        self._preferred = 0

    async def ask(self, message: wire.Message, answer: type[wire.M], deadline: float) -> wire.M:
        """The first good answer. Raises MasterLost when no master answers by the deadline."""
        loop = asyncio.get_running_loop()
        type, body = wire.encode(message)
        problems: list[str] = []
        for turn in range(len(self._links)):
            index = (self._preferred + turn) % len(self._links)
            link = self._links[index]
            # The last one gets all the time that is left; earlier ones leave some for it.
            last = turn == len(self._links) - 1
            until = deadline if last else min(deadline, loop.time() + self._attempt_s / 2)
            if len(self._links) == 1:
                until = min(deadline, loop.time() + self._attempt_s)
            try:
                got = wire.decode_answer(answer, *await link.request(type, body, deadline=until))
            except (Unavailable, Overloaded, PeerError) as error:
                problems.append(str(error))
                continue
            self._preferred = index
            return got
        raise MasterLost(f"no master answers: {'; '.join(problems)}; is `kvpool master` running?")

    def close(self) -> None:
        for link in self._links:
            link.close()


class _Path(NamedTuple):
    """One way to reach one server."""

    scheme: str
    address: str


class _Server:
    """What a client knows of one server: how to reach it, and how that went."""

    def __init__(self, server: str) -> None:
        self.server = server
        self.epoch = 0
        self.paths: list[_Path] = []
        self.channels: dict[_Path, Channel] = {}
        self.connecting = asyncio.Lock()
        self.retry_at = 0.0  # left alone until then
        self.failures = 0


class _Servers:
    """Channels to servers: the best common transport first, the next one when it fails."""

    def __init__(
        self,
        config: ClientConfig,
        cluster: str,
        name: str,
        host: str,
        transports: Mapping[str, Transport],
        masters: _Masters,
        counters: Counter[str],
        chance: random.Random | None,
    ) -> None:
        self._config = config
        self._cluster = cluster
        self._name = name
        self._transports = transports
        self._masters = masters
        self._counters = counters
        self._chance = chance or random.SystemRandom()
        self._servers: dict[str, _Server] = {}
        self._host = host
        self._broken: dict[_Path, float] = {}  # a path that failed is tried again after this
        self._dying: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        return f"servers={sorted(self._servers)}"

    async def refresh(self, deadline: float) -> list[Member]:
        """Ask who is there. A server with a new epoch is another server: its channels go."""
        answer = await self._masters.ask(wire.Members(), wire.MembersAre, deadline)
        members = []
        for info in answer.members:
            fields = {name: getattr(info, name) for name in info.__struct_fields__}
            fields["addresses"] = tuple(info.addresses)
            fields["tiers"] = tuple(info.tiers)
            members.append(Member(**fields))
            known = self._servers.setdefault(info.server, _Server(info.server))
            if known.epoch != info.epoch:
                known.epoch = info.epoch
                known.retry_at = known.failures = 0
                self._drop_channels(known)
            known.paths = self._usable(info.addresses, info.host)
        return members

    async def call(
        self, server: str, operation: Callable[[Channel], Awaitable[T]], deadline: float
    ) -> T:
        """Run `operation` on the best path that works. Raises ServerLost when none does."""
        known = await self._known(server, deadline)
        loop = asyncio.get_running_loop()
        problem: KvpoolError | None = None
        for path in self._order(known):
            try:
                channel = await self._connected(known, path, deadline)
                result = await operation(channel)
            except (Unavailable, PeerError) as error:
                problem = error
                self._failed(known, path, error)
                if loop.time() >= deadline:
                    raise DeadlineExceeded(f"server {server}: {error}") from None
                continue
            known.failures = 0
            return result
        known.failures += 1
        backoff_s = min(_BACKOFF_S * 2**known.failures, _BACKOFF_S_MAX)
        known.retry_at = loop.time() + backoff_s * self._chance.uniform(0.5, 1.0)
        known.paths = []  # ask again where it is
        raise ServerLost(f"server {server}: {problem or 'no common transport'}")

    async def write(
        self, server: str, writing: Writing, blocks: Sequence[Outgoing], deadline: float
    ) -> list[WriteStatus]:
        """`Channel.write` on the best path that works."""
        return await self.call(
            server, lambda channel: channel.write(writing, blocks, deadline=deadline), deadline
        )

    async def viewable(self, server: str, deadline: float) -> Viewable:
        """A channel that shows memory in place. Raises Overloaded when no path does."""
        known = await self._known(server, deadline)
        for path in self._order(known):
            try:
                channel = await self._connected(known, path, deadline)
            except (Unavailable, PeerError) as error:
                self._failed(known, path, error)
                continue
            if isinstance(channel, Viewable):
                return channel
        raise Overloaded(f"server {server} has no transport here that can show its memory")

    async def close(self) -> None:
        for known in self._servers.values():
            self._drop_channels(known)
        if self._dying:
            await asyncio.wait(self._dying)

    async def _known(self, server: str, deadline: float) -> _Server:
        known = self._servers.get(server)
        loop = asyncio.get_running_loop()
        if known is not None and loop.time() < known.retry_at:
            raise ServerLost(f"server {server} did not answer; next try in a moment")
        if known is None or not known.paths:
            await self.refresh(deadline)
            known = self._servers.get(server)
        if known is None:
            raise ServerLost(f"no master knows server {server}")
        return known

    def _usable(self, addresses: Sequence[str], host: str) -> list[_Path]:
        """The paths that this client can take, in its order of preference."""
        by_scheme = {address.partition("://")[0]: address for address in addresses}
        return [
            _Path(scheme, by_scheme[scheme])
            for scheme, transport in self._transports.items()
            if scheme in by_scheme and (host == self._host or not transport.same_host)
        ]

    def _order(self, known: _Server) -> list[_Path]:
        """Preference order, except that a path that failed lately comes last."""
        now = asyncio.get_running_loop().time()
        return sorted(known.paths, key=lambda path: self._broken.get(path, 0.0) > now)

    async def _connected(self, known: _Server, path: _Path, deadline: float) -> Channel:
        channel = known.channels.get(path)
        if channel is not None:
            return channel
        async with known.connecting:
            channel = known.channels.get(path)
            if channel is None:
                until = min(deadline, asyncio.get_running_loop().time() + self._config.attempt_s)
                try:
                    channel = await self._transports[path.scheme].connect(
                        path.address, cluster=self._cluster, client=self._name, deadline=until
                    )
                except ConfigError as error:  # the server's mistake, not the caller's
                    raise LinkBroken(str(error)) from None
                known.channels[path] = channel
                log.debug("connected", server=known.server, address=path.address)
        return channel

    def _failed(self, known: _Server, path: _Path, error: KvpoolError) -> None:
        """After a failed call the channel is not trusted any more."""
        channel = known.channels.pop(path, None)
        if channel is not None:
            self._bury(channel)
        self._broken[path] = asyncio.get_running_loop().time() + _BACKOFF_S_MAX
        self._counters[f"failed_{path.scheme}"] += 1
        log.warning("transport failed", server=known.server, address=path.address, why=str(error))

    def _drop_channels(self, known: _Server) -> None:
        while known.channels:
            self._bury(known.channels.popitem()[1])

    def _bury(self, channel: Channel) -> None:
        """Abort now; give its memory back when its last copy has stopped."""
        channel.abort()
        task = asyncio.get_running_loop().create_task(channel.close())
        self._dying.add(task)
        task.add_done_callback(self._dying.discard)


def _batches(positions: Sequence[int], sizes: Sequence[int]) -> list[list[int]]:
    """Consecutive positions in batches that a channel takes in one call."""
    batches: list[list[int]] = []
    held = 0
    for position in positions:
        size = sizes[position]
        if not batches or len(batches[-1]) >= BATCH_BLOCKS_MAX or held + size > _BATCH_BYTES:
            batches.append([])
            held = 0
        batches[-1].append(position)
        held += size
    return batches


def _grouped(
    missing: Sequence[int], places: list[list[str]], sizes: Sequence[int]
) -> list[tuple[str, list[int]]]:
    """Take the next server of each block; blocks of one server go together, in batches."""
    by_server: dict[str, list[int]] = {}
    for position in missing:
        by_server.setdefault(places[position].pop(), []).append(position)
    return [
        (server, batch)
        for server, positions in by_server.items()
        for batch in _batches(positions, sizes)
    ]


async def _together(calls: Sequence[Awaitable[T]]) -> list[T | KvpoolError]:
    """Run calls side by side; those that the other side failed give their error as answer.

    If this is cancelled, it waits until every call has stopped: none may go on in the caller's
    buffers.
    """
    if len(calls) == 1:
        return [await _outcome(calls[0])]
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(_outcome(call)) for call in calls]
    return [task.result() for task in tasks]


async def _outcome(call: Awaitable[T]) -> T | KvpoolError:
    try:
        return await call
    except (Unavailable, PeerError, Overloaded) as error:
        return error


async def _remove(
    namespace: Namespace, digests: Sequence[bytes], deadline: float, channel: Channel
) -> list[bool]:
    return await channel.remove(namespace, digests, deadline=deadline)


async def _suspect(
    namespace: Namespace, part: int, digests: Sequence[bytes], deadline: float, channel: Channel
) -> list[bool]:
    return await channel.suspect(namespace, part, digests, deadline=deadline)


def _why(error: KvpoolError) -> ReadStatus:
    """The miss that an error means for a reader."""
    if isinstance(error, DeadlineExceeded):
        return ReadStatus.DEADLINE
    if isinstance(error, MasterLost):
        return ReadStatus.NO_MASTER
    if isinstance(error, Overloaded):
        return ReadStatus.REFUSED
    return ReadStatus.SERVER_LOST


def _runs(found: wire.Found, first: int, count: int) -> list[Run]:
    """The runs of an answer, moved to their place in the whole chain."""
    runs = []
    position = 0
    for run_first, run_last, replicas in found.runs:
        if not position <= run_first <= run_last < count:
            raise Unavailable(f"a master answered with run {run_first}-{run_last} of {count}")
        position = run_last + 1
        runs.append(Run(first + run_first, first + run_last, tuple(Replica(*r) for r in replicas)))
    return runs


def _read_status(value: int) -> ReadStatus:
    try:
        return ReadStatus(value)
    except ValueError:
        return ReadStatus.NEVER_WRITTEN


def _miss(value: int) -> ReadStatus:
    """The reason of a miss; a master that calls it a hit knows none."""
    status = _read_status(value)
    return ReadStatus.NEVER_WRITTEN if status.hit else status


def _check_part(namespace: Namespace, part: int) -> None:
    if not 0 <= part < namespace.parts:
        raise BadKey(f"part {part} of a namespace with {namespace.parts} part(s)")


def _check_parents(parents: Sequence[bytes], digests: Sequence[bytes], size: int) -> None:
    if len(parents) != len(digests):
        raise BadKey(f"{len(parents)} parents for {len(digests)} keys")
    for index, (parent, digest) in enumerate(zip(parents, digests, strict=True)):
        if parent != ROOT and len(parent) != size:
            raise BadKey(f"parent {index} has {len(parent)} bytes, the keys have {size}")
        if parent == digest:
            raise BadKey(f"key {index} ({digest.hex()[:12]}) names itself as its parent")


def _readable(buffer: Buffer, index: int) -> memoryview:
    """The bytes of a buffer. Raises BadBuffer or TooLarge."""
    try:
        view = memoryview(buffer)
    except TypeError:
        raise BadBuffer(
            f"buffer {index} is {type(buffer).__name__}, expected contiguous memory such as bytes, "
            "bytearray or a numpy array"
        ) from None
    if not view.contiguous:
        raise BadBuffer(f"buffer {index} is not contiguous: copy it, or pass a slice that is")
    view = view.cast("B") if view.format != "B" or view.ndim != 1 else view
    if not len(view):
        raise BadBuffer(f"buffer {index} is empty: a block has at least one byte")
    if len(view) > BLOCK_SIZE_MAX:
        raise TooLarge(f"buffer {index} has {len(view)} bytes, a block at most {BLOCK_SIZE_MAX}")
    return view


def _writable(buffer: Buffer, index: int) -> memoryview:
    view = _readable(buffer, index)
    if view.readonly:
        raise BadBuffer(f"buffer {index} is read-only: a block cannot be read into it")
    return view
