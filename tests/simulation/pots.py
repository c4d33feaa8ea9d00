"""Worlds of what many share: one asks for all that there is, others for little, and get that.

Each takes a seed, plays some hundred steps of the real code with made-up time, and returns a
sentence about what went wrong, or nothing. `planted_pots.py` has mistakes that they must find:

    python -m tests.simulation.pots --bug one-peer-has-all-turns --seeds 0:40
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter, deque
from collections.abc import Callable
from typing import Any, Final

if __name__ == "__main__":
    from tests.simulation.planted_pots import BUGS
    from tests.simulation.small_worlds import plant_chosen, play_worlds

    SEEDS = plant_chosen("tests.simulation.pots", BUGS)

from kvpool.errors import Overloaded
from kvpool.guard import make_guard
from kvpool.master.state.demand import DemandMeter
from kvpool.master.state.directory import Directory
from kvpool.master.state.hint_log import HintLog
from kvpool.master.state.server_record import Registration
from kvpool.net.control_listener import ControlListener
from kvpool.net.control_session import MasterSession
from kvpool.server import consumers
from kvpool.server.moves.state.fetches import FetchBudget, Receivers
from kvpool.server.moves.state.prefetch_queue import Chain, PrefetchQueue
from kvpool.server.moves.turns import Turns
from kvpool.server.state.blocks import Blocks
from kvpool.server.state.entry import Missed
from kvpool.server.state.store import Store
from kvpool.shares import Shares
from kvpool.tombstones import Tombstones
from kvpool.types import Cluster, Namespace, ReadStatus, ServerStats
from tests.simulation.loop import SimLoop

#: Who asks for all that there is, and who for little.
GREEDY: Final = "acme"
MODEST: Final = ("globex", "initech")
#: What a modest one holds at most, of each pot.
_LITTLE: Final = 2
_STEPS: Final = 200


def _namespace(tenant: str, rest: object = "m") -> Namespace:
    return Namespace(f"@{tenant}/{rest}")


def _key(chance: random.Random) -> bytes:
    return chance.randbytes(16)


class Pots:
    """Pots of which something is taken and given back; each says whether it was given."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self.size = chance.choice([16, 40, 100])
        self.shares = Shares(self.size)
        self.hints = HintLog(self.size)
        self.missed = Missed(self.size)
        self.prefetches = PrefetchQueue(self.size)
        self.now = 0.0

    def take(self, pot: str, holder: str) -> bool:
        """One unit for this holder."""
        chance, namespace = self._chance, _namespace(holder)
        match pot:
            case "shares":
                return self.shares.take(holder)
            case "hints":
                session = f"@{holder}/{chance.random()}"
                return self.hints.add(session, 1.0, self.now) is True
            case "missed":
                before = self.missed.shares.used
                self.missed.add(namespace, 0, [_key(chance)])
                return self.missed.shares.used > before
            case _:
                blocks = deque([_key(chance)])
                return self.prefetches.add(Chain(namespace, 0, blocks), self.now + 5.0)

    def let_go(self, held: Counter[tuple[str, str]]) -> None:
        """Some time passes, and what is due is given back."""
        self.now += 1.0
        for name in (GREEDY, *MODEST):
            while held["shares", name] and self._chance.random() < 0.7:
                self.shares.give_back(name)
                held["shares", name] -= 1
        if self._chance.random() < 0.3:
            self.missed.take()
            self.now += 10.0  # all that was promised for a time is over
            while self.prefetches.next(self.now) is not None:
                pass
            for key in list(held):
                if key[0] != "shares":
                    del held[key]


def play_shares(seed: int) -> str:
    """Whoever has little gets one more, however much another one has taken."""
    chance = random.Random(seed)
    pots, held = Pots(chance), Counter[tuple[str, str]]()
    for _ in range(_STEPS):
        pot = chance.choice(["shares", "hints", "missed", "prefetches"])
        for _ in range(chance.choice([1, 3 * pots.size])):
            held[pot, GREEDY] += pots.take(pot, GREEDY)
        holder = chance.choice(MODEST)
        if held[pot, holder] < _LITTLE:
            if not pots.take(pot, holder):
                return f"{pot}: {holder} has {held[pot, holder]}, and gets no more"
            held[pot, holder] += 1
        if chance.random() < 0.3:
            pots.let_go(held)
    pots.now += 100.0
    for name in (GREEDY, *MODEST):
        while held["shares", name]:
            pots.shares.give_back(name)
            held["shares", name] -= 1
    if pots.shares.used:
        return f"{pots.shares.used} units are in use, and nobody has them"
    return ""


def play_memory(seed: int) -> str:
    """What was remembered for one that asks for little is known, whatever floods another sends."""
    chance = random.Random(seed)
    size = chance.choice([40, 120])
    stones, receivers = Tombstones(size), Receivers(size)
    kept = {name: deque[bytes](maxlen=size // 8) for name in MODEST}
    flooding = [GREEDY]
    for _ in range(_STEPS):
        if chance.random() < 0.1:  # another one floods from now on; the last one has had most
            flooding.append(chance.choice(["umbrella", "hooli", GREEDY]))
        for _ in range(chance.choice([1, 2 * size])):
            key, theirs = _key(chance), _namespace(flooding[-1])
            stones.left(theirs, key, ReadStatus.EVICTED)
            receivers.add(theirs, 0, key, "another")
        name = chance.choice(MODEST)
        key = _key(chance)
        kept[name].append(key)
        stones.left(_namespace(name), key, ReadStatus.REMOVED)
        receivers.add(_namespace(name), 0, key, "theirs")
        for name, keys in kept.items():
            for key in keys:
                if stones.reason(_namespace(name), key) is not ReadStatus.REMOVED:
                    return f"tombstones: a reason of {name} is forgotten"
                if not receivers.of(_namespace(name), [key], 0):
                    return f"receivers: a removal of {name} would not be passed on"
    if len(stones) > size or len(receivers) > size:
        return "more is remembered than there is room for"
    return ""


def play_names(seed: int) -> str:
    """Reads of a namespace are counted under its name, however many names another tenant has."""
    chance = random.Random(seed)
    counted = consumers.Consumers(Blocks([Store(1 << 20)]), ["dram"])
    for number in range(chance.choice([10, 3 * consumers.NAMES_MAX])):
        counted.read(_namespace(GREEDY, number), None, 1, 1, 0)
    for name in MODEST:
        counted.read(_namespace(name), None, 1, 1, 0)
        if _namespace(name).name not in counted._reads["namespace"]:
            return f"consumers: reads of {name} are those of others"
    return ""


def play_turns(seed: int) -> str:
    """A peer that is frozen, or slow, costs no other its turns and its speed; nor does a tenant
    that fetches from many peers."""
    return SimLoop(random.Random(seed), 0.0).run(_turns(seed))  # type: ignore[abstract]


async def _turns(seed: int) -> str:
    chance = random.Random(seed)
    turns, budget = Turns(chance.choice([4, 8])), FetchBudget()
    loop, slow_s = asyncio.get_running_loop(), 5.0
    late: list[float] = []
    over = False

    greedy = chance.random() < 0.5  # then many peers are frozen, and all are asked by one tenant

    async def transfer(peer: str, seconds: float, tenant: str = "") -> None:
        began = loop.time()
        await turns.acquire(peer, tenant)
        if not peer.startswith("frozen") and loop.time() - began > slow_s / 2:
            late.append(loop.time())
        try:
            await asyncio.sleep(seconds)
            budget.end(0.0, 1 << 20, 1 << 20, seconds)
        finally:
            turns.release(peer, tenant)
            if over:  # whose turn has just come, perhaps
                for one in chance.sample(waiting, len(waiting) // 8):
                    one.cancel()

    def freeze(count: int) -> list[asyncio.Task[None]]:
        peers = [f"frozen-{n % 8}" if greedy else "frozen" for n in range(count)]
        tenant = GREEDY if greedy else ""
        return [asyncio.ensure_future(transfer(one, slow_s, tenant)) for one in peers]

    waiting = freeze(chance.choice([3, 30]))
    await asyncio.sleep(0.001)

    async def user(peer: str) -> None:
        for _ in range(40):
            await transfer(peer, 0.05, peer if greedy else "")
            await asyncio.sleep(chance.choice([0.0, 0.02, 0.3]))
            waiting.extend(freeze(chance.choice([0, 1, 10])))

    await asyncio.gather(user("a"), user("b"))
    if late:
        return f"turns: {len(late)} of 80 waited for a peer that is frozen"
    if budget.rate < (1 << 20) / 0.05 / 4 / 3:
        return f"fetches: {budget.rate:.0f} bytes a second, since one peer is slow"
    over = True
    await asyncio.gather(*waiting, return_exceptions=True)
    if held := turns._shares.used + turns._tenants.used:
        return f"turns: {held} places are held, and nothing runs"
    return ""


class _End:
    """The end of a connection at its master, as far as it is counted."""

    def __init__(self, listener: Any, now: float) -> None:
        self.used_at = now
        self._listener = listener
        self.held = 0

    def hold(self, more: int) -> bool:
        """Whether it may make the master hold so many bytes more, or has ended."""
        if self not in self._listener._callers:
            return True
        try:
            self._listener.holds(self, self.held, self.held + more)
        except Overloaded:
            return False
        self.held += more
        return True

    def abort(self) -> None:
        held, self.held = self.held, 0
        self._listener.left(self, "", None, held)


def play_callers(seed: int) -> str:
    """Who needs a connection now and then has one, and each place is free again."""
    return SimLoop(random.Random(seed), 0.0).run(_callers(seed))  # type: ignore[abstract]


async def _callers(seed: int) -> str:
    chance, loop = random.Random(seed), asyncio.get_running_loop()
    listener: Any = ControlListener(
        lambda *_: (1, b""), Cluster(), make_guard(), lambda admit: MasterSession(Cluster(), admit)
    )
    listener._shares.total = size = chance.choice([16, 40])
    listener._held.total = 1 << 20
    tenants = chance.random() < 0.5
    open_: dict[str, list[_End]] = {}

    def connect(name: str) -> bool:
        end = _End(listener, loop.time())
        host, tenant = ("10.0.0.9", name) if tenants else (f"host of {name}", "")
        try:
            listener.arrived(end, host)._admit(tenant)
        except Overloaded:
            end.abort()
            return False
        open_.setdefault(name, []).append(end)
        return True

    for _ in range(_STEPS):
        for _ in range(chance.choice([0, 1, 2 * size])):
            connect(GREEDY)
        name = chance.choice(MODEST)
        held = len(open_.get(name, ()))
        if held < _LITTLE and not connect(name):
            return f"callers: {name} has {held} connections, and gets no more"
        for end in open_.get(GREEDY, ()):
            end.hold(chance.choice([1_000, 300_000]))
        if not all(end.hold(1_000) for end in open_.get(name, ())):
            return f"callers: {name} holds {listener._held.held(name)} bytes, and may no more"
        if not listener.callers == listener._shares.used <= size:
            return f"callers: {listener.callers} have {listener._shares.used} places, of {size}"
        if chance.random() < 0.4:
            await asyncio.sleep(chance.choice([0.1, 2.0]))
            for ends in open_.values():
                while ends and chance.random() < 0.5:
                    ends.pop().abort()
    for end in [one for ends in open_.values() for one in ends]:
        end.abort()
    left = listener._shares.used, listener._held.used
    return f"callers: {left[0]} places and {left[1]} bytes are taken" if any(left) else ""


def play_claims(seed: int) -> str:
    """What one claims to write steers the chains of others little."""
    chance, directory = random.Random(seed), Directory()
    servers = [f"s{number}" for number in range(chance.choice([4, 8]))]
    for one in servers:
        directory.servers.register(
            one, Registration(1, one, (f"tcp://{one}",), ("dram",), 1 << 40), 0.0
        )
        directory.servers.heartbeat(one, 1, ServerStats(used=0), 0.0)
    marked = chance.random() < 0.5
    names = {name: _namespace(name) if marked else Namespace(name) for name in (GREEDY, *MODEST)}
    sent: Counter[str] = Counter()
    for _ in range(_STEPS):
        if chance.random() < 0.2:
            size = chance.choice([1 << 20, 1 << 47])
            directory.place(names[GREEDY], [_key(chance)], b"", size, "x")
        placed = directory.place(names[chance.choice(MODEST)], [_key(chance)], b"", 1 << 20, "x")
        sent[placed.servers[0]] += 1
    most, server = max((count, one) for one, count in sent.items())
    if most > 3 * _STEPS / len(servers):
        return f"claims: {most} of {_STEPS} chains of others went to {server}"
    return ""


def play_demand(seed: int) -> str:
    """The working set of one that asks for little is measured as if it were alone."""
    chance = random.Random(seed)
    beside, alone = DemandMeter(), DemandMeter()
    chains = {name: [_key(chance) for _ in range(chance.choice([10, 100]))] for name in MODEST}
    for step in range(_STEPS // 2):
        for _ in range(chance.choice([0, 1, 3])):
            flood = [_key(chance) for _ in range(1000)]
            beside.asked(_namespace(GREEDY), flood, float(step))
        name = chance.choice(MODEST)
        for meter in (beside, alone):
            meter.asked(_namespace(name), chains[name], float(step), 4096)
    sets = {one.namespace.name: one for one in beside.demand(_STEPS).working_sets}
    for one in alone.demand(_STEPS).working_sets:
        if sets.get(one.namespace.name) != one:
            return f"demand: {one} is measured as {sets.get(one.namespace.name)}"
    return ""


WORLDS: Final[dict[str, Callable[[int], str]]] = {
    "shares": play_shares,
    "memory": play_memory,
    "names": play_names,
    "turns": play_turns,
    "callers": play_callers,
    "claims": play_claims,
    "demand": play_demand,
}


if __name__ == "__main__":
    play_worlds(WORLDS, SEEDS)
