"""How a client asks masters: the first one that answers is enough."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from kvpool.config import ClientConfig
from kvpool.errors import (
    MasterLost,
    Overloaded,
    PeerError,
    Unavailable,
)
from kvpool.protocols import (
    Link,
    Network,
)
from kvpool.wire import messages as wire


class Masters:
    """Any master that answers. The one that answered last is asked first."""

    def __init__(self, network: Network, config: ClientConfig) -> None:
        self._links: list[Link] = [network.connect(address) for address in config.masters]
        self._config = config
        self._preferred = 0

    async def ask(
        self,
        message: wire.Message,
        answer: type[wire.M],
        deadline: float,
        *,
        patient: bool = False,
    ) -> wire.M:
        """The first good answer. Raises MasterLost when no master answers within `attempt_s`.

        A `patient` caller waits until the deadline.

        A request of a client may be sent twice, because it changes nothing that matters. So when
        the preferred master sends nothing for `hedge_s`, all masters are asked at once, that one
        included: it may only be slow (design: unresponsive-servers).
        """
        now = asyncio.get_running_loop().time()
        request = wire.encode(message)
        until = deadline if patient else min(deadline, now + self._config.attempt_s)
        problems: list[str] = []
        if len(self._links) > 1:
            # Half of a short deadline: the others need time to answer, too.
            first = min(now + self._config.hedge_s, now + (until - now) / 2)
            got = await self._ask(self._preferred, request, answer, first, problems)
            if got is not None:
                return got
            return await self._ask_all(request, answer, until, problems)
        got = await self._ask(0, request, answer, until, problems)
        if got is None:
            raise _lost(problems)
        return got

    def close(self) -> None:
        for link in self._links:
            link.close()

    async def _ask(
        self,
        index: int,
        request: tuple[int, bytes],
        answer: type[wire.M],
        deadline: float,
        problems: list[str],
    ) -> wire.M | None:
        try:
            got = await self._links[index].request(*request, deadline=deadline)
            decoded = wire.decode_answer(answer, *got)
        except (Unavailable, Overloaded, PeerError) as error:
            problems.append(str(error))
            return None
        self._preferred = index
        return decoded

    async def _ask_all(
        self,
        request: tuple[int, bytes],
        answer: type[wire.M],
        deadline: float,
        problems: list[str],
    ) -> wire.M:
        loop = asyncio.get_running_loop()
        order = [*range(self._preferred, len(self._links)), *range(self._preferred)]
        tasks = [
            loop.create_task(self._ask(index, request, answer, deadline, problems))
            for index in order
        ]
        try:
            for done in asyncio.as_completed(tasks):
                got = await done
                if got is not None:
                    return got
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        raise _lost(problems)


def _lost(problems: Sequence[str]) -> MasterLost:
    return MasterLost(f"no master answers: {'; '.join(problems)}; is `kvpool master` running?")
