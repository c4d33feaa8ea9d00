"""How a client asks masters: the first one that answers is enough."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from kvpool import logs
from kvpool.config import ClientConfig
from kvpool.errors import DeadlineExceeded, MasterLost, Overloaded, PeerError, Unavailable
from kvpool.protocols import Link, Network
from kvpool.wire import messages as wire

log = logs.get("kvpool.client.masters")

#: Requests of this client that masters work on at a time; others wait here. A master answers so
#: many well within `hedge_s`, so what is late then is the master, and not this client's own queue.
_IN_FLIGHT_MAX: Final = 64
#: Without an answer for so long the pool counts as lost. One late answer is no loss.
_LOST_AFTER_S: Final = 1.0


class Masters:
    """Any master that answers. The one that answered last is asked first.

    Logs once when no master has answered for a second, and once when one answers again.
    """

    def __init__(self, network: Network, config: ClientConfig) -> None:
        self._links: list[Link] = [network.connect(address) for address in config.masters]
        self._config = config
        self._addresses = ",".join(config.masters)
        self._preferred = 0
        self._places = asyncio.Semaphore(_IN_FLIGHT_MAX)
        self._answered_at = 0.0
        #: When the first request since the last answer failed; and whether the log has it.
        self._failing_since: float | None = None
        self._logged_lost = False
        self.closed = False

    async def ask(
        self, message: wire.Message, answer: type[wire.M], deadline: float, *, patient: bool = False
    ) -> wire.M:
        """The first good answer. Raises MasterLost when no master answers within `attempt_s`; a
        `patient` caller waits until the deadline.

        A request of a client may be sent twice, because it changes nothing that matters. So when
        the preferred master sends nothing for `hedge_s`, all masters are asked at once, that one
        included: it may only be slow (design: hedging).
        """
        if self._places.locked():
            await self._wait_for_place(deadline)
        else:
            await self._places.acquire()  # at once, and without a timer
        try:
            return await self._ask_some(message, answer, deadline, patient)
        finally:
            self._places.release()

    async def _ask_some(
        self, message: wire.Message, answer: type[wire.M], deadline: float, patient: bool
    ) -> wire.M:
        now = asyncio.get_running_loop().time()
        until = deadline if patient else min(deadline, now + self._config.attempt_s)
        problems: list[Exception] = []
        if len(self._links) > 1:
            # Half of a short deadline: the others need time to answer, too.
            first = min(now + self._config.hedge_s, now + (until - now) / 2)
            got = await self._ask(self._preferred, message, answer, first, problems, hasty=True)
            if got is not None and _is_whole(got):
                return got
            return await self._ask_all(message, answer, until, problems, got)
        got = await self._ask(0, message, answer, until, problems)
        if got is None:
            raise self._lost(problems)
        return got

    async def _wait_for_place(self, deadline: float) -> None:
        """As long as answers come. Raises MasterLost when there was none for `attempt_s`."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        while True:
            heard = max(began, self._answered_at)
            try:
                async with asyncio.timeout_at(min(deadline, heard + self._config.attempt_s)):
                    await self._places.acquire()
                    return
            except TimeoutError:
                now = loop.time()
                if now >= deadline or now >= self._answered_at + self._config.attempt_s:
                    waiting = f"{_IN_FLIGHT_MAX} requests of this client are not answered yet"
                    raise self._lost([DeadlineExceeded(waiting)]) from None

    def close(self) -> None:
        self.closed = True
        for link in self._links:
            link.close()

    async def _ask(
        self,
        index: int,
        message: wire.Message,
        answer: type[wire.M],
        deadline: float,
        problems: list[Exception],
        hasty: bool = False,
    ) -> wire.M | None:
        try:
            request = wire.encode(message)
            got = await self._links[index].request(*request, deadline=deadline, hasty=hasty)
            decoded = wire.decode_answer(answer, *got)
        except (Unavailable, Overloaded, PeerError) as error:
            problems.append(error)
            return None
        if _is_whole(decoded) or isinstance(decoded, wire.FindReply):
            self._preferred = index
        self._answered_at = asyncio.get_running_loop().time()
        if self._failing_since is not None:
            self._answers_again()
        return decoded

    async def _ask_all(
        self,
        message: wire.Message,
        answer: type[wire.M],
        deadline: float,
        problems: list[Exception],
        partial: wire.M | None,
    ) -> wire.M:
        """The first whole answer; a `partial` one, as the preferred master's may be, if no other
        comes within `hedge_s`."""
        loop = asyncio.get_running_loop()
        order = [*range(self._preferred, len(self._links)), *range(self._preferred)]
        hasty = isinstance(partial, wire.FindReply)
        tasks = [
            loop.create_task(self._ask(index, message, answer, deadline, problems, hasty))
            for index in order[hasty:]
        ]
        try:
            async with asyncio.timeout(self._config.hedge_s if hasty else None) as limit:
                for done in asyncio.as_completed(tasks):
                    got = await done
                    if got is not None and _is_whole(got):
                        return got
                    if partial is None and isinstance(got, wire.FindReply):
                        limit.reschedule(loop.time() + self._config.hedge_s)
                    partial = got or partial
        except TimeoutError:
            pass  # the others are late
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        if partial is not None:
            return partial
        raise self._lost(problems)

    def _lost(self, problems: Sequence[Exception]) -> MasterLost:
        """The error to raise; the first one after `_LOST_AFTER_S` without an answer is logged."""
        now = asyncio.get_running_loop().time()
        why = "; ".join(dict.fromkeys(map(str, problems)))  # one was asked twice
        if self._failing_since is None:
            self._failing_since = now
        elif not self._logged_lost and now - self._failing_since >= _LOST_AFTER_S:
            self._logged_lost = True
            log.warning(
                "kvpool: the pool is lost, no master answers", masters=self._addresses, why=why
            )
        return MasterLost(f"no master answers: {why}; `kvpool doctor` says what to do")

    def _answers_again(self) -> None:
        since, self._failing_since = self._failing_since, None
        if self._logged_lost and since is not None:
            self._logged_lost = False
            lost_s = round(asyncio.get_running_loop().time() - since, 1)
            log.info("kvpool: the pool is back", masters=self._addresses, lost_s=lost_s)


def _is_whole(answer: wire.Message) -> bool:
    """False of a master that was just started: another one may know blocks, or where to write."""
    if isinstance(answer, wire.FindReply):
        return not answer.partial
    return not isinstance(answer, wire.PlaceReply) or bool(answer.servers)
