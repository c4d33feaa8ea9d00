"""The status page of a master, and the JSON that it draws: `/`, `/api/v1/pool`, `/api/v1/servers`.

The figures are those of `kvpool status --json` and `/metrics`. Every answer is bounded: lists have
a limit, servers come in pages. docs/api/pool-json.md describes the fields.

Nobody is asked who he is. Where the pool has tenants, names of namespaces, sessions, programs,
tenants and clients are shown on the master's own host only.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import math
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from http import HTTPStatus
from importlib.resources import files
from typing import Any, Final

import msgspec

from kvpool import __version__
from kvpool.errors import UsageError
from kvpool.master.service import Master
from kvpool.net.http_server import Page, PageView, Routes
from kvpool.ops.inferred import inferred_sum
from kvpool.ops.pool_watch import HOUR_STEP_S, AskedTotals, Point, PoolWatch
from kvpool.ops.server_state import ServerState, state_of
from kvpool.ops.tables import as_json_object, problem_of
from kvpool.ops.usage import KINDS, Usage, UsageSums
from kvpool.server.eviction.session import program_of
from kvpool.types import ARRIVED, OTHERS, Demand, Member

#: Of the JSON. Within a version fields are added, never removed or changed.
API_VERSION: Final = 1
#: How often the master's figures are looked at for the history.
_SAMPLE_S: Final = 1.0
#: An answer is as old as this at most: many pages cost as much as one.
_FRESH_S: Final = 0.25
#: Servers in one answer.
SERVERS_MAX: Final = 50
_LISTED_MAX: Final = 20
#: Tiers of one server that do not work.
_BROKEN_MAX: Final = 4
#: Who has how much is summed so often, while somebody looks; of each kind so many are shown.
_USAGE_S: Final = 5.0
_USAGE_MAX: Final = 8
#: Servers that are summed in one turn of the loop.
_USAGE_STEP: Final = 10
_TIER_FIELDS: Final = tuple(
    "lost read_only capacity used blocks hits failures corrupt".split()  # noqa: SIM905
)
#: Of the name of a session, behind its program: enough to tell sessions apart, too little to send
#: hints in its name.
_SESSION_SHOWN: Final = 12

_SECURITY: Final = ("X-Content-Type-Options: nosniff", "Referrer-Policy: no-referrer")


@asynccontextmanager
async def status_page(
    master: Master, late_s: float, *, tenants: bool = False
) -> AsyncIterator[Routes]:
    """What to serve, as long as the `with` lasts; a task looks at the pool once a second."""
    page = StatusPage(master, late_s, tenants=tenants)
    watching = master.tasks.forever("status page", page.watch)
    try:
        yield page.routes()
    finally:
        watching.cancel()
        await asyncio.wait([watching])


class StatusPage:
    """The answers, from a master on the same loop. Servers without heartbeat for `late_s` are
    late. With `tenants` names stay on this host."""

    def __init__(self, master: Master, late_s: float, *, tenants: bool = False) -> None:
        self._master = master
        self._late_s = late_s
        self._tenants = tenants
        self._watch = PoolWatch()
        self._loop = asyncio.get_running_loop()
        self._made: dict[str, tuple[float, bytes]] = {}
        self._tiers: list[dict[str, Any]] = []  # as of the last sample
        self._inferred: Mapping[str, int] = {}
        self._usage: dict[str, list[dict[str, Any]]] = {}
        self._usage_at = self._looked_at = -math.inf

    async def watch(self) -> None:
        """Take one sample, and wait until the next one is due."""
        self._sample()
        await asyncio.sleep(0)  # with a thousand servers each part takes some milliseconds
        self._tiers = _tiers([one for one in self._members() if one.alive])
        await asyncio.sleep(0)
        self._inferred = inferred_sum(self._members())
        now = self._loop.time()
        if self._usage_at + _USAGE_S <= now <= self._looked_at + _USAGE_S:
            self._usage_at = now
            await self._sum_usage()
        await asyncio.sleep(_SAMPLE_S)

    async def _sum_usage(self) -> None:
        sums = UsageSums()
        for number, member in enumerate(self._members()):
            if number % _USAGE_STEP == 0:
                await asyncio.sleep(0)
            sums.add(member)
        self._usage = {f"{kind}s": _largest(sums.of(kind)) for kind in KINDS}

    def routes(self) -> Routes:
        html = files("kvpool.ops").joinpath("status_page.html").read_text()
        page = Page(HTTPStatus.OK, html.encode(), "text/html; charset=utf-8", _policy_of(html))
        return {
            "/": PageView(lambda query, near: page),
            "/api/v1/pool": PageView(self._pool_page),
            "/api/v1/servers": PageView(self._servers_page),
        }

    def _sample(self) -> None:
        master = self._master
        stopped = {status.label: count for status, count in master.clients.matches.items()}
        asked = AskedTotals(
            master.clients.asked_blocks,
            master.clients.found_blocks,
            master.refusals.total(),
            stopped,
        )
        self._watch.sample(self._loop.time(), self._members(), asked)

    def _members(self) -> list[Member]:
        return self._master.directory.servers.members(self._loop.time())

    def _answer(self, key: str, make: Any) -> Page:
        """As JSON; the same bytes for all who ask at about the same time."""
        now = self._loop.time()
        made_at, body = self._made.get(key, (0.0, b""))
        if not body or now - made_at >= _FRESH_S:
            body = msgspec.json.encode(make())
            # `key` is from a request: what is kept must not grow with what strangers ask for.
            self._made = {name: one for name, one in self._made.items() if now - one[0] < _FRESH_S}
            self._made[key] = now, body
        return Page(HTTPStatus.OK, body, "application/json", _SECURITY)

    def _pool_page(self, query: Mapping[str, str], near: bool) -> Page:
        self._looked_at = self._loop.time()
        named = near or not self._tenants
        return self._answer(f"pool {named}", lambda: self._pool(named))

    def _servers_page(self, query: Mapping[str, str], near: bool) -> Page:
        """Servers in the order of their names, those after `after`. Raises UsageError."""
        if unknown := query.keys() - {"after"}:
            raise UsageError(f"unknown field {sorted(unknown)[0][:40]!r}; expected: after")
        after = query.get("after", "")[:256]
        named = near or not self._tenants
        return self._answer(f"servers {named} {after}", lambda: self._servers(after, named))

    def _servers(self, after: str, named: bool) -> dict[str, Any]:
        members = sorted(one for one in self._members() if one.server > after)
        page = members[:SERVERS_MAX]
        return {
            "version": API_VERSION,
            "servers": [
                {
                    **as_json_object(one),
                    **({} if named else {"clients": [], "consumers": []}),
                    "state": state_of(one, self._late_s).value,
                    "rates": _rates(self._watch.rates.get(one.server, (0.0, 0.0))),
                }
                for one in page
            ],
            "after": page[-1].server if len(members) > len(page) else None,
        }

    def _pool(self, named: bool) -> dict[str, Any]:
        now, master, members = self._loop.time(), self._master, self._members()
        states = [state_of(one, self._late_s) for one in members]
        counts = Counter(states)
        alive = [one for one in members if one.alive]
        rates = [self._watch.rates.get(one.server, (0.0, 0.0)) for one in alive]
        sessions = master.hints.latest(_LISTED_MAX) if named else []
        return {
            "version": API_VERSION,
            "kvpool": __version__,
            "named": named,
            "time": time.time(),
            "master": {
                "address": master.address,
                "uptime_s": master.uptime_s(now),
                "blocks": len(master.directory),
                "requests": dict(master.requests),
                "refusals": dict(master.refusals),
                "map_differences": master.servers.differences,
            },
            "servers": {state.value: counts[state] for state in ServerState},
            "connections": sum(one.stats.counters.get("connections", 0) for one in alive),
            "memory": {
                "capacity": sum(one.capacity for one in alive),
                "used": sum(one.stats.used for one in alive),
                "blocks": sum(one.stats.blocks for one in alive),
            },
            "traffic": _rates((sum(read for read, _ in rates), sum(w for _, w in rates))),
            "matches": {
                "asked_blocks": master.clients.asked_blocks,
                "found_blocks": master.clients.found_blocks,
                "stopped": {
                    status.label: count for status, count in master.clients.matches.items()
                },
            },
            "last_hour": _last_hour(self._watch),
            "moves": [one._asdict() for one in self._watch.under_way()[:_LISTED_MAX]],
            "tiers": self._tiers,
            "inferred": self._inferred,
            "demand": _demand(master.clients.demand(now), named),
            "usage": self._usage if named else {},
            "sessions": [_session(*one) for one in sessions],
            "attention": _attention(members, states),
            "events": [
                {
                    "age_s": now - one.at,
                    "server": one.server,
                    "event": one.event,
                    "text": one.text,
                }
                for one in list(self._watch.events)[: -_LISTED_MAX - 1 : -1]
            ],
            "history": _history(_SAMPLE_S, self._watch.points),
            "history_hour": _history(HOUR_STEP_S, self._watch.hour),
        }


def _rates(one: tuple[float, float]) -> dict[str, float]:
    return {"read_bytes_s": round(one[0], 1), "written_bytes_s": round(one[1], 1)}


def _tiers(alive: Sequence[Member]) -> list[dict[str, Any]]:
    """Tiers of the same name together, in the order in which servers have them."""
    totals: dict[str, Counter[str]] = {}
    for member in alive:
        for tier in member.stats.usage:
            if tier.name not in totals and len(totals) >= _LISTED_MAX:
                continue
            total = totals.setdefault(tier.name, Counter())
            total["servers"] += 1
            for field in _TIER_FIELDS:
                total[field] += getattr(tier, field)
    return [{"name": name, **total} for name, total in totals.items()]


def _largest(usages: Sequence[Usage]) -> list[dict[str, Any]]:
    """Those with a name."""
    named = [one for one in usages if one.name not in ("", OTHERS)]
    return [
        {
            "name": one.name,
            "used_bytes": one.stored.total(),
            "hit_blocks": one.hit_blocks,
            "missed_blocks": one.missed_blocks,
        }
        for one in named[:_USAGE_MAX]
    ]


def _last_hour(watch: PoolWatch) -> dict[str, Any]:
    seconds, asked = watch.last_hour()
    return {
        "seconds": round(seconds),
        "asked_blocks": asked.asked_blocks,
        "found_blocks": asked.found_blocks,
        "stopped": dict(asked.stopped),
    }


def _demand(demand: Demand, named: bool) -> dict[str, Any]:
    sets = [
        {
            "namespace": one.namespace.name,
            "parts": one.namespace.parts,
            "bytes": one.size,
            "blocks": one.blocks,
        }
        for one in demand.working_sets[: _LISTED_MAX if named else 0]
    ]
    return {
        "seconds": demand.seconds,
        "bytes": demand.size,
        "working_sets": sets,
        "chain_servers": demand.chain_servers,
        "beyond_hole": demand.beyond_hole,
    }


def _attention(members: Sequence[Member], states: Sequence[ServerState]) -> list[dict[str, Any]]:
    """Servers to look at, the worst first."""
    order = {ServerState.LOST: 0, ServerState.LATE: 1, ServerState.LEAVING: 3}
    found = []
    for member, state in zip(members, states, strict=True):
        broken = [one.name for one in member.stats.usage if problem_of(one)]
        if state in order or broken:
            rank = order.get(state, 2)
            found.append((rank, member.server, member, state, broken))
    found.sort(key=lambda one: one[:2])
    return [
        {
            "server": server,
            "state": state.value,
            "heard_s": member.heard_s,
            "broken_tiers": broken[:_BROKEN_MAX],
            "drain_left_blocks": member.stats.drain_left_blocks,
        }
        for _, server, member, state, broken in found[:_LISTED_MAX]
    ]


def _history(step_s: float, points: Iterable[Point]) -> dict[str, Any]:
    points = list(points)
    return {
        "step_s": step_s,
        "read_bytes_s": [round(one.read_bytes_s) for one in points],
        "written_bytes_s": [round(one.written_bytes_s) for one in points],
        "hit_rate": [None if one.hit_rate is None else round(one.hit_rate, 4) for one in points],
        "used": [one.used for one in points],
    }


def _session(name: str, resume_in: float | None, age_s: float) -> dict[str, Any]:
    program, _, rest = name.partition(";") if program_of(name) else ("", "", name)
    shown = rest if len(rest) <= _SESSION_SHOWN else f"{rest[:_SESSION_SHOWN]}..."
    if program:
        shown = f"{program}; {shown}"
    if resume_in is None or resume_in == ARRIVED:
        hint = "ends" if resume_in is None else "arrived"
        return {"session": shown, "hint": hint, "age_s": age_s}
    return {"session": shown, "hint": "resumes", "resume_in": resume_in, "age_s": age_s}


def _policy_of(html: str) -> tuple[str, ...]:
    """Only this page's own script and style run, and they may ask this address alone."""
    allowed = []
    for tag in ("script", "style"):
        (text,) = re.findall(f"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        allowed.append(f"{tag}-src 'sha256-{digest}'")
    nothing = "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    policy = "; ".join(["default-src 'none'", *allowed, "connect-src 'self'", "img-src data:"])
    return (f"Content-Security-Policy: {policy}; {nothing}", *_SECURITY)
