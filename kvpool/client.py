"""The client: asks a master where, and servers what.

A read in one breath: `Pool.read` groups the blocks by the best server that holds them, each group
goes down that server's channel into the caller's buffers, and what did not come is asked of the
next replica, until everything is there or every place has been tried. A miss is an answer, never
an exception; exceptions are for calls that are wrong in themselves.
"""

from __future__ import annotations

import asyncio
import enum
import functools
import itertools
import os
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Final

from kvpool import logs, pieces, registry
from kvpool.config import ClientConfig, transport_settings
from kvpool.errors import (
    BadBuffer,
    BadKey,
    Closed,
    DeadlineExceeded,
    KvpoolError,
    MasterLost,
    Overloaded,
    PeerError,
    TooLarge,
    Unavailable,
    UsageError,
)
from kvpool.hosts import Host, this_host
from kvpool.link import ZmqNetwork, why_silent
from kvpool.protocols import (
    Channel,
    Network,
    Reading,
    Transport,
    View,
    Writing,
)
from kvpool.reach import Masters, Patience, Servers, Silent, together
from kvpool.sightings import Sighting, Sightings
from kvpool.staging import OnDevice, Rows, Seen, Staging, on_device
from kvpool.types import (
    BATCH_BLOCKS_MAX,
    COPIES_MAX,
    ROOT,
    BlockKey,
    Buffer,
    Cluster,
    Explanation,
    Gathered,
    HintStatus,
    Match,
    Member,
    Memory,
    Namespace,
    ReadResult,
    ReadStatus,
    Replica,
    Run,
    Scattered,
    Tag,
    WriteStatus,
    check_digest_size,
    check_digests,
    check_resume_in,
    check_session,
)
from kvpool.wire import messages as wire

log = logs.get("kvpool.client")

#: Keys in one question to a master: an answer where every block lies elsewhere must fit, too.
_FIND_KEYS: Final = 4096
#: Pages of a list that a master may send.
_PAGES_MAX: Final = 1000
#: Bytes that one call to a channel carries; larger batches go in several.
_BATCH_BYTES: Final = 256 << 20


#: A block with one of these has found no home yet: the next server is asked.
_HOMELESS: Final = (
    WriteStatus.NO_SPACE,
    WriteStatus.SERVER_LOST,
    WriteStatus.TOO_LARGE,
    WriteStatus.DEADLINE,
)


class _FoundBy(enum.Enum):
    """Who says where the blocks of a read are."""

    MATCH = enum.auto()
    MASTER = enum.auto()
    SIGHTING = enum.auto()


@dataclass(slots=True)
class _Fetch:
    """One `Pool.read` on its way; lists run parallel to the digests."""

    reading: Reading
    digests: Sequence[bytes]
    memory: list[tuple[memoryview, ...]]
    device: Mapping[int, OnDevice]  # positions whose memory is there
    sizes: Sequence[int]
    results: list[ReadResult]
    places: list[list[str]]  # servers to ask, best last
    deadline: float
    found_by: _FoundBy
    others: bool = False  # somebody else may have them, too, but it is not known who
    silent: set[str] = field(default_factory=set)
    given_up: set[str] = field(default_factory=set)
    corrupt: dict[str, dict[bytes, None]] = field(default_factory=dict)

    def has_others(self, position: int) -> bool:
        """Whether somebody else may have the block, as far as is known."""
        return self.others or bool(self.places[position])

    def leave(self, server: str, positions: Iterable[int]) -> None:
        """It was silent: others are asked first, who may be no better; then it is asked again."""
        self.silent.add(server)
        if self.found_by is not _FoundBy.SIGHTING:  # a master will name it again
            for position in positions:
                self.places[position].insert(0, server)


async def connect(
    *masters: str, config: ClientConfig | None = None, cluster: str | Cluster = "default"
) -> Pool:
    """Open a pool on the masters at `host:port`; any one of them is enough.

    A cluster with a secret is `Cluster(name, secret)`. Raises MasterLost when none answers within
    the configured time.
    """
    cluster = cluster if isinstance(cluster, Cluster) else Cluster(cluster)
    if config is None:
        config = ClientConfig(masters=list(masters)) if masters else ClientConfig()
    settings = transport_settings(config)
    transports = registry.transports(config.transports, settings=settings)
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
    except MasterLost as error:
        await pool.close()
        raise MasterLost(f"{error}{await why_silent(config.masters, cluster)}") from None
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
        cluster: Cluster,
        network: Network,
        transports: Mapping[str, Transport],
        owns_network: bool = False,
        host: Host | None = None,
        chance: random.Random | None = None,
    ) -> None:
        self._config = config
        self._network = network
        self._owns_network = owns_network
        self._loop = asyncio.get_running_loop()
        self._pid = os.getpid()
        self._closed = False
        self.counters: Counter[str] = Counter()
        self._masters = Masters(network, config)
        self._host = host or this_host()
        self._staging = Staging(config.device_staging, self.counters)
        self._servers = Servers(
            config, cluster, self._host, transports, self._masters, self.counters, chance
        )
        self._sightings = Sightings()

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
                runs += _runs(found, first, len(digests))
            except Unavailable:
                return Match(tuple(runs), first, ReadStatus.NO_MASTER)
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

    async def namespaces(self, *, timeout: float | None = None) -> list[tuple[Namespace, int]]:
        """The namespaces that have blocks, by name, and how many each. Raises MasterLost.

        Of a thousand pages at most: more are not looked at.
        """
        deadline = self._begin(timeout)
        found: list[tuple[Namespace, int]] = []
        for _ in range(_PAGES_MAX):
            last = found[-1][0] if found else None
            question = wire.Namespaces(last.name, last.parts) if last else wire.Namespaces()
            answer = await self._masters.ask(question, wire.NamespacesAre, deadline)
            try:
                found += [(Namespace(name, parts), n) for name, parts, n in answer.namespaces]
            except BadKey as error:
                raise MasterLost(f"a master answered with {error}") from None
            if not answer.more or not answer.namespaces:
                break
        return found

    # --- reading -------------------------------------------------------------------------

    async def read(
        self,
        namespace: Namespace,
        digests: Sequence[bytes],
        buffers: Sequence[Seen],
        *,
        part: int = 0,
        match: Match | None = None,
        timeout: float | None = None,
    ) -> list[ReadResult]:
        """Fill each buffer with its block, or say why not: one result per block.

        A buffer may be a list of several pieces of memory, which are filled one after the other.
        It may lie on a CUDA device: the device then waits for what the calling thread has asked
        of it on its current stream, and has the bytes when a hit is returned. With the `match`
        that these digests (or a longer chain that begins with them) were found by, no master is
        asked again. When it returns or raises, nobody writes to the buffers any more; buffers of
        misses may have been written to, and their contents mean nothing. Raises Unavailable when
        a device fails.
        """
        deadline = self._begin(timeout)
        check_digests(digests)
        _check_part(namespace, part)
        if len(buffers) != len(digests):
            raise BadBuffer(f"{len(buffers)} buffers for {len(digests)} keys")
        memory, device, sizes = _split(buffers, pieces.writable)
        found_by = _FoundBy.MASTER if match is None else _FoundBy.MATCH
        seen = self._sightings.of(namespace, part, digests) if match is None else []
        if seen:
            found_by = _FoundBy.SIGHTING
            results = [ReadResult(ReadStatus.NOT_YET)] * len(seen)
            places = [[sighting.server] for sighting in seen]
        else:
            results, places = await self._locate(namespace, digests, part, match, deadline)
        reading = Reading(namespace, part, self._config.verify)
        fetch = _Fetch(reading, digests, memory, device, sizes, results, places, deadline, found_by)
        fetch.others = not all(sighting.alone for sighting in seen)
        await self._fetch_all(fetch, range(len(digests)))
        if seen:
            await self._fetch_moved(fetch)
        await self._report_corrupt(fetch)
        self._count(results)
        for position, result in enumerate(results):
            if result.status is ReadStatus.BUFFER_TOO_SMALL:
                raise BadBuffer(
                    f"buffer {position} has {sizes[position]} bytes, block "
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
            while missing:
                for server, group in _grouped(missing, places, [0] * len(digests)):
                    wanted = [digests[i] for i in group]
                    try:
                        async with Patience(self._config.attempt_s) as patience:
                            channel = await self._servers.viewable(server, deadline)
                            shown = await stack.enter_async_context(
                                channel.read_view(
                                    reading._replace(patience=patience), wanted, deadline=deadline
                                )
                            )
                    except (Unavailable, PeerError, Overloaded) as error:
                        shown = [View(_why(error))] * len(group)
                    for position, view in zip(group, shown, strict=True):
                        views[position] = view
                        if view.status is ReadStatus.NOT_YET:  # on its way from a slow tier
                            places[position].append(server)
                missing = [i for i in missing if not views[i].status.hit and places[i]]
            self._count([ReadResult(view.status) for view in views])
            yield views

    # --- writing -------------------------------------------------------------------------

    async def write(
        self,
        namespace: Namespace,
        digests: Sequence[bytes],
        buffers: Sequence[Seen],
        *,
        parent: bytes = ROOT,
        parents: Sequence[bytes] | None = None,
        part: int = 0,
        copies: int = 1,
        visible: bool = True,
        session: str = "",
        resume_in: float | None = None,
        timeout: float | None = None,
    ) -> list[WriteStatus]:
        """Store blocks; one status per block.

        The digests are a chain: each block's parent is the one before it, and the first one's is
        `parent` (ROOT at the start of a prompt), unless `parents` names them all. `copies` are
        on servers of their own: with fewer servers, or no room on some, there are fewer, which
        `counters["copies_missing"]` tells; a block with one copy is stored. A buffer may be a list
        of several pieces of memory: the block is their concatenation. It may lie on a CUDA device:
        what is stored is what the calling thread's current stream leaves there. With `visible`
        the call returns when every living master can be asked for the blocks. The buffers are the
        caller's again when it returns or raises.

        With a `session`, the blocks are part of what that conversation says: when it ends, or
        goes on from an earlier point, those that nobody else uses go first. `resume_in` says in
        how many seconds its next prompt is expected, as `hint` does, but in time for this write.
        """
        deadline = self._begin(timeout)
        size = check_digests(digests)
        _check_part(namespace, part)
        tag = _tag(session, resume_in)
        if not 1 <= copies <= COPIES_MAX:
            raise UsageError(f"copies is {copies}, expected 1 to {COPIES_MAX}")
        if len(buffers) != len(digests):
            raise BadBuffer(f"{len(buffers)} buffers for {len(digests)} keys")
        if parents is None:
            parents = [parent, *digests[:-1]]
        _check_parents(parents, digests, size)
        memory, device, sizes = _split(buffers, pieces.readable)
        writing = Writing(namespace, part, visible, tag)

        async def send(rows: Rows) -> dict[int, WriteStatus]:
            blocks = [Gathered(digests[i], parents[i], rows[i], sizes[i]) for i in rows]
            written = await self._write_blocks(writing, blocks, copies, deadline)
            return dict(zip(rows, written, strict=True))

        statuses = await send({i: views for i, views in enumerate(memory) if i not in device})
        if device:
            statuses |= await self._staging.write(device, send, deadline)
        for status, count in Counter(statuses.values()).items():
            self.counters[f"write_{status.name.lower()}"] += count
        for position, status in statuses.items():
            if status is WriteStatus.TOO_LARGE:
                raise TooLarge(
                    f"block {digests[position].hex()[:12]} has {sizes[position]} "
                    "bytes, more than any server's whole segment"
                )
        return [statuses[position] for position in range(len(digests))]

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
        (view,) = pieces.readable(buffer, 0)
        block = Gathered(digest, ROOT, (view,), len(view))
        (status,) = await self._servers.write(
            server, Writing(namespace, 0, True), [block], deadline
        )
        return status

    async def end(self, session: str, *, timeout: float | None = None) -> HintStatus:
        """This conversation is over: of its blocks those that no other uses go first.

        Advice, as `hint` is: it travels over one master to every server within a heartbeat, and
        never raises for what the pool cannot do.
        """
        check_session(session)
        return await self._hint(wire.Hint(session, None), timeout)

    async def hint(
        self, session: str, *, resume_in: float, timeout: float | None = None
    ) -> HintStatus:
        """In `resume_in` seconds this conversation is expected to go on; until then it stays.

        Of all that are expected the furthest goes first. One that does not come lapses. The
        status is the master's; what the servers made of it is in their counters.
        """
        check_session(session)
        check_resume_in(resume_in)
        return await self._hint(wire.Hint(session, resume_in), timeout)

    async def _hint(self, hint: wire.Hint, timeout: float | None) -> HintStatus:
        try:
            hinted = await self._masters.ask(hint, wire.Hinted, self._begin(timeout))
            status = HintStatus(hinted.status)
        except (Unavailable, ValueError):
            status = HintStatus.REFUSED
        self.counters[f"hint_{status.name.lower()}"] += 1
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
            answers = await together(
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
            self._staging.close()
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
        # What a match does not cover was not asked for: never a hit, whatever the match says.
        unknown = ReadStatus.NO_MASTER if match is None else match.stopped
        unknown = ReadStatus.NEVER_WRITTEN if unknown.hit else unknown
        results = [ReadResult(unknown)] * len(digests)
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
                    runs += _runs(found, first, len(batch))
                except Unavailable:
                    break
                found_at = {i for run in runs for i in range(run.first, run.last + 1)}
                misses = iter(found.misses)
                for position in range(first, first + len(batch)):
                    if position not in found_at:
                        results[position] = ReadResult(_miss(next(misses, 0)))
        for run in runs:
            here = (replica.server for replica in run.replicas if replica.part == part)
            servers = self._servers.best_first(here)[::-1]
            for position in range(run.first, min(run.last + 1, len(digests))):
                places[position] = list(servers)
        return results, places

    async def _fetch(self, fetch: _Fetch, positions: Iterable[int]) -> None:
        """Read blocks from one server after the other until they are there or no place is left.

        A block is asked of one server at a time, so its buffer has one writer; a server that is
        silent is left before the next one is asked.
        """
        missing = [i for i in positions if not fetch.results[i].status.hit and fetch.places[i]]
        groups = _grouped(missing, fetch.places, fetch.sizes)
        if len(groups) == 1:
            await self._fetch_from(fetch, *groups[0])
        elif groups:
            async with asyncio.TaskGroup() as group:
                for server, batch in groups:
                    group.create_task(self._fetch_from(fetch, server, batch))

    async def _fetch_moved(self, fetch: _Fetch) -> None:
        """What was not where it had been seen: let a master say where it is."""
        missing = [i for i, result in enumerate(fetch.results) if not result.status.hit]
        if not missing or self._loop.time() >= fetch.deadline:
            return
        namespace, part, *_ = fetch.reading
        digests = [fetch.digests[i] for i in missing]
        self._sightings.lost(digests)
        fetch.found_by, fetch.others = _FoundBy.MASTER, False
        results, places = await self._locate(namespace, digests, part, None, fetch.deadline)
        for position, result, servers in zip(missing, results, places, strict=True):
            fetch.places[position] = [s for s in servers if s not in fetch.given_up]
            if fetch.places[position] or not servers:
                fetch.results[position] = result
        await self._fetch_all(fetch, missing)

    async def _fetch_all(self, fetch: _Fetch, positions: Iterable[int]) -> None:
        """Blocks for the host's memory as they come, those for a device by way of it."""
        if not fetch.device:
            return await self._fetch(fetch, positions)
        await self._fetch(fetch, [i for i in positions if i not in fetch.device])
        staged = {i: fetch.device[i] for i in positions if i in fetch.device and fetch.places[i]}
        if staged:
            await self._fetch_staged(fetch, staged)

    async def _fetch_staged(self, fetch: _Fetch, blocks: Mapping[int, OnDevice]) -> None:
        """The same for blocks whose memory lies on a device: rows of the host stand in for it."""

        async def into(rows: Rows) -> Mapping[int, ReadResult]:
            for position, row in rows.items():
                fetch.memory[position] = row
            await self._fetch(fetch, rows)
            return {position: fetch.results[position] for position in rows}

        staged = await self._staging.read(blocks, into, fetch.deadline)
        for position, result in staged.items():
            fetch.results[position] = result

    async def _fetch_from(self, fetch: _Fetch, server: str, positions: list[int]) -> None:
        """Ask one server until it has nothing more for us, then the next for what is missing.

        A server that is bringing blocks from a slow tier is asked again and again; where another
        has them, too, it must have something new within `hedge_s`.
        """
        heard = self._loop.time()
        waiting = positions
        while waiting:
            hedged = fetch.has_others(waiting[0]) and server not in fetch.silent
            await self._ask(fetch, server, waiting)
            now = self._loop.time()
            still = [i for i in waiting if fetch.results[i].status is ReadStatus.NOT_YET]
            if len(still) < len(waiting):
                heard = now
            waiting = still
            if waiting and hedged and now - heard >= self._config.hedge_s:
                fetch.leave(server, waiting)
                break
        await self._fetch(fetch, positions)

    async def _ask(self, fetch: _Fetch, server: str, positions: list[int]) -> None:
        """One question to one server, and what came of it."""
        blocks = [Scattered(fetch.digests[i], fetch.memory[i], fetch.sizes[i]) for i in positions]
        hedged = fetch.has_others(positions[0]) and server not in fetch.silent
        silence_s = self._config.hedge_s if hedged else self._config.attempt_s
        try:
            async with Patience(silence_s) as patience:
                reading = fetch.reading._replace(patience=patience)
                answer = await self._servers.call(
                    server,
                    lambda channel: pieces.read(channel, reading, blocks, fetch.deadline),
                    fetch.deadline,
                    sum(fetch.sizes[i] for i in positions),
                    lambda results: sum(result.size for result in results),
                )
        except (Unavailable, PeerError, Overloaded) as error:
            answer = [ReadResult(_why(error))] * len(positions)
            if isinstance(error, Silent):
                self._servers.silent(server, given_up=not hedged)
                if hedged:
                    fetch.leave(server, positions)
                else:
                    fetch.silent.add(server)
                    fetch.given_up.add(server)
        seen = []
        for position, result in zip(positions, answer, strict=True):
            fetch.results[position] = result
            if result.status is ReadStatus.HIT:
                seen.append(fetch.digests[position])
            elif result.status is ReadStatus.CORRUPT:
                fetch.corrupt.setdefault(server, {})[fetch.digests[position]] = None
        if fetch.found_by is _FoundBy.MASTER:
            namespace, part, *_ = fetch.reading
            alone = not fetch.places[positions[0]]
            self._sightings.saw(Sighting(namespace, part, server, alone), seen)

    async def _write_blocks(
        self, writing: Writing, blocks: Sequence[Gathered], copies: int, deadline: float
    ) -> list[WriteStatus]:
        """As many as there are, in batches; what follows one that is late is late, too."""
        statuses = [WriteStatus.DEADLINE] * len(blocks)
        for group in _batches(range(len(blocks)), [block.size for block in blocks]):
            written = await self._write_batch(writing, [blocks[i] for i in group], copies, deadline)
            for position, status in zip(group, written, strict=True):
                statuses[position] = status
            if any(status is WriteStatus.DEADLINE for status in written):
                break
        return statuses

    async def _write_batch(
        self, writing: Writing, blocks: Sequence[Gathered], copies: int, deadline: float
    ) -> list[WriteStatus]:
        """Place, then try the servers in that order until every block has its copies."""
        try:
            placed = await self._place(writing.namespace, blocks, copies, deadline)
        except DeadlineExceeded:
            return [WriteStatus.DEADLINE] * len(blocks)
        except Unavailable:
            return [WriteStatus.NO_MASTER] * len(blocks)
        statuses = [WriteStatus.SERVER_LOST] * len(blocks)
        needed = [copies] * len(blocks)
        made = [0] * len(blocks)
        for position, already in enumerate(placed.copies):
            # The pool has a whole block only if every part is there; ours may be the one that
            # has to be written again.
            if already >= copies and writing.namespace.parts == 1:
                statuses[position] = WriteStatus.ALREADY_STORED
                needed[position] = 0
                made[position] = copies
        servers = iter(placed.servers)
        while any(needed) and self._loop.time() < deadline:
            batches = [
                (server, [i for i, missing in enumerate(needed) if missing > turn])
                for turn, server in enumerate(itertools.islice(servers, max(needed)))
            ]
            if not batches:
                break
            answers = await together(
                [
                    self._servers.write(server, writing, [blocks[i] for i in batch], deadline)
                    for server, batch in batches
                ]
            )
            for (server, batch), answer in zip(batches, answers, strict=True):
                seen = []
                for index, position in enumerate(batch):
                    status = answer[index] if not isinstance(answer, KvpoolError) else _lost(answer)
                    statuses[position] = _better(statuses[position], status)
                    needed[position] -= status not in _HOMELESS
                    if status.present:
                        made[position] += 1
                        seen.append(blocks[position].digest)
                namespace, part, *_ = writing
                self._sightings.saw(Sighting(namespace, part, server, copies == 1), seen)
        if copies > 1:
            self.counters["copies_missing"] += sum(max(0, copies - count) for count in made)
        return statuses

    async def _place(
        self, namespace: Namespace, blocks: Sequence[Gathered], copies: int, deadline: float
    ) -> wire.Placed:
        request = wire.Place(
            namespace.name,
            namespace.parts,
            len(blocks[0].digest),
            b"".join([block.digest for block in blocks]),
            blocks[0].parent,
            sum(block.size for block in blocks),
            self._host.id,
            copies,
        )
        placed = await self._masters.ask(request, wire.Placed, deadline)
        if len(placed.copies) != len(blocks):
            raise Unavailable(f"a master answered for {len(placed.copies)} of {len(blocks)}")
        return placed

    async def _report_corrupt(self, fetch: _Fetch) -> None:
        namespace, part = fetch.reading.namespace, fetch.reading.part
        for server, digests in [(s, list(d)) for s, d in fetch.corrupt.items()]:
            log.error("wrong checksum", server=server, blocks=len(digests))
            self.counters["corrupt"] += len(digests)
            suspect = functools.partial(_suspect, namespace, part, digests, fetch.deadline)
            await together([self._servers.call(server, suspect, fetch.deadline)])

    def _count(self, results: Sequence[ReadResult]) -> None:
        hits = 0
        for status, size in results:
            if status is ReadStatus.HIT:
                hits += 1
                self.counters["read_bytes"] += size
            else:
                self.counters[f"read_{status.name.lower()}"] += 1
        self.counters["read_hit"] += hits


def _split(
    buffers: Sequence[Seen], look: Callable[[Memory, int], tuple[memoryview, ...]]
) -> tuple[list[tuple[memoryview, ...]], dict[int, OnDevice], list[int]]:
    """The memory of each block, of those on a device apart, and the sizes of all."""
    memory: list[tuple[memoryview, ...]] = []
    device: dict[int, OnDevice] = {}
    sizes = []
    for position, buffer in enumerate(on_device(buffers)):
        if isinstance(buffer, OnDevice):
            device[position] = buffer
            memory.append(())
            sizes.append(buffer.size)
        else:
            views = look(buffer, position)
            memory.append(views)
            sizes.append(pieces.size(views))
    return memory, device, sizes


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
    """Take the next server of each block; blocks of one server go together, in batches.

    Those that nobody else has are kept apart: they are worth waiting for.
    """
    groups: dict[tuple[str, bool], list[int]] = {}
    for position in missing:
        server = places[position].pop()
        groups.setdefault((server, bool(places[position])), []).append(position)
    return [
        (server, batch)
        for (server, _), positions in groups.items()
        for batch in _batches(positions, sizes)
    ]


async def _remove(
    namespace: Namespace, digests: Sequence[bytes], deadline: float, channel: Channel
) -> list[bool]:
    return await channel.remove(namespace, digests, deadline=deadline)


async def _suspect(
    namespace: Namespace, part: int, digests: Sequence[bytes], deadline: float, channel: Channel
) -> list[bool]:
    return await channel.suspect(namespace, part, digests, deadline=deadline)


def _lost(error: KvpoolError) -> WriteStatus:
    late = isinstance(error, DeadlineExceeded)
    return WriteStatus.DEADLINE if late else WriteStatus.SERVER_LOST


def _better(one: WriteStatus, other: WriteStatus) -> WriteStatus:
    """Of two servers' answers for one block: stored beats being stored beats neither."""
    for status in (WriteStatus.STORED, WriteStatus.ALREADY_STORED, WriteStatus.IN_PROGRESS):
        if status in (one, other):
            return status
    return other


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
    """The runs of an answer, moved to their place in the whole chain.

    Raises Unavailable for an answer that cannot be true, and so is none.
    """
    runs = []
    position = covered = 0
    for run_first, run_last, replicas in found.runs:
        if not position <= run_first <= run_last < count:
            raise Unavailable(f"a master answered with run {run_first}-{run_last} of {count}")
        position = run_last + 1
        covered += position - run_first
        runs.append(Run(first + run_first, first + run_last, tuple(Replica(*r) for r in replicas)))
    if not found.misses and covered != count:
        raise Unavailable(f"a master answered for {covered} of {count} blocks")
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


def _tag(session: str, resume_in: float | None) -> Tag | None:
    if resume_in is not None:
        check_resume_in(resume_in)
    if session or resume_in is not None:
        check_session(session)
        return Tag(session, resume_in)
    return None


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
