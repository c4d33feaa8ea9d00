"""Three `vllm serve` behind a router, driven by 24 recorded agent sessions: what a pool changes.

    make demo-fleet ARGS="--all --picture demo-fleet.svg"

The reference router (examples/router) with several policies, then vllm-router's wheel; without the
pool, with it, and with hints. Then an engine is killed while sessions run on it, others take over
the long ones that it had, and a server of the pool is killed on the way. Every answer is compared
with that of an engine without a connector. A tiny model on a CPU: real vLLM, real HTTP, the real
`openai` client, toy answers.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, NamedTuple

from examples import fleet_rates
from examples.agent_sessions import Message, Session, long_session, recorded
from examples.fleet_report import HINTS, WITH, WITHOUT, Answered, Row, picture, table, wrong
from examples.vllm_two_instances import Instance, end_when_told, free_port, tiny, transfer

ENGINES: Final = 3
#: 10,240 tokens: a third of the sessions fits, all of them do not.
_KV_BYTES, _KV_TOKENS, _BLOCK = 80 << 20, 10_240, 32
_POOL_BYTES: Final = 384 << 20  # of each server
_TOKENS: Final = 6  # of an answer
_AT_ONCE: Final = 4  # requests
_ANSWER_S: Final = 60.0
_LONG, _LONG_TURNS, _LONG_WORDS = 2, 3, 2200
_RETRIES: Final = 3
_NO_POOL: Final = {"kvpool": {"skip_load": True, "skip_save": True}}
_KVPOOL: Final = (sys.executable, "-m", "kvpool")
_SHORT: Final = {WITHOUT: "none", WITH: "pool", HINTS: "hints"}
#: Cells of the matrix: policy and mode; those that are marked run with --all only.
CELLS: Final = (
    ("round_robin", WITHOUT, False),
    ("round_robin", WITH, False),
    ("least_loaded", WITHOUT, True),
    ("least_loaded", WITH, True),
    ("session", WITHOUT, False),
    ("session", HINTS, False),
    ("precise", WITHOUT, True),
    ("precise", WITH, False),
    ("precise", HINTS, False),
)


class Cell(NamedTuple):
    """One run: where to ask, what to send with each request, and what to call it."""

    url: str
    router: str
    mode: str
    salt: str = ""
    names: bool = False  # whether clients name their sessions

    def body(self) -> dict[str, Any]:
        """A salt keeps the blocks of one run from all others."""
        extra: dict[str, Any] = {"ignore_eos": True}
        if self.salt:
            extra["cache_salt"] = self.salt
        if self.mode == WITHOUT:
            extra["kv_transfer_params"] = _NO_POOL
        return extra


class PoolServers:
    """A master and two block servers in processes of their own."""

    def __init__(self, logs: Path, capacity: str) -> None:
        self.master = f"127.0.0.1:{free_port()}"
        self._processes = [self._start(logs / "master.log", "master", "--bind", self.master)]
        for number in (1, 2):
            options = ["--masters", self.master, "--capacity", capacity, "--id", f"server-{number}"]
            self._processes.append(self._start(logs / f"server-{number}.log", "server", *options))

    def _start(self, log: Path, *arguments: str) -> subprocess.Popen[bytes]:
        with log.open("w") as output:
            return subprocess.Popen([*_KVPOOL, *arguments], stdout=output, stderr=output)

    def kill_server(self) -> None:
        """The last one, with -9."""
        self._processes[-1].kill()
        self._processes[-1].wait()

    def close(self) -> None:
        for process in reversed(self._processes):
            process.terminate()
        for process in self._processes:
            process.wait(20)


class Served(NamedTuple):
    """An engine that runs, and its streams of KV events."""

    instance: Instance
    events: str
    replay: str

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.instance.port}"

    def kill(self) -> None:
        """With -9, and all its processes."""
        os.killpg(self.instance.pid, signal.SIGKILL)


def engine(name: str, model: Path, logs: Path, master: str) -> Served:
    events, replay = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
    published = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": events.replace("127.0.0.1", "*"),
        "replay_endpoint": replay.replace("127.0.0.1", "*"),
    }
    arguments = [
        *("--max-model-len", "8192", "--enable-scale-out"),
        *("--prefix-caching-hash-algo", "sha256_cbor"),
        *("--kv-events-config", json.dumps(published)),
        *("--middleware", "kvpool_agents.sessions.Middleware"),
    ]
    instance = Instance(name, model, logs / f"{name}.log", transfer(master), _KV_BYTES, arguments)
    return Served(instance, events, replay)


# --- asking ------------------------------------------------------------------------------


async def ask(client: Any, cell: Cell, session: Session, turn: int) -> Answered:
    """One turn, as a client that repeats a request whose connection broke."""
    import openai

    headers = session.headers(cell.salt) if cell.names else {}
    for retries in range(_RETRIES + 1):
        began = time.perf_counter()
        try:
            first_s, text, usage, engine_url = await streamed(
                client, cell, session.prompt(turn), headers
            )
            details = usage.prompt_tokens_details
            cached = (details.cached_tokens or 0) if details else 0
            return Answered(
                *(session.name, turn, usage.prompt_tokens, cached, first_s - began),
                *(text, engine_url, retries, began, time.perf_counter()),
            )
        except (openai.APIConnectionError, openai.InternalServerError, _CutShort):
            await asyncio.sleep(0.5 * (retries + 1))
    raise SystemExit(f"{cell.router}: no answer to turn {turn} of {session.name}")


class _CutShort(Exception):
    """The answer ended before its end."""


async def streamed(
    client: Any, cell: Cell, messages: list[Message], headers: Mapping[str, str]
) -> tuple[float, str, Any, str]:
    """When the first token came, the text, the usage and the engine."""
    import httpx

    create = client.with_options(
        base_url=f"{cell.url}/v1"
    ).chat.completions.with_raw_response.create
    raw = await create(
        model="tiny",
        messages=messages,
        max_tokens=_TOKENS,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_headers=headers,
        extra_body=cell.body(),
    )
    first_s, text, usage = 0.0, "", None
    try:
        async for chunk in raw.parse():
            for choice in chunk.choices:
                first_s = first_s or time.perf_counter()
                text += choice.delta.content or ""
            usage = chunk.usage or usage
    except httpx.HTTPError as error:
        raise _CutShort from error
    if usage is None:
        raise _CutShort
    return first_s, text, usage, raw.headers.get("x-router-engine", "")


async def run(
    client: Any,
    cell: Cell,
    sessions: Sequence[Session],
    on_answer: Callable[[int], Awaitable[None]] | None = None,
) -> Row:
    """All sessions, a few requests at a time, each turn after the one before it."""
    done = {(one.name, turn): asyncio.Event() for one in sessions for turn in range(len(one.ends))}
    room = asyncio.Semaphore(_AT_ONCE)
    answers: list[Answered] = []

    async def play(session: Session) -> None:
        if session.after is not None:
            await done[session.after].wait()
        for turn in range(len(session.ends)):
            async with room:
                answers.append(await ask(client, cell, session, turn))
            done[session.name, turn].set()
            if on_answer is not None:
                await on_answer(len(answers))

    began = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for session in sessions:
            group.create_task(play(session))
    return Row(cell.router, cell.mode, answers, time.perf_counter() - began)


# --- routers -----------------------------------------------------------------------------


@asynccontextmanager
async def reference_router(
    policy: str, engines: Sequence[Served], master: str
) -> AsyncIterator[str]:
    from examples.router.__main__ import parse, serving

    arguments = ["--policy", policy, "--port", "0", "--pool", master]
    for one in engines:
        arguments += ["--engine", f"{one.url},events={one.events},replay={one.replay}"]
    async with serving(parse(arguments)) as url:
        await healthy(url, len(engines))
        yield url


@contextmanager
def vllm_router(program: Path, engines: Sequence[Served], log: Path) -> Iterator[str]:
    """The real one, which is told the streams: Python engines have no endpoint that names them."""
    port = free_port()
    command = [str(program), "--host", "127.0.0.1", "--port", str(port)]
    command += ["--prometheus-port", str(free_port()), "--policy", "kv_aware"]
    command += ["--worker-startup-check-interval", "1", "--kv-event-block-size", "32"]
    command += ["--kv-event-model", "tiny", "--worker-urls", *(one.url for one in engines)]
    for one in engines:
        command += ["--kv-event-source", f"{one.url}={one.events}"]
        command += ["--kv-event-replay-source", f"{one.url}={one.replay}"]
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


async def healthy(url: str, engines: int) -> None:
    """Wait until a router knows so many engines."""
    import aiohttp

    async with aiohttp.ClientSession() as session, asyncio.timeout(30):
        while True:
            try:
                async with session.get(f"{url}/health") as answer:
                    if answer.status == 200 and (
                        not engines or len((await answer.json())["engines"]) == engines
                    ):
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.2)


class Fleet(NamedTuple):
    """Everything that runs."""

    engines: Sequence[Served]
    pool: PoolServers
    logs: Path


@contextmanager
def started(model: Path, logs: Path) -> Iterator[tuple[Fleet, Instance]]:
    """Three engines, a pool, and an engine without a connector, started together."""
    with ExitStack() as stack:
        pool = PoolServers(logs, str(_POOL_BYTES))
        stack.callback(pool.close)
        plain = Instance("plain", model, logs / "plain.log", None, 256 << 20)
        stack.callback(plain.close)
        engines = []
        for name in "ABC"[:ENGINES]:
            engines.append(engine(name, model, logs, pool.master))
            stack.callback(engines[-1].instance.close)
        for instance in (plain, *(one.instance for one in engines)):
            instance.ready()
        yield Fleet(engines, pool, logs), plain


# --- the runs ----------------------------------------------------------------------------


async def matrix(
    client: Any, chosen: argparse.Namespace, fleet: Fleet, probes: list[fleet_rates.Probe]
) -> list[Row]:
    """Each policy and mode, with blocks of its own. With --results, rates before each row and after
    the last one are added to `probes`."""
    rows: list[Row] = []
    sessions = recorded()
    for policy, mode, extra in CELLS:
        if extra and not chosen.all:
            continue
        if chosen.results is not None:
            probes += await rates(client, fleet, len(rows))
        async with reference_router(policy, fleet.engines, fleet.pool.master) as url:
            named = mode == HINTS or policy == "session"
            salt = f"{policy}-{_SHORT[mode]}-"
            cell = Cell(url, f"example: {policy}", mode, salt, named)
            rows.append(await run(client, cell, sessions))
        print(table(rows[-1:]).splitlines()[1], flush=True)
    if chosen.results is not None:
        probes += await rates(client, fleet, len(rows))
    if chosen.vllm_router is not None:
        # Without a salt: what this router makes of salted blocks is another question.
        log = fleet.logs / "vllm-router.log"
        with vllm_router(chosen.vllm_router, fleet.engines, log) as url:
            await healthy(url, 0)
            await asyncio.sleep(1.5)  # it is healthy before it listens to the streams
            cell = Cell(url, "vllm-router: kv_aware", HINTS, "", True)
            rows.append(await run(client, cell, sessions))
        print(table(rows[-1:]).splitlines()[1], flush=True)
    return rows


async def failures(client: Any, fleet: Fleet) -> list[Row]:
    """An engine is killed amid a run; cold ones take over the long sessions that only it had; a
    server of the pool is killed on the way."""
    first, rest = fleet.engines[0], fleet.engines[1:]
    longs = [long_session(number, _LONG_TURNS, _LONG_WORDS) for number in range(_LONG)]
    modes = [Cell(first.url, "", mode, f"long-{_SHORT[mode]}-", True) for mode in (WITHOUT, WITH)]
    for session in longs:
        for cell in modes:
            await ask(client, cell, session, 0)
    rows = []
    async with reference_router("session", fleet.engines, fleet.pool.master) as url:

        async def kill_engine(answers: int) -> None:
            if answers == 20:
                print(f"kill -9 of engine {first.instance.name}", flush=True)
                first.kill()

        cell = Cell(url, "an engine is killed", HINTS, "killed-", True)
        rows.append(await run(client, cell, recorded(), kill_engine))
        await healthy(url, len(rest))
        for turn in range(1, _LONG_TURNS):
            label = "a cold engine takes over" if turn == 1 else "and a server is killed"
            if turn == 2:
                print("kill -9 of a server of the pool", flush=True)
                fleet.pool.kill_server()
            for one in modes:
                taken = Cell(url, label, one.mode, one.salt, True)
                began = time.perf_counter()
                answers = [await ask(client, taken, session, turn) for session in longs]
                rows.append(Row(label, one.mode, answers, time.perf_counter() - began))
    return rows


async def alone(client: Any, plain: Instance) -> tuple[Row, Row]:
    """The sessions, and the long ones, on an engine without a connector that keeps all of them:
    what every answer must be, and the best hit rate that any router can have."""
    longs = [long_session(number, _LONG_TURNS, _LONG_WORDS) for number in range(_LONG)]
    cell = Cell(f"http://127.0.0.1:{plain.port}", "one engine that keeps all", "")
    return await run(client, cell, recorded()), await run(client, cell, longs)


async def rates(client: Any, fleet: Fleet, row: int) -> list[fleet_rates.Probe]:
    """How fast the engines are now, each alone and beside the others."""
    async with reference_router("round_robin", fleet.engines, fleet.pool.master) as url:

        async def asked(engine: int | None, mode: str, salt: str, session: Session) -> Answered:
            where = url if engine is None else fleet.engines[engine].url
            return await ask(client, Cell(where, "rates", mode, salt), session, 0)

        return await fleet_rates.probes(asked, len(fleet.engines), _AT_ONCE, row, _TOKENS)


async def measure(chosen: argparse.Namespace, fleet: Fleet, plain: Instance) -> list[Row]:
    import openai

    sessions: list[dict[str, Any]] = []
    probes: list[fleet_rates.Probe] = []
    async with openai.AsyncOpenAI(api_key="none", max_retries=0, timeout=_ANSWER_S) as client:
        best, longs = await alone(client, plain)
        if chosen.results is not None:
            url = f"http://127.0.0.1:{plain.port}"
            sessions = await asyncio.to_thread(fleet_rates.prompts, url, recorded(), _BLOCK)
        plain.close()  # two cores: those of the others from here on
        for number, one in enumerate(fleet.engines):  # the first requests of a process are slow
            warm = long_session(100 + number, 1, 500)
            for mode in (WITHOUT, WITH):
                await ask(client, Cell(one.url, "warm", mode, f"warm-{_SHORT[mode]}"), warm, 0)
        rows = await matrix(client, chosen, fleet, probes)
        if chosen.results is not None:
            facts = {
                **{"engines": ENGINES, "engine_bytes": _KV_BYTES, "engine_tokens": _KV_TOKENS},
                **{"pool_bytes": 2 * _POOL_BYTES, "block": _BLOCK},
                **{"at_once": _AT_ONCE, "output": _TOKENS},
            }
            fleet_rates.write(chosen.results, facts, sessions, probes, rows)
        rows += await failures(client, fleet)
    right = {(one.session, one.turn): one.text for row in (best, longs) for one in row.answers}
    if faults := wrong(rows, right):
        raise SystemExit("\n".join(["answers differ:", *faults]))
    return [best._replace(mode=WITHOUT), *rows]


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--all", action="store_true", help="the whole matrix")
    parser.add_argument("--picture", type=Path, help="an SVG file to write")
    parser.add_argument("--vllm-router", type=Path, help="the program of its wheel")
    parser.add_argument(
        "--results",
        type=Path,
        help="a file for `benchmarks.fleet --demo-results`, with measured rates",
    )
    chosen = parser.parse_args(arguments)
    if chosen.vllm_router is not None and not os.access(chosen.vllm_router, os.X_OK):
        parser.error(f"--vllm-router {chosen.vllm_router}: no such program")
    for option, path in (("--picture", chosen.picture), ("--results", chosen.results)):
        if path is not None and not path.parent.is_dir():
            parser.error(f"{option} {path}: no such directory")
    return chosen


def main(arguments: Sequence[str]) -> None:
    chosen = parse(arguments)
    if find_spec("vllm") is None:
        raise SystemExit("vLLM is not installed here: make demo-fleet")
    end_when_told()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kvpool-demo-") as folder:
        model, logs = tiny(Path(folder) / "model"), Path(folder)
        print("three engines, a plain one and a pool start (a minute or two) ...", flush=True)
        with started(model, logs) as (fleet, plain):
            print(f"ready after {time.monotonic() - began:.0f} s", flush=True)
            rows = asyncio.run(measure(chosen, fleet, plain))
    print(f"\n{table(rows)}\n")
    answers = sum(len(row.answers) for row in rows)
    repeated = sum(one.retries for row in rows for one in row.answers)
    print(
        f"All {answers} answers are those of a plain engine; clients repeated {repeated} of them "
        f"after the engine was killed. It took {time.monotonic() - began:.0f} s."
    )
    if chosen.results is not None:
        print(f"written to {chosen.results}, for `benchmarks.fleet --demo-results`")
    if chosen.picture is not None:
        chosen.picture.write_text(picture(rows))
        print(f"drawn in {chosen.picture}")


if __name__ == "__main__":
    main(sys.argv[1:])
