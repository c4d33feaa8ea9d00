"""`kvpool replay`: a workload through a pool of real processes, every byte checked.

A master, block servers and client processes are started; the clients stand for engine instances
and take the requests in turn. What the pool did is put beside what the same memory would have done
as isolated caches, and what no cache can exceed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from rich.console import Console

from kvpool import registry
from kvpool.client.admin import admin
from kvpool.client.opening import connect
from kvpool.config import ClientConfig, parse_tier
from kvpool.errors import ConfigError, ServerLost
from kvpool.runtime import task_group
from kvpool.threads import wait_for_all
from kvpool.tools import cache_bounds, traces, workloads
from kvpool.tools import policy_study as dry
from kvpool.tools.replay_report import ReplayReport, TransportTraffic, progress
from kvpool.tools.subprocesses import Child, process_of, servers_up
from kvpool.tools.traces import Request
from kvpool.types import ALIGNMENT, MoveStatus
from kvpool.units import human, parse_size

_REFRESH_S = 0.5
_POLL_S = 0.1
#: An hour of traffic takes a minute here, so what servers report must travel as much faster.
_HEARTBEAT_S = 0.1
_DRAIN_S = 60.0


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """What to play and on what. Sizes in bytes; `capacity` is that of all servers together."""

    name: str
    requests: list[Request]
    servers: int
    clients: int
    capacity: int
    block_size: int
    in_flight: int
    transports: list[str]
    seed: int
    #: A replay is a hundred times as fast as its trace: policies that learn from times, such as a
    #: server's default, see others than they would. `--dry` has those of the trace.
    policy: str = "lru"
    #: Of each server, instead of memory only; `{server}` in one stands for its id.
    tiers: tuple[str, ...] = ()
    #: Kill every server with -9 after this share of the requests, and start it again.
    kill_at: float | None = None
    #: What happens to the servers, each after a share of the requests: `EVENTS`.
    events: tuple[tuple[float, str], ...] = ()

    @property
    def capacity_blocks(self) -> int:
        """Blocks that the servers hold: an extent is a multiple of `ALIGNMENT`."""
        extent = -(-self.block_size // ALIGNMENT) * ALIGNMENT
        return self.capacity // self.servers // extent * self.servers


#: What may happen to servers while a replay runs.
EVENTS: Final = ("join", "drain", "kill")


class _Defaults(NamedTuple):
    capacity: str
    block_size: str


#: codex: a little more than the working set of 24 live sessions, 2,500 blocks of 512 tokens: where
#: one pool holds nearly everything and the same memory in four pieces does not.
_CODEX = _Defaults("176MiB", "64KiB")
#: A trace: 50,000 blocks, scaled down to a page each so that an hour of traffic fits a laptop.
_TRACE = _Defaults("195.3125MiB", "4KiB")


def options(
    *,
    trace: Path | None,
    workload: str,
    servers: int,
    clients: int,
    capacity: str | None,
    block_size: str | None,
    sessions: int,
    concurrent: int,
    in_flight: int | None,
    transports: list[str],
    limit: int | None,
    seed: int,
    policy: str = "lru",
    tiers: Sequence[str] = (),
    kill_at: float | None = None,
    events: str = "",
    format: str = traces.AUTO,
    unit: str | None = None,
    block_tokens: int | None = None,
) -> ReplayOptions:
    """From what a user says to what is played. Raises ConfigError."""
    name, requests = requests_of(
        trace, workload, sessions, concurrent, seed, block_tokens, format, unit
    )
    defaults = _TRACE if trace is not None else _CODEX
    if policy not in registry.installed(registry.POLICIES):
        have = sorted(registry.installed(registry.POLICIES))
        raise ConfigError(f"no policy {policy!r} is installed: have {have}")
    if not transports:
        raise ConfigError("transports: expected at least one, such as shm")
    known = registry.installed(registry.TRANSPORTS)
    for transport in transports:
        if transport not in known:
            raise ConfigError(f"no transport {transport!r} is installed: have {sorted(known)}")
    size = parse_size(block_size or defaults.block_size)
    total = _bytes(capacity or defaults.capacity, size)
    if tiers:
        if capacity is not None:
            raise ConfigError("--capacity and --tier: expected one of them")
        if servers > 1 and any(parse_tier(t).place and "{server}" not in t for t in tiers):
            raise ConfigError("a file serves one server: put {server} into its path")
        total = parse_tier(tiers[-1]).capacity * servers
    if kill_at is not None and not 0 < kill_at < 1:
        raise ConfigError(f"--kill-at {kill_at:g}: expected a share between 0 and 1")
    if total // servers < size:
        raise ConfigError(
            f"--capacity: {human(total)} over {servers} servers holds no block of {human(size)}"
        )
    return ReplayOptions(
        name=name,
        requests=requests[:limit],
        servers=servers,
        clients=clients,
        capacity=total,
        block_size=size,
        in_flight=in_flight or (1 if trace is not None else clients),
        transports=transports,
        seed=seed,
        policy=policy,
        tiers=tuple(tiers),
        kill_at=kill_at,
        events=_events(events),
    )


def _events(text: str) -> tuple[tuple[float, str], ...]:
    """`0.3:join,0.5:drain`, in their order. Raises ConfigError."""
    events = []
    for one in text.split(",") if text else ():
        share, _, event = one.strip().partition(":")
        try:
            at = float(share)
        except ValueError:
            at = -1.0
        if not 0 < at < 1 or event not in EVENTS:
            raise ConfigError(
                f"event {one.strip()!r}: expected a share of the requests and one of "
                f"{', '.join(EVENTS)}, such as 0.5:{EVENTS[0]}"
            )
        events.append((at, event))
    return tuple(sorted(events))


def requests_of(
    trace: Path | None,
    workload: str,
    sessions: int,
    concurrent: int,
    seed: int,
    block_tokens: int | None = None,
    format: str = traces.AUTO,
    unit: str | None = None,
) -> tuple[str, list[Request]]:
    """A workload and its name. Raises ConfigError."""
    if trace is not None:
        recorded = traces.load(trace, format, block=block_tokens, unit=unit)
        return recorded.name, recorded.requests
    block_tokens = block_tokens or 512
    if workload == "codex":
        name = f"codex, {min(concurrent, sessions)} of {sessions} sessions at a time"
        return name, workloads.codex(sessions, concurrent, block=block_tokens, seed=seed)
    if workload == "fanout":
        name = f"fanout, {min(concurrent, sessions)} of {sessions} groups of 17 sessions at a time"
        return name, workloads.fan_out(sessions, concurrent, block=block_tokens, seed=seed)
    if workload == "answers":
        name = (
            f"answers, {min(concurrent, sessions)} of {sessions} prompts with 8 answers at a time"
        )
        return name, workloads.many_answers(sessions, concurrent, block=block_tokens, seed=seed)
    raise ConfigError(f"workload {workload!r}: expected codex, fanout, answers, or a trace file")


def server_counts(text: str, most: int) -> list[int]:
    """`1,4,16`. Raises ConfigError."""
    counts = [one.strip() for one in text.split(",")]
    if not all(one.isdecimal() and 1 <= int(one[:9]) <= most for one in counts):
        raise ConfigError(f"servers {text!r}: expected numbers from 1 to {most}")
    return [int(one) for one in counts]


def capacities_in_blocks(
    text: str, block_size: str | None, requests: Sequence[Request]
) -> list[int]:
    """`5000blocks,25000blocks`, parts of the working set (`0.5ws`), or sizes and a block's size.

    Raises ConfigError.
    """
    found = []
    for one in text.split(","):
        share = one.strip().removesuffix(_WORKING_SETS)
        if share != one.strip():
            found.append(_part_of_working_set(share, requests))
            continue
        if not one.strip().endswith(_BLOCKS) and block_size is None:
            raise ConfigError(f"--capacity {one!r}: expected 5000blocks, or also --block-size")
        size = parse_size(block_size) if block_size is not None else 1
        found.append(_bytes(one, size) // size if size else 0)
        if found[-1] < 1:
            raise ConfigError(f"--capacity {one!r} holds no block")
    return found


_BLOCKS = "blocks"
_WORKING_SETS = "ws"


def _part_of_working_set(share: str, requests: Sequence[Request]) -> int:
    try:
        part = float(share)
    except ValueError:
        part = 0.0
    if not 0 < part <= 1000:
        raise ConfigError(f"--capacity {share}ws: expected a part of the working set, like 0.5ws")
    return max(1, round(part * cache_bounds.working_set(requests)))


def _bytes(capacity: str, block_size: int) -> int:
    """A capacity as users say it: a size like 176MiB, or a number of blocks like 5000blocks."""
    text = capacity.strip()
    if not text.endswith(_BLOCKS):
        try:
            return parse_size(text)
        except ConfigError as error:
            raise ConfigError(f"--capacity: {error}") from None
    count = text.removesuffix(_BLOCKS).strip()
    if not count.isdecimal() or len(count) > 15:
        raise ConfigError(f"--capacity {capacity!r}: expected a number of blocks, like 5000blocks")
    return int(count) * block_size


# --- playing ---------------------------------------------------------------------------


async def replay(options: ReplayOptions, console: Console) -> ReplayReport:
    """Play it all; progress goes to `console`. Every process it starts ends with it."""
    report = ReplayReport(
        name=options.name,
        requests=len(options.requests),
        servers=options.servers,
        clients=options.clients,
        capacity=options.capacity,
        block_size=options.block_size,
        transports={name: TransportTraffic() for name in options.transports},
    )
    async with AsyncExitStack() as stack:
        master = await stack.enter_async_context(
            process_of("kvpool", "master", "--bind", "127.0.0.1:0", "--log-level", "error")
        )
        address = (await master.line()).removeprefix("master at ")
        pool = _Servers(options, address, stack)
        await pool.start()
        engines = [
            await stack.enter_async_context(_engine(options, number, address))
            for number in range(options.clients)
        ]
        with progress(console, report) as show:
            started = time.monotonic()
            await _while_alive(master, _play(options, engines, report, show, started, pool))
            report.seconds = time.monotonic() - started
        # A server that has ended during the run is a result, too: do not wait for any of them.
        report.members = await servers_up(address, 0)
    _add_bounds(options, report)
    return report


async def _while_alive(master: Child, play: Coroutine[Any, Any, None]) -> None:
    """Run `play`. Raises ServerLost when the master ends first: every call would time out."""
    async with task_group() as group:
        watching = group.create_task(master.line())
        await play
        watching.cancel()


async def _play(
    options: ReplayOptions,
    engines: Sequence[_Engine],
    report: ReplayReport,
    show: Any,
    started: float,
    pool: _Servers,
) -> None:
    """Requests in order and in turn; a session's next one waits for its last."""
    places = asyncio.Semaphore(options.in_flight)
    last: dict[int, asyncio.Task[None]] = {}
    shown = 0.0

    async def one(request: Request, engine: _Engine, before: Any) -> None:
        try:
            if before is not None:
                await before
            _add(report, options, engine.transport, await engine.play(request.chain))
        finally:
            places.release()

    kill_at = int(len(options.requests) * options.kill_at) if options.kill_at else None
    events = [(int(len(options.requests) * share), event) for share, event in options.events]
    async with asyncio.TaskGroup() as group:
        for number, request in enumerate(options.requests):
            if number == kill_at:
                await wait_for_all(last.values())
                report.killed_after = report.hits, report.blocks
                await pool.kill_and_start()
            while events and number >= events[0][0]:
                _, event = events.pop(0)
                if event == "kill":  # what is on its way to that server is lost, and no miss here
                    await wait_for_all(last.values())
                    await pool.kill_one()
                else:
                    happening = group.create_task(pool.join() if event == "join" else pool.drain())
                    last[-1 - number] = happening
            await places.acquire()
            engine = engines[number % len(engines)]
            before = last.get(request.session)
            last[request.session] = group.create_task(one(request, engine, before))
            now = time.monotonic()
            if now - shown >= _REFRESH_S:
                shown = now
                report.timeline.append((now - started, report.hit_rate))
                show(now - started)


def _add(
    report: ReplayReport, options: ReplayOptions, transport: str, answer: dict[str, Any]
) -> None:
    stored = answer["statuses"].get("write: stored", 0)
    path = report.transports[transport]
    path.read_bytes += answer["hit"] * options.block_size
    path.written_bytes += stored * options.block_size
    path.read_s += answer["read_s"]
    path.write_s += answer["write_s"]
    report.blocks += answer["total"]
    report.hits += answer["hit"]
    report.wrong_bytes += answer["wrong"]
    for name, count in answer["statuses"].items():
        report.statuses[name] = report.statuses.get(name, 0) + count
    for name in ("match_s", "read_s", "write_s"):
        if answer[name]:
            getattr(report, name).append(answer[name])


def _add_bounds(options: ReplayOptions, report: ReplayReport) -> None:
    requests, capacity = options.requests, options.capacity_blocks
    report.offline_lru = report.offline_policy = cache_bounds.lru(requests, capacity)
    if options.policy != "lru" or options.servers > 1:
        report.offline_policy = dry.real_hit_rate(
            requests,
            options.policy,
            capacity,
            servers=options.servers,
            seconds=report.seconds,
            heartbeat_s=_HEARTBEAT_S,
        )
    report.offline_isolated = cache_bounds.isolated(requests, capacity, options.clients)
    report.offline_ideal = cache_bounds.ideal(requests)


# --- processes -------------------------------------------------------------------------


class _Servers:
    """The block servers of a replay; they end with `stack`."""

    def __init__(self, options: ReplayOptions, master: str, stack: AsyncExitStack) -> None:
        self._options = options
        self._master = master
        self._stack = stack
        self._running: dict[int, Child] = {}
        self._count = options.servers  # numbers that were given out
        self._epochs: set[int] = set()

    async def start(self) -> None:
        """Start all of them, and wait until the master knows them as they are now."""
        await self._start(*range(self._options.servers))

    async def _start(self, *numbers: int) -> None:
        started = []
        for number in numbers:
            process = _server(self._options, number, self._master)
            self._running[number] = await self._stack.enter_async_context(process)
            started.append(_id(number))
        for number in numbers:
            await self._running[number].line()
        while True:
            members = await servers_up(self._master, len(self._running))
            epochs = {member.epoch for member in members if member.server in started}
            if len(epochs) == len(started) and not epochs & self._epochs:
                self._epochs |= epochs
                return
            await asyncio.sleep(_POLL_S)

    async def join(self) -> None:
        """One more server."""
        self._count += 1
        await self._start(self._count - 1)

    async def drain(self) -> None:
        """The oldest server hands over its blocks, and ends.

        Raises ServerLost when blocks are left.
        """
        number = min(self._running)
        async with connect(config=ClientConfig(masters=[self._master])) as pool:
            report = await admin(pool).drain(_id(number), within_s=_DRAIN_S)
            while report.state is MoveStatus.IN_PROGRESS:
                await asyncio.sleep(_POLL_S)
                report = await admin(pool).drain_report(_id(number))
        if report.state is not MoveStatus.DONE:
            why = ", ".join(f"{left.blocks} {left.reason}" for left in report.left)
            raise ServerLost(
                f"{_id(number)} cannot leave, {report.left_blocks} blocks are left ({why}): give "
                "the others more room, with a larger --capacity or a tier of a disk"
            )
        server = self._running.pop(number)
        server.signal(signal.SIGTERM)
        await server.ended()

    async def kill_one(self) -> None:
        """Kill -9 of the newest server, which starts again."""
        number = max(self._running)
        self._running[number].signal(signal.SIGKILL)
        await self._running[number].ended()
        await self._start(number)

    async def kill_and_start(self) -> None:
        """Kill -9, all at once."""
        for server in self._running.values():
            server.signal(signal.SIGKILL)
        for server in self._running.values():
            await server.ended()
        await self._start(*self._running)


def _server(
    options: ReplayOptions, number: int, master: str
) -> contextlib.AbstractAsyncContextManager[Child]:
    name = _id(number)
    if options.tiers:
        memory = [word for t in options.tiers for word in ("--tier", t.replace("{server}", name))]
    else:
        memory = ["--capacity", str(options.capacity // options.servers)]
    return process_of(
        "kvpool",
        "server",
        "--masters",
        master,
        "--id",
        name,
        *memory,
        "--policy",
        options.policy,
        "--log-level",
        "error",
        environment={"KVPOOL_SERVER_HEARTBEAT_S": f"{_HEARTBEAT_S}"},
    )


def _id(number: int) -> str:
    return f"server-{number}"


class _Engine:
    """A client process; it plays one request at a time, in the order they come."""

    def __init__(self, process: Child, transport: str) -> None:
        self.transport = transport
        self._process = process
        self._turn = asyncio.Lock()

    async def play(self, chain: Sequence[int]) -> dict[str, Any]:
        async with self._turn:
            return await self._ask(list(chain))

    async def _ask(self, message: Any) -> dict[str, Any]:
        with contextlib.suppress(RuntimeError):  # uvloop: the pipe is closed; `line` says why
            self._process.write_line(json.dumps(message))
        answer: dict[str, Any] = json.loads(await self._process.line())
        return answer

    async def set_up(self, options: ReplayOptions, master: str) -> None:
        await self._ask(
            {
                "master": master,
                "transports": [self.transport],
                "block_size": options.block_size,
                "seed": options.seed,
            }
        )


@asynccontextmanager
async def _engine(options: ReplayOptions, number: int, master: str) -> AsyncIterator[_Engine]:
    transport = options.transports[number % len(options.transports)]
    async with process_of("kvpool.tools.replay_engine") as process:
        engine = _Engine(process, transport)
        await engine.set_up(options, master)
        yield engine
