"""Why a block is not on a server any more, in the words of its policy: `/why?key=HEX`, and who
asks there.

For who is on the server's own host: the words are about the traffic of all tenants.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import TYPE_CHECKING

from kvpool.addresses import join, split
from kvpool.errors import ConfigError, UsageError
from kvpool.net.http_server import Page, PageView

if TYPE_CHECKING:
    from kvpool.server.block_server import BlockServer

#: Of a key, in hex digits.
_KEY_MAX = 64
#: Of an answer, which may be anybody's.
_ANSWER_MAX = 4096
_WORDS_MAX = 400


def why_page(server: BlockServer) -> dict[str, PageView]:
    """For `http.pages`, on the loop that runs the server."""

    def answer(query: Mapping[str, str], near: bool) -> Page:
        if not near:
            return Page(HTTPStatus.FORBIDDEN, b"on this server's own host only\n")
        key = query.get("key", "")[: _KEY_MAX + 1]
        try:
            if query.keys() != {"key"} or not 0 < len(key) <= _KEY_MAX:
                raise ValueError
            digest = bytes.fromhex(key)
        except ValueError:
            raise UsageError("expected one field: key, of at most 64 hex digits") from None
        found = [store.policy.inferred().why(digest) for store in server.stack.stores]
        text = next(filter(None, found), "not known: it is here, never was, or left long ago")
        return Page(HTTPStatus.OK, f"{text}\n".encode())

    return {"/why": PageView(answer)}


async def ask_why(address: str, digests: Sequence[bytes], within_s: float) -> list[str]:
    """What the server whose `--http` is this address says of each, in printable characters; or why
    it says nothing. Raises ConfigError for what is no address."""
    if (parts := split(address)) is None or parts[0]:
        raise ConfigError(f"--server-http {address[:80]!r}: expected HOST:PORT")
    until, found = asyncio.get_running_loop().time() + within_s, []
    for digest in digests:
        try:
            async with asyncio.timeout_at(until):
                head, _, body = (await _get(*parts[1:], digest)).partition("\r\n\r\n")
            text = body if " 200 " in head[:16] else f"not known: {address} says {body or head}"
        except TimeoutError:
            text = f"not known: {address} does not answer"
        except OSError as error:
            text = f"not known: {address}: {error.strerror or error}"
        words = "".join(one if one.isprintable() else " " for one in text.strip())
        found.append(words[:_WORDS_MAX])
    return found


async def _get(host: str, port: int, digest: bytes) -> str:
    reader, writer = await asyncio.open_connection(host, port)
    try:
        request = f"GET /why?key={digest.hex()} HTTP/1.1\r\nHost: {join(host, port)}\r\n"
        writer.write(f"{request}Connection: close\r\n\r\n".encode())
        answer = b""
        while len(answer) < _ANSWER_MAX and (piece := await reader.read(_ANSWER_MAX)):
            answer += piece
        return answer[:_ANSWER_MAX].decode(errors="replace")
    finally:
        writer.close()
