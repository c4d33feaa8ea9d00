"""The users of a simulated pool.

Clients do what engines do: they match a prompt, read the blocks that are there and write the
others. They look up far more often than they read. `judge.py` compares each result with the ground
truth.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Final, TypeVar

from kvpool import admin
from kvpool.client.pool import Pool
from kvpool.errors import Unavailable
from kvpool.protocols import View
from kvpool.types import (
    ROOT,
    Cluster,
    Match,
    Namespace,
    ReadResult,
    ReadStatus,
    Replica,
    Run,
    WriteStatus,
)
from tests.simulation.blocks import CONTESTED, ONE, PROMPT, TWO, VERSIONS, value
from tests.simulation.control_plane import SimNetwork
from tests.simulation.judge import Judge
from tests.simulation.loop import Violation

if TYPE_CHECKING:
    from tests.simulation.loop import Process
    from tests.simulation.nodes import ServerNode
    from tests.simulation.world import World

T = TypeVar("T")


#: A call may end this much after its deadline, because it waits for a copy in progress.
_SLACK_S: Final = 0.3
_TIMEOUT_S: Final = 5.0
#: Servers and clients have told masters what they must know.
_TOLD_S: Final = 3.0
#: Longer than any hint of these users keeps blocks.
_HINTS_LAPSE_S: Final = 130.0
#: The same of what a policy infers.
_GUESSES_LAPSE_S: Final = 610.0
#: A read that had enough time, and whose server is well, has none of these results.
_NO_ANSWER: Final = (
    ReadStatus.DEADLINE,
    ReadStatus.NOT_YET,
    ReadStatus.REFUSED,
    ReadStatus.SERVER_LOST,
)


def _named(chain: Sequence[bytes]) -> bool:
    """Whether clients say of which conversation it is."""
    return chain[0][0] % 3 != 0


class SimClient:
    """A client of the cluster. After a kill, a new process continues its operations."""

    def __init__(self, world: World, name: str, host: str) -> None:
        self.name = name
        self.host = host
        self.process: Process
        self.pool: Pool
        self._world = world
        self._rng = world.rng[f"work/{name}"]
        self.restarting = False
        self._working: asyncio.Task[None] | None = None
        self._ops_left = 0
        self._pause_s = 0.1
        self._timeout_s = _TIMEOUT_S
        self._old_match: tuple[Namespace, list[bytes], Match] | None = None
        self._stale: Match | None = None  # an old match that is used again: judged less strictly
        #: Buffers of calls that have ended, with their content at that time.
        self._ended: list[tuple[bytearray, bytes]] = []

    async def start(self) -> None:
        world = self._world

        async def open() -> None:
            self.pool = Pool(
                world.client_config(),
                cluster=Cluster(),
                network=SimNetwork(world.net),
                transports=world.transports(),
                owns_network=True,
                host=world.host_of(self.process),
                rng=self._rng,
            )

        self.process = world.process(self.name, self.host)
        await self.process.spawn(open())

    def begin(self, ops: int, seconds: float) -> None:
        self._ops_left = ops
        self._pause_s = seconds / max(1, ops)
        self.resume()

    def resume(self) -> None:
        self._working = self.process.spawn(self._work(), self.name)

    async def finish(self) -> None:
        """Wait until all operations have ended, in this process or a later one."""
        while self._working is None or not self._working.done():  # an error ends it early
            if not self.process.alive and self._ops_left <= 0:
                return
            await asyncio.sleep(0.5)
        await self._working

    async def close(self) -> None:
        await self.process.spawn(self.pool.close())

    # --- working ----------------------------------------------------------------------------

    async def _work(self) -> None:
        while self._ops_left > 0:
            self._ops_left -= 1
            await asyncio.sleep(self._rng.expovariate(1 / self._pause_s))
            await self._one()
            self._check_ended()

    async def _one(self) -> None:
        world = self._world
        kinds: list[tuple[float, Callable[[], Awaitable[None]]]] = [
            (0.30, self._lookups),
            (0.28, self._read),
            (0.30, self._write),
            (0.05, self._view),
            (0.03, self._remove),
            (0.02, self._explain),
            (0.05, self._race),
            (0.04, self._lose_owner),
        ]
        if "storm" in world.plan.faults:
            kinds.append((0.02, self._storm))
        if world.plan.sessions:
            kinds += [(0.25, self._prompt), (0.02, self._end_session)]
        if world.plan.contests:
            kinds.append((0.06, self._contest))
        if world.plan.moves:
            kinds += [(0.10, self._fetch), (0.04, self._leave)]
        if world.plan.prefetches:
            kinds.append((0.15, self._prefetch))
        if world.copies is not None:
            kinds.append((0.08, self._spread))
        if world.plan.circles:
            kinds.append((0.06, self._circle))
        if world.tenants is not None:
            kinds.append((0.04, self._change_quotas))
        (operation,) = self._rng.choices([k for _, k in kinds], [share for share, _ in kinds])
        self._timeout_s = _TIMEOUT_S
        if "hurry" in world.plan.faults and self._rng.random() < 0.15:
            self._timeout_s = self._rng.choice([0.001, 0.02, 0.2])
        world.report.ops += 1
        await self._bounded(operation)

    async def _bounded(self, operation: Callable[[], Awaitable[None]]) -> None:
        """Run one operation, sometimes cancel it, and check that it ends in time (G6)."""
        world = self._world
        began, frozen = world.loop.now, self.process.frozen_s

        def spent() -> float:
            """True seconds since the start without those in which this process was frozen."""
            return world.loop.now - began - (self.process.frozen_s - frozen)

        task = asyncio.ensure_future(operation())
        limit = 3 * _TIMEOUT_S  # an operation is up to three calls
        if "cancel" in world.plan.faults and self._rng.random() < 0.15:
            await self._cancel(task)
            limit = spent() + 1.0
        while not task.done():
            await asyncio.wait([task], timeout=max(0.001, limit + _SLACK_S - spent()))
            if not task.done() and spent() > limit + _SLACK_S:
                await asyncio.sleep(0.01)  # just thawed: let its own timers fire first
                if not task.done() and spent() > limit + _SLACK_S:
                    world.loop.fail(f"G6: {operation.__name__} still runs after {spent():.3f} s")
                    return
        if not task.cancelled():
            error = task.exception()
            if isinstance(error, Unavailable):
                world.note(f"{self.name} {operation.__name__} {type(error).__name__}")
            elif error is not None:
                raise error

    async def _cancel(self, task: asyncio.Future[None]) -> None:
        if self._rng.random() < 0.5:
            for _ in range(self._rng.randint(0, 40)):
                await asyncio.sleep(0)
        else:
            await asyncio.sleep(self._rng.expovariate(300))
        if not task.done():
            self._world.report.faults["cancel"] += 1
            task.cancel()

    def _check_ended(self) -> None:
        """No byte is written to the buffers of a call that has ended (G1)."""
        for buffer, content in self._ended:
            if buffer != content:
                self._world.loop.fail("G1: a buffer changed after its call had ended")
        del self._ended[:-8]

    # --- operations ---------------------------------------------------------------------------

    def _chain(self) -> tuple[Namespace, list[bytes]]:
        chains = self._world.catalog.chains
        if self._rng.random() < 0.25:
            return self._world.catalog.last_written  # what another client has just written
        rank = min(int(self._rng.paretovariate(0.8)) - 1, len(chains) - 1)
        chain = chains[rank]
        namespace = TWO if self._rng.random() < 0.2 else ONE
        if self._world.tenants is not None and self._rng.random() < 0.7:
            namespace = self._world.tenants.namespace(self._rng)
        return namespace, chain[: self._rng.randint(1, len(chain))]

    def _session(self, chain: Sequence[bytes]) -> str:
        """The conversation that a chain is of: one for each first block."""
        return chain[0].hex()[:8] if self._world.plan.sessions else ""

    async def _prompt(self) -> None:
        """A prompt arrives, waits in a queue, and is served; sometimes it is given up."""
        namespace, chain = self._chain()
        session = self._session(chain)
        if _named(chain):
            call = self.pool.match(namespace, chain, session=session, timeout=self._timeout_s)
        else:  # as a connector looks up what no client names
            deadline = self._world.loop.time() + self._timeout_s
            call = self.pool._context.lookup.match(namespace, chain, deadline, None)
        match = await call
        for _ in range(self._rng.choice([0, 0, 1, 3])):
            await asyncio.sleep(self._rng.choice([0.05, 1.0, 2.0]))
            if self._rng.random() < 0.3:
                await self.pool.session(session).arrived(timeout=1.0)
        if self._rng.random() < 0.8 and match.length:
            await self._read_now(namespace, chain[: match.length], match)

    async def _prefetch(self) -> None:
        """A prompt waits for its engine; then it is read, as a rule."""
        world = self._world
        namespace, chain = self._chain()
        if world.plan.write_back and self._rng.random() < 0.4:
            session = f"{self.name} {self._rng.randrange(4)}"
            await self.pool.session(session).hint(
                resume_in=self._rng.choice([1.0, 4.0, 20.0]), timeout=1.0
            )
        call = self.pool.prefetch(namespace, chain, timeout=self._timeout_s)
        world.prefetches.asked(await self._timed(call, "a prefetch"))
        await asyncio.sleep(self._rng.choice([0.0, 0.05, 1.0, 3.0]))
        if self._rng.random() < 0.6:
            await self._read_now(namespace, chain, None)

    async def _change_quotas(self) -> None:
        assert self._world.tenants is not None
        self._world.tenants.change()

    async def _end_session(self) -> None:
        _, chain = self._chain()
        await self.pool.session(self._session(chain)).end(timeout=1.0)

    async def _lookups(self) -> None:
        for _ in range(self._rng.randint(1, 4)):
            namespace, chain = self._chain()
            await self._match(namespace, chain)

    async def _match(self, namespace: Namespace, chain: Sequence[bytes]) -> Match:
        began = self._world.loop.now
        match = await self._timed(
            self.pool.match(namespace, chain, timeout=self._timeout_s), "match"
        )
        self._world.note(f"{self.name} match {len(chain)} {match.length} {match.stopped}")
        Judge(self._world, began, self._timeout_s).match(namespace, chain, match)
        return match

    async def _read(self) -> None:
        namespace, chain = self._chain()
        match: Match | None = None
        if self._old_match is not None and self._rng.random() < 0.2:
            namespace, chain, match = self._old_match  # blocks may have been evicted since
            self._stale = match
        elif self._rng.random() < 0.7:
            match = await self._match(namespace, chain)
            self._old_match = namespace, chain, match
        if match is not None:
            chain = chain[: match.length + self._rng.choice([0, 0, 1])]
        if not chain:
            return
        await asyncio.sleep(self._rng.choice([0, 0, 0.01, 0.5]))
        await self._read_now(namespace, chain, match)

    async def _read_now(
        self, namespace: Namespace, chain: Sequence[bytes], match: Match | None
    ) -> list[ReadResult]:
        world = self._world
        part = self._rng.randrange(namespace.parts)
        sizes = [len(value(namespace, digest, part)) for digest in chain]
        buffers = [bytearray(size + self._rng.choice([0, 0, 64])) for size in sizes]
        began = world.loop.now
        try:
            results = await self._timed(
                self.pool.read(
                    namespace, chain, buffers, part=part, match=match, timeout=self._timeout_s
                ),
                "read",
            )
        finally:
            self._ended += [(buffer, bytes(buffer)) for buffer in buffers]
        world.note(f"{self.name} read {[int(result.status) for result in results]}")
        enough_s = self._timeout_s - world.shelf_s(len(chain))  # one by one, at worst
        judge = Judge(world, began, enough_s if match is not self._stale else 0.0)
        for digest, result, buffer in zip(chain, results, buffers, strict=True):
            judge.read(namespace, digest, part, result.status, memoryview(buffer)[: result.size])
        judge.hedge(namespace, chain, part, results, world.loop.now - began, match)
        return results

    async def _view(self) -> None:
        """read_view: look at the pool's memory itself for a while."""
        namespace, chain = self._chain()
        part = self._rng.randrange(namespace.parts)
        # A view of all of the memory would leave no space for blocks that come up from the disk.
        chain = chain[: self._world.plan.viewed_max]
        began = self._world.loop.now
        async with self.pool.read_view(
            namespace, chain, part=part, timeout=self._timeout_s
        ) as views:
            for _ in range(2):
                self._judge_views(namespace, chain, part, views, began)
                await asyncio.sleep(self._rng.choice([0, 0.02, 1.0]))
            self._judge_views(namespace, chain, part, views, began)

    def _judge_views(
        self,
        namespace: Namespace,
        chain: Sequence[bytes],
        part: int,
        views: Sequence[View],
        began: float,
    ) -> None:
        judge = Judge(self._world, began, self._timeout_s)
        for digest, view in zip(chain, views, strict=True):
            if view.status is not ReadStatus.REFUSED:  # not on this host
                data = view.data if view.data is not None else memoryview(b"")
                judge.read(namespace, digest, part, view.status, data, viewed=True)
            if view.data is not None:
                self._world.truth.probes.add("memory was viewed in place")

    async def _write(self) -> None:
        namespace, chain = self._chain()
        part = self._rng.randrange(namespace.parts)
        self._world.catalog.last_written = namespace, chain
        copies = self._rng.choice([1, 1, 2, 3])
        visible = self._rng.random() < 0.8
        session = ""
        if self._world.plan.write_back:
            session = self._rng.choice(["", f"{self.name} {self._rng.randrange(4)}"])
        if self._world.tenants is not None:
            session = self._world.tenants.session(self._rng, namespace)
        parent, shared = ROOT, len(PROMPT)
        if self._world.plan.crowds and len(chain) > shared and self._rng.random() < 0.7:
            parent, chain = chain[shared - 1], chain[shared:]  # the pool had the prompt
        await self._write_now(
            namespace,
            chain,
            part,
            parent=parent,
            copies=copies,
            visible=visible,
            session=session,
        )
        if session and self._rng.random() < 0.4:
            await self.pool.session(session).end(timeout=self._timeout_s)
        if namespace.parts > 1 and self._rng.random() < 0.7:
            await self._write_now(namespace, chain, 1 - part, visible=visible)
        if self._world.plan.disk and self._rng.random() < 0.15:
            await self._remove_now(namespace, chain)  # probably while it is copied to the disk

    async def _write_now(
        self,
        namespace: Namespace,
        chain: Sequence[bytes],
        part: int = 0,
        *,
        parent: bytes = ROOT,
        copies: int = 1,
        visible: bool = True,
        session: str = "",
    ) -> list[WriteStatus]:
        world = self._world
        buffers = [value(namespace, digest, part) for digest in chain]
        named = self._session(chain) if parent == ROOT and _named(chain) else ""
        began, missing = world.loop.now, self.pool.counters["copies_missing"]
        world.moves.write_begins(namespace, chain)
        statuses: list[WriteStatus] = []
        try:
            statuses = await self._timed(
                self.pool.write(
                    namespace,
                    chain,
                    buffers,
                    parent=parent,
                    part=part,
                    copies=copies,
                    visible=visible,
                    session=session or named,
                    timeout=self._timeout_s,
                ),
                "write",
            )
        finally:
            world.moves.write_ended(chain, statuses)
        world.note(f"{self.name} write {[int(status) for status in statuses]}")
        missing = self.pool.counters["copies_missing"] - missing
        judge = Judge(world, began, self._timeout_s)
        judge.write(namespace, chain, part, statuses, copies if not missing else 1)
        new_to_us = (
            WriteStatus.ALREADY_STORED in statuses
        )  # by another client, whose write may not have returned
        if visible and namespace is ONE and (self._rng.random() < 0.5 or new_to_us):
            wrote, began = began, world.loop.now
            match = await self._timed(
                self.pool.match(namespace, chain, timeout=self._timeout_s), "match"
            )
            judge = Judge(world, began, self._timeout_s)
            judge.found(namespace, chain, statuses, match.length, wrote)
        return statuses

    async def _race(self) -> None:
        """Several writers of the same blocks, within milliseconds."""
        chain = self._world.catalog.chains[0][: self._rng.randint(1, 4)]
        if self._rng.random() < 0.5:
            chain = self._world.catalog.fresh(2)

        async def write(after_s: float) -> None:
            await asyncio.sleep(after_s)
            await self._write_now(ONE, chain)

        async def read(after_s: float) -> None:
            """Read with a made-up match that names every server: a match is advice, not a lease."""
            everywhere = tuple(Replica(node.name, "dram") for node in self._world.servers)
            run = Run(0, len(chain) - 1, everywhere)
            self._stale = Match((run,), len(chain), ReadStatus.HIT)
            await asyncio.sleep(after_s)
            await self._read_now(ONE, chain, self._stale)

        await self._side_by_side(
            [write(0.03 * self._rng.random() ** 3) for _ in range(3)]
            + [read(self._rng.uniform(0, 0.2)) for _ in range(2)]
        )

    async def _contest(self) -> None:
        """Writers with other bytes for the same blocks: in the end one version is there (G2).

        Not judged: blocks of which a writer ran out of time before its look had ended, or was
        refused, or of which a server evicted a copy before all had ended (design: versions).
        """
        world, rng = self._world, self._world.rng[f"contests/{self.name}"]
        namespace = rng.choice(CONTESTED)
        chain, part = world.catalog.contested(rng.randint(1, 3)), rng.randrange(namespace.parts)
        gap_s = rng.choice([0.002, 0.03, 1.0])
        judged, stored = set(chain), set[bytes]()
        began, timeout_s = world.loop.now, self._timeout_s
        clock = asyncio.get_running_loop()

        async def call(digests: Sequence[bytes], answer: Awaitable[Sequence[WriteStatus]]) -> None:
            late_at = clock.time() + timeout_s - 1e-6  # true seconds are rounded for each process
            statuses = await answer
            late = clock.time() >= late_at
            for digest, status in zip(digests, statuses, strict=True):
                ended = status.present or status in (WriteStatus.IN_PROGRESS, WriteStatus.NO_SPACE)
                if late or not ended:
                    judged.discard(digest)
                if status is WriteStatus.STORED:
                    stored.add(digest)

        async def write_to(server: str, digest: bytes, data: bytes) -> list[WriteStatus]:
            return [
                await admin(self.pool).write_to(server, namespace, digest, data, timeout=timeout_s)
            ]

        async def write(version: int) -> None:
            await asyncio.sleep(gap_s * rng.random())
            data = [value(namespace, digest, part, version) for digest in chain]
            if namespace.parts == 1 and rng.random() < 0.7:
                server = rng.choice(world.servers).name
                for digest, block in zip(chain, data, strict=True):
                    await call([digest], write_to(server, digest, block))
            else:
                answer = self.pool.write(
                    namespace,
                    chain,
                    data,
                    part=part,
                    copies=rng.choice([1, 2]),
                    timeout=timeout_s,
                )
                await call(chain, answer)

        await self._side_by_side([write(version) for version in range(VERSIONS)])
        if not world.settled_since(began):
            return
        for digest in chain:
            if digest not in judged:
                continue
            held = world.held_bytes(namespace, digest, part)
            evicted = ReadStatus.EVICTED in world.truth.history(namespace, digest, part).ends
            if len(set(held)) > 1 and not evicted:
                world.loop.fail(f"G2: {digest.hex()[:12]} has two versions on servers")
            if not held and not evicted and digest in stored:
                world.loop.fail(f"G2: {digest.hex()[:12]} has no version left of {VERSIONS}")
            if len(held) > 1:
                world.truth.probes.add("copies of a contested block are equal")

    async def _circle(self) -> None:
        """Blocks that are their own ancestors, in several writes, in any order (G9).

        A client refuses a circle in one call; no client sees one that several calls make.
        """
        rng = self._world.rng[f"circles/{self.name}"]
        circle = self._world.catalog.fresh(rng.randint(2, 9))
        copies = rng.choice([1, len(self._world.servers)])
        stretches, first = [], 0
        while first < len(circle):
            last = min(first + rng.randint(1, 3), len(circle), first + len(circle) - 1)
            stretches.append((circle[first - 1], circle[first:last]))
            first = last
        rng.shuffle(stretches)
        loop = self._world.loop
        late_at = loop.now + _TIMEOUT_S  # what begins later would end after `_bounded`'s limit
        for parent, stretch in stretches:
            if loop.now < late_at:
                await self._write_now(ONE, stretch, parent=parent, copies=copies)
        if rng.random() < 0.3:  # a block that leaves and comes back finds its children
            parent, stretch = rng.choice(stretches)
            if loop.now < late_at:
                await self._remove_now(ONE, stretch)
            if loop.now < late_at:
                await self._write_now(ONE, stretch, parent=parent, copies=copies)

    async def _lose_owner(self) -> None:
        """Write two copies, freeze or kill one owner while there is no other fault, and read."""
        kinds = self._world.plan.faults & {"freeze server", "kill server"}
        if not kinds or self._world.open_incidents or len(self._world.servers) < 2:
            return
        chain = self._world.catalog.fresh(2)
        await self._write_now(ONE, chain, copies=2)
        match = await self._match(ONE, chain)
        owners = sorted({replica.server for run in match.runs for replica in run.replicas})
        if match.length == len(chain) and len(owners) > 1 and not self._world.open_incidents:
            self._world.nemesis.schedule_fault(self._rng.choice(sorted(kinds)), owners)
            await asyncio.sleep(0.001)
            await self._read_now(ONE, chain, match)

    async def _storm(self) -> None:
        """Write 100 to 300 % of a server's capacity at once (G9)."""
        world = self._world
        world.report.faults["storm"] += 1
        total = int(world.plan.capacity * self._rng.uniform(1, 3))
        chains = [world.catalog.fresh(8) for _ in range(total // (8 * world.plan.usual_extent) + 1)]
        await self._side_by_side([self._write_now(ONE, chain) for chain in chains])

    async def _side_by_side(self, calls: Sequence[Coroutine[None, None, object]]) -> None:
        tasks = [asyncio.ensure_future(call) for call in calls]
        try:
            await asyncio.wait(tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        for task in tasks:
            if not task.cancelled() and (error := task.exception()) is not None:
                raise error

    async def _remove(self) -> None:
        namespace, chain = self._chain()
        await self._remove_now(namespace, chain[self._rng.randrange(len(chain)) :])

    async def _remove_now(self, namespace: Namespace, chain: Sequence[bytes]) -> bool:
        """False if its time was too short to reach every server, so that it promises nothing."""
        began, timeout_s = self._world.loop.now, self._timeout_s
        removed = await self._timed(self.pool.remove(namespace, chain, timeout=timeout_s), "remove")
        had_time = timeout_s >= 1.0
        if had_time:
            self._world.moves.removed(namespace, chain, began)
        servers: set[str] = set()
        shelf = self._world.shelf
        for digest, was_there in zip(chain, removed, strict=True):
            if was_there:
                one = self._world.truth.erased(namespace, digest, began)
                servers |= one
                if shelf is not None and had_time:
                    shelf.erased(one, namespace, digest, began)
        plan = self._world.plan
        may_kill = (plan.disk or plan.cold) and "kill server" in plan.faults
        if may_kill and servers and self._rng.random() < 0.5:  # the blocks must not come back
            self._world.nemesis.schedule_fault("kill server", sorted(servers))
        return had_time

    async def _fetch(self) -> None:
        namespace, chain = self._chain()
        await self._world.moves.fetch(self.pool, self._rng, namespace, chain)

    async def _spread(self) -> None:
        namespace, chain = self._chain()
        assert self._world.copies is not None
        await self._world.copies.spread(self.pool, self._rng, namespace, chain)

    async def _leave(self) -> None:
        await self._world.moves.leave(self.pool, self._rng)

    async def _explain(self) -> None:
        namespace, chain = self._chain()
        await self._timed(
            admin(self.pool).explain(namespace, chain, timeout=self._timeout_s), "explain"
        )

    async def _timed(self, call: Awaitable[T], name: str) -> T:
        """Await one call of the pool; it must end by its deadline (G6)."""
        world = self._world
        began, frozen = world.loop.now, self.process.frozen_s
        try:
            return await call
        finally:
            spent = world.loop.now - began - (self.process.frozen_s - frozen)
            if spent > self._timeout_s + _SLACK_S:
                world.loop.fail(f"G6: {name} took {spent:.3f} s, its timeout is {self._timeout_s}")

    async def write_beside(self, stranger: str) -> None:
        """A stranger holds what it can, and nothing else is wrong: a block is stored in time."""

        async def write() -> None:
            world = self._world
            (digest,) = world.catalog.fresh(1)
            world.truth.probes.add("a block was written beside a stranger")
            (status,) = await self.pool.write(
                ONE, [digest], [value(ONE, digest, 0)], timeout=_TIMEOUT_S
            )
            alone = world.only_incident
            if status is WriteStatus.BYPASSED and (world.plan.sessions or world.plan.guesses):
                return  # for prompts that wait, as the oracle of the store has checked, or are due
            if world.moves.leaving() >= {node.name for node in world.servers}:
                return  # they take no writes
            size = len(value(ONE, digest, 0))
            stores = [node.store for node in world.servers if node.process.alive]
            if status is WriteStatus.NO_SPACE and world.tenants is not None:
                return  # what tenants are guaranteed is not for it
            if status is WriteStatus.NO_SPACE and not any(
                # Beyond its budget a quarantine is no excuse.
                store.fits_beside_quarantine(size)
                or store.held.quarantined_bytes > store.held.limits.lent.total
                for store in stores
            ):
                return  # a dozen blocks of a tiny memory, of a stranger that may write into them
            if not status.present and alone is not None and alone.name == "hoard":
                world.loop.fail(f"G9: beside {stranger} a write returned: {status.label}")

        await self._beside(write())

    async def read_beside(self, stranger: str, node: ServerNode) -> None:
        """The same for a read of a block that this server has."""

        async def read() -> None:
            world = self._world
            here = [e for e in node.store.index.inventory() if e.index.namespace == ONE]
            if not here:
                return
            entry = self._rng.choice(here)
            world.truth.probes.add("a block was read beside a stranger")
            (result,) = await self.pool.read(
                ONE, [entry.digest], [bytearray(entry.size)], timeout=_TIMEOUT_S
            )
            alone = world.only_incident
            if result.status in _NO_ANSWER and alone is not None and alone.name == "hoard":
                world.loop.fail(f"G9: beside {stranger} a read returned: {result.status.label}")

        await self._beside(read())

    async def _beside(self, call: Coroutine[None, None, None]) -> None:
        """Run it in this client's process; return also when that is killed meanwhile."""
        process = self.process
        if not process.alive or self.restarting:
            call.close()
            return
        task = process.spawn(call)
        while process.alive and not task.done():  # the tasks of a killed process never end
            await asyncio.wait([task], timeout=0.1)
        if task.done():
            task.result()

    # --- the final check --------------------------------------------------------------------------

    async def final_check(self, chains: Sequence[list[bytes]]) -> None:
        """After recovery: read all blocks that are held, judge each miss, write new blocks."""
        await self.process.spawn(self._final_check(chains))

    async def _final_check(self, chains: Sequence[list[bytes]]) -> None:
        for chain in chains:
            self._timeout_s = _TIMEOUT_S + self._world.shelf_s(len(chain))
            for namespace in (ONE, TWO):
                match = await self._match(namespace, chain)
                if match.length:
                    await self._read_now(namespace, chain[: match.length], match)
        self._timeout_s = _TIMEOUT_S
        for _ in range(6 if self._world.plan.contests else 0):
            await self._contest()
        fresh = self._world.catalog.fresh(3)
        statuses = await self._write_now(ONE, fresh)
        if WriteStatus.BYPASSED in statuses:
            # A tiny memory may hold one chain alone, whose session is expected: not for ever
            # (seed 702131). Nor is any that was inferred to be worth more than new ones.
            guesses = self._world.plan.guesses
            await asyncio.sleep(_GUESSES_LAPSE_S if guesses else _HINTS_LAPSE_S)
            fresh = self._world.catalog.fresh(3)
            statuses = await self._write_now(ONE, fresh)
        if set(statuses) != {WriteStatus.STORED}:
            raise Violation(f"liveness: a write returned {[status.label for status in statuses]}")
        results = await self._read_now(ONE, fresh, None)
        if not all(result.status.hit for result in results):
            raise Violation(f"G5: reads of new blocks returned {[r.status.label for r in results]}")
        await self._check_places(fresh[-1])
        self._check_ended()

    async def _check_places(self, last: bytes) -> None:
        """A chain whose server takes nothing goes on elsewhere; who has joined is written to."""
        world, others = self._world, [n.server for n in self._world.servers if n.server]
        here = next((one for one in others if one.stack.peek(ONE, 0, last)), None)
        if here is None or len(others) < 2:
            return
        here._context.draining = True
        statuses = await self._write_now(ONE, world.catalog.fresh(2), parent=last)
        here._context.draining = False
        if not {WriteStatus.STORED, WriteStatus.BYPASSED}.issuperset(statuses):
            raise Violation(f"a chain went nowhere: {[status.label for status in statuses]}")
        await asyncio.sleep(_TOLD_S)  # masters hear that it takes blocks again
        await self._write_now(ONE, world.catalog.fresh(1))
        await asyncio.sleep(_TOLD_S)
        known = [len(one.master.directory.servers.placer) for one in world.masters if one.master]
        if min(known) > 1 and self.pool._places._only_server:
            raise Violation(f"one of {known} servers is the only one that is written to")
