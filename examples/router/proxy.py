"""Requests in, answers out, byte for byte; the engine in between is the router's choice.

An engine that is lost before the first byte of its answer is replaced by another one. After it the
client's connection is broken: half an answer cannot be taken back.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
from typing import Final

import aiohttp
import msgspec
from aiohttp import web
from multidict import CIMultiDict

from examples.router.core import Decision, Engine, Prompt, Router
from examples.router.fleet import Fleet
from examples.router.prompts import ALGORITHM, Rendered, block_hashes
from kvpool import KvpoolError, Pool, admin
from kvpool.kv_events import short_hash
from kvpool_agents.admission_gate import WAITED, AdmissionGate, LineFull, Ticket
from kvpool_agents.client_requests import PATHS, from_body, from_headers

BODY_BYTES_MAX: Final = 32 << 20
#: A larger body is passed on without being looked at: it would hold up all others.
READ_BYTES_MAX: Final = 4 << 20
REQUESTS_MAX: Final = 1024
_BODY_S: Final = 30.0
_CONNECT_S: Final = 3.0
_RENDER_S: Final = 2.0
_SCORE_S: Final = 0.2
#: Masters that did not answer are asked again after so long.
_AGAIN_S: Final = 5.0
#: An engine that sends nothing, and a client that takes nothing, for so long is given up.
_SILENCE_S: Final = 300.0
_CLIENT_S: Final = 60.0
_SPREAD_S: Final = 10.0
_SPREADS_MAX: Final = 4
_ROOM_S: Final = 2.0
#: Of a connection, not of the message: these are not passed on.
_HOP: Final = frozenset(
    "connection content-length expect host keep-alive proxy-connection te trailer "  # noqa: SIM905
    "transfer-encoding upgrade".split()
)
_ADDED: Final = ("Accept", "Accept-Encoding", "Content-Type", "User-Agent")


class EngineLost(Exception):
    """Before the first byte of an answer."""


class _Choices(msgspec.Struct):
    n: int = 1


_RENDERED: Final = msgspec.json.Decoder(Rendered | list[Rendered])


class Proxy:
    """The HTTP side of a router."""

    def __init__(
        self,
        router: Router,
        fleet: Fleet,
        session: aiohttp.ClientSession,
        pool: Pool | None,
        *,
        admit: bool = False,
    ) -> None:
        """With `admit` as many sessions are served as the pool has room for."""
        self._router, self._fleet, self._session, self._pool = router, fleet, session, pool
        self._requests, self._ask_masters_at = 0, 0.0
        self._spreads: set[asyncio.Task[None]] = set()
        self.gate = AdmissionGate(self._ask_room) if admit and pool is not None else None
        self._asking: asyncio.Task[None] | None = None

    def app(self) -> web.Application:
        app = web.Application(client_max_size=BODY_BYTES_MAX)
        app.add_routes([web.post(path, self._answer) for path in sorted(PATHS)])
        gets = {"/v1/models": self._answer, "/health": self._health, "/decisions": self._decisions}
        app.add_routes([web.get(path, handler) for path, handler in gets.items()])
        return app

    async def close(self) -> None:
        tasks = [*self._spreads, *([self._asking] if self._asking is not None else ())]
        for task in tasks:
            task.cancel()
        if self.gate is not None:
            self.gate.close()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _health(self, request: web.Request) -> web.Response:
        alive = [engine.url for engine in self._router.alive()]
        sessions = {} if self.gate is None else {"sessions": self.gate.shown()}
        return web.json_response({"engines": alive, **sessions}, status=200 if alive else 503)

    async def _decisions(self, request: web.Request) -> web.Response:
        """The last ones, the newest first."""
        return web.json_response(list(self._router.decisions)[::-1])

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        if self._requests >= REQUESTS_MAX:
            return _refused(503, f"{REQUESTS_MAX} requests are here already")
        self._requests += 1
        ticket: Ticket | None = None
        prompt = Prompt()
        try:
            async with asyncio.timeout(_BODY_S):
                body = await request.read()
            prompt = await self._prompt(request, body)
            if self.gate is not None and prompt.session:
                try:
                    program = prompt.parent or prompt.session
                    ticket = await self.gate.enter(_tenant(request), program)
                except (TimeoutError, LineFull):
                    return _refused(503, self.gate.why())
                except Exception:  # of the gate itself: no prompt is to fail for that
                    logging.getLogger(__name__).exception("the admission gate fails: prompts pass")
                if ticket is not None and ticket.waited_s >= _AGAIN_S:  # its blocks may be others
                    prompt = await self._prompt(request, body)
            failed: list[str] = []
            while (decision := self._router.decide(prompt, failed)) is not None:
                self._spread(prompt, decision)
                try:
                    response = await self._pass(request, body, decision, ticket)
                except EngineLost:
                    decision.engine.lost = True  # until it answers a question for its metrics
                    failed.append(decision.engine.url)
                else:
                    self._router.ended(prompt)
                    return response
            return _refused(503, f"no engine answers; {len(failed)} were tried")
        except TimeoutError:
            return _refused(408, "the request did not come in time")
        finally:
            self._requests -= 1
            if ticket is not None:
                ticket.ended(session_ends=prompt.ends and not prompt.parent)

    async def _pass(
        self, request: web.Request, body: bytes, decision: Decision, ticket: Ticket | None
    ) -> web.StreamResponse:
        """The engine's answer, as it comes. Raises EngineLost before its first byte."""
        engine, pending_s = decision.engine, decision.work_s
        engine.answering += 1
        engine.pending_s += pending_s
        response: web.StreamResponse | None = None
        try:
            async with self._session.request(
                request.method,
                engine.url + request.path_qs,
                data=body,
                headers=_passed_on(request),
                timeout=aiohttp.ClientTimeout(sock_connect=_CONNECT_S, sock_read=_SILENCE_S),
                allow_redirects=False,
                skip_auto_headers=_ADDED,
            ) as answer:
                piece = await answer.content.readany()
                engine.pending_s, pending_s = engine.pending_s - pending_s, 0.0
                response = web.StreamResponse(status=answer.status, reason=answer.reason)
                response.headers.extend(_passed_on(answer))
                if ticket is not None:
                    ticket.began()
                    response.headers[WAITED] = f"{ticket.waited_s:.1f}s"
                response.headers["x-router-engine"] = engine.url
                response.headers["x-router-reason"] = decision.reason
                response.content_length = answer.content_length
                async with asyncio.timeout(_CLIENT_S):
                    await response.prepare(request)
                while piece:
                    async with asyncio.timeout(_CLIENT_S):
                        await response.write(piece)
                    piece = await answer.content.readany()
                await response.write_eof()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            if response is None:
                raise EngineLost from error
            # Cut short where it is, so that no client takes it for the whole answer.
            if request.transport is not None:
                request.transport.abort()
        finally:
            engine.answering -= 1
            engine.pending_s = max(0.0, engine.pending_s - pending_s)
        return response

    async def _prompt(self, request: web.Request, body: bytes) -> Prompt:
        """What is known of a request: who speaks, and for `precise` its blocks."""
        spoken = from_headers([(name.lower(), value) for name, value in request.raw_headers])
        if not 0 < len(body) <= READ_BYTES_MAX:
            return Prompt(spoken.session, spoken.parent, spoken.ends)
        named = from_body(request.path, body, has_session=bool(spoken.session))
        prompt = Prompt(named.session or spoken.session, spoken.parent, spoken.ends)
        with contextlib.suppress(msgspec.DecodeError, ValueError, RecursionError):
            prompt = prompt._replace(choices=msgspec.json.decode(body, type=_Choices).n)
        alive = self._router.alive()
        if self._router.policy != "precise" or not alive:
            return prompt
        engine = min(alive, key=lambda one: one.load)
        sharing = self._fleet.sharing.get(engine.url)
        if sharing is None or sharing.algorithm != ALGORITHM or self._pool is None:
            return prompt
        if (rendered := await self._render(request, body, engine)) is None or rendered.features:
            return prompt
        # In a thread: a long prompt has thousands of blocks.
        tokens, size, salt = rendered.token_ids, sharing.block_size, rendered.cache_salt or ""
        chain = await asyncio.to_thread(block_hashes, tokens, size, salt)
        prompt = prompt._replace(namespace=sharing.namespace, chain=chain, block_size=size)
        prompt = prompt._replace(tokens=len(tokens), hashes=[short_hash(one) for one in chain])
        hosts, now = sorted({one.host for one in alive}), asyncio.get_running_loop().time()
        if not chain or now < self._ask_masters_at:
            return prompt
        try:
            scores = await self._pool.score(sharing.namespace, chain, hosts, timeout=_SCORE_S)
            prompt = prompt._replace(scores={score.host: score for score in scores})
        except KvpoolError:  # the engines' own blocks count, and the next prompts wait for nobody
            self._ask_masters_at = now + _AGAIN_S
        return prompt

    async def _render(self, request: web.Request, body: bytes, engine: Engine) -> Rendered | None:
        """Its tokens, by an engine with --enable-scale-out, which tells them of every API."""
        try:
            headers = _passed_on(request)
            headers["Accept-Encoding"] = "identity"
            url, timeout = f"{engine.url}{request.path}/render", aiohttp.ClientTimeout(_RENDER_S)
            async with self._session.post(url, data=body, headers=headers, timeout=timeout) as one:
                rendered = _RENDERED.decode(await one.read())
        except (aiohttp.ClientError, TimeoutError, OSError, msgspec.DecodeError, ValueError):
            return None
        return rendered if isinstance(rendered, Rendered) else rendered[0] if rendered else None

    def _ask_room(self) -> None:
        """Have the pool asked, in the background, how many sessions fit."""
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._take_room())

    async def _take_room(self) -> None:
        if self._pool is not None and self.gate is not None:
            with contextlib.suppress(KvpoolError):
                room = await admin(self._pool).room(timeout=_ROOM_S)
                self.gate.measured(room.share, len(self._router.alive()))

    def _spread(self, prompt: Prompt, decision: Decision) -> None:
        """Have servers fetch a prompt for its fan-out, in the background."""
        hosts = self._router.spread_to(prompt, decision)
        if hosts and len(self._spreads) < _SPREADS_MAX:
            task = asyncio.create_task(self._bring(prompt, hosts))
            self._spreads.add(task)
            task.add_done_callback(self._spreads.discard)

    async def _bring(self, prompt: Prompt, to: list[str]) -> None:
        pool, namespace = self._pool, prompt.namespace
        if pool is not None and namespace is not None:
            with contextlib.suppress(KvpoolError):
                await admin(pool).spread(namespace, prompt.chain, to=to, timeout=_SPREAD_S)


def _passed_on(message: web.Request | aiohttp.ClientResponse) -> CIMultiDict[str]:
    return CIMultiDict([(k, v) for k, v in message.headers.items() if k.lower() not in _HOP])


def _tenant(request: web.Request) -> str:
    """Whose request it is: clients with one key are one tenant. The key itself is not kept."""
    key = request.headers.get("Authorization") or request.headers.get("x-api-key") or ""
    return hashlib.blake2b(key.encode(errors="surrogateescape"), digest_size=8).hexdigest()


def _refused(status: int, text: str) -> web.Response:
    error = {"error": {"message": text, "type": "router_error", "code": status}}
    return web.json_response(error, status=status, headers={"Retry-After": "1"})
