"""What the world of one seed looks like: drawn once, before anything runs."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Final

from tests.simulation.cold import FAULTS_OF_COLD
from tests.simulation.nemesis import FAULTS, FAULTS_OF_DISKS, HOARD
from tests.simulation.platter import PAGE
from tests.simulation.reports import REPORTS
from tests.simulation.task_faults import TASK_FAULT
from tests.simulation.wrong_maps import FAULTS_OF_MAPS

ALIGNMENT: Final = 64


#: Eviction policies of the lowest tier; each world with disks draws one. `programs`, whose guesses
#: are of a whole pool's traffic, has worlds of its own, with disks and without.
POLICIES: Final = ("lru", "arc", "lease", "density")


@dataclass(frozen=True, slots=True)
class WorldPlan:
    """The parameters of one seed's world, drawn once before the history begins."""

    seed: int
    masters: int
    servers: int
    hosts: int
    clients: int
    capacity: int
    ops: int
    chaos_s: float
    verify: bool
    shm: bool
    faults: frozenset[str]
    check_every: int
    copy_s: float
    disk: int = 0  # bytes of each server's disk; 0 means no disk
    large: bool = False  # some blocks are larger than a page
    policy: str = "lru"  # of the lowest tier
    guesses: bool = False  # the lowest tier's policy infers conversations from chains, instead
    kept_secrets: bool = False  # a restarted server has the secret of the process before
    contests: bool = False  # writers disagree about the bytes of some blocks
    piece_blocks: int = 1024  # blocks in one piece of an inventory
    write_back: bool = False  # servers write to their disks what memory would drop
    crowds: bool = False  # many servers, and one prompt at the head of every chain
    circles: bool = False  # some blocks are their own ancestors, in writes and in files
    sessions: bool = False  # clients name sessions, whose prompts wait in queues
    joins: bool = False  # one server comes back empty, and the full ones hand over to it
    moves: bool = False  # servers fetch blocks from each other, and leave
    fetch_rate: int = 0  # bytes per second; 0: a quarter of what is measured
    step_blocks: int = 64  # that one transfer of a fetch brings
    prefetches: bool = False  # clients have blocks brought up from disks
    prefetch_rate: int = 0  # bytes per second; 0: a quarter of what is measured
    fresh_s: float = 2.0  # what was used so lately is not evicted for a prefetch
    copies: bool = False  # clients spread chains, servers make lost copies again
    tenants: bool = False  # two tenants beside the pool itself, whose quotas change
    one_request_max: int = 0  # bytes of a write that comes in one request
    piece_bytes: int = 0  # of reads that several servers share; 0: none is large enough
    cold: bool = False  # servers share an object store below their memory
    cold_is_small: bool = False  # each of them uses little of it

    @property
    def alignment(self) -> int:
        return PAGE if self.disk else ALIGNMENT

    @property
    def usual_extent(self) -> int:
        """The typical size of an extent, in bytes."""
        return PAGE if self.disk else 384

    @property
    def viewed_max(self) -> int:
        """The maximum number of blocks in one read_view of a client."""
        return max(1, self.capacity // PAGE // 12) if self.disk else 1_000_000

    @classmethod
    def draw(cls, seed: int, ops: int, without: frozenset[str]) -> WorldPlan:
        rng = random.Random(f"{seed}/plan")
        verify = bool(seed % 2)  # every second world runs without checksums, which hide bugs
        faults = {name for name in FAULTS if rng.random() < 0.45}
        if not verify:
            faults.discard("rot")  # without checksums nothing can notice it
        plan = cls(
            seed=seed,
            masters=rng.choice([1, 1, 2, 3]),
            servers=rng.choice([1, 2, 2, 3, 3]),
            hosts=rng.choice([1, 2]),
            clients=rng.randint(2, 4),
            capacity=ALIGNMENT * rng.choice([96, 192, 384]),
            ops=ops,
            chaos_s=rng.uniform(20, 45),
            verify=verify,
            shm=rng.random() < 0.7,
            faults=frozenset(faults - without),
            copy_s=rng.choice([0.0005, 0.02, 0.1]),
            check_every=rng.choice([1, 12, 12, 12]),
            kept_secrets=random.Random(f"{seed}/secrets").random() < 0.5,
        )
        # Separate streams keep the other worlds as they were.
        contests = random.Random(f"{seed}/contests").random() < 0.4
        plan = replace(plan, contests=contests and "contests" not in without)
        rng = random.Random(f"{seed}/crowds")
        if rng.random() < 0.2 and "crowds" not in without:
            plan = replace(plan, crowds=True, servers=rng.randint(3, 8))
        circles = random.Random(f"{seed}/circles").random() < 0.3
        plan = replace(plan, circles=circles and "circles" not in without)
        moving = random.Random(f"{seed}/moves")
        if moving.random() < 0.4 and plan.servers > 1 and "moves" not in without:
            plan = replace(
                plan,
                moves=True,
                fetch_rate=moving.choice([0, 2_000, 8_000]),
                step_blocks=moving.choice([1, 3, 64]),
            )
        joins = random.Random(f"{seed}/joins").random() < 0.25 and plan.servers > 1
        plan = replace(plan, joins=joins and "joins" not in without)
        rng = random.Random(f"{seed}/copies")
        if plan.moves and not plan.joins and rng.random() < 0.6 and "copies" not in without:
            plan = replace(plan, copies=True)
        if random.Random(f"{seed}/strangers").random() < 0.4 and HOARD not in without:
            plan = replace(plan, faults=plan.faults | {HOARD})
        if random.Random(f"{seed}/tasks").random() < 0.15 and TASK_FAULT not in without:
            plan = replace(plan, faults=plan.faults | {TASK_FAULT})
        if verify and random.Random(f"{seed}/reports").random() < 0.2 and REPORTS not in without:
            plan = replace(plan, faults=plan.faults | {REPORTS})
        rng = random.Random(f"{seed}/maps")
        of_maps = {name for name in FAULTS_OF_MAPS if rng.random() < 0.35}
        plan = replace(plan, faults=plan.faults | (of_maps - without))
        tenants = random.Random(f"{seed}/tenants").random() < 0.2
        plan = replace(plan, tenants=tenants and "tenants" not in without)
        rng = random.Random(f"{seed}/one-request")
        if rng.random() < 0.5 and "one-request" not in without:
            plan = replace(plan, one_request_max=rng.choice([700, 3_000, 1 << 20]))
        rng = random.Random(f"{seed}/many-ways")
        if rng.random() < 0.3 and "many-ways" not in without:
            plan = replace(plan, piece_bytes=rng.choice([1, 500, 2_000]))
        guesses = random.Random(f"{seed}/guesses").random() < 0.3
        if guesses and "guesses" not in without:
            plan = replace(plan, guesses=True, policy="programs")
        pieces = random.Random(f"{seed}/pieces").choice([1, 3, 10, 1024])
        plan = replace(plan, piece_blocks=pieces)
        rng = random.Random(f"{seed}/cold")
        if rng.random() < 0.15 and "cold" not in without:
            faults = {name for name in FAULTS_OF_COLD if rng.random() < 0.5} - without
            return replace(
                plan,
                cold=True,
                cold_is_small=rng.random() < 0.3,
                faults=plan.faults | faults,
                # One version of each block, which comes and goes by the object store alone.
                contests=False,
                moves=False,
                joins=False,
                copies=False,
                tenants=False,
            )
        rng = random.Random(f"{seed}/disk")
        if rng.random() < 0.5 or "disk" in without:
            sessions = random.Random(f"{seed}/sessions").random() < 0.3
            # The oracle of waiting prompts looks at one order of eviction.
            wanted = sessions and not plan.tenants and "sessions" not in without
            return replace(plan, sessions=wanted)
        extents = rng.randint(6, 24)
        share = rng.choice([0.5, 1.0, 1.0, 1.5, 2.0, 4.0])
        own = {name for name in FAULTS_OF_DISKS if rng.random() < 0.35}
        slow_net = {"chop", "narrow"} & plan.faults
        prefetching = random.Random(f"{seed}/prefetches")
        if prefetching.random() < 0.5 and "prefetches" not in without:
            rate = prefetching.choice([0, 500, 5 * PAGE])
            fresh_s = prefetching.choice([0.1, 0.1, 2.0])
            plan = replace(plan, prefetches=True, prefetch_rate=rate, fresh_s=fresh_s)
        large = rng.random() < 0.6 and not slow_net
        drawn = rng.choice(POLICIES)
        return replace(
            plan,
            capacity=PAGE * extents,
            disk=PAGE * round(extents * share),
            large=large,
            policy="programs" if plan.guesses else drawn,
            faults=plan.faults | (own - without),
            write_back=random.Random(f"{seed}/write-mode").random() < 0.4
            and "write-back" not in without,
        )
