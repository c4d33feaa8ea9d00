"""What the router knows of its engines: their metrics, their KV events, and their hosts.

Each engine is asked for its metrics once a second; while it answers, its KV events are followed. An
engine that does not answer is lost, with all that was known of its device.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import struct
import urllib.parse
from collections.abc import AsyncIterator
from typing import Any, Final, NamedTuple

import aiohttp
import zmq
import zmq.asyncio

from examples.router.core import NOWHERE, DeviceBlocks, Engine, Router
from kvpool import KvpoolError, Namespace, Pool, admin
from kvpool.errors import BadMessage
from kvpool.kv_events import BATCH_BYTES_MAX, decode_batch

log = logging.getLogger("kvpool.router")

_POLL_S: Final = 1.0
_ANSWER_S: Final = 2.0
_PAGE_BYTES_MAX: Final = 16 << 20
ENGINES_MAX: Final = 256
#: One series of an engine's metrics: name, labels, value.
_SERIES: Final = re.compile(r"^vllm:(\w+)(?:\{([^\n]*)\})? (\S+)$", re.M)
_LABEL: Final = re.compile(r'(\w+)="([^"\\]*)"')
_NUMBER: Final = struct.Struct(">Q")
_END: Final = struct.pack(">q", -1)


class Address(NamedTuple):
    """An engine, its streams of KV events, and its host, if it is known."""

    url: str
    events: str = ""
    replay: str = ""
    host: str = NOWHERE


class Sharing(NamedTuple):
    """How an engine names its blocks."""

    namespace: Namespace
    block_size: int
    algorithm: str


class Fleet:
    """The engines of a router, kept as they are now."""

    def __init__(self, router: Router, session: aiohttp.ClientSession, pool: Pool | None) -> None:
        self._router, self._session, self._pool = router, session, pool
        self._zmq = zmq.asyncio.Context()
        self._watchers: dict[str, asyncio.Task[None]] = {}
        self.sharing: dict[str, Sharing] = {}  # by the engine's URL

    def set(self, addresses: list[Address]) -> None:
        """These are the engines from now on; those that stay keep what is known of them."""
        wanted = {address.url: address for address in addresses[:ENGINES_MAX]}
        for url in self._watchers.keys() - wanted.keys():
            self._watchers.pop(url).cancel()
            del self._router.engines[url]
        for url in wanted.keys() - self._watchers.keys():
            self._router.engines[url] = engine = Engine(url, wanted[url].host, lost=True)
            self._watchers[url] = asyncio.create_task(self._watch(engine, wanted[url]))

    async def close(self) -> None:
        for task in self._watchers.values():
            task.cancel()
        await asyncio.gather(*self._watchers.values(), return_exceptions=True)
        self._zmq.destroy(linger=0)

    async def _watch(self, engine: Engine, address: Address) -> None:
        listener: asyncio.Task[None] | None = None
        lost = True
        try:
            while True:
                try:
                    engine.lost = not await self._poll(engine)
                except Exception:  # whatever its page says, it is looked at again
                    log.exception("the page of engine %s", engine.url)
                    engine.lost = True
                if engine.lost != lost:
                    log.warning("engine %s is %s", engine.url, "here" if lost else "lost")
                lost = engine.lost
                if listener is not None and (engine.lost or listener.done()):
                    listener.cancel()
                    listener = None
                    engine.blocks = DeviceBlocks()
                if listener is None and address.events and not engine.lost:
                    listener = asyncio.create_task(self._listen(engine, address))
                await asyncio.sleep(_POLL_S)
        finally:
            if listener is not None:
                listener.cancel()

    async def _poll(self, engine: Engine) -> bool:
        """Read an engine's metrics. False when it does not answer."""
        page = b""
        try:
            timeout = aiohttp.ClientTimeout(total=_ANSWER_S)
            async with self._session.get(f"{engine.url}/metrics", timeout=timeout) as answer:
                while (piece := await answer.content.readany()) and len(page) < _PAGE_BYTES_MAX:
                    page += piece
        except (aiohttp.ClientError, TimeoutError, OSError):
            return False
        values, fields = dict[str, float](), dict[str, str]()
        for name, labels, text in _SERIES.findall(page.decode(errors="replace")):
            if name == "kvpool_name_info" and text in ("1", "1.0"):
                found = dict(_LABEL.findall(labels))
                fields[found.get("field", "")] = found.get("value", "")
            with contextlib.suppress(ValueError):
                values[name] = values.get(name, 0.0) + float(text)
        inside = ("num_requests_running", "num_requests_waiting")
        engine.reported = int(sum(values.get(name, 0.0) for name in inside))
        engine.prefill_rate = values.get("kvpool_prefill_tokens_rate", 0.0)
        engine.load_rate = values.get("kvpool_load_bytes_rate", 0.0)
        with contextlib.suppress(KvpoolError, ValueError):
            await self._place(engine, fields)
        return True

    async def _place(self, engine: Engine, fields: dict[str, str]) -> None:
        """The name under which it shares; its host is that of a block server at its address."""
        known, name = self.sharing.get(engine.url), fields.get("namespace")
        if self._pool is None or not name:
            return
        if known is None or known.namespace.name != name:
            size, algorithm = fields.get("block", "").split("+")[0], fields.get("hash", "")
            for namespace, _ in await admin(self._pool).namespaces(timeout=_ANSWER_S):
                if namespace.name == name:
                    hashed = algorithm.partition("/")[0]
                    self.sharing[engine.url] = Sharing(namespace, int(size), hashed)
        if engine.host == NOWHERE:
            at = urllib.parse.urlsplit(engine.url).hostname
            for member in await self._pool.members(timeout=_ANSWER_S):
                if at in {urllib.parse.urlsplit(one).hostname for one in member.addresses}:
                    engine.host = member.host

    async def _listen(self, engine: Engine, address: Address) -> None:
        """Follow its KV events, beginning with all that it still has of them. It ends at a gap that
        cannot be filled: then it begins anew."""
        following, replayed = 0, -1
        with contextlib.closing(self._socket(zmq.SUB, address.events)) as socket:
            socket.subscribe(b"")
            async for number, batch in self._replayed(address, 0):
                engine.blocks.apply(decode_batch(batch).events)
                following, replayed = number + 1, number
            while True:
                _, packed, batch = await socket.recv_multipart()
                (number,) = _NUMBER.unpack(packed)
                if number <= replayed:
                    continue
                if following and number > following:
                    async for missed, kept in self._replayed(address, following):
                        if missed == following < number:
                            engine.blocks.apply(decode_batch(kept).events)
                            following += 1
                if following and number != following:
                    raise BadMessage(f"event batch {number}, expected {following}")
                engine.blocks.apply(decode_batch(batch).events)
                following = number + 1

    async def _replayed(self, address: Address, first: int) -> AsyncIterator[tuple[int, bytes]]:
        """Batches that the engine has kept, from `first` on; none where it does not answer."""
        if not address.replay:
            return
        with contextlib.closing(self._socket(zmq.DEALER, address.replay)) as socket:
            await socket.send_multipart([b"", _NUMBER.pack(first)])
            while await socket.poll(int(_ANSWER_S * 1000)):
                _, _, number, batch = await socket.recv_multipart()
                if number == _END:
                    return
                yield _NUMBER.unpack(number)[0], batch

    def _socket(self, kind: int, endpoint: str) -> Any:
        socket = self._zmq.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, BATCH_BYTES_MAX)
        socket.connect(endpoint)
        return socket
