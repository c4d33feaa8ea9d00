"""Loads of engines: from the memory of servers, and through it from the disks below."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from benchmarks.fleet.disks import ServerDisk
from benchmarks.fleet.events import EventQueue
from benchmarks.fleet.links import LinkTransfer, QueuedLink, SharedLink
from kvpool.server.state.tiered_store import TieredStore
from kvpool.tools.dry_pool import BLOCK_SIZE, DryPool, HeldRun
from kvpool.types import Namespace, ReadStatus

#: Blocks of a run that a reader has asked a server with a disk for at a time.
_AHEAD: Final = 16
_OWNER: Final = 1


@dataclass(slots=True, eq=False)
class PoolLoad:
    """Blocks on their way to an engine; what is in memory stays there until it has passed.

    `parts` are the ways on which they come at the same time and that have not ended.
    """

    pool: DryPool
    began: float
    ended: Callable[[PoolLoad], None]
    pins: list[HeldRun] = field(default_factory=list)
    running: bool = True
    transfers: dict[LinkTransfer, SharedLink] = field(default_factory=dict)
    parts: int = 0
    came: float = 0.0  # bytes of transfers that have ended

    def start(self, link: SharedLink, size: float, received: Callable[[], None]) -> None:
        """Let so many bytes pass over the engine's link, and call `received` then."""

        def passed() -> None:
            del self.transfers[transfer]
            self.came += size
            received()

        transfer = link.start(size, passed)
        self.transfers[transfer] = link

    def stop(self) -> float:
        """Give it up, if it is running. Returns the bytes that have come."""
        if self.running:
            self.running = False
            self.pool.unpin(self.pins)
            self.pins.clear()
        for transfer, link in self.transfers.items():
            self.came += link.stop(transfer)
        self.transfers.clear()
        return self.came

    def reads_from(self, server: str) -> bool:
        """Whether blocks of it are held there."""
        return any(run.server == server for run in self.pins)


class DiskRead:
    """One run of a load, from a server with a disk: some blocks at a time, in their order.

    Those in memory are sent, and the next ones are brought up meanwhile. It ends early at a block
    that is not there any more.
    """

    def __init__(
        self,
        load: PoolLoad,
        server: str,
        disk: ServerDisk,
        events: EventQueue,
        *,
        namespace: Namespace,
        digests: Sequence[bytes],
        block_bytes: float,
        sends: QueuedLink,
        receives: SharedLink,
        ended: Callable[[], None],
    ) -> None:
        self.server = server
        self._load = load
        self._store: TieredStore = load.pool.servers[server].store
        self._disk = disk
        self._events = events
        self._namespace = namespace
        self._digests = digests
        self._block_bytes = block_bytes
        self._sends = sends
        self._receives = receives
        self._ended = ended
        self._at = 0

    def step(self) -> None:
        """Send what is in memory of the next blocks, or wait for the first of them."""
        if not self._load.running:
            return
        ahead = self._digests[self._at : self._at + _AHEAD]
        server = self._load.pool.servers.get(self.server)
        if not ahead or server is None or server.store is not self._store:
            self._ended()
            return
        sizes = [BLOCK_SIZE] * len(ahead)
        now = self._events.now
        pins = self._store.pin(_OWNER, self._namespace, 0, ahead, now, sizes)
        hits = [pin.status is ReadStatus.HIT for pin in pins]
        got = hits.index(False) if False in hits else len(hits)
        for pin, hit in zip(pins[got:], hits[got:], strict=True):
            if hit:
                self._store.front.unpin(_OWNER, pin.id)
        held = HeldRun(self.server, self._store, pins[:got])
        if got:
            self._load.pins.append(held)
        later = self._digests[self._at + got : self._at + got + _AHEAD]
        if later:
            self._disk.promote(self._namespace, later)
        if got:
            self._at += got
            self._send(held)
        elif pins[0].status is not ReadStatus.NOT_YET or not self._disk.when_promoted(
            self._namespace, ahead[0], self.step
        ):
            self._ended()

    def _send(self, held: HeldRun) -> None:
        size = len(held.pins) * self._block_bytes
        sent_at = self._sends.take(size, self._events.now)

        def received() -> None:
            self._events.at(max(sent_at, self._events.now), passed)

        def passed() -> None:
            if self._load.running:
                self._load.pins.remove(held)
                self._load.pool.unpin([held])
                self.step()

        self._load.start(self._receives, size, received)
