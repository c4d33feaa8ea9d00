"""Lookups for a program that has a loop of its own and may not wait, such as an engine's scheduler.

    poller.start("a", [(namespace, chain)])
    ...
    for key, matches in poller.poll():

The program's own thread sends the request and takes the reply; no other thread of Python takes
part, so no lookup waits for the interpreter lock (design: pool-thread). Connections are made in
threads, also while the program does not poll.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Coroutine, Generator, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from kvpool.client.checks import check_session
from kvpool.client.context import own_namespace, own_session
from kvpool.client.location_cache import KnownSpans
from kvpool.client.lookup import match
from kvpool.config import ClientConfig
from kvpool.errors import Closed, MasterLost, Overloaded, PeerError, Unavailable, UsageError
from kvpool.net.polled_links import PolledLinks
from kvpool.net.requests import PENDING_MAX, RECONNECT_AFTER_S, decode_envelope, envelope_id
from kvpool.types import Cluster, Match, Namespace
from kvpool.wire import messages as wire

#: Requests without a reply are looked through so often: to send them again, or to end them.
_TICK_S: Final = 0.005


class PolledMatches(NamedTuple):
    """The end of a lookup: a match for each of its chains, in their order."""

    key: Hashable
    matches: tuple[Match, ...]


class MatchPoller:
    """As `Pool.match`, in two steps: `start` a lookup, `poll` for the answers.

    Every lookup of a program that polls ends, at the latest `attempt_s` and `hedge_s` of the
    configuration after its start, then with matches that stopped for NO_MASTER. Only a page that is
    asked late because nobody had polled for `hedge_s` still has so long for its answer. For one
    thread at a time.
    """

    def __init__(
        self,
        config: ClientConfig,
        cluster: Cluster,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin to connect to the masters. Raises ConfigError for an address that is not valid."""
        self._config = config
        self._clock = clock
        self._tenant = cluster.tenant
        self._links = PolledLinks(config.masters, cluster)
        self._preferred = 0
        self._known = KnownSpans()
        self._next_id = 0
        self._lookups: dict[Hashable, _Lookup] = {}
        self._requests: dict[int, _Request] = {}
        self._ended: list[PolledMatches] = []
        self._ticks = 0.0, 0.0  # when the last two were
        #: By link: since when it has had a request and sent nothing.
        self._unanswered_since: dict[int, float] = {}
        #: A request has been sent, or a reply received: some master was there.
        self.connected = False
        self._pid = os.getpid()
        self._closed = False

    def __len__(self) -> int:
        """Lookups that have not ended."""
        return len(self._lookups)

    def start(
        self,
        key: Hashable,
        chains: Sequence[tuple[Namespace, Sequence[bytes]]],
        session: str = "",
    ) -> None:
        """Look chains up, one or more, under a key that no other running lookup has.

        A prompt has arrived, of that `session` as in `Pool.match`, or of one that nobody names.
        Raises BadKey as `Pool.match` does, UsageError for a key or a number of chains that is not
        valid, Overloaded when too many lookups run already, and Closed.
        """
        self._check_open()
        if session:
            check_session(session)
            session = own_session(self._tenant, session)
        if self._tenant:
            chains = [
                (own_namespace(self._tenant, namespace), chain) for namespace, chain in chains
            ]
        if key in self._lookups or not chains:
            raise UsageError(f"a lookup {key!r} of {len(chains)} chains, while {len(self)} run")
        if len(self._requests) + len(chains) > PENDING_MAX:
            raise Overloaded(f"{len(self._requests)} lookups wait for masters")
        now = self._clock()
        deadline = now + self._config.attempt_s
        self._lookups[key] = lookup = _Lookup(key, [None] * len(chains))
        try:
            for number, (namespace, chain) in enumerate(chains):
                arrived = ("" if number else session) if session else None
                asking = match(_HAND, namespace, chain, deadline, arrived, known=self._known)
                self._go_on(_Chain(lookup, number, asking, deadline), None, now)
        except BaseException:
            self._forget(lookup)
            raise

    @property
    def promising(self) -> bool:
        """A master is connected, or may be in a moment: no attempt has failed since one was."""
        return self._links.promising

    def is_sent(self, key: Hashable) -> bool:
        """A master has been sent everything that this lookup asks now."""
        return all(one.asked for one in self._requests.values() if one.chain.lookup.key == key)

    def poll(self, wait_s: float = 0.0) -> list[PolledMatches]:
        """The lookups that have ended since the last call.

        If none has, wait for a reply, without the interpreter lock, at most `wait_s` and at most
        5 ms: call it again.
        """
        self._check_open()
        if self._requests:
            self._tick()
            # No event tells that a link is connected, or that a deadline has come.
            self._take(0.0 if self._ended else min(wait_s, _TICK_S))
        ended, self._ended = self._ended, []
        return ended

    def close(self) -> None:
        """Idempotent. Lookups that run are forgotten."""
        if not self._closed and os.getpid() == self._pid:
            self._closed = True
            for lookup in list(self._lookups.values()):
                self._forget(lookup)
            self._links.close()

    # --- inside --------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closed:
            raise Closed("the poller is closed")
        if os.getpid() != self._pid:
            raise Closed("the poller was opened before a fork: open another one in the child")

    def _go_on(self, chain: _Chain, answer: wire.FindReply | MasterLost | None, now: float) -> None:
        """Resume `match` where it asked: it asks for its next page, or ends."""
        try:
            if isinstance(answer, MasterLost):
                question = chain.asking.throw(answer)
            else:
                question = chain.asking.send(answer)
        except StopIteration as end:
            lookup = chain.lookup
            lookup.matches[chain.number] = end.value
            matches = tuple(one for one in lookup.matches if one is not None)
            if len(matches) == len(lookup.matches):
                del self._lookups[lookup.key]
                self._ended.append(PolledMatches(lookup.key, matches))
            return
        away_s = self._ticks[1] - self._ticks[0]
        if now >= chain.deadline and away_s < self._config.hedge_s:
            self._go_on(chain, MasterLost("the masters' answers took too long"), now)
            return
        id = self._next_id = self._next_id + 1
        hedge_s = min(self._config.hedge_s, (chain.deadline - now) / 2)
        request = _Request(chain, *wire.encode(question.message), hedge_at=now + hedge_s)
        self._requests[id] = request
        if not self._send(id, request, self._preferred, now):
            self._send_to_all(id, request, now)

    def _send(self, id: int, request: _Request, link: int, now: float) -> bool:
        sent = self._links.send(link, request.type, request.body, id)
        if sent:
            request.asked.add(link)
            if request.sent_at < request.chain.deadline:  # then once more
                request.sent_at = now
            self.connected = True
            self._unanswered_since.setdefault(link, now)
        return sent

    def _send_to_all(self, id: int, request: _Request, now: float) -> None:
        for link in range(len(self._links)):
            if link not in request.asked:
                self._send(id, request, link, now)

    def _take(self, wait_s: float) -> None:
        for link, message in self._links.receive(wait_s):
            self._receive(link, message)

    def _receive(self, link: int, message: bytes) -> None:
        self._unanswered_since.pop(link, None)
        id = envelope_id(message)
        request = self._requests.get(id) if id is not None else None
        if id is None or request is None:
            return  # of a lookup that has ended, or the second answer
        now = self._clock()
        try:
            envelope = decode_envelope(message, self._links.cluster)
            answer = wire.decode_answer(wire.FindReply, envelope.type, envelope.body)
        except (Unavailable, Overloaded, PeerError) as error:
            request.refused.add(link)
            self._send_to_all(id, request, now)
            self._end_if_refused(id, request, str(error), now)
            return
        self._preferred = link
        if answer.partial:
            if request.partial is None:
                request.partial, request.hedge_at = answer, now + self._config.hedge_s
            request.refused.add(link)
            self._send_to_all(id, request, now)
            self._end_if_refused(id, request, "", now)
            return
        del self._requests[id]
        self._go_on(request.chain, answer, now)

    def _end_if_refused(self, id: int, request: _Request, why: str, now: float) -> None:
        """End a question that every master has refused to which it could be sent."""
        if request.refused == request.asked:
            del self._requests[id]
            self._go_on(request.chain, request.partial or MasterLost(why), now)

    def _tick(self) -> None:
        """Send what could not be sent, ask further masters, end what is too old."""
        now = self._clock()
        if now < self._ticks[1] + _TICK_S:
            return
        self._ticks = self._ticks[1], now
        self._take(0.0)  # what came while nobody looked is in time
        for link in self._links.take_ended():  # what they were asked is lost
            self._unanswered_since.pop(link, None)
            for request in self._requests.values():
                request.asked.discard(link)
                request.refused.discard(link)
        for id, request in list(self._requests.items()):
            if request.partial is None and (not request.asked or now >= request.hedge_at):
                # A master that sends nothing for so long may only be slow: it stays asked.
                self._send_to_all(id, request, now)
            if now >= max(request.chain.deadline, request.sent_at + self._config.hedge_s):
                del self._requests[id]
                self._reconnect(request, now)
                late = MasterLost("no master answered in time")
                self._go_on(request.chain, request.partial or late, now)
            elif request.partial is not None and now >= request.hedge_at:
                del self._requests[id]
                self._go_on(request.chain, request.partial, now)

    def _reconnect(self, request: _Request, now: float) -> None:
        for link in request.asked:
            if now - self._unanswered_since.get(link, now) >= RECONNECT_AFTER_S:
                self._links.reopen(link)
                del self._unanswered_since[link]

    def _forget(self, lookup: _Lookup) -> None:
        del self._lookups[lookup.key]
        for id, request in list(self._requests.items()):
            if request.chain.lookup is lookup:
                del self._requests[id]
                request.chain.asking.close()


@dataclass(slots=True)
class _Lookup:
    key: Hashable
    matches: list[Match | None]


class _Chain(NamedTuple):
    """One chain of a lookup; `asking` is `match`, which stands where it asks for a page."""

    lookup: _Lookup
    number: int
    asking: Coroutine[_Question, wire.FindReply | None, Match]
    deadline: float


@dataclass(slots=True)
class _Request:
    chain: _Chain
    type: int
    body: bytes
    hedge_at: float
    sent_at: float = 0.0  # to the last of them in time, or the first
    asked: set[int] = field(default_factory=set)  # links
    refused: set[int] = field(default_factory=set)  # links, also those that know too little yet
    #: Of a master that was just started: others have until `hedge_at` to know more.
    partial: wire.FindReply | None = None


class _Question(NamedTuple):
    """What `match` waits for; the poller resumes it with the answer."""

    message: wire.Message

    def __await__(self) -> Generator[_Question, Any, Any]:
        return (yield self)


class _ByHand:
    """In place of `Masters`: `match` runs without an event loop, because it awaits only this."""

    async def ask(self, message: wire.Message, answer: type[wire.M], deadline: float) -> wire.M:
        reply: wire.M = await _Question(message)
        return reply


_HAND: Final = _ByHand()
