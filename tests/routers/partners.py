"""Real routers in processes of their own, and the engines that they listen to."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import pytest

from kvpool import EventPosition, Namespace, PoolEvent, PoolEventKind
from kvpool.kv_events import EventBatch, KVEvent, Residency, StoredEvent, batches, encode_batch
from kvpool.net.event_publisher import EventPublisher, ReplayBuffer
from kvpool.net.event_subscriber import EventSubscriber
from kvpool.ops.engine_stream import EngineStream
from kvpool.ops.event_service import publish_engine
from tests.support.programs import free_port

#: Tokens of a block.
BLOCK: Final = 16
GPU: Final = Residency("GPU")
POOL: Final = Namespace("pool")
_START_S: Final = 20.0
#: A router has taken an event after this time.
SETTLE_S: Final = 0.25
_BIN: Final = Path(sys.executable).parent


def need(*modules: str) -> None:
    """Skip the tests of a module where the routers are not installed, and say how to get them."""
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(
            f"{', '.join(missing)} not installed: make test WITH=routers", allow_module_level=True
        )


class Prompt:
    """Tokens that no other prompt has, and the hashes of their blocks."""

    _numbers = itertools.count(1)

    def __init__(self, blocks: int) -> None:
        self.first = next(self._numbers) * 100_000
        self.tokens = list(range(self.first, self.first + blocks * BLOCK))
        self.hashes = [self.first * 1000 + number for number in range(blocks)]

    def stored(self, first: int, last: int, where: Residency, **fields: Any) -> StoredEvent:
        """That blocks `first` to `last` (excluded) are there."""
        return StoredEvent(
            block_hashes=list(self.hashes[first:last]),
            parent_block_hash=self.hashes[first - 1] if first else None,
            token_ids=self.tokens[first * BLOCK : last * BLOCK],
            block_size=BLOCK,
            lora_id=None,
            lora_name=None,
            **where._asdict(),
            **fields,
        )


class Engine:
    """What a router sees of an engine: its HTTP endpoints, and its stream of events."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.publisher = EventPublisher("tcp://127.0.0.1:0", "tcp://127.0.0.1:0")
        self.publisher.start()
        self.url = ""

    def send(self, *events: KVEvent) -> None:
        self.publisher.publish(list(events), time.time())

    def close(self) -> None:
        self.publisher.close()

    @asynccontextmanager
    async def serve(self) -> AsyncIterator[None]:
        from aiohttp import web

        app = web.Application()
        app.router.add_post("/v1/completions/render", self._render)
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_get("/health", self._health)
        app.router.add_get("/get_server_info", self._info)
        app.router.add_get("/kv_event_sources", self._sources)
        runner = web.AppRunner(app)
        await runner.setup()
        port = free_port()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        self.url = f"http://127.0.0.1:{port}"
        try:
            yield
        finally:
            await runner.cleanup()

    async def _render(self, request: Any) -> Any:
        from aiohttp import web

        prompt = (await request.json())["prompt"]
        return web.json_response([{"token_ids": prompt, "request_id": "r"}])

    async def _complete(self, request: Any) -> Any:
        from aiohttp import web

        await request.read()
        choice = {"index": 0, "text": self.name, "finish_reason": "length", "logprobs": None}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        answer = {"id": "x", "object": "text_completion", "created": 0, "model": "m"}
        return web.json_response({**answer, "choices": [choice], "usage": usage})

    async def _health(self, request: Any) -> Any:
        from aiohttp import web

        return web.Response(text="")

    async def _info(self, request: Any) -> Any:
        from aiohttp import web

        info = {"model_id": "m", "kv_block_size": BLOCK, "instance_id": self.name}
        return web.json_response(info)

    async def _sources(self, request: Any) -> Any:
        from aiohttp import web

        source = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "encoding": "msgpack",
            "schema_version": 1,
            "endpoint": self.publisher.endpoint,
            "replay_endpoint": self.publisher.replay_endpoint,
            "topic": "",
            "hwm": 1000,
            "buffer_steps": 100,
        }
        return web.json_response({"0": source})


class RelayedEngine(Engine):
    """An engine whose stream a router reads from `kvpool events --engine`; the pool is the test."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._own = self.publisher
        self._stream = EngineStream(POOL, "shared", "here")
        self.publisher = EventPublisher(
            "tcp://127.0.0.1:0", "tcp://127.0.0.1:0", buffer=ReplayBuffer(first=1)
        )
        self.publisher.start()
        self._pool: asyncio.Queue[PoolEvent] = asyncio.Queue()
        self._reader = EventSubscriber(self._own.endpoint, self._own.replay_endpoint)
        relay = publish_engine(self._reader.batches(), self._events(), self._stream, self.publisher)
        self._relay = asyncio.create_task(relay)
        self.pool(PoolEventKind.BACK)

    def send(self, *events: KVEvent) -> None:
        self._own.publish(list(events), time.time())

    def lose(self, *events: KVEvent) -> None:
        """Events that nobody gets, and no replay has."""
        for batch in batches(events):
            self._own.buffer.add(encode_batch(EventBatch(time.time(), batch, 0)))
        self._own.buffer._kept.clear()

    def pool(self, kind: PoolEventKind, hashes: Sequence[int] = ()) -> None:
        """A server on the engine's host has these blocks now, or has them no more."""
        digests = tuple(hash.to_bytes(32, "big") for hash in hashes)
        at = EventPosition(1, 1)
        self._pool.put_nowait(PoolEvent(kind, at, "server", "here", POOL, 0, "dram", digests))

    async def _events(self) -> AsyncIterator[PoolEvent]:
        while True:
            yield await self._pool.get()

    def close(self) -> None:
        self._relay.cancel()
        self._reader.close()
        self._own.close()
        self.publisher.close()


class Router:
    """vllm-router, `kv_aware`, in front of engines `a` and `b`."""

    def __init__(self, mode: str, url: str, session: Any, a: Engine, b: Engine, log: Path) -> None:
        self.mode = mode
        self._url = url
        self._session = session
        self.a, self.b = a, b
        self._log = log

    async def ask(self, tokens: Sequence[int]) -> str:
        """The name of the engine that gets this prompt."""
        body = {"model": "m", "prompt": list(tokens), "max_tokens": 1}
        async with self._session.post(f"{self._url}/v1/completions", json=body) as answer:
            text: str = (await answer.json())["choices"][0]["text"]
            return text

    async def credit(self, where: Residency, **fields: Any) -> tuple[float, float]:
        """What eight blocks that `a` has there are worth, in blocks on its device: bounds of it.

        `b` has so many on its device that the router prefers it when they are worth less.
        """
        low, high = 0, 8
        while low + 1 < high:
            middle = (low + high) // 2
            if await self._prefers_a(where, middle, **fields):
                low = middle
            else:
                high = middle
        if low == 0 and not await self._prefers_a(where, 0.5, **fields):
            return 0.0, 0.5 / 8
        return low / 8, high / 8

    async def _prefers_a(self, where: Residency, blocks: float, **fields: Any) -> bool:
        length = 8 if blocks >= 1 else 16  # 0.5: all 16 of `a` against one of `b`
        prompt = Prompt(16)
        for first in range(0, length, 8):
            self.a.send(prompt.stored(first, first + 8, where, **fields))
        self.b.send(prompt.stored(0, max(1, int(blocks)), GPU))
        await asyncio.sleep(SETTLE_S)
        return await self.ask(prompt.tokens) == "a"

    async def remember(self) -> Prompt:
        """A prompt of which `a` has four blocks on its device, and `b` two."""
        prompt = Prompt(5)
        self.a.send(prompt.stored(0, 4, GPU))
        self.b.send(prompt.stored(0, 2, GPU))
        await asyncio.sleep(SETTLE_S)
        return prompt

    async def knows_a(self, prompt: Prompt) -> bool:
        """Whether the router still knows what `a` has of such a prompt."""
        return [await self.ask(prompt.tokens) for _ in range(3)] == ["a"] * 3

    def log(self) -> str:
        return self._log.read_text()


def _streams(engines: Sequence[Engine]) -> list[str]:
    """The options that name these engines' KV events."""
    options = ["--kv-event-block-size", str(BLOCK), "--kv-event-model", "m"]
    for engine in engines:
        stream = engine.publisher
        options += ["--kv-event-source", f"{engine.url}={stream.endpoint}"]
        options += ["--kv-event-replay-source", f"{engine.url}={stream.replay_endpoint}"]
    return options


@asynccontextmanager
async def _started(command: list[str], port: int, log: Path) -> AsyncIterator[tuple[str, Any]]:
    """A router that is healthy: its URL, and a client's session."""
    import aiohttp

    async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(_process(command, log))
        session = await stack.enter_async_context(aiohttp.ClientSession())
        url = f"http://127.0.0.1:{port}"
        await _until_healthy(session, url, log)
        yield url, session


@asynccontextmanager
async def vllm_router_by(
    policy: str, engines: Sequence[Engine], log: Path, *, streams: bool
) -> AsyncIterator[tuple[str, Any]]:
    """vllm-router with any policy: its URL, and a client's session. With `streams` its command line
    names those of the engines."""
    port = free_port()
    command = [str(_BIN / "vllm-router"), "--host", "127.0.0.1", "--port", str(port)]
    command += ["--prometheus-port", str(free_port()), "--policy", policy]
    command += ["--worker-startup-check-interval", "1", "--worker-urls"]
    command += [engine.url for engine in engines]
    if streams:
        command += _streams(engines)
    async with _started(command, port, log) as (url, session):
        await asyncio.sleep(1.5)  # it is healthy before it listens
        yield url, session


@asynccontextmanager
async def vllm_router(
    mode: str, directory: Path, kind: type[Engine] = Engine
) -> AsyncIterator[Router]:
    """`static`: its command line names the streams; `discovered`: the engines do."""
    a, b = kind("a"), Engine("b")
    log = directory / "vllm-router.log"
    async with contextlib.AsyncExitStack() as stack:
        for engine in (a, b):
            stack.callback(engine.close)
            await stack.enter_async_context(engine.serve())
        running = vllm_router_by("kv_aware", (a, b), log, streams=mode == "static")
        url, session = await stack.enter_async_context(running)
        yield Router(mode, url, session, a, b, log)


class Indexer:
    """Dynamo's indexer, which listens to one engine; it says what it believes."""

    def __init__(self, url: str, session: Any, log: Path) -> None:
        self._url = url
        self._session = session
        self._log = log

    async def register(self, number: int, engine: Engine) -> None:
        body = {
            "instance_id": number,
            "endpoint": engine.publisher.endpoint,
            "replay_endpoint": engine.publisher.replay_endpoint,
            "model_name": "m",
            "block_size": BLOCK,
            "dp_rank": 0,
        }
        async with self._session.post(f"{self._url}/register", json=body) as answer:
            assert answer.status == 201, await answer.text()

    async def unregister(self, number: int) -> None:
        body = {"instance_id": number, "model_name": "m"}
        async with self._session.post(f"{self._url}/unregister", json=body) as answer:
            assert answer.status == 200, await answer.text()

    async def blocks(self, number: int, prompt: Prompt) -> dict[str, int]:
        """Blocks of a prompt's prefix by where this engine has them: gpu, cpu, disk."""
        body = {"token_ids": prompt.tokens, "model_name": "m"}
        async with self._session.post(f"{self._url}/query", json=body) as answer:
            found = (await answer.json())["instances"].get(str(number), {})
        return {tier: found.get(tier, 0) // BLOCK for tier in ("gpu", "cpu", "disk")}


@asynccontextmanager
async def dynamo_indexer(directory: Path) -> AsyncIterator[Indexer]:
    port, log = free_port(), directory / "dynamo.log"
    command = [sys.executable, "-m", "dynamo.indexer", "--port", str(port), "--threads", "1"]
    async with _started(command, port, log) as (url, session):
        yield Indexer(url, session, log)


@contextlib.contextmanager
def _process(command: list[str], log: Path) -> Any:
    with log.open("w") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "RUST_LOG": "info"},
        )
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


async def _until_healthy(session: Any, url: str, log: Path) -> None:
    import aiohttp

    until = time.monotonic() + _START_S
    while time.monotonic() < until:
        with contextlib.suppress(aiohttp.ClientError):
            async with session.get(f"{url}/health") as answer:
                if answer.status == 200:
                    return
        await asyncio.sleep(0.1)
    raise AssertionError(f"{url} did not start: see {log}")
