"""What to look up, what to load, what to save, and when: the connector's thinking, pure.

It knows no engine, no clock and no socket. The scheduler half (`scheduler.py`) tells it what
happened and does what it answers; `now` is in seconds of any one clock.

The life of a request: `arrived` says what to look up; `found` brings the answer; `offer` tells the
engine how many tokens can be loaded, or to ask again; `allocated` turns that into a load; `step`
turns what each step has computed into saves; `reported` takes in what became of them.

A block that is being saved belongs to the save until every rank has acknowledged it: `step` says
which blocks to keep, `reported` which to let go. Each of them is let go exactly once.
"""

from __future__ import annotations

import enum
import itertools
import math
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from kvpool.types import ROOT, Match, WriteStatus
from kvpool_connector.cost_model import LoadTime, PrefillTime
from kvpool_connector.messages import Blocks, Load, Loaded, Probe, Probed, Save, Saved

#: Refused saves that wait for their next try; the oldest are dropped.
RETRIES_WAITING_MAX: Final = 4096
#: Of those, how many go with one step.
_RETRIES_PER_STEP: Final = 64
_RETRY_AFTER_S: Final = 0.5
#: A load is given up when it takes so much longer than expected; but not before this share of the
#: time that computing its tokens takes, and not after all of it. So when a pool becomes slow, the
#: first load after that costs half of a recompute as a rule, and once.
_PATIENCE: Final = 3.0
_PATIENCE_SHARE_MIN: Final = 0.5
_LOAD_TIMEOUT_S_MIN: Final = 0.05
#: The same while nobody knows how long computing takes.
_FIRST_TIMEOUT_S_MIN: Final = 0.25
#: Bytes that a probe reads at most.
_PROBE_BYTES: Final = 4 << 20
#: What may work next time. ALREADY_STORED and BYPASSED are final, TOO_LARGE will not change.
_RETRYABLE: Final = frozenset(
    {
        WriteStatus.NO_SPACE,
        WriteStatus.DEADLINE,
        WriteStatus.SERVER_LOST,
        WriteStatus.NO_MASTER,
        WriteStatus.IN_PROGRESS,
    }
)


class Group(NamedTuple):
    """A KV cache group: how many tokens its blocks hold, and how many hashes that is."""

    block_size: int
    hashes_per_block: int


class Limits(NamedTuple):
    """The settings that decisions depend on (`settings.py` says what they mean)."""

    load: str = "auto"
    save: bool = True
    hit_tokens_min: int = 1
    lookup_timeout_s: float = 0.05
    load_timeout_s: float = 10.0
    save_decode: bool = True
    loads_max: int = 32
    saved_blocks_max: int = 1 << 30
    save_retries: int = 3
    probe_every_s: float = 5.0


class Hints(NamedTuple):
    """What a request says of its conversation."""

    session: str = ""
    resume_in_s: float | None = None
    ends: bool = False


class Verdict(enum.Enum):
    """Why so many tokens are loaded, or none."""

    LOAD = "load"
    NOTHING_NEW = "nothing new"  # the engine has as much as the pool
    TOO_SHORT = "too short"
    SLOWER = "slower"  # loading would take longer than computing
    TOO_MANY = "too many loads"
    NOT_CHOSEN = "not chosen"  # the engine loads from somewhere else


class Scheduled(NamedTuple):
    """One request in one step: its tokens are computed up to `end`; its blocks, by group."""

    request_id: str
    start: int
    end: int
    block_ids: Sequence[Sequence[int]]


class Stored(NamedTuple):
    """A block that the pool has now, for KV events: the `number`-th of a request in that group."""

    request_id: str
    group: int
    number: int
    digest: bytes


class Lookup(NamedTuple):
    """Ask the pool for these chains, one for each group. `serial` tells old answers from new."""

    request_id: str
    serial: int
    chains: tuple[tuple[bytes, ...], ...]


@dataclass(slots=True)
class _Request:
    hashes: Sequence[bytes]  # grows while the request generates
    prompt: int
    hints: Hints
    serial: int
    asked_at: float
    answered: bool = False
    matches: tuple[Match, ...] = ()
    verdict: Verdict | None = None
    offered: tuple[int, int] | None = None
    estimates: tuple[float, float | None] = (0.0, None)
    loading: _Loading | None = None
    saved: list[int] = field(default_factory=list)  # blocks of each group: known or on the way


@dataclass(slots=True)
class _Loading:
    since: float
    first: int
    last: int
    size: int
    waiting: int  # ranks
    timeout_s: float
    complete: bool = True
    arrived: int = 0


class _Place(NamedTuple):
    """A block that is to be saved."""

    request_id: str
    group: int
    number: int
    digest: bytes
    parent: bytes
    block_id: int
    attempts: int = 0


@dataclass(slots=True)
class _Job:
    places: list[_Place]
    waiting: int  # ranks
    refused: dict[tuple[int, bytes], WriteStatus] = field(default_factory=dict)


@dataclass(slots=True)
class Plan:
    """What a step is to do besides computing; `keep` are block ids to be kept from reuse."""

    loads: list[Load] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    probe: Probe | None = None
    keep: list[int] = field(default_factory=list)


class Planner:
    """Decides for one engine. `ranks` workers each do every load and every save."""

    def __init__(self, groups: Sequence[Group], limits: Limits, *, ranks: int = 1) -> None:
        #: What happened so far; seconds where the name ends in _s, else how often.
        self.counters: dict[str, float] = defaultdict(float)
        self.load_time = LoadTime()
        self.prefill_time = PrefillTime()
        self.block_bytes: tuple[int, ...] = (0,) * len(groups)  # until the ranks have told
        self._groups = tuple(groups)
        self._unit = math.lcm(*(group.block_size for group in groups))
        self._limits = limits
        self._ranks = ranks
        self._requests: dict[str, _Request] = {}
        self._serial = 0
        self._loads: list[Load] = []
        self._loading_bytes = 0
        self._loading_count = 0
        self._jobs: dict[int, _Job] = {}
        self._next_job = 0
        self._kept = 0
        self._saving: set[tuple[int, bytes]] = set()
        self._retries: OrderedDict[tuple[int, bytes], tuple[float, _Place]] = OrderedDict()
        self._probe: Probe | None = None
        self._probing = 0  # ranks that are not through with one
        self._probed_at = -math.inf

    @property
    def saving(self) -> bool:
        """The engine must go on stepping: for saves that are not acknowledged, or for a probe."""
        return bool(self._jobs) or self._probe is not None

    @property
    def loading(self) -> int:
        """Loads under way."""
        return self._loading_count

    def knows(self, request_id: str) -> bool:
        return request_id in self._requests

    # --- looking up -----------------------------------------------------------------------

    def arrived(
        self, request_id: str, hashes: Sequence[bytes], tokens: int, hints: Hints, now: float
    ) -> Lookup | None:
        """A request is new: what to look up, if it has a whole block. `hashes` may grow later."""
        self._serial += 1
        request = _Request(hashes, tokens, hints, self._serial, now, saved=[0] * len(self._groups))
        self._requests[request_id] = request
        return self._lookup(request_id, request, tokens)

    def again(self, request_id: str, tokens: int, now: float) -> Lookup | None:
        """It was thrown out and starts anew, now with more tokens."""
        request = self._requests[request_id]
        self._serial += 1
        request.serial, request.asked_at, request.answered = self._serial, now, False
        request.matches, request.verdict, request.offered = (), None, None
        request.saved = [0] * len(self._groups)
        return self._lookup(request_id, request, tokens)

    def asked(self, request_id: str, now: float) -> None:
        """Its lookup begins then, and so does its time: before that nobody could be asked."""
        request = self._requests.get(request_id)
        if request is not None:
            request.asked_at = now

    def found(self, request_id: str, serial: int, matches: Sequence[Match], reason: str) -> None:
        """The answer to a lookup. Without matches it is a miss, for that reason."""
        request = self._requests.get(request_id)
        if request is None or request.serial != serial or request.answered:
            return
        request.answered = True
        if not matches:
            self.counters[f"miss {reason}"] += 1
            return
        request.matches = tuple(matches)
        request.saved = [
            max(known, match.length) for known, match in zip(request.saved, matches, strict=True)
        ]
        stopped = min(matches, key=lambda match: match.length).stopped
        if not stopped.hit:
            self.counters[f"miss {stopped.label}"] += 1

    def offer(self, request_id: str, tokens: int, computed: int, now: float) -> int | None:
        """How many tokens beyond `computed` can be loaded; None: ask again.

        It may be asked any number of times before `allocated`; the last answer counts.
        """
        request = self._requests[request_id]
        request.offered = None
        if not request.answered:
            if now - request.asked_at < self._limits.lookup_timeout_s:
                return None
            self.found(request_id, request.serial, (), "lookup timeout")
        if not request.matches:
            request.verdict = None
            return 0
        last = min(self._available(request.matches), (tokens - 1) // self._unit * self._unit)
        request.verdict = self._judge(request, computed, last)
        if request.verdict is not Verdict.LOAD:
            if request.verdict is Verdict.SLOWER and self._probe_due(now):
                self._plan_probe(request, computed, last, now)
            return 0
        request.offered = (computed, last)
        return last - computed

    # --- loading --------------------------------------------------------------------------

    def allocated(
        self, request_id: str, block_ids: Sequence[Sequence[int]], tokens: int, now: float
    ) -> None:
        """The engine has given the request its blocks, and wants `tokens` of what was offered.

        None: somebody else loads, or nobody.
        """
        request = self._requests[request_id]
        offered, request.offered = request.offered, None
        self._count_decision(request, tokens)
        if tokens <= 0 or offered is None:
            return
        first, last = offered[0], offered[0] + tokens
        load = self._load(request_id, request, first, last, block_ids)
        self._loads.append(load)
        size = self._size(first, last)
        request.loading = _Loading(now, first, last, size, self._ranks, load.timeout_s)
        self._loading_bytes += size
        self._loading_count += 1
        for match in request.matches[:1]:
            for run in match.runs:
                block = self._groups[0].block_size
                inside = min(last, (run.last + 1) * block) - max(first, run.first * block)
                if inside > 0 and run.replicas:
                    self.counters[f"hit_tokens {run.replicas[0].tier}"] += inside

    def load_ended(self, loaded: Loaded, now: float) -> None:
        """One rank is through with a load."""
        request = self._requests.get(loaded.request_id)
        loading = request.loading if request is not None else None
        if request is None or loading is None:
            return
        loading.waiting -= 1
        loading.complete &= loaded.complete
        loading.arrived = max(loading.arrived, loaded.size)
        if loading.waiting:
            return
        self._load_done(request, loading)
        took_s = now - loading.since
        if not loading.complete and took_s >= loading.timeout_s:
            self.load_time.gave_up(loading.size, loading.arrived, took_s)
        elif loading.arrived and took_s >= (request.estimates[1] or math.inf):
            self.load_time.disappointed(loading.arrived, took_s)
        elif loading.arrived:
            # What was lost without a wait says nothing about the pool's speed.
            self.load_time.observe(loading.arrived, took_s)
        if self.load_time.seconds(loading.size) >= (request.estimates[1] or math.inf):
            # Slow for once, as a first load is, or from now on? The next request must not be the
            # one to find out.
            self._plan_probe(request, loading.first, loading.last, now)
        self.counters["load_s"] += took_s
        self.counters["loads"] += 1
        if not loading.complete:
            self.counters["loads_failed"] += 1
            # The engine asks again: without this the same blocks would be loaded for ever. What
            # the pool has lost is computed, and can be saved again.
            request.matches = ()
            request.saved = [
                min(known, loading.first // group.block_size)
                for known, group in zip(request.saved, self._groups, strict=True)
            ]

    def probe_ended(self, probed: Probed) -> None:
        """One rank is through with a probe."""
        self._probing = max(0, self._probing - 1)
        if probed.size:
            self.load_time.observe(probed.size, probed.seconds)
        elif probed.seconds >= self._limits.load_timeout_s:
            self.load_time.gave_up(_PROBE_BYTES, 0, probed.seconds)

    # --- saving ---------------------------------------------------------------------------

    def step(
        self,
        scheduled: Iterable[Scheduled],
        still_there: Callable[[int, int, bytes], bool],
        now: float,
    ) -> Plan:
        """What is to be loaded and saved with this step.

        `still_there(block_id, group, digest)` says whether a block still has these contents.
        """
        plan = Plan(loads=self._loads, probe=self._probe)
        if self._probe is not None:
            self._probing = self._ranks
        self._loads, self._probe = [], None
        sessions: dict[tuple[str, float | None], list[_Place]] = {}
        for one in scheduled if self._limits.save else ():
            request = self._requests.get(one.request_id)
            if request is None:
                continue
            key = (request.hints.session, request.hints.resume_in_s)
            for place in self._complete(request, one):
                sessions.setdefault(key, []).append(place)
        if self._retries:
            retried = list(self._due(still_there, now))
            if retried:
                sessions.setdefault(("", None), []).extend(retried)
        for (session, resume_in_s), places in sessions.items():
            kept = self._admit(places, now)
            if kept:
                plan.saves.append(self._save(kept, session, resume_in_s))
                plan.keep += [place.block_id for place in kept]
        return plan

    def save_ended(self, saved: Saved, now: float) -> tuple[list[int], list[Stored]]:
        """One rank is through with a save: block ids to let go of, and what the pool has now."""
        job = self._jobs.get(saved.job)
        if job is None:
            return [], []
        job.waiting -= 1
        for group, digest, status in saved.refused:
            job.refused[group, digest] = status
        if job.waiting:
            return [], []
        del self._jobs[saved.job]
        self._kept -= len(job.places)
        stored: list[Stored] = []
        for place in job.places:
            self._saving.discard((place.group, place.digest))
            refusal = job.refused.get((place.group, place.digest))
            if refusal is None:
                self.counters["saved_blocks"] += 1
                stored.append(Stored(place.request_id, place.group, place.number, place.digest))
            elif refusal in _RETRYABLE and place.attempts < self._limits.save_retries:
                self._retry(place._replace(attempts=place.attempts + 1), now)
            else:
                self.counters[f"dropped {refusal.label}"] += 1
        if stored and not self.load_time.samples and self._probe_due(now):
            # Before the first load: it is to be weighed, too, and not to wait for a connection.
            digests = tuple(block.digest for block in stored if not block.group)
            self._try(Blocks(0, digests[: self._probe_blocks], ()), now)
        return [place.block_id for place in job.places], stored

    def preempted(self, request_id: str) -> None:
        """Its blocks are gone; what is being saved of them is kept all the same."""
        request = self._requests.get(request_id)
        if request is not None:
            request.saved = [0] * len(self._groups)
            request.offered = None

    def finished(self, request_id: str) -> Hints | None:
        """It is over, whatever became of it; its hints.

        What is being loaded for it is loaded all the same: the engine frees those blocks when it
        hears that nobody writes to them any more.
        """
        request = self._requests.pop(request_id, None)
        if request is None:
            return None
        if request.loading is not None:
            self._load_done(request, request.loading)
        return request.hints

    # --- inside ---------------------------------------------------------------------------

    def _lookup(self, request_id: str, request: _Request, tokens: int) -> Lookup | None:
        if self._limits.load == "never" or tokens - 1 < self._unit:
            request.answered = True
            return None
        chains = tuple(
            tuple(
                request.hashes[(i + 1) * group.hashes_per_block - 1]
                for i in range((tokens - 1) // self._unit * self._unit // group.block_size)
            )
            for group in self._groups
        )
        self.counters["lookups"] += 1
        return Lookup(request_id, request.serial, chains)

    def _available(self, matches: Sequence[Match]) -> int:
        """Tokens that every group has."""
        tokens = min(
            match.length * group.block_size
            for match, group in zip(matches, self._groups, strict=True)
        )
        return tokens // self._unit * self._unit

    def _judge(self, request: _Request, computed: int, last: int) -> Verdict:
        if last <= computed:
            return Verdict.NOTHING_NEW
        if last - computed < self._limits.hit_tokens_min:
            return Verdict.TOO_SHORT
        load_s = self.load_time.seconds(self._size(computed, last) + self._loading_bytes)
        prefill_s = self.prefill_time.seconds(computed, last)
        request.estimates = (load_s, prefill_s)
        if self._limits.load == "always":
            return Verdict.LOAD
        if self._loading_count >= self._limits.loads_max:
            return Verdict.TOO_MANY
        if prefill_s is not None and load_s >= prefill_s:
            return Verdict.SLOWER
        return Verdict.LOAD

    def _load(
        self,
        request_id: str,
        request: _Request,
        first: int,
        last: int,
        block_ids: Sequence[Sequence[int]],
    ) -> Load:
        blocks = []
        for number, group in enumerate(self._groups):
            ids = block_ids[number]
            covered = range(first // group.block_size, last // group.block_size)
            # Id 0 is no block: what lies before a sliding window is not needed.
            wanted = [index for index in covered if ids[index]]
            if not wanted:
                continue
            whole = wanted[-1] + 1 - wanted[0] == len(wanted)
            match = request.matches[number].of(wanted[0], wanted[-1] + 1) if whole else None
            blocks.append(
                Blocks(
                    number,
                    tuple(_digest(request.hashes, group, i) for i in wanted),
                    tuple(ids[i] for i in wanted),
                    match=match,
                )
            )
        return Load(request_id, tuple(blocks), self._patience_s(*request.estimates))

    def _patience_s(self, load_s: float, prefill_s: float | None) -> float:
        """When a load that was expected to take `load_s` is given up."""
        if self._limits.load != "auto":
            return self._limits.load_timeout_s
        if prefill_s is None:
            patience_s = max(load_s * _PATIENCE, _FIRST_TIMEOUT_S_MIN)
        elif not self.load_time.samples:  # it may just as well take as long as computing
            patience_s = prefill_s
        else:
            patience_s = min(max(load_s * _PATIENCE, prefill_s * _PATIENCE_SHARE_MIN), prefill_s)
        return min(self._limits.load_timeout_s, max(patience_s, _LOAD_TIMEOUT_S_MIN))

    def _count_decision(self, request: _Request, tokens: int) -> None:
        verdict, request.verdict = request.verdict, None
        if verdict is None:
            return
        if verdict is Verdict.LOAD and tokens <= 0:
            verdict = Verdict.NOT_CHOSEN
        self.counters[f"decision {verdict.value}"] += 1
        if verdict in (Verdict.LOAD, Verdict.SLOWER):
            load_s, prefill_s = request.estimates
            self.counters["estimated_load_s"] += load_s
            self.counters["estimated_prefill_s"] += prefill_s or 0.0

    def _load_done(self, request: _Request, loading: _Loading) -> None:
        request.loading = None
        self._loading_bytes -= loading.size
        self._loading_count -= 1

    def _size(self, first: int, last: int) -> int:
        """Bytes that one rank moves for these tokens."""
        return sum(
            (last - first) // group.block_size * size
            for group, size in zip(self._groups, self.block_bytes, strict=True)
        )

    def _probe_due(self, now: float) -> bool:
        return now - self._probed_at >= self._limits.probe_every_s

    @property
    def _probe_blocks(self) -> int:
        return max(1, _PROBE_BYTES // max(1, self.block_bytes[0]))

    def _plan_probe(self, request: _Request, first: int, last: int, now: float) -> None:
        """See in the background whether it is right to refuse what a request could load."""
        group = self._groups[0]
        start = first // group.block_size
        stop = min(last // group.block_size, start + self._probe_blocks)
        digests = tuple(_digest(request.hashes, group, i) for i in range(start, stop))
        self._try(Blocks(0, digests, (), match=request.matches[0].of(start, stop)), now)

    def _try(self, blocks: Blocks, now: float) -> None:
        """One probe at a time, and only where its answer decides anything."""
        if self._limits.load == "auto" and blocks.digests and not self._probing:
            self._probed_at = now
            self._probe = Probe((blocks,), self._limits.load_timeout_s)

    def _complete(self, request: _Request, one: Scheduled) -> Iterable[_Place]:
        """The blocks of a request that are complete after this step and not known to be saved."""
        end = one.end if self._limits.save_decode else min(one.end, request.prompt)
        for number, group in enumerate(self._groups):
            ids = one.block_ids[number]
            hashed = len(request.hashes) // group.hashes_per_block
            stop = min(end // group.block_size, hashed, len(ids))
            for index in range(request.saved[number], stop):
                if ids[index]:
                    yield _Place(
                        one.request_id,
                        number,
                        index,
                        _digest(request.hashes, group, index),
                        _digest(request.hashes, group, index - 1) if index else ROOT,
                        ids[index],
                    )
            request.saved[number] = max(request.saved[number], stop)

    def _admit(self, places: Iterable[_Place], now: float) -> list[_Place]:
        """Those that nobody saves at the moment, as many as the engine can spare."""
        admitted = []
        for place in places:
            if (place.group, place.digest) in self._saving:
                continue
            if self._kept >= self._limits.saved_blocks_max:
                self._wait(place, now)
                continue
            self._kept += 1
            self._saving.add((place.group, place.digest))
            admitted.append(place)
        return admitted

    def _save(self, places: list[_Place], session: str, resume_in_s: float | None) -> Save:
        job = self._next_job
        self._next_job += 1
        self._jobs[job] = _Job(places, self._ranks)
        groups: dict[int, list[_Place]] = {}
        for place in places:
            groups.setdefault(place.group, []).append(place)
        blocks = tuple(
            Blocks(
                group,
                tuple(place.digest for place in members),
                tuple(place.block_id for place in members),
                tuple(place.parent for place in members),
            )
            for group, members in groups.items()
        )
        return Save(job, blocks, session, resume_in_s)

    def _retry(self, place: _Place, now: float) -> None:
        self._wait(place, now + _RETRY_AFTER_S * 2**place.attempts)

    def _wait(self, place: _Place, due: float) -> None:
        self._retries[place.group, place.digest] = (due, place)
        while len(self._retries) > RETRIES_WAITING_MAX:
            self._retries.popitem(last=False)
            self.counters["dropped too many waiting"] += 1

    def _due(self, still_there: Callable[[int, int, bytes], bool], now: float) -> Iterable[_Place]:
        """Saves whose time has come and whose blocks nobody has reused, if there is room."""
        if self._kept >= self._limits.saved_blocks_max:
            return
        for key in list(itertools.islice(self._retries, _RETRIES_PER_STEP)):
            due, place = self._retries[key]
            if due > now:
                continue
            del self._retries[key]
            if still_there(place.block_id, place.group, place.digest):
                self.counters["save_retries"] += 1
                yield place
            else:
                self.counters["dropped block reused"] += 1


def _digest(hashes: Sequence[bytes], group: Group, index: int) -> bytes:
    """A block is named by the last hash inside it."""
    return bytes(hashes[(index + 1) * group.hashes_per_block - 1])
