"""Who fetches which piece of a chain from whom, while it is spread to many servers.

Pure: `spread.py` makes the calls that `ready` names, and reports their answers (design: spread).

The receivers are a tree: the first `FAN_OUT` fetch from the servers that had the chain before, and
each receiver feeds `FAN_OUT` others, piece by piece, head first. So the chain is on its way down
while the top still receives it, and the time grows with the depth of the tree and not with the
number of receivers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from kvpool.types import FetchStatus, Member, Run

#: Receivers that fetch from one server at the same time. Each takes a quarter of its own network
#: by its budget, so these two leave half of the source's to readers.
FAN_OUT: Final = 2
#: A chain is cut into so many pieces, if it is long enough: the last receivers wait for some of
#: them before their first one.
_PIECES: Final = 64
_PIECE_BLOCKS_MAX: Final = 256
#: So often a receiver may fail to reach a source before that source is given up for it: the first
#: connection may be to the process before a restart.
_STRIKES: Final = 2

#: Receivers of one call: the client asks each of them for each piece.
RECEIVERS_MAX: Final = 256

#: Why a receiver has not got the whole chain, in the words of a drain's table.
SERVER_LOST: Final = "server lost"
NO_SUCH_NAME: Final = "no such name"
LEAVING: Final = "leaving"
CANNOT_FETCH: Final = "it cannot fetch"
NO_TIME: Final = "no time was left"
_FINAL: Final = {FetchStatus.NO_ROOM: "no room", FetchStatus.REFUSED: LEAVING}
_OF_SOURCE: Final = {
    FetchStatus.SOURCE_LOST: "not reached",
    FetchStatus.GONE: "gone",
    FetchStatus.CORRUPT: "corrupt",
}


class Piece(NamedTuple):
    """Consecutive blocks of one part, `first` to before `end`, which the same servers have."""

    part: int
    first: int
    end: int
    holders: tuple[str, ...]


class Call(NamedTuple):
    """`receiver` is to fetch this piece from `source`."""

    receiver: str
    source: str
    piece: Piece


@dataclass(slots=True)
class _Receiver:
    """One receiver.

    | state   | means                                       | next, when                          |
    |---------|---------------------------------------------|-------------------------------------|
    | WAITING | the server above it has not got its next    | RUNNING: `ready` names a call;      |
    |         | piece, or feeds `FAN_OUT` others            | ENDED: no source for it is left     |
    | RUNNING | it fetches a piece                          | WAITING, ENDED: the call has ended  |
    | ENDED   | it has the chain, or `problem` says why not |                                     |

    `at` counts the pieces that it has, `call` is set while it is RUNNING.
    """

    server: str
    place: int
    at: int = 0
    call: Call | None = None
    problem: str = ""
    fetched: int = 0  # blocks
    leading: int = 0  # blocks of its next piece that it has
    stalled: bool = False  # its last call brought nothing: the others do not wait for it
    lost: bool = False


class SpreadTree:
    """The state of one spread. Call `ready` at the beginning and after each `ended`."""

    def __init__(self, pieces: Sequence[Piece], receivers: Sequence[str]) -> None:
        self._pieces = pieces
        self._receivers = [_Receiver(server, place) for place, server in enumerate(receivers)]
        self._by_name = {receiver.server: receiver for receiver in self._receivers}
        self._holders: dict[Piece, dict[str, None]] = {
            piece: dict.fromkeys(piece.holders) for piece in pieces
        }
        self._serving: Counter[str] = Counter()  # calls that fetch from this server now
        self._strikes: Counter[tuple[str, str]] = Counter()  # receiver, source

    def ready(self) -> list[Call]:
        """The calls that can begin now; they count as begun. Those that are furthest behind first.

        When this is empty and no call is running, the spread is over.
        """
        calls = []
        for receiver in sorted(self._receivers, key=lambda one: (one.at, one.place)):
            if receiver.call is not None or self._is_over(receiver):
                continue
            piece = self._pieces[receiver.at]
            source = self._source(receiver, piece)
            if source:
                receiver.call = Call(receiver.server, source, piece)
                self._serving[source] += 1
                calls.append(receiver.call)
        return calls

    def ended(self, call: Call, statuses: Sequence[FetchStatus]) -> None:
        """What the receiver has answered, one status for each block of the piece."""
        receiver = self._end(call)
        present = [status.present for status in statuses]
        before = receiver.leading
        receiver.fetched += statuses.count(FetchStatus.FETCHED)
        receiver.leading = present.index(False) if False in present else 0
        if all(present):
            self._holders[call.piece][receiver.server] = None
            receiver.stalled = False
            receiver.at += 1
            return
        receiver.stalled = receiver.leading <= before and FetchStatus.FETCHED not in statuses
        first = statuses[receiver.leading]
        if first in _FINAL:
            receiver.problem = _FINAL[first]
        elif first in _OF_SOURCE:
            if first is FetchStatus.SOURCE_LOST:
                self._strikes[receiver.server, call.source] += 1
            else:
                self._holders[call.piece].pop(call.source, None)
            if not self._has_source(receiver, call.piece):
                receiver.problem = _OF_SOURCE[first]

    def lost(self, call: Call, problem: str = SERVER_LOST) -> None:
        """The receiver did not answer: it is not asked again, and feeds nobody."""
        receiver = self._end(call)
        receiver.problem = problem
        receiver.lost = True

    def progress(self) -> list[tuple[str, int, int, str]]:
        """Of each receiver its name, the blocks that it has from the head on, the blocks that it
        fetched, and why it has not got all of them."""
        return [
            (one.server, self._length(one), one.fetched, self._problem(one))
            for one in self._receivers
        ]

    # --- inside --------------------------------------------------------------------------

    def _end(self, call: Call) -> _Receiver:
        receiver = self._by_name[call.receiver]
        receiver.call = None
        self._serving[call.source] -= 1
        return receiver

    def _is_over(self, receiver: _Receiver) -> bool:
        """Whether it ends here; what it has already is passed over."""
        while (
            receiver.at < len(self._pieces)
            and receiver.server in self._holders[self._pieces[receiver.at]]
        ):
            receiver.at += 1
            receiver.leading = 0
        if receiver.at == len(self._pieces) or receiver.problem:
            return True
        if not self._has_source(receiver, self._pieces[receiver.at]):
            receiver.problem = _OF_SOURCE[FetchStatus.GONE]
        return bool(receiver.problem)

    def _source(self, receiver: _Receiver, piece: Piece) -> str:
        """From whom it fetches the piece now; empty: it waits.

        From the receiver above it in the tree, waiting for that one while it makes progress; from
        the next one above where that has failed; from those that had the piece before at the top.
        """
        place = receiver.place
        while (place := place // FAN_OUT - 1) >= 0:
            above = self._receivers[place]
            if self._strikes[receiver.server, above.server]:
                continue
            if above.server in self._holders[piece] and not above.lost:
                return above.server if self._is_free(above.server) else ""
            if not (above.stalled or above.problem or above.at > receiver.at):
                return ""
        sources = self._sources(receiver, piece)
        free = [source for source in sources if self._is_free(source)]
        if not free:
            return ""
        strikes = self._strikes
        return min(free, key=lambda one: (strikes[receiver.server, one], self._serving[one]))

    def _sources(self, receiver: _Receiver, piece: Piece) -> list[str]:
        """Who can serve the piece: those that had it before, and only without them the others."""
        found = [one for one in self._holders[piece] if self._can_serve(one, receiver)]
        return [server for server in found if server in piece.holders] or found

    def _has_source(self, receiver: _Receiver, piece: Piece) -> bool:
        return any(self._can_serve(one, receiver) for one in self._holders[piece])

    def _can_serve(self, server: str, receiver: _Receiver) -> bool:
        one = self._by_name.get(server)
        if one is not None and one.lost:
            return False
        return self._strikes[receiver.server, server] < _STRIKES

    def _is_free(self, source: str) -> bool:
        return self._serving[source] < FAN_OUT

    def _length(self, receiver: _Receiver) -> int:
        if receiver.at == len(self._pieces):
            return self._pieces[-1].end if self._pieces else 0
        piece = self._pieces[receiver.at]
        # The other parts of a block may be missing.
        one_part = all(other.part == 0 for other in self._pieces)
        return piece.first + (receiver.leading if one_part else 0)

    def _problem(self, receiver: _Receiver) -> str:
        return receiver.problem or ("" if receiver.at == len(self._pieces) else NO_TIME)


def cut(runs: Sequence[Run], parts: int, length: int) -> list[Piece]:
    """The pieces of a chain, head first; of each stretch all parts, one after the other.

    No piece reaches over the end of a run, so that whoever has some of it has all of it.
    """
    size = max(1, min(_PIECE_BLOCKS_MAX, -(-length // _PIECES)))
    pieces = []
    for run in runs:
        last = min(run.last + 1, length)
        holders = [
            tuple(dict.fromkeys(one.server for one in run.replicas if one.part == part))
            for part in range(parts)
        ]
        for first in range(run.first, last, size):
            end = min(first + size, last)
            pieces += [Piece(part, first, end, holders[part]) for part in range(parts)]
    return pieces


def choose_receivers(
    members: Sequence[Member], holders: Mapping[str, int], length: int, count: int
) -> list[str]:
    """Servers that should get the chain so that `count` have it; `holders` is how many of its
    blocks each has now.

    Those first that have most of it, then those on other hosts than the rest, with room, and with
    the oldest victims: what they would evict for it is worth least.
    """
    living = [one for one in members if one.alive and not one.stats.draining]
    whole = [one for one in living if holders.get(one.server, 0) >= length]
    hosts = {one.host for one in whole}

    def value(one: Member) -> tuple[int, float, float, str]:
        free = 1 - one.stats.used / max(1, one.capacity)
        return -holders.get(one.server, 0), -round(free, 1), -one.stats.victim_age_s, one.server

    rest = sorted((one for one in living if one not in whole), key=value)
    chosen: list[Member] = []
    for other_host in (True, False):
        for one in rest:
            if len(whole) + len(chosen) >= count:
                break
            if one not in chosen and not (other_host and one.host in hosts):
                chosen.append(one)
                hosts.add(one.host)
    return [one.server for one in chosen]


def receivers_at(
    members: Sequence[Member], names: Sequence[str]
) -> tuple[list[str], dict[str, str]]:
    """The servers that these names mean; why the other names mean none that lives and stays.

    A name is the id of a server, or of a host: then the server there with the most room, because
    every reader on that host reaches it through memory.
    """
    found: dict[str, None] = {}
    problems: dict[str, str] = {}
    for name in dict.fromkeys(names):
        meant = [one for one in members if name in (one.server, one.host)]
        living = [one for one in meant if one.alive]
        staying = [one for one in living if not one.stats.draining]
        if staying:
            exact = [one for one in staying if one.server == name]
            best = max(
                exact or staying, key=lambda one: (one.capacity - one.stats.used, one.server)
            )
            found[best.server] = None
        elif living:
            problems[name] = LEAVING
        else:
            problems[name] = SERVER_LOST if meant else NO_SUCH_NAME
    return list(found), problems
