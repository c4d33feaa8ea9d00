"""A small HTTP server for probes and scrapers: metrics, health, readiness.

One request per connection, GET or HEAD, a bounded head, a deadline. It runs on the loop that it
reports on, so an answer shows that the loop is not blocked. It only reads state. (design: metrics)
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Final, NamedTuple

from kvpool import logs
from kvpool.config import check_bind
from kvpool.errors import ConfigError

#: Of a request's line and headers together.
_HEAD_MAX: Final = 8 << 10
#: From the connection to the last byte of the answer.
_REQUEST_S: Final = 5.0
#: Connections at the same time; more are closed without an answer.
_CONNECTIONS_MAX: Final = 32

log = logs.get("kvpool.http")


class Page(NamedTuple):
    """One answer."""

    status: HTTPStatus
    body: bytes
    content_type: str = "text/plain; charset=utf-8"


@asynccontextmanager
async def pages(
    pages: Mapping[str, Callable[[], Page]], address: str, insecure: bool = False
) -> AsyncIterator[Pages | None]:
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

    def __init__(self, pages: Mapping[str, Callable[[], Page]]) -> None:
        self._pages = pages
        self._server: asyncio.Server | None = None
        self._requests: set[asyncio.Task[None]] = set()

    @property
    def address(self) -> str:
        """`host:port`, once started."""
        if self._server is None:
            return ""
        host, port = self._server.sockets[0].getsockname()[:2]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    async def start(self, address: str, *, insecure: bool = False) -> None:
        """Listen at `host:port`. Raises ConfigError when it is taken or not loopback."""
        check_bind(address, insecure)
        host, _, port = address.rpartition(":")
        try:
            self._server = await asyncio.start_server(
                self._connected, host.strip("[]"), int(port), limit=_HEAD_MAX
            )
        except OSError as error:
            raise ConfigError(
                f"cannot serve HTTP at {address}: {error.strerror or error}"
            ) from None

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
            writer.transport.abort()
            return
        request = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._requests.add(request)
        request.add_done_callback(self._requests.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_REQUEST_S):
                head = await reader.readuntil(b"\r\n\r\n")
                writer.write(self._answer(head))
                await writer.drain()
                writer.close()
                await writer.wait_closed()
        except (OSError, TimeoutError, EOFError, asyncio.LimitOverrunError):
            pass  # not a request, or too slow: no answer
        finally:
            writer.transport.abort()

    def _answer(self, head: bytes) -> bytes:
        method, _, rest = head.partition(b"\r\n")[0].decode("latin-1").partition(" ")
        target, _, version = rest.rpartition(" ")
        if not version.startswith("HTTP/1."):
            page = _sentence(HTTPStatus.BAD_REQUEST, "expected an HTTP/1 request")
        elif method not in ("GET", "HEAD"):
            page = _sentence(HTTPStatus.METHOD_NOT_ALLOWED, "GET and HEAD only")
        else:
            page = self._page(target.partition("?")[0])
        lines = (
            f"HTTP/1.1 {page.status.value} {page.status.phrase}",
            f"Content-Type: {page.content_type}",
            f"Content-Length: {len(page.body)}",
            "Cache-Control: no-store",
            "Connection: close",
            "\r\n",
        )
        return "\r\n".join(lines).encode() + (b"" if method == "HEAD" else page.body)

    def _page(self, path: str) -> Page:
        make = self._pages.get(path)
        if make is None:
            available = ", ".join(sorted(self._pages))
            return _sentence(HTTPStatus.NOT_FOUND, f"not found; available pages: {available}")
        try:
            return make()
        except Exception:
            log.exception("a page could not be made", path=path)
            return _sentence(HTTPStatus.INTERNAL_SERVER_ERROR, "see the log")


def _sentence(status: HTTPStatus, text: str) -> Page:
    return Page(status, f"{text}\n".encode())
