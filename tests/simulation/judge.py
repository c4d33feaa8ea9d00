"""The judge: compares each answer that a client got with the ground truth."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from kvpool.config import ClientConfig
from kvpool.types import (
    Match,
    Namespace,
    ReadResult,
    ReadStatus,
    WriteStatus,
)
from tests.simulation.blocks import ONE, value
from tests.simulation.oracles import Story

if TYPE_CHECKING:
    from tests.simulation.nodes import Incident
    from tests.simulation.world import World


_CLIENT: Final = ClientConfig()


#: A read that finds one server frozen takes this long at most: the hedge, and then a read.
_HEDGED_S: Final = _CLIENT.hedge_s + 0.5


#: What is said about one block when it is read, in either direction: bytes, generously.
_WORDS_SIZE: Final = 100


#: A master knows of a server's death by then.
_NOTICED_S: Final = 5.0


#: How long news of a block takes to every master when nothing is wrong.
_NEWS_S: Final = 2.0


class Judge:
    """Compares one answer with the truth."""

    def __init__(self, world: World, began: float, timeout_s: float) -> None:
        self._world = world
        self._began = began
        #: Nothing was wrong from well before the call until now, and it had time.
        self._patient = timeout_s >= 1.0
        self._strict = self._patient and world.calm_since(began)

    def match(self, namespace: Namespace, chain: Sequence[bytes], match: Match) -> None:
        truth = self._world.truth
        for position, digest in enumerate(chain[: match.length]):
            for part in range(namespace.parts):
                if not truth.story(namespace, digest, part).lives:
                    self._fail(f"G1: match says block {position} is there; nobody ever wrote it")
        if match.length < len(chain):
            self.read(namespace, chain[match.length], None, match.stopped, memoryview(b""))
        if self._world.only_kills_since(self._began):
            for position, digest in enumerate(chain[: match.length]):
                gone = not self._held(namespace, digest)
                if gone and self._settled(namespace, digest, _NOTICED_S):
                    self._fail(f"G7: match says block {position} is there; no server has held it")

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
        """One block's outcome; without `part`, that of a match, which concerns all parts."""
        world = self._world
        parts = range(namespace.parts) if part is None else (part,)
        stories = [world.truth.story(namespace, digest, p) for p in parts]
        if status.hit:
            spoilt = viewed and any(story.rotten for story in stories)  # after it was verified
            if part is not None and not spoilt and data != value(namespace, digest, part):
                self._fail(f"G1: wrong bytes of {digest.hex()[:12]}")
            return
        if status is ReadStatus.CORRUPT and not any(story.rotten for story in stories):
            self._fail(f"G1: {digest.hex()[:12]} is said to be corrupt, and nobody spoilt it")
        if status is ReadStatus.EVICTED and not self._ever(namespace, digest, status):
            self._fail("G5: evicted, says the pool; it never was")
        if status is ReadStatus.NOT_YET:
            self._fail("G5: not yet, says the pool, and leaves it at that")
        if status is ReadStatus.TIER_LOST and not self._ever(namespace, digest, status):
            self._fail("G5: its tier is lost, says the pool; it never was")
        if status is ReadStatus.REMOVED and not self._ever(namespace, digest, status):
            self._fail("G5: removed, says the pool; it never was")
        masters = len(world.masters)
        if (
            status is ReadStatus.NO_MASTER
            and masters > 1
            and self._alone("kill master", "freeze master")
        ):
            self._fail(f"G7: one of {masters} masters is lost, and nobody can be asked")
        if not self._strict or viewed:
            return
        if not self._settled(namespace, digest):
            return
        if self._held(namespace, digest) and not any(story.rotten for story in stories):
            self._fail(f"G5: {digest.hex()[:12]} is held, and a reader is told: {status.label}")
        if status in (ReadStatus.NO_MASTER, ReadStatus.DEADLINE, ReadStatus.BEING_WRITTEN):
            self._fail(f"G5: nothing is wrong, and a reader is told: {status.label}")
        if not self._held(namespace, digest) and status not in self._true_reasons(
            namespace, digest
        ):
            self._fail(f"G5: {digest.hex()[:12]} is said to be {status.label}, which is not true")

    def write(
        self,
        namespace: Namespace,
        chain: Sequence[bytes],
        part: int,
        statuses: Sequence[WriteStatus],
        copies: int,
    ) -> None:
        for digest, status in zip(chain, statuses, strict=True):
            if status in (WriteStatus.NOT_YET, WriteStatus.RESERVED):
                self._fail(f"G5: {status.label}, says the pool of a write, and leaves it at that")
            lives = self._world.truth.story(namespace, digest, part).lives
            if status.present and len(lives) < copies:
                self._fail(f"G5: {status.label}: {copies} copies asked for, {len(lives)} made")

    def found(
        self,
        namespace: Namespace,
        chain: Sequence[bytes],
        statuses: Sequence[WriteStatus],
        length: int,
        wrote: float,
    ) -> None:
        """What has just been acknowledged as visible is matched at once (G5).

        Unless that copy has gone since the write began: another one, of somebody whose write is
        not acknowledged yet, need not be known (seed 97).
        """
        if not self._strict or length == len(chain):
            return
        story = self._world.truth.story(namespace, chain[length], 0)
        told = story.holders and story.changed_at < self._began and story.lost_at < wrote
        if statuses[length].present and told:
            self._fail(f"G5: block {length} was {statuses[length].label}, and is not found")

    def hedge(
        self,
        namespace: Namespace,
        chain: Sequence[bytes],
        part: int,
        results: Sequence[ReadResult],
        spent: float,
        match: Match | None,
    ) -> None:
        """While one server is frozen and nothing else is wrong, replicas cost a hedge (G6)."""
        alone = self._alone("freeze server", "kill server")
        if alone is None or namespace is not ONE:
            return
        truth = self._world.truth
        for position, digest in enumerate(chain):
            story = truth.story(namespace, digest, part)
            others = {life.partition("#")[0] for life in story.holders} - {alone.target}
            if match is None:
                unknown = self._changed_since(story, alone)
            else:
                known = [run for run in match.runs if run.first <= position <= run.last]
                replicas = {replica.server for run in known for replica in run.replicas}
                unknown = not others & replicas
            if not others or story.rotten or unknown:
                return
        truth.notes.add("a lost server's blocks were read elsewhere")
        if not all(result.status.hit for result in results):
            self._fail(f"G6: {alone.name}: a block with another copy was not read")
        conditions = self._world.net.conditions
        words = _WORDS_SIZE * len(results)
        whole_s = conditions.slow_s(words + sum(result.size for result in results))
        allowed_s = _HEDGED_S + 10 * self._world.plan.copy_s + whole_s
        allowed_s += self._world.disk_s(len(chain))
        if conditions.slow_s(words) > _CLIENT.hedge_s:
            # Seed 22923: on such a network a healthy server may be silent for so long, too. Then
            # all are left once, and the lost one may be the first to be given `attempt_s`.
            left_s = _CLIENT.hedge_s + whole_s
            allowed_s += len(self._world.servers) * left_s + _CLIENT.attempt_s
        if spent > allowed_s:
            self._fail(f"G6: {alone.name}: a read with other copies took {spent:.3f} s")

    def _alone(self, *names: str) -> Incident | None:
        """The fault that began before this call, if it is all that is wrong, and of such a kind."""
        alone = self._world.alone
        if alone is None or alone.name not in names or alone.since > self._began:
            return None
        return alone if self._patient else None

    def _changed_since(self, story: Story, alone: Incident) -> bool:
        """Something else than this fault has happened to the block lately."""
        return story.changed_at != alone.since and story.changed_at > alone.since - _NEWS_S

    def _held(self, namespace: Namespace, digest: bytes) -> bool:
        """Every part is on some server."""
        stories = [
            self._world.truth.story(namespace, digest, part) for part in range(namespace.parts)
        ]
        return all(story.holders for story in stories)

    def _settled(self, namespace: Namespace, digest: bytes, within_s: float = _NEWS_S) -> bool:
        """Nothing has happened to the block since well before the call."""
        stories = [
            self._world.truth.story(namespace, digest, part) for part in range(namespace.parts)
        ]
        return all(story.changed_at < self._began - within_s for story in stories)

    def _true_reasons(self, namespace: Namespace, digest: bytes) -> set[ReadStatus]:
        """Everything that could truly be said of a block that is not there."""
        world = self._world
        stories = [world.truth.story(namespace, digest, p) for p in range(namespace.parts)]
        reasons = set().union(*(story.ends for story in stories))
        if any(not world.truth.is_living(life) for story in stories for life in story.lives):
            # A master may not have heard why it was thrown out when that server died.
            reasons.add(ReadStatus.SERVER_LOST)
        if namespace.parts > 1:
            reasons.add(ReadStatus.PART_MISSING)
        # A server's record dies with it; a master gets its own back from the servers.
        if world.report.faults["kill server"] or not all(story.lives for story in stories):
            reasons.add(ReadStatus.NEVER_WRITTEN)
        return reasons

    def _ever(self, namespace: Namespace, digest: bytes, status: ReadStatus) -> bool:
        return any(
            status in self._world.truth.story(namespace, digest, part).ends
            for part in range(namespace.parts)
        )

    def _fail(self, what: str) -> None:
        self._world.loop.fail(what)
