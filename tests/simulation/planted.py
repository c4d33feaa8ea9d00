"""The planted bugs: mistakes that the simulator must find, by a seed they name or by a low one.

If the simulator finds none of them, its silence about the real code means nothing. Each bug is a
mistake that a programmer could make: a few characters in one place of the real source. `plant.py`
changes the source while it is imported, so the product contains no switches for tests. A test
checks that each `before` occurs exactly once in its module (design: simulation).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple


class Bug(NamedTuple):
    """One mistake: `before` occurs once in the source of `module` and is replaced by `after`."""

    name: str
    #: The promise of docs/guarantees.md that the bug breaks.
    promise: str
    module: str
    before: str
    after: str
    #: It found the bug once, and is played first: for bugs that need more than a few. When the code
    #: around such a bug has changed and its seed no longer finds it, others are played.
    seed: int | None


def read(text: str) -> tuple[Bug, ...]:
    """The bugs of a list: `@@ name  promise  module  seed N`, and lines as in a diff.

    What is before and after need not be whole lines; without `+`, whole lines are left out.
    """
    bugs = []
    for one in re.split("^@@ ", text, flags=re.M)[1:]:
        head, *lines = one.splitlines()
        name, promise, module, *seed = head.split()
        before, after = ([line[1:] for line in lines if line.startswith(sign)] for sign in "-+")
        end = "" if after else "\n"
        first = int(seed[1]) if seed else None
        bugs.append(Bug(name, promise, module, "\n".join(before) + end, "\n".join(after), first))
    return tuple(bugs)


BUGS: Sequence[Bug] = read(
    r"""
# --- tasks that live as long as their process
@@ failed-task-is-not-run-again  house  kvpool.supervision  seed 12
-            while True:
-                await self._attempt(name, step, backoff)
+            while await self._attempt(name, step, backoff):
+                pass
@@ failed-task-does-not-wait  house  kvpool.supervision  seed 12
-        await asyncio.sleep(pause_s)
-        return False
+        await asyncio.sleep(0)
+        return False
@@ failing-process-is-ready  house  kvpool.supervision  seed 12
-return "; ".join(whys)
+return ""
@@ pauses-of-a-failing-task-do-not-grow  house  kvpool.supervision  seed 12
-            if loop.time() - began > WELL_AFTER_S:
-                backoff.reset()
+            backoff.reset()
# --- what is named again after others had their turn
@@ second-report-removes-what-is-stored-anew  G1  kvpool.server.connection  seed 31
-gone = [digest for digest, entry in found.items() if here.get(digest) is entry]
+gone = list(found)
# --- the server's memory
@@ moved-before-it-is-copied  G1  kvpool.server.compactor
-                await self._copy(moves[0])
-                clearing.move_done(moves.popleft(), good=True)
+                clearing.move_done(moves[0], good=True)
+                await self._copy(moves.popleft())
@@ range-given-up-stays-fenced  G3  kvpool.server.state.clearing  seed 5
-            self._store.clearing = None
-            self._allocator.lift_fence()
+            self._store.clearing = None
@@ range-is-never-given-up  G5  kvpool.server.compactor
-        if clearing is not None and clearing.owner == owner:
-            clearing.abandon()
+        if clearing is not None and clearing.owner == owner and clearing.over:
+            clearing.abandon()
@@ evict-pinned  G4  kvpool.server.state.extents
-return entry.state is State.STORED and not entry.pins and not entry.children
+return entry.state is State.STORED and not entry.children
@@ head-before-tail  chains  kvpool.server.state.extents
-return entry.state is State.STORED and not entry.pins and not entry.children
+return entry.state is State.STORED and not entry.pins
@@ part-evicted-alone  parts  kvpool.server.state.extents
-for entry in self.index.parts(victim):
+for entry in [victim]:
@@ removed-while-pinned-is-freed  G4  kvpool.server.state.store
-event = Event.REMOVE_PINNED if entry.pins else Event.REMOVE
+event = Event.REMOVE
@@ leak-on-cancel  G3  kvpool.server.state.store
-        self.extents.unlink(entry)
-        self.extents.free(entry)
-
-    def cancel_rest(self, owner: int) -> None:
+        self.extents.unlink(entry)
+
+    def cancel_rest(self, owner: int) -> None:
@@ double-free  G3  kvpool.server.state.extents
-        elif free:
-            self.free(entry)
+        if free:
+            self.free(entry)
@@ pin-outlives-its-read  G4  kvpool_transports.streams.server
-        connection.unpin(self._pins)
-        self._pins = []
+        self._pins = []
@@ shown-and-let-go  G4  kvpool_transports.streams.server
-            await self._send_offsets(pins)
+            await self._send_offsets(pins)
+            self._unpin_previous(connection)
@@ moved-blocks-are-not-looked-for  G6  kvpool.client.reader  seed 5
-            await self._refetch_from_masters(state)
+            pass
@@ frozen-writer-is-not-feared  G4  kvpool_transports.streams.server  seed 28
-self._connection.close(writer_may_be_alive=may_write)
+self._connection.close()
@@ quarantine-has-no-budget  G9  kvpool.server.state.holdings  seed 1535
-        if not holder.lent and self.limits.lent.fits(holder.reserved_bytes):
+        if not holder.lent:
@@ quarantine-never-ends  liveness  kvpool.server.connection  seed 9
-        self._store.front.writer_exited(self._id)
@@ only-its-own-parent-is-a-circle  G9  kvpool.server.state.entry
-            above = self.blocks.get(above.parent)
-        return True
+            return False
+        return True
@@ circles-in-files-are-believed  G9  kvpool.server.state.tiered_store  seed 6
-        yield from store.cut_circles(entries)
# --- budgets of connections
@@ pins-stay-charged  G9  kvpool.server.state.holdings
-        self.count_pins(holder, -self.size_of(entries))
@@ pins-are-never-charged  G9  kvpool.server.state.store
-        self.held.count_pins(holder, first_left - left)
@@ aborted-reservations-stay-charged  G9  kvpool.server.state.holdings
-        self.charge_writes(holder, -self.size_of(entries))
@@ second-step-of-a-write-is-lost  G5  kvpool.client.writer
-while waiting := [i for i, status in enumerate(statuses) if status is _NOT_YET]:
+if waiting := [i for i, status in enumerate(statuses) if status is _NOT_YET]:
@@ stalled-clients-stay  G9  kvpool.server.clients  seed 261
-        if now - self._sampled_at < STALLED_S:
+        if now - self._sampled_at < STALLED_S * 1e6:
# --- writes that ask no master where to go
@@ what-a-server-refuses-is-asked-nobody-else  placement  kvpool.client.writer
-            if needed:
-                begin()
@@ the-only-server-stays-the-only-one  placement  kvpool.client.writer
-if len(placed.servers) == 1 else ""
+if len(placed.servers) == 1 else self._only_server
# --- writes in one request
@@ bytes-of-a-refused-block-go-into-the-next  G1  kvpool_transports.streams.server
-for reservation, size in zip(reservations, write.sizes, strict=True)
+for reservation, size in sorted(
+                    zip(reservations, write.sizes, strict=True),
+                    key=lambda one: one[0].extent is None,
+                )
@@ sealed-before-its-bytes-have-arrived  G1  kvpool_transports.streams.server
-        reservations = self._incoming = connection.reserve_now(request)
+        reservations = self._incoming = connection.reserve_now(request)
+        for r, checksum in zip(reservations, write.checksums, strict=True):
+            if r.extent is not None:
+                connection._store.seal(connection._id, r.id, checksum, self._loop.time())
@@ one-request-acknowledged-before-announced  G5  kvpool_transports.streams.server  seed 11
-visible=write.visible or is_here,
+visible=False,
@@ what-did-not-fit-is-left-out  G10  kvpool_transports.streams.requests
-await self._write_in_steps(options, rest, deadline)
+[WriteStatus.STORED] * len(later)
# --- blocks that move
@@ fetched-bytes-are-not-verified  G1  kvpool.server.moves.fetcher  seed 21
-        if await self._checksum(extent, seed) == call.offers[position].checksum:
+        if await self._checksum(extent, seed) is not None:
@@ removal-stays-at-the-source  G5  kvpool.server.connection  seed 5
-            await pass_on(namespace, digests, part, checksums)
+            pass
@@ removed-on-its-way-and-sealed  G5  kvpool.server.moves.state.fetches  seed 18
-is FetchState.RUNNING
+is not None
@@ fetched-before-masters-know  G5  kvpool.server.moves.fetcher
-await self._context.wait_until_announced(announced_by)
+True
@@ fetched-in-place-of-newer  G9  kvpool.server.state.extents
- and self._last_use(victim) >= last_used
+ and self._last_use(victim) < 0
@@ tails-are-fetched-without-heads  chains  kvpool.server.moves.fetcher  seed 11
-        step = waiting[:count]
-        del waiting[:count]
+        step = waiting[-count:]
+        del waiting[-count:]
@@ fetches-ignore-their-budget  G10  kvpool.server.moves.fetcher
-            while (wait_s := self.budget.wait_s(_now())) > 0:
+            while (wait_s := self.budget.wait_s(_now())) > 1e6:
@@ leaving-server-is-chosen  G15  kvpool.master.state.server_table
-            if draining:
-                self.placer.remove(record)
-            elif
+            if draining:
+                pass
+            elif
@@ no-time-is-nothing-left  G15  kvpool.server.moves.drainer  seed 26
-                await self._count_left()
+                pass
@@ a-look-at-all-is-the-hand-over-of-all  G15  kvpool.server.moves.drainer  seed 34
-        return False
-
-    async def _forget_moved
+        return True
+
+    async def _forget_moved
@@ what-was-refused-is-handed-over  G15  kvpool.server.moves.hand_over  seed 13
-                    planner.left(name, _REASONS.get(status, status.label))
+                    planner.came(name, target, moved=False)
# --- full servers that hand over chains
@@ forgotten-without-being-fetched  G15  kvpool.server.moves.hand_over  seed 21
-if s is _FETCHED]
+if s not in _AGAIN]
@@ forgotten-before-the-answer  G15  kvpool.server.moves.hand_over  seed 21
-                digests = [name.digest for name in left]
+                digests = [name.digest for name in left]
+                if planner.forgets:
+                    await self._forget([e for e in before if e])
@@ handed-over-without-need  join  kvpool.server.moves.state.share_plan  seed 21
-        while is_full(self._store):
+        while True:
@@ chains-go-to-any-server  join  kvpool.server.moves.state.share_plan  seed 21
-            return ""
-        return best
+            pass
+        return best
@@ tails-are-handed-over-first  join  kvpool.server.moves.state.share_plan  seed 21
-        return chain[::-1]
+        return chain
@@ copies-are-handed-over  moves  kvpool.server.moves.state.share_plan  seed 469
-        self._missing = super().missing(entries, holders, view)
+        self._missing = list(entries)
@@ drained-although-others-have-it  moves  kvpool.server.moves.state.drain_plan  seed 364
-        for name, held in holders.items():
+        holders = dict.fromkeys(holders, set())
+        for name, held in holders.items():
@@ handed-over-and-still-in-the-file  join  kvpool.server.moves.hand_over  seed 106
-        await self._context.mover.erase()
# --- copies
@@ receiver-serves-what-it-has-not-sealed  spread  kvpool.client.spread_plan
-            calls.append(receiver.call)
+            calls.append(receiver.call)
+            self._holders[piece][receiver.server] = None
@@ lost-receivers-are-asked-for-ever  spread  kvpool.client.spread_plan
-        if receiver.call is not None or receiver.problem:
+        if receiver.call is not None:
@@ lost-copies-stay-lost  copies  kvpool.server.moves.state.copy_demand  seed 18
-short=count < entry.copies)
+short=count < 1)
@@ cold-copies-are-made-again  copies  kvpool.server.moves.state.copy_demand  seed 10
-.add(list(entries))
+.add([e for e in self._store.front.index.inventory() if e.copies > 1])
@@ extra-copies-outlive-the-last-one  copies  kvpool.server.eviction.session_hints
-        if self.extra.listed:
-            found =
+        if self.extra.listed and not newcomer.copies:
+            found =
@@ receivers-are-not-remembered  G5  kvpool.server.moves.fetcher  seed 5
-            self.receivers.add(namespace, part, digest, receiver)
# --- writing
@@ seal-unwritten  G1  kvpool_transports.streams.mapped_channel
-return await self._copies.run(jobs, deadline=deadline)
+return [0, *await self._copies.run(jobs[1:], deadline=deadline)]
@@ visible-before-seal  G1  kvpool.server.state.store
-            elif entry.state is not State.STORED:
-                answers
+            elif entry.state is State.FREE:
+                answers
@@ two-writers-of-one-block  G2  kvpool.server.state.store
-            if known is not None:
-                self._enter(index, holder, fresh, now)
+            if known is not None and known.checksum:
+                self._enter(index, holder, fresh, now)
@@ extents-swapped  G1  kvpool_transports.streams.server
-[r.extent.offset for r in granted if r.extent is not None]
+[r.extent.offset for r in reversed(granted) if r.extent is not None]
@@ acknowledged-before-announced  G5  kvpool.server.connection
-await self._context.wait_until_announced(deadline)
+Visibility.VISIBLE
@@ already-stored-before-announced  G5  kvpool.server.connection  seed 225
-await self._context.wait_until_announced(wait_until)
+pass
# --- connections
@@ pin-released-before-flush  G4  kvpool_transports.streams.stream
-                if self._write_paused:
-                    await self._flush(deadline)
-        return checksums
+        return checksums
@@ half-sent-stream-is-reused  G1  kvpool_transports.streams.pool
-            stream.abort()
-            raise
-        else:
+            self._idle.append(stream)
+            raise
+        else:
@@ answer-to-another-request  G1  kvpool.net.requests  seed 4
-        future = self._pending.get(envelope.id)
+        future = next(iter(self._pending.values()), None)
@@ cancelled-copy-goes-on  G1  kvpool_transports.copy_pool  seed 7
-                flag.set()
-                del self._flags[flag]
+                del self._flags[flag]
@@ deadline-forgotten  G6  kvpool.net.requests
-timer = self._loop.call_at(deadline, self._expire, future)
+timer = self._loop.call_at(deadline + 3600, self._expire, future)
# --- results
@@ spans-outlive-their-blocks  G5  kvpool.master.state.block_map
-            self.spans.discard(tag & _MARK_MASK)
+            pass
@@ a-span-of-several-places  G5  kvpool.master.state.block_map
-            if tag is None or tag >> MARK_BITS != id:
+            if tag is None:
@@ an-unknown-span-is-a-miss  G5  kvpool.client.lookup
-        at = reached
-    return Match(tuple(runs), len(chain), ReadStatus.HIT)
+        if page._unknown:
+            return Match(tuple(runs), reached, ReadStatus.NEVER_WRITTEN)
+        at = reached
+    return Match(tuple(runs), len(chain), ReadStatus.HIT)
@@ beyond-the-match-is-a-hit  G1  kvpool.client.lookup
-unknown = ReadStatus.NEVER_WRITTEN if match.stopped is ReadStatus.HIT else match.stopped
+unknown = match.stopped
@@ failed-load-reported-loaded  G1  kvpool.client.reader
-return [ReadResult(miss_reason(error))] * len(positions)
+return [ReadResult(ReadStatus.HIT)] * len(positions)
@@ missing-part-reported-present  parts  kvpool.master.state.locations
-        if complete:
-            self.status
+        if per_part:
+            self.status
@@ part-dropped-from-key  G12  kvpool.server.state.store
-        found = self.index.blocks(namespace, part).get_all(digests)
+        found = self.index.blocks(namespace, 0).get_all(digests)
@@ no-failover  G6  kvpool.client.reader  seed 10
-                attempts = plan.ended(attempts[0], self._loop.time())
-            if not attempts:
+                attempts = []
+            if not attempts:
@@ a-piece-comes-twice  G1  kvpool.client.ways
-wanted = [i for i in positions if candidates[i] and results[i].status is not _HIT]
+wanted = [i for i in positions if candidates[i]]
@@ what-a-way-lied-about-is-lost  G5  kvpool.client.ways  seed 69
-wanted = [i for i in positions if candidates[i] and results[i].status is not _HIT]
+bad = ReadStatus.CORRUPT
+        wanted = [i for i in positions if candidates[i] and results[i].status not in (_HIT, bad)]
@@ a-fruitless-way-ends-the-read  G5  kvpool.client.ways  seed 466
-                self._fruitless.add(server)
+                self._waiting.clear()
@@ the-loser-keeps-its-version  G2  kvpool.client.versions
-                theirs = dict.fromkeys(servers, ours)
+                theirs = {}
@@ no-look-after-a-write  G2  kvpool.client.versions
-        if options.visible:
+        if not options.visible:
@@ a-copy-elsewhere-is-not-told  G2  kvpool.master.state.directory
-one.inventory.server == server for held in seen for one in held.locations
+held for held in seen
@@ each-writer-keeps-its-own-version  G2  kvpool.client.versions
-            if not servers or min(theirs) < min(servers):
+            if not servers:
@@ no-hedge  G6  kvpool.client.reader  seed 79
-silence_s = self._config.hedge_s if hedged else self._config.attempt_s
+silence_s = 60.0
+        return InactivityTimer(silence_s)
@@ missing-copies-are-not-counted  copies  kvpool.client.writer
-sum(max(0, copies - count) for count in counts)
+0
@@ wrong-reason  G5  kvpool.server.state.index
-        self.change_log.append_departures([entry], reason, self.tier)
+        self.change_log.append_departures([entry], ReadStatus.EVICTED, self.tier)
@@ skip-checksum  G1  kvpool_transports.streams.requests  seed 13
-            if one != other:
+            if one != one:
# --- masters
@@ inventory-merged-not-replaced  G7  kvpool.master.state.server_record  seed 11
-            self.earlier.append(self.latest)
-            self.latest = ServerInventory(self.server)
@@ inventory-begins-again  G7  kvpool.master.state.server_record  seed 8
-        if sequence < self.sequence:
-            return SequenceCheck.DUPLICATE
-        if sequence > self.sequence:
-            if piece or sequence != self.sequence + 1:
+        if piece == 0 or sequence != self.sequence:
+            if piece:
@@ last-stretch-is-left-out  G7  kvpool.server.outbox  seed 50
-    if piece or not sent:
-        yield piece
+    if not sent:
+        yield piece
@@ inventory-retires-what-it-replaces  G7  kvpool.master.state.server_table
-            for inventory in record.inventories.surplus():
+            for inventory in record.inventories.earlier:
@@ lost-news-is-not-repeated  G7  kvpool.server.announcer  seed 4
-            self._failed(error)
-            soon = 10
+            if not isinstance(error, Unavailable):
+                self._failed(error)
+            soon = 10
@@ old-announcement-applied  G7  kvpool.master.state.server_record  seed 31
-        if sequence <= self.sequence:
-            return SequenceCheck.DUPLICATE
+        if sequence <= self.sequence:
+            return SequenceCheck.NEXT
@@ new-life-taken-for-the-old  G8  kvpool.master.state.server_table
-if record is not None and same and record.registration.epoch == registration.epoch:
+if record is not None and same:
@@ replaced-is-lost  G5  kvpool.master.state.server_table  seed 197
-            elif inventory.lost or not inventory.retired:
+            else:
@@ dead-servers-stay  G7  kvpool.master.state.server_table
-            elif silent_s >= self.timeout_s:
-                self._set_alive(record, False)
@@ stall-credits-the-future  G7  kvpool.master.state.server_table  seed 12
-record.last_seen = min(now, record.last_seen + stalled_s)
+record.last_seen = record.last_seen + stalled_s
@@ one-master-only  G7  kvpool.client.masters  seed 7
-            return await self._ask_all(message, answer, until, problems, got)
+            raise self._lost(problems)
@@ restarted-server-is-not-found  liveness  kvpool.client.servers  seed 20
-        if not record.paths or (record.epoch, record.paths) == before:
+        if True:
# --- identities and fingerprints of maps
@@ hash-ignores-removals  G7  kvpool.master.state.locations
-            self.listed.count(digest, seed, -1)
+            self.listed.blocks -= 1
@@ maps-compared-by-count  G7  kvpool.master.state.server_record  seed 17
-self.syncing or listed.blocks != blocks or listed.packed() != fingerprint
+self.syncing or listed.blocks != blocks
@@ maps-never-compared  G7  kvpool.server.announcer  seed 11
-        if not reply.differs:
+        if True:
@@ numbers-never-compared  G7  kvpool.server.announcer  seed 71
-        if reply.sequence > self._sequence:
+        if False:
@@ identity-not-checked  G11  kvpool.master.server_requests  seed 8
-            if record is not None and not record.registration.shows(message.token):
+            if False:
@@ registration-not-checked  G11  kvpool.master.state.server_record  seed 8
-        return hmac.compare_digest(token, self.token)
+        return True
@@ jump-accepted  G7  kvpool.master.state.server_record  seed 8
-            if piece or sequence != self.sequence + 1:
+            if piece:
# --- tiers
@@ staged-without-a-look  G1  kvpool.server.tier_bytes
-if up and await _checksum(entry, memory[: entry.size]) != entry.checksum:
+if False:
@@ rotten-block-stays-on-disk  G5  kvpool.server.tier_bytes  seed 40
-            store.transfers.failed(copy, ReadStatus.CORRUPT)
@@ record-before-payload  G8  kvpool.server.tier_mover  seed 35
-        moved = await wait_for_all(map(self._bytes.move, copies))
-        done = dict(zip(copies, moved, strict=True))
-        await self.records.persist(place, done)
+        await self.records.persist(place, dict.fromkeys(copies, True))
+        moved = await wait_for_all(map(self._bytes.move, copies))
+        done = dict(zip(copies, moved, strict=True))
@@ copied-without-a-record  G8  kvpool.server.tier_mover
-        await self.records.persist(place, done)
@@ old-records-stay  G8  kvpool.server.tier_mover  seed 6
-        if place[0] == self._store.backing_tier and not await self.records.erase([place[1]]):
-            return False
@@ removal-does-not-wait-for-the-disk  G8  kvpool.server.connection  seed 53
-await self._context.mover.erase()
+await asyncio.sleep(0)
@@ record-of-a-removed-block  G8  kvpool.server.tier_records  seed 1
-if is_good and copy.target == backing_tier and copy.entry.state is State.STORED
+if is_good and copy.target == backing_tier
@@ removed-block-is-sealed-below  G5  kvpool.server.state.tier_transfers
-        if good and not lost and entry.state is State.STORED:
+        if good and not lost:
@@ removed-from-one-tier  G5  kvpool.server.state.tiered_store
-        for store in self.online:
-            of_tier = store.remove(
+        for store in [self.front]:
+            of_tier = store.remove(
@@ dropped-before-it-is-down  G5  kvpool.server.state.tier_transfers  seed 17
-            elif answer is not WriteStatus.RESERVED:
-                queue.done
+            else:
+                queue.done
@@ source-of-a-copy-is-let-go  G4  kvpool.server.state.tier_transfers
-        if answer.extent is None:
-            self._stores[source].unpin(MOVER, pin)
-        else:
+        self._stores[source].unpin(MOVER, pin)
+        if answer.extent is not None:
@@ staging-leaks  liveness  kvpool.server.tier_mover
-            self._store.transfers.done(copy, good=good, now=_now())
-            self.promotions.end
+            if good:
+                self._store.transfers.done(copy, good=good, now=_now())
+            self.promotions.end
@@ failed-copy-is-not-tried-again  liveness  kvpool.server.state.tier_transfers  seed 31
-                queue.add(entry)  # once more
+                pass  # once more
@@ lost-tier-fills-the-other  G4  kvpool.server.state.tier_transfers  seed 103
-            if waits and not extents.demotes:
+            if False:
@@ lost-tier-keeps-its-blocks  liveness  kvpool.server.tier_health  seed 103
-        for _ in self._store.drop_lost(tier, part):
+        for _ in [next(self._store.drop_lost(tier, part), None)]:
@@ stopped-server-blames-its-disk  liveness  kvpool.server.tier_health  seed 116
-        alarms = [loop.call_later(_STUCK_S, late)]
+        alarms = [loop.call_later(_STUCK_S, self.lose, place, 'stuck')]
@@ lost-disk-gives-back-what-it-fills  G4  kvpool.server.tier_mover  seed 103
-            front.quarantine(MOVER, copy.id, -copy.id)
+            front.cancel(MOVER, copy.id)
@@ quarantine-of-a-lost-disk-never-ends  liveness  kvpool.server.state.tier_transfers  seed 103
-        lost = target.writer_exited(-copy.id)  # with its device: it is counted no more
+        lost = copy.id not in target.held.owner(MOVER).reservations
@@ hanging-disk-is-waited-for  G6  kvpool.server.tier_records  seed 362
-                    with self._health.calling(place):
-                        await self._du
+                    if True:
+                        await self._du
@@ not-yet-is-final  G5  kvpool.client.reader
-still = [i for i in waiting if state.results[i].status is _NOT_YET]
+still = [i for i in waiting if state.results[i].status is None]
@@ any-header-is-believed  G8  kvpool_tiers.nvme.format  seed 6
-if _SUM.unpack_from(headers, end)[0] != checksum(headers[start:end], 0):
+if not any(headers[start:end]):
@@ one-copy-of-a-namespace  G8  kvpool_tiers.nvme.namespaces  seed 6
-        for copy in range(COPIES):  # one after the other
+        for copy in range(1):  # one after the other
@@ full-disk-cannot-be-read  G5  kvpool.server.tier_health  seed 17
-        if tier != store.backing_tier:
-            self.take_offline
+        if tier:
+            self.take_offline
@@ read-only-for-ever  liveness  kvpool.server.tier_health  seed 17
-        while self._store.queue.read_only:
-            await asyncio.sleep(self.retry
+        if self._store.queue.read_only:
+            await asyncio.sleep(self.retry
@@ failed-write-keeps-its-space  liveness  kvpool.server.state.tier_transfers
-            target.cancel(MOVER, copy.id)
-            if down
+            if down
@@ unwritten-blocks-are-forgotten  G5  kvpool.server.state.writeback_queue  seed 17
-            self.unwritten[entry] = None
@@ next-outage-begins-with-the-longest-delay  G6  kvpool.server.tier_health  seed 319
-                self.retry.reset()
@@ living-block-is-not-written  G5  kvpool.server.state.front_store
-        return self.drops_useless and self.policy.is_over(entry)
+        return self.drops_useless
@@ ended-session-is-written  G5  kvpool.server.eviction.session_hints
-        return entry.superseded_at >= entry.last_used or (
+        return False and (
@@ evicted-below-is-written-for-ever  G6  kvpool.server.state.writeback_queue  seed 0
-given_up = self._written_again.get(entry) == entry.last_used
+given_up = False
@@ tails-before-heads  G8  kvpool.server.state.write_back  seed 20
-        entry = self._chain.pop()
-        del
+        entry = self._chain.pop(0)
+        del
@@ disk-evicts-and-memory-forgets  G5  kvpool.server.state.tiered_store
-            self.front.extents.mark_dirty(found)
# --- an object store below all servers
@@ object-store-does-not-hear-of-removals  G8  kvpool.server.cold.state.book  seed 36
-        self.unsaved[one.name] = one
@@ what-other-servers-removed-comes-back  G8  kvpool.server.cold.search  seed 36
-        one.removed |= gone
@@ removed-on-its-way-to-the-object-store  G8  kvpool.server.cold.writer  seed 98
-        for draft in self.drafts.values():
-            for digest
+        for draft in ():
+            for digest
@@ objects-of-the-living-are-everybodys  house  kvpool.server.cold.search  seed 44
-        await self._drop(lambda known: not self._is_mine(known.name))
@@ cold-blocks-that-were-left-out-stay-out  house  kvpool.server.cold.search  seed 19
-if living.servers != self._living.servers or self._index.book.lost:
+if living.servers != self._living.servers:
@@ block-in-an-object-has-the-place-of-the-next  G1  kvpool.server.cold.writer  seed 9
-        block = ColdBlock(*key, parent, position, entry.size,
+        block = ColdBlock(*key, parent, len(draft.payload), entry.size,
# --- blocks that come up before they are read
@@ prefetches-fill-the-memory  G9  kvpool.server.state.prefetches  seed 15
-        self._shares.total = memory // SHARE
+        self._shares.total = memory
@@ prefetched-in-place-of-what-is-in-use  G9  kvpool.server.state.front_store  seed 19
-            return self._last_use(victim) >= last_used and not useless
+            return self._last_use(victim) > JUST_NOW and not useless
@@ prefetched-blocks-that-are-read-stay-unread  advice  kvpool.server.state.tiered_store  seed 17
-                    front.extents.prefetched.read(entry)
+                    pass
# --- prompts that wait
@@ arrivals-lapse-in-the-queue  advice  kvpool.server.eviction.session_announcements  seed 5
-lapses = min(came + WAIT_S, session.waits_since + WAIT_S_MAX)
+lapses = min(came + _EXPIRE_S_MIN, session.waits_since + WAIT_S_MAX)
@@ arrivals-are-never-given-back  advice  kvpool.server.eviction.session_hints  seed 4
-            if session.arrived is not None:
-                self.announced.withdraw(session)
-
-
+
+
@@ late-arrivals-are-believed  advice  kvpool.server.eviction.session_announcements  seed 4
-        came = now - age_s
+        came = now
@@ who-waits-without-a-session-is-never-served  advice  kvpool.server.eviction.session_hints  seed 5
-        if session is not None and not self.end_wait(entry) and not entry.children:
+        if session is not None and not entry.children:
@@ arrivals-have-no-budget  G9  kvpool.server.eviction.session_announcements  seed 5
-return self.bytes > self.budget
+return self.bytes > 2 * self.budget
# --- the world outside
@@ wall-clock  house  kvpool.master.service
-        return asyncio.get_running_loop().time()
+        return __import__('time').time()
@@ every-chain-is-shared  G9  kvpool.master.state.placement
-self._branch(tenant, parent, key) >= SHARED_FROM
+self._branch(tenant, parent, key) >= 1
@@ lost-servers-are-chosen  G9  kvpool.master.state.server_table
-            else:
-                self.placer.remove(record)
+            else:
+                pass
@@ restarted-servers-are-chosen-twice  G9  kvpool.master.state.server_table
-            self.placer.remove(record)
-            self._retire_all(record)
+            self._retire_all(record)
# --- tenants
@@ account-drifts-after-a-crash  G12  kvpool.server.state.tier_stores
-        index.count(self.allocator.rounded(size))
+        index.count(size)
@@ recovered-for-another-tenant  G12  kvpool.server.state.tier_stores
-        index.count(self.allocator.rounded(size))
+        self.extents.policy.accounts.pool.used += self.allocator.rounded(size)
@@ passed-on-extent-counts-twice  G12  kvpool.server.state.extents
-                entry.index.count(-self.allocator.rounded(entry.size))
@@ moved-block-is-not-counted  G12  kvpool.server.state.extents
-        del self.blocks_at[entry.offset]
-        self.allocator.release(entry.offset)
-        entry.offset = target
+        self.free(entry)
+        entry.offset = target
@@ guarantee-taken-by-a-burst  G12  kvpool.server.eviction.tenant_orders
-elif foreign and account.spare < (needed := self._extent(found)):
+elif foreign and account.used < (needed := self._extent(found)):
@@ limit-off-by-one-extent  G12  kvpool.server.state.store
-offset = None if account.used + taken > limit else allocator.allocate(size)
+offset = None if account.used >= limit else allocator.allocate(size)
@@ quota-of-a-removed-tenant-kept  G12  kvpool.server.state.quota  seed 13
-            account.set_quota(self._quotas.get(name))
+            account.set_quota(self._quotas.get(name, account.quota))
@@ hints-cross-tenants  G12  kvpool.server.eviction.tenant_orders
-if hint is not None and tenant_of(hint.session) != index.account.name:
+if hint is not None and not index.account:
@@ at-its-limit-it-evicts-others  G12  kvpool.server.eviction.tenant_orders
-        if mine.exceeds(size):
+        if mine.exceeds(0):
@@ guaranteed-memory-goes-with-the-disk  G12  kvpool.server.state.tiered_store  seed 31
-            if any(copy.index.account.owns(0) for _, copy in copies):
+            if any(copy.index.account.owns(1 << 60) for _, copy in copies):
"""
)
