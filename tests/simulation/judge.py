"""The judge: compares each result that a client got with the ground truth.

When no fault has happened for a while, the judge is strict: a block that a living server holds must
be found, and the reason of a miss must be true.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from kvpool.config import ClientConfig
from kvpool.server.state.front_store import FrontStore
from kvpool.types import Match, Namespace, ReadResult, ReadStatus, WriteStatus
from tests.simulation.blocks import ONE, values
from tests.simulation.truth import PartHistory

if TYPE_CHECKING:
    from tests.simulation.nodes import Incident
    from tests.simulation.world import World


_CLIENT: Final = ClientConfig()


#: Limit for a read when one server is frozen: the hedge, and then a read elsewhere.
_HEDGED_S: Final = _CLIENT.hedge_s + 0.5


#: Upper limit for the messages about one block of a read, in both directions, in bytes.
_MESSAGE_SIZE: Final = 100


#: After this time a master knows that a server has died.
_NOTICED_S: Final = 5.0


#: Without faults, every master knows of a change to a block after this time.
_NEWS_S: Final = 2.0


class Judge:
    """Judges the result of one call, which began at `began`."""

    def __init__(self, world: World, began: float, timeout_s: float) -> None:
        self._world = world
        self._began = began
        #: The call had enough time; `_strict`: also, no fault from well before the call until now.
        self._patient = timeout_s >= 1.0
        self._strict = self._patient and world.settled_since(began)
        #: Servers whose memory had no room for a block of this call.
        self._full: set[str] = set()

    def match(self, namespace: Namespace, chain: Sequence[bytes], match: Match) -> None:
        truth = self._world.truth
        for position, digest in enumerate(chain[: match.length]):
            for part in range(namespace.parts):
                if not truth.history(namespace, digest, part).lives:
                    self._fail(f"G1: match lists block {position}, which was never written")
        if match.length < len(chain):
            self.read(namespace, chain[match.length], None, match.stopped, memoryview(b""))
        if self._world.only_kills_since(self._began):
            for position, digest in enumerate(chain[: match.length]):
                gone = not self._held(namespace, digest)
                if gone and self._settled(namespace, digest, _NOTICED_S):
                    self._fail(f"G7: match lists block {position}, which no server holds any more")

    def read(
        self,
        namespace: Namespace,
        digest: bytes,
        part: int | None,
        status: ReadStatus,
        data: memoryview,
        *,
        viewed: bool = False,
    ) -> None:
        """Judge the result for one block; without `part` the result of a match, about all parts."""
        world = self._world
        parts = range(namespace.parts) if part is None else (part,)
        histories = [world.truth.history(namespace, digest, p) for p in parts]
        if status.hit:
            altered = viewed and any(history.corrupted for history in histories)  # after the check
            if part is not None and not altered and data not in values(namespace, digest, part):
                self._fail(f"G1: wrong bytes of {digest.hex()[:12]}")
            return
        # A reason is one of the block, for all of its parts: what became of another part counts.
        corrupted = any(history.corrupted for history in histories)
        if status is ReadStatus.CORRUPT and not (
            corrupted or self._ever(namespace, digest, status)
        ):
            self._fail(f"G1: {digest.hex()[:12]} is reported corrupt, but no fault corrupted it")
        if status is ReadStatus.EVICTED and not self._ever(namespace, digest, status):
            self._fail("G5: the reason is evicted, but it was never evicted")
        if status is ReadStatus.NOT_YET:
            self._fail("G5: NOT_YET is no final result of a read")
        if status is ReadStatus.TIER_LOST and not self._ever(namespace, digest, status):
            self._fail("G5: the reason is a lost tier, but no tier with it was lost")
        if status is ReadStatus.REMOVED and not self._ever(namespace, digest, status):
            self._fail("G5: the reason is removed, but it was never removed")
        masters = len(world.masters)
        if (
            status is ReadStatus.NO_MASTER
            and masters > 1
            and self._only_incident("kill master", "freeze master")
        ):
            self._fail(f"G7: one of {masters} masters is lost, but a lookup found none")
        if not self._strict or viewed:
            return
        if not self._settled(namespace, digest):
            return
        if status is ReadStatus.REFUSED and self._has_no_room(namespace, digest):
            return
        if self._held(namespace, digest) and not any(history.corrupted for history in histories):
            self._fail(f"G5: {digest.hex()[:12]} is held, but a read returned: {status.label}")
        if status in (ReadStatus.NO_MASTER, ReadStatus.DEADLINE, ReadStatus.BEING_WRITTEN):
            self._fail(f"G5: there is no fault, but a read returned: {status.label}")
        if not self._held(namespace, digest) and status not in self._true_reasons(
            namespace, digest
        ):
            self._fail(f"G5: {digest.hex()[:12]}: the reason {status.label} is not true")

    def write(
        self,
        namespace: Namespace,
        chain: Sequence[bytes],
        part: int,
        statuses: Sequence[WriteStatus],
        copies: int,
    ) -> None:
        world = self._world
        # A wrong map may list a copy that no server has; a writer believes it (seed 93146).
        maps_right = not world.wrong_maps and world.maps_right_from <= self._began
        for digest, status in zip(chain, statuses, strict=True):
            if status in (WriteStatus.NOT_YET, WriteStatus.RESERVED):
                self._fail(f"G5: {status.label} is no final result of a write")
            lives = world.truth.history(namespace, digest, part).lives
            needed = copies if maps_right else 1
            if status.present and len(lives) < needed:
                self._fail(f"G5: {status.label}: {copies} copies requested, {len(lives)} made")

    def found(
        self,
        namespace: Namespace,
        chain: Sequence[bytes],
        statuses: Sequence[WriteStatus],
        length: int,
        wrote: float,
    ) -> None:
        """Blocks that were just acknowledged as visible are matched at once (G5).

        Except when that copy has been lost since the write began: masters need not know another
        copy whose write is not acknowledged yet (seed 97).
        """
        if not self._strict or length == len(chain):
            return
        history = self._world.truth.history(namespace, chain[length], 0)
        recorded = history.holders and history.changed_at < self._began and history.lost_at < wrote
        if statuses[length].present and recorded:
            self._fail(f"G5: block {length} was {statuses[length].label}, but is not found")

    def hedge(
        self,
        namespace: Namespace,
        chain: Sequence[bytes],
        part: int,
        results: Sequence[ReadResult],
        spent: float,
        match: Match | None,
    ) -> None:
        """With one server frozen or killed and no other fault, a read costs one hedge (G6)."""
        only_incident = self._only_incident("freeze server", "kill server")
        if only_incident is None or namespace is not ONE:
            return
        truth = self._world.truth
        for position, digest in enumerate(chain):
            history = truth.history(namespace, digest, part)
            others = {life.partition("#")[0] for life in history.holders} - {only_incident.target}
            if match is None:
                unknown = self._changed_since(history, only_incident)
            else:
                known = [run for run in match.runs if run.first <= position <= run.last]
                replicas = {replica.server for run in known for replica in run.replicas}
                unknown = not others & replicas
            if not others or history.corrupted or unknown:
                return
        truth.probes.add("a lost server's blocks were read elsewhere")
        if not all(result.status.hit for result in results):
            self._fail(f"G6: {only_incident.name}: a block with another copy was not read")
        conditions = self._world.net.conditions
        messages = _MESSAGE_SIZE * len(results)
        whole_s = conditions.slow_s(messages + sum(result.size for result in results))
        allowed_s = _HEDGED_S + 10 * self._world.plan.copy_s + whole_s
        allowed_s += self._world.disk_s(len(chain))
        if conditions.slow_s(messages) > _CLIENT.hedge_s:
            # Seed 22923: on such a network a healthy server, too, may send nothing for `hedge_s`.
            # Then the read leaves each server once, and may wait `attempt_s` for the lost one.
            left_s = _CLIENT.hedge_s + whole_s
            allowed_s += len(self._world.servers) * left_s + _CLIENT.attempt_s
        if spent > allowed_s:
            self._fail(f"G6: {only_incident.name}: a read with other copies took {spent:.3f} s")

    def _only_incident(self, *names: str) -> Incident | None:
        """The fault that began before this call, if it is the only one and one of `names`."""
        only_incident = self._world.only_incident
        if (
            only_incident is None
            or only_incident.name not in names
            or only_incident.since > self._began
        ):
            return None
        return only_incident if self._patient else None

    def _changed_since(self, history: PartHistory, only_incident: Incident) -> bool:
        """Another event than this fault has changed the block's replicas lately."""
        return (
            history.changed_at != only_incident.since
            and history.changed_at > only_incident.since - _NEWS_S
        )

    def _held(self, namespace: Namespace, digest: bytes) -> bool:
        """Each part is on at least one living server."""
        histories = [
            self._world.truth.history(namespace, digest, part) for part in range(namespace.parts)
        ]
        return all(history.holders for history in histories)

    def _has_no_room(self, namespace: Namespace, digest: bytes) -> bool:
        """A part is on a disk only, below a memory that would have to evict its parent for it.

        Nothing else may go there, or the parent is the next victim and has no copy (seed 800489).
        Blocks come up in the order of the call: where one finds no room, those behind it are not
        tried, though the parent of the first is not theirs (seed 901064).
        """
        for node in self._world.servers:
            if node.server is None:
                continue
            stack = node.server.stack
            for part in range(namespace.parts):
                entry = stack.peek(namespace, part, digest)
                if entry is None or stack.front.index.peek(namespace, part, digest) is not None:
                    continue
                if node.name in self._full:
                    return True
                assert isinstance(stack.front, FrontStore)
                leaves = [
                    one
                    for one in stack.front.index.inventory()
                    if stack.front.extents.evictable(one)
                ]
                parents = [leaf for leaf in leaves if leaf.digest == entry.parent]
                only_parents = len(parents) == len(leaves)
                if only_parents or not all(map(stack.front.extents.has_copy, parents)):
                    self._full.add(node.name)
                    return True
        return False

    def _settled(self, namespace: Namespace, digest: bytes, within_s: float = _NEWS_S) -> bool:
        """The block's replicas have not changed since `within_s` before the call."""
        histories = [
            self._world.truth.history(namespace, digest, part) for part in range(namespace.parts)
        ]
        return all(history.changed_at < self._began - within_s for history in histories)

    def _true_reasons(self, namespace: Namespace, digest: bytes) -> set[ReadStatus]:
        """All reasons that are true for a block that is not there."""
        world = self._world
        histories = [world.truth.history(namespace, digest, p) for p in range(namespace.parts)]
        reasons = set().union(*(history.ends for history in histories))
        lives = set().union(*(history.lives | history.made_up for history in histories))
        died = not all(map(world.truth.is_living, lives))
        if died:  # perhaps before it announced why the block left
            reasons.add(ReadStatus.SERVER_LOST)
        if namespace.parts > 1:
            reasons.add(ReadStatus.PART_MISSING)
        # A server loses its tombstones when it dies, and masters get theirs from servers.
        forgotten = died or world.report.faults["kill server"] or any(h.made_up for h in histories)
        if forgotten or not all(history.lives for history in histories):
            reasons.add(ReadStatus.NEVER_WRITTEN)
        return reasons

    def _ever(self, namespace: Namespace, digest: bytes, status: ReadStatus) -> bool:
        return any(
            status in self._world.truth.history(namespace, digest, part).ends
            for part in range(namespace.parts)
        )

    def _fail(self, what: str) -> None:
        self._world.loop.fail(what)
