"""Why a block is not on a server any more, in the words of its policy: `/why?key=HEX`, and who
asks there.

For who is on the server's own host, or knows the cluster's secret: the words are about the traffic
of all tenants.
"""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import TYPE_CHECKING, Final

from kvpool.addresses import join, split
from kvpool.errors import ConfigError, UsageError
from kvpool.net.http_server import Page, PageView
from kvpool.types import Cluster

if TYPE_CHECKING:
    from kvpool.server.block_server import BlockServer

#: Of a key, in hex digits.
_KEY_MAX = 64
#: How old a proof may be, and how far two clocks apart. Who has overheard one may ask again so long
#: for the key whose answer he has seen.
_PROOF_S: Final = 60.0
#: Of an answer, which may be anybody's.
_ANSWER_MAX = 4096
_WORDS_MAX = 400


def _proof(cluster: Cluster, key: str, at: str) -> str:
    """What only who has the cluster's secret can say, at this second since 1970, of this key."""
    text = f"kvpool why 1 {cluster.name!r} {key} {at}"
    return hmac.digest(cluster.secret, text.encode(), "sha256").hex()


def _proven(cluster: Cluster, query: Mapping[str, str]) -> bool:
    key, at = query.get("key", ""), query.get("at", "")
    given = query.get("proof", "")
    if not (
        cluster.secret and key.isascii() and at.isascii() and at.isdecimal() and given.isascii()
    ):
        return False
    if cluster.tenant or len(key) > _KEY_MAX or len(at) > 12:
        return False
    fresh = abs(time.time() - int(at)) <= _PROOF_S
    return hmac.compare_digest(given, _proof(cluster, key, at)) and fresh


def why_page(server: BlockServer, cluster: Cluster) -> dict[str, PageView]:
    """For `http.pages`, on the loop that runs the server."""

    def answer(query: Mapping[str, str], near: bool) -> Page:
        if not near and not _proven(cluster, query):
            words = "on this server's own host, or with the cluster's secret and the right time"
            return Page(HTTPStatus.FORBIDDEN, f"{words}\n".encode())
        key = query.get("key", "")[: _KEY_MAX + 1]
        try:
            known = {"key"} <= query.keys() <= {"key", "at", "proof"}
            if not known or not 0 < len(key) <= _KEY_MAX:
                raise ValueError
            digest = bytes.fromhex(key)
        except ValueError:
            raise UsageError("expected a field key, of at most 64 hex digits") from None
        found = [store.extents.policy.inferred().why(digest) for store in server.stack.stores]
        text = next(filter(None, found), "not known: it is here, never was, or left long ago")
        return Page(HTTPStatus.OK, f"{text}\n".encode())

    return {"/why": PageView(answer)}


async def ask_why(
    address: str, digests: Sequence[bytes], within_s: float, cluster: Cluster
) -> list[str]:
    """What the server whose `--http` is this address says of each, in printable characters; or why
    it says nothing. Raises ConfigError for what is no address."""
    if (parts := split(address)) is None or parts[0]:
        raise ConfigError(f"--server-http {address[:80]!r}: expected HOST:PORT")
    until, found = asyncio.get_running_loop().time() + within_s, []
    for digest in digests:
        try:
            async with asyncio.timeout_at(until):
                head, _, body = (await _get(*parts[1:], digest, cluster)).partition("\r\n\r\n")
            text = body if " 200 " in head[:16] else f"not known: {address} says {body or head}"
        except TimeoutError:
            text = f"not known: {address} does not answer"
        except OSError as error:
            text = f"not known: {address}: {error.strerror or error}"
        words = "".join(one if one.isprintable() else " " for one in text.strip())
        found.append(words[:_WORDS_MAX])
    return found


async def _get(host: str, port: int, digest: bytes, cluster: Cluster) -> str:
    key, at = digest.hex(), str(int(time.time()))
    wanted = f"key={key}"
    if cluster.secret and not cluster.tenant:
        wanted += f"&at={at}&proof={_proof(cluster, key, at)}"
    reader, writer = await asyncio.open_connection(host, port)
    try:
        request = f"GET /why?{wanted} HTTP/1.1\r\nHost: {join(host, port)}\r\n"
        writer.write(f"{request}Connection: close\r\n\r\n".encode())
        answer = b""
        while len(answer) < _ANSWER_MAX and (piece := await reader.read(_ANSWER_MAX)):
            answer += piece
        return answer[:_ANSWER_MAX].decode(errors="replace")
    finally:
        writer.close()
