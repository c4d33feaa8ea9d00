"""The ground truth: what really happened to each block, kept apart from what the pool records."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from kvpool.types import Namespace, ReadStatus

#: Rare events. If a large batch of seeds does not reach each of them, its worlds are too easy.
PROBES: Final = (
    "a chain began away from what it shares",
    "made room by evicting",
    "room was made while a session's prompt waited",
    "a prompt without a session waited",
    "a block was moved to make room",
    "a circle of parents was cut",
    "a circle of parents in a file was cut",
    "a full server refused",
    "two writers met",
    "a server fetched blocks from another one",
    "a full server handed over chains",
    "a server handed over all of its blocks",
    "a server had no time to hand over all of its blocks",
    "a chain was spread",
    "a lost copy came back",
    "a tenant made room for another one",
    "a tenant reached its limit",
    "copies of a contested block are equal",
    "read of a block that is being written",
    "removed while it was read",
    "a reservation was given back",
    "memory was viewed in place",
    "a frozen writer was put in quarantine",
    "quarantine ended",
    "a lost server's blocks were read elsewhere",
    "a silent server was noticed",
    "a task failed and went on",
    "a master noticed that it had slept",
    "an inventory replaced another",
    "an announcement came twice",
    "an announcement came out of order",
    "a piece of an inventory came twice",
    "a wrong map was mended",
    "an impostor was refused",
    "the id of a lost server was taken",
    "a block was demoted to the disk",
    "a block was promoted from the disk",
    "a block left the disk while it was copied",
    "the disk evicted a block that was also in memory",
    "a disk tier came back warm",
    "a server was killed during a write to its disk",
    "the power was cut",
    "a block on disk was found to be corrupt",
    "a block on disk could not be read",
    "a block was stored anew between two reports",
    "a tier was taken out of service",
    "a block left before a read-only disk took it",
    "a block of an ended session was not written to the disk",
    "a disk took writes again",
    "both copies of a page of the disk were lost",
    "a disk had to be replaced",
    "a block was found in the object store",
)


BlockPart = tuple[Namespace, bytes, int]


@dataclass(slots=True)
class PartHistory:
    """All that has happened to one part of one block."""

    holders: set[str] = field(default_factory=set)  # server processes that hold it sealed now
    lives: set[str] = field(default_factory=set)  # all that ever held it
    changed_at: float = 0.0
    lost_at: float = 0.0  # when a copy was lost, even if others remain
    ends: set[ReadStatus] = field(default_factory=set)  # each reason for which a copy was lost
    corrupted: int = 0  # copies that a fault has changed
    #: Server processes for which a fault has listed it at a master, which forgot why it was gone.
    made_up: set[str] = field(default_factory=set)
    removed: dict[str, float] = field(default_factory=dict)  # server -> when it was removed there
    sealed: dict[str, float] = field(default_factory=dict)  # server -> when it last became visible
    erased: set[str] = field(
        default_factory=set
    )  # servers where it must not reappear after a restart


class GroundTruth:
    """The histories of all blocks, recorded when the servers' stores change."""

    def __init__(self, now: Callable[[], float], fail: Callable[[str], None]) -> None:
        self.histories: dict[BlockPart, PartHistory] = {}
        self.now = now
        self.fail = fail
        self.probes: set[str] = set()  # the rare events that have happened, see PROBES
        self._living: dict[str, set[BlockPart]] = {}  # the blocks of each living server process

    def history(self, namespace: Namespace, digest: bytes, part: int) -> PartHistory:
        key = namespace, digest, part
        history = self.histories.get(key)
        if history is None:
            history = self.histories[key] = PartHistory()
        return history

    def sealed(self, life: str, key: BlockPart) -> None:
        """A server process holds the block: it was written there, or found on its disk."""
        history = self.history(*key)
        history.holders.add(life)
        history.lives.add(life)
        history.changed_at = self.now()
        history.sealed[life.partition("#")[0]] = self.now()
        history.erased.discard(life.partition("#")[0])
        self._living[life].add(key)

    def gone(self, life: str, key: BlockPart, status: ReadStatus) -> None:
        """A server process holds the block in none of its tiers any more."""
        history = self.history(*key)
        history.holders.discard(life)
        history.ends.add(status)
        history.changed_at = history.lost_at = self.now()
        if status is ReadStatus.REMOVED:
            history.removed[life.partition("#")[0]] = self.now()
        self._living[life].discard(key)

    def erased(self, namespace: Namespace, digest: bytes, began: float) -> set[str]:
        """Record that a call which began at `began` has returned and reported the block as removed.

        Returns the server that removed it, or nothing if several servers may have.
        """
        histories = [self.history(namespace, digest, part) for part in range(namespace.parts)]
        if not any(ReadStatus.REMOVED in history.ends for history in histories):
            self.fail(f"G5: {digest.hex()[:12]} is reported removed, but no server removed it")
        servers = {
            server
            for history in histories
            for server, when in history.removed.items()
            if when >= began
        }
        if len(servers) != 1:  # any of them may have answered
            return set()
        for history in histories:
            for server in servers & history.removed.keys():
                # Also by a process that has died since (seed 20).
                written_again = history.sealed[server] >= history.removed[server]
                if not written_again:
                    history.erased.add(server)
        return servers

    def held_by(self, life: str) -> set[BlockPart]:
        return self._living.get(life, set())

    def life_began(self, life: str) -> None:
        self._living[life] = set()

    def is_living(self, life: str) -> bool:
        return life in self._living

    def lives_now(self, server: str) -> bool:
        return any(life.startswith(f"{server}#") for life in self._living)

    def life_ended(self, life: str) -> None:
        """A server process has died, with all blocks that it held."""
        for key in self._living.pop(life, ()):
            history = self.histories[key]
            history.holders.discard(life)
            history.ends.add(ReadStatus.SERVER_LOST)
            history.changed_at = history.lost_at = self.now()
