"""What goes into and out of each tier: bytes, blocks, seconds, recent rates, failures."""

from __future__ import annotations

from collections.abc import Sequence

from kvpool.protocols import Tier
from kvpool.server.state.tiered_store import TieredStore
from kvpool.types import TierUsage


class TransferStats:
    """One direction of one tier: what was transferred, and the seconds in which any of it was."""

    def __init__(self) -> None:
        self.size = 0
        self.blocks = 0
        self.seconds = 0.0
        self.rate = 0.0  # bytes per second lately
        self.block_rate = 0.0
        self._running = 0
        self._since = 0.0
        self._counted = (0.0, 0, 0)  # when the rates were last computed, of what

    def begin(self, now: float) -> None:
        """One more transfer. Those that overlap share their seconds."""
        if not self._running:
            self._since = now
        self._running += 1

    def end(self, now: float) -> None:
        """A transfer has ended, successful or not."""
        self._running -= 1
        if not self._running:
            self.seconds += now - self._since

    def tick(self, now: float) -> None:
        """Bring the rates up to date, once a second at most."""
        since, size, blocks = self._counted
        if now - since >= 1.0:
            self.rate = (self.size - size) / (now - since)
            self.block_rate = (self.blocks - blocks) / (now - since)
            self._counted = (now, self.size, self.blocks)


class TierTraffic:
    """What was read from and written to one tier, and what went wrong."""

    def __init__(self) -> None:
        self.read = TransferStats()
        self.written = TransferStats()
        self.failures = 0
        self.write_error = ""  # the last one
        self.bug = ""  # the last error that a tier may not raise
        self.corrupt = 0
        self.dropped: dict[str, int] = {}  # at the start, by reason


def usage(
    tiers: Sequence[Tier],
    store: TieredStore,
    traffic: Sequence[TierTraffic],
    problems: Sequence[Sequence[str]],
    now: float,
) -> list[TierUsage]:
    """How full each tier is and what goes through it, for `kvpool status` and `/metrics`;
    `problems` says what is wrong with parts of each, a sentence for each part."""
    answer = []
    for number, (tier, one, moved) in enumerate(zip(tiers, store.stores, traffic, strict=True)):
        moved.read.tick(now)
        moved.written.tick(now)
        answer.append(
            TierUsage(
                name=tier.name,
                status_text=_status_text(
                    tier, "; ".join(problems[number]), moved.write_error * store.queue.read_only
                ),
                files_out=len(problems[number]),
                lost=number in store.index.offline,
                read_only=store.queue.read_only and number == store.backing_tier,
                capacity=one.allocator.capacity,
                used=one.allocator.allocated,
                blocks=one.index.stored,
                hits=store.index.hits[number],
                read_bytes=moved.read.size,
                read_s=moved.read.seconds,
                read_rate=moved.read.rate,
                written_bytes=moved.written.size,
                write_s=moved.written.seconds,
                write_rate=moved.written.rate,
                failures=moved.failures,
                corrupt=moved.corrupt,
                written_blocks=moved.written.blocks,
                write_block_rate=moved.written.block_rate,
                dropped=moved.dropped,
            )
        )
    return answer


def _status_text(tier: Tier, problem: str, read_only_because: str) -> str:
    text: str = getattr(tier, "status_text", "")
    if read_only_because:
        problem = f"{problem}{'; ' * bool(problem)}read-only: {read_only_because}"
    return f"{text}{', ' * bool(text and problem)}{problem}"
