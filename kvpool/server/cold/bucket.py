"""Requests to an object store: each has a deadline, a budget, and a reason when it fails.

A store that fails several times in a row is left alone for a while, so that each reader who asks
meanwhile has his miss at once; one request of each kind then tries it again. Signs of life are sent
all the same: servers that came back at different times would take one another for lost.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final, TypeVar

from kvpool import logs
from kvpool.backoff import Backoff
from kvpool.errors import Unavailable
from kvpool.protocols.cold_tier import Gone, Listed, ObjectStore
from kvpool.shares import Recent
from kvpool.tenant_names import TENANTS_MAX

log = logs.get("kvpool.cold")

#: One small request, and one read of a block with its second attempt.
REQUEST_S: Final = 5.0
#: One object on its way up or down, or a page of names.
LONG_S: Final = 60.0
#: Failures in a row after which the store is left alone, and for how long at first and at most.
_FAILURES_MAX: Final = 3
_PAUSE_S: Final = 1.0
_PAUSE_MAX_S: Final = 60.0
#: Seconds of its budget that a server may use at once.
_BURST_S: Final = 60.0
#: What must be left of that for a request: nobody waits for most of them, and readers come first.
#: Signs of life are outside of the budget, or the others would take over what is here.
_BACKGROUND: Final = 0.5
_READ: Final = 0.0
_SIGN: Final = -1e9

#: A reason is logged once in so long, and so many of them.
_LOG_S: Final = 60.0
_REASONS_MAX: Final = 16

_T = TypeVar("_T")


class Busy(Unavailable):
    """Our own limit, not the store: the budget is used up, or the store is left alone."""


class _Budget:
    """So many requests an hour; 0: no limit."""

    def __init__(self, requests: int) -> None:
        self._rate = requests / 3600
        self._tokens = self._tokens_max = max(1.0, self._rate * _BURST_S)
        self._refilled_at = 0.0
        #: By tenant: what its readers used lately, forgotten by and by, and when that was counted.
        self._used: Recent[str, tuple[float, float]] = Recent(2 * TENANTS_MAX)

    def take(self, left: float, tenant: str, now: float) -> bool:
        """Take one, if this part of all is left then, and as much as the tenant has used lately."""
        if not self._rate:
            return True
        more = (now - self._refilled_at) * self._rate
        self._tokens, self._refilled_at = min(self._tokens_max, self._tokens + more), now
        used, at = self._used.get("", tenant) or (0.0, now)
        used = used * math.exp((at - now) / _BURST_S) if tenant else 0.0
        if self._tokens < max(1 + left * (self._tokens_max - 1), used):
            return False
        self._tokens -= 1
        if tenant:
            self._used.put("", tenant, (used + 1, now))
        return True


class Bucket:
    """The requests of one server."""

    def __init__(self, remote: ObjectStore, *, requests: int, hedge_s: float) -> None:
        """`requests`: so many in an hour, 0 for no limit."""
        self._remote = remote
        self._budget = _Budget(requests)
        self._hedge_s = hedge_s
        self._backoff = Backoff(_PAUSE_S, _PAUSE_MAX_S)
        self._failures = 0  # in a row
        #: Not only signs of life: then it does not work yet when one of them is answered.
        self._others_fail = False
        self._left_alone_until = 0.0
        #: Kinds of which a request tries the store again.
        self._trying: set[float] = set()
        #: Until when each reason is not logged again, and whether the present one was.
        self._logged: dict[str, float] = {}
        self._reported = False
        #: What is wrong at the moment, for an operator.
        self.problem = ""
        self.counters: Counter[str] = Counter()

    async def put(self, name: str, data: bytes | memoryview, within_s: float = LONG_S) -> None:
        await self._call(lambda: self._remote.put(name, data), within_s)

    async def show(self, folder: str, name: str, data: bytes) -> list[Listed]:
        """Write a sign of life, and look at those of all."""
        await self._call(lambda: self._remote.put(folder + name, data), REQUEST_S, _SIGN)
        return await self._call(lambda: self._remote.listing(folder), REQUEST_S, _SIGN)

    async def get(self, name: str, start: int, size: int) -> bytes | memoryview:
        return await self._call(lambda: self._remote.get(name, start, size), LONG_S)

    async def listing(self, prefix: str) -> list[Listed]:
        return await self._call(lambda: self._remote.listing(prefix), LONG_S)

    async def folders(self, prefix: str) -> list[str]:
        return await self._call(lambda: self._remote.folders(prefix), LONG_S)

    async def delete(self, name: str) -> None:
        await self._call(lambda: self._remote.delete(name), REQUEST_S)

    async def read(self, name: str, start: int, size: int, tenant: str = "") -> bytes | memoryview:
        """Of a block for which a reader waits: asked for once more after `hedge_s`.

        Readers of a tenant leave as much of the budget as they have used lately: so one alone gets
        nearly all that comes in, and of n greedy ones none keeps the budget empty for another.
        """

        def ask() -> Coroutine[Any, Any, bytes | memoryview]:
            return self._remote.get(name, start, size)

        return await self._call(lambda: self._hedged(ask, tenant), REQUEST_S, _READ, tenant)

    async def _hedged(self, ask: Callable[[], Coroutine[Any, Any, _T]], tenant: str) -> _T:
        tasks = {asyncio.create_task(ask())}
        try:
            done, _ = await asyncio.wait(tasks, timeout=self._hedge_s)
            if not done and self._take(_READ, tenant):
                self.counters["cold_hedged"] += 1
                tasks.add(asyncio.create_task(ask()))
            while True:
                done, left = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for one in done:
                    if one.exception() is None or not left:
                        return one.result()
                tasks = left
        finally:
            for one in tasks:  # each has a buffer of its own: it may end when it likes
                one.cancel()

    # --- limits ------------------------------------------------------------------------------

    async def _call(
        self,
        ask: Callable[[], Awaitable[_T]],
        within_s: float,
        left: float = _BACKGROUND,
        tenant: str = "",
    ) -> _T:
        now = _now()
        if now < self._left_alone_until and left is not _SIGN:
            raise Busy(f"it is left alone for {self._left_alone_until - now:.0f} s: {self.problem}")
        tries = self._failures >= _FAILURES_MAX
        if tries and left in self._trying:
            raise Busy(f"it is tried again: {self.problem}")
        if not self._take(left, tenant):
            self.counters["cold_over_budget"] += 1
            self._say("over the budget of requests")
            raise Busy("the budget of requests is used up (setting requests)")
        if tries:  # one of the readers, and one that moves an object, which may take a minute
            self._trying.add(left)
        try:
            async with asyncio.timeout(within_s):
                answer = await ask()
        except Gone:
            self._worked()
            raise
        except Exception as error:  # a plug-in may raise any, and its request is tried again
            why = _reason(error, within_s)
            # Signs of life go on: they do not keep others away for longer than those have failed.
            self._failed(why, puts_off=left is not _SIGN or not self._others_fail)
            self._others_fail |= left is not _SIGN
            raise Unavailable(f"object store: {why}") from None
        finally:
            if tries:
                self._trying.discard(left)
        if left is not _SIGN or not self._others_fail:
            self._worked()
        return answer

    def _take(self, left: float, tenant: str = "") -> bool:
        """Whether one more request is within the budget."""
        taken = self._budget.take(left, tenant, _now())
        self.counters["cold_requests"] += taken
        return taken

    def _failed(self, why: str, *, puts_off: bool) -> None:
        self.counters["cold_failures"] += 1
        self.problem = why
        self._failures += 1
        self._say(why)
        if self._failures >= _FAILURES_MAX and puts_off:
            self._left_alone_until = _now() + self._backoff.next_delay()

    def _worked(self) -> None:
        self._failures, self._others_fail, self._left_alone_until = 0, False, 0.0
        if self.problem:
            if self._reported:
                log.warning("object store answers again", after=self.problem)
            self.problem, self._reported = "", False
            self._backoff.reset()

    def _say(self, why: str) -> None:
        """Once a minute for each reason: one request of a hundred may fail, for hours."""
        now = _now()
        self._logged = {one: until for one, until in self._logged.items() if until > now}
        if why not in self._logged and len(self._logged) < _REASONS_MAX:
            self._logged[why], self._reported = now + _LOG_S, True
            log.error("object store fails", why=why)


def _reason(error: Exception, within_s: float) -> str:
    if isinstance(error, TimeoutError):
        return f"no answer within {within_s:g} s"
    return str(error) if isinstance(error, Unavailable) else repr(error)[:160]


def _now() -> float:
    return asyncio.get_running_loop().time()
