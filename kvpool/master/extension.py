"""The joints of a master: hints of clients, which heartbeats take to every server; what clients ask
for, and what follows from that; and who answers what the data path does not ask."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias

from kvpool.master.state.directory import ChainMatch, Directory
from kvpool.protocols import Caller
from kvpool.spans import MarkedChain
from kvpool.types import Demand, Namespace
from kvpool.wire import messages as wire

#: `module:class`; the last one is made. Without its line and file no hint is passed on.
HINTS: Final = (
    "kvpool.master.extension:NoHints",
    "kvpool.master.session_hints:SessionHints",
)
#: The same. Without its line and file nothing is measured.
DEMANDS: Final = (
    "kvpool.master.extension:NoDemand",
    "kvpool.master.state.demand:DemandMeter",
)
#: Who answers further requests: `module:class`, made with the directory, what clients ask
#: (`ClientRequests`) and the number of this master's stream of changes; `handlers` has its methods.
REQUESTS: Final = (
    "kvpool.master.follower_requests:FollowerRequests",
    "kvpool.master.operator_requests:OperatorRequests",
)
#: Where others find a master that listens on every address of its host, as far as that is known.
ADDRESSES: Final = {
    "reachable": "kvpool.net.announced:reachable",
}

Handlers: TypeAlias = Mapping[type[wire.Message], Callable[[Any, Caller], wire.Message]]


class NoHints:
    """What a master asks; each answer as if there were no session."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now

    @property
    def last(self) -> int:
        """The number of the last hint."""
        return 0

    @property
    def handlers(self) -> Handlers:
        """Who answers what clients say of sessions, and ask about them."""
        return {}

    def asked(self, session: str) -> None:
        """A client asks for blocks for a prompt of this session."""

    def found(self, namespace: Namespace, chain: MarkedChain, match: ChainMatch) -> None:
        """The same for a prompt whose session nobody knows, and what was found of it."""

    def heard(self, m: wire.Heartbeat) -> tuple[list[wire.WireHint], int]:
        """From a server that lives: the hints that it has not heard, and the number of the last."""
        return [], m.hints_heard

    def latest(self, count: int) -> list[tuple[str, float | None, float]]:
        """The sessions that were hinted at last: name, `resume_in` of the hint, its age in s."""
        return []


class NoDemand:
    """What a master tells of the questions that it answers, and is asked for; `now` in seconds."""

    def __init__(self, directory: Directory) -> None:
        """It has the blocks that are behind a hole."""

    def asked(
        self, namespace: Namespace, digests: Sequence[bytes], now: float, size: int = 0
    ) -> None:
        """These blocks were looked up, or are being written with `size` bytes each."""

    def asked_chain(
        self, namespace: Namespace, chain: MarkedChain, now: float, behind: Sequence[int] = ()
    ) -> None:
        """These blocks were looked up for a prompt, which goes on with the spans `behind`."""

    def found(self, namespace: Namespace, chain: MarkedChain, match: ChainMatch, nth: int) -> None:
        """That was answered, as the `nth` match that ended so; 0: the client asks again."""

    def demand(self, now: float) -> Demand:
        """The figures now."""
        return Demand(0.0, (), 0.0, 0.0)
