"""The planted bugs: mistakes that the simulator must find, each within 2,000 seeds.

If the simulator finds none of them, its silence about the real code means nothing. Each bug is a
mistake that a programmer could make: a few characters in one place of the real source. `plant.py`
changes the source while it is imported, so the product contains no switches for tests. A test
checks that each `before` occurs exactly once in its module (design: simulation).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple


class Bug(NamedTuple):
    """One mistake: `before` occurs once in the source of `module` and is replaced by `after`."""

    name: str
    #: The promise of docs/guarantees.md that the bug breaks.
    promise: str
    module: str
    before: str
    after: str


_SUPERVISION = "kvpool.supervision"
_STORE = "kvpool.server.state.store"
_SERVER_TABLE = "kvpool.master.state.server_table"
_EXTENTS = "kvpool.server.state.extents"
_INDEX = "kvpool.server.state.index"
_ENTRY = "kvpool.server.state.entry"
_PLACEMENT = "kvpool.master.state.placement"
_LOCATIONS = "kvpool.master.state.locations"
_BLOCK_MAP = "kvpool.master.state.block_map"
_SERVER_RECORD = "kvpool.master.state.server_record"
_LOOKUP = "kvpool.client.lookup"
_READER = "kvpool.client.reader"
_WAYS = "kvpool.client.ways"
_WRITER = "kvpool.client.writer"
_VERSIONS = "kvpool.client.versions"
_MASTERS = "kvpool.client.masters"
_SERVERS = "kvpool.client.servers"
_CONNECTION = "kvpool.server.connection"
_ANNOUNCER = "kvpool.server.announcer"
_OUTBOX = "kvpool.server.outbox"
_STREAMS = "kvpool_transports.streams.stream"
_SERVING = "kvpool_transports.streams.server"
_REQUESTS = "kvpool_transports.streams.requests"
_MAPPED = "kvpool_transports.streams.mapped_channel"
_CLEARING = "kvpool.server.state.clearing"
_COMPACTOR = "kvpool.server.compactor"
_FRONT = "kvpool.server.state.front_store"
_STACK = "kvpool.server.state.tiered_store"
_TRANSFERS = "kvpool.server.state.tier_transfers"
_QUEUE = "kvpool.server.state.writeback_queue"
_FILES = "kvpool.server.state.tier_stores"
_HOLDINGS = "kvpool.server.state.holdings"
_MOVER = "kvpool.server.tier_mover"
_HEALTH = "kvpool.server.tier_health"
_SESSION_HINTS = "kvpool.server.eviction.session_hints"
_TENANT_ORDERS = "kvpool.server.eviction.tenant_orders"
_QUOTA = "kvpool.server.state.quota"
_DRAINER = "kvpool.server.moves.drainer"
_HAND_OVER = "kvpool.server.moves.hand_over"
_FETCHER = "kvpool.server.moves.fetcher"
_COPY_DEMAND = "kvpool.server.moves.state.copy_demand"
_DRAIN_PLAN = "kvpool.server.moves.state.drain_plan"
_SHARE_PLAN = "kvpool.server.moves.state.share_plan"
_SPREAD_PLAN = "kvpool.client.spread_plan"
_FETCHES = "kvpool.server.moves.state.fetches"
_PREFETCHES = "kvpool.server.state.prefetches"
_COLD_BOOK = "kvpool.server.cold.state.book"
_COLD_SEARCH = "kvpool.server.cold.search"
_COLD_WRITER = "kvpool.server.cold.writer"
_FORMAT = "kvpool_tiers.nvme.format"
_NAMESPACES = "kvpool_tiers.nvme.namespaces"

BUGS: Sequence[Bug] = (
    # --- tasks that live as long as their process
    Bug(
        "failed-task-is-not-run-again",
        "house",
        _SUPERVISION,
        """\
            while True:
                await self._attempt(name, step, backoff)""",
        """\
            while await self._attempt(name, step, backoff):
                pass""",
    ),
    Bug(
        "failed-task-does-not-wait",
        "house",
        _SUPERVISION,
        "        await asyncio.sleep(pause_s)\n        return False",
        "        await asyncio.sleep(0)\n        return False",
    ),
    Bug(
        "failing-process-is-ready",
        "house",
        _SUPERVISION,
        'return "; ".join(whys)',
        'return ""',
    ),
    Bug(
        "pauses-of-a-failing-task-do-not-grow",
        "house",
        _SUPERVISION,
        """\
            if loop.time() - began > WELL_AFTER_S:
                backoff.reset()""",
        """\
            backoff.reset()""",
    ),
    # --- what is named again after others had their turn
    Bug(
        "second-report-removes-what-is-stored-anew",
        "G1",
        _CONNECTION,
        "gone = [digest for digest, entry in found.items() if here.get(digest) is entry]",
        "gone = list(found)",
    ),
    # --- the server's memory
    Bug(
        "moved-before-it-is-copied",
        "G1",
        _COMPACTOR,
        """\
                await self._copy(moves[0])
                clearing.move_done(moves.popleft(), good=True)""",
        """\
                clearing.move_done(moves[0], good=True)
                await self._copy(moves.popleft())""",
    ),
    Bug(
        "range-given-up-stays-fenced",
        "G3",
        _CLEARING,
        """\
            self._store.clearing = None
            self._allocator.lift_fence()""",
        "            self._store.clearing = None",
    ),
    Bug(
        "range-is-never-given-up",
        "G5",
        _COMPACTOR,
        "        if clearing is not None and clearing.owner == owner:\n"
        "            clearing.abandon()",
        "        if clearing is not None and clearing.owner == owner and clearing.over:\n"
        "            clearing.abandon()",
    ),
    Bug(
        "evict-pinned",
        "G4",
        _EXTENTS,
        "return entry.state is State.STORED and not entry.pins and not entry.children\n",
        "return entry.state is State.STORED and not entry.children\n",
    ),
    Bug(
        "head-before-tail",
        "chains",
        _EXTENTS,
        "return entry.state is State.STORED and not entry.pins and not entry.children\n",
        "return entry.state is State.STORED and not entry.pins\n",
    ),
    Bug(
        "part-evicted-alone",
        "parts",
        _EXTENTS,
        "for entry in self.index.parts(victim):",
        "for entry in [victim]:",
    ),
    Bug(
        "removed-while-pinned-is-freed",
        "G4",
        _STORE,
        "event = Event.REMOVE_PINNED if entry.pins else Event.REMOVE",
        "event = Event.REMOVE",
    ),
    Bug(
        "leak-on-cancel",
        "G3",
        _STORE,
        "self.extents.unlink(entry)\n        self.extents.free(entry)\n\n    def cancel_rest",
        "self.extents.unlink(entry)\n\n    def cancel_rest",
    ),
    Bug(
        "double-free",
        "G3",
        _EXTENTS,
        "        elif free:\n            self.free(entry)\n",
        "        if free:\n            self.free(entry)\n",
    ),
    Bug(
        "pin-outlives-its-read",
        "G4",
        _SERVING,
        "        connection.unpin(self._pins)\n        self._pins = []\n",
        "        self._pins = []\n",
    ),
    Bug(
        "shown-and-let-go",
        "G4",
        _SERVING,
        "            await self._send_offsets(pins)\n",
        "            await self._send_offsets(pins)\n"
        "            self._unpin_previous(connection)\n",
    ),
    Bug(
        "moved-blocks-are-not-looked-for",
        "G6",
        _READER,
        "            await self._refetch_from_masters(state)\n",
        "            pass\n",
    ),
    Bug(
        "frozen-writer-is-not-feared",
        "G4",
        _SERVING,
        "self._connection.close(writer_may_be_alive=may_write)",
        "self._connection.close()",
    ),
    Bug(
        "quarantine-has-no-budget",
        "G9",
        _HOLDINGS,
        "        if not holder.lent and self.limits.lent.fits(holder.reserved_bytes):\n",
        "        if not holder.lent:\n",
    ),
    Bug(
        "quarantine-never-ends",
        "liveness",
        _CONNECTION,
        "        self._store.front.writer_exited(self._id)\n",
        "",
    ),
    Bug(
        "only-its-own-parent-is-a-circle",
        "G9",
        _ENTRY,
        "            above = self.blocks.get(above.parent)\n        return True",
        "            return False\n        return True",
    ),
    Bug(
        "circles-in-files-are-believed",
        "G9",
        _STACK,
        "        yield from store.cut_circles(entries)\n",
        "",
    ),
    # --- budgets of connections
    Bug(
        "pins-stay-charged",
        "G9",
        _HOLDINGS,
        "        self.count_pins(holder, -self.size_of(entries))\n",
        "",
    ),
    Bug(
        "pins-are-never-charged",
        "G9",
        _STORE,
        "        self.held.count_pins(holder, first_left - left)\n",
        "",
    ),
    Bug(
        "aborted-reservations-stay-charged",
        "G9",
        _HOLDINGS,
        "        self.charge_writes(holder, -self.size_of(entries))\n",
        "",
    ),
    Bug(
        "second-step-of-a-write-is-lost",
        "G5",
        _WRITER,
        "while waiting := [i for i, status in enumerate(statuses) if status is _NOT_YET]:",
        "if waiting := [i for i, status in enumerate(statuses) if status is _NOT_YET]:",
    ),
    Bug(
        "stalled-clients-stay",
        "G9",
        "kvpool.server.clients",
        "        if now - self._sampled_at < STALLED_S:\n",
        "        if now - self._sampled_at < STALLED_S * 1e6:\n",
    ),
    # --- writes that begin before their place is known
    Bug(
        "early-write-is-not-compared-with-what-others-wrote",
        "G2",
        _WRITER,
        "if len({*placed.servers, *likely}) > 1:",
        "if len(placed.servers) > 1 and not likely:",
    ),
    # --- writes in one request
    Bug(
        "bytes-of-a-refused-block-go-into-the-next",
        "G1",
        _SERVING,
        "for reservation, size in zip(reservations, write.sizes, strict=True)\n",
        """\
for reservation, size in sorted(
                    zip(reservations, write.sizes, strict=True),
                    key=lambda one: one[0].extent is None,
                )
""",
    ),
    Bug(
        "sealed-before-its-bytes-have-arrived",
        "G1",
        _SERVING,
        "        reservations = self._incoming = connection.reserve_now(request)\n",
        """\
        reservations = self._incoming = connection.reserve_now(request)
        for r, checksum in zip(reservations, write.checksums, strict=True):
            if r.extent is not None:
                connection._store.seal(connection._id, r.id, checksum, self._loop.time())
""",
    ),
    Bug(
        "one-request-acknowledged-before-announced",
        "G5",
        _SERVING,
        "visible=write.visible or is_here,",
        "visible=False,",
    ),
    Bug(
        "what-did-not-fit-is-left-out",
        "G10",
        _REQUESTS,
        "        answer = await in_steps([blocks[i] for i in later])\n",
        "        answer = [WriteStatus.STORED] * len(later)\n",
    ),
    # --- blocks that move
    Bug(
        "fetched-bytes-are-not-verified",
        "G1",
        _FETCHER,
        "        if await self._checksum(extent, seed) == call.offers[position].checksum:\n",
        "        if await self._checksum(extent, seed) is not None:\n",
    ),
    Bug(
        "removal-stays-at-the-source",
        "G5",
        _CONNECTION,
        "            await pass_on(namespace, digests, part, checksums)\n",
        "            pass\n",
    ),
    Bug(
        "removed-on-its-way-and-sealed",
        "G5",
        _FETCHES,
        "is FetchState.RUNNING",
        "is not None",
    ),
    Bug(
        "fetched-before-masters-know",
        "G5",
        _FETCHER,
        "await self._context.wait_until_announced(announced_by)",
        "True",
    ),
    Bug(
        "fetched-in-place-of-newer",
        "G9",
        _EXTENTS,
        " and self._last_use(victim) >= last_used\n",
        " and self._last_use(victim) < 0\n",
    ),
    Bug(
        "tails-are-fetched-without-heads",
        "chains",
        _FETCHER,
        "        step = waiting[:count]\n        del waiting[:count]\n",
        "        step = waiting[-count:]\n        del waiting[-count:]\n",
    ),
    Bug(
        "fetches-ignore-their-budget",
        "G10",
        _FETCHER,
        "            while (wait_s := self.budget.wait_s(_now())) > 0:\n",
        "            while (wait_s := self.budget.wait_s(_now())) > 1e6:\n",
    ),
    Bug(
        "leaving-server-is-chosen",
        "G15",
        _SERVER_TABLE,
        "            if draining:\n                self.placer.remove(record)\n            elif",
        "            if draining:\n                pass\n            elif",
    ),
    Bug(
        "no-time-is-nothing-left",
        "G15",
        _DRAINER,
        "                await self._count_left()\n",
        "                pass\n",
    ),
    # --- full servers that hand over chains
    Bug(
        "forgotten-without-being-fetched",
        "G15",
        _HAND_OVER,
        "if s is _FETCHED]",
        "if s not in _AGAIN]",
    ),
    Bug(
        "forgotten-before-the-answer",
        "G15",
        _HAND_OVER,
        "                digests = [name.digest for name in left]\n",
        "                digests = [name.digest for name in left]\n"
        "                if planner.forgets:\n"
        "                    await self._forget([e for e in before if e])\n",
    ),
    Bug(
        "handed-over-without-need",
        "join",
        _SHARE_PLAN,
        "        while is_full(self._store):\n",
        "        while True:\n",
    ),
    Bug(
        "chains-go-to-any-server",
        "join",
        _SHARE_PLAN,
        '            return ""\n        return best\n',
        "            pass\n        return best\n",
    ),
    Bug(
        "tails-are-handed-over-first",
        "join",
        _SHARE_PLAN,
        "        return chain[::-1]\n",
        "        return chain\n",
    ),
    Bug(
        "copies-are-handed-over",
        "moves",
        _SHARE_PLAN,
        "        self._missing = super().missing(entries, holders, view)\n",
        "        self._missing = list(entries)\n",
    ),
    Bug(
        "drained-although-others-have-it",
        "moves",
        _DRAIN_PLAN,
        "        for name, held in holders.items():\n",
        "        holders = dict.fromkeys(holders, set())\n"
        "        for name, held in holders.items():\n",
    ),
    Bug(
        "handed-over-and-still-in-the-file",
        "join",
        _HAND_OVER,
        "        await self._context.mover.erase()\n",
        "",
    ),
    # --- copies
    Bug(
        "receiver-serves-what-it-has-not-sealed",
        "spread",
        _SPREAD_PLAN,
        "            calls.append(receiver.call)\n",
        "            calls.append(receiver.call)\n"
        "            self._holders[piece][receiver.server] = None\n",
    ),
    Bug(
        "lost-receivers-are-asked-for-ever",
        "spread",
        _SPREAD_PLAN,
        "        if receiver.call is not None or receiver.problem:\n",
        "        if receiver.call is not None:\n",
    ),
    Bug(
        "lost-copies-stay-lost",
        "copies",
        _COPY_DEMAND,
        "short=count < entry.copies)",
        "short=count < 1)",
    ),
    Bug(
        "cold-copies-are-made-again",
        "copies",
        _COPY_DEMAND,
        "            plan.add(due)\n",
        "            plan.add([e for e in self._store.front.index.inventory() if e.copies > 1])\n",
    ),
    Bug(
        "extra-copies-outlive-the-last-one",
        "copies",
        _SESSION_HINTS,
        "        if self._extra_listed:\n            found =",
        "        if self._extra_listed and not newcomer.copies:\n            found =",
    ),
    Bug(
        "receivers-are-not-remembered",
        "G5",
        _FETCHER,
        "            self.receivers.add(namespace, part, digest, receiver)\n",
        "",
    ),
    # --- writing
    Bug(
        "seal-unwritten",
        "G1",
        _MAPPED,
        "checksums = await self._copies.run(jobs, deadline=deadline)",
        "checksums = [0, *await self._copies.run(jobs[1:], deadline=deadline)]",
    ),
    Bug(
        "visible-before-seal",
        "G1",
        _STORE,
        "            elif entry.state is not State.STORED:\n                answers",
        "            elif entry.state is State.FREE:\n                answers",
    ),
    Bug(
        "two-writers-of-one-block",
        "G2",
        _STORE,
        "if known is not None:\n                self._enter",
        "if known is not None and known.checksum:\n                self._enter",
    ),
    Bug(
        "extents-swapped",
        "G1",
        _SERVING,
        "[r.extent.offset for r in granted if r.extent is not None]",
        "[r.extent.offset for r in reversed(granted) if r.extent is not None]",
    ),
    Bug(
        "acknowledged-before-announced",
        "G5",
        _CONNECTION,
        "        if visible:\n            await self._context.wait_until_announced(deadline)\n",
        "",
    ),
    Bug(
        "already-stored-before-announced",
        "G5",
        _CONNECTION,
        "await self._context.wait_until_announced(wait_until)",
        "pass",
    ),
    # --- connections
    Bug(
        "pin-released-before-flush",
        "G4",
        _STREAMS,
        """\
                if self._write_paused:
                    await self._flush(deadline)
        return checksums
""",
        """\
        return checksums
""",
    ),
    Bug(
        "half-sent-stream-is-reused",
        "G1",
        "kvpool_transports.streams.pool",
        "            self._busy.pop(stream, None)\n            stream.abort()\n            raise",
        "            self._busy.pop(stream, None)\n            self._idle.append(stream)\n"
        "            raise",
    ),
    Bug(
        "answer-to-another-request",
        "G1",
        "kvpool.net.requests",
        "        future = self._pending.get(envelope.id)\n",
        "        future = next(iter(self._pending.values()), None)\n",
    ),
    Bug(
        "cancelled-copy-goes-on",
        "G1",
        "kvpool_transports.copy_pool",
        "                flag.set()\n                del self._flags[flag]",
        "                del self._flags[flag]",
    ),
    Bug(
        "deadline-forgotten",
        "G6",
        "kvpool.net.requests",
        "timer = self._loop.call_at(deadline, self._expire, future)",
        "timer = self._loop.call_at(deadline + 3600, self._expire, future)",
    ),
    # --- results
    Bug(
        "spans-outlive-their-blocks",
        "G5",
        _BLOCK_MAP,
        "            self.spans.discard(tag & _MARK_MASK)\n",
        "            pass\n",
    ),
    Bug(
        "a-span-of-several-places",
        "G5",
        _BLOCK_MAP,
        "            if tag is None or tag >> MARK_BITS != id:\n",
        "            if tag is None:\n",
    ),
    Bug(
        "an-unknown-span-is-a-miss",
        "G5",
        _LOOKUP,
        "        at = reached\n    return Match(tuple(runs), len(chain), ReadStatus.HIT)\n",
        "        if page._unknown:\n"
        "            return Match(tuple(runs), reached, ReadStatus.NEVER_WRITTEN)\n"
        "        at = reached\n    return Match(tuple(runs), len(chain), ReadStatus.HIT)\n",
    ),
    Bug(
        "beyond-the-match-is-a-hit",
        "G1",
        _LOOKUP,
        "unknown = ReadStatus.NEVER_WRITTEN if match.stopped is ReadStatus.HIT else match.stopped",
        "unknown = match.stopped",
    ),
    Bug(
        "failed-load-reported-loaded",
        "G1",
        _READER,
        "return [ReadResult(miss_reason(error))] * len(positions)",
        "return [ReadResult(ReadStatus.HIT)] * len(positions)",
    ),
    Bug(
        "missing-part-reported-present",
        "parts",
        _LOCATIONS,
        "        if complete:\n            self.status",
        "        if per_part:\n            self.status",
    ),
    Bug(
        "part-dropped-from-key",
        "G12",
        _STORE,
        "        blocks = self.index.blocks(namespace, part)\n",
        "        blocks = self.index.blocks(namespace, 0)\n",
    ),
    Bug(
        "no-failover",
        "G6",
        _READER,
        "                attempts = ways.ended(attempts[0], self._loop.time())\n"
        "            if not attempts:",
        "                attempts = []\n            if not attempts:",
    ),
    Bug(
        "a-piece-comes-twice",
        "G1",
        _WAYS,
        "wanted = [i for i in positions if candidates[i] and results[i].status is not _HIT]",
        "wanted = [i for i in positions if candidates[i]]",
    ),
    Bug(
        "a-fruitless-way-ends-the-read",
        "G5",
        _WAYS,
        "                self._fruitless.add(server)\n",
        "                self._waiting.clear()\n",
    ),
    Bug(
        "the-loser-keeps-its-version",
        "G2",
        _VERSIONS,
        "                theirs = dict.fromkeys(servers, ours)\n",
        "                theirs = {}\n",
    ),
    Bug(
        "no-look-after-a-write",
        "G2",
        _VERSIONS,
        "        if options.visible:\n",
        "        if not options.visible:\n",
    ),
    Bug(
        "each-writer-keeps-its-own-version",
        "G2",
        _VERSIONS,
        "            if not servers or min(theirs) < min(servers):\n",
        "            if not servers:\n",
    ),
    Bug(
        "no-hedge",
        "G6",
        _READER,
        "silence_s = self._config.hedge_s if hedged else self._config.attempt_s",
        "silence_s = 60.0\n        return InactivityTimer(silence_s)",
    ),
    Bug(
        "missing-copies-are-not-counted",
        "copies",
        _WRITER,
        "sum(max(0, copies - count) for count in counts)",
        "0",
    ),
    Bug(
        "wrong-reason",
        "G5",
        _INDEX,
        "        self.change_log.append_departure(entry, reason, self.tier)\n",
        "        self.change_log.append_departure(entry, ReadStatus.EVICTED, self.tier)\n",
    ),
    Bug(
        "skip-checksum",
        "G1",
        "kvpool_transports.streams.requests",
        "            if one != other:",
        "            if one != one:",
    ),
    # --- masters
    Bug(
        "inventory-merged-not-replaced",
        "G7",
        _SERVER_RECORD,
        "            self.earlier.append(self.latest)\n"
        "            self.latest = ServerInventory(self.server)\n",
        "",
    ),
    Bug(
        "inventory-begins-again",
        "G7",
        _SERVER_RECORD,
        "        if sequence < self.sequence:\n            return SequenceCheck.DUPLICATE\n"
        "        if sequence > self.sequence:\n"
        "            if piece or sequence != self.sequence + 1:",
        "        if piece == 0 or sequence != self.sequence:\n            if piece:",
    ),
    Bug(
        "last-stretch-is-left-out",
        "G7",
        _OUTBOX,
        "    if piece or not sent:\n        yield piece\n",
        "    if not sent:\n        yield piece\n",
    ),
    Bug(
        "inventory-retires-what-it-replaces",
        "G7",
        _SERVER_TABLE,
        "            for inventory in record.inventories.surplus():\n",
        "            for inventory in record.inventories.earlier:\n",
    ),
    Bug(
        "lost-news-is-not-repeated",
        "G7",
        _ANNOUNCER,
        "            self._failed(error)\n            soon = 10",
        "            if not isinstance(error, Unavailable):\n"
        "                self._failed(error)\n            soon = 10",
    ),
    Bug(
        "old-announcement-applied",
        "G7",
        _SERVER_RECORD,
        "        if sequence <= self.sequence:\n            return SequenceCheck.DUPLICATE\n",
        "        if sequence <= self.sequence:\n            return SequenceCheck.NEXT\n",
    ),
    Bug(
        "new-life-taken-for-the-old",
        "G8",
        _SERVER_TABLE,
        "if record is not None and same and record.registration.epoch == registration.epoch:",
        "if record is not None and same:",
    ),
    Bug(
        "replaced-is-lost",
        "G5",
        _SERVER_TABLE,
        "            elif inventory.lost or not inventory.retired:",
        "            else:",
    ),
    Bug(
        "dead-servers-stay",
        "G7",
        _SERVER_TABLE,
        "            elif silent_s >= self.timeout_s:\n"
        "                self._set_alive(record, False)\n",
        "",
    ),
    Bug(
        "stall-credits-the-future",
        "G7",
        _SERVER_TABLE,
        "record.last_seen = min(now, record.last_seen + stalled_s)",
        "record.last_seen = record.last_seen + stalled_s",
    ),
    Bug(
        "one-master-only",
        "G7",
        _MASTERS,
        "            return await self._ask_all(message, answer, until, problems, got)",
        "            raise self._lost(problems)",
    ),
    Bug(
        "restarted-server-is-not-found",
        "liveness",
        _SERVERS,
        "        if not record.paths or (record.epoch, record.paths) == before:\n",
        "        if True:\n",
    ),
    # --- identities and fingerprints of maps
    Bug(
        "hash-ignores-removals",
        "G7",
        _LOCATIONS,
        "            self.listed.count(digest, seed, -1)\n",
        "            self.listed.blocks -= 1\n",
    ),
    Bug(
        "maps-compared-by-count",
        "G7",
        _SERVER_RECORD,
        "self.syncing or listed.blocks != blocks or listed.packed() != fingerprint",
        "self.syncing or listed.blocks != blocks",
    ),
    Bug(
        "maps-never-compared",
        "G7",
        _ANNOUNCER,
        "        if not reply.differs:\n",
        "        if True:\n",
    ),
    Bug(
        "numbers-never-compared",
        "G7",
        _ANNOUNCER,
        "        if reply.sequence > self._sequence:\n",
        "        if False:\n",
    ),
    Bug(
        "identity-not-checked",
        "G11",
        "kvpool.master.server_requests",
        "            if record is not None and not record.registration.shows(message.token):\n",
        "            if False:\n",
    ),
    Bug(
        "registration-not-checked",
        "G11",
        _SERVER_RECORD,
        "        return hmac.compare_digest(token, self.token)\n",
        "        return True\n",
    ),
    Bug(
        "jump-accepted",
        "G7",
        _SERVER_RECORD,
        "            if piece or sequence != self.sequence + 1:\n",
        "            if piece:\n",
    ),
    # --- tiers
    Bug(
        "staged-without-a-look",
        "G1",
        _MOVER,
        "if up and await _checksum(entry, memory[: entry.size]) != entry.checksum:",
        "if False:",
    ),
    Bug(
        "rotten-block-stays-on-disk",
        "G5",
        _MOVER,
        "            store.transfers.failed(copy, ReadStatus.CORRUPT)\n",
        "",
    ),
    Bug(
        "record-before-payload",
        "G8",
        _MOVER,
        """\
        moved = await wait_for_all(map(self._move, copies))
        done = dict(zip(copies, moved, strict=True))
        await self._persist(place, done)
""",
        """\
        await self._persist(place, dict.fromkeys(copies, True))
        moved = await wait_for_all(map(self._move, copies))
        done = dict(zip(copies, moved, strict=True))
""",
    ),
    Bug(
        "copied-without-a-record",
        "G8",
        _MOVER,
        "        await self._persist(place, done)\n",
        "",
    ),
    Bug(
        "old-records-stay",
        "G8",
        _MOVER,
        "        if place[0] == self._store.backing_tier and not await self._erase([place[1]]):\n"
        "            return False\n",
        "",
    ),
    Bug(
        "removal-does-not-wait-for-the-disk",
        "G8",
        _CONNECTION,
        "await self._context.mover.erase()",
        "await asyncio.sleep(0)",
    ),
    Bug(
        "record-of-a-removed-block",
        "G8",
        _MOVER,
        "if is_good and copy.target == backing_tier and copy.entry.state is State.STORED\n",
        "if is_good and copy.target == backing_tier\n",
    ),
    Bug(
        "removed-block-is-sealed-below",
        "G5",
        _TRANSFERS,
        "        if good and not lost and entry.state is State.STORED:\n",
        "        if good and not lost:\n",
    ),
    Bug(
        "removed-from-one-tier",
        "G5",
        _STACK,
        "        for store in self.online:\n            of_tier = store.remove(",
        "        for store in [self.front]:\n            of_tier = store.remove(",
    ),
    Bug(
        "dropped-before-it-is-down",
        "G5",
        _TRANSFERS,
        "            elif answer is not WriteStatus.RESERVED:\n                queue.done",
        "            else:\n                queue.done",
    ),
    Bug(
        "source-of-a-copy-is-let-go",
        "G4",
        _TRANSFERS,
        "        if answer.extent is None:\n            self._stores[source].unpin(MOVER, pin)\n"
        "        else:\n",
        "        self._stores[source].unpin(MOVER, pin)\n        if answer.extent is not None:\n",
    ),
    Bug(
        "staging-leaks",
        "liveness",
        _MOVER,
        "            self._store.transfers.done(copy, good=good, now=_now())\n"
        "            self._promotion_ended",
        "            if good:\n"
        "                self._store.transfers.done(copy, good=good, now=_now())\n"
        "            self._promotion_ended",
    ),
    Bug(
        "failed-copy-is-not-tried-again",
        "liveness",
        _TRANSFERS,
        "                queue.add(entry)  # once more",
        "                pass  # once more",
    ),
    Bug(
        "lost-tier-fills-the-other",
        "G4",
        _TRANSFERS,
        "            if waits and not extents.demotes:\n",
        "            if False:\n",
    ),
    Bug(
        "lost-tier-keeps-its-blocks",
        "liveness",
        _HEALTH,
        "        for _ in self._store.drop_lost(tier, part):\n",
        "        for _ in [next(self._store.drop_lost(tier, part), None)]:\n",
    ),
    Bug(
        "stopped-server-blames-its-disk",
        "liveness",
        _HEALTH,
        "        alarms = [loop.call_later(_STUCK_S, late)]\n",
        "        alarms = [loop.call_later(_STUCK_S, self.lose, place, 'stuck')]\n",
    ),
    Bug(
        "lost-disk-gives-back-what-it-fills",
        "G4",
        _MOVER,
        "                front.quarantine(MOVER, one.copy.id, -one.copy.id)\n",
        "                front.cancel(MOVER, one.copy.id)\n",
    ),
    Bug(
        "quarantine-of-a-lost-disk-never-ends",
        "liveness",
        _TRANSFERS,
        "        lost = target.writer_exited(-copy.id)  # with its device: it is counted no more\n",
        "        lost = copy.id not in target.held.owner(MOVER).reservations\n",
    ),
    Bug(
        "hanging-disk-is-waited-for",
        "G6",
        _MOVER,
        "                    with self.health.calling(place):\n"
        "                        await self._du",
        "                    if True:\n                        await self._du",
    ),
    Bug(
        "not-yet-is-final",
        "G5",
        _READER,
        "still = [i for i in waiting if state.results[i].status is _NOT_YET]",
        "still = [i for i in waiting if state.results[i].status is None]",
    ),
    Bug(
        "any-header-is-believed",
        "G8",
        _FORMAT,
        "if _SUM.unpack_from(headers, end)[0] != checksum(headers[start:end], 0):",
        "if not any(headers[start:end]):",
    ),
    Bug(
        "one-copy-of-a-namespace",
        "G8",
        _NAMESPACES,
        "        for copy in range(COPIES):  # one after the other",
        "        for copy in range(1):  # one after the other",
    ),
    Bug(
        "full-disk-cannot-be-read",
        "G5",
        _HEALTH,
        "        if tier != store.backing_tier:\n            self.take_offline",
        "        if tier:\n            self.take_offline",
    ),
    Bug(
        "read-only-for-ever",
        "liveness",
        _HEALTH,
        "        while self._store.queue.read_only:\n            await asyncio.sleep(self.retry",
        "        if self._store.queue.read_only:\n            await asyncio.sleep(self.retry",
    ),
    Bug(
        "failed-write-keeps-its-space",
        "liveness",
        _TRANSFERS,
        "            target.cancel(MOVER, copy.id)\n            if down",
        "            if down",
    ),
    Bug(
        "unwritten-blocks-are-forgotten",
        "G5",
        _QUEUE,
        "            self.unwritten[entry] = None\n",
        "",
    ),
    Bug(
        "next-outage-begins-with-the-longest-delay",
        "G6",
        _HEALTH,
        "                self.retry.reset()\n",
        "",
    ),
    Bug(
        "living-block-is-not-written",
        "G5",
        _FRONT,
        "        return self.drops_useless and self.policy.is_over(entry)\n",
        "        return self.drops_useless\n",
    ),
    Bug(
        "ended-session-is-written",
        "G5",
        _SESSION_HINTS,
        "        return entry.superseded_at >= entry.last_used or (\n",
        "        return False and (\n",
    ),
    Bug(
        "evicted-below-is-written-for-ever",
        "G6",
        _QUEUE,
        "given_up = self._written_again.get(entry) == entry.last_used",
        "given_up = False",
    ),
    Bug(
        "tails-before-heads",
        "G8",
        "kvpool.server.state.write_back",
        "        entry = self._chain.pop()\n        del",
        "        entry = self._chain.pop(0)\n        del",
    ),
    Bug(
        "disk-evicts-and-memory-forgets",
        "G5",
        _STACK,
        "            self.front.extents.mark_dirty(found)\n",
        "",
    ),
    # --- an object store below all servers
    Bug(
        "object-store-does-not-hear-of-removals",
        "G8",
        _COLD_BOOK,
        "        self.unsaved[one.name] = one\n",
        "",
    ),
    Bug(
        "what-other-servers-removed-comes-back",
        "G8",
        _COLD_SEARCH,
        "        one.removed |= gone\n",
        "",
    ),
    Bug(
        "removed-on-its-way-to-the-object-store",
        "G8",
        _COLD_WRITER,
        "        for draft in self.drafts.values():\n            for which",
        "        for draft in ():\n            for which",
    ),
    Bug(
        "objects-of-the-living-are-everybodys",
        "house",
        _COLD_SEARCH,
        "            if answers != self._me or (",
        "            if answers != self._me and (",
    ),
    Bug(
        "cold-blocks-that-were-left-out-stay-out",
        "house",
        _COLD_SEARCH,
        "if living.servers != self._living.servers or self._index.book.lost:",
        "if living.servers != self._living.servers:",
    ),
    Bug(
        "block-in-an-object-has-the-place-of-the-next",
        "G1",
        _COLD_WRITER,
        "        block = ColdBlock(*key, parent, position, entry.size,",
        "        block = ColdBlock(*key, parent, len(draft.payload), entry.size,",
    ),
    # --- blocks that come up before they are read
    Bug(
        "prefetches-fill-the-memory",
        "G9",
        _PREFETCHES,
        "        return memory // SHARE - self.held - self.coming\n",
        "        return memory - self.held - self.coming\n",
    ),
    Bug(
        "prefetched-in-place-of-what-is-in-use",
        "G9",
        _FRONT,
        "            return self._last_use(victim) >= last_used and not useless\n",
        "            return self._last_use(victim) > JUST_NOW and not useless\n",
    ),
    Bug(
        "prefetched-blocks-that-are-read-stay-unread",
        "advice",
        _STACK,
        "                    front.extents.prefetched.read(entry)\n",
        "                    pass\n",
    ),
    # --- prompts that wait
    Bug(
        "arrivals-lapse-in-the-queue",
        "advice",
        _SESSION_HINTS,
        "lapses = min(came + WAIT_S, session.waits_since + WAIT_S_MAX)",
        "lapses = min(came + _EXPIRE_S_MIN, session.waits_since + WAIT_S_MAX)",
    ),
    Bug(
        "arrivals-are-never-given-back",
        "advice",
        _SESSION_HINTS,
        "            if session.arrived is not None:\n                self._withdraw(session)\n\n",
        "\n",
    ),
    Bug(
        "late-arrivals-are-believed",
        "advice",
        _SESSION_HINTS,
        "        came = now - age_s\n",
        "        came = now\n",
    ),
    Bug(
        "arrivals-have-no-budget",
        "G9",
        _SESSION_HINTS,
        "over = self.announced_bytes > self.budget",
        "over = self.announced_bytes > 2 * self.budget",
    ),
    # --- the world outside
    Bug(
        "wall-clock",
        "house",
        "kvpool.master.service",
        "        return asyncio.get_running_loop().time()",
        "        return __import__('time').time()",
    ),
    Bug(
        "every-chain-is-shared",
        "G9",
        _PLACEMENT,
        "self._branch(tenant, parent, key) >= SHARED_FROM",
        "self._branch(tenant, parent, key) >= 1",
    ),
    Bug(
        "lost-servers-are-chosen",
        "G9",
        _SERVER_TABLE,
        """            else:
                self.placer.remove(record)
""",
        """            else:
                pass
""",
    ),
    Bug(
        "restarted-servers-are-chosen-twice",
        "G9",
        _SERVER_TABLE,
        """            self.placer.remove(record)
            self._retire_all(record)
""",
        """            self._retire_all(record)
""",
    ),
    # --- tenants
    Bug(
        "account-drifts-after-a-crash",
        "G12",
        _FILES,
        "        index.count(self.allocator.rounded(size))\n",
        "        index.count(size)\n",
    ),
    Bug(
        "recovered-for-another-tenant",
        "G12",
        _FILES,
        "        index.count(self.allocator.rounded(size))\n",
        "        self.extents.policy.accounts.pool.used += self.allocator.rounded(size)\n",
    ),
    Bug(
        "passed-on-extent-counts-twice",
        "G12",
        _EXTENTS,
        "                entry.index.count(-self.allocator.rounded(entry.size))\n",
        "",
    ),
    Bug(
        "moved-block-is-not-counted",
        "G12",
        _EXTENTS,
        """\
        del self.blocks_at[entry.offset]
        self.allocator.release(entry.offset)
        entry.offset = target""",
        """\
        self.free(entry)
        entry.offset = target""",
    ),
    Bug(
        "guarantee-taken-by-a-burst",
        "G12",
        _TENANT_ORDERS,
        "elif foreign and account.spare < (needed := self._extent(found)):",
        "elif foreign and account.used < (needed := self._extent(found)):",
    ),
    Bug(
        "limit-off-by-one-extent",
        "G12",
        _STORE,
        "over = account.used + taken > account.limit",
        "over = account.used >= account.limit",
    ),
    Bug(
        "quota-of-a-removed-tenant-kept",
        "G12",
        _QUOTA,
        "            account.set_quota(self._quotas.get(name))\n",
        "            account.set_quota(self._quotas.get(name, account.quota))\n",
    ),
    Bug(
        "hints-cross-tenants",
        "G12",
        _TENANT_ORDERS,
        "if hint is not None and tenant_of(hint.session) != index.account.name:",
        "if hint is not None and not index.account:",
    ),
    Bug(
        "at-its-limit-it-evicts-others",
        "G12",
        _TENANT_ORDERS,
        "        if mine.exceeds(size):\n",
        "        if mine.exceeds(0):\n",
    ),
    Bug(
        "guaranteed-memory-goes-with-the-disk",
        "G12",
        _STACK,
        "            if any(copy.index.account.owns(0) for _, copy in copies):\n",
        "            if any(copy.index.account.owns(1 << 60) for _, copy in copies):\n",
    ),
)

#: A seed that found a bug, for bugs that need more than a few: it is played first. When the code
#: around a bug has changed and this seed no longer finds it, all the others are played.
FIRST_SEED: Final[Mapping[str, int]] = {
    "failed-task-is-not-run-again": 12,
    "failed-task-does-not-wait": 12,
    "failing-process-is-ready": 12,
    "pauses-of-a-failing-task-do-not-grow": 12,
    "second-report-removes-what-is-stored-anew": 31,
    "range-given-up-stays-fenced": 5,
    "moved-blocks-are-not-looked-for": 5,
    "frozen-writer-is-not-feared": 28,
    "quarantine-has-no-budget": 1535,
    "quarantine-never-ends": 9,
    "circles-in-files-are-believed": 6,
    "stalled-clients-stay": 261,
    "early-write-is-not-compared-with-what-others-wrote": 6,
    "one-request-acknowledged-before-announced": 11,
    "fetched-bytes-are-not-verified": 21,
    "removal-stays-at-the-source": 5,
    "removed-on-its-way-and-sealed": 18,
    "tails-are-fetched-without-heads": 11,
    "no-time-is-nothing-left": 26,
    "forgotten-without-being-fetched": 21,
    "forgotten-before-the-answer": 21,
    "handed-over-without-need": 21,
    "chains-go-to-any-server": 21,
    "tails-are-handed-over-first": 21,
    "copies-are-handed-over": 469,
    "drained-although-others-have-it": 364,
    "handed-over-and-still-in-the-file": 106,
    "lost-copies-stay-lost": 18,
    "cold-copies-are-made-again": 5,
    "receivers-are-not-remembered": 5,
    "already-stored-before-announced": 225,
    "answer-to-another-request": 4,
    "cancelled-copy-goes-on": 7,
    "no-failover": 10,
    "a-fruitless-way-ends-the-read": 8,
    "no-hedge": 905,
    "skip-checksum": 13,
    "inventory-merged-not-replaced": 11,
    "inventory-begins-again": 8,
    "last-stretch-is-left-out": 6,
    "lost-news-is-not-repeated": 4,
    "old-announcement-applied": 31,
    "replaced-is-lost": 151,
    "stall-credits-the-future": 12,
    "one-master-only": 7,
    "restarted-server-is-not-found": 20,
    "maps-compared-by-count": 17,
    "maps-never-compared": 11,
    "numbers-never-compared": 71,
    "identity-not-checked": 8,
    "registration-not-checked": 8,
    "jump-accepted": 8,
    "rotten-block-stays-on-disk": 40,
    "record-before-payload": 35,
    "old-records-stay": 6,
    "removal-does-not-wait-for-the-disk": 53,
    "record-of-a-removed-block": 346,
    "dropped-before-it-is-down": 17,
    "failed-copy-is-not-tried-again": 31,
    "lost-tier-fills-the-other": 103,
    "lost-tier-keeps-its-blocks": 103,
    "stopped-server-blames-its-disk": 116,
    "lost-disk-gives-back-what-it-fills": 103,
    "quarantine-of-a-lost-disk-never-ends": 103,
    "hanging-disk-is-waited-for": 362,
    "any-header-is-believed": 6,
    "one-copy-of-a-namespace": 6,
    "full-disk-cannot-be-read": 17,
    "read-only-for-ever": 17,
    "unwritten-blocks-are-forgotten": 17,
    "next-outage-begins-with-the-longest-delay": 319,
    "evicted-below-is-written-for-ever": 53,
    "tails-before-heads": 20,
    "object-store-does-not-hear-of-removals": 25,
    "what-other-servers-removed-comes-back": 25,
    "removed-on-its-way-to-the-object-store": 19,
    "objects-of-the-living-are-everybodys": 9,
    "cold-blocks-that-were-left-out-stay-out": 98,
    "block-in-an-object-has-the-place-of-the-next": 9,
    "prefetches-fill-the-memory": 15,
    "prefetched-in-place-of-what-is-in-use": 19,
    "prefetched-blocks-that-are-read-stay-unread": 16,
    "arrivals-lapse-in-the-queue": 5,
    "arrivals-are-never-given-back": 4,
    "late-arrivals-are-believed": 4,
    "arrivals-have-no-budget": 5,
    "quota-of-a-removed-tenant-kept": 13,
    "guaranteed-memory-goes-with-the-disk": 31,
}
