"""The reference router between real sockets: engines that stream and die, clients that leave."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from examples.router import __main__ as program
from examples.router import fleet as fleet_module
from examples.router import proxy as proxy_module
from examples.router.prompts import block_hashes
from kvpool import Namespace, admin, dev
from kvpool.kv_events import ClearedEvent, StoredEvent, short_hash
from kvpool.net.event_publisher import EventPublisher
from kvpool.runtime import Host
from kvpool.server.block_server import BlockServer
from kvpool.types import Demand, WorkingSet
from kvpool_agents import admission as admission_module
from kvpool_agents import admission_gate
from tests.conftest import eventually, patient, value

CHAT = "/v1/chat/completions"
PATHS = [CHAT, "/v1/completions", "/v1/responses", "/v1/messages"]
BLOCK = 16
NAMESPACE = Namespace("vllm/2 model=tiny")
PIECES = [b'data: {"text": "%d"}\n\n' % number for number in range(5)] + [b"data: [DONE]\n\n"]


class FakeEngine:
    """What a router sees of an engine. `mode`: how it answers prompts."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.url = ""
        self.mode = "stream"
        self.metrics = ""
        self.tokens: list[int] = []
        self.bodies: list[bytes] = []
        self.headers: list[dict[str, str]] = []
        self.left = asyncio.Event()
        self.go = asyncio.Event()
        self.publisher = EventPublisher("tcp://127.0.0.1:0", "tcp://127.0.0.1:0")

    async def start(self, port: int = 0) -> None:
        app = web.Application(client_max_size=1 << 30)
        app.add_routes([web.post(path, self._answer) for path in PATHS])
        app.add_routes([web.post(f"{path}/render", self._render) for path in PATHS])
        app.add_routes([web.get("/metrics", self._metrics), web.get("/v1/models", self._models)])
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", port).start()
        self.port = self._runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{self.port}"

    async def stop(self) -> None:
        await self._runner.cleanup()

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(text=self.metrics)

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [self.name]})

    async def _render(self, request: web.Request) -> web.Response:
        await request.read()
        return web.json_response({"token_ids": self.tokens, "request_id": "r"})

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(await request.read())
        self.headers.append(dict(request.headers))
        assert request.transport is not None
        if self.mode == "dead":
            request.transport.abort()
        if self.mode == "zipped":
            zipped = gzip.compress(b'{"answer": 1}')
            answer = web.Response(
                body=zipped, headers={"Content-Encoding": "gzip", "X-Own": "1"}, status=418
            )
            answer.headers.add("X-Own", "2")
            return answer
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        response.enable_chunked_encoding()
        await response.prepare(request)
        try:
            for number, piece in enumerate(PIECES):
                if (self.mode, number) in (("dies before", 0), ("dies after", 2)):
                    request.transport.abort()
                    return response
                if self.mode == "waits" and number == 2:
                    await self.go.wait()
                await response.write(piece)
                await asyncio.sleep(0.01)
        except asyncio.CancelledError:
            self.left.set()
            raise
        return response


@asynccontextmanager
async def engines(*names: str) -> AsyncIterator[list[FakeEngine]]:
    async with contextlib.AsyncExitStack() as stack:
        made = [FakeEngine(name) for name in names]
        for one in made:
            await one.start()
            stack.push_async_callback(one.stop)
            one.publisher.start()
            stack.callback(one.publisher.close)
        yield made


class Asked:
    """A router, and a client of it."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self.url = url
        self._session = session

    def post(self, path: str = CHAT, body: Any = None, **headers: str) -> Any:
        data = body if isinstance(body, bytes) else json.dumps(body or {"model": "m"}).encode()
        return self._session.post(self.url + path, data=data, headers=headers)

    async def get(self, path: str) -> Any:
        async with self._session.get(self.url + path) as answer:
            return await answer.json()

    async def engine(self, body: Any = None, **headers: str) -> tuple[str, str]:
        """Which engine answers, and why."""
        async with self.post(body=body, **headers) as answer:
            await answer.read()
            return answer.headers["x-router-engine"], answer.headers["x-router-reason"]

    async def healthy(self, count: int) -> None:
        async def are_so_many() -> bool:
            return len((await self.get("/health"))["engines"]) == count

        await eventually(are_so_many, 15)


@pytest.fixture
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_module, "_POLL_S", 0.1)


@asynccontextmanager
async def router(policy: str, *made: FakeEngine | str, healthy: int = -1) -> AsyncIterator[Asked]:
    arguments = ["--policy", policy, "--port", "0"]
    for one in made:
        arguments += [one] if isinstance(one, str) else ["--engine", one.url]
    async with (
        program.serving(program.parse(arguments)) as url,
        aiohttp.ClientSession(auto_decompress=False) as session,
    ):
        asked = Asked(url, session)
        await asked.healthy(healthy if healthy >= 0 else len(made))
        yield asked


@pytest.mark.parametrize("path", PATHS)
async def test_requests_and_answers_pass_byte_for_byte(path: str) -> None:
    body = b'{"model":"m", "stream":true,  "odd spacing":[1,2 ]}\n'
    async with engines("a") as (a,), router("session", a) as asked:
        headers = {"Authorization": "Bearer k", "Content-Type": "application/json"}
        async with asked.post(f"{path}?beta=true", body, **headers) as answer:
            pieces = [piece async for piece in answer.content.iter_any()]
            assert answer.content_type == "text/event-stream"
        assert b"".join(pieces) == b"".join(PIECES)
        assert len(pieces) >= 4  # as they come, not at the end
        assert a.bodies == [body]
        assert a.headers[0]["Authorization"] == "Bearer k"
        assert "X-Session-ID" not in a.headers[0]
        a.mode = "zipped"
        async with asked.post(path, body) as answer:
            assert (answer.status, answer.headers.getall("X-Own")) == (418, ["1", "2"])
            assert gzip.decompress(await answer.read()) == b'{"answer": 1}'


async def test_an_engine_lost_before_the_first_byte_is_replaced() -> None:
    async with engines("a", "b") as (a, b), router("round_robin", a, b) as asked:
        for mode in ("dead", "dies before"):
            a.mode = mode
            await asked.healthy(2)
            for _ in range(2):  # one of them is the turn of `a`
                async with asked.post() as answer:
                    assert await answer.read() == b"".join(PIECES)
                    assert answer.headers["x-router-engine"] == b.url
            reasons = [one["reason"] for one in (await asked.get("/decisions"))[:3]]
            assert "turn retry" in reasons
        assert len(a.bodies) == 2
        await a.stop()
        await asked.healthy(1)
        assert (await asked.engine())[0] == b.url
        await a.start(a.port)
        a.mode = "stream"
        await asked.healthy(2)
        assert {(await asked.engine())[0] for _ in range(2)} == {a.url, b.url}


@pytest.mark.usefixtures("looks_often")
@pytest.mark.parametrize("figure", ["NaN", "+Inf", "1e400"])
async def test_an_engine_whose_page_makes_no_sense_is_looked_at_again(figure: str) -> None:
    async with engines("a") as (engine,), router("round_robin", engine, healthy=1) as asked:
        engine.metrics = f"vllm:num_requests_running {figure}\n"
        await asked.healthy(0)
        engine.metrics = "vllm:num_requests_running 1\n"
        await asked.healthy(1)


async def test_an_engine_lost_after_the_first_byte_breaks_the_answer() -> None:
    async with engines("a", "b") as (a, b), router("round_robin", a, b) as asked:
        a.mode = b.mode = "dies after"
        async with asked.post() as answer:
            got: list[bytes] = []
            with pytest.raises(aiohttp.ClientError):
                await collect(answer, got)
        assert b"".join(got) == b"".join(PIECES[:2])
        assert len(a.bodies) + len(b.bodies) == 1


async def collect(answer: aiohttp.ClientResponse, got: list[bytes]) -> None:
    async for piece in answer.content.iter_any():
        got += [piece]


async def test_no_engine_at_all() -> None:
    async with engines("a") as (a,), router("session", a) as asked:
        a.mode = "dead"
        async with asked.post() as answer:
            assert (answer.status, answer.headers["Retry-After"]) == (503, "1")
            assert "no engine answers; 1 were tried" in await answer.text()
        async with asked.post("/v1/other") as answer:
            assert answer.status == 404


async def test_a_client_that_goes_away_ends_its_request_in_the_engine() -> None:
    async with engines("a") as (a,), router("session", a) as asked:
        a.mode = "waits"
        async with asked.post() as answer:
            # All that the engine sends before it waits: with something to pass on, the router
            # would notice by itself.
            await answer.content.readexactly(sum(map(len, PIECES[:2])))
            answer.close()
        async with asyncio.timeout(patient(5)):
            await a.left.wait()
        a.mode = "stream"
        assert (await asked.engine())[0] == a.url


async def test_requests_are_bounded_in_number_and_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxy_module, "REQUESTS_MAX", 2)
    async with engines("a") as (a,), router("session", a) as asked:
        a.mode = "waits"
        async with asked.post() as first, asked.post() as second:
            await first.content.readany()
            await second.content.readany()
            async with asked.post() as third:
                assert third.status == 503
            a.go.set()
            await first.read()
            await second.read()
        a.mode = "stream"
        async with asked.post(body=b"x" * ((32 << 20) + 1)) as answer:
            assert answer.status == 413
        large = b'{"session_id": "large", "pad": "' + b"x" * (5 << 20) + b'"}'
        await asked.engine(large)  # passes unread
        assert a.bodies[-1] == large
        assert (await asked.get("/decisions"))[0]["session"] == ""


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"not json",
        b"[" * 100_000,
        b'{"n": "many"}',
        b'{"n": -5}',
        b'{"n": 1e300}',
        b'{"session_id": "' + b"s" * (3 << 20) + b'"}',
        b'{"session_id": {"a": 1}, "prompt_cache_key": 5}',
        b'\xff\xfe{"model":"m"}',
    ],
)
async def test_nonsense_is_passed_on_for_the_engine_to_refuse(body: bytes) -> None:
    async with engines("a") as (a,), router("session", a) as asked:
        async with asked.post(body=body) as answer:
            assert answer.status == 200
        assert a.bodies == [body]


async def test_sessions_of_real_clients_stay_on_their_engine() -> None:
    async with engines("a", "b") as (a, b), router("session", a, b) as asked:
        for headers in ({"thread-id": "codex"}, {"X-Claude-Code-Session-Id": "claude"}):
            home, _ = await asked.engine(**headers)
            for _ in range(3):
                assert await asked.engine(**headers) == (home, "session")
        home, _ = await asked.engine({"prompt_cache_key": "key"})
        assert await asked.engine({"prompt_cache_key": "key"}) == (home, "session")
        child = {"thread-id": "child", "x-codex-parent-thread-id": "codex"}
        assert (await asked.engine(**child))[1] == "parent"


async def test_engines_come_from_dns() -> None:
    async with engines("a") as (a,):
        dns = f"--dns=localhost:{a.port}"
        async with router("session", dns, healthy=1) as asked:
            assert (await asked.engine())[0].endswith(f":{a.port}")


# --- precise -----------------------------------------------------------------------------


def describes(engine: FakeEngine, **figures: float) -> None:
    fields = {"namespace": NAMESPACE.name, "hash": "sha256_cbor/16", "block": str(BLOCK)}
    lines = [
        f'vllm:kvpool_name_info{{engine="0",field="{name}",value="{text}"}} 1.0'
        for name, text in fields.items()
    ]
    lines += [f'vllm:{name}{{engine="0"}} {value}' for name, value in figures.items()]
    engine.metrics = "\n".join(lines) + "\n"


@pytest.fixture
async def apart(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[dev.Dev]:
    """Two servers, on host-0 and host-1."""

    def on_its_host(config: Any, **others: Any) -> BlockServer:
        host = config.id.replace("dev", "host")
        return BlockServer(config, host=Host(host, host, host, lambda: 0), **others)

    monkeypatch.setattr(dev, "BlockServer", on_its_host)
    async with dev.serve("64MiB", servers=2, listen=("tcp://127.0.0.1:0",)) as running:
        yield running


@asynccontextmanager
async def precise(running: dev.Dev, *made: FakeEngine) -> AsyncIterator[Asked]:
    """Engine number n is on host-n."""
    arguments = [f"--pool={running.address}"]
    for number, one in enumerate(made):
        streams = f"events={one.publisher.endpoint},replay={one.publisher.replay_endpoint}"
        arguments.append(f"--engine={one.url},{streams},host=host-{number}")
    async with router("precise", *arguments, healthy=len(made)) as asked:
        yield asked


def announced(tokens: list[int], blocks: int) -> StoredEvent:
    chain = block_hashes(tokens, BLOCK)[:blocks]
    return StoredEvent(
        block_hashes=[short_hash(digest) for digest in chain],
        parent_block_hash=None,
        token_ids=tokens[: blocks * BLOCK],
        block_size=BLOCK,
        lora_id=None,
        medium="GPU",
        lora_name=None,
    )


async def settles(asked: Asked, expected: tuple[str, str], **headers: str) -> None:
    until = time.monotonic() + 20
    while (found := await asked.engine(**headers)) != expected:
        assert time.monotonic() < until, found
        await asyncio.sleep(0.1)


async def test_precise_knows_devices_and_the_pool(apart: dev.Dev) -> None:
    tokens = list(range(1000, 1000 + 40 * BLOCK))
    chain = block_hashes(tokens, BLOCK)
    async with apart.pool() as pool, engines("a", "b") as (a, b):
        for engine in (a, b):
            engine.tokens = tokens
            describes(engine, kvpool_prefill_tokens_rate=1000.0)
        a.publisher.publish([announced(tokens, 20)], time.time())  # before the router is there
        await pool.write(NAMESPACE, [b"other" * 5], [b"x"])  # so that the pool knows the name
        async with precise(apart, a, b) as asked:
            await settles(asked, (a.url, "device"))
            # A cold engine: the pool has more than the device, on the other engine's host.
            for digest in chain:
                await admin(pool).write_to("dev-1", NAMESPACE, digest, value(digest))
            await settles(asked, (b.url, "queue"))
            a.publisher.publish([ClearedEvent()], time.time())
            await settles(asked, (b.url, "pool"))
            explained = (await asked.get("/decisions"))[0]
            of_a, of_b = sorted(explained["estimates"], key=lambda one: one["engine"] != a.url)
            assert (of_b["near"], of_b["far"], of_a["near"], of_a["far"]) == (40, 0, 0, 40)
            assert explained["tokens"] == len(tokens)
            # A gap that replay fills, and one that it does not: then it begins anew.
            a.publisher.publish([announced(tokens, 40)], time.time())
            await settles(asked, (a.url, "device"))
            a.publisher.buffer.next += 5
            a.publisher.buffer._kept.clear()
            a.publisher.publish([announced(tokens[5:], 2)], time.time())
            await settles(asked, (b.url, "pool"))
            # Without a master, and then without /render, prompts are routed all the same.
            await apart.master.close()
            took = []
            for _ in range(4):
                began = time.monotonic()
                assert (await asked.engine())[1] == "cold"
                took.append(time.monotonic() - began)
            assert took[0] < patient(2)
            # Only the first one has waited for the master.
            assert took[0] > proxy_module._SCORE_S
            assert min(took[1:]) < patient(proxy_module._SCORE_S)
            a.tokens = b.tokens = ["no tokens"]  # type: ignore[list-item]
            assert (await asked.engine(**{"X-Session-ID": "s"}))[1] == "load"
            assert (await asked.engine(**{"X-Session-ID": "s"}))[1] == "session"


async def test_children_of_one_parent_have_their_prompt_spread(apart: dev.Dev) -> None:
    tokens = list(range(5000, 5000 + 20 * BLOCK))
    chain = block_hashes(tokens, BLOCK)
    async with apart.pool() as pool, engines("a", "b") as (a, b):
        for engine in (a, b):
            engine.tokens = tokens
            describes(engine)
        for digest in chain:
            await admin(pool).write_to("dev-0", NAMESPACE, digest, value(digest))
        async with precise(apart, a, b) as asked:
            (other,) = [one for one in apart.servers if one.server == "dev-1"]
            child = {"thread-id": "one", "x-codex-parent-thread-id": "root"}
            await settles(asked, (a.url, "pool"))
            assert not other.store.index.peek(NAMESPACE, 0, chain[0])
            await asked.engine(**child)
            await eventually(
                lambda: all(other.store.index.peek(NAMESPACE, 0, one) for one in chain)
            )


async def test_wrong_arguments_are_explained(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (
        [],
        ["--dns", "name"],
        ["--engine", "127.0.0.1:80"],
        ["--engine", "http://a,unknown=1"],
        ["--engine", "http://a", "--policy", "best"],
    ):
        with pytest.raises(SystemExit):
            program.parse(arguments)
    assert "--engine" in capsys.readouterr().err


@asynccontextmanager
async def scarce_router(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[FakeEngine, Asked]]:
    """One that admits, over a pool with room for one session, as it has measured for long. Its
    engine is busy with the answer to that session's prompt."""
    monkeypatch.setattr(admission_module, "_KNOWN_S", -1.0)
    monkeypatch.setattr(admission_module, "_BUSY", 0.0)
    monkeypatch.setattr(admission_gate, "_LOOK_S", 0.01)
    async with dev.serve("1MiB") as running, engines("a") as (a,):
        demand = Demand(600.0, (WorkingSet(NAMESPACE, 2 << 20, 10, 1 << 20),), 1.0, 0.0)
        monkeypatch.setattr(running.master.clients, "demand", lambda now: demand)
        pool = ["--pool", running.address, "--admit"]
        async with router("session", a, *pool, healthy=1) as asked:
            yield a, asked


async def seen(asked: Asked, field: str, expected: Any) -> dict[str, Any]:
    """What /health says of the sessions, as soon as it says that."""
    shown: dict[str, Any] = {}
    for _ in range(1000):
        shown = (await asked.get("/health"))["sessions"]
        if shown[field] == expected:
            break
        await asyncio.sleep(0.01)
    assert shown[field] == expected
    return shown


async def waited(asked: Asked, session: str, *, final: bool = False) -> float:
    """Seconds before its answer, as the header says."""
    headers = {"x-dynamo-session-id": session, "x-dynamo-session-final": str(final).lower()}
    async with asked.post(**headers) as answer:
        assert answer.status == 200
        await answer.read()
        return float(answer.headers["x-kvpool-waited"].removesuffix("s"))


async def test_sessions_wait_until_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    async with scarce_router(monkeypatch) as (a, asked):
        a.mode = "waits"
        first = asyncio.create_task(waited(asked, "one", final=True))
        await seen(asked, "places", 1.0)
        second = asyncio.create_task(waited(asked, "two"))
        gone = asyncio.create_task(waited(asked, "three"))
        shown = await seen(asked, "waiting", 2)
        assert shown["served"] == 1
        assert "memory holds 50% of the live working set" in shown["why"]
        gone.cancel()
        await seen(asked, "waiting", 1)
        await asyncio.sleep(0.1)
        assert len(a.bodies) == 1
        a.go.set()
        assert await first == 0.0
        assert await second >= 0.1
        async with asked.post() as answer:  # of no session: it does not wait
            assert "x-kvpool-waited" not in answer.headers
            await answer.read()


async def test_a_fault_of_the_gate_fails_no_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission_module.Admission, "asks", None)
    headers = {"X-Session-ID": "one"}
    async with scarce_router(monkeypatch) as (_, asked), asked.post(**headers) as answer:
        assert answer.status == 200


async def test_who_has_waited_too_long_may_try_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission_gate, "HOLD_S", 0.05)
    async with scarce_router(monkeypatch) as (_, asked):
        assert await waited(asked, "one") == 0.0
        await seen(asked, "places", 1.0)
        for _ in range(2):
            async with asked.post(**{"X-Session-ID": "two"}) as answer:
                assert (answer.status, answer.headers["Retry-After"]) == (503, "1")
                assert "more memory" in (await answer.json())["error"]["message"]
        assert await waited(asked, "one") == 0.0  # it has its place
        await seen(asked, "waiting", 0)
