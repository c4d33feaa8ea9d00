"""Who fetches which piece of a chain from whom, while it is spread to many servers.

Pure: `spread.py` makes the calls that `ready` names, and reports their answers (design: movers).

A receiver fetches its next piece, head first, from the holder from which the fewest others fetch at
that moment, and holds the piece for the others when it has it. Those that have most go first: so a
piece that one of them brings from the first holder is on its way to the others at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from kvpool.types import Member, MoveStatus, Run

#: Receivers that fetch from one server at the same time. Each takes a quarter of its own network
#: by its budget, so these two leave half of the source's to readers.
FETCHES_MAX: Final = 2
#: A chain is cut into so many pieces, if it is long enough: a receiver holds a piece for the others
#: while it fetches the next one.
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
_FINAL: Final = {MoveStatus.NO_ROOM: "no room", MoveStatus.REFUSED: LEAVING}
_OF_SOURCE: Final = {
    MoveStatus.LOST: "not reached",
    MoveStatus.GONE: "gone",
    MoveStatus.CORRUPT: "corrupt",
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
    """One receiver. `at` counts the pieces that it has; `call` is set while it fetches the next."""

    server: str
    at: int = 0
    call: Call | None = None
    problem: str = ""  # why it is asked for no more
    fetched: int = 0  # blocks
    leading: int = 0  # blocks of its next piece that it has
    stalled: bool = False  # its last call brought nothing: the others go first
    lost: bool = False


class SpreadPlan:
    """The state of one spread. Call `ready` at the beginning and after each `ended` and `lost`."""

    def __init__(self, pieces: Sequence[Piece], receivers: Sequence[str]) -> None:
        self._pieces = pieces
        self._receivers = {server: _Receiver(server) for server in receivers}
        self._holders: dict[Piece, dict[str, None]] = {
            piece: dict.fromkeys(piece.holders) for piece in pieces
        }
        self._serving: Counter[str] = Counter()  # calls that fetch from this server now
        self._strikes: Counter[tuple[str, str]] = Counter()  # receiver, source

    def ready(self) -> list[Call]:
        """The calls that can begin now; they count as begun.

        When this is empty and no call is running, the spread is over.
        """
        calls = []
        for receiver in sorted(self._receivers.values(), key=lambda one: (one.stalled, -one.at)):
            piece = self._next_piece(receiver)
            if piece is None:
                continue
            sources = [one for one in self._holders[piece] if self._can_serve(one, receiver)]
            if not sources:
                receiver.problem = _OF_SOURCE[MoveStatus.GONE]
                continue
            strikes, serving = self._strikes, self._serving
            source = min(sources, key=lambda one: (strikes[receiver.server, one], serving[one]))
            if serving[source] == FETCHES_MAX:
                continue
            receiver.call = Call(receiver.server, source, piece)
            serving[source] += 1
            calls.append(receiver.call)
        return calls

    def ended(self, call: Call, statuses: Sequence[MoveStatus]) -> None:
        """What the receiver has answered, one status for each block of the piece."""
        receiver = self._end(call)
        present = [status.present for status in statuses]
        receiver.fetched += statuses.count(MoveStatus.DONE)
        receiver.stalled = not all(present) and MoveStatus.DONE not in statuses
        if all(present):
            self._holders[call.piece][receiver.server] = None
            receiver.at, receiver.leading = receiver.at + 1, 0
            return
        receiver.leading = present.index(False)
        first = statuses[receiver.leading]
        if first in _FINAL:
            receiver.problem = _FINAL[first]
        elif first in _OF_SOURCE:
            if first is MoveStatus.LOST:
                self._strikes[receiver.server, call.source] += 1
            else:
                self._holders[call.piece].pop(call.source, None)
            if not any(self._can_serve(one, receiver) for one in self._holders[call.piece]):
                receiver.problem = _OF_SOURCE[first]

    def lost(self, call: Call, problem: str = SERVER_LOST) -> None:
        """The receiver did not answer: it is not asked again, and nobody fetches from it."""
        receiver = self._end(call)
        receiver.problem = problem
        receiver.lost = True

    def progress(self) -> list[tuple[str, int, int, str]]:
        """Of each receiver its name, the blocks that it has from the head on, the blocks that it
        fetched, and why it has not got all of them."""
        return [
            (one.server, self._length(one), one.fetched, self._problem(one))
            for one in self._receivers.values()
        ]

    # --- inside --------------------------------------------------------------------------

    def _end(self, call: Call) -> _Receiver:
        receiver = self._receivers[call.receiver]
        receiver.call = None
        self._serving[call.source] -= 1
        return receiver

    def _next_piece(self, receiver: _Receiver) -> Piece | None:
        """The piece that it is to fetch now. Those that it has already are passed over."""
        if receiver.call is not None or receiver.problem:
            return None
        for piece in self._pieces[receiver.at :]:
            if receiver.server not in self._holders[piece]:
                return piece
            receiver.at += 1
        return None

    def _can_serve(self, server: str, receiver: _Receiver) -> bool:
        one = self._receivers.get(server)
        if one is not None and one.lost:
            return False
        return self._strikes[receiver.server, server] < _STRIKES

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
