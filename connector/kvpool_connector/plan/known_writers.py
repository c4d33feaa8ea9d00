"""Whose blocks an engine loads: those of engines that were found to compute what it computes. Pure.

(design: provenance)
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from kvpool_connector.records.provenance import UNKNOWN, BlockWriter, Trust

#: Writers that are remembered; of more, the one that was met longest ago is new again.
WRITERS_MAX: Final = 1024
#: An engine that differs from so many others and equals none is itself the one that differs.
_ODD: Final = 2


@dataclass(slots=True)
class _Findings:
    """What was found out about one writer."""

    interval: int = 1  # loads from one comparison to the next
    loads: int = 0  # of its blocks, since the latest one


class KnownWriters:
    """What one engine has found out about the others; it compares one of `loads_per_check` loads
    of each (0: none, and everybody's blocks are loaded).

    | writer  | its blocks are                        | next state                               |
    |---------|---------------------------------------|------------------------------------------|
    | new     | not loaded, but computed and compared | equal or wrong, by the first comparison  |
    | equal   | loaded                                | due, after 1, 3, 7, ... further loads    |
    | due     | loaded, but by one load, which is     | equal or wrong                           |
    |         | computed and compared                 |                                          |
    | wrong   | not loaded, but removed, if another   | (it stays, until `reset`)                |
    |         | one was equal                         |                                          |

    A writer that is not in the table is new.
    """

    def __init__(self, loads_per_check: int) -> None:
        self._loads_per_check = loads_per_check
        self._known: OrderedDict[bytes, _Findings] = OrderedDict()
        self._trust: Trust | None = None
        self.wrong: set[bytes] = set()
        #: Why no blocks can be compared: then everybody's are loaded.
        self.problem = ""

    @property
    def trust(self) -> Trust:
        """Whose blocks are loaded."""
        if not self._loads_per_check or self.problem:
            return Trust(None)
        if self._trust is None:
            good = frozenset(self._known.keys() - self.wrong)
            # Who equals nobody may itself be wrong, and removes nothing.
            self._trust = Trust(good, frozenset(self.wrong if good else ()))
        return self._trust

    @property
    def due(self) -> frozenset[bytes]:
        """Writers that the next load is to compare."""
        return frozenset(
            writer
            for writer, one in self._known.items()
            if writer not in self.wrong and one.loads + 1 >= one.interval
        )

    @property
    def odd(self) -> bool:
        """Several others compute other KV, and none computes what this engine does: it shares
        nothing any more."""
        return len(self.wrong) >= _ODD and len(self.wrong) == len(self._known)

    def on_load(self, writers: Iterable[BlockWriter]) -> None:
        """A load has brought blocks of these."""
        for writer in writers:
            if known := self._known.get(writer.id):
                known.loads += 1
                self._known.move_to_end(writer.id)

    def on_equal(self, writers: Iterable[bytes]) -> None:
        """Blocks of these are what this engine computes."""
        for writer in writers:
            known = self._of(writer)
            known.loads, known.interval = 0, min(2 * known.interval, self._loads_per_check)

    def on_wrong(self, writer: BlockWriter) -> bool:
        """A block of this one is not. True if its blocks were loaded until now."""
        if writer == UNKNOWN:
            return False
        trusted = self._of(writer.id).interval > 1 and writer.id not in self.wrong
        self.wrong.add(writer.id)
        self._trust = None
        return trusted

    def reset(self) -> None:
        """This engine computes other KV from now on."""
        self._known.clear()
        self.wrong.clear()
        self._trust = None

    def _of(self, writer: bytes) -> _Findings:
        known = self._known.get(writer)
        if known is None:
            known = self._known[writer] = _Findings()
            self._trust = None
            if len(self._known) > WRITERS_MAX:
                self.wrong.discard(self._known.popitem(last=False)[0])
        self._known.move_to_end(writer)
        return known
