"""When one master has enough to do, and what helps: its measured costs times a fleet's messages."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from benchmarks.fleet.master_costs import MasterCosts
from benchmarks.fleet.options import GPUS_PER_INSTANCE
from benchmarks.fleet.results import FleetResult

#: Tokens in a block of the published deployment.
BLOCK_TOKENS: Final = 64
#: A master that has more of a core to do answers late.
SATURATED: Final = 0.7
SIZES: Final = (12, 60, 240, 1_000, 10_000)


@dataclass(frozen=True, slots=True)
class MasterLoad:
    """What one master receives in a second. `stored` blocks come in announcements of `batch` each,
    and as many leave; every `find` asks for `found` blocks."""

    finds: float
    found: float
    places: float
    stored: float
    batch: float
    servers: float

    def times(self, factor: float) -> MasterLoad:
        """Of a fleet that is so many times as large."""
        return MasterLoad(
            *(self.finds * factor, self.found, self.places * factor, self.stored * factor),
            *(self.batch, self.servers * factor),
        )

    def lookups_s(self, costs: MasterCosts) -> float:
        """Seconds of CPU in a second for clients."""
        new = self.stored / max(self.places, 1e-9)
        # What was stored since is asked for the first time once, by whoever comes next.
        known = costs.find_again.of(max(0.0, self.found - new))
        finds = self.finds * (costs.socket + known + new * costs.find.block)
        return finds + self.places * (costs.socket + costs.place.of(new))

    def announcements_s(self, costs: MasterCosts) -> float:
        """Seconds of CPU in a second for servers."""
        one = 2 * costs.socket + costs.stored.of(self.batch) + costs.removed.of(self.batch)
        beats = self.servers * (costs.socket + costs.heartbeat)
        return self.stored / self.batch * one + beats

    def share(self, costs: MasterCosts, masters: int = 1) -> float:
        """Of one core of each master: clients divide themselves, servers tell all of them."""
        return self.lookups_s(costs) / masters + self.announcements_s(costs)

    def masters(self, costs: MasterCosts) -> int | None:
        """How many are needed; None: no number, because announcements alone are too much."""
        left = SATURATED - self.announcements_s(costs)
        return math.ceil(self.lookups_s(costs) / left) if left > 0 else None


def of_instance(result: FleetResult) -> MasterLoad:
    """Of one instance of a full pool: each prompt is one lookup, one placement, and announcements
    of what was new, for which as much must leave."""
    instances = result.tokens_s / result.tokens_s_per_gpu / GPUS_PER_INSTANCE
    prompts_s = result.prompts / result.seconds / instances
    blocks = result.tokens_s / instances / prompts_s / BLOCK_TOKENS
    new = max(1.0, blocks * (1 - result.hit_rate))
    return MasterLoad(prompts_s, blocks, prompts_s, prompts_s * new, new, 1)


class Lever(NamedTuple):
    """A way to relieve a master, and its share of a core by the fleet's size."""

    name: str
    shares: list[float]
    saturated_gpus: float


def levers(instance: MasterLoad, costs: MasterCosts) -> Iterator[Lever]:
    """What each buys alone, and all together."""
    half = replace(costs, find=costs.find.half(), find_again=costs.find_again.half())
    sighted = replace(instance, finds=0.0)
    batched = replace(instance, batch=256.0)
    yield _lever("one master", instance, costs)
    yield _lever("three masters", instance, costs, 3)
    yield _lever("a lookup costs half", instance, half)
    yield _lever("sightings: no lookup where a session comes back to its engine", sighted, costs)
    yield _lever("announcements of 256 blocks", batched, costs)
    yield _lever("all four", replace(sighted, batch=256.0), half, 3)


def _lever(name: str, instance: MasterLoad, costs: MasterCosts, masters: int = 1) -> Lever:
    shares = [instance.times(gpus / GPUS_PER_INSTANCE).share(costs, masters) for gpus in SIZES]
    return Lever(name, shares, GPUS_PER_INSTANCE * SATURATED / instance.share(costs, masters))


class LargePool(NamedTuple):
    """A pool of servers of 1 TiB: how busy one master is, how many are needed, and their memory."""

    servers: int
    blocks: float
    writes_s: float
    matches_s: float
    batch: int
    lookups: float  # cores
    announcements: float  # cores
    masters: int | None
    memory: float  # bytes of each


def large_pools(costs: MasterCosts) -> Iterator[LargePool]:
    """Up to 128 servers with half a million blocks each; matches ask for 2,048 blocks."""
    for servers in (8, 32, 128):
        blocks, writes_s, matches_s = 5e5 * servers, 200e3 * servers / 128, 20e3 * servers / 128
        for batch in (16, 256):
            load = MasterLoad(matches_s, 2048, writes_s / 64, writes_s, batch, servers)
            yield LargePool(
                *(servers, blocks, writes_s, matches_s, batch),
                *(load.lookups_s(costs), load.announcements_s(costs), load.masters(costs)),
                blocks * costs.bytes,
            )
