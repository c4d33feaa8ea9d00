"""A small HTTP server for probes, scrapers and browsers: metrics, health, readiness, a page.

One request per connection, GET or HEAD, a bounded head, a deadline. It runs on the loop that it
reports on, so an answer shows that the loop is not blocked. It only reads state.

What browsers show is guarded in two more ways (`PageView`): a site that made its own name point to
this address gets nothing, and more requests than a few people make are refused at once.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final, NamedTuple, TypeAlias
from urllib.parse import parse_qsl

from kvpool import logs
from kvpool.addresses import is_loopback, join, listening, network_of, split
from kvpool.config import check_bind
from kvpool.errors import ConfigError, UsageError
from kvpool.shares import Shares

#: Of a request's line and headers together.
_HEAD_MAX: Final = 8 << 10
#: From the connection to the end of its request's head. Probes and scrapers need milliseconds.
_HEAD_S: Final = 1.0
#: From there to the last byte of the answer.
_ANSWER_S: Final = 5.0
#: Connections at the same time. For one more the oldest of the peer with most of them ends, so
#: that nobody keeps a probe out: neither others, nor what is idle here.
_CONNECTIONS_MAX: Final = 128
#: What the kernel keeps until they are accepted.
_BACKLOG: Final = 256

#: Views in so many seconds; half of them for one peer that asks alone (`Shares`).
_VIEWS_S: Final = 2.0
_VIEWS_MAX: Final = 100

log = logs.get("kvpool.http")


class Page(NamedTuple):
    """One answer."""

    status: HTTPStatus
    body: bytes
    content_type: str = "text/plain; charset=utf-8"
    #: Further lines of the head, `Name: value`.
    headers: tuple[str, ...] = ()


class PageView(NamedTuple):
    """A page for browsers, made from the fields of the query, and of whether who asks is on this
    host."""

    answer: Callable[[Mapping[str, str], bool], Page]


@dataclass(frozen=True, slots=True)
class PageInSteps:
    """A page that is long: others have their turn of the loop between its pieces."""

    steps: Callable[[], Iterator[bytes]]
    content_type: str

    def __call__(self) -> Page:
        """The whole page at once."""
        return Page(HTTPStatus.OK, b"".join(self.steps()), self.content_type)


#: What is served, by path.
Routes: TypeAlias = Mapping[str, Callable[[], Page] | PageView | PageInSteps]


@asynccontextmanager
async def pages(pages: Routes, address: str, insecure: bool = False) -> AsyncIterator[Pages | None]:
    """Serve them at `address`, by path, as long as the `with` lasts; nowhere if it is empty."""
    if not address:
        yield None
        return
    serving = Pages(pages)
    await serving.start(address, insecure=insecure)
    try:
        yield serving
    finally:
        await serving.close()


class Pages:
    """Serves `pages` by path. `start`, then `close`."""

    def __init__(self, pages: Routes) -> None:
        self._pages = pages
        self._views = Shares(_VIEWS_MAX)  # that were made since the last count began, by peer
        self._counted_from = 0.0
        self._server: asyncio.Server | None = None
        #: Those that are open, oldest first, and whose they are.
        self._requests: dict[asyncio.Task[None], str] = {}

    @property
    def address(self) -> str:
        """`host:port`, once started."""
        if self._server is None:
            return ""
        return join(*self._server.sockets[0].getsockname()[:2])

    async def start(self, address: str, *, insecure: bool = False) -> None:
        """Listen at `host:port`. Raises ConfigError when it is taken or not loopback."""
        check_bind(address, insecure)
        where = split(address)
        assert where is not None
        try:
            self._server = await asyncio.start_server(
                self._connected, limit=_HEAD_MAX, **listening(*where[1:], _BACKLOG)
            )
        except (OSError, UnicodeError) as error:
            why = getattr(error, "strerror", "") or error
            raise ConfigError(f"cannot serve HTTP at {address}: {why}") from None

    async def close(self) -> None:
        """Stop, and end the requests that are being answered. Idempotent."""
        server, self._server = self._server, None
        if server is None:
            return
        server.close()
        for request in self._requests:
            request.cancel()
        if self._requests:
            await asyncio.wait(self._requests)

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._requests) >= _CONNECTIONS_MAX:
            self._end_oldest()
        peer = writer.get_extra_info("peername")
        request = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._requests[request] = network_of(str(peer[0])) if peer else ""
        request.add_done_callback(lambda done: self._requests.pop(done, None))
        # One that is cancelled before its first step closes nothing itself.
        request.add_done_callback(lambda _: writer.transport.abort())

    def _end_oldest(self) -> None:
        ((peer, _),) = Counter(self._requests.values()).most_common(1)
        oldest = next(one for one, whose in self._requests.items() if whose == peer)
        del self._requests[oldest]
        oldest.cancel()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_HEAD_S):
                head = await reader.readuntil(b"\r\n\r\n")
            async with asyncio.timeout(_ANSWER_S):
                ends = [writer.get_extra_info(one) for one in ("sockname", "peername")]
                if None in ends:  # it has gone already
                    return
                answer = await self._answer(head, *[address for address, *_ in ends])
                if writer.is_closing():  # or by now: uvloop raises what is no OSError
                    return
                writer.write(answer)
                await writer.drain()
                writer.close()
                await writer.wait_closed()
        except (OSError, TimeoutError, EOFError, asyncio.LimitOverrunError):
            pass  # not a request, or too slow: no answer

    async def _answer(self, head: bytes, local: str, peer: str) -> bytes:
        line, *fields = head.decode("latin-1").split("\r\n")
        method, _, rest = line.partition(" ")
        target, _, version = rest.rpartition(" ")
        if not version.startswith("HTTP/1."):
            page = _sentence(HTTPStatus.BAD_REQUEST, "expected an HTTP/1 request")
        elif method not in ("GET", "HEAD"):
            page = _sentence(HTTPStatus.METHOD_NOT_ALLOWED, "GET and HEAD only")
        else:
            page = await self._whole_page(target, _host_of(fields), local, peer)
        lines = (
            f"HTTP/1.1 {page.status.value} {page.status.phrase}",
            f"Content-Type: {page.content_type}",
            f"Content-Length: {len(page.body)}",
            "Cache-Control: no-store",
            "Connection: close",
            *page.headers,
            "\r\n",
        )
        return "\r\n".join(lines).encode() + (b"" if method == "HEAD" else page.body)

    async def _whole_page(self, target: str, host: str, local: str, peer: str = "") -> Page:
        path = target.partition("?")[0]
        make = self._pages.get(path)
        if not isinstance(make, PageInSteps):
            return self._page(target, host, local, peer)
        pieces = []
        try:
            for piece in make.steps():
                pieces.append(piece)
                await asyncio.sleep(0)
        except Exception:
            return _failed(path)
        return Page(HTTPStatus.OK, b"".join(pieces), make.content_type)

    def _page(self, target: str, host: str, local: str, peer: str = "") -> Page:
        path, _, query = target.partition("?")
        make = self._pages.get(path)
        if make is None:
            available = ", ".join(sorted(self._pages))
            return _sentence(HTTPStatus.NOT_FOUND, f"not found; available pages: {available}")
        try:
            if not isinstance(make, PageView):
                return make()
            if not _may_name(host, local):
                return _sentence(HTTPStatus.FORBIDDEN, "ask for it by address or as localhost")
            if not self._may_view(network_of(peer) or "unknown"):
                return _sentence(HTTPStatus.TOO_MANY_REQUESTS, "too many requests")
            # Both ends of a connection have one address only on one host.
            return make.answer(_fields_of(query), is_loopback(local) or peer == local)
        except UsageError as error:
            return _sentence(HTTPStatus.BAD_REQUEST, str(error))
        except Exception:
            return _failed(path)

    def _may_view(self, peer: str) -> bool:
        """Whether another view may be made for this peer now: nobody takes those of all."""
        now = asyncio.get_running_loop().time()
        if now - self._counted_from >= _VIEWS_S:
            self._views.clear()
            self._counted_from = now
        return self._views.take(peer)


def _failed(path: str) -> Page:
    """The answer where an exception is handled."""
    log.exception("a page could not be made", path=path)
    return _sentence(HTTPStatus.INTERNAL_SERVER_ERROR, "see the log")


def _fields_of(query: str) -> dict[str, str]:
    try:
        return dict(parse_qsl(query, max_num_fields=8))
    except ValueError:
        raise UsageError("too many fields in the query") from None


def _host_of(fields: list[str]) -> str:
    """The Host of a request, without its port."""
    named = [field.partition(":")[2] for field in fields if field[:5].lower() == "host:"]
    host = named[0].strip() if len(named) == 1 else ""
    return host if host.endswith("]") else host.rpartition(":")[0] or host


def _may_name(host: str, local: str) -> bool:
    """Whether this name may be asked for at this address.

    A script of a foreign site may read an answer of this host's loopback if the site's own name
    points there (DNS rebinding). Its requests have that name as their Host.
    """
    return not is_loopback(local) or is_loopback(host.strip("[]"))


def _sentence(status: HTTPStatus, text: str) -> Page:
    return Page(status, f"{text}\n".encode())
