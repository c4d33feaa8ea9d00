"""What a server asks masters about the pool, one after the other until one answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from kvpool.errors import MasterLost, Overloaded, PeerError, Unavailable
from kvpool.protocols import Link, Network
from kvpool.server.moves.state.wants import BlockName
from kvpool.types import Member
from kvpool.wire import messages as wire

#: One master is asked for so long before the next one is.
_MASTER_S: Final = 1.0
#: The list of members is asked for so often at most.
REFRESH_S: Final = 0.5
_MEMBERS_MAX: Final = 4096


class AskedMasters:
    """Nothing is connected before something is asked, which `on_ask` hears of."""

    def __init__(
        self, network: Network, addresses: Sequence[str], on_ask: Callable[[], None]
    ) -> None:
        self._network = network
        self._addresses = addresses
        self._on_ask = on_ask
        self._links: list[Link] = []
        self._members: dict[str, Member] = {}
        self._refreshed_at = float("-inf")
        self.asked_at = float("-inf")
        self.ended = False  # no question is asked any more

    @property
    def are_connected(self) -> bool:
        return bool(self._links)

    async def ask(self, message: wire.Message, answer: type[wire.M], deadline: float) -> wire.M:
        """The first good answer of a master; where all have just begun, what one of them knows.
        Raises MasterLost."""
        if not self._links and not self.ended:
            self._links = [self._network.connect(address) for address in self._addresses]
        self.asked_at = _now()
        self._on_ask()
        problem, partial = "this server is closed", None
        for link in (links := list(self._links)):
            now, last = _now(), link is links[-1]
            # One that is silent leaves as much time to the others.
            until = min(deadline if last else (now + deadline) / 2, now + _MASTER_S)
            try:
                got = await link.request(*wire.encode(message), deadline=until)
                answered = wire.decode_answer(answer, *got)
                if not (isinstance(answered, wire.FindReply) and answered.partial):
                    return answered
                partial = answered
            except (Unavailable, Overloaded, PeerError) as error:
                problem = str(error)  # and not the error, which refers to this frame
                if link in self._links:  # the others first, the next time
                    self._links.remove(link)
                    self._links.append(link)
        if partial is not None:
            return partial
        raise MasterLost(f"no master answers: {problem}")

    async def members(self, deadline: float) -> Mapping[str, Member]:
        """Every server that a master knows, by name; not older than half a second.

        Raises MasterLost.
        """
        if _now() < self._refreshed_at + REFRESH_S:
            return self._members
        found: dict[str, Member] = {}
        after, more = "", True
        while more and len(found) < _MEMBERS_MAX:
            page = await self.ask(wire.Members(after), wire.MembersReply, deadline)
            # Pages are sorted. A master whose pages do not go on would be asked for ever.
            if not page.members or page.members[-1].server <= after:
                break
            found.update((info.server, info) for info in page.members)
            after, more = page.members[-1].server, page.more
        self._members, self._refreshed_at = found, _now()
        return found

    def epoch(self, server: str) -> int:
        """Of this member when it was heard of last; 0 for one that is unknown."""
        info = self._members.get(server)
        return info.epoch if info is not None else 0

    def members_changed(self) -> None:
        """Ask for them anew, the next time."""
        self._refreshed_at = float("-inf")

    async def holders(
        self, names: Sequence[BlockName], among: Iterable[str], deadline: float
    ) -> dict[BlockName, set[str]]:
        """Which of the servers `among` have each block of one namespace and part.

        Raises MasterLost.
        """
        namespace, part, size = names[0].namespace, names[0].part, len(names[0].digest)
        holders, servers = {name: set[str]() for name in names}, set(among)
        first = 0
        while first < len(names):
            batch = names[first : first + wire.QUESTION_KEYS_MAX]
            packed = b"".join(name.digest for name in batch)
            keys = namespace.name, namespace.parts, size, packed
            request = wire.Find(*keys, False, observes=True)  # no client wants them
            found = await self.ask(request, wire.FindReply, deadline)
            for start, last, replicas in found.runs:
                here = {server for server, _, one in replicas if one == part} & servers
                holders.update((name, here) for name in batch[start : last + 1])
            answered = sum([last + 1 - start for start, last, _ in found.runs]) + len(found.misses)
            first += max(1, answered) if found.more else len(batch)
        return holders

    def close(self) -> None:
        """End every connection; the next question makes new ones, unless it `ended`."""
        links, self._links = self._links, []
        for link in links:
            link.close()


def _now() -> float:
    return asyncio.get_running_loop().time()
