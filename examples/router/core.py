"""Which engine gets a prompt, and why: pure. No socket, no clock, no randomness.

| policy       | what is known of the prompt             | engine                    | reason    |
|--------------|-----------------------------------------|---------------------------|-----------|
| round_robin  | -                                       | the next one              | turn      |
| least_loaded | -                                       | fewest requests           | load      |
| session      | its session was on a living engine      | the same                  | session   |
|              | its parent's was, and has no queue      | the parent's              | parent    |
|              | neither                                 | fewest requests           | load      |
| precise      | its tokens are not known                | as `session`              | as there  |
|              | blocks on that engine's device          | soonest first token       | device    |
|              | that engine loads from the pool         | soonest first token       | pool      |
|              | another engine's device has more of it  | soonest first token       | queue     |
|              | nobody has any, or computing is faster  | soonest first token       | cold      |
| any          | the engine chosen before is lost        | the same among the others | + `retry` |
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from kvpool.kv_events import ClearedEvent, EventHash, KVEvent, RemovedEvent, StoredEvent
from kvpool.types import HostScore, Namespace

POLICIES: Final = ("round_robin", "least_loaded", "session", "precise")
SESSIONS_MAX: Final = 100_000
DECISIONS_MAX: Final = 1000
#: Blocks of one engine's device that are remembered; what is stored beyond it is not.
DEVICE_BLOCKS_MAX: Final = 1_000_000
#: Tokens per second, where no engine has measured its own.
PREFILL_RATE: Final = 5000.0
#: Seconds that a prompt waits for each request that is in the engine already.
_ANSWERING_S: Final = 0.01
#: A host of which nothing is known: engines there read everything from others.
NOWHERE: Final = "?"
_SPREAD_HOSTS_MAX: Final = 16


class DeviceBlocks:
    """What an engine has on its device, as its KV events say, by the last 64 bits of hashes."""

    def __init__(self) -> None:
        self._hashes: set[int] = set()

    def __len__(self) -> int:
        return len(self._hashes)

    def apply(self, events: Iterable[KVEvent]) -> None:
        """Events in the engine's order; those of other media than its device are the pool's."""
        for event in events:
            if isinstance(event, ClearedEvent):
                self._hashes.clear()
            elif event.medium in (None, "GPU") and not event.group_idx:
                if isinstance(event, RemovedEvent):
                    self._hashes.difference_update(map(_short, event.block_hashes))
                elif isinstance(event, StoredEvent) and len(self) < DEVICE_BLOCKS_MAX:
                    self._hashes.update(map(_short, event.block_hashes))

    def leading(self, hashes: Sequence[int]) -> int:
        """Blocks of a prompt that are there, from its first one on."""
        return next((i for i, one in enumerate(hashes) if one not in self._hashes), len(hashes))


def _short(hash: EventHash) -> int:
    return hash if isinstance(hash, int) else int.from_bytes(hash[-8:], "big")


@dataclass(slots=True, eq=False)
class Engine:
    """One engine. `pending_s`: the work of prompts that it was sent and has not begun to answer;
    `answering`, `reported`: requests in it, by this router's count and by its own metrics, as are
    its rates in tokens and bytes per second (0: not measured)."""

    url: str
    host: str = NOWHERE
    lost: bool = False
    answering: int = 0
    reported: int = 0
    pending_s: float = 0.0
    prefill_rate: float = 0.0
    load_rate: float = 0.0
    blocks: DeviceBlocks = field(default_factory=DeviceBlocks)

    @property
    def load(self) -> int:
        """Metrics have the requests of other routers, too, and are a second old."""
        return max(self.answering, self.reported)


class Prompt(NamedTuple):
    """A request, as far as it matters here. The fields from `tokens` on are empty where its tokens
    are not known; `chain` are the keys of its whole blocks, `hashes` the same in 64 bits."""

    session: str = ""
    parent: str = ""
    ends: bool = False
    choices: int = 1
    tokens: int = 0
    block_size: int = 0
    namespace: Namespace | None = None
    chain: Sequence[bytes] = ()
    hashes: Sequence[int] = ()
    scores: Mapping[str, HostScore] = {}


class Estimate(NamedTuple):
    """When an engine would have a prompt's first token, and which blocks it would use."""

    engine: Engine
    queue_s: float
    load_s: float
    compute_s: float
    device: int
    near: int = 0
    far: int = 0

    @property
    def total_s(self) -> float:
        return self.queue_s + self.load_s + self.compute_s

    def shown(self) -> dict[str, Any]:
        return {**self._asdict(), "engine": self.engine.url, "total_s": self.total_s}


class Decision(NamedTuple):
    engine: Engine
    reason: str
    work_s: float
    estimates: Sequence[Estimate] = ()


class Router:
    """Decides for all engines. The sessions' engines and the last decisions are bounded."""

    def __init__(self, policy: str) -> None:
        self.policy = policy
        self.engines: dict[str, Engine] = {}
        self.decisions: deque[dict[str, Any]] = deque(maxlen=DECISIONS_MAX)
        self._homes: OrderedDict[str, str] = OrderedDict()  # the last engine of each session
        self._spread: OrderedDict[str, str] = OrderedDict()  # parents whose prompt was spread
        self._turn = 0

    def alive(self, without: Collection[str] = ()) -> list[Engine]:
        return [e for e in self.engines.values() if not e.lost and e.url not in without]

    def decide(self, prompt: Prompt, without: Collection[str] = ()) -> Decision | None:
        """The engine for a prompt; None when there is none, besides those that just failed."""
        alive = self.alive(without)
        if not alive:
            return None
        self._turn += 1
        alive = alive[self._turn % len(alive) :] + alive[: self._turn % len(alive)]
        if self.policy == "precise" and prompt.tokens:
            chosen = self._soonest(prompt, alive)
        elif self.policy in ("session", "precise"):
            chosen = self._at_home(prompt, alive)
        elif self.policy == "least_loaded":
            chosen = Decision(_least_loaded(alive), "load", 0.0)
        else:
            chosen = Decision(alive[0], "turn", 0.0)
        if without:
            chosen = chosen._replace(reason=f"{chosen.reason} retry")
        _remember(self._homes, prompt.session, chosen.engine.url)
        described = {name: getattr(prompt, name) for name in ("session", "parent", "tokens")}
        described |= {"engine": chosen.engine.url, "reason": chosen.reason}
        self.decisions.append(described | {"estimates": [one.shown() for one in chosen.estimates]})
        return chosen

    def ended(self, prompt: Prompt) -> None:
        """The answer is out."""
        if prompt.ends:
            self._homes.pop(prompt.session, None)

    def spread_to(self, prompt: Prompt, decision: Decision) -> list[str]:
        """Hosts that should have this prompt's blocks, because more like it follow: several choices
        run where it goes, children of one parent on any engine, so the first one is spread to all.
        """
        hosts = [decision.engine.host] if prompt.choices > 1 else []
        if prompt.parent and prompt.scores and prompt.parent not in self._spread:
            _remember(self._spread, prompt.parent, "")
            hosts += [engine.host for engine in self.alive()]
        lack = [one for one in dict.fromkeys(hosts) if (at := prompt.scores.get(one)) and at.far]
        return [host for host in lack if host != NOWHERE][:_SPREAD_HOSTS_MAX]

    def _at_home(self, prompt: Prompt, alive: Sequence[Engine]) -> Decision:
        by_url = {engine.url: engine for engine in alive}
        if home := by_url.get(self._homes.get(prompt.session, "")):
            return Decision(home, "session", 0.0)
        least, above = _least_loaded(alive), by_url.get(self._homes.get(prompt.parent, ""))
        if above is not None and above.load <= least.load + 1:
            return Decision(above, "parent", 0.0)
        return Decision(least, "load", 0.0)

    def _soonest(self, prompt: Prompt, alive: Sequence[Engine]) -> Decision:
        usual = max(engine.prefill_rate for engine in alive) or PREFILL_RATE
        estimates = [estimate(prompt, engine, usual) for engine in alive]
        home = self._homes.get(prompt.session)
        best = min(estimates, key=lambda one: (round(one.total_s, 3), one.engine.url != home))
        reason = "device" if best.device else "pool" if best.near + best.far else "cold"
        if best.device < max(one.device for one in estimates):
            reason = "queue"
        return Decision(best.engine, reason, best.load_s + best.compute_s, estimates)


def estimate(prompt: Prompt, engine: Engine, usual_rate: float) -> Estimate:
    """What a prompt takes an engine, which loads only what would take longer to compute."""
    rate = engine.prefill_rate or usual_rate
    queue_s = engine.pending_s + engine.load * _ANSWERING_S
    device = engine.blocks.leading(prompt.hashes)
    compute_s = (prompt.tokens - device * prompt.block_size) / rate
    alone = Estimate(engine, queue_s, 0.0, compute_s, device)
    score = prompt.scores.get(engine.host)
    if score is None or score.near + score.far <= device:
        return alone
    pooled = score.near + score.far
    share = (pooled - device) / pooled  # what is on the device is not loaded
    load_s = share * (score.size / engine.load_rate if engine.load_rate else score.seconds)
    rest_s = (prompt.tokens - pooled * prompt.block_size) / rate
    loads = Estimate(engine, queue_s, load_s, rest_s, device, score.near, score.far)
    return min(alone, loads, key=lambda one: one.total_s)


def _least_loaded(alive: Sequence[Engine]) -> Engine:
    return min(alive, key=lambda engine: engine.load)


def _remember(memory: OrderedDict[str, str], name: str, value: str) -> None:
    if name:
        memory[name] = value
        memory.move_to_end(name)
        if len(memory) > SESSIONS_MAX:
            memory.popitem(last=False)
